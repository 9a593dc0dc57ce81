"""Arrivals: requests that hold nothing yet, in order of arrival or behind their gates. Pure."""

from __future__ import annotations

import heapq
from collections import OrderedDict

from deepinfer.engine.commit import Gate
from deepinfer.engine.sequence import Sequence

__all__ = ["Arrivals", "Deadlines"]


class Arrivals:
    """The queue. Whoever is put back returns to the place of its arrival.

    num_tokens  tokens that those in the queue want computed
    """

    def __init__(self) -> None:
        self._queue: OrderedDict[int, Sequence] = OrderedDict()
        self._gated: dict[int, tuple[Sequence, Gate]] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def num_gated(self) -> int:
        """Requests whose gate has not opened."""
        return len(self._gated)

    @property
    def head(self) -> Sequence | None:
        """Who is next, None when nobody waits."""
        return next(iter(self._queue.values()), None)

    def gate(self, sequence: Sequence, gate: Gate) -> None:
        """Keep a request out of the queue until its gate opens."""
        self._gated[sequence.request.request_id] = (sequence, gate)

    def put(self, sequence: Sequence) -> None:
        """Put a sequence into the queue at the place of its arrival."""
        queue = self._queue
        late = [s for s in reversed(queue.values()) if s.order > sequence.order]
        queue[sequence.request.request_id] = sequence
        for other in reversed(late):
            queue.move_to_end(other.request.request_id)
        self.num_tokens += sequence.num_remaining

    def leave(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it waits, if it does."""
        request_id = sequence.request.request_id
        self._gated.pop(request_id, None)
        if self._queue.pop(request_id, None) is not None:
            self.num_tokens -= len(sequence.token_ids)

    def open_gates(self) -> list[tuple[int, str]]:
        """Queue requests whose gate has opened; return those whose gate tells an error, with it."""
        failed: list[tuple[int, str]] = []
        for request_id, (sequence, gate) in list(self._gated.items()):
            found = gate.poll()
            if isinstance(found, str):
                failed.append((request_id, found))
            elif found is not None:
                del self._gated[request_id]
                sequence.matcher = found
                self.put(sequence)
        return failed


class Deadlines:
    """When requests must have ended."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def add(self, due_s: float, request_id: int) -> None:
        """Note a deadline; one that has ended before is named all the same."""
        heapq.heappush(self._heap, (due_s, request_id))

    def passed(self, now_s: float) -> list[int]:
        """Return and forget the requests whose deadline has passed, the earliest first."""
        found = []
        while self._heap and self._heap[0][0] <= now_s:
            found.append(heapq.heappop(self._heap)[1])
        return found
