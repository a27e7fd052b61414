# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The report as a page: one HTML file from `report.html.j2`, inline SVG, no script, nothing to fetch."""

from importlib.resources import files
from typing import TYPE_CHECKING, Any

from loopergy.distill.pictures import draw_decoding, draw_losses, draw_plan, draw_quality, to_svg

if TYPE_CHECKING:
    from loopergy.distill.report import Report


def render(report: "Report") -> str:
    """Return the page of a report; parts that were not measured are left out."""
    import jinja2  # comes with torch

    environment = jinja2.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = _cell
    template = environment.from_string((files("loopergy.distill") / "report.html.j2").read_text(encoding="utf-8"))
    return template.render(
        report=report,
        facts=_facts(report),
        pictures=_pictures(report),
        columns=list(dict.fromkeys(key for row in report.stages for key in row)),
    )


def _pictures(report: "Report") -> dict[str, Any]:
    """Return those of `plan`, `quality`, `losses` and `decoding` that were measured, as SVG; None for the others."""
    from markupsafe import Markup  # comes with jinja2

    figures = dict.fromkeys(("plan", "quality", "losses", "decoding"))
    kept, layers = report.student.get("kept_layers"), report.teacher.get("layers")
    if kept is not None and layers:
        chosen = report.selection
        scores = {"scores": chosen.scores, "meaning": chosen.meaning} if chosen else {}
        mixers = report.student.get("mixers", ())
        figures["plan"] = draw_plan(kept, layers, report.teacher.get("loops", 1), mixers=mixers, **scores)
    if report.heldout_kl:
        figures["quality"] = draw_quality(report.heldout_kl, report.heldout_perplexity)
    if any(report.losses.values()):
        figures["losses"] = draw_losses(report.losses)
    if report.decoding:
        figures["decoding"] = draw_decoding(report.decoding)
    return {name: None if figure is None else Markup(to_svg(figure)) for name, figure in figures.items()}


def _facts(report: "Report") -> list[tuple[str, str]]:
    """Return the row of numbers at the top, each with what it is."""
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
        memory = f"and {report.peak_memory_bytes / 2**30:.1f} GiB, " if report.peak_memory_bytes else ""
        facts.append((f"{report.seconds / 60:.1f} min", f"{memory}all stages"))
    return facts


def _cell(value: Any) -> str:
    """Write a value of a table: whole numbers with separators, others with one digit."""
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
