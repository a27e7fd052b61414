# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Every difference to transformers' own model tests, with its reason: the one table to read."""

# Left out, for all our models: test name -> reason.
SKIPPED = {
    "test_num_layers_is_small": (
        "compares the tester's num_hidden_layers with 2; here that number counts the visits (loops times layers) with "
        "attention weights, which the attention test compares with. The physical depth is 2."
    ),
}

# Left out, for one test class: class name -> {test name: reason}.
SKIPPED_FOR = {
    "OuroModelTest": {
        "test_sliding_window_mask": (
            "sets use_sliding_window=True, which Ouro's published files carry as a constant False; OuroConfig refuses "
            "True and names LT2, whose window mixer is compared with a masked softmax in its own tests"
        ),
    },
}

_WITHOUT_ROTARY = "changes the rotary positions and expects other outputs; no mixer of this model turns by them"
SKIPPED_FOR["LT2KimiModelTest"] = {
    f"test_model_rope_scaling_from_config_{i}_{kind}": _WITHOUT_ROTARY
    for i, kind in enumerate(("linear", "dynamic", "yarn"))
}

# Left out where the unpacked folder lacks a part of the suite: the sdist holds the test files of the top level only.
SKIPPED_WITHOUT_GENERATION_TESTS = {
    "test_generation_tester_mixin_inheritance": (
        "the sdist has no tests/generation to inherit from; generation is tested in tests/modeling"
    ),
}

# Run, but changed: name (or the start of the names of a parametrised test) -> what is changed, and why.
CHANGED = {
    "test_model_rope_scaling_from_config": (
        "sets the rotary fields on config.get_text_config(decoder=True), which for a looped model is a copy that only "
        "describes the cache; here that call gives the config itself, and the model runs without a cache"
    ),
    "test_all_params_have_gradient": (
        "a switch of the checkpointing tests, off: a sequence classifier reads the state after the last loop, so its "
        "exit gate has no gradient, nor have the indexers, whose loss a language model adds. Instead "
        "test_gradients_reach_every_parameter_but_the_exit_gate checks each class."
    ),
}
