# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The pictures of the distillation report. matplotlib is imported when a picture is drawn, never before."""

import functools
import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from loopergy.distill.select import Selection

_Drawn = TypeVar("_Drawn")

INK, MUTED, PAPER = "#1f2a37", "#8a94a3", "#ffffff"
FULL_COLOUR, LINEAR_COLOUR = "#e8833a", "#dbe4ee"
# The mixers of layers that are not kept, in the order in which they occur: a name and a colour each.
OTHER_COLOURS = (("grey", LINEAR_COLOUR), ("blue", "#7fb0d6"), ("green", "#8cc7a5"), ("violet", "#b9a3d8"))
MIXER_NAMES = {
    "window": "windowed attention",
    "gdn": "Gated DeltaNet",
    "kda": "Kimi Delta Attention",
    "deltanet": "DeltaNet",
    "mamba2": "Mamba2",
    "hgrn2": "HGRN2",
    "retnet": "RetNet",
    "gla": "Gated Linear Attention",
    "la": "linear attention",
    "nsa": "Native Sparse Attention",
    "dsa": "DeepSeek Sparse Attention",
}
MODEL_COLOURS = {
    "teacher": "#1f2a37",
    "converted": "#b8c4d2",
    "calibrated": "#a78bca",
    "aligned": "#7fb0d6",
    "distilled": "#e8833a",
    "extended": "#3d9970",
    "student": "#e8833a",
}
_STYLE: dict[Any, Any] = {
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titleweight": "bold",
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "grid.color": "#edf1f5",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "font.size": 9.5,
    "svg.fonttype": "none",
    "font.family": "sans-serif",
}


def new_figure(rows: int = 1, columns: int = 1, squeeze: bool = True, **options: Any) -> tuple["Figure", Any]:
    """Make a figure outside pyplot's state."""
    from matplotlib.figure import Figure

    figure = Figure(**options)
    return figure, figure.subplots(rows, columns, squeeze=squeeze)


def styled(draw: Callable[..., _Drawn]) -> Callable[..., _Drawn]:
    """Draw under the report's style, without changing matplotlib's settings for the rest of the process."""

    @functools.wraps(draw)
    def drawn(*args: Any, **kwargs: Any) -> _Drawn:
        import matplotlib

        with matplotlib.rc_context(_STYLE):
            return draw(*args, **kwargs)

    return drawn


def to_svg(figure: "Figure") -> str:
    """Return a figure as an `<svg>` element that stands alone in HTML, the same bytes for the same figure."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": "loopergy"}):
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _colour_mixers(kept: Sequence[int], num_layers: int, mixers: Sequence[str]) -> tuple[list[str], str]:
    """Return the colour of each layer, and what the colours mean in words."""
    names = list(mixers) or ["other mixers"] * num_layers
    found = dict.fromkeys(name for layer, name in enumerate(names) if layer not in kept)
    # Mixers beyond the palette share its last colour.
    looks = {name: OTHER_COLOURS[min(index, len(OTHER_COLOURS) - 1)] for index, name in enumerate(found)}
    colours = [FULL_COLOUR if layer in kept else looks[name][1] for layer, name in enumerate(names)]
    words: dict[str, list[str]] = {"orange": ["full attention"]}
    for name, (word, _) in looks.items():
        words.setdefault(word, []).append(MIXER_NAMES.get(name, name))
    return colours, ",  ".join(f"{word}: {', '.join(alike)}" for word, alike in words.items())


@styled
def draw_plan(
    kept: Sequence[int],
    num_layers: int,
    loops: int,
    scores: Mapping[int, float] | None = None,
    mixers: Sequence[str] = (),
    meaning: str = "KL saved",
) -> "Figure":
    """Draw the grid of loops and layers, kept layers lit, with the importance of each layer as a bar above.

    Args:
        kept (sequence of `int`): Physical layers with full attention.
        num_layers (`int`): Physical layers.
        loops (`int`): Loops; one row each.
        scores (mapping, *optional*): Importance of each layer.
        mixers (sequence of `str`, *optional*): Mixer of each layer, for the colours of those that are not kept.
        meaning (`str`, defaults to `"KL saved"`): What the importance is.

    Returns:
        `Figure`: The picture.
    """
    from matplotlib.patches import FancyBboxPatch

    width = max(6.0, min(11.0, 0.36 * num_layers + 1.6))
    heights = [1.5 if scores else 0.01, 0.34 * loops + 0.3]
    figure, (bars, grid) = _two_rows(width, heights)
    colours, legend = _colour_mixers(kept, num_layers, mixers)
    if scores:
        shades = [FULL_COLOUR if layer in kept else "#b8c4d2" for layer in range(num_layers)]
        bars.bar(range(num_layers), [scores.get(layer, 0.0) for layer in range(num_layers)], color=shades, width=0.78)
        bars.axhline(0, color=MUTED, linewidth=0.8)
        bars.set_ylabel(meaning)
        bars.tick_params(axis="x", length=0, labelbottom=False)
        bars.spines["bottom"].set_visible(False)
    else:
        bars.set_visible(False)
    for loop in range(loops):
        for layer in range(num_layers):
            grid.add_patch(
                FancyBboxPatch(
                    (layer - 0.39, loop - 0.37),
                    0.78,
                    0.74,
                    boxstyle="round,pad=0,rounding_size=0.12",
                    facecolor=colours[layer],
                    edgecolor="none",
                )
            )
    grid.set_xlim(-0.6, num_layers - 0.4)
    grid.set_ylim(loops - 0.45, -0.55)
    grid.set_yticks(range(loops), [f"loop {loop + 1}" for loop in range(loops)])
    step = 1 if num_layers <= 32 else 2
    grid.set_xticks(range(0, num_layers, step))
    grid.set_xlabel(f"physical layer    ( {legend} )")
    grid.tick_params(length=0)
    for side in ("left", "bottom"):
        grid.spines[side].set_visible(False)
    return figure


def _two_rows(width: float, heights: Sequence[float]) -> tuple["Figure", tuple[Any, Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, sum(heights) + 0.7))
    grid = figure.add_gridspec(2, 1, height_ratios=list(heights), hspace=0.08)
    lower = figure.add_subplot(grid[1])
    return figure, (figure.add_subplot(grid[0], sharex=lower), lower)


def draw_selection(selection: "Selection") -> "Figure":
    """Draw a selection: its plan with one row a loop, and the scores where the strategy has them."""
    loops, scores = max(1, len(selection.baseline_kl)), selection.scores
    return draw_plan(selection.kept_layers, selection.num_layers, loops, scores, selection.mixers, selection.meaning)


@styled
def draw_losses(losses: Mapping[str, Sequence[tuple[float, float]]]) -> "Figure":
    """Draw the loss of every stage against the tokens it has seen.

    Args:
        losses (mapping): Stage to a list of (tokens, loss).

    Returns:
        `Figure`: One panel a stage.
    """
    names = [name for name, points in losses.items() if points]
    figure, axes = new_figure(1, max(1, len(names)), figsize=(3.4 * max(1, len(names)), 2.6))
    titles = {
        "pretrain": "pre-training (CE)",
        "gate": "exit gate (BCE)",
        "align": "align (MSE)",
        "distill": "distil (KL)",
        "extend": "extend (CE)",
    }
    for axis, name in zip([axes] if len(names) < 2 else list(axes), names, strict=False):
        tokens, values = zip(*losses[name], strict=True)
        axis.plot(tokens, values, color=FULL_COLOUR, linewidth=1.8, marker="o" if len(tokens) < 4 else None)
        axis.set_title(titles.get(name, name))
        axis.set_xlabel("tokens")
        axis.grid(True, axis="y")
        axis.set_ylim(bottom=0)
        axis.xaxis.set_major_locator(_few_ticks())
        axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value >= 1000 else f"{value:g}")
    figure.subplots_adjust(wspace=0.28)
    return figure


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _few_ticks() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=4)


@styled
def draw_quality(kl: Mapping[str, float], perplexity: Mapping[str, float]) -> "Figure":
    """Draw held-out KL and perplexity of every model as bars with their numbers.

    Args:
        kl (mapping): Model to KL.
        perplexity (mapping): Model to perplexity, the teacher's too.

    Returns:
        `Figure`: Two panels.
    """
    figure, axes = new_figure(1, 2, figsize=(9.2, 2.9))
    panels = (("KL to the teacher, held-out text (nats)", kl), ("Perplexity, held-out text (log scale)", perplexity))
    for axis, (title, values) in zip(axes, panels, strict=True):
        names = list(values)
        colours = [MODEL_COLOURS.get(name, FULL_COLOUR) for name in names]
        bars = axis.barh(range(len(names)), [values[name] for name in names], color=colours, height=0.68)
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.set_title(title)
        axis.bar_label(bars, labels=[f" {_short(values[name])}" for name in names], padding=2)
        axis.tick_params(axis="y", length=0)
        axis.grid(True, axis="x")
        axis.margins(x=0.16)
    low = min(perplexity.values(), default=1.0)
    axes[1].set_xscale("log")
    axes[1].set_xlim(left=max(1.0, low / 2))
    figure.subplots_adjust(wspace=0.3)
    return figure


@styled
def draw_decoding(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Draw cache bytes and decoding speed against the context length, one line a model.

    Args:
        rows (sequence of mappings): `model`, `context`, `cache_bytes`, `tokens_per_second`.

    Returns:
        `Figure`: Two panels.
    """
    figure, axes = new_figure(1, 2, figsize=(9.2, 2.9))
    models = list(dict.fromkeys(row["model"] for row in rows))
    for model in models:
        own = [row for row in rows if row["model"] == model]
        contexts = [row["context"] for row in own]
        style = {"color": MODEL_COLOURS.get(model, FULL_COLOUR), "marker": "o", "markersize": 4, "linewidth": 1.8}
        axes[0].plot(contexts, [row["cache_bytes"] / 2**20 for row in own], label=model, **style)
        axes[1].plot(contexts, [row["tokens_per_second"] for row in own], label=model, **style)
    axes[0].set_title("Cache (MiB)")
    axes[1].set_title("Decoding speed (tokens / s)")
    for axis in axes:
        axis.set_xscale("log", base=2)
        ticks = sorted({row["context"] for row in rows})
        axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axis.set_xlabel("context (tokens)")
        axis.set_ylim(bottom=0)
        axis.grid(True)
    if models:
        axes[0].legend(frameon=False)
    figure.subplots_adjust(wspace=0.22)
    return figure
