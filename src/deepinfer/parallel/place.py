"""Which replica serves a request: the one with the least predicted work that has room (pure).

Source: parallelism specification, 1.1. Requests never move once they are placed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["Placer"]

_PROMPT_COST: Final = 0.1
"""A prompt token costs this share of a generated one: it runs among many others."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    key: Hashable
    prompt: int
    most: int


class Placer:
    """Requests that wait for a replica, and the predicted work that replicas have.

    replicas  their number
    in_turn   serve replicas in turn, whatever their work: for debugging
    """

    def __init__(self, replicas: int, in_turn: bool = False) -> None:
        self.loads = [0.0] * replicas
        self._in_turn = in_turn
        self._next = 0
        self._waiting: list[_Waiting] = []
        self._placed: dict[Hashable, tuple[int, float]] = {}
        self._finished, self._outputs = 0, 0

    @property
    def num_waiting(self) -> int:
        """Requests without a replica."""
        return len(self._waiting)

    def add(self, key: Hashable, prompt: int, most: int) -> None:
        """Let a request wait: tokens of its prompt, and most that it generates."""
        self._waiting.append(_Waiting(key, prompt, most))

    def drop(self, key: Hashable) -> bool:
        """Forget a waiting request; return whether it waited."""
        before = len(self._waiting)
        self._waiting = [entry for entry in self._waiting if entry.key != key]
        return len(self._waiting) < before

    def cost(self, prompt: int, most: int) -> float:
        """Predict a request's work: outputs are as long as those before, where any have ended."""
        expected = min(most, self._outputs / self._finished) if self._finished else most
        return _PROMPT_COST * prompt + expected

    def place(self, room: Sequence[int]) -> list[tuple[Hashable, int]]:
        """Give waiting requests, the most work first, to replicas with room for so many.

        Those that find none stay in the order of their arrival.
        """
        taken = self._waiting[: sum(room)]
        if not taken:
            return []
        left, placed = list(room), []
        costs = {entry.key: self.cost(entry.prompt, entry.most) for entry in taken}
        if not self._in_turn:
            taken = sorted(taken, key=lambda entry: -costs[entry.key])
        for entry in taken:
            free = [replica for replica, count in enumerate(left) if count > 0]
            if self._in_turn:
                replica = self._next % len(left)
                if replica not in free:
                    break
                self._next += 1
            else:
                replica = min(free, key=lambda r: (self.loads[r], r))
            left[replica] -= 1
            self.loads[replica] += costs[entry.key]
            self._placed[entry.key] = (replica, costs[entry.key])
            placed.append((entry.key, replica))
        gone = {key for key, _ in placed}
        self._waiting = [entry for entry in self._waiting if entry.key not in gone]
        return placed

    def finish(self, key: Hashable, num_tokens: int) -> None:
        """Note a request's end and how many tokens it generated; others are not known here."""
        if key not in self._placed:
            return
        replica, cost = self._placed.pop(key)
        self.loads[replica] = max(0.0, self.loads[replica] - cost)
        self._finished += 1
        self._outputs += num_tokens
