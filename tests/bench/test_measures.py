"""Measures on numbers made by hand, and accepted runs against a search of their own."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.bench.measures import (
    Drafting,
    bits,
    calibration_error,
    fits_schema,
    reliability,
    repeated_share,
    shares_of_fair,
    sigmoid,
)


@pytest.mark.parametrize("size", [2, 288, 3072])
def test_bits_of_a_uniform_distribution(size: int) -> None:
    assert bits(np.full(7, -math.log(size))) == pytest.approx(7 * math.log2(size))


@pytest.mark.parametrize(
    ("predictions", "error"),
    [
        ([(1.0, True)] * 4, 0.0),
        ([(1.0, False)] * 4, 1.0),
        ([(0.75, True)] * 3 + [(0.75, False)], 0.0),
        # Two ranges: 0.95 against 1/2 on two trials, 0.15 against 0 on six.
        ([(0.95, True), (0.95, False)] + [(0.15, False)] * 6, 0.25 * 0.45 + 0.75 * 0.15),
        # One range averages what lies inside it: 0.21 and 0.29 against 1/2.
        ([(0.21, True), (0.29, False)], 0.25),
    ],
)
def test_calibration_error_by_hand(predictions: list[tuple[float, bool]], error: float) -> None:
    assert calibration_error(predictions) == pytest.approx(error)


def test_calibration_of_nothing_is_unknown() -> None:
    assert math.isnan(calibration_error([])) and reliability([]) == []


def test_reliability_table_by_hand() -> None:
    table = reliability([(0.05, False), (0.0, True), (0.1, True), (1.0, True)])
    assert [(b.low, b.count, b.accuracy) for b in table] == [(0, 2, 0.5), (0.1, 1, 1), (0.9, 1, 1)]
    assert table[0].confidence == pytest.approx(0.025) and table[-1].high == 1


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=40))
@settings(max_examples=60)
def test_every_prediction_is_in_one_range(predictions: list[tuple[float, bool]]) -> None:
    table = reliability(predictions)
    assert sum(b.count for b in table) == len(predictions)
    assert all(b.low - 1e-9 <= b.confidence <= b.high + 1e-9 for b in table)
    assert 0 <= calibration_error(predictions) <= 1


def test_temperatures_pull_towards_a_half() -> None:
    assert sigmoid(0) == 0.5 and sigmoid(1e6) == pytest.approx(1) and sigmoid(-1e6) < 1e-20
    assert sigmoid(2, 4) == pytest.approx(1 / (1 + math.exp(-0.5)))


TOKENS = st.lists(st.integers(0, 1), min_size=2, max_size=30)


@given(TOKENS, st.randoms(use_true_random=False), st.integers(1, 5))
@settings(max_examples=150)
def test_accepted_runs_equal_a_search(tokens: list[int], rng: object, size: int) -> None:
    """Blocks are a function of the position behind which they are drafted."""
    blocks = [[rng.randint(0, 1) for _ in range(size)] for _ in tokens]  # type: ignore[attr-defined]
    drafting = Drafting()
    drafting.offer(blocks[0], [0.0] * size)
    for position in range(1, len(tokens)):
        if drafting.take(tokens[position]):
            drafting.offer(blocks[position], [float(position)] * size)

    at, lengths, matches = 0, [], []
    while at < len(tokens):
        following = tokens[at + 1 :]
        kept = 0
        while kept < min(size, len(following)) and blocks[at][kept] == following[kept]:
            kept += 1
        compared = min(kept + 1, size, len(following))
        matches += [(place, place < kept, float(at)) for place in range(compared)]
        if kept == len(following):  # nothing behind the last kept draft: the block is cut off
            break
        lengths.append(kept + 1)
        at += kept + 1
    assert drafting.lengths == lengths
    assert [(t.place, t.matched, t.confidence) for t in drafting.trials] == matches


def test_repetition() -> None:
    assert repeated_share(list(range(30))) == 0
    assert repeated_share([1] * 27) == pytest.approx(1 - 1 / 20)
    assert repeated_share([1, 2, 3]) == 0


def test_shares() -> None:
    counts = np.array([[1, 1, 1, 1], [4, 0, 0, 0], [0, 0, 0, 0]])
    assert shares_of_fair(counts).tolist() == [[1, 1, 1, 1], [4, 0, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        ({"a": 1, "b": "x"}, True),
        ({"a": 1, "b": "x", "more": None}, True),
        ({"a": True, "b": "x"}, False),
        ({"a": 1.5, "b": "x"}, False),
        ({"a": 1, "b": "z"}, False),
        ({"a": 1}, False),
        ([], False),
        ("x", False),
        ({"a": 1, "b": "x", "c": [1, 2.5]}, True),
        ({"a": 1, "b": "x", "c": [1, "2"]}, False),
        ({"a": 1, "b": "x", "d": 1}, False),
    ],
)
def test_schemas(value: object, fits: bool) -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "string", "enum": ["x", "y"]},
            "c": {"type": "array", "items": {"type": "number"}},
            "d": {"type": "boolean"},
        },
        "required": ["a", "b"],
    }
    assert fits_schema(value, schema) is fits
