# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Private names of transformers that the package overrides or reads are there, with the parameters it relies on.

They may change with any release. Then this file fails first, and says where to look.
"""

import ast
import inspect
from pathlib import Path

import pytest
import transformers
from transformers import PreTrainedConfig, PreTrainedModel, Trainer, cache_utils
from transformers.generation import GenerationMixin
from transformers.generation.continuous_batching import ContinuousMixin
from transformers.utils import hub

ROOT = Path(__file__).resolve().parent.parent
# Owner, name, all its parameters but `self` (with an ellipsis: those that we name, in order), and who uses it.
METHODS = [
    (
        GenerationMixin,
        "_prepare_cache_for_generation",
        "generation_config model_kwargs generation_mode batch_size max_cache_length",
        "modeling/cached_generation.py modeling/learned_positions.py modeling/uneven_caches.py",
    ),
    (GenerationMixin, "_prepare_generation_config", "generation_config ...", "modeling/cached_generation.py"),
    (
        GenerationMixin,
        "_get_static_cache_init_shape",
        "",
        "modeling/cached_generation.py modeling/uneven_caches.py",
    ),
    (
        GenerationMixin,
        "_get_candidate_generator",
        "generation_config model_kwargs ...",
        "modeling/cached_generation.py",
    ),
    (PreTrainedModel, "_init_weights", "module", "modeling/modeling_lt2.py conversion/assemble.py"),
    (PreTrainedModel, "_from_config", "config ...", "conversion/assemble.py"),
    (Trainer, "_save_checkpoint", "model trial", "training/whole_checkpoints.py"),
    (Trainer, "_load_from_checkpoint", "resume_from_checkpoint model", "distill/stage.py distill/body.py"),
    (Trainer, "_load_rng_state", "checkpoint", "distill/stage.py"),
    (Trainer, "_save", "output_dir state_dict", "distill/stage.py distill/body.py"),
    (Trainer, "_save_optimizer_and_scheduler", "output_dir", "distill/body.py"),
    (Trainer, "save_model", "output_dir _internal_call", "distill/stage.py"),
    (Trainer, "get_batch_samples", "epoch_iterator num_batches device", "training/whole_checkpoints.py"),
    (Trainer, "get_decay_parameter_names", "model", "tasks/training.py"),
    (Trainer, "create_optimizer", "model", "distill/stage.py"),
    (Trainer, "create_scheduler", "num_training_steps optimizer", "tasks/training.py"),
]
# Owner, name of an attribute that its methods keep on `self`, and who uses it.
ATTRIBUTES = [
    (ContinuousMixin, "_cached_continuous_batching_manager", "modeling/continuous_batching.py"),
    (PreTrainedConfig, "_post_init_done", "configuration/looped_config.py configuration/configuration_lt2.py"),
    (Trainer, "_created_lr_scheduler", "tasks/training.py"),
    (Trainer, "_globalstep_last_logged", "training/whole_checkpoints.py"),
    (Trainer, "_total_loss_scalar", "training/whole_checkpoints.py"),
    (Trainer, "_tr_loss", "training/whole_checkpoints.py"),
]
# Owner, name of a class attribute or of a module's table, and who uses it.
DECLARED = [
    (cache_utils, "DYNAMIC_LAYER_TYPE_MAPPING", "modeling/looped_cache.py"),
    (cache_utils, "STATIC_LAYER_TYPE_MAPPING", "modeling/looped_cache.py"),
    (PreTrainedConfig, "_attn_implementation", "modeling/folded_step.py modeling/mixers/attention.py"),
    (PreTrainedModel, "_can_compile_fullgraph", "modeling/modeling_ouro.py"),
    (PreTrainedModel, "_can_record_outputs", "modeling/modeling_ouro.py"),
    (PreTrainedModel, "_is_stateful", "modeling/modeling_lt2.py"),
    (PreTrainedModel, "_no_split_modules", "modeling/modeling_ouro.py distill/stage.py"),
    (PreTrainedModel, "_supports_attention_backend", "modeling/modeling_ouro.py"),
    (PreTrainedModel, "_supports_flash_attn", "modeling/modeling_ouro.py"),
    (PreTrainedModel, "_supports_flex_attn", "modeling/modeling_ouro.py"),
    (PreTrainedModel, "_supports_sdpa", "modeling/modeling_ouro.py"),
    (PreTrainedModel, "_tied_weights_keys", "modeling/modeling_ouro.py"),
    (PreTrainedModel, "_tp_plan", "modeling/modeling_ouro.py"),
]
OWNERS = {
    "configuration": (PreTrainedConfig,),
    "modeling": (PreTrainedConfig, PreTrainedModel, GenerationMixin, ContinuousMixin),
    "conversion": (PreTrainedConfig, PreTrainedModel),
    "training": (Trainer,),
    "tasks": (Trainer,),
    "distill": (Trainer,),
}


def missing(owner, name, users):
    where = getattr(owner, "__name__", owner)
    return f"transformers {transformers.__version__} has another {where}.{name}, which {users} relies on"


def kept_on_self(owner):
    """Return the names of the attributes that the methods of a class set on `self`, or ask it for by `getattr`."""
    nodes = list(ast.walk(ast.parse(inspect.getsource(owner))))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr"]
    return names | {getattr(node.args[1], "value", None) for node in calls if ast.unparse(node.args[0]) == "self"}


def private_names(source):
    """Return the private names that a file reads from objects, sets on them, or defines in classes."""
    tree = ast.parse(source)
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for scope in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        names |= {node.name for node in scope.body if isinstance(node, ast.FunctionDef)}
        names |= {ast.unparse(node.targets[0]) for node in scope.body if isinstance(node, ast.Assign)}
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


@pytest.mark.parametrize(("owner", "name", "wanted", "users"), METHODS, ids=lambda value: str(value).split(".")[-1])
def test_a_method_has_the_parameters_that_we_rely_on(owner, name, wanted, users):
    assert hasattr(owner, name), missing(owner, name, users)
    found = [each for each in inspect.signature(getattr(owner, name)).parameters if each != "self"]
    names = wanted.split()
    if "..." in names:
        names.remove("...")
        found = [each for each in found if each in names]
    assert found == names, missing(owner, name, users)


@pytest.mark.parametrize(("owner", "name", "users"), ATTRIBUTES, ids=lambda value: str(value).split(".")[-1])
def test_an_attribute_is_kept_by_its_class(owner, name, users):
    assert name in kept_on_self(owner), missing(owner, name, users)


@pytest.mark.parametrize(("owner", "name", "users"), DECLARED, ids=lambda value: str(value).split(".")[-1])
def test_a_declared_name_is_there(owner, name, users):
    assert hasattr(owner, name), missing(owner, name, users)


def test_a_missing_file_of_the_hub_may_still_be_no_error():
    """`conversion/hybrid_students.py` passes the option to `cached_file`, which hands it on."""
    assert "_raise_exceptions_for_missing_entries" in inspect.signature(hub.cached_files).parameters


def test_the_tables_name_their_users():
    for *_, name, _, users in METHODS:
        assert all(name in (ROOT / file).read_text("utf-8") for file in users.split()), name
    for _, name, users in (*ATTRIBUTES, *DECLARED):
        assert all(name in (ROOT / file).read_text("utf-8") for file in users.split()), name


def test_every_private_name_of_transformers_that_we_use_is_in_the_tables():
    known = {name for _, name, *_ in (*METHODS, *ATTRIBUTES, *DECLARED)}
    theirs = {owner: {*dir(owner), *kept_on_self(owner)} for owners in OWNERS.values() for owner in owners}
    used = [
        f"{file.relative_to(ROOT)}: {name}"
        for room, owners in OWNERS.items()
        for file in sorted((ROOT / room).rglob("*.py"))
        for name in sorted(private_names(file.read_text("utf-8")) - known)
        if any(name in theirs[owner] for owner in owners)
    ]
    assert used == []
