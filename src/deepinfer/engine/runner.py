"""Runner: model, caches, sampler and slot state of one device; the only caller of the model.

`run` is the device side of a step: it happens on the device's queue, in the order of launches, and
is the only code that looks at values.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.cache.layout import CacheLayout
from deepinfer.cache.live import copy_slot, read_live, write_live
from deepinfer.cache.tensors import Caches
from deepinfer.engine.batch import Batch, BatchBuilder
from deepinfer.engine.drafting import Drafter
from deepinfer.engine.plan import Admission, Masks, RowResult, StepKind, StepPlan, StepResult
from deepinfer.engine.state import SlotState
from deepinfer.errors import RequestError
from deepinfer.model.fast.context import ContextShare
from deepinfer.model.fast.inputs import ModelInputs, ReplayMode, SequenceRows, build_inputs
from deepinfer.sampling.sampler import LogitsProcessor, Sampled, Sampler, SlotParams, TokenMasks

__all__ = ["NOT_FINITE", "Runner", "StepModel", "slot_params", "token_masks"]


_SPOILT = "a logits processor returned NaN or +inf, or -inf for every token"


NOT_FINITE = "the logits are not finite; run it on one rank to see the layer"


class StepModel(Protocol):
    """What the runner needs of a model; `model/fast` is it."""

    def forward(self, inputs: ModelInputs, caches: Caches, logits_rows: Tensor | None, /) -> Tensor:
        """Run a step, update the caches, return the logits [L, V] fp32 of the named rows."""
        ...

    def diagnose(self, inputs: ModelInputs, caches: Caches, /) -> str:
        """Run rows again and name the first layer whose output is not finite."""
        ...

    def begin(self, most_rows: int, /) -> None:
        """Say how many rows the fullest of the ranks that step together has."""
        ...

    def idle(self) -> None:
        """Take part in a step of theirs without rows."""
        ...

    @property
    def flows(self) -> bool:
        """Whether a step that ranks take together never waits on the host."""
        ...

    def check(self) -> None:
        """Raise what went wrong on the device in a step together, after its end."""
        ...


def slot_params(admission: Admission) -> SlotParams:
    """Translate a request's parameters into what the sampler keeps for its slot."""
    params = admission.params
    return SlotParams(
        temperature=0.0 if params.is_greedy else params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=admission.seed,
        num_prompt_tokens=admission.num_prompt_tokens,
        min_tokens=params.min_tokens,
        ending_ids=admission.ending_ids,
        forced_ids=params.forced_ids,
        logit_bias=params.logit_bias or None,
        logprobs=bool(params.logprobs),
        num_top_logprobs=params.top_logprobs,
        raw_logprobs=params.logprobs_mode == "raw",
        processors=tuple(_processor(factory) for factory in params.processor_factories),
    )


class Runner:
    """Runs planned steps on one device.

    drafter          drafts and accepts; None = one token a step
    find_bad_weight  asked once, when logits are not finite: names a weight that is not, or returns
                     None
    replay           what the decoder half does about the positions below a row's `floor`

    between          called before every step that ranks take together, with whether the step before
                     was a decode step
    """

    def __init__(
        self,
        model: StepModel,
        caches: Caches,
        layout: CacheLayout,
        sampler: Sampler,
        state: SlotState,
        device: torch.device,
        drafter: Drafter | None = None,
        find_bad_weight: Callable[[], str | None] = lambda: None,
        replay: ReplayMode = "off",
    ) -> None:
        self._follows = False
        self.between: Callable[[bool], None] | None = None
        self._was_decode = False
        self.replay: ReplayMode = replay
        self.model = model
        self.caches = caches
        self.layout = layout
        self.sampler = sampler
        self.state = state
        self.device = device
        self.drafter = drafter
        self._batches = BatchBuilder(layout, device, replay)
        self._history: dict[int, list[int]] = {}  # tokens of the slots with logits processors
        self._find_bad_weight = find_bad_weight
        self._bad_weight: tuple[str | None] | None = None

    @property
    def records(self) -> bool:
        """Whether decode steps are played from recordings."""
        return False

    def share_prefill(self, share: ContextShare) -> None:
        """Share prefill steps with other ranks. All run the same plans and keep the same caches;
        the first of them draws.
        """
        self._batches.share = share
        self._follows = share.group.place > 0

    def run(self, plan: StepPlan, masks: Callable[[], Masks | None]) -> StepResult:
        """Run a step: batch, model, sampler, acceptance, slot state, drafts.

        masks  asked right before the draw when the plan needs masks; waits for them
        """
        for admission in plan.admissions:
            self._admit(admission)
        with torch.inference_mode():
            self._prepare_caches(plan)
            self._meet(plan)
            batch = self._batches.build(plan, self.state) if plan.rows else None
            if batch is None or batch.inputs is None:
                self._idle(plan)
                return StepResult(plan.step_id, _nothing_drawn(plan))
            logits = self.model.forward(batch.inputs, self.caches, batch.logits_rows)
            if self._follows:
                self._propose(plan, None)
                return StepResult(plan.step_id, ())
            num_drawn = len(batch.row_slots)
            scores = self._score(batch, logits[num_drawn:])
            found: dict[int, RowResult] = {}
            if num_drawn:
                allowed = token_masks(plan, batch, masks()) if plan.needs_masks else None
                found = self._draw(plan, batch, logits[:num_drawn], allowed)
            else:
                self._propose(plan, None)
            return StepResult(plan.step_id, _results(plan, found, scores))

    def _draw(
        self, plan: StepPlan, batch: Batch, logits: Tensor, allowed: TokenMasks | None
    ) -> dict[int, RowResult]:
        """Draw, accept drafts, advance the slots, draft again; return slot -> outcome."""
        drafter = self.drafter
        rejects = drafter is not None and drafter.rejects
        sampled = self.sampler.sample(
            logits,
            batch.row_slots,
            batch.positions,
            allowed,
            lambda row: self._tokens_before(batch, row),
            keep_drawn_from=rejects,
        )
        if drafter is None:
            accepted = torch.zeros_like(batch.slots)
            emitted = sampled.token_ids.unsqueeze(1)
        else:
            accepted, emitted, sampled = drafter.accept(batch, logits, sampled)
        # A row whose logits are bad is drawn again in the next step, as the first of its own.
        bad = sampled.bad[batch.windows.rows()]
        good = (~bad).long().cumprod(dim=1).sum(dim=1)
        failed = good == 0
        accepted = torch.minimum(accepted, (good - 1).clamp(min=0))
        self.state.advance(batch.slots, emitted, accepted, failed)
        self._propose(plan, batch)
        return self._drawn(plan, batch, sampled, accepted, emitted, failed)

    def _propose(self, plan: StepPlan, batch: Batch | None) -> None:
        """Draft for the next step. Ranks that step together all enter the draft blocks or none."""
        drafter, together = self.drafter, plan.together
        if drafter is None or (together is not None and not together.propose):
            return
        if together is not None:
            self._begin(together.sequences * drafter.model.config.dspark_block_size)
        drafted = batch is not None and plan.propose and drafter.propose(self.caches, batch.slots)
        if together is not None and not drafted:
            drafter.model.idle()

    def _meet(self, plan: StepPlan) -> None:
        """Do what ranks that step together do first."""
        if plan.together is None:
            return
        if self.between is not None:
            self.between(self._was_decode)
        self._was_decode = plan.kind is StepKind.DECODE
        self._begin(plan.together.rows)

    def _begin(self, most_rows: int) -> None:
        """Say how many rows the fullest rank has in what follows."""
        self.model.begin(most_rows)

    def _idle(self, plan: StepPlan) -> None:
        """Take part in a step in which nothing of this rank runs."""
        if plan.together is not None:
            self.model.idle()
            self._propose(plan, None)

    def _tokens_before(self, batch: Batch, row: int) -> list[int]:
        """Return all tokens before the one that a flat row draws."""
        history = self._history[batch.row_slots[row]]
        at = bisect.bisect_right(batch.first, row) - 1
        place = row - batch.first[at]
        return history + list(batch.sequence(batch.sampling[at]).token_ids[1 : 1 + place])

    def _prepare_caches(self, plan: StepPlan) -> None:
        """Fill slots and blocks from checkpoints and saved requests; begin new checkpoints."""
        for load in plan.loads:
            parts = {name: torch.from_numpy(part.copy()) for name, part in load.parts.items()}
            write_live(self.caches, load.slot, load.blocks, load.num_tokens, parts)
        for restore in plan.restores:
            copy_slot(self.caches, restore.checkpoint, restore.slot)
        for row in plan.rows:
            for _, checkpoint in row.saves:
                copy_slot(self.caches, row.slot, checkpoint)

    def read_caches(
        self, slot: int, blocks: Sequence[int], num_tokens: int
    ) -> dict[str, NDArray[np.generic]]:
        """Return all that later tokens of a sequence may read, by the names of `cache/live.py`."""
        with torch.inference_mode():
            parts = read_live(self.caches, slot, blocks, num_tokens)
            return {name: part.cpu().numpy() for name, part in parts.items()}

    def _admit(self, admission: Admission) -> None:
        self.sampler.admit(admission.slot, slot_params(admission))
        self.state.admit(admission)
        self._history.pop(admission.slot, None)
        if admission.params.processor_factories:
            self._history[admission.slot] = list(admission.history)

    def _score(self, batch: Batch, logits: Tensor) -> dict[int, tuple[float, ...]]:
        """Return slot -> logprobs of its row's `scored_ids`."""
        slots: list[int] = []
        token_ids: list[int] = []
        for idx in batch.scoring:
            row = batch.rows[idx]
            slots += [row.slot] * len(row.scored_ids)
            token_ids += row.scored_ids
        if not slots:
            return {}
        values = self.sampler.score(logits, slots, token_ids).tolist()
        found: dict[int, list[float]] = {}
        for slot, value in zip(slots, values, strict=True):
            found.setdefault(slot, []).append(value)
        return {slot: tuple(scores) for slot, scores in found.items()}

    def explain(self, sequence: SequenceRows, kind: StepKind) -> str:
        """Say why a row's logits are not finite: the layer, and the weight when one is not finite
        itself.

        Runs the row again alone, right after its step.
        """
        with torch.inference_mode():
            decode = kind is StepKind.DECODE
            mode: ReplayMode = "mask" if self.replay != "off" else "off"
            inputs = build_inputs([sequence], decode, self.layout, self.device, mode)
            where = self.model.diagnose(inputs, self.caches)
        if self._bad_weight is None:
            self._bad_weight = (self._find_bad_weight(),)
        weight = self._bad_weight[0]
        cause = f"; the weights are damaged: {weight}" if weight is not None else ""
        return f"the logits are not finite: {where}{cause}"

    def _drawn(
        self,
        plan: StepPlan,
        batch: Batch,
        sampled: Sampled,
        accepted: Tensor,
        emitted: Tensor,
        failed: Tensor,
    ) -> dict[int, RowResult]:
        """Copy the outcome to the host; return slot -> outcome of the rows that drew."""
        counts = accepted.tolist()
        token_ids = emitted.tolist()
        bad = failed.tolist()
        logprobs = None if sampled.logprobs is None else sampled.logprobs.tolist()
        top_ids = None if sampled.top_ids is None else sampled.top_ids.tolist()
        top = None if sampled.top_logprobs is None else sampled.top_logprobs.tolist()
        verified = batch.windows.counts.tolist()
        drafts: list[list[int]] = []
        confidences: list[list[float]] = []
        valid: list[int] = []
        if self.drafter is not None:
            valid = self.state.num_drafts[batch.slots].tolist()
            drafts = self.state.drafts[batch.slots].tolist()
            confidences = self.state.confidences[batch.slots].tolist()
        spoilt = None if sampled.spoilt is None else sampled.spoilt.tolist()
        drawn: dict[int, RowResult] = {}
        explained: str | None = None
        for idx, place in enumerate(batch.sampling):
            row = batch.rows[place]
            slot = row.slot
            if bad[idx]:
                if spoilt is not None and spoilt[batch.first[idx]]:
                    drawn[slot] = RowResult(row.request_id, (), error=_SPOILT)
                    continue
                if explained is None:
                    alone = plan.together is None  # running rows again would need the others
                    where = batch.sequence(place)
                    explained = self.explain(where, plan.kind) if alone else NOT_FINITE
                drawn[slot] = RowResult(row.request_id, (), error=explained)
                continue
            count = counts[idx] + 1
            own_ids = tuple(token_ids[idx][:count])
            if slot in self._history:
                self._history[slot] += own_ids
            own = None
            pairs = None
            if logprobs is not None:
                first = batch.first[idx]
                params = self.sampler.params(slot)
                own = tuple(logprobs[first : first + count]) if params.logprobs else None
                if top_ids is not None and top is not None and params.num_top_logprobs:
                    most = params.num_top_logprobs
                    pairs = tuple(
                        tuple(zip(top_ids[at][:most], top[at][:most], strict=True))
                        for at in range(first, first + count)
                    )
            if not drafts:
                drawn[slot] = RowResult(row.request_id, own_ids, own, pairs)
                continue
            num = valid[idx]
            drawn[slot] = RowResult(
                row.request_id,
                own_ids,
                own,
                pairs,
                None,
                batch.proposed[idx],
                verified[idx],
                count - 1,
                tuple(drafts[idx][:num]),
                tuple(confidences[idx][:num]),
            )
        return drawn


def _results(
    plan: StepPlan, found: dict[int, RowResult], scores: dict[int, tuple[float, ...]]
) -> tuple[RowResult, ...]:
    """Return one RowResult per reporting row."""
    results = []
    for row in plan.rows:
        if row.reports:
            result = found.get(row.slot) or RowResult(row.request_id, ())
            if row.scored_ids:
                result = result._replace(prompt_logprobs=scores.get(row.slot))
            results.append(result)
    return tuple(results)


def host_rows(count: int, words: int) -> NDArray[np.uint32]:
    """Allocate rows of masks, pinned where there is an accelerator that copies from them."""
    pinned = torch.cuda.is_available()
    rows = torch.empty((count, words), dtype=torch.int32, pin_memory=pinned)
    return rows.numpy().view(np.uint32)


def token_masks(plan: StepPlan, batch: Batch, masks: Masks | None) -> TokenMasks | None:
    """Bring grammar masks to the device, for the rows that still run."""
    if masks is None or not masks.rows:
        return None
    places = {batch.rows[idx].slot: at for at, idx in enumerate(batch.sampling)}
    verified = batch.windows.counts.tolist()
    kept: list[int] = []
    rows: list[int] = []
    for number, (idx, draft) in enumerate(masks.rows):
        at = places.get(plan.rows[idx].slot)
        if at is not None and draft <= verified[at]:
            kept.append(number)
            rows.append(batch.first[at] + draft)
    if not rows:
        return None
    found = masks.bits if len(kept) == len(masks.rows) else masks.bits[kept]
    bits = torch.from_numpy(found.view(np.int32)).to(batch.slots.device, non_blocking=True)
    return torch.tensor(rows, dtype=torch.int64, device=batch.slots.device), bits


def _processor(factory: Callable[[], object]) -> LogitsProcessor:
    """Make a logits processor; raises RequestError when the factory makes none."""
    made = factory()
    if not callable(made):
        raise RequestError(f"a factory of logits_processors made {made!r}, which cannot be called")
    return made


def _nothing_drawn(plan: StepPlan) -> tuple[RowResult, ...]:
    return tuple(RowResult(row.request_id, ()) for row in plan.rows if row.reports)
