# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The report as a page: one HTML file, inline SVG, no script, nothing to fetch."""

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loopergy.distill.pictures import draw_decoding, draw_losses, draw_plan, draw_quality, to_svg

if TYPE_CHECKING:
    from loopergy.distill.report import Report

_PLAN = (
    "A physical layer is used in every loop, so it keeps or loses full attention in all of them. Bars: how much the "
    "KL to the teacher falls when this layer alone gets its attention back."
)
_TRAINING = (
    "Align: every new mixer imitates the attention it replaces. Distil: the student imitates the teacher's next-token "
    "distribution. Extend: plain language modelling on longer rows."
)
_DECODING = (
    "One sequence. A slot of full or sparse attention stores keys and values of every token; one of a mixer with a "
    "recurrent state, such as Gated DeltaNet, stores one matrix a head, whatever the length."
)
_RULES = (
    "body{margin:0;background:#f4f6f9;color:#1f2a37;"
    "font:16px/1.55 system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}",
    "main{max-width:960px;margin:0 auto;padding:40px 20px 80px}",
    "h1{font-size:30px;line-height:1.2;margin:0 0 20px}",
    "h2{font-size:19px;margin:0 0 4px}",
    "section,.facts div{background:#fff;border-radius:14px;box-shadow:0 1px 3px rgba(31,42,55,.08)}",
    "section{padding:22px 26px;margin:18px 0}",
    "section>p{color:#5b6675;margin:0 0 14px;font-size:14.5px}",
    "svg{max-width:100%;height:auto;display:block;margin:auto}",
    ".facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px}",
    ".facts div{padding:14px 18px}",
    ".facts b{display:block;font-size:23px;line-height:1.25}",
    ".facts span{color:#5b6675;font-size:13px}",
    ".facts .lead b{color:#c8621b}",
    "table{border-collapse:collapse;width:100%;font-size:14px;margin-top:14px}",
    "th,td{text-align:left;padding:5px 10px;border-bottom:1px solid #edf1f5}",
    "th{color:#5b6675;font-weight:600}",
    ".sample{margin:0 0 18px}",
    ".sample h3{font-size:14px;margin:0 0 6px;color:#5b6675}",
    ".sample dl{display:grid;grid-template-columns:90px 1fr;gap:4px 12px;margin:0;font-size:14px}",
    ".sample dt{font-weight:600}",
    ".sample dd{margin:0;white-space:pre-wrap;font:13px/1.5 ui-monospace,Menlo,Consolas,monospace}",
)


def render(report: "Report") -> str:
    """Return the page of a report; parts that were not measured are left out."""
    parts = [_facts(report)]
    kept, layers = report.student.get("kept_layers"), report.teacher.get("layers")
    if kept is not None and layers:
        chosen = report.selection
        scores = {"scores": chosen.scores, "meaning": chosen.meaning} if chosen else {}
        mixers = report.student.get("mixers", ())
        plan = draw_plan(kept, layers, report.teacher.get("loops", 1), mixers=mixers, **scores)
        parts.append(_section("Which layers keep full attention", to_svg(plan), _PLAN))
    if report.heldout_kl:
        text = f"On {report.heldout_tokens:,} tokens of documents that were in no training data of the student."
        quality = draw_quality(report.heldout_kl, report.heldout_perplexity)
        parts.append(_section("How close the student comes", to_svg(quality), text))
    if any(report.losses.values()):
        curves = to_svg(draw_losses(report.losses))
        parts.append(_section("Training", curves + _table(report.stages), _TRAINING))
    if report.decoding:
        parts.append(_section("What it costs to decode", to_svg(draw_decoding(report.decoding)), _DECODING))
    if report.samples:
        parts.append(_section("What it writes", _samples(report.samples), "Greedy decoding, same prompts."))
    if report.notes:
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in report.notes)
        parts.append(_section("Notes", f"<ul>{notes}</ul>", ""))
    title, rules = html.escape(report.title), "\n".join(_RULES)
    head = (
        f"<!doctype html>\n<html lang=en><head><meta charset=utf-8><title>{title}</title><style>{rules}</style></head>"
    )
    return f"{head}\n<body><main><h1>{title}</h1>{''.join(parts)}</main></body></html>\n"


def _section(title: str, body: str, text: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2><p>{html.escape(text)}</p>{body}</section>\n"


def _facts(report: "Report") -> str:
    """Return the row of numbers at the top."""
    facts: list[tuple[str, str]] = []
    kl, perplexity = report.heldout_kl, report.heldout_perplexity
    if "converted" in kl and "distilled" in kl:
        facts.append((f"{kl['converted'] / max(kl['distilled'], 1e-9):.1f}\u00d7", "less KL after distillation"))
    last = next(reversed(kl), None)
    if last and "teacher" in perplexity:
        facts.append((f"{perplexity[last]:.1f}", f"perplexity (teacher {perplexity['teacher']:.1f})"))
    kept, layers = report.student.get("kept_layers"), report.teacher.get("layers")
    if kept is not None and layers:
        loops = report.teacher.get("loops", 1)
        facts.append((f"{len(kept)} of {layers}", f"layers keep attention, in {loops} loop{'s' * (loops > 1)}"))
    longest = max((row["context"] for row in report.decoding), default=0)
    held = {row["model"]: row["cache_bytes"] for row in report.decoding if row["context"] == longest}
    if "teacher" in held and "student" in held:
        share = 100 * held["student"] / held["teacher"]
        facts.append((f"{share:.0f} %", f"of the teacher's cache at {longest:,} tokens"))
    if report.seconds:
        facts.append((f"{report.seconds / 60:.1f} min", f"and {report.peak_memory_bytes / 2**30:.1f} GiB, all stages"))
    cells = "".join(
        f'<div class="{css}"><b>{html.escape(value)}</b><span>{html.escape(text)}</span></div>'
        for (value, text), css in zip(facts, ["lead"] + ["plain"] * len(facts), strict=False)
    )
    return f'<div class="facts">{cells}</div>'


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)

    def cell(value: Any) -> str:
        text = f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
        return f"<td>{html.escape(text)}</td>"

    body = "".join("<tr>" + "".join(cell(row.get(column, "")) for column in columns) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _samples(samples: Sequence[Mapping[str, str]]) -> str:
    blocks = []
    for sample in samples:
        lines = "".join(
            f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>"
            for name, text in sample.items()
            if name != "prompt"
        )
        blocks.append(f'<div class="sample"><h3>{html.escape(sample["prompt"])}</h3><dl>{lines}</dl></div>')
    return "".join(blocks)
