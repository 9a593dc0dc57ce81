"""Masks of a step: rows for every place that can be reached, matchers left where they were."""

from __future__ import annotations

import numpy as np
from toy import VOCAB, EvenOdd

from deepinfer.engine.masks import Constrained, MaskBuffer, build_masks, fill_each


def masks_of(*found: Constrained) -> list[tuple[int, int]]:
    masks = build_masks(found, VOCAB, fill_each)
    assert masks.bits.shape == (len(masks.rows), -(-VOCAB // 32))
    for (row, place), bits in zip(masks.rows, masks.bits, strict=True):
        expected = np.zeros_like(bits)
        matcher = next(one.matcher for one in found if one.row == row)
        assert isinstance(matcher, EvenOdd)
        ahead = EvenOdd(matcher.length)
        ahead.taken = matcher.taken + place
        ahead.fill(expected)
        assert (bits == expected).all()
    return sorted(masks.rows)


def test_every_place_behind_legal_drafts_has_a_row() -> None:
    one, other = EvenOdd(9), EvenOdd(9)
    assert other.accept(2)
    found = masks_of(Constrained(3, one, (2, 5, 4)), Constrained(5, other, (3, 3, 3)))
    assert found == [(3, 0), (3, 1), (3, 2), (3, 3), (5, 0), (5, 1)]
    assert (one.taken, other.taken) == (0, 1)


def test_nothing_stands_behind_the_end() -> None:
    one = EvenOdd(1)
    assert masks_of(Constrained(0, one, (2, 5))) == [(0, 0)]
    assert one.taken == 0


def test_no_matcher_no_rows() -> None:
    assert masks_of() == []


def test_a_buffer_is_used_again_and_grows() -> None:
    asked: list[tuple[int, int]] = []

    def allocate(count: int, words: int) -> np.ndarray:
        asked.append((count, words))
        return np.empty((count, words), np.uint32)

    buffer = MaskBuffer(allocate)
    first = buffer.rows(3, 2)
    assert np.shares_memory(first, buffer.rows(2, 2))
    assert buffer.rows(4, 2).shape == (4, 2) and buffer.rows(6, 2).shape == (6, 2)
    assert asked == [(3, 2), (6, 2)]
