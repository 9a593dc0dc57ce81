"""All that crosses between policy and device: StepPlan, RowPlan, Masks, StepResult, RowResult.

Frozen and pure: a plan can be printed, compared, recorded and sent to another process. Per-request
values that never change travel once, in the plan's `admissions`, and are then addressed by slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepinfer.engine.request import SamplingParams

__all__ = [
    "FROM_SLOT",
    "Admission",
    "Masks",
    "RowPlan",
    "RowResult",
    "SlotCopy",
    "StateLoad",
    "StepKind",
    "StepPlan",
    "StepResult",
    "Together",
]

FROM_SLOT = -1
"""The `start` of a row that continues from its slot's state."""


class StepKind(StrEnum):
    """Whether a step fills from prompts or extends by one token; the two never mix."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Admission:
    """A request takes over a slot: what device and sampler need for its whole life.

    num_prompt_tokens  the first generated token has this absolute position
    seed               0..2^64-1
    limit              most tokens, prompt and output: reaching it ends the request
    ending_ids         ids that end the request
    length             tokens known at admission: the prompt, and what was generated before a
                       preemption
    history            these tokens, for requests with logits processors
    """

    slot: int
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    limit: int = 2**31 - 1
    ending_ids: tuple[int, ...] = ()
    length: int = 0
    history: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """A slot gets the rings and tails that a checkpoint of the prefix cache keeps."""

    checkpoint: int
    slot: int


@dataclass(frozen=True, slots=True)
class StateLoad:
    """A slot and blocks get the caches of a saved request, `num_tokens` long.

    parts  as `cache/live.py` names them
    """

    slot: int
    blocks: tuple[int, ...]
    num_tokens: int
    parts: Mapping[str, NDArray[np.generic]] = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One sequence's part of a step.

    slot       state slot, fixed for the request's life, never 0
    start      absolute position of `token_ids[0]`; positions below it are in the caches. FROM_SLOT:
               the row continues from the slot's state, with its last token and at its length
    token_ids  the tokens to run, at least one; empty when the row continues from its slot
    blocks     block table, never holding 0; covers every position the row can reach
    samples    whether a token is drawn after the last of them (not after an inner chunk of a
               prompt)
    num_drafts  most of the slot's drafts that this row verifies
    scored_ids  prompt tokens behind the row's first, second, ... token, whose logprobs are asked
    floor       first position that the decoder half computes (bounded replay)
    saves       (end, checkpoint): rings and tails after `end` tokens go there in passing
    A row that continues from its slot holds nothing that changes with every step.
    """

    request_id: int
    slot: int
    start: int
    token_ids: Sequence[int]
    blocks: Sequence[int]
    samples: bool
    num_drafts: int = 0
    scored_ids: Sequence[int] = ()
    floor: int = 0
    saves: tuple[tuple[int, int], ...] = ()

    @property
    def from_slot(self) -> bool:
        """Whether the input tokens are on the device."""
        return self.start == FROM_SLOT

    @property
    def most_tokens(self) -> int:
        """Tokens run by this row; with drafts, at most."""
        return len(self.token_ids) or 1 + self.num_drafts

    @property
    def reports(self) -> bool:
        """Whether the row has a RowResult."""
        return self.samples or bool(self.scored_ids)


@dataclass(frozen=True, slots=True)
class Together:
    """What ranks that step together have agreed on; a rank's own plan may have no rows.

    rows       most rows of any rank
    sequences  most sequences of any rank that draft
    propose    whether all enter the draft blocks
    """

    rows: int
    sequences: int
    propose: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One launch. `admissions`, `loads` and `restores` take effect before the rows run.

    A slot is in at most one row.

    needs_masks   the draw waits for `StepHandle.provide_masks`
    draft_budget  drafts verified over all rows, split on the device by current confidences; None:
                  each row verifies its own `num_drafts`
    propose       draft for the next step, where the engine drafts at all
    together      this rank computes with others, which wait for it in every layer
    """

    step_id: int
    kind: StepKind
    rows: tuple[RowPlan, ...]
    admissions: tuple[Admission, ...] = ()
    needs_masks: bool = False
    draft_budget: int | None = None
    propose: bool = True
    restores: tuple[SlotCopy, ...] = ()
    loads: tuple[StateLoad, ...] = ()
    together: Together | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens run by this step; with drafts, at most."""
        return sum(row.most_tokens for row in self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class Masks:
    """Which ids may be drawn, for the rows that a grammar constrains.

    rows  (index of the row in the plan, draft position 0..num_drafts); rows that are not listed
          are free
    bits  [len(rows), ceil(V / 32)] uint32, little end first, a set bit allows its id
    """

    rows: tuple[tuple[int, int], ...]
    bits: NDArray[np.uint32]


class RowResult(NamedTuple):
    """What one reporting row produced: tokens in order, or an error that ends the request.

    token_ids        accepted drafts, then one more; none from an inner chunk or a finished sequence
    logprobs         one per id, or None when not asked
    top_logprobs     per id, (id, logprob) pairs; or None when not asked
    error            why the row's logits could not be used
    num_proposed     drafts the slot had before this step
    num_verified     those that this step ran
    num_accepted     those that were right
    drafts           proposal for the next step
    confidences      of each of them
    prompt_logprobs  one for each of the row's `scored_ids`
    """

    request_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    error: str | None = None
    num_proposed: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    drafts: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    prompt_logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one step: a RowResult for each row that reports, in row order.

    device_s  time the device spent on it
    is_usual  whether steps of this size take about as long: nothing was compiled or recorded
    """

    step_id: int
    rows: tuple[RowResult, ...]
    device_s: float = 0.0
    is_usual: bool = True
