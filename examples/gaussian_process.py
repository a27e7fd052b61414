# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Regress Gaussian-process samples in context with a CEM-Llama, and see what more energy steps per layer give.

Each sequence is a function drawn from a Gaussian process with an RBF kernel, shown as x_1, y_1, x_2, y_2, ...; at each
x the model predicts y from the pairs before it. The error to beat is that of the exact posterior mean, which knows the
kernel. Weights are the same number for all T.

    python examples/gaussian_process.py --steps 1 2 4 8
"""

import argparse
import json

import torch
from torch import nn

import loopergy

LENGTH_SCALE, NOISE, PAIRS, BATCH = 0.4, 0.1, 24, 32


def kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.exp(-0.5 * ((a[..., :, None] - b[..., None, :]) / LENGTH_SCALE) ** 2)


def draw(batch: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw x uniform in [-1, 1] and noisy values y of one function a row, both (batch, PAIRS)."""
    x = 2 * torch.rand(batch, PAIRS, generator=generator) - 1
    covariance = kernel(x, x) + NOISE**2 * torch.eye(PAIRS)
    normal = torch.randn(batch, PAIRS, 1, generator=generator)
    return x, (torch.linalg.cholesky(covariance) @ normal)[..., 0]


class Regressor(nn.Module):
    """Read pairs as tokens of three numbers, (x, 0, 0) and (x, y, 1), and predict at the first of each."""

    def __init__(self, num_steps: int):
        super().__init__()
        config = loopergy.CEMLlamaConfig(
            vocab_size=1, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4
        )
        config.num_steps = num_steps
        self.read = nn.Linear(3, config.hidden_size)
        self.model = loopergy.CEMLlamaModel(config)
        self.predict = nn.Linear(config.hidden_size, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the predictions of y, (batch, PAIRS)."""
        zero, one = torch.zeros_like(x), torch.ones_like(x)
        tokens = torch.stack((torch.stack((x, zero, zero), -1), torch.stack((x, y, one), -1)), dim=2).flatten(1, 2)
        states = self.model(inputs_embeds=self.read(tokens), use_cache=False).last_hidden_state
        return self.predict(states[:, ::2])[..., 0]


def posterior_mean(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Predict each y from the pairs before it, knowing the kernel."""
    means = [torch.zeros(len(x))]
    for count in range(1, PAIRS):
        seen = kernel(x[:, :count], x[:, :count]) + NOISE**2 * torch.eye(count)
        weights = torch.linalg.solve(seen, y[:, :count, None])
        means.append((kernel(x[:, count : count + 1], x[:, :count]) @ weights)[:, 0, 0])
    return torch.stack(means, dim=1)


def rmse(error: torch.Tensor) -> float:
    return float(error.pow(2).mean().sqrt())


def train(num_steps: int, updates: int, seed: int) -> float:
    """Train one model and return its error on functions that it has not seen."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Regressor(num_steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=updates, pct_start=0.05)
    for _ in range(updates):
        x, y = draw(BATCH, generator)
        loss = (model(x, y) - y).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    x, y = draw(1000, torch.Generator().manual_seed(10_000))
    with torch.no_grad():
        return rmse(model.eval()(x, y) - y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2, 4, 8], help="energy steps T to compare")
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--output", help="write the errors to this JSON file")
    arguments = parser.parse_args()
    x, y = draw(1000, torch.Generator().manual_seed(10_000))
    results = {"zero": [rmse(y)], "posterior mean": [rmse(posterior_mean(x, y) - y)]}
    for name, errors in results.items():
        print(f"{name:<16} RMSE {errors[0]:.4f}")
    for num_steps in arguments.steps:
        errors = [train(num_steps, arguments.updates, seed) for seed in range(arguments.seeds)]
        results[f"T={num_steps}"] = errors
        print(f"{f'T={num_steps}':<16} RMSE " + "  ".join(f"{error:.4f}" for error in errors), flush=True)
    if arguments.output:
        with open(arguments.output, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
