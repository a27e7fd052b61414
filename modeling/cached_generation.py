# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""`generate` with the caches of `looped_cache.py`: which one it makes, what it refuses, and continuous batching."""

import copy
from typing import Any

import torch
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMixin, GenerationMode

from loopergy.configuration.looped_config import FULL, INDEXED, POOLED, RECURRENT, SLIDING, resolve_num_loops
from loopergy.modeling.continuous_batching import DEPTH_ARGUMENTS, check_keywords, depth_arguments, serve
from loopergy.modeling.looped_cache import with_growing_layers


class RoomyGenerationMixin(GenerationMixin):
    """Prepare caches for `generate` that write new tokens in place, sized by what the model says it keeps."""

    config: Any
    device: torch.device

    def cache_config(self, model_kwargs: dict) -> Any:
        """Return the config that describes the cache of a `generate` call with these arguments."""
        return self.config

    def _prepare_generation_config(self, generation_config: Any, **kwargs: Any) -> tuple[Any, dict]:
        """Hand the model's own arguments on, from where a generation config that has them swallows those of a call.

        Raises:
            ValueError: for a depth that the model's forward does not know, which it would swallow with other keywords.
        """
        known = depth_arguments(self)
        foreign = sorted(name for name in DEPTH_ARGUMENTS if kwargs.get(name) is not None and name not in known)
        if foreign:
            raise ValueError(f"{type(self).__name__} takes {sorted(known)}, not {foreign}.")
        prepared, model_kwargs = super()._prepare_generation_config(  # pyright: ignore[reportAttributeAccessIssue]
            generation_config, **kwargs
        )
        for name in (*known, "stop_tolerance", "recompute_window"):
            if getattr(prepared, name, None) is not None:
                model_kwargs.setdefault(name, getattr(prepared, name))
        return prepared, model_kwargs

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict, generation_mode: Any, batch_size: int, max_cache_length: int
    ) -> None:
        given = model_kwargs.get("cache") is not None
        model, config = self, self.cache_config(model_kwargs)
        if config is not self.config and not given:
            # The parent sizes the cache by `self.config`; a shallow stand-in carries the one that describes it.
            model = copy.copy(self)
            model.config = config
        super(RoomyGenerationMixin, model)._prepare_cache_for_generation(  # pyright: ignore[reportAttributeAccessIssue]
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        cache = model_kwargs.get("cache")
        if given or cache is None:
            return
        if cache.offloading and self.device.type == "cpu":
            # The cache lies in host memory already; transformers would look for a CUDA stream.
            cache.offloading = False
        if type(cache) is DynamicCache and not cache.offloading:
            with_growing_layers(cache)

    def _get_candidate_generator(self, **kwargs: Any) -> Any:
        """Make the source of drafts without telling it how deep this model computes: a draft says that itself."""
        settings, model_kwargs = copy.copy(kwargs["generation_config"]), dict(kwargs["model_kwargs"])
        for name in (*DEPTH_ARGUMENTS, "stop_tolerance"):
            model_kwargs.pop(name, None)
            vars(settings).pop(name, None)
        kwargs |= {"generation_config": settings, "model_kwargs": model_kwargs}
        return super()._get_candidate_generator(**kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def paged_obstacle(self) -> str | None:
        """Return why the paged cache of continuous batching cannot hold what this model keeps; `None` if it can."""
        return None

    def init_continuous_batching(self, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Make a manager of continuous batching, as transformers' models do; see [`generate_batch`]."""
        return serve(self, generation_config, kwargs).init_continuous_batching(generation_config, *args, **kwargs)

    def continuous_batching_context_manager(self, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Run a manager of continuous batching in a `with` block; see [`generate_batch`]."""
        served = serve(self, generation_config, kwargs)
        return served.continuous_batching_context_manager(generation_config, *args, **kwargs)

    def generate_batch(
        self, inputs: list[list[int]], generation_config: Any = None, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Generate for many prompts of unequal lengths, new ones joining as others end.

        Args:
            inputs (`list[list[int]]`): token ids of the prompts.
            generation_config (`GenerationConfig`, *optional*): may hold the number of loops or steps too.
            args, kwargs: those of transformers, and the number of loops or steps and the exit of this model's
                forward, for all prompts alike. How to choose tokens is said by the generation config alone.

        Returns:
            `dict[str, GenerationOutput]`: per request, in the order of the prompts; `.generated_tokens` is the text.

        Raises:
            NotImplementedError: if the model keeps anything else than keys and values of one width.
            ValueError: for a number of loops or steps below 1, an exit step outside the loops, and keywords that
                would have no effect.
        """
        served = serve(self, generation_config, kwargs)
        check_keywords(self, kwargs)
        return served.generate_batch(inputs, generation_config, *args, **kwargs)


class LoopedGenerationMixin(RoomyGenerationMixin):
    """Prepare caches with one slot per (loop, layer) for `generate`, whatever `num_loops` it is called with."""

    def loops_to_run(self, model_kwargs: dict) -> int:
        """Return how many loops a call with these arguments runs at most."""
        return resolve_num_loops(self.config, model_kwargs.get("num_loops"))

    def cache_config(self, model_kwargs: dict) -> Any:
        """Return the decoder view for the number of loops that will run."""
        num_loops = self.loops_to_run(model_kwargs)
        return self.config if num_loops == self.config.num_loops else self.config.decoder_view(num_loops)

    def paged_obstacle(self) -> str | None:
        """Name the slots that are no attention, windows that differ, or slots that loops share."""
        plan = self.config.slot_plan()
        others = sorted(set(plan.layer_types) - {FULL, SLIDING})
        windows = {window for window in plan.windows if window is not None}
        if others:
            return f"its paged cache holds keys and values of attention only, and this model has {others} slots."
        if len(windows) > 1:
            return f"its paged cache knows one window, and this model has {sorted(windows)}."
        if self.config.kv_sharing == "last":
            return (
                "it splits prompts and shares their beginnings as it likes, and with kv_sharing='last' a token sees "
                "those of its own call otherwise than earlier ones."
            )
        return None

    def _get_static_cache_init_shape(self) -> Any:
        """Leave slots of sparse attention to be sized by what is first written: their widths are no heads of keys."""
        if {INDEXED, POOLED}.isdisjoint(self.config.get_text_config(decoder=True).layer_types):
            return super()._get_static_cache_init_shape()  # pyright: ignore[reportAttributeAccessIssue]
        return None

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict, generation_mode: Any, *args: Any, **kwargs: Any
    ) -> None:
        kinds = set(self.config.slot_plan().layer_types)
        if generation_config.cache_implementation == "quantized" and kinds != {FULL}:
            raise ValueError(
                "cache_implementation='quantized' stores keys and values of full attention only, and this model has "
                f"{sorted(kinds)}. Leave cache_implementation out to use the default cache."
            )
        if generation_config.is_assistant and RECURRENT in kinds:
            raise ValueError(
                f"A {type(self).__name__} with recurrent mixers cannot draft for another model: its state cannot be "
                "rolled back where a draft is rejected. Draft with a model of attention layers, or without a draft."
            )
        if generation_config.assistant_early_exit is not None:
            raise ValueError(
                f"assistant_early_exit={generation_config.assistant_early_exit} leaves out layers, which loops share. "
                "For a draft of fewer loops pass assistant_model=, the same model loaded with num_loops=1."
            )
        cut_otherwise = (
            generation_mode == GenerationMode.ASSISTED_GENERATION
            or generation_config.prefill_chunk_size is not None
            or generation_config.use_cache is False
        )
        if cut_otherwise and self.config.kv_sharing == "last" and self.loops_to_run(model_kwargs) > 1:
            raise ValueError(
                "With kv_sharing='last' a token sees those of its own call otherwise than earlier ones, so drafts "
                "(assistant_model, prompt_lookup_num_tokens), prefill_chunk_size and use_cache=False would change the "
                "text. Leave them out, or load the model with kv_sharing='none'."
            )
        super()._prepare_cache_for_generation(generation_config, model_kwargs, generation_mode, *args, **kwargs)
