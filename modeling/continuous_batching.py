# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Continuous batching of transformers for models whose cache has one slot per visit.

transformers sizes its paged cache by the model's config, one layer of equally wide keys and values each, and calls the
model with what the batch holds and nothing else. A looped model has more slots than layers and may be asked for
another number of loops. So what is served is the model behind a stand-in, whose config describes the cache and which
adds the arguments that the caller gave.
"""

import copy
import inspect
from collections.abc import Mapping
from typing import Any

from transformers.cache_utils import Cache
from transformers.generation.continuous_batching import ContinuousMixin

# How deep to compute: all that a caller may choose for every request of a manager.
DEPTH_ARGUMENTS = ("num_loops", "num_steps", "exit_at_step", "exit_threshold", "use_weighted_exit")


def is_paged(cache: Any) -> bool:
    """Whether a cache is the one of continuous batching: requests side by side in one row, and no layers to ask."""
    return cache is not None and not isinstance(cache, Cache)


class ServedModel(ContinuousMixin):
    """Stand for a model in continuous batching.

    Args:
        served: the model, a [`RoomyGenerationMixin`].
        arguments: what every forward gets besides the batch.
    """

    def __init__(self, served: Any, arguments: Mapping[str, Any]):
        vars(self).update(served=served, arguments=dict(arguments))

    @property
    def config(self) -> Any:
        """The config that describes the cache, one layer per slot."""
        return self.served.cache_config(self.arguments).get_text_config(decoder=True)

    @property
    def generation_config(self) -> Any:
        """A copy of the model's generation config, as the manager fills in what is missing."""
        return copy.deepcopy(self.served.generation_config)

    def __call__(self, **batch: Any) -> Any:
        """Run a forward on what the batch holds."""
        return self.served(**batch, **self.arguments)

    def eval(self) -> "ServedModel":
        """Put the model into evaluation mode."""
        self.served.eval()
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.served, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.served, name, value)  # a manager that is kept for the next call is kept on the model


def serve(model: Any, generation_config: Any, arguments: dict[str, Any]) -> ServedModel:
    """Return the stand-in for a model, after checking all that would fail in the manager's own thread.

    Args:
        model: the model.
        generation_config: that of the call, `None` for the model's; says the depth where `arguments` do not.
        arguments: arguments of a call; those that belong to the model's forward are taken out.

    Raises:
        NotImplementedError: if the paged cache cannot hold what the model keeps.
        ValueError: for a number of loops or steps below 1, an exit step outside the loops, or a manager kept from a
            call with other arguments.
    """
    obstacle = model.paged_obstacle()
    if obstacle is not None:
        raise NotImplementedError(
            f"{type(model).__name__} cannot be served by continuous batching: {obstacle} "
            "Use generate() with a padded batch."
        )
    taken = depth_arguments(model)
    own = {name: arguments.pop(name) for name in sorted(taken) if name in arguments}
    unknown = set(DEPTH_ARGUMENTS) & set(arguments)
    if unknown:
        raise ValueError(f"{type(model).__name__} takes {sorted(taken)}, not {sorted(unknown)}.")
    chosen = model.generation_config if generation_config is None else generation_config
    for name in taken - set(own):
        if getattr(chosen, name, None) is not None:
            own[name] = getattr(chosen, name)
    model.cache_config(own)
    kept = getattr(model, "_cached_continuous_batching_manager", None)
    if kept is not None and kept.model.arguments != own:
        raise ValueError(
            f"The kept manager serves {kept.model.arguments}, not {own}: its cache has other slots. Call "
            "model.destroy_cached_continuous_batching_manager() first."
        )
    return ServedModel(model, own)


def depth_arguments(model: Any) -> set[str]:
    """Return those of [`DEPTH_ARGUMENTS`] that the model's forward takes."""
    return set(inspect.signature(model.forward).parameters).intersection(DEPTH_ARGUMENTS)


def check_keywords(model: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse keywords of `generate_batch` that transformers would drop without a word.

    Args:
        model: the model.
        arguments: keywords of the call, without those that [`serve`] took out.

    Raises:
        ValueError: naming them.
    """
    known = {"max_new_tokens", *inspect.signature(ContinuousMixin.generate_batch).parameters} - {"self", "kwargs"}
    unused = sorted(set(arguments) - known)
    if unused:
        raise ValueError(
            f"generate_batch takes no {', '.join(unused)}: of this model's arguments it takes "
            f"{', '.join(sorted(depth_arguments(model))) or 'none'}. How to choose tokens is said by "
            "generation_config=GenerationConfig(...), how to batch by continuous_batching_config="
            "ContinuousBatchingConfig(...)."
        )
