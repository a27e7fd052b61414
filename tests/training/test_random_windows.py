# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Training with random window layouts: what each step sees, and what a checkpoint keeps."""

import torch
from transformers import Trainer, TrainingArguments

from loopergy.configuration.configuration_lt2 import LT2Config
from loopergy.modeling.modeling_lt2 import LT2ForCausalLM
from loopergy.modeling.random_windows import RandomWindows
from loopergy.training.random_windows import RandomWindowsCallback


def test_a_training_draws_at_every_step_and_saves_the_models_own_layout(tmp_path):
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = LT2Config(**sizes, num_hidden_layers=4, num_loops=3, layer_mixers="full")
    model, seen = LT2ForCausalLM(config), []
    model.register_forward_pre_hook(lambda module, args: seen.append(module.config.loop_windows))
    rows = [{"input_ids": torch.randint(32, (8,)), "labels": torch.randint(32, (8,))} for _ in range(6)]
    options = {"per_device_train_batch_size": 2, "max_steps": 3, "save_steps": 2, "report_to": "none"}
    windows = RandomWindows(share_full=0.25, window=3)
    trainer = Trainer(
        model,
        TrainingArguments(str(tmp_path), **options, use_cpu=True),
        train_dataset=rows,
        callbacks=[RandomWindowsCallback(windows, model.config, seed=10)],
    )
    trainer.train()
    assert seen == [windows.draw(model.config, 10 + step) for step in range(3)]
    assert model.config.loop_windows is None
    assert LT2Config.from_pretrained(tmp_path / "checkpoint-2").loop_windows is None
