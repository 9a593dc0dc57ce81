"""TextStream: stop strings across token borders, held-back text, no dependence on pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.engine.text import TextStream, find_stop, held_back


class Pieces:
    """A decoder whose id i stands for the i-th piece; `rest` comes out at the end."""

    def __init__(self, pieces: list[str], rest: str = "") -> None:
        self.pieces = pieces
        self.rest = rest

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    def finish(self) -> str:
        return self.rest


def run(
    pieces: list[str], stops: list[str], min_tokens: int = 0, rest: str = ""
) -> tuple[str, int, list[str]]:
    """Return the final text, how many tokens were used, and the text shown after each step."""
    stream = TextStream(Pieces(pieces, rest), stops, min_tokens)
    shown = []
    used = 0
    for i in range(len(pieces)):
        used += 1
        stopped = stream.push(i)
        shown.append(stream.take())
        if stopped:
            break
    text = stream.finish()
    shown.append(stream.take())
    assert "".join(shown) == text
    return text, used, shown


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "used"),
    [
        (["hello ", "world"], [], "hello world", 2),
        (["hello ", "world"], ["wor"], "hello ", 2),
        (["a", "b", "c", "d"], ["bc"], "a", 3),
        (["ab", "cd", "ef"], ["bcde"], "a", 3),
        (["STOP", "x"], ["STOP"], "", 1),
        (["x\n", "\ny"], ["\n\n"], "x", 2),
        (["x\n", "y\n", "\nz"], ["\n\n"], "x\ny", 3),
        (["aab", "aabaac"], ["aabaac"], "aab", 2),  # a match that begins again inside a failed one
        (["abcd"], ["abcd", "bc"], "a", 1),  # the one completed first
        (["ab", "cd"], ["abcd", "bc"], "a", 2),
        (["xabc"], ["abc", "c"], "x", 1),  # same end: the longer one
        (["xyz", "STO"], ["STOP"], "xyzSTO", 2),  # begun, never completed
        (["é", "ö"], ["ö"], "é", 2),
    ],
)
def test_table(pieces: list[str], stops: list[str], text: str, used: int) -> None:
    assert run(pieces, stops)[:2] == (text, used)


def test_nothing_is_shown_that_may_begin_a_stop() -> None:
    _, _, shown = run(["one ST", "OP", "LE", " two STO"], ["STOPPED"])
    assert shown == ["one ", "", "STOPLE", " two ", "STO"]


def test_min_tokens_delays_stop_strings() -> None:
    assert run(["a", "X", "b", "X", "c"], ["X"], min_tokens=3)[:2] == ("aXb", 4)
    assert run(["a", "X", "b", "X", "c"], ["X"], min_tokens=2)[:2] == ("a", 2)
    assert run(["a", "XY", "Z"], ["YZ"], min_tokens=3)[:2] == ("aX", 3)
    assert run(["a", "X", "Xb"], ["X"], min_tokens=3)[:2] == ("aX", 3)


@given(
    before=st.text("ab<", max_size=6),
    behind=st.text("ab<", max_size=6),
    cuts=st.lists(st.integers(0, 16), max_size=4),
)
def test_stops_count_behind_a_text_only(before: str, behind: str, cuts: list[int]) -> None:
    text = f"{before}<a>{behind}"
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[i:j] for i, j in pairwise(edges)]
    head = text.index("<a>") + 3
    stream = TextStream(Pieces(pieces, ""), ["b", "a<"], after="<a>")
    for token_id in range(len(pieces)):
        if stream.push(token_id):
            break
    assert stream.finish() == text[:head] + naive(text[head:], ["b", "a<"])


def test_stops_do_not_count_without_the_text_before() -> None:
    stream = TextStream(Pieces(["a", "X", "<", "e", "X"], ""), ["X"], after="<end>")
    assert [stream.push(i) for i in range(5)] == [False] * 5
    assert stream.take() == "aX<eX"  # nothing is held back meanwhile


def test_stop_completed_by_the_last_held_bytes() -> None:
    text, used, _ = run(
        ["a", "b"], ["b\N{REPLACEMENT CHARACTER}"], rest="\N{REPLACEMENT CHARACTER}"
    )
    assert (text, used) == ("a", 2)


def naive(text: str, stops: list[str]) -> str:
    """Cut at the stop that is completed first, feeding one character at a time."""
    for end in range(1, len(text) + 1):
        begins = [end - len(s) for s in stops if text[:end].endswith(s)]
        if begins:
            return text[: min(begins)]
    return text


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    rest=st.text("ab", max_size=2),
)
def test_the_way_text_arrives_does_not_matter(
    pieces: list[str], stops: list[str], rest: str
) -> None:
    whole = naive("".join(pieces) + rest, stops)
    assert run(pieces, stops, rest=rest)[0] == whole


@given(
    text=st.text("abc", max_size=8),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_held_back_is_the_longest_open_stop(text: str, stops: list[str]) -> None:
    sizes = [
        n
        for n in range(len(text) + 1)
        if any(s != text[len(text) - n :] and s.startswith(text[len(text) - n :]) for s in stops)
    ]
    assert held_back(text, stops) == max(sizes, default=0)


def test_find_stop_ignores_what_ended_before() -> None:
    assert find_stop("aXbX", ["X"]) == 1
    assert find_stop("aXbX", ["X"], after=2) == 3
    assert find_stop("aXb", ["Xb"], after=2) == 1
    assert find_stop("aXb", ["Q"]) == -1
