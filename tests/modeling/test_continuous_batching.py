# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Continuous batching: requests in a paged cache give what `generate` gives to each alone, or are refused at once."""

import threading

import pytest
import torch
from conftest import CEM_KINDS, LT2_KINDS, build_cem, build_lt2, build_ouro
from transformers import ContinuousBatchingConfig, GenerationConfig

from loopergy import GPTBaselineConfig, GPTBaselineForCausalLM, NRGPTConfig, NRGPTForCausalLM

NEW = 5
TWICE = {"num_hidden_layers": 2, "num_loops": 2}


def build_gpt(recurrence: str) -> GPTBaselineForCausalLM:
    config = GPTBaselineConfig.from_preset("tiny", recurrence=recurrence, initializer_range=0.2)
    return GPTBaselineForCausalLM(config).double().eval()


SERVED = {
    "ouro": (build_ouro, {}, {}),
    "ouro-fewer-loops": (build_ouro, {}, {"num_loops": 2}),
    "ouro-more-loops": (build_ouro, {}, {"num_loops": 5}),
    "ouro-early-exit": (build_ouro, {}, {"exit_threshold": 0.6}),
    "lt2-full": (build_lt2, LT2_KINDS["full"] | TWICE, {}),
    "lt2-window": (build_lt2, LT2_KINDS["window"] | TWICE, {}),
    "lt2-window-and-full": (build_lt2, {"layer_mixers": "window,full", "sliding_window": 4} | TWICE, {}),
    "cem": (build_cem, CEM_KINDS["no-diagonal"], {}),
    "cem-steps": (build_cem, CEM_KINDS["low-rank"], {"num_steps": 3}),
    "cem-plain": (build_cem, CEM_KINDS["plain"], {}),
    "cem-untied": (build_cem, CEM_KINDS["untied"], {}),
    "cem-diagonal": (build_cem, CEM_KINDS["shared"], {}),
    "cem-mlp-only": (build_cem, CEM_KINDS["mlp-only"], {}),
    "gpt": (build_gpt, {"recurrence": "none"}, {}),
    "gpt-recurrent": (build_gpt, {"recurrence": "parallel"}, {}),
}
SLOW = ("ouro-more-loops", "lt2-full", "lt2-window", "cem-plain", "cem-untied", "cem-mlp-only", "gpt")
REFUSED = {
    "recurrent": (build_lt2, {"layer_mixers": "gdn,full"}, "looped_recurrent"),
    "sparse": (build_lt2, LT2_KINDS["nsa-overlap"], "looped_pooled"),
    "windows": (build_lt2, LT2_KINDS["loop-windows"] | {"layer_mixers": "full"}, r"one window.*\[3, 5\]"),
    "shared": (build_ouro, {"kv_sharing": "last"}, "kv_sharing='last'"),
    "diagonal": (build_cem, CEM_KINDS["per-head"], "width 32 and features of width 64"),
    "energies": (lambda: NRGPTForCausalLM(NRGPTConfig.from_preset("tiny")), {}, "one vector per token"),
}


def served(model, prompts: list[list[int]], **arguments) -> list[list[int]]:
    """Generate for all prompts, in blocks and batches so small that prompts are split and requests come and go."""
    settings = ContinuousBatchingConfig(page_size=4, num_blocks=24, max_batch_tokens=16)
    results = model.generate_batch(
        prompts, continuous_batching_config=settings, max_new_tokens=NEW, **arguments
    ).values()
    assert [result.error for result in results] == [None] * len(prompts)
    return [result.generated_tokens for result in results]


def alone(model, prompts: list[list[int]], **arguments) -> list[list[int]]:
    settings = {"max_new_tokens": NEW, "do_sample": False, **arguments}
    return [model.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist() for prompt in prompts]


@pytest.fixture
def prompts(make_ids) -> list[list[int]]:
    """Give prompts of unequal lengths; the last begins as the one before."""
    drawn = [make_ids(1, length, seed=length)[0].tolist() for length in (3, 19, 9)]
    return [*drawn, drawn[2][:8] + drawn[0]]


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow) if k in SLOW else k for k in SERVED])
def test_each_request_gets_what_it_would_get_alone(kind, prompts):
    build, fields, arguments = SERVED[kind]
    model = build(**fields)
    model.generation_config.eos_token_id = None
    assert served(model, prompts, **arguments) == alone(model, prompts, **arguments)


@pytest.mark.parametrize("kind", ["ouro", "lt2-window-and-full", "cem"])
def test_eager_attention_serves_too_and_is_what_the_model_has_afterwards(kind, prompts):
    build, fields, arguments = SERVED[kind]
    model = build(**fields, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    model.set_attn_implementation("eager")
    assert served(model, prompts[:2], **arguments) == alone(model, prompts[:2], **arguments)
    assert model.config._attn_implementation == "eager"


def test_the_paged_cache_has_a_slot_for_each_visit_and_shares_beginnings(make_ouro, prompts):
    model = make_ouro()
    settings = ContinuousBatchingConfig(page_size=4, num_blocks=24, max_batch_tokens=16)
    with model.continuous_batching_context_manager(continuous_batching_config=settings, num_loops=5) as manager:
        manager.add_request(prompts[2], max_new_tokens=NEW)
        while manager.get_result(timeout=1) is None:
            pass
        cache = manager.batch_processor.cache
        assert len(cache.layer_to_allocator) == 5 * model.config.num_hidden_layers
        assert cache.use_prefix_sharing
        assert cache.search_prefix_match("next", prompts[3]) == 8


def test_a_kept_manager_serves_the_same_depth_only(make_ouro, prompts):
    model = make_ouro()
    first = served(model, prompts[:1], persistent_manager=True)
    assert served(model, prompts[:1], persistent_manager=True) == first
    with pytest.raises(ValueError, match="destroy_cached_continuous_batching_manager"):
        served(model, prompts[:1], num_loops=2)
    model.destroy_cached_continuous_batching_manager()
    assert served(model, prompts[:1], num_loops=2) == alone(model, prompts[:1], num_loops=2)


def test_a_generation_config_says_the_depth_as_in_generate(make_ouro, prompts):
    model = make_ouro()
    expected = alone(model, prompts[:2], num_loops=2)
    model.generation_config.eos_token_id = None
    assert alone(model, prompts[:2]) != expected
    given = GenerationConfig(num_loops=2, max_new_tokens=NEW)
    assert served(model, prompts[:2], generation_config=given) == expected
    model.generation_config.num_loops = 2
    assert served(model, prompts[:2]) == expected
    assert served(model, prompts[:2], num_loops=3) == alone(model, prompts[:2], num_loops=3)


@pytest.mark.parametrize("kind", list(REFUSED))
def test_what_a_paged_cache_cannot_hold_is_refused_in_the_callers_thread(kind, make_ids):
    """Guards A19: one error at once, no thread left behind, and the model as it was."""
    build, fields, reason = REFUSED[kind]
    model, before = build(**fields), threading.active_count()
    for call in (
        lambda: model.generate_batch([[1, 2, 3]]),
        model.init_continuous_batching,
        model.continuous_batching_context_manager,
    ):
        with pytest.raises(NotImplementedError, match=f"continuous batching: .*{reason}"):
            call()
    assert threading.active_count() == before
    ids = make_ids(1, 4)
    assert model.generate(ids, max_new_tokens=2, pad_token_id=0).shape[1] > 4
    model.train()(ids, labels=ids).loss.backward()


def test_a_depth_that_cannot_be_is_refused_in_the_callers_thread(make_ouro, make_lt2, make_cem):
    """Guards A19."""
    for model, arguments in (
        (make_ouro(), {"num_loops": 0}),
        (make_ouro(), {"num_steps": 2}),
        (make_lt2(layer_mixers="full"), {"exit_threshold": 0.5}),
        (make_cem(cem_diag="none"), {"num_steps": -1}),
    ):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            model.generate_batch([[1, 2, 3]], **arguments)


def test_texts_beyond_the_position_table_are_refused_before_the_first_token():
    """Guards A19."""
    model = build_gpt("none")
    limit = model.config.max_position_embeddings
    with pytest.raises(ValueError, match=f"max_position_embeddings={limit}"):
        model.generate_batch([[1, 2], [3] * (limit - 1)], max_new_tokens=3)
    with pytest.raises(ValueError, match="recompute_window"):
        model.generate_batch([[1, 2]], recompute_window=True)
    with pytest.raises(ValueError, match="recompute_window"):
        model.generate_batch([[1, 2]], GenerationConfig(recompute_window=True))


def test_nothing_of_a_served_call_is_left_on_the_model(make_ouro, prompts):
    """Guards A18, A19: the settings that the manager fills in are its own."""
    model = make_ouro()
    settings, state = model.generation_config.to_dict(), set(vars(model))
    served(model, prompts[:1])
    assert model.generation_config.to_dict() == settings
    assert set(vars(model)) == state
