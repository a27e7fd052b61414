# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
# %% [markdown]
# # Convert and distil
#
# A looped teacher with full attention becomes a hybrid with a fraction of its cache, and learns back what it
# lost. Everything runs offline on a CPU within minutes: the teacher is a small Ouro that the first cell trains on
# Python's own manual. With the same calls, `ByteDance/Ouro-1.4B` or any Llama is a teacher.

# %%
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import loopergy
from loopergy.describe import model_cost
from loopergy.distill.distill import prepare_student
from loopergy.distill.pictures import draw_quality
from loopergy.distill.pretrain_recipe import PretrainRecipe, pretrain
from loopergy.distill.report import HeldOut, evaluate_heldout
from loopergy.distill.select import select_layers
from loopergy.recipes import find_recipe
from loopergy.training.data import PackedDataset, held_out_batches

TEACHER_TOKENS, ALIGN_STEPS, DISTILL_STEPS, HELD_OUT_TOKENS = 245_760, 60, 60, 8192
torch.manual_seed(0)

recipe = PretrainRecipe.from_yaml(find_recipe("ouro-tiny"))
recipe.pretrain["target_tokens"] = TEACHER_TOKENS
folder = pretrain(recipe, "runs/teacher")
teacher = AutoModelForCausalLM.from_pretrained(folder).eval()
tokenizer = AutoTokenizer.from_pretrained(folder)
text = PackedDataset("offline:prose", tokenizer, length=128)
rows = {"length": 128, "batch_size": 8}
unseen = HeldOut.of(teacher, held_out_batches("offline:prose", tokenizer, num_tokens=HELD_OUT_TOKENS, **rows))
results = {}


def measure(stage, student):
    """Measure a student on documents that no stage trains on."""
    results[stage] = evaluate_heldout(student, teacher, unseen)
    print(f"{stage:<10} KL to the teacher {results[stage]['kl']:.3f}, perplexity {results[stage]['perplexity']:.1f}")


print(f"teacher    perplexity {unseen.teacher_perplexity:.1f}")

# %% [markdown]
# ## Convert
#
# All four layers get Gated DeltaNet. It takes over q, k, v and o of the attention it replaces; its gates and its
# decay are fresh. The report accounts for every tensor.

# %%
conversion = loopergy.convert(teacher, keep_layers=[])
student = conversion.model
print(conversion.report.summary())
measure("converted", student)

# %% [markdown]
# ## Align
#
# Stage 1: each new mixer sees what the teacher's attention saw, in every loop, and learns its output. All else
# stands still, so the layers learn side by side.

# %%
quiet = {"report_to": "none", "save_strategy": "no", "logging_steps": 20, "per_device_train_batch_size": 8}
aligner = loopergy.AlignTrainer(
    student, teacher, loopergy.AlignConfig("runs/align", max_steps=ALIGN_STEPS, warmup_steps=0.1, **quiet), text
)
aligner.train()
record = aligner.record()
measure("aligned", student)

# %% [markdown]
# ## Select
#
# Which layer should keep its attention? Each is given it back for a moment; the KL that this saves ranks them.
# Layers are physical: one that is kept is kept in all loops.

# %%
batches = held_out_batches("offline:prose", tokenizer, num_tokens=HELD_OUT_TOKENS // 4, **rows)
selection = select_layers(student, teacher, batches, keep=1)
print("KL saved by layer:", {layer: round(score, 3) for layer, score in selection.scores.items()})
print("kept:", selection.kept_layers)

# %% [markdown]
# ## Distil
#
# Stage 2: the kept layer gets the teacher's attention, and the whole student learns the teacher's distribution,
# first in every loop, at the end in the last.

# %%
student, record = prepare_student(student, teacher, selection.kept_layers, previous=record)
settings = loopergy.DistillConfig(
    "runs/distill", max_steps=DISTILL_STEPS, learning_rate=1e-3, body_learning_rate=1e-4, warmup_steps=0.1, **quiet
)
distiller = loopergy.DistillTrainer(student, teacher, settings, text, previous=record)
distiller.train()
distiller.save_stage("runs/student")
measure("distilled", student)

# %% [markdown]
# ## What it was worth
#
# `runs/student` loads like any model. Its cache grows only in the layer that kept its attention.

# %%
student = AutoModelForCausalLM.from_pretrained("runs/student").eval()
prompt = tokenizer("The statement is", return_tensors="pt")
for name, model in (("teacher", teacher), ("student", student)):
    written = model.generate(**prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)
    print(f"{name}: {tokenizer.decode(written[0])!r}")

print(f"\n{'context':>8} {'cache of the teacher':>22} {'of the student':>16}")
for context in (512, 2048, 8192, 16384):
    costs = [model_cost(model.config, context, dtype=torch.bfloat16).cache_bytes for model in (teacher, student)]
    print(f"{context:>8,} {costs[0]:>22,} {costs[1]:>16,}")

print(f"\n{'stage':<10} {'KL, nats':>10} {'perplexity':>12}")
print(f"{'teacher':<10} {0:>10.3f} {unseen.teacher_perplexity:>12.1f}")
for stage, result in results.items():
    print(f"{stage:<10} {result['kl']:>10.3f} {result['perplexity']:>12.1f}")

perplexity = {"teacher": unseen.teacher_perplexity} | {stage: row["perplexity"] for stage, row in results.items()}
try:
    figure = draw_quality({stage: row["kl"] for stage, row in results.items()}, perplexity)
    figure.savefig("quality.png", dpi=150, bbox_inches="tight")
except ImportError:
    print('a picture needs: pip install "loopergy[plots]"')
