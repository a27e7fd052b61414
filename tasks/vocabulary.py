# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Tokenizers with a fixed vocabulary, made without training: one token a word, or one a character."""

from collections.abc import Iterable
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def word_tokenizer(words: Iterable[str], eos_token: str | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are words between spaces; the id of a word is its place in `words`.

    Args:
        words (iterable of `str`): The vocabulary, without doubles and without spaces.
        eos_token (`str`, *optional*): The word that ends a sequence; it also pads.

    Raises:
        ValueError: A word that is there twice or holds a space.
    """
    tokenizer = _fixed(words)
    if any(word != word.strip() or len(word.split()) != 1 for word in tokenizer.get_vocab()):
        raise ValueError("A vocabulary of words cannot hold an empty word or one with a space.")
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {} if eos_token is None else {"eos_token": eos_token, "pad_token": eos_token}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names)


def character_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are the characters of a text, numbered in the order of their code points."""
    tokenizer = _fixed(sorted(set(text)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def encode(tokenizer: Any, text: str, **options: Any) -> Any:
    """Tokenise a text that a user typed, as the tokenizer does.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Any.
        text (`str`): The text.
        **options: Of the tokenizer's call.

    Raises:
        ValueError: A text without tokens, or with words that a tokenizer without an unknown token does not have.
    """
    try:
        encoded = tokenizer(text, **options)
    except Exception as error:  # the tokenizers library raises nothing more special
        if not lacks_a_word(error):
            raise
        pieces = [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        known = tokenizer.get_vocab()
        unknown = list(dict.fromkeys(piece for piece in pieces if piece not in known))
        raise ValueError(
            f"The text holds {', '.join(map(repr, unknown[:5]))}, which the tokenizer's vocabulary of {len(known)} "
            f"tokens does not have, nor does it have a token for the unknown. It has: "
            f"{', '.join(map(repr, sorted(known, key=known.get)[:8]))}{', ...' if len(known) > 8 else ''}."
        ) from None
    if not torch.as_tensor(encoded["input_ids"]).numel():
        raise ValueError(f"The text {text!r} has no token: give at least one word.")
    return encoded


def lacks_a_word(error: Exception) -> bool:
    """Say whether a tokenizer raised this error over a word that it lacks, for want of an unknown token."""
    return "Missing [UNK] token" in str(error)


def _fixed(tokens: Iterable[str]) -> Tokenizer:
    tokens = list(tokens)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ValueError(
            f"A vocabulary cannot hold a token twice; got {len(tokens)} with {len(vocabulary)} different."
        )
    return Tokenizer(models.WordLevel(vocab=vocabulary))
