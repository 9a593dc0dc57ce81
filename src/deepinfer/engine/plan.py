"""All that crosses between policy and device: StepPlan, RowPlan, StepResult, RowResult.

Frozen and pure: a plan can be printed, compared, recorded and sent to another process. Per-request
values that never change travel once, in the plan's `admissions`, and are then addressed by slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from deepinfer.engine.request import SamplingParams

__all__ = ["Admission", "RowPlan", "RowResult", "StepKind", "StepPlan", "StepResult"]


class StepKind(StrEnum):
    """Whether a step fills from prompts or extends by one token; the two never mix."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Admission:
    """A request takes over a slot: what the sampler needs for its whole life.

    num_prompt_tokens  the first generated token has this absolute position
    seed               0..2^64-1
    """

    slot: int
    num_prompt_tokens: int
    params: SamplingParams
    seed: int


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One sequence's part of a step.

    slot       state slot, fixed for the request's life, never 0
    start      absolute position of `token_ids[0]`; positions below it are in the caches
    token_ids  the tokens to run, at least one
    blocks     block table that covers at least `start + len(token_ids)` positions, never holding 0
    samples    whether a token is drawn after the last of them (not after an inner chunk of a
               prompt)
    """

    request_id: int
    slot: int
    start: int
    token_ids: Sequence[int]
    blocks: Sequence[int]
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One launch. `admissions` take effect before the rows run; a slot is in at most one row."""

    step_id: int
    kind: StepKind
    rows: tuple[RowPlan, ...]
    admissions: tuple[Admission, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens run by this step."""
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class RowResult:
    """What one sampling row produced: tokens in order, or an error that ends the request.

    token_ids     one id for now; a verified draft brings several
    logprobs      one per id, or None when not asked
    top_logprobs  per id, (id, logprob) pairs; or None when not asked
    error         why the row's logits could not be used
    """

    request_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one step: a RowResult for each row with `samples`, in row order."""

    step_id: int
    rows: tuple[RowResult, ...]
