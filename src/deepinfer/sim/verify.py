"""How many drafts each sequence of each rank verifies: each rank alone, or all together (pure).

Every rank pays for the slowest of its group. A rank that chooses alone takes its own best point of
tokens per second (the engine's `choose_rows`); a group that chooses together looks for the step
time with the most expected tokens of all ranks, each taking the rows that fit into it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepinfer.engine.costs import CostCurve
from deepinfer.engine.speculation import choose_rows

__all__ = ["choose_alone", "choose_together", "likeliest"]

Floats = NDArray[np.floating]
Ints = NDArray[np.int64]


def choose_alone(reach: Floats, busy: NDArray[np.bool_], curve: CostCurve) -> Ints:
    """Return how many drafts each rank verifies [R], each its own optimum.

    reach  [R, S, K] chance that a draft is reached and accepted; busy  [R, S]
    """
    budgets = np.zeros(len(reach), np.int64)
    for rank, (own, live) in enumerate(zip(reach, busy, strict=True)):
        if live.any():
            counts, _, _ = choose_rows(np.asarray(own[live], np.float64), curve,
                                       extra_s=curve.draft_s(int(live.sum())))  # fmt: skip
            budgets[rank] = sum(counts)
    return budgets


def choose_together(reach: Floats, busy: NDArray[np.bool_], curve: CostCurve) -> Ints:
    """Return how many drafts each rank verifies [R] for the most expected tokens of the group.

    For each step time that a rank can have, every rank takes its likeliest drafts up to the rows
    that fit; the best time wins, the shortest on ties.
    """
    ranks, seqs, drafts = reach.shape
    own = busy.sum(axis=1)
    values = np.where(busy[..., None], reach, -1.0).reshape(ranks, -1)
    values = -np.sort(-values, axis=1)
    there = values >= 0
    gain = np.concatenate([np.zeros((ranks, 1)), np.cumsum(np.where(there, values, 0), axis=1)], 1)
    most = there.sum(axis=1)
    sizes = np.unique(np.concatenate([own, *(np.arange(1, seqs * (1 + drafts) + 1),)]))
    sizes = sizes[sizes >= max(int(own.max(initial=0)), 1)]
    budgets = np.clip(sizes[:, None] - own[None, :], 0, most[None, :])  # [sizes, R]
    tokens = own.sum() + np.take_along_axis(gain.T, budgets, axis=0).sum(axis=1)
    seconds = np.asarray(curve.step_s(sizes)) + curve.draft_s(int(own.max(initial=1)))
    best = int((tokens / seconds).argmax())
    return np.asarray(budgets[best], np.int64)


def likeliest(reach: Floats, busy: NDArray[np.bool_], budgets: Ints) -> Ints:
    """Return drafts verified of each sequence [R, S]: the likeliest of a rank, up to its budget.

    Chances of a sequence never rise, so what is taken of it is always its first drafts.
    """
    ranks, seqs, drafts = reach.shape
    values = np.where(busy[..., None], reach, -1.0).reshape(ranks, -1)
    order = np.argsort(-values, axis=1, kind="stable")
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.arange(order.shape[1])[None, :], axis=1)
    taken = (place < budgets[:, None]) & (values >= 0)
    return np.asarray(taken.reshape(ranks, seqs, drafts).sum(axis=2), np.int64)
