"""Executor: whatever runs planned steps. Pure protocol, and the in-process one.

`launch` enqueues and never waits; the handle's `result` waits. A loop that overlaps launches the
next step before it asks for the result of the last one; executors over processes or hosts implement
the same calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from deepinfer.device.queue import DeviceQueue, InlineQueue, Work
from deepinfer.engine.plan import Masks, StepPlan, StepResult

__all__ = [
    "Executor",
    "InProcessExecutor",
    "LaunchingRunner",
    "StepFailed",
    "StepHandle",
    "StepRunner",
]

T = TypeVar("T")


class StepFailed(Exception):
    """A step did not run to its end, nor did those launched behind it.

    out_of_memory  smaller steps may run
    """

    def __init__(self, message: str, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory


class StepHandle(Protocol):
    """A launched step."""

    def provide_masks(self, masks: Masks | None, /) -> None:
        """Hand over what the draw waits for; due once when the plan needs masks."""
        ...

    def result(self) -> StepResult:
        """Wait for the step and return its outcome; asked once. Raises StepFailed."""
        ...

    def give_up(self) -> None:
        """Say that nobody will hand over masks or ask for the result any more."""
        ...


class Executor(Protocol):
    """Runs steps in the order of their launches."""

    def start(self) -> None:
        """Get ready: weights loaded, caches allocated."""
        ...

    def launch(self, plan: StepPlan, /) -> StepHandle:
        """Enqueue a step."""
        ...

    def recover(self) -> None:
        """Take steps again after one has failed; those launched before this call do not run."""
        ...

    def read_caches(
        self, slot: int, blocks: Sequence[int], num_tokens: int, /
    ) -> dict[str, NDArray[np.generic]]:
        """Return what the caches hold of a sequence, behind everything launched so far."""
        ...

    @property
    def busy_s(self) -> float:
        """Time the device side has been at work."""
        ...

    @property
    def runs_here(self) -> bool:
        """Whether the calling thread is inside a step."""
        ...

    def stop(self) -> None:
        """Let everything go. Any number of calls does the same as one."""
        ...


class StepRunner(Protocol):
    """What the in-process executor drives: `engine/runner.py`, or a toy in tests."""

    def run(self, plan: StepPlan, masks: Callable[[], Masks | None], /) -> StepResult:
        """Run a step on the device's queue; `masks` waits for those of a plan that needs them."""
        ...

    def read_caches(
        self, slot: int, blocks: Sequence[int], num_tokens: int, /
    ) -> dict[str, NDArray[np.generic]]:
        """Return copies of what the caches hold of a sequence, by the names of `cache/live.py`."""
        ...


@runtime_checkable
class LaunchingRunner(Protocol):
    """A runner whose steps go on after they were handed to a device."""

    def launch(
        self, plan: StepPlan, masks: Callable[[], Masks | None], /
    ) -> Callable[[], StepResult]:
        """Enqueue a step; what comes back waits for it and returns its outcome, in any thread."""
        ...


class InProcessExecutor:
    """Runs steps on a runner in this process, on the queue that it is given.

    queue  inline (the default) runs a step when its result is asked for
    """

    def __init__(self, runner: StepRunner, queue: DeviceQueue | None = None) -> None:
        self._runner: StepRunner | None = runner
        self._queue: DeviceQueue = queue if queue is not None else InlineQueue()
        self._failed: str | None = None  # touched on the queue only
        self._thread: int | None = None  # the one that is inside a step

    def start(self) -> None:
        """Do nothing: the runner was built ready."""

    @property
    def busy_s(self) -> float:
        """Time the device side has been at work."""
        return self._queue.busy_s

    @property
    def runs_here(self) -> bool:
        """Whether the calling thread is inside a step."""
        return self._thread == threading.get_ident()

    def launch(self, plan: StepPlan) -> StepHandle:
        """Enqueue a step on the runner."""
        runner = self._runner
        assert runner is not None, "launch after stop"
        mailbox = _Mailbox(plan.needs_masks)

        def step() -> Callable[[], StepResult]:
            if self._failed is not None:
                raise StepFailed(self._failed)
            begin_s = time.perf_counter()
            self._thread = threading.get_ident()
            try:
                if isinstance(runner, LaunchingRunner):
                    return self._timed(runner.launch(plan, mailbox.take), begin_s)
                result = runner.run(plan, mailbox.take)
            except BaseException as error:
                told = f"the step failed: {type(error).__name__}: {error}"
                self._failed = told
                if not isinstance(error, Exception):  # Ctrl-C while the step ran in this thread
                    raise
                raise StepFailed(told, _is_out_of_memory(error)) from error
            finally:
                self._thread = None
            took_s = time.perf_counter() - begin_s
            return lambda: StepResult(result.step_id, result.rows, took_s)

        return _LaunchedStep(self._queue.submit(step), mailbox)

    def _timed(self, finish: Callable[[], StepResult], begin_s: float) -> Callable[[], StepResult]:
        """Wait for a step that the device goes on with, and turn its errors into StepFailed."""

        def wait() -> StepResult:
            try:
                result = finish()
            except Exception as error:
                told = f"the step failed: {type(error).__name__}: {error}"

                def fail() -> None:
                    self._failed = told

                self._queue.submit(fail)
                raise StepFailed(told, _is_out_of_memory(error)) from error
            # Where steps overlap only the device knows what one of them took.
            took_s = result.device_s or time.perf_counter() - begin_s
            return StepResult(result.step_id, result.rows, took_s, result.is_usual)

        return wait

    def recover(self) -> None:
        """Take steps again after one has failed."""

        def forget() -> None:
            self._failed = None

        self._queue.submit(forget)

    def read_caches(
        self, slot: int, blocks: Sequence[int], num_tokens: int
    ) -> dict[str, NDArray[np.generic]]:
        """Return what the caches hold of a sequence, behind everything launched so far."""
        return self.call(lambda runner: runner.read_caches(slot, blocks, num_tokens))

    def call(self, work: Callable[[StepRunner], T]) -> T:
        """Run something on the runner behind everything launched so far, and return its value."""
        runner = self._runner
        assert runner is not None, "call after stop"
        return self._queue.submit(lambda: work(runner)).wait()

    def stop(self) -> None:
        """Drop the runner, and with it weights and caches."""
        self._queue.close()
        self._runner = None


class _Mailbox:
    """Where the masks of one step are handed over."""

    def __init__(self, due: bool) -> None:
        self._masks: Masks | None = None
        self._ready = threading.Event()
        self._cancelled = False
        if not due:
            self._ready.set()

    def put(self, masks: Masks | None) -> None:
        self._masks = masks
        self._ready.set()

    def cancel(self) -> None:
        if not self._ready.is_set():
            self._cancelled = True
            self._ready.set()

    def take(self) -> Masks | None:
        self._ready.wait()
        if self._cancelled:
            raise RuntimeError("the step was given up before its masks came")
        return self._masks


class _LaunchedStep:
    """A step on the queue."""

    def __init__(self, work: Work[Callable[[], StepResult]], mailbox: _Mailbox) -> None:
        self._work = work
        self._mailbox = mailbox

    def provide_masks(self, masks: Masks | None) -> None:
        self._mailbox.put(masks)

    def result(self) -> StepResult:
        self._mailbox.cancel()  # masks that are still missing never come
        return self._work.wait()()

    def give_up(self) -> None:
        self._mailbox.cancel()


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(
        told in str(error) for told in ("can't allocate memory", "CUDA out of memory")
    )
