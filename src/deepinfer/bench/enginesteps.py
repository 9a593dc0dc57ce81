"""Decode steps through the engine's runner of an accelerator: graphs, packed copies, no waits."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import torch

from deepinfer.bench.modelbench import ModelBench, StepTime
from deepinfer.engine.device_runner import DeviceRunner
from deepinfer.engine.drafting import Drafter
from deepinfer.engine.plan import Admission, RowPlan, StepKind, StepPlan, StepResult
from deepinfer.engine.request import SamplingParams
from deepinfer.engine.state import SlotState
from deepinfer.errors import ConfigError
from deepinfer.sampling.sampler import Sampler

__all__ = ["RunnerSteps"]

_STEPS: Final = 10
_TURNS: Final = 3
_LOAD_S: Final = 0.4
_FAR: Final = 1 << 30


class RunnerSteps:
    """Launches the same decode step again and again: greedy, all drafts verified, none ends.

    Every step moves each sequence on by what was accepted, one token or a little more with random
    weights; the caches have room for about a hundred steps.
    """

    def __init__(self, bench: ModelBench, graphs: bool) -> None:
        """Raises ConfigError when the model does not draft as many tokens as the rows ask for."""
        config, device = bench.config, bench.device
        drafts = bench.rows - 1
        if drafts and (bench.model.draft is None or drafts > config.dspark_block_size):
            raise ConfigError(
                f"rows: found {bench.rows}, the model drafts at most "
                f"{config.dspark_block_size if bench.model.draft is not None else 0} tokens"
            )
        count = bench.sequences + 1
        sampler = Sampler(config.vocab_size, count, device, (), fixed=True)
        self._state = state = SlotState(count, drafts, device)
        drafter = None
        if drafts and bench.model.draft is not None:
            drafter = Drafter(bench.model.draft, sampler, state, [1.0] * drafts)
        self.runner = DeviceRunner(
            bench.model,
            bench.caches,
            bench.layout,
            sampler,
            state,
            device,
            drafter,
            max_sequences=bench.sequences,
            max_blocks=bench.per_sequence,
            graphs=graphs,
        )
        self._next = 0
        params = SamplingParams(temperature=0, max_tokens=1)
        self._admissions = tuple(
            Admission(slot, 1, params, 0, _FAR, (), bench.context + 1)
            for slot in range(1, bench.sequences + 1)
        )
        self._rows = tuple(
            RowPlan(slot, slot, -1, (), tuple(int(b) for b in table), True, drafts)
            for slot, table in enumerate(bench.tables, 1)
        )
        self.start_again()

    def start_again(self) -> None:
        """Put every sequence back to its context."""
        with torch.inference_mode():
            for admission in self._admissions:
                self.runner._admit(admission)
            drafts = self._state.drafts.shape[1]
            self._state.last_token.fill_(7)
            self._state.drafts.fill_(9)
            self._state.num_drafts[1:].fill_(drafts)

    def launch(self) -> Callable[[], StepResult]:
        """Enqueue a step; what comes back waits for it."""
        self._next += 1
        plan = StepPlan(self._next, StepKind.DECODE, self._rows)
        return self.runner.launch(plan, lambda: None)

    def run(self) -> StepResult:
        """Run a step and wait for it."""
        return self.launch()()

    def time(self) -> StepTime:
        """Time steps back to back on the device, and in a loop that stays one step ahead."""
        for _ in range(3):  # compile, record, replay
            self.run()
        time.sleep(0.1)
        self.start_again()
        burst = statistics.median(self._between(3) for _ in range(3))
        self.start_again()
        end = time.monotonic() + _LOAD_S
        while time.monotonic() < end:
            self._between(3)
            self.start_again()
        loaded, wall = [], []
        for _ in range(_TURNS):  # in turns: the clock of a loaded card drifts
            loaded.append(self._between(_STEPS))
            self.start_again()
            wall.append(self._overlapped(_STEPS))
            self.start_again()
        recorded = self.runner.graphs.num_recorded
        return StepTime(
            us=statistics.median(loaded),
            us_burst=burst,
            wall_us=statistics.median(wall),
            mode="graph" if recorded else "no graph",
        )

    def _between(self, count: int) -> float:
        """Return the microseconds a step of so many launched at once, between device events."""
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        waiting = [self.launch() for _ in range(count)]
        end.record()
        for finish in waiting:
            finish()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / count

    def _overlapped(self, count: int) -> float:
        """Return microseconds from step to step with two in flight, outcomes read in between."""
        waiting: deque[Callable[[], StepResult]] = deque([self.launch()])
        begin = time.perf_counter()
        for _ in range(count):
            waiting.append(self.launch())
            waiting.popleft()()
        took = time.perf_counter() - begin
        waiting.popleft()()
        return took * 1e6 / count
