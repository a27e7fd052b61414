# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""One run on many processes: who writes, who waits, and how sharded weights are put together.

Every process does the same work on its own rows of the data. The main one alone writes, and nobody reads a folder
before it is whole. So the run's folder has to be one that all processes see.
"""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import parse_flag_from_env
from filelock import FileLock, Timeout
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from loopergy.conversion.folders import new_folder

Model = TypeVar("Model", bound=PreTrainedModel)
LOCK_FILE = ".running"


def join_processes() -> PartialState:
    """Join the processes that `accelerate launch` or `torchrun` started; without a launcher there is this one alone.

    Returns:
        `accelerate.PartialState`: Tells this process's number, and waits for the others.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if launched and not torch.accelerator.is_available():
        # Without it accelerate lets each process believe that it is alone.
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    return PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))


@contextmanager
def alone(folder: str | Path, is_main: bool = True) -> Iterator[None]:
    """Keep a second command from writing to the same folder; where files can be locked, the lock dies with its run.

    Args:
        folder (`str` or `Path`): Has to be there.
        is_main (`bool`, defaults to `True`): Only the main process of a run locks it.

    Raises:
        ValueError: Another run writes to it.
    """
    if not is_main:
        yield
        return
    lock = FileLock(Path(folder) / LOCK_FILE, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"{folder} is in use by another run. Wait for it, or give another output.") from None
    except NotImplementedError:
        pass  # what older versions of filelock raise on a file system without flock; newer ones leave a marker
    try:
        yield
    finally:
        lock.release()


@contextmanager
def shared_folder(folder: str | Path) -> Iterator[Path | None]:
    """Give the main process a folder to write to, which replaces `folder` when it is whole; the others wait for it.

    Args:
        folder (`str` or `Path`): The final name.

    Yields:
        `Path` or None: What [`new_folder`] gives, on the main process; None on the others.
    """
    state = PartialState()
    with new_folder(folder, overwrite=True) if state.is_main_process else nullcontext() as unfinished:
        yield unfinished
    state.wait_for_everyone()


def check_sharding(accelerator: Accelerator, model: PreTrainedModel) -> None:
    """Refuse what FSDP cannot shard, or a stage could not write as a folder, before hours are spent.

    Raises:
        ValueError: FSDP1, sharded checkpoints, or trained parameters of several dtypes.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None:
        return
    if plugin.fsdp_version != 2 or "FULL" not in str(plugin.state_dict_type):
        raise ValueError(
            f"FSDP {plugin.fsdp_version} with {plugin.state_dict_type}: a stage needs fsdp_version 2 and "
            f"FULL_STATE_DICT, as in recipes/accelerate/fsdp2.yaml."
        )
    dtypes = {str(parameter.dtype) for parameter in model.parameters() if parameter.requires_grad}
    if len(dtypes) > 1 and accelerator.mixed_precision == "no":
        raise ValueError(
            f"FSDP shards parameters of one dtype together, and this model has {sorted(dtypes)}: decays of recurrent "
            f"mixers stay float32. Load it in float32, and set `bf16: true` to compute in bfloat16."
        )


def whole(model: Model) -> Model:
    """Return a model whose weights are on this process: itself, or a copy put together from all processes' shards.

    Args:
        model (`PreTrainedModel`): All processes call this together if the model is sharded.
    """
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return model
    tensors = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }
    kind: Any = type(model)
    gathered = kind(copy.deepcopy(model.config)).to(dtype=model.dtype, device=model.device)
    gathered.load_state_dict(tensors)
    return gathered.train(model.training)
