"""The layers of one step as events: each message leaves, travels and arrives by itself (pure).

Where `cluster.py` lets all ranks wait for the slowest of a phase, here a rank begins its experts
when the last row that it needs is there, and its next layer when the last answer is. Ports send and
receive one message at a time. For some layers and tens of ranks; it shows what the simple form
leaves out, and what one late rank costs.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from deepinfer.sim.times import Fabric

__all__ = ["bulk_us", "event_us"]

Floats = NDArray[np.floating]


def bulk_us(dense: Floats, experts: Floats, sent: Floats, fabric: Fabric, back: float) -> float:
    """Return the time of a step with a wait for the slowest behind every phase.

    dense, experts  [L, N] microseconds; sent  [L, N, N] bytes from each rank to each for dispatch;
    answers are `back` times as large and go the other way
    """
    total = 0.0
    for own, worked, table in zip(dense, experts, sent, strict=True):
        away = table - np.diag(np.diag(table))
        most = max(float(away.sum(axis=1).max()), float(away.sum(axis=0).max()))
        total += float(own.max()) + float(worked.max())
        if len(own) > 1:
            total += fabric.dispatch_us + fabric.combine_us + most * (1 + back) / fabric.bytes_us
    return total


def event_us(
    dense: Floats,
    experts: Floats,
    sent: Floats,
    fabric: Fabric,
    back: float,
    late: Mapping[tuple[int, int], float] | None = None,
) -> float:
    """Return the time of the same step event by event.

    late  (layer, rank) -> microseconds that a rank loses before its dense work
    """
    late = late or {}
    layers, ranks = dense.shape
    begin: Floats = np.zeros(ranks)
    for layer in range(layers):
        lost = np.array([late.get((layer, rank), 0.0) for rank in range(ranks)])
        ready = begin + lost + dense[layer]
        there = _deliver(ready, sent[layer], fabric.dispatch_us, fabric.bytes_us)
        done = there + experts[layer]
        begin = _deliver(done, sent[layer].T * back, fabric.combine_us, fabric.bytes_us)
    return float(begin.max())


def _deliver(ready: Floats, table: Floats, start_us: float, bytes_us: float) -> Floats:
    """Return when each rank has everything that others send it, and its own work is done.

    Every rank sends to the ranks behind it in turn, so that no two begin with the same target.
    """
    ranks = len(ready)
    out, into = ready.copy(), np.zeros(ranks)
    have = ready.copy()
    queue = [(float(ready[rank]), rank, 1) for rank in range(ranks) if ranks > 1]
    heapq.heapify(queue)
    while queue:
        _, rank, turn = heapq.heappop(queue)
        target = (rank + turn) % ranks
        span = float(table[rank, target]) / bytes_us
        leaves = max(float(out[rank]), float(into[target]) - start_us)
        out[rank] = leaves + span
        into[target] = leaves + start_us + span
        have[target] = max(float(have[target]), float(into[target]))
        if turn + 1 < ranks:
            heapq.heappush(queue, (float(out[rank]), rank, turn + 1))
    return have
