"""Runner: model, caches and sampler of one device; the only caller of the model.

`launch` builds the batch, runs the model, samples, and returns a handle; only the handle's `result`
looks at values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from deepinfer.cache.layout import CacheLayout
from deepinfer.cache.tensors import Caches
from deepinfer.engine.batch import Batch, build_batch, build_model_inputs
from deepinfer.engine.plan import Admission, RowPlan, RowResult, StepKind, StepPlan, StepResult
from deepinfer.model.fast.inputs import ModelInputs
from deepinfer.sampling.sampler import Sampled, Sampler, SlotParams

__all__ = ["Runner", "StepModel", "slot_params"]


class StepModel(Protocol):
    """What the runner needs of a model; `model/fast` is it."""

    def forward(self, inputs: ModelInputs, caches: Caches, logits_rows: Tensor, /) -> Tensor:
        """Run a step, update the caches, return the logits [L, V] fp32 of the named rows."""
        ...

    def diagnose(self, inputs: ModelInputs, caches: Caches, /) -> str:
        """Run rows again and name the first layer whose output is not finite."""
        ...


def slot_params(admission: Admission, eos_token_id: int) -> SlotParams:
    """Translate a request's parameters into what the sampler keeps for its slot."""
    params = admission.params
    eos = () if params.ignore_eos else (eos_token_id,)
    return SlotParams(
        temperature=0.0 if params.is_greedy else params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=admission.seed,
        num_prompt_tokens=admission.num_prompt_tokens,
        min_tokens=params.min_tokens,
        ending_ids=(*eos, *params.stop_ids),
        forced_ids=params.forced_ids,
        logit_bias=params.logit_bias or None,
        logprobs=bool(params.logprobs),
        num_top_logprobs=params.top_logprobs,
        raw_logprobs=params.logprobs_mode == "raw",
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
        eos_token_id: int,
        device: torch.device,
        find_bad_weight: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.model = model
        self.caches = caches
        self.layout = layout
        self.sampler = sampler
        self.device = device
        self._eos_token_id = eos_token_id
        self._find_bad_weight = find_bad_weight
        self._bad_weight: tuple[str | None] | None = None

    def launch(self, plan: StepPlan) -> RunHandle:
        """Enqueue a step: batch, model, sampler."""
        for admission in plan.admissions:
            self.sampler.admit(admission.slot, slot_params(admission, self._eos_token_id))
        with torch.inference_mode():
            batch = build_batch(plan, self.layout, self.device)
            logits = self.model.forward(batch.inputs, self.caches, batch.logits_rows)
            sampled = None
            if batch.rows:
                sampled = self.sampler.sample(logits, batch.slots, batch.positions)
        return RunHandle(self, plan, batch, sampled)

    def explain(self, row: RowPlan, kind: StepKind) -> str:
        """Say why a row's logits are not finite: the layer, and the weight when one is not finite
        itself.

        Runs the row again alone, right after its step.
        """
        with torch.inference_mode():
            inputs = build_model_inputs([row], kind, self.layout, self.device)
            where = self.model.diagnose(inputs, self.caches)
        if self._bad_weight is None:
            self._bad_weight = (self._find_bad_weight(),)
        weight = self._bad_weight[0]
        cause = f"; the weights are damaged: {weight}" if weight is not None else ""
        return f"the logits are not finite: {where}{cause}"


class RunHandle:
    """A step enqueued on a Runner."""

    def __init__(
        self, runner: Runner, plan: StepPlan, batch: Batch, sampled: Sampled | None
    ) -> None:
        self._runner = runner
        self._plan = plan
        self._batch = batch
        self._sampled = sampled

    def result(self) -> StepResult:
        """Copy the outcome to the host and turn it into one RowResult per sampling row."""
        sampled = self._sampled
        if sampled is None:
            return StepResult(self._plan.step_id, ())
        token_ids = sampled.token_ids.tolist()
        bad = sampled.bad.tolist()
        logprobs = None if sampled.logprobs is None else sampled.logprobs.tolist()
        top_ids = None if sampled.top_ids is None else sampled.top_ids.tolist()
        top = None if sampled.top_logprobs is None else sampled.top_logprobs.tolist()
        results = []
        explained: str | None = None
        for idx, row in enumerate(self._batch.rows):
            if bad[idx]:
                if explained is None:
                    explained = self._runner.explain(row, self._plan.kind)
                results.append(RowResult(row.request_id, (), error=explained))
                continue
            params = self._runner.sampler.params(row.slot)
            pairs = None
            if top_ids is not None and top is not None and params.num_top_logprobs:
                count = params.num_top_logprobs
                pairs = (tuple(zip(top_ids[idx][:count], top[idx][:count], strict=True)),)
            results.append(
                RowResult(
                    request_id=row.request_id,
                    token_ids=(token_ids[idx],),
                    logprobs=None if logprobs is None or not params.logprobs else (logprobs[idx],),
                    top_logprobs=pairs,
                )
            )
        return StepResult(self._plan.step_id, tuple(results))
