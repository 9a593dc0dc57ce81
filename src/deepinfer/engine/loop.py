"""The step loop, plain and overlapped: the same calls in another order.

    plain       schedule n | launch n | masks n | result n | apply n
    overlapped  schedule n | launch n | result n-1 | apply n-1 | masks n

Owns the clock and the hand-over of completions; policy is the scheduler's and tensors are the
executor's.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from types import FrameType

from deepinfer.device.queue import no_wait
from deepinfer.engine.commit import Gate
from deepinfer.engine.executor import Executor, StepFailed, StepHandle
from deepinfer.engine.plan import StepPlan
from deepinfer.engine.request import Chunk, Completion, Request
from deepinfer.engine.scheduler import Scheduler
from deepinfer.engine.snapshot import State
from deepinfer.engine.stats import EngineStats, StatsRecorder
from deepinfer.engine.text import TextStream

__all__ = ["EngineLoop", "interrupt_after"]

_GATE_PAUSE_S = 0.0005

_log = logging.getLogger(__name__)


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

    overlap             plan and launch the next step before the outcome of the last one is read
    log_interval_steps  steps between two lines of statistics in the log, 0 = none
    Completions, also those of requests that could not start or were cancelled, come out exactly
    once: from `step` and `take_finished`, or inside the last chunk of a streamed request.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Callable[[], float] = time.perf_counter,
        overlap: bool = False,
        log_interval_steps: int = 0,
    ) -> None:
        self.scheduler = scheduler
        self.overlap = overlap
        self.stats = StatsRecorder()
        self._log_interval_steps = log_interval_steps
        self._executor = executor
        self._clock = clock
        self._launched: deque[tuple[StepPlan, StepHandle]] = deque()
        self._finished: list[Completion] = []
        self._chunks: list[Chunk] = []
        self._streamed: set[int] = set()
        self._told: set[str] = set()  # failures whose traceback has been logged

    @property
    def has_work(self) -> bool:
        """Whether a call of `step` would run or return anything.

        Steps in flight whose requests have all ended do not count.
        """
        return self.scheduler.has_requests or bool(self._finished)

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return self.scheduler.num_generated

    @property
    def executor(self) -> Executor:
        """What runs the steps."""
        return self._executor

    def now_s(self) -> float:
        """Return the loop's time, in which requests state their arrival."""
        return self._clock()

    def submit(
        self,
        request: Request,
        text: TextStream | None = None,
        gate: Gate | None = None,
        state: State | None = None,
    ) -> None:
        """Queue a request; `gate` is what it waits for first, `state` what it goes on from."""
        if request.streams:
            self._streamed.add(request.request_id)
        completion = self.scheduler.add(request, text, self._clock(), gate, state)
        if completion is not None:
            self._take([completion])

    def reject(self, completion: Completion, streams: bool) -> None:
        """Take the completion of a request that is never queued."""
        if not streams:
            self._finished.append(completion)
            return
        index, request_id = completion.index, completion.request_id
        self._chunks.append(
            Chunk(
                index=index,
                request_id=request_id,
                token_ids=(),
                text="",
                completion=completion,
                sample_index=completion.sample_index,
            )
        )

    def cancel(self, request_id: int) -> bool:
        """End a request; return whether it was live."""
        completion = self.scheduler.cancel(request_id, self._clock())
        if completion is not None:
            self._take([completion])
        return completion is not None

    def step(self) -> list[Completion]:
        """Run one step, if there is work, and return every completion since the last call.

        A step that fails costs the requests it names a second try (`Scheduler.abandon`); what does
        not get over it ends with `engine_error`, the others stay.
        """
        with interrupt_after():
            try:
                self._advance()
            except StepFailed as error:
                self._give_up(error)
            except BaseException as error:
                self._abandon(f"interrupted: {type(error).__name__}: {error}", retry=False)
                raise
        return self.take_finished()

    def flush(self) -> None:
        """Apply every step in flight."""
        with interrupt_after():
            try:
                while self._launched:
                    self._apply_first()
            except StepFailed as error:
                self._give_up(error)
            except BaseException as error:
                self._abandon(f"interrupted: {type(error).__name__}: {error}", retry=False)
                raise

    def report(self) -> EngineStats:
        """Return what the engine has done and how it stands."""
        scheduler = self.scheduler
        return self.stats.snapshot(
            num_waiting=scheduler.num_waiting,
            num_running=scheduler.num_running,
            num_preemptions=scheduler.num_preemptions,
            blocks_used=scheduler.num_blocks_used,
            num_blocks=scheduler.num_blocks,
            speculation=scheduler.speculation(),
            prefix=scheduler.prefix_counts(),
        )

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
        """Give up the steps in flight and stop the executor."""
        for _, handle in self._launched:
            handle.give_up()
        self._launched.clear()
        self._executor.stop()

    def _advance(self) -> None:
        """Plan and launch a step, apply the one before (or itself), hand over masks."""
        begin_s = self._clock()
        plan = self.scheduler.schedule(begin_s)
        self._take(self.scheduler.take_completions())
        if plan is None:
            if self._launched:
                self._apply_first()
            elif self.scheduler.has_work:
                time.sleep(_GATE_PAUSE_S)  # only requests that wait for their grammar are left
            return
        with no_wait():
            handle = self._executor.launch(plan)
        self._launched.append((plan, handle))
        self.stats.launched(plan, self._clock() - begin_s)
        if self.overlap:
            while len(self._launched) > 1:
                self._apply_first()
        if plan.needs_masks:
            handle.provide_masks(self.scheduler.fill_masks(plan))
        if not self.overlap:
            self._apply_first()
        if not self.scheduler.has_requests:  # what is in flight is nobody's
            while self._launched:
                self._apply_first()

    def _apply_first(self) -> None:
        """Wait for the oldest step in flight and apply its outcome."""
        plan, handle = self._launched[0]
        result = handle.result()
        self._launched.popleft()
        begin_s = self._clock()
        before = self.scheduler.num_generated
        self._take(self.scheduler.apply(result, begin_s))
        num_tokens = self.scheduler.num_generated - before
        self.stats.applied(plan, result, num_tokens, begin_s, self._clock() - begin_s)
        interval = self._log_interval_steps
        if interval and plan.step_id % interval == interval - 1 and _log.isEnabledFor(logging.INFO):
            _log.info("%s", self.report())

    def _give_up(self, error: StepFailed) -> None:
        """Go on after a failed step."""
        told = str(error)
        _log.error("%s", told, exc_info=None if told in self._told else error.__cause__ or error)
        self._told.add(told)
        self.stats.failed()
        self._abandon(told, retry=True, smaller=error.out_of_memory)

    def _abandon(self, told: str, *, retry: bool, smaller: bool = False) -> None:
        """Let the scheduler forget the steps in flight, which do not run any more."""
        for _, handle in self._launched:
            handle.give_up()
        self._launched.clear()
        self._executor.recover()
        now_s = self._clock()
        self._take(self.scheduler.abandon(told, now_s, retry=retry, smaller=smaller))

    def _take(self, completions: list[Completion]) -> None:
        for completion in completions:
            self.stats.finished(completion)
            if completion.request_id in self._streamed:
                self._streamed.discard(completion.request_id)
            else:
                self._finished.append(completion)
