# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The report: numbers against full logits, bytes against the formula, a page that stands alone."""

import json
import math
import re

import pytest
import torch

from loopergy.conversion import convert
from loopergy.distill.losses import divergence
from loopergy.distill.report import HeldOut, Report, evaluate_heldout, gap_closed, loss_curve, measure_decoding
from loopergy.distill.select import Selection


def test_held_out_numbers_equal_those_of_full_logits(teacher, random_batch):
    student = convert(teacher, keep_layers=[1]).model
    batches = [random_batch(seed=1, length=8), random_batch(seed=2, length=13)]
    kl, own, reference, tokens = 0.0, 0.0, 0.0, 0
    with torch.no_grad():
        for batch in batches:
            s, t = (model(**batch).logits[:, :-1].flatten(0, 1) for model in (student, teacher))
            labels = batch["input_ids"][:, 1:].flatten()
            kl += divergence(s, t).sum().item()
            own += torch.nn.functional.cross_entropy(s, labels, reduction="sum").item()
            reference += torch.nn.functional.cross_entropy(t, labels, reduction="sum").item()
            tokens += labels.numel()
    result = evaluate_heldout(student, teacher, batches)
    assert result["kl"] == pytest.approx(kl / tokens, rel=1e-9)
    assert result["perplexity"] == pytest.approx(math.exp(own / tokens), rel=1e-9)
    assert result["teacher_perplexity"] == pytest.approx(math.exp(reference / tokens), rel=1e-9)
    assert result["tokens"] == tokens
    assert evaluate_heldout(student, teacher, HeldOut.of(teacher, batches)) == result
    with pytest.raises(ValueError, match="no position with a target"):
        HeldOut.of(teacher, [{**batches[0], "labels": torch.full((2, 8), -100)}])


def test_cache_bytes_follow_the_formula_and_attention_alone_grows(ouro):
    """Slots of T loops: 2 x H x D numbers a token where attention is kept, H x D x D where it is not."""
    teacher = ouro.float()
    student = convert(teacher, keep_layers=[1]).model
    rows = measure_decoding(teacher, "teacher", (8, 40), steps=2) + measure_decoding(
        student, "student", (8, 40), steps=2
    )
    token, state = 2 * 2 * 16 * 4, 2 * 16 * 16 * 4
    expected = [2 * 3 * token * 8, 2 * 3 * token * 40, 2 * (token * 8 + 2 * state), 2 * (token * 40 + 2 * state)]
    assert [row["cache_bytes"] for row in rows] == expected
    assert [row["context"] for row in rows] == [8, 40, 8, 40]
    assert all(row["tokens_per_second"] > 0 for row in rows)


def full_report():
    report = Report("A <title>", teacher={"layers": 3, "loops": 2}, student={"kept_layers": [1]})
    for stage, kl in (("converted", 4.0), ("aligned", 2.0), ("distilled", 0.5), ("extended", 0.6)):
        values = {"kl": kl, "perplexity": 10 * kl, "teacher_perplexity": 9.0, "tokens": 100}
        report.add_heldout(stage, values)
    report.selection = Selection([1], "oneshot", 3, [1, 2, 0], {0: 0.0, 1: 0.5, 2: 0.1}, {}, [2.0, 2.0])
    report.losses = {"align": [(1.0, 2.0), (2.0, 1.0)], "distill": [(1.0, 2.0)], "extend": []}
    report.decoding = [
        {"model": name, "context": n, "cache_bytes": n * share, "tokens_per_second": 5.0}
        for name, share in (("teacher", 100), ("student", 25))
        for n in (256, 1024)
    ]
    report.samples = [{"prompt": "Say <b>", "teacher": "t & t", "student": "s"}]
    report.stages = [{"stage": "align", "tokens": 10, "seconds": 1.5}]
    report.notes = ["a note"]
    return report


def test_the_json_has_the_keys_that_others_read(tmp_path):
    report = full_report()
    pytest.importorskip("matplotlib")
    files = report.save(tmp_path / "new")
    values = json.loads(files[0].read_text())
    assert values["heldout_kl"] == {"converted": 4.0, "aligned": 2.0, "distilled": 0.5, "extended": 0.6}
    assert set(values["heldout_perplexity"]) == {"teacher", "converted", "aligned", "distilled", "extended"}
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["report.html", "report.json"]


def test_the_page_stands_alone_escapes_what_models_write_and_shows_every_part():
    pytest.importorskip("matplotlib")
    page = full_report().to_html()
    assert page.count("<svg") == 4
    outside = [url for url in re.findall(r"""(?:src|href)=["']?([^"'> ]+)""", page) if not url.startswith("#")]
    assert outside == []
    assert "<script" not in page
    for text in ("A &lt;title&gt;", "Say &lt;b&gt;", "t &amp; t", "8.0\u00d7", "25 %", "a note", "1 of 3"):
        assert text in page
    assert full_report().to_html() == page


def test_the_plan_names_the_mixers_of_the_student_in_their_colours():
    pytest.importorskip("matplotlib")
    report = full_report()
    assert "orange: full attention,  grey: other mixers" in report.to_html()
    report.student["mixers"] = ["gdn", "full", "dsa"]
    page = report.to_html()
    assert "orange: full attention,  grey: Gated DeltaNet,  blue: DeepSeek Sparse Attention" in page


def test_the_page_tells_memory_only_where_it_was_measured():
    pytest.importorskip("matplotlib")
    report = Report("timed", seconds=90.0)
    assert "<b>1.5 min</b><span>all stages</span>" in report.to_html()
    report.peak_memory_bytes = 2**31
    assert "<b>1.5 min</b><span>and 2.0 GiB, all stages</span>" in report.to_html()


def test_a_report_with_nothing_measured_is_a_page_too():
    pytest.importorskip("matplotlib")
    assert "<h1>empty</h1>" in Report("empty").to_html()


def test_curves_are_read_from_a_trainers_history():
    history = [{"loss": 2.0, "num_input_tokens_seen": 10}, {"eval_loss": 1.0}, {"loss": 1.0, "step": 5}]
    assert loss_curve(history) == [(10.0, 2.0), (5.0, 1.0)]


def test_the_gap_is_counted_in_logarithms():
    assert gap_closed(1000.0, 1000.0, 10.0) == 0
    assert gap_closed(1000.0, 10.0, 10.0) == 1
    assert gap_closed(1000.0, 100.0, 10.0) == pytest.approx(0.5)
    assert gap_closed(100.0, 1000.0, 10.0) == pytest.approx(-1)
    assert math.isnan(gap_closed(10.0, 10.0, 10.0))
    assert math.isnan(gap_closed(9.9, 9.0, 10.0))
