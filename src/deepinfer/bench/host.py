"""What the host does for a step, with the model stubbed out, and how well overlap hides it.

Times of the host are CPU times of its thread, so that a busy machine changes them little. The
device's side of a step (the inputs of the model, in `engine/batch.py`) is a figure of its own.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final, Literal

import torch

from deepinfer.bench.machine import describe_machine, describe_versions
from deepinfer.bench.report import Figure, Record
from deepinfer.cache.blocks import BlockPool
from deepinfer.cache.layout import CacheLayout
from deepinfer.cache.slots import SlotPool
from deepinfer.config.load import load_model_config, resolve_model
from deepinfer.device.queue import InlineQueue, ThreadQueue
from deepinfer.engine.batch import BatchBuilder
from deepinfer.engine.executor import InProcessExecutor
from deepinfer.engine.loop import EngineLoop
from deepinfer.engine.plan import (
    FROM_SLOT,
    Admission,
    Masks,
    RowPlan,
    RowResult,
    StepKind,
    StepPlan,
    StepResult,
)
from deepinfer.engine.request import Request, SamplingParams
from deepinfer.engine.scheduler import Limits, Scheduler
from deepinfer.engine.state import SlotState

__all__ = ["measure_host"]

_BLOCK: Final = 128
_PROMPT: Final = 128
_STEPS: Final = 50
_DEVICE_S: Final = 0.010
_ROWS: Final = (64, 256)


class _StubRunner:
    """Draws the same token for every row, at once or after a while, and no model.

    own_s  CPU time spent in here, which is not the host's
    """

    def __init__(self, device_s: float = 0.0) -> None:
        self.device_s = device_s
        self.own_s = 0.0

    def run(self, plan: StepPlan, masks: Callable[[], Masks | None]) -> StepResult:
        start = time.thread_time()
        rows = tuple(RowResult(row.request_id, (7,)) for row in plan.rows if row.reports)
        if self.device_s:
            time.sleep(self.device_s)
        self.own_s += time.thread_time() - start
        return StepResult(plan.step_id, rows)

    def read_caches(self, *args: object) -> dict[str, object]:  # pragma: no cover
        raise NotImplementedError("nothing is cached")


def _engine(rows: int, runner: _StubRunner, overlap: bool, thread: bool) -> EngineLoop:
    """Return a loop with so many sequences, all of them decoding."""
    limits = Limits(
        max_num_seqs=rows,
        max_num_batched_tokens=rows * _PROMPT,
        max_model_len=1 << 20,
        chunk_tokens=_PROMPT,
        eos_token_id=1,
    )
    held = -(-(_PROMPT + 4096) // _BLOCK)
    scheduler = Scheduler(limits, BlockPool(rows * held + 1), SlotPool(rows + 1), _BLOCK)
    queue = ThreadQueue() if thread else InlineQueue()
    loop = EngineLoop(scheduler, InProcessExecutor(runner, queue), overlap=overlap)  # type: ignore[arg-type]
    params = SamplingParams(temperature=0, max_tokens=4096)
    for number in range(rows):
        prompt = tuple(3 + (number + i) % 200 for i in range(_PROMPT))
        loop.submit(Request(request_id=number, prompt_token_ids=prompt, params=params, seed=number))
    for _ in range(4):
        loop.step()
    assert loop.scheduler.num_running == rows, (loop.scheduler.num_running, rows)
    return loop


@contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _host_ms(rows: int, repeat: int, steps: int) -> list[float]:
    """Milliseconds of CPU time per decode step: schedule, launch, apply."""
    runner = _StubRunner()
    loop = _engine(rows, runner, overlap=True, thread=False)
    found = []
    with _no_collection():
        for _ in range(repeat + 1):
            runner.own_s = 0.0
            start = time.thread_time()
            for _ in range(steps):
                loop.step()
            found.append(1000 * (time.thread_time() - start - runner.own_s) / steps)
    return found[1:]


def _prepare_ms(rows: int, repeat: int, steps: int, model: str) -> list[float]:
    """Milliseconds of CPU time to turn a decode plan and the slots' state into model inputs."""
    layout = CacheLayout.build(load_model_config(resolve_model(model)), "official", _BLOCK)
    device = torch.device("cpu")
    state = SlotState(rows + 1, 0, device)
    plans = []
    params = SamplingParams(temperature=0)
    for slot in range(1, rows + 1):
        length = 200 + 37 * slot % 1800
        state.admit(Admission(slot, 200, params, 0, limit=1 << 20, ending_ids=(1,), length=length))
        blocks = tuple(range(1 + slot * 17, 18 + slot * 17))
        plans.append(RowPlan(slot, slot, FROM_SLOT, (), blocks, True))
    batches = BatchBuilder(layout, device)
    found = []
    with _no_collection(), torch.inference_mode():
        for _ in range(repeat + 1):
            start = time.thread_time()
            for number in range(steps):
                place = number % rows  # one sequence in a step is new to it
                plans[place] = replace(plans[place], blocks=plans[place].blocks[::-1])
                batches.build(StepPlan(number, StepKind.DECODE, tuple(plans)), state)
            found.append(1000 * (time.thread_time() - start) / steps)
    return found[1:]


def _busy_percent(
    rows: int, overlap: bool, repeat: int, steps: int, device_s: float
) -> list[float]:
    """Share of the time in which a device that takes so long for a step is at work."""
    runner = _StubRunner(device_s)
    loop = _engine(rows, runner, overlap=overlap, thread=True)
    found = []
    try:
        for _ in range(repeat + 1):
            busy = loop.executor.busy_s
            start = time.perf_counter()
            for _ in range(steps):
                loop.step()
            took = time.perf_counter() - start
            found.append(100 * min(1.0, (loop.executor.busy_s - busy) / took))
    finally:
        loop.stop()
    return found[1:]


def measure_host(
    repeat: int,
    steps: int = _STEPS,
    rows: tuple[int, ...] = _ROWS,
    device_s: float = _DEVICE_S,
    layout_of: str = "golden",
    tell: Callable[[str], None] = lambda text: None,
) -> list[Record]:
    """Measure every figure and return one Record each.

    steps      decode steps of a repeat
    device_s   time that the stand-in of the device takes for a step, for the busy share
    layout_of  checkpoint whose cache layout the inputs are built for
    """
    figures: list[Figure] = []

    def add(
        name: str, unit: str, better: Literal["higher", "lower"], values: list[float], how: str
    ) -> None:
        tell(f"{name}: {sorted(values)[len(values) // 2]:.3g} {unit}")
        rounded = tuple(float(f"{value:.5g}") for value in values)
        figures.append(
            Figure(name=name, unit=unit, better=better, values=rounded, warmup=1, how=how)
        )

    for count in rows:
        add(
            f"host_{count}",
            "ms",
            "lower",
            _host_ms(count, repeat, steps),
            f"a decode step of {count} sequences without model: CPU time of scheduling, launching "
            "and applying, in the loop's thread",
        )
        add(
            f"prepare_{count}",
            "ms",
            "lower",
            _prepare_ms(count, repeat, max(1, steps // 5), layout_of),
            f"the inputs of a decode step of {count} sequences of 200 to 2,000 tokens, from plan "
            f"and slot state, in the cache layout of {layout_of}: CPU time on the device's side",
        )
    for overlap in (False, True):
        order = "overlapped" if overlap else "plain"
        add(
            f"busy_{order}",
            "%",
            "higher",
            _busy_percent(max(rows), overlap, repeat, steps, device_s),
            f"share of the time in which a device that takes {1000 * device_s:g} ms for a step of "
            f"{max(rows)} sequences is at work, {order} order",
        )
    when = datetime.now(UTC).isoformat(timespec="seconds")
    machine, versions = describe_machine(), describe_versions()
    return [
        Record(
            suite="host",
            figure=figure,
            model="none",
            when=when,
            threads=torch.get_num_threads(),
            machine=machine,
            versions=versions,
        )
        for figure in figures
    ]
