# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
import pytest

from loopergy.configuration.layer_patterns import parse_layer_mixers, parse_loop_windows


def full_layers(pattern, layers):
    return [index for index, name in enumerate(parse_layer_mixers(pattern, layers)) if name == "full"]


@pytest.mark.parametrize("pattern", ["gdn*4,full", "interleaved:4:1:gdn:full"])
@pytest.mark.parametrize(
    ("layers", "full"), [(21, [4, 9, 14, 19]), (20, [4, 9, 14, 19]), (25, [4, 9, 14, 19, 24]), (3, [])]
)
def test_a_ratio_repeats_its_period(pattern, layers, full):
    assert full_layers(pattern, layers) == full
    assert set(parse_layer_mixers(pattern, layers)) - {"full"} == {"gdn"}


def test_a_bare_ratio_means_windowed_to_full():
    assert parse_layer_mixers("4:1", 7) == ["window"] * 4 + ["full"] + ["window"] * 2


@pytest.mark.parametrize(
    ("pattern", "full", "rest"),
    [
        ("bookend:2", [0, 1, 4, 5], "window"),
        ("sandwich:2:gdn", [0, 1, 4, 5], "gdn"),
        ("front:2:gdn", [0, 1], "gdn"),
        ("back:2:gdn", [4, 5], "gdn"),
        ("bookend:0:gdn", [], "gdn"),
        ("bookend:3:gdn", [0, 1, 2, 3, 4, 5], "gdn"),
    ],
)
def test_edges_keep_full_attention_at_the_ends_named(pattern, full, rest):
    assert full_layers(pattern, 6) == full
    assert set(parse_layer_mixers(pattern, 6)) <= {"full", rest}


def test_an_explicit_list_is_taken_as_it_is():
    assert parse_layer_mixers(["gdn", "full", "window"], 3) == ["gdn", "full", "window"]


@pytest.mark.parametrize(
    ("pattern", "layers", "said"),
    [
        ("gdnn", 4, "unknown mixer 'gdnn'. Allowed names: full, window, gdn"),
        (["gdn", "full"], 3, "2 entries but num_hidden_layers=3"),
        ("gdn*x,full", 4, "'x' is not a number of layers"),
        ("interleaved:4:1:gdn", 4, "is not understood"),
        ("bookend:4:gdn", 6, "more full layers than num_hidden_layers=6"),
        ("gdn*0", 4, "names no layer"),
        ("a:b", 4, "is not understood"),
    ],
)
def test_a_wrong_pattern_says_what_is_wrong_with_it(pattern, layers, said):
    with pytest.raises(ValueError, match=said.replace("*", r"\*")):
        parse_layer_mixers(pattern, layers)


def test_loop_windows_read_strings_and_lists_alike():
    assert parse_loop_windows("full->SWA=128->64", 3, 5) == [None, 128, 64]
    assert parse_loop_windows([None, 128, "full"], 3, 5) == [None, 128, None]
    assert parse_loop_windows([[8, None], 4], 2, 2) == [[8, None], 4]
    assert parse_loop_windows(None, 3, 5) is None


@pytest.mark.parametrize(
    ("windows", "said"),
    [
        ("full->128", "2 entries but num_loops=3"),
        ("full->full->SWA=0", "0 is no window"),
        ([1, 2, [3, 4]], "2 values but num_hidden_layers=5"),
        ([1, 2, 2.5], "2.5 is no window"),
        ([1, 2, True], "True is no window"),
    ],
)
def test_wrong_loop_windows_say_what_is_wrong_with_them(windows, said):
    with pytest.raises(ValueError, match=said):
        parse_loop_windows(windows, 3, 5)
