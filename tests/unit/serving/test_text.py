# SPDX-License-Identifier: Apache-2.0
"""The text of a stream is that of the whole sequence, however the tokens were grouped."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.serving.toys import BOS, END, ByteTokenizer
from trtllm_dspark.serving.text import StopMatcher, TextStream, decode_tokens

TOKENIZER = ByteTokenizer(
    {300: b" the", 301: "né".encode(), 302: b"\xc3", 303: b"ab", 304: b"STOP."}
)


def run(
    blocks: list[list[int]], stops: tuple[str, ...] = (), **options: bool
) -> tuple[str, list[int]]:
    """Joined text and tokens of all groups."""
    stream = TextStream(TOKENIZER, stops, **options)
    groups = [stream.push(block) for block in blocks] + [stream.finish()]
    assert stream.num_tokens == sum(len(group.token_ids) for group in groups)
    return "".join(g.text for g in groups), [i for g in groups for i in g.token_ids]


def cut_at_first_completed(text: str, stops: tuple[str, ...]) -> str:
    """Independent definition: the match that ends first; of those the longest."""
    ends = [
        (index + len(stop), -len(stop), index)
        for stop in stops
        if stop and (index := text.find(stop)) >= 0
    ]
    return text[: min(ends)[2]] if ends else text


def split(tokens: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(tokens), *(c % (len(tokens) + 1) for c in cuts)})
    return [tokens[a:b] for a, b in itertools.pairwise(edges)]


@given(
    st.lists(st.sampled_from([97, 98, 0xC3, 0xA9, 0xF0, 0x9F, 300, 301, 302, 303, END])),
    st.lists(st.integers(0, 50)),
)
def test_streamed_text_equals_the_text_of_the_whole(tokens: list[int], cuts: list[int]) -> None:
    text, ids = run(split(tokens, cuts))
    assert text == decode_tokens(TOKENIZER, tokens)
    assert ids == tokens


@given(
    st.lists(st.sampled_from([97, 98, 99, 303, 0xC3, 0xA9]), max_size=20),
    st.lists(st.text("abcé", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 50)),
)
def test_stop_strings_cut_at_the_first_completed_match_in_any_blocks(
    tokens: list[int], stops: list[str], cuts: list[int]
) -> None:
    text, ids = run(split(tokens, cuts), tuple(stops))
    assert text == cut_at_first_completed(decode_tokens(TOKENIZER, tokens), tuple(stops))
    assert ids == tokens[: len(ids)]
    assert text.startswith(decode_tokens(TOKENIZER, ids))


@given(st.text("ab", min_size=1, max_size=6), st.text("ab", max_size=40))
def test_the_matcher_finds_the_same_end_as_a_plain_search(pattern: str, text: str) -> None:
    matcher = StopMatcher(pattern)
    ends = [index + 1 for index, character in enumerate(text) if _advance(matcher, character)]
    start = text.find(pattern)
    assert ends[:1] == ([start + len(pattern)] if start >= 0 else [])


def _advance(matcher: StopMatcher, character: str) -> bool:
    if matcher.state == len(matcher.pattern):
        return False
    return matcher.advance(character)


def test_a_character_split_over_tokens_comes_out_whole() -> None:
    stream = TextStream(TOKENIZER)
    assert stream.push([0xF0, 0x9F]).text == ""
    assert stream.push([0x98]).token_ids == ()
    group = stream.push([0x80, 33])
    assert (group.text, group.token_ids) == ("😀!", (0xF0, 0x9F, 0x98, 0x80, 33))


def test_an_incomplete_character_at_the_end_becomes_one_replacement_character() -> None:
    assert run([[97, 0xF0, 0x9F]])[0] == "a�"


def test_whitespace_is_kept_exactly() -> None:
    assert run([[32, 32], [10], [300], [32]])[0] == "  \n the "


def test_special_tokens_are_skipped_unless_asked_for() -> None:
    assert run([[BOS, 97, END]]) == ("a", [BOS, 97, END])
    assert run([[BOS, 97, END]], skip_special=False)[0] == "<bos>a<end>"


def test_text_that_may_become_a_stop_string_is_held_back_and_given_out_when_it_does_not() -> None:
    stream = TextStream(TOKENIZER, ("abc",))
    assert stream.push([120, 97]).text == "x"
    assert stream.push([98]).text == ""
    assert stream.push([97]).text == "ab"
    assert stream.finish().text == "a"


def test_a_stop_string_inside_a_token_cuts_inside_the_token() -> None:
    text, ids = run([[97, 304, 98]], ("TOP",))
    assert (text, ids) == ("aS", [97])


def test_a_stop_string_across_blocks_is_found_and_nothing_after_it_counts() -> None:
    stream = TextStream(TOKENIZER, ("bc",))
    assert stream.push([97, 98]).text == "a"
    assert stream.push([99, 100]).text == ""
    assert stream.is_stopped
    assert stream.push([101]).text == "" and stream.finish().text == ""


def test_the_stop_string_that_is_completed_first_wins() -> None:
    assert run([[97, 98, 99]], ("abc", "b"))[0] == "a"
    assert run([[97, 98, 99]], ("bc", "abc"))[0] == ""


def test_empty_stop_strings_ask_for_nothing() -> None:
    assert run([[97, 98]], ("",))[0] == "ab"


def test_log_probs_stay_with_their_tokens() -> None:
    stream = TextStream(TOKENIZER, ("zz",))
    first = stream.push([97, 0xC3], [-1.0, -2.0])
    second = stream.push([0xA9], [-3.0])
    assert (first.log_probs, second.log_probs) == ((-1.0,), (-2.0, -3.0))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_block_size_changes_neither_text_nor_tokens(size: int) -> None:
    tokens = [*b"fine. Then STOPPED", 304, 97]
    blocks = [tokens[i : i + size] for i in range(0, len(tokens), size)]
    assert run(blocks, ("STOP.",)) == run([tokens], ("STOP.",))
