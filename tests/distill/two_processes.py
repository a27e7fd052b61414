# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Run a piece of work on one or two processes of this machine: `python two_processes.py CASE FOLDER`.

Processes are forked from one that has imported everything, so that a case costs seconds and not a start of Python for
each process. As a launcher does, the parent ends all processes when one fails. Cases write JSON files to the folder.
"""

import json
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

import loopergy
from loopergy.distill import recipe as recipe_room
from loopergy.distill import staged_run
from loopergy.distill.recipe import Recipe, RecipeRun
from loopergy.distill.stage import StageTrainer

RECIPES = Path(__file__).parents[2] / "recipes" / "accelerate"
STEPS = {"align": 3, "distill": 4, "extend": 3}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(count: int, work: Callable[..., Any], *args: Any, sharded: bool = False, deadline: float = 240.0) -> list[int]:
    """Do `work(*args)` on `count` processes; return their exit codes, minus the signal for a killed one."""
    port, processes = free_port(), {}
    for rank in range(count):
        process = os.fork()
        if process == 0:
            _be_process(rank, count, port, sharded, work, args)
        processes[process] = rank
    codes, until = [0] * count, time.monotonic() + deadline
    while processes:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process:
            codes[processes.pop(process)] = os.waitstatus_to_exitcode(status)
        failed = any(codes) or time.monotonic() > until
        for other in processes if failed else ():
            os.kill(other, signal.SIGKILL)
        time.sleep(0.01)
    return codes


def _be_process(rank: int, count: int, port: int, sharded: bool, work: Callable[..., Any], args: tuple) -> None:
    os.environ["ACCELERATE_USE_CPU"] = "false" if sharded else "true"
    if count > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if sharded:
        # accelerate shards on accelerators only. All that it does afterwards works on a CPU as well.
        os.environ |= sharding_environment(RECIPES / "fsdp2.yaml")
        os.environ |= {"ACCELERATE_TORCH_DEVICE": "cpu", "ACCELERATE_BYPASS_DEVICE_MAP": "true"}
        PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
    code = 1
    try:
        work(*args)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def sharding_environment(file: Path) -> dict[str, str]:
    """Return what `accelerate launch --config_file FILE` tells its processes about FSDP."""
    args = launch_command_parser().parse_args(["--config_file", str(file), "--main_process_port", "0", "train.py"])
    args, _, _ = _validate_launch_command(args)
    environment = prepare_multi_gpu_env(args)
    return {name: value for name, value in environment.items() if "FSDP" in name}


def write(folder: Path, values: Any) -> None:
    """Write the result of a case, once."""
    if os.environ.get("RANK", "0") == "0":
        folder.with_suffix(".json").write_text(json.dumps(values))


# The whole pipeline.


def recipe_values(folder: Path, dtype: str) -> dict[str, Any]:
    """Return a recipe for the teacher, tokenizer and texts in `folder`; every stage leaves a checkpoint a step."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    sharded = os.environ.get("ACCELERATE_USE_CPU") == "false"
    training = {"length": 24, "per_device_train_batch_size": 4 // count, "disable_tqdm": True, "logging_steps": 1}
    training |= {"use_cpu": not sharded, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    return {
        "teacher": str(folder / "teacher"),
        "data": str(folder / "texts"),
        "dtype": dtype,
        "align": {**training, "max_steps": STEPS["align"]},
        "select": {"keep": 1, "num_tokens": 96, "length": 24},
        "distill": {**training, "max_steps": STEPS["distill"]},
        "extend": {**training, "max_steps": STEPS["extend"], "length": 48, "kl_weight": 0.5},
        "evaluate": {"num_tokens": 96, "length": 24},
    }


def pipeline(
    folder: Path,
    name: str,
    kill: tuple[str, int, int] | None = None,
    dtype: str = "float64",
    states: str | None = None,
) -> None:
    """Run a recipe into `folder / name`; with `kill`, this rank is killed in that stage at that step.

    With `states`, stage 2 reads the teacher's states from that folder.
    """
    values = recipe_values(folder, dtype)
    values["distill"]["teacher_states"] = states and str(folder / states)
    whole, sharded = staged_run.whole, []

    def watched(model: PreTrainedModel) -> PreTrainedModel:
        sharded.append(any(isinstance(parameter, DTensor) for parameter in model.parameters()))
        return whole(model)

    staged_run.whole = watched
    if kill is not None and os.environ["RANK"] == str(kill[1]):
        _arm(kill[0], kill[2])
    RecipeRun(Recipe.from_dict(values), folder / name).run()
    write(folder / f"{name}-sharded", sharded)


def _arm(stage: str, step: int) -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def select_layers(*args: Any, **kwargs: Any) -> None:
        die()

    plain_step = StageTrainer.training_step

    def training_step(self: StageTrainer, *args: Any, **kwargs: Any) -> Any:
        if self.stage == stage and self.state.global_step == step:
            die()
        return plain_step(self, *args, **kwargs)

    if stage == "select":
        recipe_room.select_layers = select_layers
    StageTrainer.training_step = training_step


def case_pipeline(folder: Path) -> None:
    """Run the recipe on one process, on two, with one killed in every stage, and with the teacher's states on disk."""
    assert run(1, pipeline, folder, "one") == [0]
    assert run(2, pipeline, folder, "two") == [0, 0]
    generator = torch.Generator().manual_seed(5)
    killed = []
    for number, stage in enumerate(("align", "select", "distill", "extend")):
        step = int(torch.randint(1, STEPS.get(stage, 2), (), generator=generator))
        codes = run(2, pipeline, folder, "killed", (stage, number % 2, step))
        # The other process may notice the lost connection before it is ended.
        assert codes[number % 2] == -signal.SIGKILL, codes
        assert codes[1 - number % 2] != 0, codes
        killed.append(sorted(path.name for path in (folder / "killed").iterdir()))
    assert run(2, pipeline, folder, "killed") == [0, 0]
    write(folder / "killed_runs", killed)
    assert run(2, pipeline, folder, "stored", ("distill", 1, 2), "float64", "states")[1] == -signal.SIGKILL
    assert run(2, pipeline, folder, "stored", None, "float64", "states") == [0, 0]


def case_sharded_pipeline(folder: Path) -> None:
    """Run the recipe sharded: whole, and killed in both stages that shard. FSDP wants one dtype, so float32."""
    assert run(1, pipeline, folder, "one", None, "float32") == [0]
    assert run(2, pipeline, folder, "two", None, "float32", sharded=True) == [0, 0]
    for stage, rank in (("distill", 1), ("extend", 0)):
        codes = run(2, pipeline, folder, "killed", (stage, rank, 2), "float32", sharded=True)
        assert codes[rank] == -signal.SIGKILL
    assert run(2, pipeline, folder, "killed", None, "float32", sharded=True) == [0, 0]


# Any model of ours in transformers' own Trainer.


def make_families() -> dict[str, PreTrainedModel]:
    """Return a small model of each family in float64, and an Ouro with its exit gate frozen: no loss reaches it."""
    small = {"initializer_range": 0.2, "num_hidden_layers": 2}
    configs = {
        "ouro": loopergy.OuroConfig.from_preset("tiny", **small),
        "ouro-last-loop": loopergy.OuroConfig.from_preset("tiny", **small, training_loss="last_loop"),
        "lt2": loopergy.LT2Config.from_preset("tiny", **small, layer_mixers="gdn,full", vocab_size=128),
        "lt2-tied": loopergy.LT2Config.from_preset(
            "tiny", **small, layer_mixers="gdn,full", vocab_size=128, tie_word_embeddings=True
        ),
        "cem-llama": loopergy.CEMLlamaConfig.from_preset("tiny", **small, cem_diag="none"),
        "nrgpt": loopergy.NRGPTConfig.from_preset("tiny", initializer_range=0.2),
    }
    models = {}
    for name, config in configs.items():
        torch.manual_seed(0)
        models[name] = AutoModelForCausalLM.from_config(config).double()
    models["ouro-last-loop"].model.early_exit_gate.requires_grad_(False)
    return models


def train_families(folder: Path, checkpointing: bool = False, resume: str | None = None) -> None:
    """Train each family for four steps of four rows of unequal length, save it, and write losses and norms."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    sharded = os.environ["ACCELERATE_USE_CPU"] == "false"
    generator = torch.Generator().manual_seed(3)
    rows = []
    for real in (12, 3, 7, 5) * 4:
        ids = torch.randint(3, 128, (12,), generator=generator)
        rows.append({"input_ids": ids, "labels": ids.clone().index_fill(0, torch.arange(real, 12), -100)})
    result = {}
    for name, model in make_families().items():
        args = TrainingArguments(
            str(folder / name),
            per_device_train_batch_size=4 // count,
            max_steps=4,
            logging_steps=1,
            learning_rate=1e-3,
            save_strategy="steps" if resume else "no",
            save_steps=2,
            activation_checkpointing=checkpointing,
            train_sampling_strategy="sequential",
            use_cpu=not sharded,
            disable_tqdm=True,
            report_to="none",
        )
        trainer = Trainer(model, args, train_dataset=rows)
        trainer.train(resume_from_checkpoint=str(folder / name / "checkpoint-2") if resume == "from" else None)
        trainer.save_model(str(folder / name / "final"))
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        result[name] = {
            "loss": [entry["loss"] for entry in history],
            "grad_norm": [entry["grad_norm"] for entry in history],
            "sharded": all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters()),
        }
    write(folder, result)


def case_families(folder: Path) -> None:
    """Train on one process and on two, with and without activation checkpointing."""
    assert run(1, train_families, folder / "one") == [0]
    assert run(2, train_families, folder / "two") == [0, 0]
    assert run(2, train_families, folder / "two-checkpointing", True) == [0, 0]


def case_sharded_families(folder: Path) -> None:
    """Train sharded, with and without activation checkpointing, and once more from the middle."""
    assert run(1, train_families, folder / "one") == [0]
    assert run(2, train_families, folder / "two", False, "save", sharded=True) == [0, 0]
    assert run(2, train_families, folder / "two-checkpointing", True, sharded=True) == [0, 0]
    for name in make_families():
        shutil.copytree(folder / "two" / name / "checkpoint-2", folder / "resumed" / name / "checkpoint-2")
    assert run(2, train_families, folder / "resumed", False, "from", sharded=True) == [0, 0]


CASES = {name.removeprefix("case_"): value for name, value in list(globals().items()) if name.startswith("case_")}

if __name__ == "__main__":
    torch.set_num_threads(1)
    CASES[sys.argv[1]](Path(sys.argv[2]))
