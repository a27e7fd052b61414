# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import json
from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console

from loopergy.conversion import ConversionReport, convert
from loopergy.conversion.report import number_ranges


def test_every_tensor_of_the_student_has_one_record_with_its_shape_and_dtype(make_llama):
    result = convert(make_llama(), [3], dtype=torch.bfloat16)
    state = result.model.state_dict()
    assert {record.name for record in result.report.tensors} == state.keys()
    for record in result.report.tensors:
        assert record.shape == list(state[record.name].shape)
        assert f"torch.{record.dtype}" == str(state[record.name].dtype)
        assert (record.source is None) == (record.action == "fresh")


def test_every_tensor_of_the_teacher_is_a_source(make_ouro):
    """Guards H1: nothing of the teacher is lost."""
    teacher = make_ouro()
    report = convert(teacher, [1]).report
    assert {record.source for record in report.tensors if record.source} == teacher.state_dict().keys()


def test_actions_say_what_happened(make_llama):
    records = {record.name: record for record in convert(make_llama(), [0]).report.tensors}
    assert records["model.layers.0.self_attn.k_proj.weight"].action == "copied"
    assert records["model.layers.1.self_attn.q_proj.weight"].action == "copied"
    assert records["model.layers.1.self_attn.k_proj.weight"].action == "transformed"
    assert "repeated 2 times" in records["model.layers.1.self_attn.k_proj.weight"].how
    assert records["model.layers.1.self_attn.g_proj.weight"].how == "normal(0, 0.2)"


def test_the_report_survives_json(make_ouro, tmp_path):
    report = convert(make_ouro(), 1).report
    report.to_json(tmp_path / "conversion_report.json")
    assert ConversionReport.from_json(tmp_path) == report
    assert ConversionReport.from_json(tmp_path / "conversion_report.json") == report


def test_an_unknown_format_is_refused(make_ouro, tmp_path):
    data = json.loads(convert(make_ouro(), 1).report.to_json())
    (tmp_path / "r.json").write_text(json.dumps({**data, "format": 2}))
    with pytest.raises(ValueError, match="format 2"):
        ConversionReport.from_json(tmp_path / "r.json")


def test_the_check_finds_a_record_too_many_too_few_and_a_wrong_shape(make_ouro):
    result = convert(make_ouro(), 1)
    report, state = result.report, result.model.state_dict()
    name = report.tensors[0].name
    report.check(state)
    for tensors in (
        report.tensors[1:],
        [*report.tensors, report.tensors[0]],
        [replace(report.tensors[0], shape=[1]), *report.tensors[1:]],
    ):
        with pytest.raises(ValueError, match=name):
            replace(report, tensors=tensors).check(state)


def test_parameters_are_counted_once_when_the_head_is_tied(make_llama):
    for tied in (False, True):
        result = convert(make_llama(tie_word_embeddings=tied), 2)
        assert result.report.num_parameters == result.model.num_parameters()
        assert sum(n["parameters"] for n in result.report.counts().values()) == result.model.num_parameters()


def test_zero_tensors_of_the_teacher_are_listed(make_llama):
    teacher = make_llama(attention_bias=True)
    with torch.no_grad():
        teacher.model.layers[0].self_attn.q_proj.bias.zero_()
    report = convert(teacher, "all").report
    assert report.all_zero == ["model.layers.0.self_attn.q_proj.bias"]
    assert "model.layers.0.self_attn.q_proj.bias" in report.summary()


def test_table_and_summary_name_tensors_layers_and_counts(make_ouro):
    report = convert(make_ouro(num_hidden_layers=4), [1]).report
    console = Console(width=160, record=True, file=StringIO())
    console.print(report.table())
    text = console.export_text()
    row = next(line for line in text.splitlines() if "A_log" in line)
    assert "0, 2-3" in row
    assert "log of uniform(0, 16)" in row
    assert all(record.name.removesuffix(".weight").split(".")[-1] in text for record in report.tensors)
    assert "full attention kept in 1: 1; gdn in the other 3" in report.summary()
    assert "4 layers x 3 loops" in report.summary()


def test_ranges_of_layers_are_joined():
    assert number_ranges([5, 0, 1, 2]) == "0-2, 5"
    assert number_ranges([]) == ""
