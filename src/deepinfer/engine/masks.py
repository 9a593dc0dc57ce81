"""Grammar masks of a step: one row of bits for every place that a grammar constrains. Pure.

The rows of all sequences are filled together, one draft position after the other, so that a library
can share the work out to its threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer.engine.commit import TokenMatcher
from deepinfer.engine.plan import Masks

__all__ = ["Constrained", "FillRows", "MaskBuffer", "build_masks", "fill_each", "plain_rows"]

FillRows = Callable[[Sequence[tuple[TokenMatcher, int]], NDArray[np.uint32]], None]
"""Writes what each matcher allows into the row that it names."""


def fill_each(work: Sequence[tuple[TokenMatcher, int]], bits: NDArray[np.uint32]) -> None:
    """Fill the rows one by one."""
    for matcher, row in work:
        if not matcher.fill(bits[row]):
            bits[row] = np.uint32(0xFFFFFFFF)


@dataclass(slots=True)
class Constrained:
    """One sequence of a step that a grammar constrains.

    row     index in the plan
    drafts  what it verifies
    """

    row: int
    matcher: TokenMatcher
    drafts: Sequence[int]
    taken: int = 0


def plain_rows(count: int, words: int) -> NDArray[np.uint32]:
    """Allocate rows in ordinary memory."""
    return np.empty((count, words), np.uint32)


class MaskBuffer:
    """One piece of memory for the masks of every step, grown when it must be.

    A step's masks are read by its draw, and the next ones are written only after the outcome of
    that draw has been taken: one piece is enough.

    allocate  makes rows; memory that a device copies from is pinned
    """

    def __init__(self, allocate: Callable[[int, int], NDArray[np.uint32]] = plain_rows) -> None:
        self._allocate = allocate
        self._rows = np.empty((0, 0), np.uint32)

    def rows(self, count: int, words: int) -> NDArray[np.uint32]:
        """Return so many rows; what they hold is left over from before."""
        if self._rows.shape[0] < count or self._rows.shape[1] != words:
            self._rows = self._allocate(max(count, 2 * self._rows.shape[0]), words)
        return self._rows[:count]


def build_masks(
    found: Sequence[Constrained],
    vocab_size: int,
    fill_rows: FillRows,
    buffer: MaskBuffer | None = None,
) -> Masks:
    """Return the masks of a step; every matcher ends where it was.

    A place behind a draft that is not legal, or behind the end, cannot be reached and has no row.
    """
    rows: list[tuple[int, int]] = []
    most = sum(1 + len(one.drafts) for one in found)
    bits = (buffer or MaskBuffer()).rows(most, -(-vocab_size // 32))
    active = list(found)
    try:
        while active:
            first = len(rows)
            rows += [(one.row, one.taken) for one in active]
            work = [(one.matcher, first + idx) for idx, one in enumerate(active)]
            fill_rows(work, bits)
            active = [one for one in active if _go_on(one)]
    finally:
        for one in found:
            if one.taken:
                one.matcher.rollback(one.taken)
    return Masks(tuple(rows), bits[: len(rows)])


def _go_on(one: Constrained) -> bool:
    """Take the next draft; return whether the place behind it can be reached."""
    if one.taken == len(one.drafts):
        return False
    if not one.matcher.try_drafts(one.drafts[one.taken : one.taken + 1]):
        return False
    one.taken += 1
    return not one.matcher.is_finished()
