"""Pace: when prompts are filled rather than sequences extended, and how much of them at once. Pure.

New sequences make every later decode step more worthwhile, and each prefill step holds up those
that run; both sides wait for a bounded number of steps.
"""

from __future__ import annotations

from deepinfer.engine.limits import Limits
from deepinfer.engine.plan import StepKind
from deepinfer.engine.sequence import Sequence

__all__ = ["Pace"]

_SMALL_STEPS = 50  # prefill steps that must go well before they may grow again


class Pace:
    """Counts who waits, and takes smaller prefill steps for a while after one that did not fit.

    budget              tokens of the next prefill step
    prefill_wait_steps  steps that admissible waiting work has sat through
    decode_wait_steps   prefill steps in a row that something ready to decode has sat through
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.budget = limits.max_num_batched_tokens
        self._small_steps = 0
        self.prefill_wait_steps = 0
        self.decode_wait_steps = 0

    def wants_prefill(
        self, *, num_prefilling: int, num_running: int, num_waiting: int, waiting_tokens: int
    ) -> bool:
        """Whether the next step fills prompts, when it can."""
        limits = self._limits
        if not num_running:
            return True
        if self.decode_wait_steps >= limits.max_decode_wait_steps:
            return False
        if num_prefilling or self.prefill_wait_steps >= limits.max_prefill_wait_steps:
            return True
        gain = min(limits.max_num_seqs - num_running, num_waiting)
        if gain >= limits.prefill_gain * num_running:
            return True
        return waiting_tokens >= 0.5 * limits.max_num_batched_tokens

    def chunk(self, sequence: Sequence, budget: int) -> int:
        """Return the tokens of a sequence's next chunk, 0 to wait for a later step."""
        size = self._limits.chunk_tokens
        if self.budget < size:  # after a step that did not fit into memory
            return min(sequence.num_remaining, budget)
        wanted = min(sequence.num_remaining, size - sequence.num_scheduled % size)
        if self._limits.fixed_chunks:
            return wanted if wanted <= budget else 0
        return min(sequence.num_remaining, size, budget)

    def planned(self, kind: StepKind | None, *, can_prefill: bool, can_decode: bool) -> None:
        """Count a planned step, or with None one that others took: who could have run and waits."""
        if kind is StepKind.PREFILL:
            self.prefill_wait_steps = 0
            self.decode_wait_steps = self.decode_wait_steps + 1 if can_decode else 0
            return
        self.prefill_wait_steps = self.prefill_wait_steps + 1 if can_prefill else 0
        if kind is StepKind.DECODE:
            self.decode_wait_steps = 0

    def shrink(self) -> None:
        """Take half as much from now on: a prefill step did not fit."""
        self.budget = max(1, min(self.budget, self._limits.chunk_tokens) // 2)
        self._small_steps = 0

    def went_well(self, kind: StepKind) -> None:
        """Count a step that succeeded; after enough of them prefill steps grow again."""
        if self.budget < self._limits.max_num_batched_tokens and kind is StepKind.PREFILL:
            self._small_steps += 1
            if self._small_steps >= _SMALL_STEPS:
                self._small_steps = 0
                self.budget = min(self.budget * 2, self._limits.max_num_batched_tokens)
