"""Where the device side of steps runs: work in order, beside or inside the caller's thread.

Pure Python. A piece of work may wait for the device as it likes; the thread that hands work over
must not, which `no_wait` makes an error.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

__all__ = ["DeviceQueue", "InlineQueue", "ThreadQueue", "Work", "assert_may_wait", "no_wait"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class _Here(threading.local):
    launching = 0


_here = _Here()


@contextmanager
def no_wait() -> Iterator[None]:
    """Make every wait of this thread an error until the block ends."""
    _here.launching += 1
    try:
        yield
    finally:
        _here.launching -= 1


def assert_may_wait() -> None:
    """Raise RuntimeError inside `no_wait`; whatever blocks on the device asks this first."""
    if _here.launching:
        raise RuntimeError("a launch waited for the device: read results after it, never inside")


class Work(Protocol[T_co]):
    """Work handed over."""

    def wait(self) -> T_co:
        """Wait until it is done and return its value, or raise what it raised."""
        ...

    def is_done(self) -> bool:
        """Return whether `wait` would return at once."""
        ...


class DeviceQueue(Protocol):
    """Runs work one piece after another, in the order it was handed over.

    busy_s  time spent inside work so far
    """

    @property
    def busy_s(self) -> float:
        """Time spent inside work so far."""
        ...

    def submit(self, work: Callable[[], T], /) -> Work[T]:
        """Hand work over; returns without waiting."""
        ...

    def close(self) -> None:
        """Run what was handed over, then end. Any number of calls does the same as one."""
        ...


class _Job(Generic[T]):
    """A piece of work and what came of it."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._value: list[T] = []
        self._error: BaseException | None = None
        self.done = threading.Event()

    def run(self) -> float:
        """Do the work, keep its outcome, return the time it took."""
        work, self._work = self._work, None
        assert work is not None, "work ran twice"
        start_s = time.perf_counter()
        try:
            self._value.append(work())
        except BaseException as error:
            self._error = error
        took_s = time.perf_counter() - start_s
        self.done.set()
        return took_s

    def outcome(self) -> T:
        """Return the value or raise the error of work that is done."""
        if self._error is not None:
            raise self._error
        return self._value[0]


class InlineQueue:
    """Runs work in the thread that waits for it: no thread, no overlap."""

    def __init__(self) -> None:
        self._jobs: deque[_Job[object]] = deque()
        self._busy_s = 0.0

    @property
    def busy_s(self) -> float:
        """Time spent inside work so far."""
        return self._busy_s

    def submit(self, work: Callable[[], T]) -> Work[T]:
        """Keep work until someone waits for it or for a later piece."""
        job = _Job(work)
        self._jobs.append(job)  # type: ignore[arg-type]  # only run, its value is the job's
        return _InlineWork(self, job)

    def run_to(self, last: _Job[T]) -> None:
        """Run everything up to a job."""
        while not last.done.is_set():
            self._busy_s += self._jobs.popleft().run()

    def close(self) -> None:
        """Run what is left."""
        while self._jobs:
            self._busy_s += self._jobs.popleft().run()


class _InlineWork(Generic[T]):
    def __init__(self, owner: InlineQueue, job: _Job[T]) -> None:
        self._owner = owner
        self._job = job

    def wait(self) -> T:
        assert_may_wait()
        self._owner.run_to(self._job)
        return self._job.outcome()

    def is_done(self) -> bool:
        return self._job.done.is_set()


class ThreadQueue:
    """Runs work in a thread of its own, which ends with `close` or when the queue is dropped."""

    def __init__(self, name: str = "deepinfer-device") -> None:
        self._jobs: queue.SimpleQueue[_Job[object] | None] = queue.SimpleQueue()
        self._busy = [0.0]
        self._thread = threading.Thread(
            target=_serve, args=(self._jobs, self._busy), name=name, daemon=True
        )
        self._thread.start()
        self._end = weakref.finalize(self, self._jobs.put, None)

    @property
    def busy_s(self) -> float:
        """Time spent inside work so far."""
        return self._busy[0]

    def submit(self, work: Callable[[], T]) -> Work[T]:
        """Hand work to the thread."""
        assert self._end.alive, "submit after close"
        job = _Job(work)
        self._jobs.put(job)  # type: ignore[arg-type]  # only run, its value is the job's
        return _ThreadWork(job)

    def close(self) -> None:
        """Let the thread finish what it has, then end it."""
        self._end()
        if self._thread is not threading.current_thread():
            self._thread.join()


def _serve(jobs: queue.SimpleQueue[_Job[object] | None], busy: list[float]) -> None:
    while True:
        job = jobs.get()
        if job is None:
            return
        busy[0] += job.run()
        del job  # what it returned belongs to whoever waited


class _ThreadWork(Generic[T]):
    def __init__(self, job: _Job[T]) -> None:
        self._job = job

    def wait(self) -> T:
        assert_may_wait()
        self._job.done.wait()
        return self._job.outcome()

    def is_done(self) -> bool:
        return self._job.done.is_set()
