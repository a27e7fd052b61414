# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""A tokenizer for a model that is trained from nothing: byte-level BPE with Ouro's special tokens."""

from typing import Any

from transformers import PreTrainedTokenizerFast

from loopergy.training.data import load_documents

_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(documents: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with Ouro's special tokens at Ouro's ids 0, 1 and 2.

    Args:
        documents (`list[str]`): Text.
        vocab_size (`int`): Number of tokens, at least 259: one a byte and the special ones.

    Returns:
        `PreTrainedTokenizerFast`: With a ChatML template.

    Raises:
        ValueError: Too few tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < 256 + len(_SPECIAL):
        raise ValueError(f"tokenizer: `vocab_size` must be at least {256 + len(_SPECIAL)}, got {vocab_size}.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    return with_template(tokenizer)


def with_template(tokenizer: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the tokenizers library with the special tokens and the template of those trained here."""
    names = dict(zip(("pad_token", "bos_token", "eos_token"), _SPECIAL, strict=True))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **names)
    fast.chat_template = _CHAT_TEMPLATE
    return fast


def documents_at_hand(source: str) -> list[str]:
    """Return the documents to train a tokenizer on, chats as its template writes them."""
    from tokenizers import Tokenizer, models

    documents = load_documents(source, with_template(Tokenizer(models.BPE())))
    if not isinstance(documents, list):
        raise ValueError(
            f"data: there is no file or folder {source!r}, so it names a data set of the Hub, which is streamed, and "
            "a tokenizer is trained on documents at hand. Correct the path, or name a tokenizer to load."
        )
    return documents
