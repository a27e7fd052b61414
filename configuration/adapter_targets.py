# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Which layers an adapter of `peft` goes on when its own config names none."""

import sys
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import PreTrainedConfig

_LIKE_LLAMA = ["q_proj", "v_proj"]  # what every table that suits a LoRA says for Llama


class AdapterTargets(PreTrainedConfig if TYPE_CHECKING else object):
    """Let `LoraConfig()` and the like work on a model without `target_modules`, as they do on a Llama.

    `peft` keeps a table of defaults for each method, by model type, and looks there right after it has asked the model
    for its config as a dictionary. That is when the model type is entered, so neither `peft` nor a certain order of
    imports is needed. An entry that is there already stays.

    Attributes:
        adapter_targets (`list[str]`): names of the layers for LoRA and the methods that share its defaults.
        rescaling_targets (`list[str]`): names of the layers whose outputs IA3 rescales.
        rescaling_inputs (`list[str]`): those among them whose inputs it rescales instead.
    """

    adapter_targets: ClassVar[list[str]] = _LIKE_LLAMA
    rescaling_targets: ClassVar[list[str]] = ["k_proj", "v_proj", "down_proj"]
    rescaling_inputs: ClassVar[list[str]] = ["down_proj"]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields; `peft`, where it is loaded, gets to know the model type."""
        if "peft.utils.constants" in sys.modules:
            self._enter_defaults(vars(sys.modules["peft.utils.constants"]))
        return super().to_dict()

    def _enter_defaults(self, tables: dict[str, Any]) -> None:
        for name, table in tables.items():
            if name == "TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING":
                table.setdefault(self.model_type, self.rescaling_targets)
            elif name == "TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING":
                table.setdefault(self.model_type, self.rescaling_inputs)
            elif name.endswith("_TARGET_MODULES_MAPPING") and table.get("llama") == _LIKE_LLAMA:
                table.setdefault(self.model_type, self.adapter_targets)
