# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Models bigger than the device: accelerate keeps blocks in memory or on disk, and fetches them in every visit."""

import pytest
import torch
from accelerate import cpu_offload, infer_auto_device_map
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel


def blocks(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules that must not be split, by name."""
    return {name: part for name, part in model.named_modules() if type(part).__name__ in model._no_split_modules}


def number_of_bytes(model: PreTrainedModel) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def watch_visits(model: PreTrainedModel) -> list[tuple[str, bool]]:
    """Collect (name of a block, whether its first matrix lies on the disk between its visits) for each visit."""
    seen: list[tuple[str, bool]] = []
    for name, block in blocks(model).items():

        def hook(module, args, kwargs, name=name):
            seen.append((name, next(module.parameters()).device.type == "meta"))

        block.register_forward_pre_hook(hook, with_kwargs=True)
    return seen


def check_same(loaded: PreTrainedModel, model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Hold an offloaded model against the plain one: logits, generation with a cache, tables that no file holds."""
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=0)
    options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "use_cache": True}
    generated, wanted = loaded.generate(ids, **options), model.generate(ids, **options)
    assert torch.equal(generated.sequences, wanted.sequences)
    slots = [(layer.keys.device, layer.keys.shape) for layer in generated.cache.layers if hasattr(layer, "keys")]
    assert slots == [(layer.keys.device, layer.keys.shape) for layer in wanted.cache.layers if hasattr(layer, "keys")]
    buffers = dict(loaded.named_buffers())
    assert buffers.keys() == dict(model.named_buffers()).keys()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffers[name], buffer), name


@pytest.mark.parametrize("share", [0.0, 0.6])
def test_an_automatic_device_map_sends_to_disk_what_memory_has_no_room_for(
    each_family, share, build_kind, make_ids, tmp_path
):
    """Guards E2, E15."""
    model = build_kind(each_family, torch.float32)
    model.save_pretrained(tmp_path / "model")
    room = {"cpu": int(share * number_of_bytes(model))}
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map="auto", max_memory=room, offload_folder=tmp_path / "offload"
    )
    assert "disk" in loaded.hf_device_map.values()
    seen, plain = watch_visits(loaded), watch_visits(model)
    check_same(loaded, model, make_ids(2, 6))
    # Each block is visited as often as in the plain model, and is away again before each of its visits.
    assert [name for name, _ in seen] == [name for name, _ in plain]
    away = {name for name in blocks(model) if _place(loaded.hf_device_map, name) == "disk"}
    assert away
    assert all(offloaded is (name in away) for name, offloaded in seen)


def _place(device_map: dict[str, str], name: str) -> str:
    """Return where a device map puts a module: the entry of itself or of what holds it."""
    holders = [part for part in device_map if part == "" or name == part or name.startswith(f"{part}.")]
    return device_map[max(holders, key=len)]


def test_one_block_on_disk_comes_back_in_every_visit(each_family, build_kind, make_ids, tmp_path):
    """Guards E15."""
    model = build_kind(each_family, torch.float32)
    model.save_pretrained(tmp_path / "model")
    name = list(blocks(model))[-1]
    inner = {f"model.{child}": "cpu" for child, _ in model.model.named_children()}
    inner |= {f"model.{parameter}": "cpu" for parameter, _ in model.model.named_parameters(recurse=False)}
    siblings = dict.fromkeys(blocks(model), "cpu")
    device_map = {"lm_head": "cpu", **inner, **siblings, name: "disk"}
    device_map.pop(name.rpartition(".")[0] if name[-1].isdigit() else "", None)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    seen = watch_visits(loaded)
    check_same(loaded, model, make_ids(1, 6))
    assert sum(visited == name for visited, _ in seen) > 1
    assert all(offloaded is (visited == name) for visited, offloaded in seen)


def test_weights_kept_in_memory_and_lent_to_each_visit_give_the_same(each_family, build_kind, make_ids):
    """Guards E15: what `device_map="auto"` does with the part that the accelerator has no room for."""
    model, lent = build_kind(each_family, torch.float32), build_kind(each_family, torch.float32)
    cpu_offload(lent, execution_device="cpu")
    seen = watch_visits(lent)
    check_same(lent, model, make_ids(2, 6))
    assert seen
    assert all(offloaded for _, offloaded in seen)


def test_no_block_is_ever_split(every_model):
    """Guards E15: whatever the room, no entry of the map lies inside a block."""
    model = every_model
    names = blocks(model)
    assert names
    smallest = min(sum(p.numel() * p.element_size() for p in block.parameters()) for block in names.values())
    for room in range(smallest // 2, number_of_bytes(model), smallest // 2):
        device_map = infer_auto_device_map(
            model, max_memory={0: room, "cpu": room}, no_split_module_classes=model._no_split_modules
        )
        inside = [entry for entry in device_map for name in names if entry.startswith(f"{name}.")]
        assert inside == []


def test_a_model_on_meta_has_shapes_and_no_weights(each_family, build_kind, tmp_path):
    model = build_kind(each_family, torch.float32)
    model.save_pretrained(tmp_path / "model")
    skeleton = AutoModelForCausalLM.from_pretrained(tmp_path / "model", device_map="meta")
    assert {parameter.device.type for parameter in skeleton.parameters()} == {"meta"}
    assert skeleton.num_parameters() == model.num_parameters()


@pytest.mark.gpu
def test_blocks_in_memory_run_on_the_gpu_and_so_does_the_cache(each_family, build_kind, make_ids, tmp_path):
    """Guards E15."""
    model = build_kind(each_family, torch.float32)
    model.save_pretrained(tmp_path / "model")
    room = {0: int(0.6 * number_of_bytes(model)), "cpu": "1GB"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", device_map="auto", max_memory=room)
    assert set(loaded.hf_device_map.values()) == {0, "cpu"}
    ids = make_ids(2, 6)
    with torch.no_grad():
        outputs = loaded(ids.to(0), use_cache=True)
        torch.testing.assert_close(outputs.logits.cpu(), model(ids).logits, rtol=1e-3, atol=1e-3)
    assert {layer.keys.device.type for layer in outputs.cache.layers if hasattr(layer, "keys")} <= {"cuda"}
