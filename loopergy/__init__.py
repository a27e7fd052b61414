# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Looped and energy-based language models as ordinary transformers models.

Importing this package registers its model types with transformers' Auto classes, and that is all that happens then.
Conversion and distillation load on first use.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForDecision,
    AutoModelForSequenceClassification,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from loopergy.configuration.configuration_cem_llama import CEMLlamaConfig
from loopergy.configuration.configuration_gpt_baselines import GPTBaselineConfig
from loopergy.configuration.configuration_lt2 import LT2Config
from loopergy.configuration.configuration_nrgpt import NRGPTConfig
from loopergy.configuration.configuration_ouro import OuroConfig
from loopergy.hub_code import carry_code
from loopergy.modeling.kernels.kernel_backends import kernel_backend
from loopergy.modeling.modeling_cem_llama import (
    CEMLlamaForCausalLM,
    CEMLlamaForSequenceClassification,
    CEMLlamaModel,
    CEMLlamaPreTrainedModel,
)
from loopergy.modeling.modeling_gpt_baselines import (
    GPTBaselineForCausalLM,
    GPTBaselineForSequenceClassification,
    GPTBaselineModel,
    GPTBaselinePreTrainedModel,
)
from loopergy.modeling.modeling_lt2 import LT2ForCausalLM, LT2ForSequenceClassification, LT2Model, LT2PreTrainedModel
from loopergy.modeling.modeling_nrgpt import (
    NRGPTForCausalLM,
    NRGPTForSequenceClassification,
    NRGPTModel,
    NRGPTPreTrainedModel,
)
from loopergy.modeling.modeling_ouro import (
    OuroForCausalLM,
    OuroForSequenceClassification,
    OuroModel,
    OuroPreTrainedModel,
)

if TYPE_CHECKING:
    from loopergy.conversion.convert import Conversion, convert, restore_layers
    from loopergy.conversion.nrgpt_official import (
        gpt_baseline_from_official,
        gpt_baseline_to_official,
        nrgpt_from_official,
        nrgpt_to_official,
    )
    from loopergy.conversion.report import ConversionReport
    from loopergy.distill.align import AlignConfig, AlignTrainer
    from loopergy.distill.calibrate import Calibration, calibrate
    from loopergy.distill.distill import DistillConfig, DistillTrainer
    from loopergy.distill.extend import ExtendConfig, ExtendTrainer
    from loopergy.distill.select import Selection, select_layers
    from loopergy.energy_trace import EnergyTrace, trace
    from loopergy.evaluation import Evaluation, evaluate
    from loopergy.hub_export import export, push
    from loopergy.model_card import write_card

__version__ = version("loopergy")

logger = logging.get_logger(__name__)

# One row per family: config, base model, causal language model, sequence classifier.
FAMILIES = (
    (OuroConfig, OuroModel, OuroForCausalLM, OuroForSequenceClassification),
    (LT2Config, LT2Model, LT2ForCausalLM, LT2ForSequenceClassification),
    (CEMLlamaConfig, CEMLlamaModel, CEMLlamaForCausalLM, CEMLlamaForSequenceClassification),
    (NRGPTConfig, NRGPTModel, NRGPTForCausalLM, NRGPTForSequenceClassification),
    (GPTBaselineConfig, GPTBaselineModel, GPTBaselineForCausalLM, GPTBaselineForSequenceClassification),
)

# From a file of the rooms to its public names, which load on first use.
_LAZY = {
    "loopergy.conversion.convert": ("Conversion", "convert", "restore_layers"),
    "loopergy.conversion.nrgpt_official": (
        "gpt_baseline_from_official",
        "gpt_baseline_to_official",
        "nrgpt_from_official",
        "nrgpt_to_official",
    ),
    "loopergy.conversion.report": ("ConversionReport",),
    "loopergy.distill.align": ("AlignConfig", "AlignTrainer"),
    "loopergy.distill.calibrate": ("Calibration", "calibrate"),
    "loopergy.distill.distill": ("DistillConfig", "DistillTrainer"),
    "loopergy.distill.extend": ("ExtendConfig", "ExtendTrainer"),
    "loopergy.distill.select": ("Selection", "select_layers"),
    "loopergy.energy_trace": ("EnergyTrace", "trace"),
    "loopergy.evaluation": ("Evaluation", "evaluate"),
    "loopergy.hub_export": ("export", "push"),
    "loopergy.model_card": ("write_card",),
}
_FILE_OF = {name: file for file, names in _LAZY.items() for name in names}

__all__ = [
    "AlignConfig",
    "AlignTrainer",
    "CEMLlamaConfig",
    "CEMLlamaForCausalLM",
    "CEMLlamaForSequenceClassification",
    "CEMLlamaModel",
    "CEMLlamaPreTrainedModel",
    "Calibration",
    "Conversion",
    "ConversionReport",
    "DistillConfig",
    "DistillTrainer",
    "EnergyTrace",
    "Evaluation",
    "ExtendConfig",
    "ExtendTrainer",
    "GPTBaselineConfig",
    "GPTBaselineForCausalLM",
    "GPTBaselineForSequenceClassification",
    "GPTBaselineModel",
    "GPTBaselinePreTrainedModel",
    "LT2Config",
    "LT2ForCausalLM",
    "LT2ForSequenceClassification",
    "LT2Model",
    "LT2PreTrainedModel",
    "NRGPTConfig",
    "NRGPTForCausalLM",
    "NRGPTForSequenceClassification",
    "NRGPTModel",
    "NRGPTPreTrainedModel",
    "OuroConfig",
    "OuroForCausalLM",
    "OuroForSequenceClassification",
    "OuroModel",
    "OuroPreTrainedModel",
    "Selection",
    "__version__",
    "calibrate",
    "convert",
    "evaluate",
    "export",
    "gpt_baseline_from_official",
    "gpt_baseline_to_official",
    "kernel_backend",
    "nrgpt_from_official",
    "nrgpt_to_official",
    "push",
    "register",
    "restore_layers",
    "select_layers",
    "trace",
    "write_card",
]


def register() -> None:
    """Make the Auto classes return our classes for our model types; importing loopergy has done it already.

    Calling it again is harmless, and of use when another package has registered one of the model types after loopergy
    was imported: ours win again, and the log says which class was replaced.
    """
    for config, base, causal, classifier in FAMILIES:
        # The mapping loads lazily: `get` of the dict below it finds nothing.
        known = CONFIG_MAPPING[config.model_type] if config.model_type in CONFIG_MAPPING else config  # noqa: SIM401
        if known is not config:
            logger.warning(
                f"The model type {config.model_type!r} was registered as {known.__module__}.{known.__name__}; "
                f"loopergy's {config.__name__} takes its place in this process."
            )
        AutoConfig.register(config.model_type, config, exist_ok=True)
        heads = {
            AutoModel: base,
            AutoModelForCausalLM: causal,
            # `transformers serve` asks this class alone for models that are not its own.
            AutoModelForDecision: causal,
            AutoModelForSequenceClassification: classifier,
        }
        for auto, model in heads.items():
            auto.register(config, model, exist_ok=True)
        carry_code({"AutoConfig": config, **{auto.__name__: model for auto, model in heads.items()}}, _push_to_hub)


def _push_to_hub(self: Any, repo_id: str, **options: Any) -> Any:
    """Publish the model with its code in one commit; the options are those of `PreTrainedModel.push_to_hub`."""
    from loopergy.hub_export import push_model

    return push_model(self, repo_id, **options)


def __getattr__(name: str) -> object:
    if name not in _FILE_OF:
        raise AttributeError(f"module 'loopergy' has no attribute {name!r}")
    value = getattr(import_module(_FILE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register()
