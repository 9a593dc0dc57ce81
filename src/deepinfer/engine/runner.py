"""Runner: model, caches, sampler and slot state of one device; the only caller of the model.

`run` is the device side of a step: it happens on the device's queue, in the order of launches, and
is the only code that looks at values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from deepinfer.cache.layout import CacheLayout
from deepinfer.cache.tensors import Caches
from deepinfer.engine.batch import Batch, build_batch
from deepinfer.engine.plan import Admission, Masks, RowResult, StepKind, StepPlan, StepResult
from deepinfer.engine.state import SlotState
from deepinfer.errors import RequestError
from deepinfer.model.fast.inputs import ModelInputs, SequenceRows, build_inputs
from deepinfer.sampling.sampler import LogitsProcessor, Sampled, Sampler, SlotParams, TokenMasks

__all__ = ["Runner", "StepModel", "slot_params", "token_masks"]


class StepModel(Protocol):
    """What the runner needs of a model; `model/fast` is it."""

    def forward(self, inputs: ModelInputs, caches: Caches, logits_rows: Tensor, /) -> Tensor:
        """Run a step, update the caches, return the logits [L, V] fp32 of the named rows."""
        ...

    def diagnose(self, inputs: ModelInputs, caches: Caches, /) -> str:
        """Run rows again and name the first layer whose output is not finite."""
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

    find_bad_weight  asked once, when logits are not finite: names a weight that is not, or returns
                     None
    """

    def __init__(
        self,
        model: StepModel,
        caches: Caches,
        layout: CacheLayout,
        sampler: Sampler,
        state: SlotState,
        device: torch.device,
        find_bad_weight: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.model = model
        self.caches = caches
        self.layout = layout
        self.sampler = sampler
        self.state = state
        self.device = device
        self._history: dict[int, list[int]] = {}  # tokens of the slots with logits processors
        self._find_bad_weight = find_bad_weight
        self._bad_weight: tuple[str | None] | None = None

    def run(self, plan: StepPlan, masks: Callable[[], Masks | None]) -> StepResult:
        """Run a step: batch, model, sampler, slot state.

        masks  asked right before the draw when the plan needs masks; waits for them
        """
        for admission in plan.admissions:
            self._admit(admission)
        with torch.inference_mode():
            batch = build_batch(plan, self.state, self.layout, self.device)
            if batch.inputs is None:
                return StepResult(plan.step_id, _nothing_drawn(plan))
            logits = self.model.forward(batch.inputs, self.caches, batch.logits_rows)
            num_drawn = len(batch.sampling)
            scores = self._score(batch, logits[num_drawn:])
            sampled = None
            if num_drawn:
                slots = batch.slots.tolist()
                sampled = self.sampler.sample(
                    logits[:num_drawn],
                    slots,
                    batch.positions,
                    token_masks(plan, batch, masks()) if plan.needs_masks else None,
                    lambda row: self._history[slots[row]],
                )
                self.state.advance(batch.slots, sampled.token_ids, sampled.bad)
            return StepResult(plan.step_id, self._results(plan, batch, sampled, scores))

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
            inputs = build_inputs([sequence], kind is StepKind.DECODE, self.layout, self.device)
            where = self.model.diagnose(inputs, self.caches)
        if self._bad_weight is None:
            self._bad_weight = (self._find_bad_weight(),)
        weight = self._bad_weight[0]
        cause = f"; the weights are damaged: {weight}" if weight is not None else ""
        return f"the logits are not finite: {where}{cause}"

    def _results(
        self,
        plan: StepPlan,
        batch: Batch,
        sampled: Sampled | None,
        scores: dict[int, tuple[float, ...]],
    ) -> tuple[RowResult, ...]:
        """Copy the outcome to the host and turn it into one RowResult per reporting row."""
        found = {} if sampled is None else self._drawn(plan, batch, sampled)
        results = []
        for row in plan.rows:
            if row.reports:
                result = found.get(row.slot) or RowResult(row.request_id, ())
                if row.scored_ids:
                    result = result._replace(prompt_logprobs=scores.get(row.slot))
                results.append(result)
        return tuple(results)

    def _drawn(self, plan: StepPlan, batch: Batch, sampled: Sampled) -> dict[int, RowResult]:
        """Return slot -> outcome of the rows that drew."""
        token_ids = sampled.token_ids.tolist()
        bad = sampled.bad.tolist()
        logprobs = None if sampled.logprobs is None else sampled.logprobs.tolist()
        top_ids = None if sampled.top_ids is None else sampled.top_ids.tolist()
        top = None if sampled.top_logprobs is None else sampled.top_logprobs.tolist()
        drawn: dict[int, RowResult] = {}
        explained: str | None = None
        for idx, place in enumerate(batch.sampling):
            row = batch.rows[place]
            slot = row.slot
            if bad[idx]:
                if explained is None:
                    explained = self.explain(batch.sequences[place], plan.kind)
                drawn[slot] = RowResult(row.request_id, (), error=explained)
                continue
            if slot in self._history:
                self._history[slot].append(token_ids[idx])
            own = None
            pairs = None
            if logprobs is not None:
                params = self.sampler.params(slot)
                own = (logprobs[idx],) if params.logprobs else None
                if top_ids is not None and top is not None and params.num_top_logprobs:
                    count = params.num_top_logprobs
                    pairs = (tuple(zip(top_ids[idx][:count], top[idx][:count], strict=True)),)
            drawn[slot] = RowResult(row.request_id, (token_ids[idx],), own, pairs)
        return drawn


def token_masks(plan: StepPlan, batch: Batch, masks: Masks | None) -> TokenMasks | None:
    """Bring grammar masks to the device, for the rows that still run."""
    if masks is None or not masks.rows:
        return None
    places = {batch.rows[idx].slot: at for at, idx in enumerate(batch.sampling)}
    kept: list[int] = []
    rows: list[int] = []
    for number, (idx, draft) in enumerate(masks.rows):
        at = places.get(plan.rows[idx].slot)
        if at is not None:
            assert draft == 0, "a row without drafts has one position"
            kept.append(number)
            rows.append(at)
    if not rows:
        return None
    bits = torch.from_numpy(masks.bits[kept].view(np.int32)).to(batch.slots.device)
    return torch.tensor(rows, dtype=torch.int64, device=batch.slots.device), bits


def _processor(factory: Callable[[], object]) -> LogitsProcessor:
    """Make a logits processor; raises RequestError when the factory makes none."""
    made = factory()
    if not callable(made):
        raise RequestError(f"a factory of logits_processors made {made!r}, which cannot be called")
    return made


def _nothing_drawn(plan: StepPlan) -> tuple[RowResult, ...]:
    return tuple(RowResult(row.request_id, ()) for row in plan.rows if row.reports)
