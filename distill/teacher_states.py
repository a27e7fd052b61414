# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""The teacher's states on disk, so that stage 2 runs without the teacher.

Stage 2 needs of the teacher the normed state after each loop that has a weight, and its head. Both are written once,
for the very rows that the run will read, and used as often as wanted: other rates, other kept layers, other bodies.

| file                       | what                                                                                |
|----------------------------|-------------------------------------------------------------------------------------|
| `manifest.json`            | what the states are of, and the hash of each shard that is done                     |
| `head.safetensors`         | the teacher's head                                                                  |
| `states-00000.safetensors` | `loop_3` `[rows, length, hidden]` for each loop these rows need, `keys` of the rows |

A shard is written under another name and renamed, and counts when the manifest has its hash; a killed run goes on with
the next shard. A row is found again by a hash of its tokens and positions, so that neither the order of the rows, nor
the number of processes, nor a resumed run matters. States, not logits: a token takes `loops x hidden` numbers.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from loopergy.conversion.folders import replace_file
from loopergy.distill.stage import config_hash
from loopergy.distill.teacher import head_weight, loop_states, num_loops
from loopergy.training.data import PackedDataset
from loopergy.training.fields import differences

if TYPE_CHECKING:
    from loopergy.distill.distill import DistillConfig

MANIFEST_FILE = "manifest.json"
HEAD_FILE = "head.safetensors"
SHARD_BYTES = 2**28
_BEGINNING = {"epoch": 0, "document": 0, "token": 0, "rows": 0}
_OPEN_SHARDS = 4


def weights_hash(model: PreTrainedModel) -> str:
    """Return the SHA-256 of all tensors of a model, with their names, dtypes and shapes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256 of what decides how a text is cut into tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(text.encode()).hexdigest()


def data_identity(data: PackedDataset) -> dict[str, Any]:
    """Return what decides the rows of a data set."""
    options = {name: getattr(data, name) for name in ("length", "seed", "split", "separate", "repeat", "separator")}
    return {"documents": data.texts_hash, "tokenizer": tokenizer_hash(data.tokenizer), **options}


def teacher_identity(teacher: PreTrainedModel) -> dict[str, Any]:
    """Return what decides the states of a teacher."""
    return {"config": config_hash(teacher.config), "weights": weights_hash(teacher), "loops": num_loops(teacher)}


def row_keys(batch: Mapping[str, Any]) -> list[str]:
    """Return a hash of the tokens and positions of each row of a batch."""
    parts = [batch["input_ids"], batch.get("position_ids")]
    columns = [part.detach().cpu().to(torch.int64).contiguous().numpy() for part in parts if part is not None]
    rows = (b"".join(part.tobytes() for part in parts) for parts in zip(*columns, strict=True))
    return [hashlib.blake2b(row, digest_size=16).hexdigest() for row in rows]


def _write_tensors(file: Path, tensors: dict[str, torch.Tensor]) -> str:
    """Write a file whole or not at all; return its hash."""
    unfinished = file.with_suffix(".tmp")
    save_file(tensors, unfinished)
    digest = _file_hash(unfinished)
    os.replace(unfinished, file)
    return digest


def _file_hash(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def loops_of_shards(args: "DistillConfig", rows_per_shard: int, loops: int) -> list[list[int]]:
    """Return for every shard the loops that have a weight while its rows are trained on.

    Args:
        args (`DistillConfig`): The schedule, the steps and the rows of a step.
        rows_per_shard (`int`): Rows of a shard; the last may have fewer.
        loops (`int`): Loops of the teacher.
    """
    rows, step_rows = args.max_steps * args.rows_per_step, args.rows_per_step
    shards = []
    for first in range(0, rows, rows_per_shard):
        last = min(first + rows_per_shard, rows) - 1
        steps = range(first // step_rows, last // step_rows + 1)
        schedules = [args.schedule(step / args.max_steps, loops) for step in steps]
        shards.append([loop for loop in range(loops) if any(weights[loop] > 0 for weights in schedules)])
    return shards


def write_teacher_states(
    teacher: PreTrainedModel, data: PackedDataset, folder: str | Path, args: "DistillConfig"
) -> Path:
    """Write the states of all rows that a run of stage 2 reads, or what of them is missing.

    Args:
        teacher (`PreTrainedModel`): The teacher, on its device.
        data (`PackedDataset`): The run's data. Read from the beginning, and set back afterwards.
        folder (`str` or `Path`): Where to.
        args (`DistillConfig`): Of the run: steps, rows of a step, schedule, precision, and `teacher_states_dtype`.

    Returns:
        `Path`: The folder.

    Raises:
        ValueError: The folder has states of something else, the run has no number of steps, data that no single
            stream gives, or too few of them.
    """
    if not isinstance(data, PackedDataset) or args.dataloader_num_workers > 0 or args.max_steps < 1:
        raise ValueError(
            f"`teacher_states` needs the rows of a `PackedDataset` in order and their number; got a "
            f"{type(data).__name__}, dataloader_num_workers={args.dataloader_num_workers} and "
            f"max_steps={args.max_steps}. Pass such data, dataloader_num_workers=0, and target_tokens or max_steps."
        )
    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    manifest = _begin(teacher, data, folder, args)
    if len(manifest["shards"]) == len(manifest["loops_of_shards"]):
        return folder
    before = data.state_dict()
    try:
        _write_shards(teacher, data, folder, args, manifest)
    finally:
        data.load_state_dict(before)
    return folder


def _begin(teacher: PreTrainedModel, data: PackedDataset, folder: Path, args: "DistillConfig") -> dict[str, Any]:
    """Return the manifest of an earlier run of the same, or write a new one."""
    loops, dtype = num_loops(teacher), args.teacher_states_dtype or str(teacher.dtype).removeprefix("torch.")
    row_bytes = loops * data.length * teacher.config.hidden_size * getattr(torch, dtype).itemsize
    rows_per_shard = max(1, SHARD_BYTES // row_bytes)
    identity = {
        "teacher": teacher_identity(teacher),
        "data": data_identity(data),
        "rows": args.max_steps * args.rows_per_step,
        "rows_per_shard": rows_per_shard,
        "dtype": dtype,
        "autocast": "bfloat16" if args.bf16 else "float16" if args.fp16 else None,
        "loops_of_shards": loops_of_shards(args, rows_per_shard, loops),
    }
    file = folder / MANIFEST_FILE
    if file.is_file():
        manifest = json.loads(file.read_text(encoding="utf-8"))
        found = {name: value for name, value in manifest.items() if name not in ("shards", "head")}
        differing = differences(identity, found)
        if differing:
            raise ValueError(
                f"The teacher's states in {str(folder)!r} are not those of this run; different are: "
                f"{', '.join(differing)}. Give `teacher_states` another folder, or remove this one."
            )
        return manifest
    head = _write_tensors(folder / HEAD_FILE, {"weight": head_weight(teacher).detach().cpu().contiguous()})
    manifest = {**identity, "head": head, "shards": []}
    replace_file(file, json.dumps(manifest, indent=1) + "\n")
    return manifest


def _write_shards(
    teacher: PreTrainedModel, data: PackedDataset, folder: Path, args: "DistillConfig", manifest: dict[str, Any]
) -> None:
    """Write the shards that the manifest lacks, and note each."""
    done: list[dict[str, Any]] = manifest["shards"]
    data.load_state_dict(done[-1]["next_row"] if done else _BEGINNING)
    rows, first = iter(data), len(done) * manifest["rows_per_shard"]
    bar = tqdm(total=manifest["rows"], initial=first, desc="teacher's states", unit="row", disable=args.disable_tqdm)
    for number in range(len(done), len(manifest["loops_of_shards"])):
        count = min(manifest["rows_per_shard"], manifest["rows"] - first)
        items = [item for item in itertools.islice(rows, count) if len(item["input_ids"]) == data.length]
        if len(items) < count:
            raise ValueError(
                f"The data end after {first + len(items)} rows of {data.length} tokens, and the run reads "
                f"{manifest['rows']}: pass more text, repeat=True, or fewer steps."
            )
        tensors = _states(teacher, items, manifest["loops_of_shards"][number], args, manifest, bar)
        file = folder / f"states-{number:05d}.safetensors"
        first += count
        entry = {"file": file.name, "sha256": _write_tensors(file, tensors), "next_row": data.state_dict(first)}
        done.append(entry)
        replace_file(folder / MANIFEST_FILE, json.dumps(manifest, indent=1) + "\n")
    bar.close()


@torch.no_grad()
def _states(
    teacher: PreTrainedModel,
    items: Sequence[Mapping[str, torch.Tensor]],
    loops: list[int],
    args: "DistillConfig",
    manifest: Mapping[str, Any],
    bar: tqdm,
) -> dict[str, torch.Tensor]:
    """Run the teacher over the rows of a shard."""
    keys: list[str] = []
    parts: dict[int, list[torch.Tensor]] = {loop: [] for loop in loops}
    narrow, dtype = getattr(torch, manifest["autocast"] or "bfloat16"), getattr(torch, manifest["dtype"])
    for start in range(0, len(items), args.per_device_train_batch_size):
        chosen = items[start : start + args.per_device_train_batch_size]
        names = [name for name in ("input_ids", "position_ids") if name in chosen[0]]
        batch = {name: torch.stack([item[name] for item in chosen]).to(teacher.device) for name in names}
        keys += row_keys(batch)
        with torch.autocast(teacher.device.type, narrow, enabled=manifest["autocast"] is not None):
            states = loop_states(teacher, batch)
        for loop in loops:
            parts[loop].append(states[loop].to(dtype).cpu())
        bar.update(len(chosen))
    table = torch.tensor([list(bytes.fromhex(key)) for key in keys], dtype=torch.uint8)
    return {"keys": table, **{f"loop_{loop}": torch.cat(part) for loop, part in parts.items()}}


class TeacherStates:
    """Read the teacher's states of a batch.

    Args:
        folder (`str` or `Path`): What `write_teacher_states` wrote.

    Attributes:
        num_loops (`int`): Loops of the teacher.
        head (`torch.Tensor` of shape `[vocabulary, hidden]`): Weight of the teacher's head.

    Raises:
        FileNotFoundError: No manifest in the folder.
        ValueError: A folder that was not finished, or a file that is not what was written.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).expanduser()
        file = self.folder / MANIFEST_FILE
        if not file.is_file():
            raise FileNotFoundError(
                f"`teacher_states` {str(folder)!r} has no {MANIFEST_FILE}. Pass a teacher to write the states first."
            )
        self.manifest: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        done, wanted = len(self.manifest["shards"]), len(self.manifest["loops_of_shards"])
        if done < wanted:
            raise ValueError(
                f"`teacher_states` {str(folder)!r} has {done} of {wanted} shards. Pass a teacher to write the rest."
            )
        self.num_loops: int = self.manifest["teacher"]["loops"]
        self.head = self._checked(HEAD_FILE, self.manifest["head"]).get_tensor("weight")
        self._opened: dict[int, Any] = {}
        self._checked_shards: set[int] = set()
        self._places: dict[str, list[tuple[int, int]]] = {}
        for number, entry in enumerate(self.manifest["shards"]):
            with safe_open(self._file(entry["file"]), "pt") as shard:
                for row, key in enumerate(shard.get_tensor("keys")):
                    self._places.setdefault(bytes(key.tolist()).hex(), []).append((number, row))

    def _file(self, name: str) -> Path:
        file = self.folder / name
        if not file.is_file():
            raise ValueError(
                f"`teacher_states`: {str(file)!r}, which the manifest names, is missing. Write them anew."
            )
        return file

    def _checked(self, name: str, sha256: str) -> Any:
        file = self._file(name)
        found = _file_hash(file)
        if found != sha256:
            raise ValueError(
                f"`teacher_states`: {str(file)!r} is not what was written (SHA-256 {found[:16]}, in the manifest "
                f"{sha256[:16]}). Remove the folder and write it anew."
            )
        return safe_open(file, "pt")

    def _shard(self, number: int) -> Any:
        """Open a shard; its hash is checked the first time."""
        if number not in self._opened:
            entry = self.manifest["shards"][number]
            known = number in self._checked_shards
            shard = (
                safe_open(self._file(entry["file"]), "pt") if known else self._checked(entry["file"], entry["sha256"])
            )
            self._checked_shards.add(number)
            while len(self._opened) >= _OPEN_SHARDS:
                del self._opened[next(iter(self._opened))]
            self._opened[number] = shard
        return self._opened[number]

    def read(self, batch: Mapping[str, torch.Tensor], loops: Iterable[int]) -> dict[int, torch.Tensor]:
        """Return the states of some loops.

        Args:
            batch (mapping): `input_ids` and, if the rows have them, `position_ids`, both `[batch, length]`.
            loops (iterable of `int`): Loops, from 0.

        Returns:
            `dict[int, torch.Tensor]`: `[batch, length, hidden]` for each loop, in the dtype of `head`, beside it.

        Raises:
            ValueError: A row, or a loop of it, that was not written.
        """
        loops = list(loops)
        found: dict[int, list[torch.Tensor]] = {loop: [] for loop in loops}
        plan: list[list[int]] = self.manifest["loops_of_shards"]
        for key in row_keys(batch):
            places = self._places.get(key, [])
            fitting = [place for place in places if set(loops) <= set(plan[place[0]])]
            if not fitting:
                there = sorted({loop for number, _ in places for loop in plan[number]})
                raise ValueError(
                    f"A row of {batch['input_ids'].shape[1]} tokens needs the teacher's loops {loops}, and "
                    f"{str(self.folder)!r} has {there or 'none'} of it. It was written for one run, of "
                    f"{self.manifest['rows']} rows of {self.manifest['data']['length']} tokens: use that run's data, "
                    f"schedule, steps and batch sizes, or another folder."
                )
            number, row = fitting[0]
            for loop in loops:
                found[loop].append(self._shard(number).get_slice(f"loop_{loop}")[row])
        return {loop: torch.stack(rows).to(self.head.device, self.head.dtype) for loop, rows in found.items()}

    def to(self, device: torch.device) -> "TeacherStates":
        """Move the head, and with it what is read."""
        self.head = self.head.to(device)
        return self

    def check(self, data: Any) -> None:
        """Refuse states of other data.

        Args:
            data: Compared if it is a `PackedDataset`; other rows are found, or not, one by one.

        Raises:
            ValueError: Naming what differs.
        """
        differing = differences(self.manifest["data"], data_identity(data)) if isinstance(data, PackedDataset) else {}
        if differing:
            raise ValueError(
                f"`teacher_states` {str(self.folder)!r} are of other data; different are: {', '.join(differing)}. Use "
                f"the same text, length and seed, or another folder."
            )
