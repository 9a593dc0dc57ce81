"""What the engine has done so far: counts, rates and times, for people and for JSON lines. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field

from deepinfer.engine.plan import StepKind, StepPlan, StepResult
from deepinfer.engine.request import Completion

__all__ = ["EngineStats", "StatsRecorder"]

_WINDOW = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot. Counts run from the engine's start; rates and times cover the last 100 steps.

    num_waiting, num_running    requests in the queue, and those that hold a slot
    blocks_used, num_blocks     cache blocks held now, and all there are
    num_finished                completions by finish reason
    tokens_per_s                generated tokens, by the time between the first and the last of the
                                steps' ends
    host_s                      mean time of planning and applying a step on the host
    device_s                    mean time of a step on the device
    speculation                 drafts by position, accepted lengths, calibration, whether drafting
                                is on and what steps cost; None without drafts
    device_busy                 share of the engine's running time in which the device was at work
    prefix                      sequences looked up and found, tokens not computed again, blocks
                                kept and given up; None without `cache.prefix`
    """

    num_waiting: int
    num_running: int
    num_steps: int
    num_prefill_steps: int
    num_decode_steps: int
    num_failed_steps: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    num_finished: dict[str, int] = field(default_factory=dict)
    blocks_used: int
    num_blocks: int
    tokens_per_s: float
    prompt_tokens_per_s: float
    rows_per_step: float
    host_s: float
    device_s: float
    device_busy: float
    ttft_mean_s: float
    ttft_max_s: float
    num_proposed_drafts: int = 0
    num_verified_drafts: int = 0
    num_accepted_drafts: int = 0
    speculation: dict[str, object] | None = None
    prefix: dict[str, int] | None = None

    def to_dict(self) -> dict[str, object]:
        """Return the snapshot as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        """Return one line for a log."""
        line = (
            f"step {self.num_steps}: {self.num_running} running, {self.num_waiting} waiting, "
            f"{self.tokens_per_s:.1f} tokens/s, prompts {self.prompt_tokens_per_s:.1f} tokens/s, "
            f"{self.rows_per_step:.1f} rows a step, device {1000 * self.device_s:.2f} ms, "
            f"host {1000 * self.host_s:.2f} ms, busy {100 * self.device_busy:.0f} %, "
            f"blocks {self.blocks_used}/{self.num_blocks}"
        )
        if self.num_verified_drafts:
            share = self.num_accepted_drafts / self.num_verified_drafts
            line += f", drafts accepted {100 * share:.0f} %"
        if self.prefix is not None and self.prefix["num_hits"]:
            line += f", {self.prefix['num_hit_tokens']} prompt tokens reused"
        if self.num_preemptions or self.num_failed_steps:
            line += f", {self.num_preemptions} put back, {self.num_failed_steps} steps failed"
        return line


@dataclass(slots=True)
class _Step:
    end_s: float
    num_rows: int
    num_prompt: int
    num_generated: int
    host_s: float
    device_s: float


class StatsRecorder:
    """Collects what the loop tells it."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_prefill_steps = 0
        self.num_failed_steps = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.finished_by_reason: dict[str, int] = {}
        self._recent: deque[_Step] = deque(maxlen=_WINDOW)
        self._planning: deque[float] = deque()
        self._ttft: deque[float] = deque(maxlen=1000)
        self._begin_s: float | None = None
        self._device_s = 0.0

    def launched(self, plan: StepPlan, host_s: float) -> None:
        """Note a step that was planned and launched in so much time."""
        self.num_steps += 1
        self.num_prefill_steps += plan.kind is StepKind.PREFILL
        self._planning.append(host_s)

    def applied(
        self, plan: StepPlan, result: StepResult, num_generated: int, now_s: float, host_s: float
    ) -> None:
        """Note a step's outcome, applied at `now_s` in so much time."""
        planning_s = self._planning.popleft() if self._planning else 0.0
        num_prompt = plan.num_tokens if plan.kind is StepKind.PREFILL else 0
        self.num_prompt_tokens += num_prompt
        self.num_generated_tokens += num_generated
        self._device_s += result.device_s
        if self._begin_s is None:
            self._begin_s = now_s - result.device_s
        self._recent.append(
            _Step(
                now_s,
                len(plan.rows),
                num_prompt,
                num_generated,
                planning_s + host_s,
                result.device_s,
            )
        )

    def failed(self) -> None:
        """Note a failed step; those launched behind it are gone as well."""
        self.num_failed_steps += 1
        self._planning.clear()

    def finished(self, completion: Completion) -> None:
        """Note a completion."""
        reason = str(completion.finish_reason)
        self.finished_by_reason[reason] = self.finished_by_reason.get(reason, 0) + 1
        if completion.ttft_s is not None:
            self._ttft.append(completion.ttft_s)

    def snapshot(
        self,
        *,
        num_waiting: int,
        num_running: int,
        num_preemptions: int,
        blocks_used: int,
        num_blocks: int,
        speculation: dict[str, object] | None = None,
        prefix: dict[str, int] | None = None,
    ) -> EngineStats:
        """Return everything, with the state of queues and pools."""
        steps = list(self._recent)
        count = max(1, len(steps))
        span_s = steps[-1].end_s - steps[0].end_s if len(steps) > 1 else 0.0
        rate = 1.0 / span_s if span_s > 0 else 0.0
        whole_s = steps[-1].end_s - (self._begin_s or 0.0) if steps else 0.0
        return EngineStats(
            num_waiting=num_waiting,
            num_running=num_running,
            num_steps=self.num_steps,
            num_prefill_steps=self.num_prefill_steps,
            num_decode_steps=self.num_steps - self.num_prefill_steps,
            num_failed_steps=self.num_failed_steps,
            num_prompt_tokens=self.num_prompt_tokens,
            num_generated_tokens=self.num_generated_tokens,
            num_preemptions=num_preemptions,
            num_finished=dict(self.finished_by_reason),
            blocks_used=blocks_used,
            num_blocks=num_blocks,
            tokens_per_s=rate * sum(s.num_generated for s in steps[1:]),
            prompt_tokens_per_s=rate * sum(s.num_prompt for s in steps[1:]),
            rows_per_step=sum(s.num_rows for s in steps) / count,
            host_s=sum(s.host_s for s in steps) / count,
            device_s=sum(s.device_s for s in steps) / count,
            device_busy=min(1.0, self._device_s / whole_s) if whole_s > 0 else 0.0,
            ttft_mean_s=sum(self._ttft) / len(self._ttft) if self._ttft else 0.0,
            ttft_max_s=max(self._ttft, default=0.0),
            num_proposed_drafts=_total(speculation, "proposed"),
            num_verified_drafts=_total(speculation, "verified"),
            num_accepted_drafts=_total(speculation, "accepted"),
            speculation=speculation,
            prefix=prefix,
        )


def _total(speculation: dict[str, object] | None, name: str) -> int:
    """Return the sum of a count that is kept by draft position."""
    counts = None if speculation is None else speculation.get(name)
    return sum(counts) if isinstance(counts, list) else 0
