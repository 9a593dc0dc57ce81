"""Which sizes decode steps are recorded in, and the recordings: CUDA graphs in one memory pool."""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch

__all__ = ["GraphCache", "Played", "StepKey", "bound_bucket", "draft_bucket", "row_bucket"]

_log = logging.getLogger(__name__)

_PAYS = 64.0
"""A recording takes as long as about so many steps: once as it is, once recorded."""

_LEAST_WASTE = 0.02
"""What a larger recording costs of a step that has as many rows."""

_FIXED_ROWS = 64
"""What a step takes whatever its rows are is about what so many rows take."""

T = TypeVar("T")


class StepKey(NamedTuple):
    """Everything that decides which operations a decode step launches, and in which shapes.

    sequences    sequences, padded
    rows         rows, padded
    most_tokens  no position is as large
    drafted      some sequence verifies drafts
    budgeted     these share a budget
    propose      drafts are made for the next step
    draws        `Sampler.plainness` of the batch; None: the draw is not part of the recording
    """

    sequences: int
    rows: int
    most_tokens: int
    drafted: bool
    budgeted: bool
    propose: bool
    draws: str | None

    def serves(self, other: StepKey) -> bool:
        """Whether a step of the other key may be run as one of this, with more padding.

        Drafts are a wider step's where none is verified; a budget is its where all are verified.
        """
        return (
            self.sequences >= other.sequences
            and self.rows >= other.rows
            and self.most_tokens >= other.most_tokens
            and self.drafted >= other.drafted
            and self.budgeted >= other.budgeted
            and (self.propose, self.draws) == (other.propose, other.draws)
        )


def row_bucket(count: int) -> int:
    """Return the padded number of rows: 1, 2, 4, 8, then multiples of 8, 16, 32, ... so that at
    most an eighth of the rows above 64 is padding.
    """
    if count <= 8:
        return 1 << max(0, count - 1).bit_length()
    step = 8
    while count > 8 * step:
        step *= 2
    return -(-count // step) * step


def draft_bucket(sequences: int, drafts: int) -> int:
    """Return the padded rows of padded sequences that verify so many drafts in all: half as many
    rows as sequences are added at a time, so that changing budgets meet few recordings.
    """
    step = max(1, sequences // 2)
    return sequences + -(-drafts // step) * step


def bound_bucket(tokens: int, least: int, most: int) -> int:
    """Return the padded bound of positions: `least` times a power of four, at most `most`."""
    bound = least
    while bound < tokens:
        bound *= 4
    return min(bound, most)


class Played:
    """Runs work of a size as recorded steps run, and waits: to time it.

    A size's first run is as it is, its second records, later ones play. What cannot be recorded
    runs as it is.
    """

    def __init__(self, work: Callable[[int], object]) -> None:
        self._work = work
        self._seen: set[int] = set()
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._records = True

    def __call__(self, size: int) -> None:
        """Run, and wait for the card."""
        if size in self._seen and size not in self._graphs and self._records:
            self._record(size)
        self._seen.add(size)
        if size in self._graphs:
            self._graphs[size].replay()
        else:
            self._work(size)
        torch.cuda.synchronize()

    def _record(self, size: int) -> None:
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._work(size)
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            _log.warning("step times are measured without CUDA graphs: %s", error)
            self._records = False
            return
        current.wait_stream(stream)
        self._graphs[size] = graph


class GraphCache(Generic[T]):
    """Runs work by its key: the first time as it is, later from a recording.

    The first run compiles what is not compiled yet; recorded is the second. A recording's results
    lie in memory of the pool that all share, and are overwritten by the next run of any.

    Where a larger recording serves, it is played, and a recording of the key's own is made when
    what that wasted has come to what the recording takes.

    enabled   False runs everything as it is
    played    whether the last run was a recording's
    strict    raise when work cannot be recorded; else say so once and go on without recordings
    most      recordings that are kept; the one used longest ago goes first
    """

    def __init__(self, enabled: bool, strict: bool = False, most: int = 192) -> None:
        self.enabled = enabled
        self.num_recorded = 0
        self.played = False
        self._strict = strict
        self._most = most
        self._seen: set[StepKey] = set()
        self._wasted: defaultdict[StepKey, float] = defaultdict(float)  # in steps
        self._graphs: OrderedDict[StepKey, tuple[torch.cuda.CUDAGraph, T]] = OrderedDict()
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def choose(self, key: StepKey, wide: StepKey) -> StepKey:
        """Return the key to run a step as: its own, or a larger one that is recorded.

        wide  serves the key and others like it; recorded first where nothing serves
        """
        if not self.enabled or key in self._graphs or self._wasted[key] >= _PAYS:
            return key
        served = [other for other in self._graphs if other.serves(key)]
        if not served:
            return wide
        found = min(served, key=lambda k: (k.rows, k.most_tokens, k.sequences))
        waste = (found.rows - key.rows) / (found.rows + _FIXED_ROWS)
        self._wasted[key] += max(_LEAST_WASTE, waste)
        return found

    def run(self, key: StepKey, work: Callable[[], T]) -> T:
        """Run work, which depends on the key and on the contents of fixed tensors alone."""
        self.played = False
        if not self.enabled:
            return work()
        found = self._graphs.get(key)
        self.played = found is not None
        if found is None:
            if key not in self._seen:
                self._seen.add(key)
                return work()
            found = self._record(key, work)
            if found is None:
                return work()
        self._graphs.move_to_end(key)
        found[0].replay()
        return found[1]

    def forget(self) -> None:
        """Drop all recordings: a tensor that they use was replaced."""
        self._graphs.clear()

    def _record(self, key: StepKey, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T] | None:
        if self._pool is None or self._stream is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        while len(self._graphs) >= self._most:
            self._graphs.popitem(last=False)
        graph = torch.cuda.CUDAGraph()
        stream, current = self._stream, torch.cuda.current_stream()
        try:
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = work()
                finally:
                    graph.capture_end()
            current.wait_stream(stream)
        except Exception as error:
            if self._strict:
                raise
            _log.warning("decode steps run without CUDA graphs: %s", error)
            self.enabled = False
            self._graphs.clear()
            return None
        self._graphs[key] = (graph, result)
        self.num_recorded += 1
        return graph, result
