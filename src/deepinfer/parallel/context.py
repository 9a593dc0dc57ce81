"""Which rank computes which rows of a prefill step, and what ranks hand to each other (pure).

A sequence's new rows are cut into twice as many pieces as there are ranks; rank r takes piece r and
piece 2C-1-r, so that early and late positions, cheap and dear ones, come together on every rank.
Cuts lie on multiples of `align` positions: a group of tokens that is pooled into one entry is never
torn. Short sequences go whole to the rank with the fewest rows. Everything else follows from who
owns which row.

Source: parallelism specification, 2.1 and 2.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Exchange", "borders", "exchange_of", "mirror_pieces", "split_rows"]

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

_WHOLE = 8
"""A sequence stays whole on a rank when it is at most this part of a rank's fair share."""


def mirror_pieces(start: int, count: int, num_ranks: int, align: int = 1) -> list[tuple[int, int]]:
    """Return the 2C pieces of the positions start..start+count-1 as (begin, end), some empty.

    Pieces begin at multiples of `align` (the first one at `start`) and are equally long but for the
    ends. Piece b belongs to rank b, or to rank 2C-1-b in the second half.
    """
    origin, end = start - start % align, start + count
    size = -(-(end - origin) // (2 * num_ranks))
    size = -(-size // align) * align
    cuts = [min(max(origin + b * size, start), end) for b in range(2 * num_ranks + 1)]
    return [(cuts[b], cuts[b + 1]) for b in range(2 * num_ranks)]


def split_rows(
    starts: Sequence[int], counts: Sequence[int], num_ranks: int, align: int = 1
) -> Ints:
    """Return the rank of each row [T] of a step: sequences one after the other.

    starts  position of each sequence's first row
    counts  rows of each, at least 1
    The same on every rank, for it depends on nothing else.
    """
    total = sum(counts)
    first = np.concatenate([[0], np.cumsum(np.asarray(counts, np.int64))])
    owner = np.zeros(total, np.int64)
    load = [0] * num_ranks
    whole = []
    for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
        if count < 2 * num_ranks * align or count * num_ranks * _WHOLE <= total:
            whole.append(b)
            continue
        for piece, (begin, end) in enumerate(mirror_pieces(start, count, num_ranks, align)):
            rank = min(piece, 2 * num_ranks - 1 - piece)
            owner[first[b] + begin - start : first[b] + end - start] = rank
            load[rank] += end - begin
    for b in sorted(whole, key=lambda b: (-counts[b], b)):
        rank = min(range(num_ranks), key=lambda rank: (load[rank], rank))
        owner[first[b] : first[b + 1]] = rank
        load[rank] += counts[b]
    return owner


def borders(owner: Ints, counts: Sequence[int], window: int, kept: int) -> Flags:
    """Return which rows [T] ranks other than their owner need the window entries of.

    A row is needed by a later row of its sequence within `window` positions (itself included) that
    another rank owns, and everywhere when it is among the last `kept` of its sequence: these fill
    the ring, which every rank keeps.
    """
    needed = np.zeros(len(owner), bool)
    first = 0
    for count in counts:
        own = owner[first : first + count]
        change = np.flatnonzero(own[1:] != own[:-1]) + 1  # the first row of another owner
        following = np.append(change, count + window)
        at = following[np.searchsorted(change, np.arange(count), side="right")]
        needed[first : first + count] = at - np.arange(count) < window
        needed[first + max(0, count - kept) : first + count] = True
        first += count
    return needed


@dataclass(frozen=True, slots=True)
class Exchange:
    """How n items that ranks own become one array in order, on every rank.

    send   this rank's items, as places among what it has
    most   items of the rank with the most: what every rank sends, filled up
    index  [n] where each item is among what all ranks sent, [ranks * most]
    """

    send: Ints
    most: int
    index: Ints


def exchange_of(owner: Ints, held: Ints, num_ranks: int, rank: int) -> Exchange:
    """Return the exchange of items [n] with these owners.

    held  [n] place of each item among what its owner has; only this rank's are looked at
    """
    counts = np.bincount(owner, minlength=num_ranks)
    most = int(counts.max(initial=0))
    order = np.argsort(owner, kind="stable")
    place = np.empty(len(owner), np.int64)
    place[order] = np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner[order]]
    return Exchange(np.asarray(held[owner == rank], np.int64), most, owner * most + place)
