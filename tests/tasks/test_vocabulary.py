# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""Tokenizers with a fixed vocabulary."""

import pytest

from loopergy.tasks.vocabulary import character_tokenizer, word_tokenizer


def test_words_get_their_place_as_id():
    tokenizer = word_tokenizer(["b", "a", "<end>"], eos_token="<end>")
    assert tokenizer("a b  a <end>")["input_ids"] == [1, 0, 1, 2]
    assert tokenizer.decode([1, 0, 2]) == "a b <end>"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (2, 2, 3)


@pytest.mark.parametrize(("words", "message"), [(["a", "a"], "twice"), (["a b"], "space"), ([""], "empty")])
def test_a_vocabulary_that_cannot_be_read_back_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        word_tokenizer(words)


def test_characters_are_numbered_by_code_point_and_keep_every_space():
    text = "a  b\n\n\tä.b'\u00e9 \U0001f600"
    tokenizer = character_tokenizer(text)
    alphabet = sorted(set(text))
    assert tokenizer(text)["input_ids"] == [alphabet.index(character) for character in text]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
