# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
# %% [markdown]
# # Talk to Ouro
#
# Ouro applies one stack of layers four times. This notebook talks to it, asks each loop what it would have said,
# and lets easy tokens leave early. The 1.4B model takes 2.7 GiB of memory in bfloat16 and answers on a CPU,
# slowly, or on any GPU.

# %%
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import loopergy

MODEL = "ByteDance/Ouro-1.4B-Thinking"
device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto").to(device)
print(type(model).__name__, "on", device, "-", loopergy.kernel_backend())

# %% [markdown]
# `import loopergy` is what made `AutoModelForCausalLM` find our class: no remote code ran. Chat works as with any
# model. The end of a turn is token 2; the published files say 0, which is repaired at loading.

# %%
turns = [{"role": "user", "content": "Why is the sky blue? Answer in one sentence."}]
inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True).to(
    device
)
answer = model.generate(**inputs, max_new_tokens=48, do_sample=False)
print(tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

# %% [markdown]
# ## What each loop would say
#
# Every loop ends in a normed state that the head can read. One forward pass gives the logits of all of them.

# %%
text = "The capital of France is the city of"
ids = tokenizer(text, return_tensors="pt").input_ids.to(device)
with torch.no_grad():
    outputs = model(ids, output_loop_logits=True)

last = outputs.loop_logits[-1][0].float().log_softmax(-1)
print(f"{'loop':>4}  {'next token':<16} {'its probability':>15} {'KL to the last loop, nats a token':>34}")
distances = []
for loop, logits in enumerate(outputs.loop_logits, 1):
    logs = logits[0].float().log_softmax(-1)
    best = int(logs[-1].argmax())
    distances.append(float((last.exp() * (last - logs)).sum(-1).mean()))
    print(f"{loop:>4}  {tokenizer.decode([best])!r:<16} {logs[-1, best].exp():>15.3f} {distances[-1]:>34.4f}")

# %% [markdown]
# `num_loops=2` runs two of them, with half the cache and half the time: the same as reading the second row of the
# table. It may be set in `from_pretrained`, in a call, or here:

# %%
short = model.generate(**inputs, max_new_tokens=24, do_sample=False, num_loops=2)
print(tokenizer.decode(short[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

# %% [markdown]
# ## Leaving early
#
# A gate on the state after each loop gives the probability of stopping there. With a threshold q below 1 a token
# leaves in the first loop by which these probabilities add up to q, and later loops are not computed for it.

# %%
counted = 0


def count_tokens(module, args, output):
    """Add up the tokens that pass through the first layer."""
    global counted
    counted += args[0].shape[0] * args[0].shape[1]


hook = model.model.layers[0].register_forward_hook(count_tokens)
print(f"{'threshold':>9} {'loop passes':>12}  text")
for threshold in (1.0, 0.8, 0.5, 0.2):
    counted = 0
    out = model.generate(**inputs, max_new_tokens=24, do_sample=False, exit_threshold=threshold)
    words = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    print(f"{threshold:>9} {counted:>12}  {words[:70]!r}")
hook.remove()

# %% [markdown]
# Where in the text does the model need its loops? Rows are loops, columns the tokens of the sentence; dark is
# where the gate would stop.

# %%
print(f"{'token':<14}" + "".join(f"{f'loop {loop}':>9}" for loop in range(1, len(outputs.loop_logits) + 1)))
stops = outputs.exit_pdf[0].float().cpu()  # tokens, loops
for token, row in zip(tokenizer.convert_ids_to_tokens(ids[0].tolist()), stops.tolist(), strict=True):
    print(f"{token:<14}" + "".join(f"{value:>9.3f}" for value in row))

try:
    import matplotlib.pyplot as plt
except ImportError:
    print('a picture needs: pip install "loopergy[plots]"')
else:
    figure, axes = plt.subplots(figsize=(8, 2.4))
    image = axes.imshow(stops.T, cmap="magma_r", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(ids.shape[1]), [tokenizer.decode([token]) for token in ids[0].tolist()], rotation=45)
    axes.set_yticks(range(len(stops.T)), [f"loop {loop + 1}" for loop in range(len(stops.T))])
    figure.colorbar(image, label="probability of stopping")
    figure.savefig("exits.png", dpi=150, bbox_inches="tight")
