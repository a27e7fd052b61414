# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
# %% [markdown]
# # Watch energies
#
# CEM-Llama and NRGPT compute by stepping down an energy. Here both are trained for a moment on a small task, and
# then watched: whose energy falls, for how many tokens, and what more steps do.

# %%
import torch

import loopergy
from loopergy.tasks.catalog import make_task
from loopergy.tasks.new_model import new_model
from loopergy.tasks.training import TaskConfig, train_on_task

STEPS = 200
task = make_task("permutations", group="S3", length=8)
row = torch.as_tensor(task.rows("test", count=1)[0]["input_ids"])
print(task.tokenizer.decode(row))


def trained(model_type, **fields):
    """Make a small model of a type and train it on the task."""
    torch.manual_seed(0)
    model = new_model(model_type, task, hidden_size=64, **fields)
    settings = TaskConfig(f"runs/{model_type}", max_steps=STEPS, per_device_train_batch_size=32, learning_rate=3e-3)
    train_on_task(model, task, settings)
    print(f"{model_type}: accuracy {task.evaluate(model, count=200).accuracy:.3f}, chance {1 / 6:.3f}")
    return model.eval()


cem = trained("cem_llama", num_hidden_layers=3, cem_attn_steps=2, cem_mlp_steps=2)
nrgpt = trained("nrgpt", num_hidden_layers=6, exclude_self=True, eta_type="scalar")

# %% [markdown]
# ## A table of energies
#
# `loopergy.trace` runs one sequence and keeps the energy of every token before the first and after each step.
# CEM-Llama has two energies a layer. That of attention is concave in what moves, so that it falls for every token
# and any step size; that of the MLP falls for small steps only.

# %%
watched = loopergy.trace(cem, row, tokenizer=task.tokenizer)
print(watched)
assert float(watched.share_rising("attention").max()) == 0.0

# %% [markdown]
# NRGPT is one block, applied again and again. Whether each step lowers the energy depends on the weights: `trace`
# reads off them which conditions of the guarantee hold.

# %%
descent = loopergy.trace(nrgpt, row, tokenizer=task.tokenizer)
print(descent)

# %% [markdown]
# ## More steps
#
# The number of steps is a matter of the call. The first ones lower the mean energy most. Later ones need not lower
# it further: all tokens move at once, so that what a token descends changes under it. Nor do more steps than trained
# answer better:

# %%
rows = task.rows("test", count=64)
ids, labels = (torch.stack([torch.as_tensor(rows[i][key]) for i in range(64)]) for key in ("input_ids", "labels"))
table = []
for steps in (1, 2, 4, 6, 8, 12):
    with torch.no_grad():
        outputs = nrgpt(ids, labels=labels, num_steps=steps, output_energies=True)
    energy = outputs.energies.total[0]  # steps + 1, batch, length
    table.append((steps, float(energy[-1].mean() - energy[0].mean()), float(outputs.loss)))

print(f"{'steps':>5} {'change of the mean energy':>26} {'loss, nats':>11}")
for steps, change, loss in table:
    print(f"{steps:>5} {change:>26.3f} {loss:>11.3f}{'   (as trained)' if steps == 6 else ''}")

# %% [markdown]
# ## Pictures
#
# One row of panels for each energy: its mean over the steps, the change of every token, and the share of tokens
# that rise.

# %%
try:
    watched.plot("cem.png")
    descent.plot("nrgpt.png")
except ImportError as error:
    print(error)
