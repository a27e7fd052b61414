# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Official LT2 checkpoints against a literal computation in the official conventions."""

import json

import pytest
import torch
from torch.nn.functional import linear, silu
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from loopergy.cli import app
from loopergy.configuration.configuration_lt2 import LT2Config
from loopergy.conversion import ConversionError, lt2_from_official
from loopergy.conversion.exact_formats import convert_format
from loopergy.conversion.lt2_official import half_apart, official_config
from loopergy.modeling.modeling_lt2 import LT2ForCausalLM

WIDTH, HEADS, LAYERS, LOOPS = 32, 4, 3, 2
ARGUMENTS = {
    "dim": WIDTH,
    "n_layers": LAYERS,
    "n_heads": HEADS,
    "vocab_size": 64,
    "loop_count": LOOPS,
    "norm_eps": 1e-6,
    "rope_theta": 100.0,
    "attention_pattern": "0:1",
    "layer_pattern": "full",
    "weight_tying": False,
    "use_residual": True,
    "use_block_residual": False,
    "max_seqlen": 128,
}
IDS = torch.randint(64, (1, 13), generator=torch.Generator().manual_seed(0))


def official_state(key_heads=HEADS, gate=True, tied=False) -> dict[str, torch.Tensor]:
    """Draw a checkpoint of full-attention layers."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator) * shape[-1] ** -0.5

    head = WIDTH // HEADS
    state = {"tok_embeddings.weight": draw(64, WIDTH), "norm.weight": 1 + draw(WIDTH)}
    state["output.tied_module.weight" if tied else "output.weight"] = draw(64, WIDTH)
    state["residual_weight"] = draw(LOOPS, WIDTH)
    for layer in range(LAYERS):
        own = {"attention_norm.weight": 1 + draw(WIDTH), "ffn_norm.weight": 1 + draw(WIDTH)}
        own |= {f"feed_forward.w{part}.weight": draw(48, WIDTH) for part in (1, 3)}
        own |= {f"attention.w{name}.weight": draw(WIDTH, WIDTH) for name in ("q", "o", *(["_gate"] if gate else []))}
        own |= {f"attention.w{name}.weight": draw(key_heads * head, WIDTH) for name in "kv"}
        own["feed_forward.w2.weight"] = draw(WIDTH, 48)
        state |= {f"layers.{layer}.{name}": tensor for name, tensor in own.items()}
    return state


def turn(x: torch.Tensor) -> torch.Tensor:
    """Turn neighbouring numbers of (length, heads, head) as complex ones."""
    head = x.shape[-1]
    rates = 100.0 ** (-torch.arange(0, head, 2, dtype=torch.float64) / head)
    angles = torch.arange(len(x), dtype=torch.float64)[:, None] * rates
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def literal_logits(state, windows, tied=False) -> torch.Tensor:
    """Run the official model on IDS; windows[loop][layer] are numbers of tokens or None."""
    h, head = state["tok_embeddings.weight"][IDS[0]], WIDTH // HEADS
    distance = torch.arange(len(h))[:, None] - torch.arange(len(h))
    for loop in range(LOOPS):
        start = h
        for layer in range(LAYERS):
            part = {
                k.removeprefix(f"layers.{layer}."): v for k, v in state.items() if k.startswith(f"layers.{layer}.")
            }
            x = norm(h, part["attention_norm.weight"])
            q, k, v = (linear(x, part[f"attention.w{name}.weight"]).unflatten(-1, (-1, head)) for name in "qkv")
            q, k = turn(q), turn(k)
            k, v = (t.repeat_interleave(HEADS // t.shape[1], dim=1) for t in (k, v))
            hidden = (distance < 0) | (distance >= (windows[loop][layer] or 10**6))
            scores = torch.einsum("thd,shd->hts", q, k) / head**0.5
            out = torch.einsum("hts,shd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v).flatten(1)
            if "attention.w_gate.weight" in part:
                out = out * linear(x, part["attention.w_gate.weight"]).sigmoid()
            h = h + linear(out, part["attention.wo.weight"])
            x = norm(h, part["ffn_norm.weight"])
            w1, w2, w3 = (part[f"feed_forward.w{i}.weight"] for i in (1, 2, 3))
            h = h + linear(silu(linear(x, w1)) * linear(x, w3), w2)
        h = h + state["residual_weight"][loop] * start
    return linear(norm(h, state["norm.weight"]), state["tok_embeddings.weight" if tied else "output.weight"])


@pytest.fixture
def save(tmp_path):
    def write(state, **changes):
        folder = tmp_path / "official"
        folder.mkdir(exist_ok=True)
        torch.save({"model": state}, folder / "consolidated.pth")
        (folder / "params.json").write_text(json.dumps({"name": "run", "model": {**ARGUMENTS, **changes}}))
        return folder

    return write


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"use_attn_gate": True}, [[None] * 3] * 2),
        ({"use_attn_gate": True, "attention_pattern": "2:1", "default_sliding_window": 4}, [[4, 4, None]] * 2),
        (
            {"use_attn_gate": True, "attention_pattern": "bookend:1", "default_sliding_window": 3},
            [[None, 3, None]] * 2,
        ),
        ({"use_attn_gate": True, "attention_pattern": "full->SWA=5"}, [[None] * 3, [5] * 3]),
        ({"use_attn_gate": True, "attention_pattern": "2,None,6"}, [[2, None, 6]] * 2),
        ({"n_kv_heads": 2}, [[None] * 3] * 2),
        ({"weight_tying": True}, [[None] * 3] * 2),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_checkpoint_computes_what_the_official_code_does(save, changes, windows):
    tied = changes.get("weight_tying", False)
    state = official_state(changes.get("n_kv_heads", HEADS), changes.get("use_attn_gate", False), tied)
    model = lt2_from_official(save(state, **changes))
    with torch.no_grad():
        got = model(IDS).logits[0]
    # The rates of the rotary table are float32.
    torch.testing.assert_close(got, literal_logits(state, windows, tied), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("heads", [1, 3])
def test_reordered_rows_turn_as_the_neighbours_did(heads):
    """The identity of the two rotary conventions (G 11)."""
    x = torch.randn(heads * 8, 2, generator=torch.Generator().manual_seed(0))
    want = [x[8 * head + row] for head in range(heads) for row in (0, 2, 4, 6, 1, 3, 5, 7)]
    assert torch.equal(half_apart(x, 8), torch.stack(want))


@pytest.mark.parametrize("mixer", ["gdn", "kda", "deltanet", "mamba2", "hgrn2", "retnet", "nsa", "dsa"])
def test_every_other_mixer_keeps_its_tensors_under_the_official_names(save, tmp_path, mixer):
    torch.manual_seed(0)
    sizes = {"dsa_dim": 16, "dsa_tail_dim": 8, "dsa_score_dim": 8} if mixer == "dsa" else {}
    changes = {"layer_pattern": f"interleaved:2:1:{mixer}:full", "n_kv_heads": 2 if mixer == "nsa" else None, **sizes}
    state = official_state(changes["n_kv_heads"] or HEADS, gate=False)
    config = official_config({**ARGUMENTS, **changes}, state)
    assert config.layer_mixers == [mixer, mixer, "full"]
    model = LT2ForCausalLM(config).eval()
    for index in (0, 1):
        place = f"layers.{index}." if mixer == "dsa" else f"layers.{index}.attention."
        state = {k: v for k, v in state.items() if not k.startswith(f"layers.{index}.attention.")}
        state |= {place + name: tensor for name, tensor in model.model.layers[index].self_attn.state_dict().items()}
    state = {name: tensor.float() for name, tensor in state.items()}
    loaded = convert_format(save(state, **changes), "lt2", tmp_path / "lt2", bos_token_id=1)
    for index in (0, 1):
        want = model.model.layers[index].self_attn.state_dict()
        assert all(torch.equal(want[k], v) for k, v in loaded.model.layers[index].self_attn.state_dict().items())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "lt2")
    assert again.config.bos_token_id == 1
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, loaded(IDS).logits)


def test_sizes_of_the_released_recipes_are_read():
    """The 0.6B hybrid, from the names and shapes that its checkpoint has."""
    state = {"tok_embeddings.weight": torch.empty(128256, 1024, device="meta")}
    state["layers.0.feed_forward.w1.weight"] = torch.empty(2816, 1024, device="meta")
    state["residual_weight"] = torch.empty(4, 1024, device="meta")
    recipe = {"dim": 1024, "n_layers": 21, "n_heads": 8, "loop_count": 4, "weight_tying": True, "norm_eps": 1e-6}
    config = official_config({**recipe, "layer_pattern": "gdn", "max_seqlen": 4096}, state)
    preset = LT2Config.from_preset("lt2-0.6b-gdn")
    same = ("layer_mixers", "gdn_num_heads", "gdn_head_dim", "gdn_expand_v", "intermediate_size", "num_loops")
    more = ("rms_norm_eps", "vocab_size", "tie_word_embeddings", "use_loop_residual", "max_position_embeddings")
    for name in (*same, *more):
        assert getattr(config, name) == getattr(preset, name), name


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layer_pattern": "mla"}, "unknown mixer 'mla'.*Known mixers: full, window, gdn"),
        ({"legacy_iteration_weights": True}, "legacy_iteration_weights=True: a weighted sum over loops"),
        ({"attention_pattern": "random:4"}, "attention_pattern: 'random:4' is not a random layout"),
        ({"attention_pattern": "full->full->full"}, "has 3 loops, but loop_count=2"),
        ({"attention_pattern": "2,None"}, "has 2 entries, but n_layers=3"),
        ({"attention_pattern": "swa=oops"}, "attention_pattern='swa=oops' is not understood"),
        ({"attention_pattern": "1:x"}, "attention_pattern='1:x' is not understood"),
        ({"n_layers": "two"}, "n_layers='two' must be a whole number"),
        ({"loop_count": None}, "loop_count=None must be a whole number"),
        ({"n_heads": 5}, r"wq\.weight has 32 rows, which are no heads of an even head_dim=6 \(dim / n_heads\)"),
        ({"rope_theta": "x"}, "rope_theta='x' must be a number"),
        ({"layer_pattern": 3}, "layer_pattern=3 must be a pattern"),
        ({"use_attn_gate": True}, r"those of its config: it lacks model\.layers\.0\.self_attn\.gate_proj"),
    ],
)
def test_what_lt2_does_not_have_is_refused_by_name(save, changes, says):
    with pytest.raises(ConversionError, match=says):
        lt2_from_official(save(official_state(gate=False), **changes))


def test_a_model_of_layouts_by_lot_loads_without_windows_and_says_how_to_ask_it(save, monkeypatch):
    said = []
    monkeypatch.setattr("loopergy.conversion.lt2_official.logger.warning", said.append)
    model = lt2_from_official(save(official_state(), attention_pattern="random:3:1", use_attn_gate=True))
    assert (model.config.layer_mixers, model.config.loop_windows) == (["full"] * 3, None)
    assert "RandomWindows(share_full=0.25, window=2048, keep_ends=False).vote(model, input_ids)" in said[0]


def test_tensors_that_do_not_belong_are_named(save, tmp_path):
    state = official_state(gate=False)
    zero = {"block_residual_weight": torch.zeros(1), "rope_embeddings.freqs_cis": torch.zeros(2)}
    assert lt2_from_official(save({**state, **zero})).config.num_loops == 2
    with pytest.raises(ConversionError, match="block_residual_weight is not zero"):
        lt2_from_official(save({**state, "block_residual_weight": torch.ones(1)}))
    with pytest.raises(ConversionError, match="does not have: iteration_weights"):
        lt2_from_official(save({**state, "iteration_weights": torch.ones(2)}))
    with pytest.raises(ConversionError, match=r"consolidated\.pth is missing: an official LT2 checkpoint is a folder"):
        lt2_from_official(tmp_path)


def test_damaged_files_are_named(save):
    folder = save(official_state(gate=False))
    (folder / "consolidated.pth").write_text("hello")
    with pytest.raises(ConversionError, match=r"consolidated\.pth' is damaged"):
        lt2_from_official(folder)
    for text, says in (("[1]", "holds a list"), ("{oops", "is no JSON")):
        (folder / "params.json").write_text(text)
        with pytest.raises(ConversionError, match=rf"params\.json' {says}"):
            lt2_from_official(folder)
    folder = save({**official_state(gate=False), "norm.weight": 3})
    with pytest.raises(ConversionError, match=r"entries that are no tensors: norm\.weight"):
        lt2_from_official(folder)


def test_a_missing_tensor_is_named(save):
    state = official_state(gate=False)
    del state["layers.1.attention.wq.weight"]
    with pytest.raises(ConversionError, match=r"checkpoint's tensors .* lacks model\.layers\.1\.self_attn\.q_proj"):
        lt2_from_official(save(state))


def test_other_loops_leave_the_trained_ones_and_unknown_fields_are_refused(save, monkeypatch):
    said = []
    monkeypatch.setattr("loopergy.conversion.assemble.warn_beyond_trained", lambda *counts: said.append(counts))
    folder = save(official_state(gate=False))
    config = lt2_from_official(folder, num_loops=3).config
    assert (config.num_loops, config.num_trained_loops) == (3, LOOPS)
    assert said == [(3, LOOPS)]
    with pytest.raises(ValueError, match=r"LT2Config has no field oops; it has .*num_loops"):
        lt2_from_official(folder, oops=1)


def test_a_checkpoint_loads_in_the_dtype_asked_for(save):
    state = {name: tensor.float() for name, tensor in official_state(gate=False).items()}
    assert lt2_from_official(save(state), dtype="bfloat16").dtype == torch.bfloat16
    assert lt2_from_official(save(state)).dtype == torch.float32


def test_the_command_line_knows_an_official_folder(save, tmp_path):
    folder = save(official_state(gate=False))
    done = CliRunner().invoke(app, ["convert", str(folder), "-o", str(tmp_path / "lt2")])
    assert done.exit_code == 0, done.output
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "lt2").config.layer_mixers == ["full"] * 3
    refused = CliRunner().invoke(app, ["convert", str(folder), "-k", "1", "-o", str(tmp_path / "other")])
    assert "without --keep-layers" in str(refused.exception)
