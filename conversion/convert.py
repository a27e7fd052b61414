# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Turn an Ouro or a Llama into an LT2 hybrid that starts from its weights.

Kept layers, norms, MLPs, embeddings, head and exit gate are copied. In every other layer softmax attention becomes
another mixer, Gated DeltaNet unless said otherwise, that takes over the teacher's q, k, v and o projections as far as
they fit (`mixer_starts.py` has the table) and whose gates are new. Nothing else is added, so with all layers kept the
student *is* the teacher, bit for bit, in every loop.

Source: LT2 (arXiv 2605.20670) and the released Ouro-hybrid model; the initialisation of Gated DeltaNet is that of
hybrid distillation (arXiv 2512.20569), with shared heads repeated head by head.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from loopergy.configuration.configuration_lt2 import LT2Config
from loopergy.configuration.configuration_ouro import repair_special_tokens
from loopergy.conversion.assemble import compare_with_teacher, empty_student, fill
from loopergy.conversion.errors import ConversionError
from loopergy.conversion.families import (
    KNOWN_TYPES,
    check_teacher,
    load_teacher,
    parse_keep_layers,
    student_config,
)
from loopergy.conversion.folders import check_new_folder, new_folder, saved_tokenizer
from loopergy.conversion.public_names import public_name
from loopergy.conversion.report import REPORT_FILE, ConversionReport, TensorRecord, dtype_name
from loopergy.conversion.weight_maps import WeightMap, weight_map
from loopergy.conversion.whole_loading import checked_dtype
from loopergy.modeling.modeling_lt2 import LT2ForCausalLM

_ATTENTION_FIELDS = ("num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias", "rope_parameters")
_MUST_AGREE = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "mlp_bias", "hidden_act", "rms_norm_eps"),
    *("block_style", "norm_between_loops"),
    *_ATTENTION_FIELDS,
)


@dataclass
class Conversion:
    """A converted model and the account of its tensors.

    Args:
        model (`LT2ForCausalLM`): The student, in eval mode.
        report (`ConversionReport`): Where each tensor came from.
        tokenizer (`PreTrainedTokenizerBase | None`): The teacher's tokenizer, if the teacher was loaded from a folder,
            a file or the Hub and has one.
    """

    model: LT2ForCausalLM
    report: ConversionReport
    tokenizer: PreTrainedTokenizerBase | None = None

    def save_pretrained(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Write model, tokenizer and `conversion_report.json`, the whole folder or nothing.

        Args:
            folder (`str` or `Path`): Where to.
            overwrite (`bool`): Replace a folder that holds something.

        Returns:
            `Path`: The folder; `AutoModelForCausalLM.from_pretrained` loads it once `loopergy` is imported.

        Raises:
            FileExistsError: If the folder holds something and `overwrite` is False.
        """
        target = check_new_folder(folder, overwrite=overwrite)
        with new_folder(target, overwrite=overwrite) as unfinished:
            self.model.save_pretrained(unfinished)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(unfinished)
            self.report.to_json(unfinished / REPORT_FILE)
        return target


def convert(
    teacher: PreTrainedModel | str | Path,
    keep_layers: Sequence[int] | str | int | float,
    mixer: str | Sequence[str] | Mapping[int, str] = "gdn",
    *,
    seed: int = 0,
    dtype: torch.dtype | str | None = None,
    revision: str | None = None,
    verify: bool | None = None,
    **mixer_options: Any,
) -> Conversion:
    """Convert a looped or plain transformer into an LT2 hybrid.

    Args:
        teacher (`PreTrainedModel`, `str` or `Path`): A model in memory (its weights as they are now are what
            counts), a folder, a Hub id, or a `.gguf` file. `OuroForCausalLM`, or any model that computes what
            `LlamaForCausalLM` computes: tied or untied head, biases, shared key/value heads, any rotary settings.
        keep_layers (`list[int]`, `str`, `int` or `float`): Physical layers that keep full attention, in all loops:
            indices, `"all"`, `[]`, a count or a share (spread evenly, see `parse_keep_layers`).
        mixer (`str`, `list[str]` or `dict[int, str]`): Mixers of the other layers: a name (`"gdn"`, `"window"`,
            `"kda"`, `"deltanet"`, `"mamba2"`, `"hgrn2"`, `"retnet"`, `"gla"`, `"la"`, `"nsa"`, `"dsa"`); a pattern
            over these layers such as `"gdn*3,dsa"`; one name for each of them; or a mapping from layer to name.
        seed (`int`): Seed of the fresh tensors; 0 by default. The global random state is not touched.
        dtype (`torch.dtype` or `str`, *optional*): dtype of the student: float32, bfloat16, float16 or float64; the
            teacher's by default.
        revision (`str`, *optional*): Revision of a Hub id.
        verify (`bool`, *optional*): Compare the logits of teacher and student with all layers kept on a few random
            tokens (two forward passes, no memory for weights). By default done for all model types but `ouro` and
            `llama`.
        mixer_options: Fields of `LT2Config` of the mixers that are used; `MIXER_OPTIONS` in `families.py` lists them.
            For `gdn`: `gdn_use_short_conv` (False; True starts as the identity), `gdn_conv_size` (4), `gdn_use_gate`
            (True), `gdn_allow_neg_eigval` (False), `gdn_norm_eps` (1e-5). For `window`: `sliding_window`. For `dsa`,
            among others, `dsa_topk` and `dsa_latent_dim`.

    Returns:
        `Conversion`: `.model`, `.report`, `.tokenizer`, `.save_pretrained(folder)`. The model shares no memory with a
        teacher that was given as an object.

    Raises:
        ConversionError: If the teacher is not supported, or if a tensor is left over, missing or does not fit.
        ValueError: For wrong layers, mixer, dtype or options, or a tokenizer that cannot be read.
        FileNotFoundError: If the teacher is neither on this machine nor on the Hub.

    Example:
        >>> import loopergy
        >>> from loopergy import OuroConfig, OuroForCausalLM
        >>> teacher = OuroForCausalLM(OuroConfig.from_preset("tiny"))
        >>> conversion = loopergy.convert(teacher, keep_layers=[1])
        >>> conversion.model.config.layer_mixers
        ['gdn', 'full']
        >>> loopergy.convert(teacher, keep_layers=[], mixer="gdn,dsa").model.config.layer_mixers
        ['gdn', 'dsa']
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed={seed!r}; allowed: a whole number")
    dtype = checked_dtype(dtype)
    model, source = load_teacher(teacher, dtype=dtype, revision=revision)
    check_teacher(model)
    config = student_config(model.config, keep_layers, mixer, **mixer_options)
    state = model.state_dict()
    notes = _notes(model.config, state, config)
    weights = weight_map(config)
    weights.check_teacher(state)
    device = next(iter(state.values())).device
    tokenizer = _load_tokenizer(source, config, revision)
    verified = _verify(model, config, verify) if device.type != "meta" else None
    student = fill(
        empty_student(config, dtype or model.dtype),
        weights,
        state,
        seed=seed,
        device=device,
        share=source != "memory",
    )
    notes += _rotary_notes(model, student)
    if model.generation_config is not None:
        student.generation_config = copy.deepcopy(model.generation_config)
        if model.config.model_type == "ouro":
            repair_special_tokens(student.generation_config)
    report = ConversionReport(
        teacher={
            "source": public_name(source),
            "model_type": model.config.model_type,
            "class": type(model).__name__,
            "parameters": model.num_parameters(),
        },
        kept_layers=parse_keep_layers(keep_layers, config.num_hidden_layers),
        num_layers=config.num_hidden_layers,
        num_loops=config.num_loops,
        mixer=", ".join(dict.fromkeys(name for name in config.layer_mixers if name != "full")),
        layer_mixers=list(config.layer_mixers),
        mixer_options={name: getattr(config, name) for name in mixer_options},
        seed=seed,
        dtype=dtype_name(student.dtype),
        tensors=_records(weights, student),
        all_zero=[] if device.type == "meta" else [name for name, tensor in state.items() if not torch.any(tensor)],
        verified=verified,
        notes=notes,
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
    )
    report.check(student.state_dict())
    return Conversion(student, report, tokenizer)


def restore_layers(
    student: LT2ForCausalLM,
    teacher: PreTrainedModel | str | Path,
    layers: Sequence[int] | str | int | float,
    *,
    share: bool = False,
) -> LT2ForCausalLM:
    """Give some layers of a student the teacher's full attention back, in all loops.

    Everything but the mixers of these layers is the student's: its other mixers, norms, MLPs, embeddings.

    Args:
        student (`LT2ForCausalLM`): A converted model; not changed.
        teacher (`PreTrainedModel`, `str` or `Path`): What it was converted from.
        layers (`list[int]`, `str`, `int` or `float`): Physical layers, none of which has full attention already.
        share (`bool`): Let the new model use the memory of student and teacher (for evaluation only: training one
            would change the others). By default everything is copied.

    Returns:
        `LT2ForCausalLM`: A new model in eval mode, in the student's dtype and on its device, all parameters trainable.

    Raises:
        ConversionError: If student and teacher do not have the same architecture; the text lists the fields.
        ValueError: For layers out of range, given twice, or with full attention already.
    """
    model, _ = load_teacher(teacher, dtype=student.dtype)
    check_teacher(model)
    config = copy.deepcopy(student.config)
    restored = parse_keep_layers(layers, config.num_hidden_layers)
    already = [layer for layer in restored if config.layer_mixers[layer] == "full"]
    if already:
        raise ValueError(f"layers={restored}: {already} have full attention already; name only layers that do not")
    reference = student_config(model.config, "all")
    _check_agreement(config, reference)
    config.layer_mixers = ["full" if i in restored else name for i, name in enumerate(config.layer_mixers)]
    from_teacher = tuple(f"model.layers.{layer}.self_attn." for layer in restored)
    own = {name: tensor for name, tensor in student.state_dict().items() if not name.startswith(from_teacher)}
    taken = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(from_teacher)}
    target = empty_student(config, student.dtype)
    weights = weight_map(reference)
    rules = [rule for rule in weights.rules if rule.target.startswith(from_teacher)]
    WeightMap(tuple(rules), weights.facts).check_teacher(taken)
    sources = own | taken
    keep = WeightMap.identity(target.state_dict(), weight_map(config).facts)
    out = fill(target, keep, sources, seed=0, device=student.device, share=share)
    out.generation_config = copy.deepcopy(student.generation_config)
    return out


def _check_agreement(student: LT2Config, teacher: LT2Config) -> None:
    different = [
        f"{name} ({getattr(student, name)!r} and {getattr(teacher, name)!r})"
        for name in _MUST_AGREE
        if getattr(student, name) != getattr(teacher, name)
    ]
    if different:
        raise ConversionError(f"student and teacher differ in {', '.join(different)}: not its teacher")


def _verify(teacher: PreTrainedModel, student: LT2Config, verify: bool | None) -> dict[str, Any] | None:
    """Refuse a teacher whose weights, run as Llama's or Ouro's, give other logits."""
    if verify is False or (verify is None and teacher.config.model_type in KNOWN_TYPES):
        return None
    config = copy.deepcopy(student)
    config.layer_mixers = ["full"] * config.num_hidden_layers
    result = compare_with_teacher(teacher, config, weight_map(config))
    # Room for another order of the same operations; a different computation is off by the size of the logits.
    allowed = max(1e-3, 8 * torch.finfo(teacher.dtype).eps) * result["max_abs_logit"]
    if not result["max_abs_difference"] <= allowed:
        raise ConversionError(
            f"the teacher (model_type {teacher.config.model_type!r}) has Llama's tensors but computes something else: "
            f"the logits of its weights differ by {result['max_abs_difference']:.3g} (largest logit "
            f"{result['max_abs_logit']:.3g}), so it is not supported"
        )
    return result


def _records(weights: WeightMap, student: LT2ForCausalLM) -> list[TensorRecord]:
    state = student.state_dict()
    return [
        TensorRecord(
            name=rule.target,
            source=" + ".join(rule.sources) or None,
            action="fresh" if rule.fresh else "transformed" if weights.is_new(rule) else "copied",
            how=weights.describe(rule),
            shape=list(state[rule.target].shape),
            dtype=dtype_name(state[rule.target].dtype),
        )
        for rule in weights.rules
    ]


def _notes(teacher: PreTrainedConfig, state: dict[str, torch.Tensor], config: LT2Config) -> list[str]:
    """Say what of the teacher the student does not have; unties the head if the teacher's weights are not tied."""
    notes = []
    threshold = getattr(teacher, "early_exit_threshold", 1)
    step = getattr(teacher, "early_exit_step", None)
    if threshold < 1 or step is not None:
        notes.append(
            f"the teacher exits early (early_exit_threshold={threshold}, early_exit_step={step}); the student runs "
            f"all {config.num_loops} loops"
        )
    if config.tie_word_embeddings and _head_differs(state):
        config.tie_word_embeddings = False
        notes.append(
            "the teacher's config ties the head to the embedding but its weights differ: the student's is untied"
        )
    return notes


def _head_differs(state: dict[str, torch.Tensor]) -> bool:
    head, embedding = state.get("lm_head.weight"), state.get("model.embed_tokens.weight")
    if head is None or embedding is None or head.data_ptr() == embedding.data_ptr():
        return False
    return not torch.equal(head, embedding)


def _rotary_notes(teacher: PreTrainedModel, student: LT2ForCausalLM) -> list[str]:
    """Say so if the teacher's rotary table is not the one its config gives."""
    theirs = getattr(getattr(teacher.model, "rotary_emb", None), "original_inv_freq", None)
    ours = student.model.rotary_emb.original_inv_freq
    if theirs is None or theirs.is_meta or torch.equal(theirs.to(ours), ours):
        return []
    return [
        "the teacher's rotary table is not the one its config gives (`.to(dtype)` after loading rounds it; load with "
        "dtype= instead); the student's is exact, so its logits differ slightly"
    ]


def _load_tokenizer(source: str, config: LT2Config, revision: str | None) -> PreTrainedTokenizerBase | None:
    """Load the teacher's tokenizer, if it has one, with the special ids of Ouro's config where its own are all 0."""
    tokenizer = None if source == "memory" else saved_tokenizer(source, revision)
    if tokenizer is None:
        return None
    if (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 0, 0) and config.num_loops > 1:
        for name in ("bos_token", "eos_token", "pad_token"):
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(getattr(config, f"{name}_id")))
    return tokenizer
