"""The draws of `sampler.py` on a CPU: the same tokens with far less arithmetic.

A CPU may look at values to decide how much to compute, so it generates noise only for tokens that
can still win and sorts only tokens that can still be kept. Both cuts are exact; the device form in
`sampler.py` (fixed shapes, no look at values) is the twin in the tests.
Source: runtime specification, 5.1 and 5.3.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.sampling.noise import MAX_LOG_NOISE, STREAM_TARGET, exponentials, host_words

__all__ = ["MASS_ONE", "Floats", "Ints", "Words", "draw_host", "filter_host"]

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Words = NDArray[np.uint64]

MASS_ONE = 2.0**31
"""Fixed point of the likeliest token's mass."""

_DEPTHS = (4.0, 12.0, math.inf)  # how far below the top `filter_host` looks, one after the other
_HALF, _LOW = np.uint64(32), np.uint64(2**32 - 1)
_FIRST_GROUPS, _MORE_GROUPS = 512, 8192  # noise made at a time for one row


def draw_host(logits: Floats, seeds: Words, positions: Ints, stream: int = STREAM_TARGET) -> Ints:
    """Draw one token a row from softmax(logits) by the Gumbel-max rule, ties to the lower id.

    logits     [N, V]  -inf where not allowed
    seeds      [N]     uint64
    positions  [N]     absolute position of the token drawn
    returns    [N]; 0 for a row with no largest logit (NaN, infinity, nothing allowed)
    A token wins with noise above the best score so far, that is with a random word below a bound;
    only the few words that pass are turned into noise.
    """
    num, width = logits.shape
    lead = _below_top(logits)
    if width % 4:
        lead = np.pad(lead, ((0, 0), (0, -width % 4)), constant_values=-np.inf)
    lead = lead.reshape(num, -1, 4)
    best = _Best(lead, seeds, positions, stream)
    best.offer(np.arange(num), logits.argmax(axis=1) >> 2)
    # Groups whose largest logit could still beat the best score.
    top = np.maximum(
        np.maximum(lead[:, :, 0], lead[:, :, 1]), np.maximum(lead[:, :, 2], lead[:, :, 3])
    )
    near = top >= (best.score - MAX_LOG_NOISE - 0.1)[:, None]
    if int(np.count_nonzero(near)) <= num * _FIRST_GROUPS:
        rows, groups = np.nonzero(near)
        for begin in range(0, len(rows), _MORE_GROUPS):
            best.offer(rows[begin : begin + _MORE_GROUPS], groups[begin : begin + _MORE_GROUPS])
        return best.ids
    for row in range(num):
        groups = np.flatnonzero(near[row])
        # A few first, so that the best score is already high for the rest.
        best.offer_row(row, groups[:_FIRST_GROUPS])
        groups = groups[_FIRST_GROUPS:]
        groups = groups[top[row, groups] >= best.score[row] - MAX_LOG_NOISE - 0.1]
        for begin in range(0, len(groups), _MORE_GROUPS):
            best.offer_row(row, groups[begin : begin + _MORE_GROUPS])
    return best.ids


class _Best:
    """The best score and id of every row so far."""

    def __init__(
        self, lead: NDArray[np.float32], seeds: Words, positions: Ints, stream: int
    ) -> None:
        self._lead = lead
        self._seeds = seeds
        self._positions = positions
        self._stream = stream
        self.score = np.full(len(lead), -np.inf)
        self.ids = np.zeros(len(lead), np.int64)

    def offer(self, rows: Ints, groups: Ints) -> None:
        """Score the ids of some groups; (row, group) pairs in ascending order."""
        words = host_words(self._seeds[rows], self._positions[rows], groups, self._stream)
        self._take(rows, groups, words, self._lead[rows, groups])

    def offer_row(self, row: int, groups: Ints) -> None:
        """Score the ids of some groups of one row."""
        words = host_words(self._seeds[row], self._positions[row], groups, self._stream)
        self._take(np.full(len(groups), row), groups, words, self._lead[row][groups])

    def _take(self, rows: Ints, groups: Ints, words: NDArray[np.uint32], lead: Floats) -> None:
        # A token beats the score s iff E < exp(lead - s); E >= the uniform number behind it.
        with np.errstate(over="ignore", invalid="ignore"):
            bound = np.exp(lead - self.score[rows].astype(np.float32)[:, None])
            hits, lanes = np.nonzero(words <= bound * np.float32(2.0**32 * 1.0001) + 2.0)
        if not len(hits):
            return
        noise = np.log(exponentials(words[hits, lanes]))
        score = lead[hits, lanes].astype(np.float64) - noise
        row, ids = rows[hits], groups[hits] * 4 + lanes
        order = np.lexsort((ids, -score, row))
        row, ids, score = row[order], ids[order], score[order]
        first = np.flatnonzero(np.diff(row, prepend=-1))
        row, ids, score = row[first], ids[first], score[first]
        better = (score > self.score[row]) | ((score == self.score[row]) & (ids < self.ids[row]))
        self.score[row[better]] = score[better]
        self.ids[row[better]] = ids[better]


def filter_host(logits: Floats, top_p: NDArray[np.float64], top_k: Ints) -> Floats:
    """Keep the likeliest tokens of each row: first by mass, then by count; the rest become -inf.

    Arguments and result as in `sampler.filter_logits`, with numpy arrays. A row is sorted only as
    far down as its kept tokens can reach, and not at all without a largest logit (NaN, infinity,
    nothing allowed): such a row comes back as it is.
    """
    lead = _below_top(logits)
    usable = ~np.isnan(lead).any(axis=1)
    mass = np.rint(torch.exp(torch.from_numpy(lead)).numpy() * np.float32(MASS_ONE))
    # Whole numbers below 2^53: exact in any order.
    limit = np.where(top_p < 1.0, top_p * mass.sum(axis=1, dtype=np.float64), np.inf)
    most = np.where(top_k < 0, logits.shape[1], top_k)
    kept = np.full_like(logits, -np.inf)
    kept[~usable] = logits[~usable]
    for row in np.flatnonzero(usable).tolist():
        for depth in _DEPTHS:
            ids = np.flatnonzero(lead[row] >= -depth)
            # Sort by falling logit, then id, as one unsigned number: leads are -0.0 and below.
            bits = np.abs(lead[row, ids]).view(np.uint32).astype(np.uint64)
            ids = (np.sort((bits << _HALF) | ids.astype(np.uint64)) & _LOW).astype(np.int64)
            summed = mass[row, ids].cumsum(dtype=np.float64)
            # A token is kept while the mass before it is below the limit.
            count = 1 + int(np.searchsorted(summed[:-1], limit[row]))
            if count < len(ids) or len(ids) >= most[row] or summed[-1] >= limit[row]:
                break
        ids = ids[: min(count, most[row])]
        kept[row, ids] = logits[row, ids]
    return kept


def _below_top(logits: Floats) -> Floats:
    """Return each row less its largest; rows without one hold NaN."""
    with np.errstate(invalid="ignore"):
        below: Floats = logits - logits.max(axis=1, keepdims=True)
    return below
