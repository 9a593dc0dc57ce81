"""The step loop: schedule, launch, wait, apply. The plain form; overlap is the same calls in
another order.

Owns the clock and the hand-over of completions; policy is the scheduler's and tensors are the
executor's.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from types import FrameType

from deepinfer.engine.executor import Executor
from deepinfer.engine.request import Chunk, Completion, Request
from deepinfer.engine.scheduler import Scheduler
from deepinfer.engine.text import TextStream

__all__ = ["EngineLoop", "interrupt_after"]


@contextmanager
def interrupt_after() -> Iterator[None]:
    """Hold a first Ctrl-C back until the block ends, so that no step is left half applied; a second
    one breaks in at once.

    Only in the main thread and under Python's own handler: a program that handles the signal keeps
    its handler.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    pending = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pending
        if pending:
            signal.default_int_handler(number, frame)
        pending = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if pending:
            raise KeyboardInterrupt


class EngineLoop:
    """Drives one scheduler and one executor.

    Completions, also those of requests that could not start or were cancelled, come out exactly
    once: from `step` and `take_finished`, or inside the last chunk of a streamed request.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._finished: list[Completion] = []
        self._chunks: list[Chunk] = []
        self._streamed: set[int] = set()

    @property
    def has_work(self) -> bool:
        """Whether a call of `step` would run or return anything."""
        return self.scheduler.has_work or bool(self._finished)

    def now_s(self) -> float:
        """Return the loop's time, in which requests state their arrival."""
        return self._clock()

    def submit(self, request: Request, text: TextStream | None = None) -> None:
        """Queue a request."""
        if request.streams:
            self._streamed.add(request.request_id)
        completion = self.scheduler.add(request, text, self._clock())
        if completion is not None:
            self._take([completion])

    def reject(self, completion: Completion, streams: bool) -> None:
        """Take the completion of a request that is never queued."""
        if not streams:
            self._finished.append(completion)
            return
        index, request_id = completion.index, completion.request_id
        self._chunks.append(
            Chunk(index=index, request_id=request_id, token_ids=(), text="", completion=completion)
        )

    def cancel(self, request_id: int) -> bool:
        """End a request; return whether it was live."""
        completion = self.scheduler.cancel(request_id, self._clock())
        if completion is not None:
            self._take([completion])
        return completion is not None

    def step(self) -> list[Completion]:
        """Run one step, if there is work, and return every completion since the last call.

        When the executor fails, the requests of the step end with `abort`, the others stay, and the
        error is raised.
        """
        with interrupt_after():
            plan = self.scheduler.schedule()
            if plan is not None:
                try:
                    result = self._executor.launch(plan).result()
                except BaseException as error:
                    told = f"the step failed: {type(error).__name__}: {error}"
                    self._take(self.scheduler.abandon(told, self._clock()))
                    raise
                self._take(self.scheduler.apply(result, self._clock()))
        return self.take_finished()

    def take_finished(self) -> list[Completion]:
        """Return the completions that no call of `step` has returned yet."""
        finished, self._finished = self._finished, []
        return finished

    def take_chunks(self, request_ids: Container[int]) -> list[Chunk]:
        """Return what the named streamed requests gained since the last call."""
        chunks = self._chunks + self.scheduler.take_chunks()
        self._chunks = [chunk for chunk in chunks if chunk.request_id not in request_ids]
        return [chunk for chunk in chunks if chunk.request_id in request_ids]

    def stop(self) -> None:
        """Stop the executor."""
        self._executor.stop()

    def _take(self, completions: list[Completion]) -> None:
        for completion in completions:
            if completion.request_id in self._streamed:
                self._streamed.discard(completion.request_id)
            else:
                self._finished.append(completion)
