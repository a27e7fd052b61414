# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import ast
import importlib.util
import inspect
import sys
import types
from pathlib import Path

import pytest
import torch

from loopergy.modeling.kernels import (
    chunk_gated_delta_rule,
    fla_kernels,
    gated_delta_rule,
    kernel_backend,
    kernel_backends,
    recurrent_gated_delta_rule,
)


def draw(length=5, width=8, values=8, dtype=torch.float32, batch=1):
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, length, 2, size) for size in (width, width, values))
    gates = -torch.rand(batch, length, 2), torch.rand(batch, length, 2)
    return dict(zip(("q", "k", "v", "g", "beta"), (x.to(dtype) for x in (q, k, v, *gates)), strict=True))


def good_kernel(calls):
    def kernel(
        q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
        state_v_first=False, cu_seqlens=None, **kwargs,
    ):  # fmt: skip
        assert not kwargs
        calls.append({"state_v_first": state_v_first, "g": g, "length": v.shape[1]})
        return recurrent_gated_delta_rule(
            q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
        )

    return kernel


def transposing_kernel(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    cu_seqlens=None, state_v_first=False, **kwargs,
):  # fmt: skip
    """Take the flag that asks for [K, V] and ignore it."""
    state = None if initial_state is None else initial_state.mT
    out, state = recurrent_gated_delta_rule(
        q, k, v, g, beta, scale, state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )
    return out, None if state is None else state.mT.contiguous()


def shape_swapping_kernel(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    cu_seqlens=None, state_v_first=False, **kwargs,
):  # fmt: skip
    out, state = recurrent_gated_delta_rule(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )
    return out, None if state is None else state.mT


def swallowing_kernel(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, **kwargs):
    return recurrent_gated_delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state)


def install(monkeypatch, chunk, recurrent):
    """Put a stand-in in the place of flash-linear-attention, as if there were a GPU."""
    ops = types.ModuleType("fla.ops.gated_delta_rule")
    ops.chunk_gated_delta_rule, ops.fused_recurrent_gated_delta_rule = chunk, recurrent
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", ops)
    monkeypatch.setattr(fla_kernels, "is_flash_linear_attention_available", lambda: True)


@pytest.fixture(autouse=True)
def warnings_given(monkeypatch):
    """Forget what was found out about flash-linear-attention before and after a test; collect warnings."""
    given = []
    monkeypatch.setattr(kernel_backends.logger, "warning_once", given.append)
    for found in (fla_kernels.installed_kernels, fla_kernels.keeps_layout):
        found.cache_clear()
    yield given
    for found in (fla_kernels.installed_kernels, fla_kernels.keeps_layout):
        found.cache_clear()


def run_as_on_cuda(q, k, v, g, beta, scale=None, state=None, final=True, normalize=True, cu_seqlens=None):
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    options = {"scale": scale, "output_final_state": final, "cu_seqlens": cu_seqlens}
    options["use_qk_l2norm_in_kernel"] = normalize
    return kernel_backends._on_cuda(fla_kernels.GATED_DELTA_RULE, tensors, state, options)


def same(left, right, tolerance=1e-5):
    return all(torch.allclose(x, y, atol=tolerance) for x, y in zip(left, right, strict=True))


@pytest.mark.parametrize("length", [0, 1, 2, 40])
def test_cpu_tensors_run_on_the_torch_kernels(length, warnings_given):
    inputs = draw(length)
    actual = gated_delta_rule(**inputs, output_final_state=True)
    assert same(actual, chunk_gated_delta_rule(**inputs, output_final_state=True))
    assert warnings_given == []
    backend = kernel_backend("cpu")
    assert (backend.name, str(backend)[:7]) == ("torch", "torch (")
    assert "cpu" in backend.reason


def test_single_tokens_take_the_step_form_only_where_no_gradient_is_needed(monkeypatch):
    """Guards A15: a lone token without a state works, too."""
    taken = []
    family = fla_kernels.GATED_DELTA_RULE
    watched = family._replace(
        chunk=lambda **given: taken.append("chunk") or family.chunk(**given),
        recurrent=lambda **given: taken.append("recurrent") or family.recurrent(**given),
    )
    monkeypatch.setattr(kernel_backends, "GATED_DELTA_RULE", watched)
    inputs = draw(1)
    gated_delta_rule(**inputs)
    inputs["k"].requires_grad_()
    gated_delta_rule(**inputs)
    with torch.no_grad():
        gated_delta_rule(**inputs)
    assert taken == ["recurrent", "chunk", "recurrent"]


def test_matching_kernels_are_used_and_asked_for_the_documented_layout(monkeypatch, warnings_given):
    """Guards F9."""
    chunks, steps = [], []
    install(monkeypatch, good_kernel(chunks), good_kernel(steps))
    inputs = draw(70)
    inputs["g"][0, 3] = -torch.inf
    state = torch.randn(1, 2, 8, 8)
    actual = run_as_on_cuda(**inputs, state=state)
    expected = chunk_gated_delta_rule(
        **inputs, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    assert same(actual, expected)
    assert chunks[-1]["length"] == 70
    assert chunks[-1]["state_v_first"] is False
    assert chunks[-1]["g"].min() >= -50
    run_as_on_cuda(**draw(3))
    assert steps[-1]["length"] == 3
    run_as_on_cuda(**{**draw(3), "v": torch.randn(1, 3, 2, 8, requires_grad=True)})
    assert chunks[-1]["length"] == 3
    assert kernel_backend("cuda").name == "flash-linear-attention"
    assert warnings_given == []


@pytest.mark.parametrize("values", [8, 16])
def test_a_kernel_that_ignores_the_layout_flag_is_found_out(values, monkeypatch, warnings_given):
    """Guards F9: with K = V the shape alone would not tell."""
    install(monkeypatch, good_kernel([]), transposing_kernel if values == 8 else shape_swapping_kernel)
    inputs = draw(5, values=values)
    actual = run_as_on_cuda(**inputs)
    assert same(actual, chunk_gated_delta_rule(**inputs, output_final_state=True, use_qk_l2norm_in_kernel=True))
    assert len(warnings_given) == 1
    assert "[K, V]" in warnings_given[0]
    assert "pip install" in warnings_given[0]


@pytest.mark.parametrize("which", ["chunk", "recurrent"])
def test_a_kernel_without_a_named_argument_is_refused(which, monkeypatch, warnings_given):
    """Guards F9: `**kwargs` would swallow what it does not know."""
    good = good_kernel([])
    install(monkeypatch, *((swallowing_kernel, good) if which == "chunk" else (good, swallowing_kernel)))
    backend = kernel_backend("cuda")
    assert backend.name == "torch"
    assert "use_qk_l2norm_in_kernel, cu_seqlens in swallowing_kernel" in backend.reason
    run_as_on_cuda(**draw())
    assert "pip install" in warnings_given[0]


def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch, warnings_given):
    """Guards F10."""
    monkeypatch.setattr(fla_kernels, "is_flash_linear_attention_available", lambda: False)
    inputs = draw()
    actual = run_as_on_cuda(**inputs)
    assert same(actual, chunk_gated_delta_rule(**inputs, output_final_state=True, use_qk_l2norm_in_kernel=True))
    assert 'pip install "flash-linear-attention[cuda]' in warnings_given[0]
    assert kernel_backend("cuda").name == "torch"


def test_a_package_that_cannot_be_imported_is_named(monkeypatch):
    """Guards F10: without triton the import fails."""
    install(monkeypatch, None, None)
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    assert "cannot be imported" in kernel_backend("cuda").reason


@pytest.mark.parametrize(
    ("inputs", "obstacle"),
    [
        (draw(dtype=torch.float64), "float64"),
        (draw(width=257), "256 wide, got 257"),
        ({**draw(), "q": draw()["q"].bfloat16()}, "one type"),
    ],
    ids=["float64", "wide keys", "mixed types"],
)
def test_inputs_the_package_cannot_take_run_on_the_torch_kernels(inputs, obstacle, monkeypatch, warnings_given):
    """Guards F11."""
    calls = []
    install(monkeypatch, good_kernel(calls), good_kernel(calls))
    actual = run_as_on_cuda(**inputs)
    assert same(actual, chunk_gated_delta_rule(**inputs, output_final_state=True, use_qk_l2norm_in_kernel=True))
    assert calls == []
    assert obstacle in warnings_given[0]


def test_packed_documents_reach_the_kernel(monkeypatch):
    """Guards C3."""
    install(monkeypatch, good_kernel([]), good_kernel([]))
    inputs, boundaries = draw(12), torch.tensor([0, 5, 12], dtype=torch.int32)
    actual = run_as_on_cuda(**inputs, cu_seqlens=boundaries)
    expected = chunk_gated_delta_rule(
        **inputs, output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=boundaries
    )
    assert same(actual, expected)


OTHERS = {"kda": fla_kernels.KDA, "simple_gla": fla_kernels.SIMPLE_GLA, "gla": fla_kernels.GLA}


def draw_for(name, length, width=8, values=8, dtype=torch.float32):
    inputs = draw(length, width, values, dtype)
    if name in ("kda", "gla"):
        inputs["g"] = (-torch.rand(1, length, 2, width)).to(dtype)
    if name == "simple_gla":
        inputs |= {"q": inputs["q"][:, :, :1], "k": inputs["k"][:, :, :1]}
    return inputs if name == "kda" else {key: x for key, x in inputs.items() if key != "beta"}


def stand_in(family, step, calls):
    """Make a function with the arguments that flash-linear-attention's has, which runs our kernel."""
    names = fla_kernels.named(family, step, dict.fromkeys(("q", "k", "v", *family.arguments)))
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
        for name in (*names, "scale", "initial_state", "output_final_state", "cu_seqlens", "state_v_first")
    ]

    def kernel(**given):
        assert set(given) <= {parameter.name for parameter in parameters}
        calls.append(
            {"step": step, "g": given["gk" if step and family.step_names else "g"], "heads": given["q"].shape[2]}
        )
        assert given.pop("state_v_first") is False
        if "gk" in given:
            given["g"] = given.pop("gk")
        return family.recurrent(**given)

    kernel.__signature__ = inspect.Signature(parameters)
    return kernel


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("length", [1, 5, 70])
def test_the_other_families_call_their_kernels_by_their_names(name, length, monkeypatch, warnings_given):
    """Guards F9: `gk` in the step form of GLA, heads repeated where kernels want as many as values, -inf raised."""
    family, calls = OTHERS[name], []
    module = types.ModuleType(family.module)
    setattr(module, family.fla_chunk, stand_in(family, False, calls))
    setattr(module, family.fla_recurrent, stand_in(family, True, calls))
    for part in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    monkeypatch.setitem(sys.modules, family.module, module)
    monkeypatch.setattr(fla_kernels, "is_flash_linear_attention_available", lambda: True)
    inputs = draw_for(name, length)
    inputs["g"][0, 0] = -torch.inf
    options = {"scale": None, "output_final_state": True, "cu_seqlens": None}
    actual = kernel_backends._on_cuda(family, inputs, None, options)
    assert same(actual, family.chunk(**inputs, output_final_state=True))
    assert calls[-1]["step"] is (length <= 64)
    assert calls[-1]["heads"] == 2
    assert calls[-1]["g"].min() >= -50
    assert warnings_given == []


@pytest.mark.parametrize("family", [fla_kernels.GATED_DELTA_RULE, *OTHERS.values()], ids=lambda family: family.title)
@pytest.mark.parametrize("step", [False, True])
def test_the_arguments_are_those_of_the_installed_package(family, step):
    """Guards F9: read from its source, as it cannot be imported without a GPU."""
    package = importlib.util.find_spec("fla")
    if package is None:
        pytest.skip("flash-linear-attention is not installed")
    name = family.fla_recurrent if step else family.fla_chunk
    folder = Path(package.origin).parent.joinpath(*family.module.split(".")[1:])
    found = [
        {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    wanted = fla_kernels.named(family, step, dict.fromkeys(("q", "k", "v", *family.arguments)))
    options = {"scale", "initial_state", "output_final_state", "cu_seqlens", "state_v_first"}
    assert len(found) == 1
    assert {*wanted, *options} <= found[0]


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("length", [0, 1, 40])
def test_the_other_families_run_on_the_torch_kernels_on_a_cpu(name, length):
    inputs = draw_for(name, length)
    actual = getattr(kernel_backends, name)(**inputs, output_final_state=True)
    assert same(actual, OTHERS[name].chunk(**inputs, output_final_state=True))


def test_a_family_that_the_package_lacks_is_named_and_runs_on_torch(monkeypatch, warnings_given):
    """Guards F10."""
    install(monkeypatch, good_kernel([]), good_kernel([]))
    for family in OTHERS.values():
        monkeypatch.setitem(sys.modules, family.module, None)
    backend = kernel_backend("cuda")
    assert backend.name == "flash-linear-attention"
    assert "linear attention with a decay per channel runs on torch" in backend.reason
    inputs = draw_for("gla", 5)
    options = {"scale": None, "output_final_state": True, "cu_seqlens": None}
    kernel_backends._on_cuda(fla_kernels.GLA, inputs, None, options)
    assert "Linear attention with a decay per channel runs on the slower torch kernels" in warnings_given[0]


@pytest.mark.gpu
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("length", [1, 33, 130])
def test_cuda_kernels_of_the_other_families_equal_the_torch_kernels(name, length):
    """Guards F10 and F1 on the device that is there."""
    inputs = {key: x.cuda() for key, x in draw_for(name, length, 64, 32, torch.bfloat16).items()}
    state = torch.randn(1, 2, 64, 32, device="cuda")
    actual = getattr(kernel_backends, name)(**inputs, initial_state=state, output_final_state=True)
    expected = OTHERS[name].chunk(**inputs, initial_state=state, output_final_state=True)
    for x, y in zip(actual, expected, strict=True):
        assert (x.float() - y.float()).norm() < 2e-2 * y.float().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 33, 130])
def test_cuda_kernels_equal_the_torch_kernels(length):
    """Guards F10 and F1 on the device that is there."""
    inputs = {name: x.cuda() for name, x in draw(length, 64, 32, torch.bfloat16).items()}
    state = torch.randn(1, 2, 64, 32, device="cuda")
    actual = gated_delta_rule(**inputs, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)
    expected = chunk_gated_delta_rule(
        **inputs, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    for x, y in zip(actual, expected, strict=True):
        assert (x.float() - y.float()).norm() < 2e-2 * y.float().norm()
