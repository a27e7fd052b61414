# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Default target layers for adapters of `peft`, used when the adapter's config names none."""

import sys
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import PreTrainedConfig

_LIKE_LLAMA = ["q_proj", "v_proj"]  # Llama's entry in the tables of LoRA and of methods with the same targets


class AdapterTargets(PreTrainedConfig if TYPE_CHECKING else object):
    """Let `LoraConfig()` and other adapter configs work without `target_modules`, as they do on a Llama.

    `peft` keeps one table of defaults per method, model type -> layer names, and has no function to register others.
    So the model type is entered into its tables, in `to_dict`: the only method of a model or config that `peft` calls
    before it reads them. Any other place would be too early or too heavy: `import loopergy` must not import `peft`,
    and a model may be built before the user does. An entry that is already there is kept, and repeating the call
    changes nothing. Without `peft` loaded, `to_dict` has no side effect.

    Attributes:
        adapter_targets (`list[str]`): names of the layers for LoRA and the methods that share its defaults.
        rescaling_targets (`list[str]`): names of the layers whose outputs IA3 rescales.
        rescaling_inputs (`list[str]`): those among them whose inputs it rescales instead.
    """

    adapter_targets: ClassVar[list[str]] = _LIKE_LLAMA
    rescaling_targets: ClassVar[list[str]] = ["k_proj", "v_proj", "down_proj"]
    rescaling_inputs: ClassVar[list[str]] = ["down_proj"]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary. If `peft` is loaded, enter this model type into its tables."""
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
