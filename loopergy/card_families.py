# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""What a model card says about a family, whatever was measured: what it is, its limits, its paper."""

from dataclasses import dataclass
from typing import Any

from loopergy.configuration.linear_fields import LINEAR_MIXERS

_NRGPT_PAPER = (
    "NRGPT: An Energy-based Alternative for GPT",
    "Dehmamy, Nima and Hoover, Benjamin and Saha, Bishwajit and Kozachkov, Leo and Slotine, Jean-Jacques and "
    "Krotov, Dmitry",
    "2512.16762",
    2025,
)


@dataclass(frozen=True)
class CardFamily:
    """Describe one model type.

    Args:
        name (`str`): As its paper calls it.
        summary (`str`): One sentence.
        paper (`tuple`): Title, authors in BibTeX's form, arXiv number, year.
        tags (`tuple[str, ...]`): For the Hub's search.
        steps (`str`, *optional*): Argument that sets loops or steps at run time, if there is one.
    """

    name: str
    summary: str
    paper: tuple[str, str, str, int]
    tags: tuple[str, ...] = ()
    steps: str | None = None

    @property
    def arxiv(self) -> str:
        """Return the arXiv number of the paper."""
        return self.paper[2]

    @property
    def bibtex(self) -> str:
        """Return the paper's BibTeX entry."""
        title, authors, number, year = self.paper
        key = f"{authors.partition(',')[0].lower()}{year}{self.name.lower().replace('-', '')}"
        fields = {
            "title": title,
            "author": authors,
            "year": year,
            "eprint": number,
            "archivePrefix": "arXiv",
            "url": f"https://arxiv.org/abs/{number}",
        }
        width = max(map(len, fields))
        lines = [f"  {name:<{width}} = {{{value}}}," for name, value in fields.items()]
        return "\n".join([f"@misc{{{key},", *lines, "}"])


CARD_FAMILIES = {
    "ouro": CardFamily(
        "Ouro",
        "A looped language model: one stack of layers, applied several times with the same weights, with a gate that "
        "can end the loops early.",
        (
            "Scaling Latent Reasoning via Looped Language Models",
            "Zhu, Rui-Jie and others",
            "2510.25741",
            2025,
        ),
        ("looped", "recurrent-depth"),
        "num_loops",
    ),
    "lt2": CardFamily(
        "LT2",
        "A looped language model whose layers mix tokens in different ways: most by a recurrence or a sparse pattern "
        "that stays cheap on long texts, some by full attention.",
        (
            "LT2: Linear-Time Looped Transformers",
            "Deng, Chunyuan and Zhang, Yizhe and Zhu, Rui-Jie and Xu, Yuanyuan and Liu, Jiarui and "
            "Ng, T. S. Eugene and Chen, Hanjie",
            "2605.20670",
            2026,
        ),
        ("looped", "hybrid", "linear-attention"),
        "num_loops",
    ),
    "cem_llama": CardFamily(
        "CEM-Llama",
        "A Llama whose layers are steps down an energy: the gradient ties value to key, output to query, and the two "
        "halves of the MLP.",
        (
            "Revisiting Transformer Layer Parameterization Through Causal Energy Minimization",
            "Xu, Jin and Couturier, Camille and Rühle, Victor and Rajmohan, Saravan and Hensman, James",
            "2605.07588",
            2026,
        ),
        ("energy-based",),
        "num_steps",
    ),
    "nrgpt": CardFamily(
        "NRGPT",
        "An energy-based language model: one block, applied several times, each time a step down an energy of every "
        "token.",
        _NRGPT_PAPER,
        ("energy-based", "recurrent-depth"),
        "num_steps",
    ),
    "gpt_baseline": CardFamily("GPT", "A baseline of the NRGPT paper: a GPT without energies.", _NRGPT_PAPER),
}


def family_limits(config: Any) -> list[str]:
    """Return what a model of this config cannot do, or does at a price, in one or two sentences each."""
    limits = []
    kind = config.model_type
    recurrent = sorted(set(getattr(config, "layer_mixers", None) or ()) & set(LINEAR_MIXERS))
    if recurrent:
        limits += [
            f"A recurrent state ({', '.join(recurrent)}) cannot be cut back: assisted and prompt-lookup decoding are "
            "refused. So is continuous batching, which needs attention in all slots, and a quantised cache.",
        ]
    if kind in ("ouro", "lt2") and config.num_loops > 1:
        if config.kv_sharing == "none":
            limits.append(f"Every loop has cache slots of its own, {config.num_loops} for each layer.")
        limits += [
            f"More than the {config.num_loops} loops of the config can be run, and usually predict worse.",
        ]
    if kind == "cem_llama":
        limits += [
            "The attention energy has no minimum: more steps than trained go further down and usually predict worse.",
            "Changing `num_steps` between prompt and decoding is allowed, and equals no single setting.",
        ]
    if kind == "nrgpt":
        limits += [
            "The energy is guaranteed to go down under narrow conditions only; `loopergy.trace` says which hold here.",
            "More steps than trained lower the energy, and usually predict worse.",
        ]
    if kind in ("nrgpt", "gpt_baseline"):
        limits += [
            f"Positions are learned and end at {config.max_position_embeddings:,} tokens. Beyond that, generate with "
            "`recompute_window=True`, at the price of a full forward a token."
        ]
    served = "runs in `transformers`; other serving engines "
    served += "know Ouro by its own format." if kind == "ouro" else "do not know it."
    return [*limits, f"It {served}"]
