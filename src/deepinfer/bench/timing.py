"""Time device work: rotated buffers, CUDA graphs, a cool card and a loaded one.

On a card, calls go round robin through buffer sets that together exceed the cache, inside one CUDA
graph; times are between device events. On a CPU they are wall-clock times of single calls.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch

__all__ = ["Clock", "Timing", "make_clock", "num_sets", "single_sets"]

ROTATION_BYTES: Final = 256_000_000
"""What one rotation covers where the op is large enough; an H200 caches 60 MB."""
_MOST_SETS: Final = 64
_SPARE_BYTES: Final = 4 << 30
_REPLAY_US: Final = 2500.0
_PART_US: Final = 100e3
"""What one part of a measurement takes at most."""
_LOADED_FLOPS: Final = 250e12
"""Work above this rate heats a card within a second: it is timed again after half a second."""

Call = Callable[[], object]


_single: list[bool] = []


@contextmanager
def single_sets() -> Iterator[None]:
    """Make `num_sets` 1 inside: for runs that are not timed."""
    _single.append(True)
    try:
        yield
    finally:
        _single.pop()


def num_sets(bytes_of_a_set: int, most_bytes: int) -> int:
    """Return how many buffer sets to rotate through, within a memory limit."""
    if _single:
        return 1
    wanted = -(-ROTATION_BYTES // max(bytes_of_a_set, 1))
    return max(1, min(wanted, _MOST_SETS, most_bytes // max(bytes_of_a_set, 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Microseconds of one call.

    us        median of the steady rounds: after half a second of the same work where it loads the
              card, else like `us_burst`
    us_burst  median of the first rounds, after a pause
    mode      "graph", "events" (could not be captured) or "clock" (a CPU)
    """

    us: float
    us_burst: float
    us_min: float
    steady: bool
    mode: str
    calls: int
    sets: int


class Clock:
    """Times one implementation on prepared buffer sets; rounds may alternate with others'."""

    def __init__(self, calls: Sequence[Call], flops: float) -> None:
        self._calls = calls
        self._flops = flops
        self._burst: list[float] = []
        self._later: list[float] = []
        self._next = 0
        self.steady = False
        self.mode = "clock"
        self.why = ""  # a graph could not be captured
        self.per_replay = 1

    def burst(self) -> None:
        """Time a few rounds of a card that had a pause."""
        time.sleep(0.03)
        self._burst += self._rounds(5)

    def load(self) -> None:
        """Heat the card where the work is of that kind."""
        middle = statistics.median(self._burst)
        self.steady = self.mode != "clock" and self._flops / (middle * 1e-6) > _LOADED_FLOPS
        if self.steady:
            end = time.monotonic() + 0.4
            while time.monotonic() < end:
                self._rounds(4)

    def later(self) -> None:
        """Time more rounds."""
        self._later += self._rounds(9)

    def timing(self) -> Timing:
        """Return what was measured so far."""
        times = self._later or self._burst
        return Timing(
            us=statistics.median(times),
            us_burst=statistics.median(self._burst),
            us_min=min(self._burst + self._later),
            steady=self.steady,
            mode=self.mode,
            calls=self.per_replay,
            sets=len(self._calls),
        )

    def run(self) -> None:
        """Run once, as timed: a replay of `per_replay` calls, or one call."""
        self._calls[self._next % len(self._calls)]()
        self._next += 1

    def close(self) -> None:
        """Let go of what timing needed."""

    def _rounds(self, count: int) -> list[float]:
        """Time so many rounds, at least two, fewer where they take long."""
        found: list[float] = []
        while len(found) < count and (len(found) < 2 or sum(found) < _PART_US / self.per_replay):
            found.append(self._round())
        return found

    def _round(self) -> float:
        start = time.perf_counter()
        self.run()
        return (time.perf_counter() - start) * 1e6


class _CudaClock(Clock):
    """Replays a graph of many calls, or single calls where capturing fails."""

    def __init__(self, calls: Sequence[Call], flops: float, most_calls: int) -> None:
        super().__init__(calls, flops)
        self._start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.mode = "events"
        for call in calls:  # compile, and touch every buffer
            call()
        torch.cuda.synchronize()
        estimate = self._between(lambda: [call() for call in calls]) / len(calls)
        count = max(len(calls), min(most_calls, int(_REPLAY_US / max(estimate, 1.0))), 1)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._graph = self._captured(count) if most_calls else None
        if self._graph is not None:
            self.mode, self.per_replay = "graph", count
            self._graph.replay()
        torch.cuda.synchronize()

    def _captured(self, count: int) -> torch.cuda.CUDAGraph | None:
        if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > _SPARE_BYTES:
            torch.cuda.empty_cache()  # a graph has memory of its own
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side):
                self._calls[0]()
                torch.cuda.synchronize()
                with torch.cuda.graph(graph, stream=side):
                    for i in range(count):
                        self._calls[i % len(self._calls)]()
        except Exception as error:  # whatever the call did not allow inside a capture
            self.why = " ".join(str(error).split())[:160]
            torch.cuda.synchronize()
            return None
        torch.cuda.current_stream().wait_stream(side)
        return graph

    def close(self) -> None:
        if self._graph is not None:
            self._graph.reset()
            self._graph = None

    def _between(self, work: Call) -> float:
        self._start.record()
        work()
        self._end.record()
        torch.cuda.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1e3

    def run(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            super().run()

    def _round(self) -> float:
        return self._between(self.run) / self.per_replay


def make_clock(
    calls: Sequence[Call], flops: float, device: torch.device, most_calls: int = _MOST_SETS
) -> Clock:
    """Return a clock for calls that each use their own buffers; runs them once or more.

    flops       of a call; says whether it loads the card
    most_calls  of a graph, where they are short; 0 = no graph
    """
    assert calls, "nothing to time"
    if device.type == "cuda":
        return _CudaClock(calls, flops, most_calls)
    calls[0]()
    return Clock(calls, flops)
