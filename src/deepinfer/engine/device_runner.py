"""Runner of an accelerator: a launch never waits for it.

The host names slots, draft budgets and block tables, in one copy a step; positions, tokens and what
follows from them are worked out on the device. Outcomes come back in one copy, behind an event.
Decode steps whose draw needs nothing else run whole from CUDA graphs. Source: runtime
specification, 2.3 and D2.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.cache.layout import CacheLayout
from deepinfer.cache.tensors import Caches
from deepinfer.config.engine import EngineConfig
from deepinfer.device.packer import Packer
from deepinfer.engine.drafting import Drafter
from deepinfer.engine.graphs import GraphCache, StepKey, bound_bucket, draft_bucket, row_bucket
from deepinfer.engine.plan import (
    Admission,
    Masks,
    RowPlan,
    RowResult,
    StepKind,
    StepPlan,
    StepResult,
)
from deepinfer.engine.runner import NOT_FINITE, Runner, StepModel
from deepinfer.engine.sizing import Sizes
from deepinfer.engine.state import SlotState
from deepinfer.kernels.turn import FIXED, StepRows, finish, keep_drafts, spread, usable
from deepinfer.model.fast.device_rows import device_inputs, layout_form
from deepinfer.model.fast.inputs import ReplayMode, SequenceRows, build_inputs
from deepinfer.model.fast.model import FastModel
from deepinfer.sampling.sampler import Sampled, Sampler, TokenMasks
from deepinfer.sampling.speculative import split_budget

__all__ = ["DeviceRunner", "make_runner", "settle"]

IntArray = NDArray[np.int64]

_MANY = 4
"""From so many running sequences on a prompt's first drafts are made with those of all others."""

_PREPARE_S = 6.0
"""Seconds that usual steps are recorded for at the start, at most one step more."""


def make_runner(
    config: EngineConfig,
    sizes: Sizes,
    model: StepModel,
    caches: Caches,
    layout: CacheLayout,
    sampler: Sampler,
    state: SlotState,
    device: torch.device,
    drafter: Drafter | None,
    find_bad_weight: Callable[[], str | None],
) -> Runner:
    """Return the runner of a device: `Runner` on a CPU, `DeviceRunner` elsewhere."""
    parts = (model, caches, layout, sampler, state, device, drafter, find_bad_weight)
    if device.type == "cpu":
        return Runner(*parts, config.replay.mode)
    most = sizes.max_model_len + config.speculation.num_drafts + 1
    graphs = config.scheduling.cuda_graphs
    if graphs == "auto" and not model.flows:  # a step that waits for the host cannot be recorded
        graphs = "off"
    return DeviceRunner(
        *parts,
        config.replay.mode,
        max_sequences=config.scheduling.max_num_seqs,
        max_blocks=-(-most // layout.tokens_per_block),
        graphs=device.type == "cuda" and graphs != "off",
        strict=graphs == "on",
        varies=config.speculation.variable,
    )


def settle(model: FastModel, layout: CacheLayout) -> None:
    """Run one row of padding on caches of nothing, and forget it.

    Kernels are compiled and weights packed at their first use: what that takes is taken before the
    memory of caches is planned.
    """
    if model.ranks is not None:
        return  # the first step of all ranks does it
    device = model.device
    caches = Caches.allocate(layout, 2, 2, device)
    none = torch.zeros(1, dtype=torch.int64, device=device)
    slots = torch.zeros(2, dtype=torch.int64, device=device)
    table = slots.view(2, 1)
    with torch.inference_mode():
        inputs = device_inputs(
            none,
            none,
            slots,
            slots,
            table[:, :0],
            table,
            layout_form(layout),
            layout.tokens_per_block,
        )
        model.forward(inputs, caches, none)
        if model.draft is not None:
            model.draft.propose(caches, none, none, none)
    del caches
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


class _Rows(NamedTuple):
    """B sequences and their T rows on the device, and positions [T] of the tokens to draw."""

    step: StepRows
    positions: Tensor


@dataclass(slots=True)
class _Launched:
    """A step on its way: what it was, and where its outcome arrives."""

    plan: StepPlan
    drawing: tuple[RowPlan, ...]
    charged: tuple[tuple[int, int, int], ...]  # slot, its generation, tokens counted at launch
    begin: torch.cuda.Event | None = None
    event: torch.cuda.Event | None = None
    packed: Tensor | None = None
    confidences: Tensor | None = None
    reports: tuple[Tensor | None, ...] = ()
    scores: Tensor | None = None
    scored: tuple[RowPlan, ...] = ()
    is_usual: bool = True


class DeviceRunner(Runner):
    """Runs planned steps on an accelerator; arguments beside `Runner`'s:

    max_sequences, max_blocks  most sequences of a step, and blocks of one
    graphs        record decode steps
    strict        raise where a step cannot be recorded
    varies        steps have budgets of drafts
    Steps with logits processors or under rejection sampling wait for the device as `Runner` does;
    so do those together with other ranks, unless all that ranks exchange goes by the device alone.
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
        *,
        max_sequences: int,
        max_blocks: int,
        graphs: bool,
        strict: bool = False,
        varies: bool = False,
    ) -> None:
        super().__init__(
            model, caches, layout, sampler, state, device, drafter, find_bad_weight, replay
        )
        num_slots = state.length.shape[0]
        self.graphs: GraphCache[tuple[Tensor, ...]] = GraphCache(graphs, strict)
        self._varies = varies
        self._form = layout_form(layout)
        self._most_tokens = max_blocks * layout.tokens_per_block
        self._least_bound = max(layout.tokens_per_block, 512)
        self._table = torch.zeros(num_slots, max_blocks, dtype=torch.int64, device=device)
        self._tabled: dict[int, Sequence[int]] = {}  # slot -> the table that the device has
        # What a recorded step reads of its plan: the budget, slots, most drafts of each.
        self._most_sequences = row_bucket(max_sequences)
        drafts = 0 if drafter is None else drafter.num_drafts
        block = 0 if drafter is None else drafter.model.config.dspark_block_size
        self._most_rows = max(
            row_bucket(self._most_sequences * (1 + drafts)), self._most_sequences * block
        )
        self._given = torch.zeros(4 + 2 * self._most_sequences, dtype=torch.int64, device=device)
        self._logits: Tensor | None = None  # of recorded steps whose draw is not recorded
        self._lengths = np.zeros(num_slots, dtype=np.int64)  # at most so many tokens
        self._generation = np.zeros(num_slots, dtype=np.int64)
        self._decoding = 0  # sequences of the last decode step
        self._late: deque[tuple[int, int, int]] = deque()  # corrections of these bounds
        self._endings = state.endings
        self._explaining = threading.Lock()

    @property
    def records(self) -> bool:
        """Whether decode steps are played from recordings."""
        return self.graphs.enabled

    # ---- the device's queue

    def launch(self, plan: StepPlan, masks: Callable[[], Masks | None]) -> Callable[[], StepResult]:
        """Enqueue a step; what comes back waits for it."""
        if self._must_wait(plan):
            result = self.run(plan, masks)
            self._count(plan, result)
            return lambda: result
        for admission in plan.admissions:
            self._admit(admission)
        if self._endings is not self.state.endings:  # it grew: recordings write to the old one
            self._endings = self.state.endings
            self.graphs.forget()
        with torch.inference_mode():
            begin = self._mark()
            self._prepare_caches(plan)
            self._meet(plan)
            if not plan.rows:
                self._idle(plan)
                empty = StepResult(plan.step_id, ())
                return lambda: empty
            if plan.kind is StepKind.DECODE:
                launched = self._decode(plan, masks)
            else:
                launched = self._prefill(plan, masks)
        launched.begin = begin
        return lambda: self._finish(launched)

    def _mark(self) -> torch.cuda.Event | None:
        """Mark this place of the device's queue, None where there is no queue."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def prepare(self) -> None:
        """Run and record usual steps, of padding, before any other: the largest first, which takes
        the most memory, and all smaller ones live in what it took. Kernels are compiled meanwhile,
        tiles of all sizes with them; what is left after `_PREPARE_S` is recorded when it comes.
        """
        if not self.graphs.enabled:
            return
        begin = time.perf_counter()
        with torch.inference_mode():
            for key in self._usual():
                for _ in range(2):
                    self._given.zero_()
                    self.graphs.run(key, functools.partial(self._whole, key, ()))
                if time.perf_counter() - begin > _PREPARE_S:
                    break

    def _usual(self) -> Iterator[StepKey]:
        """Yield the largest step, then numbers of sequences, powers of two first: with all drafts,
        and where drafts vary with none, and without making any.
        """
        drafts = 0 if self.drafter is None else self.drafter.num_drafts
        least = bound_bucket(1, self._least_bound, self._most_tokens)
        sizes = {row_bucket(n) for n in range(1, self._most_sequences + 1)}
        largest = max(sizes)
        bounds = [bound_bucket(self._most_tokens, self._least_bound, self._most_tokens), least]
        kinds = [(drafts, drafts > 0)]
        if drafts and self._varies:
            kinds += [(0, False), (0, True)]
        keys = [(largest, bounds[0], *kinds[0])]
        for size in sorted(sizes, key=lambda n: (n.bit_count() > 1 and n < largest, -n)):
            keys += [(size, least, *kind) for kind in kinds]
        for sequences, bound, each, proposes in dict.fromkeys(keys):
            yield StepKey(
                sequences,
                draft_bucket(sequences, sequences * each),
                bound,
                each > 0,
                each > 0 and self._varies,
                proposes,
                "greedy",
            )

    def _must_wait(self, plan: StepPlan) -> bool:
        if self._batches.share is not None and plan.kind is StepKind.PREFILL:
            return True
        if plan.together is not None and not self.model.flows:
            return True
        if self.drafter is not None and self.drafter.rejects:
            return True
        asked = any(a.params.processor_factories for a in plan.admissions)
        return asked or any(row.slot in self._history for row in plan.rows)

    def _begin(self, most_rows: int) -> None:
        """Say how many rows the fullest rank has: recorded steps hold the most there can be."""
        super()._begin(max(most_rows, self._most_rows) if self.model.flows else most_rows)

    def _admit(self, admission: Admission) -> None:
        super()._admit(admission)
        slot = admission.slot
        self._lengths[slot] = admission.length
        self._generation[slot] += 1
        self._tabled.pop(slot, None)

    def _count(self, plan: StepPlan, result: StepResult) -> None:
        """Take over the lengths that a step which was waited for left; other ranks' need none."""
        if self._follows:
            return
        for row, outcome in zip((r for r in plan.rows if r.reports), result.rows, strict=True):
            self._lengths[row.slot] += len(outcome.token_ids)

    def _catch_up(self) -> None:
        """Take over what is known of steps that have ended since."""
        while self._late:
            slot, generation, tokens = self._late.popleft()
            if self._generation[slot] == generation:
                self._lengths[slot] -= tokens

    def _charge(self, rows: Sequence[RowPlan]) -> tuple[tuple[int, int, int], ...]:
        """Count the most tokens that rows may add; return what was counted."""
        charged = []
        for row in rows:
            most = 1 + row.num_drafts
            self._lengths[row.slot] += most
            charged.append((row.slot, int(self._generation[row.slot]), most))
        return tuple(charged)

    def _take_tables(self, rows: Sequence[RowPlan]) -> None:
        """Bring over the block tables that changed."""
        changed = [row for row in rows if self._tabled.get(row.slot) is not row.blocks]
        if not changed:
            return
        width = max(len(row.blocks) for row in changed)
        tables = np.zeros((len(changed), width), dtype=np.int64)
        for at, row in enumerate(changed):
            tables[at, : len(row.blocks)] = row.blocks
            self._tabled[row.slot] = row.blocks
        put = Packer(self.device)
        slots, found = put(np.array([row.slot for row in changed], dtype=np.int64)), put(tables)
        put.flush()
        self._table[:, :width].index_copy_(0, slots, found)

    # ---- decode

    def _decode(self, plan: StepPlan, masks: Callable[[], Masks | None]) -> _Launched:
        """Launch a step in which every row continues from its slot."""
        rows = plan.rows
        self._decoding = len(rows)
        self._catch_up()
        self._take_tables(rows)
        asked = [row.num_drafts for row in rows]
        bound = max(int(self._lengths[row.slot]) + row.num_drafts for row in rows)
        names = sorted({row.slot for row in rows})
        drafts = sum(asked) if self.drafter is not None else 0
        budget = plan.draft_budget
        if budget is not None:
            drafts = min(drafts, budget)
        sequences = row_bucket(len(rows))
        key = StepKey(
            sequences,
            draft_bucket(sequences, drafts),
            bound_bucket(bound, self._least_bound, self._most_tokens),
            drafts > 0,
            drafts > 0 and budget is not None,
            self.drafter is not None and plan.propose,
            None if plan.needs_masks else self.sampler.plainness(names),
        )
        key = self.graphs.choose(key, self._wide(key))
        self._give(rows, asked, sum(asked) if budget is None else budget)
        launched = _Launched(plan, rows, self._charge(rows))
        if key.draws is not None:
            packed, *rest = self.graphs.run(key, lambda: self._whole(key, names))
            launched.is_usual = self.graphs.played or not self.graphs.enabled
            return self._send(launched, packed, rest[0] if rest else None, ())
        logits, *flat = self.graphs.run(key, lambda: self._kept(key))
        launched.is_usual = self.graphs.played or not self.graphs.enabled
        found = _unflatten(flat)
        allowed = None
        if plan.needs_masks:
            allowed = self._allowed(masks(), plan, found.step, key.rows)
        return self._send(launched, *self._draw_all(found, logits, names, allowed, key.propose))

    def _wide(self, key: StepKey) -> StepKey:
        """Return the key of steps like this that verify all drafts, which serves all budgets."""
        if self.drafter is None or not (key.drafted or key.propose):
            return key
        drafts = key.sequences * self.drafter.num_drafts
        return key._replace(
            rows=draft_bucket(key.sequences, drafts),
            drafted=True,
            budgeted=key.budgeted or self._varies,
        )

    def _give(self, rows: Sequence[RowPlan], asked: Sequence[int], budget: int) -> None:
        """Hand the device what it needs of a plan, in one copy."""
        pinned = self.device.type == "cuda"
        host = torch.zeros(self._given.shape[0], dtype=torch.int64, pin_memory=pinned)
        values = host.numpy()
        values[0] = budget
        values[4 : 4 + len(rows)] = [row.slot for row in rows]
        begin = 4 + self._most_sequences
        values[begin : begin + len(rows)] = asked
        self._given.copy_(host, non_blocking=True)

    def _forward(self, key: StepKey) -> tuple[Tensor, _Rows]:
        """Work out a step's rows and run the model on them; returns logits [T, V]."""
        state = self.state
        slots = self._given[4 : 4 + key.sequences]
        asked = valid = None
        if key.drafted:
            begin = 4 + self._most_sequences
            asked = self._given[begin : begin + key.sequences]
            if key.budgeted:
                live = state.alive[slots] & (slots > 0)
                held = torch.where(live, slots, 0)
                most = usable(state.tensors, live, held, asked)
                valid = split_budget(state.confidences[held], most, self._given[0])
        rows = spread(slots, state.tensors, key.rows, asked, valid)
        inputs = device_inputs(
            rows.row_slots,
            rows.places,
            state.length,
            state.last_token,
            state.drafts,
            self._table,
            self._form,
            key.most_tokens,
        )
        logits = self.model.forward(inputs, self.caches, None)
        return logits, _Rows(rows, inputs.positions + 1)

    def _whole(self, key: StepKey, names: Sequence[int]) -> tuple[Tensor, ...]:
        """A step from its slots to its packed outcome."""
        logits, rows = self._forward(key)
        packed, confidences, _ = self._draw_all(rows, logits, names, None, key.propose)
        return (packed,) if confidences is None else (packed, confidences)

    def _kept(self, key: StepKey) -> tuple[Tensor, ...]:
        """A step up to its logits, which lie where no other recording writes."""
        logits, rows = self._forward(key)
        if self.graphs.enabled:
            if self._logits is None or len(self._logits) < key.rows:
                self._logits = torch.empty_like(logits)
            self._logits[: key.rows].copy_(logits)
            logits = self._logits[: key.rows]
        return (logits, *_flatten(rows))

    def _allowed(
        self, masks: Masks | None, plan: StepPlan, step: StepRows, num_rows: int
    ) -> TokenMasks | None:
        """Bring grammar masks over; a draft that is not verified has no row."""
        if masks is None or not masks.rows:
            return None
        sampling = [idx for idx, row in enumerate(plan.rows) if row.samples]
        place = {idx: at for at, idx in enumerate(sampling)}
        put = Packer(self.device)
        owner = put(np.array([place[idx] for idx, _ in masks.rows], dtype=np.int64))
        draft = put(np.array([at for _, at in masks.rows], dtype=np.int64))
        put.flush()
        rows = torch.where(draft <= step.valid[owner], step.first[owner] + draft, num_rows)
        bits = torch.from_numpy(masks.bits.view(np.int32))
        if self.device.type == "cuda" and not bits.is_pinned():
            bits = bits.pin_memory()
        return rows, bits.to(self.device, non_blocking=True)

    # ---- prefill

    def _prefill(self, plan: StepPlan, masks: Callable[[], Masks | None]) -> _Launched:
        """Launch a step that fills from prompts: what runs is known to the host."""
        sequences: list[SequenceRows] = []
        drawn: list[int] = []
        scored: list[int] = []
        ends: list[int] = []
        end = 0
        for row in plan.rows:
            count = len(row.token_ids)
            scored += range(end, end + len(row.scored_ids))
            end += count
            ends.append(row.start + count)
            if row.samples:
                drawn.append(end - 1)
            # The plan's table covers what the sequence may reach, the model wants what it has.
            held = -(-(row.start + count) // self.layout.tokens_per_block)
            sequences.append(
                SequenceRows(
                    row.slot, row.start, row.token_ids, row.blocks[:held], row.floor, row.saves
                )
            )
        drawing = tuple(row for row in plan.rows if row.samples)
        put = Packer(self.device)
        logits_rows = put(np.array(drawn + scored, dtype=np.int64))
        slots = put(np.array([row.slot for row in drawing], dtype=np.int64))
        positions = put(
            np.array(
                [end for end, row in zip(ends, plan.rows, strict=True) if row.samples],
                dtype=np.int64,
            )
        )
        put.flush()
        inputs = build_inputs(sequences, False, self.layout, self.device, self.replay)
        logits = self.model.forward(inputs, self.caches, logits_rows)
        launched = _Launched(plan, drawing, self._charge(drawing))
        launched.scored = tuple(row for row in plan.rows if row.scored_ids)
        if scored:
            owners = [row.slot for row in launched.scored for _ in row.scored_ids]
            ids = [token for row in launched.scored for token in row.scored_ids]
            launched.scores = _bring(self.sampler.score(logits[len(drawn) :], owners, ids))
        if not drawing:
            if plan.together is not None:
                self._propose(plan, None)
            return self._send(launched, None, None, ())
        first = torch.arange(len(drawing), device=self.device)
        zero = torch.zeros_like(slots)
        live = torch.ones_like(slots, dtype=torch.bool)
        found = _Rows(StepRows(live, slots, zero, first, slots, zero), positions)
        allowed = None
        if plan.needs_masks:
            allowed = self._allowed(masks(), plan, found.step, len(drawing))
        names = sorted({row.slot for row in drawing})
        propose = self.drafter is not None and plan.propose
        if plan.together is None and self.graphs.enabled and self._decoding >= _MANY:
            propose = False  # the recorded step behind this one drafts for all in less time
        return self._send(
            launched, *self._draw_all(found, logits[: len(drawn)], names, allowed, propose)
        )

    # ---- what follows the logits

    def _draw_all(
        self,
        rows: _Rows,
        logits: Tensor,
        names: Sequence[int],
        allowed: TokenMasks | None,
        propose: bool,
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor | None, ...]]:
        """Draw, accept drafts, advance the slots, draft again.

        Returns the outcome [B, columns] int64, confidences of the new drafts [B, K] or None, and
        what was reported of each row, if anything.
        """
        step, state = rows.step, self.state.tensors
        sampled: Sampled = self.sampler.sample(
            logits, names, rows.positions, allowed, on_device=step.row_slots
        )
        columns = FIXED + 1 + 3 * state.drafts.shape[1]
        packed = torch.empty(len(step.held), columns, dtype=torch.int64, device=self.device)
        finish(state, step, sampled.token_ids, sampled.bad, packed)
        confidences = None
        if self.drafter is not None:
            drafts: tuple[Tensor | None, Tensor | None] = (None, None)
            if propose:
                drafts = self.drafter.draft(self.caches, step.held, names)
            temperatures = self.drafter.temperatures
            confidences = keep_drafts(state, step.held, *drafts, temperatures, packed)
        return packed, confidences, (sampled.logprobs, sampled.top_ids, sampled.top_logprobs)

    def _send(
        self,
        launched: _Launched,
        packed: Tensor | None,
        confidences: Tensor | None,
        reports: tuple[Tensor | None, ...],
    ) -> _Launched:
        """Start the copies to the host and mark their end."""
        launched.packed = _bring(packed)
        launched.confidences = _bring(confidences)
        launched.reports = tuple(_bring(part) for part in reports)
        launched.event = self._mark()
        return launched

    # ---- any thread

    def _finish(self, launched: _Launched) -> StepResult:
        """Wait for a step and read its outcome."""
        device_s = 0.0
        if launched.event is not None:
            launched.event.synchronize()
            if launched.begin is not None:
                device_s = launched.begin.elapsed_time(launched.event) * 1e-3
        plan = launched.plan
        if plan.together is not None:
            self.model.check()
        found: dict[int, RowResult] = {}
        if launched.packed is not None:
            found = self._read(launched, launched.packed.numpy())
        got = {slot: len(result.token_ids) for slot, result in found.items()}
        for slot, generation, most in launched.charged:
            self._late.append((slot, generation, most - got.get(slot, 0)))
        scores: dict[int, tuple[float, ...]] = {}
        if launched.scores is not None:
            values, begin = launched.scores.tolist(), 0
            for row in launched.scored:
                scores[row.slot] = tuple(values[begin : begin + len(row.scored_ids)])
                begin += len(row.scored_ids)
        results = []
        for row in plan.rows:
            if row.reports:
                result = found.get(row.slot) or RowResult(row.request_id, ())
                if row.scored_ids:
                    result = result._replace(prompt_logprobs=scores.get(row.slot))
                results.append(result)
        return StepResult(plan.step_id, tuple(results), device_s, launched.is_usual)

    def _read(self, launched: _Launched, packed: NDArray[Any]) -> dict[int, RowResult]:
        """Return slot -> outcome of the rows that drew."""
        drafts = self.state.drafts.shape[1]
        numbers = packed[:, :FIXED].tolist()
        emitted = packed[:, FIXED : FIXED + 1 + drafts].tolist()
        begin = FIXED + 1 + drafts
        before = packed[:, begin : begin + drafts].tolist()
        following = packed[:, begin + drafts : begin + 2 * drafts].tolist()
        told = None if launched.confidences is None else launched.confidences.tolist()
        logprobs, top_ids, top = (
            None if part is None else part.tolist() for part in launched.reports or (None,) * 3
        )
        drawn: dict[int, RowResult] = {}
        explained: str | None = None
        for at, row in enumerate(launched.drawing):
            accepted, failed, live, verified, proposed, start, last, first, valid = numbers[at]
            if not live:
                continue
            slot = row.slot
            if failed:
                if explained is None and launched.plan.together is not None:
                    explained = NOT_FINITE  # running rows again would need the other ranks
                if explained is None:
                    fed = row.token_ids or [last, *before[at][:verified]]
                    where = row.start if row.token_ids else start
                    sequence = SequenceRows(slot, where, fed, row.blocks)
                    with self._explaining:
                        explained = self.explain(sequence, launched.plan.kind)
                drawn[slot] = RowResult(row.request_id, (), error=explained)
                continue
            count = accepted + 1
            own = pairs = None
            params = self.sampler.params(slot)
            if logprobs is not None:
                own = tuple(logprobs[first : first + count]) if params.logprobs else None
                most = params.num_top_logprobs
                if top_ids is not None and top is not None and most:
                    pairs = tuple(
                        tuple(zip(top_ids[i][:most], top[i][:most], strict=True))
                        for i in range(first, first + count)
                    )
            own_ids = tuple(emitted[at][:count])
            if told is None:
                drawn[slot] = RowResult(row.request_id, own_ids, own, pairs)
                continue
            drawn[slot] = RowResult(
                row.request_id,
                own_ids,
                own,
                pairs,
                None,
                proposed,
                verified,
                accepted,
                tuple(following[at][:valid]),
                tuple(told[at][:valid]),
            )
        return drawn


def _bring(tensor: Tensor | None) -> Tensor | None:
    """Start copying a tensor to the host; it is there once the step's event has passed."""
    if tensor is None or tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _flatten(rows: _Rows) -> tuple[Tensor, ...]:
    return (*rows.step, rows.positions)


def _unflatten(parts: Sequence[Tensor]) -> _Rows:
    *step, positions = parts
    return _Rows(StepRows(*step), positions)
