# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Say for each mixer what it takes over from the attention that it replaces, and how the rest of it starts.

"Heads" means: k and v with each shared head repeated, so that all heads have their own (q and o need nothing).

| mixer      | from the teacher                                      | fresh                                         |
|------------|-------------------------------------------------------|-----------------------------------------------|
| `full`     | q, k, v, o                                            | -                                             |
| `window`   | q, k, v, o                                            | -                                             |
| `gdn`      | q, k, v, o by heads                                   | a, b, g projection, decay, norm, convolutions |
| `kda`      | q, k, v, o by heads                                   | b, f, g projection, decay, norm, convolutions |
| `deltanet` | q, k, v, o by heads                                   | b projection, norm, convolutions              |
| `mamba2`   | v by heads as x, and o; B and C, of which Mamba2 has  | z and step of the same projection, decay,     |
|            | one for all heads, are k and q averaged over heads    | norm, convolution                             |
| `hgrn2`    | q, v, o by heads; the forget gate is minus k, so that | norm                                          |
|            | the key, one minus its sigmoid, is sigmoid(k)         |                                               |
| `retnet`   | q, k, v, o by heads                                   | g projection, norm                            |
| `gla`      | q, k, v, o by heads                                   | gate of the decay, g projection, norm         |
| `la`       | q, k, v, o by heads                                   | feature maps (as the identity), norm          |
| `nsa`      | q, k, v, o, heads shared as in the teacher            | gate of the branches                          |
| `dsa`      | q, k, v, o through one latent (`shared_latents.py`)   | indexer                                       |

Fresh matrices are normal(0, `initializer_range`), their biases zero, norms one, decays as in pre-training;
convolutions start as the identity.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from loopergy.conversion.shared_latents import (
    SharedLatents,
    find_latents,
    latent_projection,
    output_projection,
    query_projection,
)
from loopergy.conversion.weight_rules import MapFacts, Rule, Transform


def repeat_heads(tensor: torch.Tensor, facts: MapFacts) -> torch.Tensor:
    """Give every query head its own copy of the key or value head that it shares.

    New head m is old head floor(m / g), as `transformers`' `repeat_kv` does to the activations.

    Args:
        tensor (`torch.Tensor` of shape `[kv_heads * head_dim, ...]`): Weight or bias of k_proj or v_proj.
        facts (`MapFacts`): Gives g = `num_key_value_groups` and `head_dim`.

    Returns:
        `torch.Tensor` of shape `[kv_heads * g * head_dim, ...]`.
    """
    heads = tensor.unflatten(0, (-1, facts.head_dim))
    return heads.repeat_interleave(facts.num_key_value_groups, dim=0).flatten(0, 1)


def mamba2_input(fresh: torch.Tensor, parts: Sequence[torch.Tensor], facts: MapFacts) -> torch.Tensor:
    """Write the teacher's projections into the rows x, B and C of Mamba2's; rows z and step stay as drawn.

    Args:
        fresh (`torch.Tensor` of shape `[2 H D + 2 D + H, hidden]`): A drawn projection, rows z, x, B, C, step.
        parts (sequence of `torch.Tensor`): Weights of the teacher's q, k and v projection.
        facts (`MapFacts`): Gives the head size D.

    Returns:
        `torch.Tensor`: Of the shape of `fresh` and the type of the teacher's.
    """
    q, k, v = parts
    values = repeat_heads(v, facts)
    key, query = (part.unflatten(0, (-1, facts.head_dim)).mean(dim=0) for part in (k, q))
    z, step = fresh[: len(values)], fresh[2 * len(values) + 2 * facts.head_dim :]
    return torch.cat((z.to(values), values, key, query, step.to(values)))


def _repeated(facts: MapFacts) -> str:
    return f"each key/value head repeated {facts.num_key_value_groups} times, head by head"


def _latents(k: torch.Tensor, v: torch.Tensor, facts: MapFacts) -> SharedLatents:
    return find_latents(k, v, facts.head_dim, facts.dsa_latent_dim)


TRANSFORMS: dict[str, Transform] = {
    "copy": Transform(lambda x, _: x[0], lambda x, _: x, lambda _: "the same tensor"),
    "tie": Transform(lambda x, _: x[0], lambda x, _: x, lambda _: "tied to model.embed_tokens.weight"),
    "repeat_heads": Transform(lambda x, f: repeat_heads(x[0], f), None, _repeated),
    "forget_gate": Transform(lambda x, f: -repeat_heads(x[0], f), None, lambda f: f"minus the tensor; {_repeated(f)}"),
    "mamba2_input": Transform(
        lambda x, f: mamba2_input(x[0], x[1:], f),
        None,
        lambda f: (
            f"rows x: v, {_repeated(f)}; rows B, C: k, q averaged over heads; rows z, step: "
            f"normal(0, {f.initializer_range:g})"
        ),
        on_fresh=True,
    ),
    "latent": Transform(
        lambda x, _: latent_projection(x[0]),
        None,
        lambda f: f"keys and values through {f.dsa_latent_dim} shared numbers, and one key head with positions",
        common=_latents,
    ),
    "latent_queries": Transform(
        lambda x, _: query_projection(x[0], x[1]),
        None,
        lambda _: "queries of the latent",
        common=_latents,
    ),
    "latent_output": Transform(
        lambda x, _: output_projection(x[0], x[1]),
        None,
        lambda _: "values from the latent",
        common=_latents,
    ),
}

# What fresh tensors hold, in words. The model's own `_init_weights` fills them, except those in `FIXED_STARTS`.
FRESH: dict[str, Callable[[MapFacts], str]] = {
    "normal": lambda f: f"normal(0, {f.initializer_range:g})",
    "decay": lambda _: "log of uniform(0, 16)",
    "decay_from_one": lambda _: "log of uniform(1, 16)",
    "time_step": lambda _: "inverse softplus of log-uniform(0.001, 0.1)",
    "ones": lambda _: "ones",
    "zeros": lambda _: "zeros",
    "identity": lambda _: "identity",
    "identity_conv": lambda _: "identity: last tap 1, earlier taps 0",
}


def _identity_conv(like: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(like)
    out[..., -1] = 1
    return out


FIXED_STARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "ones": torch.ones_like,
    "zeros": torch.zeros_like,
    "identity": lambda like: torch.eye(*like.shape, dtype=like.dtype),
    "identity_conv": _identity_conv,
}

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def with_bias(names: Iterable[str], bias: bool) -> Iterator[str]:
    """Name the weight of each projection, and its bias if there are biases."""
    for name in names:
        yield f"{name}.weight"
        if bias:
            yield f"{name}.bias"


def _attention(prefix: str, facts: MapFacts) -> Iterator[Rule]:
    for name in with_bias(_ATTENTION, facts.attention_bias):
        yield Rule(prefix + name, prefix + name)


def _by_heads(prefix: str, facts: MapFacts, renamed: dict[str, str] | None = None) -> Iterator[Rule]:
    """Take over q, k, v, o, the shared heads of k and v repeated.

    `renamed` maps the teacher's projection names to the student's, where these differ.
    """
    for name in with_bias(_ATTENTION, facts.attention_bias):
        projection, _, kind = name.partition(".")
        shared_head = name[0] in "kv" and facts.num_key_value_groups > 1
        target = f"{prefix}{(renamed or {}).get(projection, projection)}.{kind}"
        yield Rule(target, prefix + name, "repeat_heads" if shared_head else "copy")


def _fresh(prefix: str, **names: Iterable[str]) -> Iterator[Rule]:
    """Name the fresh tensors: each keyword is a key of `FRESH`, its value the tensors that start so."""
    for transform, listed in names.items():
        for name in listed:
            yield Rule(prefix + name, None, transform)


def _convolutions(mixer: str, prefix: str, facts: MapFacts) -> Iterator[Rule]:
    if mixer in facts.short_convs:
        yield from _fresh(prefix, identity_conv=[f"{name}_conv1d.weight" for name in "qkv"])


def _gdn(prefix: str, facts: MapFacts) -> Iterator[Rule]:
    yield from _by_heads(prefix, facts)
    gate = ["g_proj.weight"] if facts.gdn_use_gate else []
    yield from _fresh(prefix, normal=["a_proj.weight", "b_proj.weight", *gate])
    yield from _convolutions("gdn", prefix, facts)
    yield from _fresh(prefix, decay=["A_log"], time_step=["dt_bias"], ones=["o_norm.weight"])


def _kda(prefix: str, facts: MapFacts) -> Iterator[Rule]:
    yield from _by_heads(prefix, facts)
    low_rank = [f"{name}_proj.{part}.weight" for name in "fg" for part in (0, 1)]
    yield from _fresh(prefix, normal=["b_proj.weight", *low_rank], zeros=["g_proj.1.bias"])
    yield from _convolutions("kda", prefix, facts)
    yield from _fresh(prefix, decay_from_one=["A_log"], time_step=["dt_bias"], ones=["o_norm.weight"])


def _deltanet(prefix: str, facts: MapFacts) -> Iterator[Rule]:
    yield from _by_heads(prefix, facts)
    yield from _fresh(prefix, normal=["b_proj.weight"])
    yield from _convolutions("deltanet", prefix, facts)
    yield from _fresh(prefix, ones=["o_norm.weight"])


def _mamba2(prefix: str, facts: MapFacts) -> Iterator[Rule]:
    projections = tuple(f"{prefix}{name}_proj.weight" for name in "qkv")
    yield Rule(prefix + "in_proj.weight", projections, "mamba2_input")
    yield Rule(prefix + "out_proj.weight", prefix + "o_proj.weight")
    yield from _fresh(prefix, identity_conv=["conv1d.weight"], zeros=["conv1d.bias"])
    yield from _fresh(prefix, decay=["A_log"], time_step=["dt_bias"], ones=["D", "norm.weight"])


def _hgrn2(prefix: str, facts: MapFacts) -> Iterator[Rule]:
    for rule in _by_heads(prefix, facts, {"k_proj": "f_proj", "v_proj": "i_proj"}):
        forget = rule.target.startswith(prefix + "f_proj")
        yield Rule(rule.target, rule.source, "forget_gate") if forget else rule
    yield from _fresh(prefix, ones=["g_norm.weight"])


def _retnet(prefix: str, facts: MapFacts) -> Iterator[Rule]:
    yield from _by_heads(prefix, facts)
    yield from _fresh(prefix, normal=["g_proj.weight"], ones=["g_norm_swish_gate.weight"])


def _gla(prefix: str, facts: MapFacts) -> Iterator[Rule]:
    yield from _by_heads(prefix, facts)
    yield from _fresh(prefix, normal=["g_proj.weight", "gk_proj.0.weight", "gk_proj.1.weight"])
    yield from _fresh(prefix, zeros=["gk_proj.1.bias"], ones=["g_norm_swish_gate.weight"])


def _la(prefix: str, facts: MapFacts) -> Iterator[Rule]:
    yield from _by_heads(prefix, facts)
    # A product of two maps: the identity times one is the identity.
    for feature_map in ("feature_map_q", "feature_map_k"):
        inside = f"{prefix}{feature_map}."
        yield from _fresh(inside, identity=["layer1.weight"], zeros=["layer1.bias", "layer2.weight"])
        yield from _fresh(inside, ones=["layer2.bias"])
    yield from _fresh(prefix, ones=["norm.weight"])


def _nsa(prefix: str, facts: MapFacts) -> Iterator[Rule]:
    yield from _attention(prefix, facts)
    yield from _fresh(prefix, normal=["g_proj.weight"])


def _dsa(prefix: str, facts: MapFacts) -> Iterator[Rule]:
    q, k, v, o = (f"{prefix}{name}.weight" for name in _ATTENTION)
    yield Rule(prefix + "kv_proj.weight", (k, v), "latent")
    yield Rule(prefix + "q_proj.weight", (q, k, v), "latent_queries")
    yield Rule(prefix + "o_proj.weight", (o, k, v), "latent_output")
    yield from _fresh(prefix, normal=["q_score_proj.weight", "k_score_proj.weight"])
    if facts.lightning_indexer:
        yield from _fresh(prefix, normal=["w_score_proj.weight"])
        yield from _fresh(prefix, ones=["k_score_norm.weight"], zeros=["k_score_norm.bias"])


MIXER_RULES: dict[str, Callable[[str, MapFacts], Iterator[Rule]]] = {
    "full": _attention,
    "window": _attention,
    "gdn": _gdn,
    "kda": _kda,
    "deltanet": _deltanet,
    "mamba2": _mamba2,
    "hgrn2": _hgrn2,
    "retnet": _retnet,
    "gla": _gla,
    "la": _la,
    "nsa": _nsa,
    "dsa": _dsa,
}
