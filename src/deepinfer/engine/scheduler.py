"""Scheduler: which sequences run in the next step, and what a step's outcome means for them.

Pure policy: no tensor, clock or queue; the same calls give the same plans. Requests are served in
order of arrival (`arrivals.py`); what they hold is kept in `holdings.py`, when prompts go first in
`pace.py`, what is told about them in `reports.py`. Steps may be planned before the outcome of the
last one is known: lengths are then known between two bounds, and what a step names is free for
others as soon as its sequence has ended, because steps run in the order they are planned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from deepinfer.cache.blocks import BlockPool
from deepinfer.cache.prefix import PrefixCache, PrefixHit
from deepinfer.cache.slots import SlotPool
from deepinfer.engine.arrivals import Arrivals, Deadlines
from deepinfer.engine.commit import Gate, commit
from deepinfer.engine.holdings import Holdings
from deepinfer.engine.limits import Limits
from deepinfer.engine.masks import Constrained, FillRows, MaskBuffer, build_masks, fill_each
from deepinfer.engine.pace import Pace
from deepinfer.engine.plan import (
    FROM_SLOT,
    Admission,
    Masks,
    RowPlan,
    SlotCopy,
    StateLoad,
    StepKind,
    StepPlan,
    StepResult,
)
from deepinfer.engine.reports import Reports
from deepinfer.engine.request import Chunk, Completion, DraftOutcome, FinishReason, Request
from deepinfer.engine.sequence import Sequence
from deepinfer.engine.snapshot import State
from deepinfer.engine.speculation import Choice
from deepinfer.engine.text import TextStream

__all__ = ["Limits", "Planner", "Scheduler"]

_MAX_PREEMPTIONS = 3
_MAX_FAILURES = 2


class Planner(Protocol):
    """Chooses how many drafts a decode step verifies; `engine/speculation.py` is it."""

    is_drafting: bool

    def choose(self, confidences: list[tuple[float, ...]], /) -> Choice:
        """Decide from the confidences last reported for each row."""
        ...

    def count(self, rows: list[tuple[DraftOutcome, tuple[float, ...]]], /) -> None:
        """Take the outcomes of a step's rows, with the confidences of their drafts."""
        ...

    def observe(self, rows: int, sequences: int, proposed: bool, seconds: float) -> None:
        """Take the time of a step that ran so many rows, and drafted or not."""
        ...

    def summary(self) -> dict[str, object]:
        """Return its state and counts, ready for JSON."""
        ...


@dataclass(frozen=True, slots=True)
class _Launched:
    """A plan in flight and the records of its rows."""

    plan: StepPlan
    sequences: list[Sequence]


class Scheduler:
    """Admits, chunks, extends and finishes sequences: `add`, `cancel`, `schedule`, `apply`.

    Sequences move from `waiting` (nothing held) to `prefilling` (slot and blocks held, prompt
    partly planned) to `running` (one row a step), may be put back to the front of `waiting`, and
    leave from anywhere. `num_generated` counts tokens generated so far.
    """

    def __init__(
        self,
        limits: Limits,
        blocks: BlockPool,
        slots: SlotPool,
        tokens_per_block: int,
        prefix: PrefixCache | None = None,
        planner: Planner | None = None,
        fill_rows: FillRows = fill_each,
        mask_buffer: MaskBuffer | None = None,
    ) -> None:
        self.limits = limits
        self._fill_rows = fill_rows
        self._mask_buffer = mask_buffer or MaskBuffer()
        self._planner = planner
        self._holdings = Holdings(limits, blocks, slots, tokens_per_block, prefix)
        self._pace = Pace(limits)
        self._reports = Reports()
        self._deadlines = Deadlines()
        self._sequences: dict[int, Sequence] = {}
        self._waiting = Arrivals()
        self._prefilling: dict[int, Sequence] = {}
        self._running: dict[int, Sequence] = {}
        self._in_flight: deque[_Launched] = deque()
        self._step_id = 0
        self._num_added = 0
        self._num_constrained = 0
        self.num_generated = 0
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished or any step is in flight."""
        return bool(self._sequences) or bool(self._in_flight)

    @property
    def has_requests(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._sequences)

    @property
    def num_waiting(self) -> int:
        """Requests not admitted yet."""
        return len(self._waiting) + self._waiting.num_gated

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._prefilling) + len(self._running)

    @property
    def wants_prefill(self) -> bool:
        """Whether the next step would fill from prompts."""
        return self._wants_prefill()

    @property
    def can_decode(self) -> bool:
        """Whether there is anything to extend."""
        return bool(self._running)

    @property
    def prefill_wait_steps(self) -> int:
        """Steps that admissible waiting work has sat through."""
        return self._pace.prefill_wait_steps

    @property
    def num_in_flight(self) -> int:
        """Steps planned and not applied."""
        return len(self._in_flight)

    @property
    def num_blocks_used(self) -> int:
        """Blocks held by sequences or by the prefix cache."""
        return self._holdings.num_blocks_used

    @property
    def num_blocks(self) -> int:
        """Blocks that can ever be in use at once."""
        return self._holdings.num_blocks

    def speculation(self) -> dict[str, object] | None:
        """Return the planner's state and counts, None without drafts."""
        return None if self._planner is None else self._planner.summary()

    def prefix_counts(self) -> dict[str, int] | None:
        """Return what the reuse of prefixes has brought, None without it."""
        return self._holdings.prefix_counts()

    def live(self, request_id: int) -> Sequence | None:
        """Return the record of an unfinished request."""
        return self._sequences.get(request_id)

    def add(
        self,
        request: Request,
        text: TextStream | None = None,
        now_s: float = 0.0,
        gate: Gate | None = None,
        state: State | None = None,
    ) -> Completion | None:
        """Queue a request; return its completion at once when it can never run.

        text   follows the request's tokens; needed for stop strings and streamed text
        gate   what it waits for before it is queued
        state  a saved request that goes on: the same prompt and parameters
        """
        request_id = request.request_id
        assert request_id not in self._sequences, request_id
        limits = self.limits
        sequence = Sequence(
            request,
            text,
            order=self._num_added,
            eos_token_id=limits.eos_token_id,
            max_model_len=limits.max_model_len,
        )
        if state is not None:
            sequence.go_on_from(state)
        self._num_added += 1
        problem = self._holdings.never_fits(request)
        if problem is not None:
            sequence.finish(FinishReason.PROMPT_LENGTH_EXCEEDED, now_s, problem)
            return self._reports.end(sequence)
        self._sequences[request_id] = sequence
        if request.params.timeout_s is not None:
            self._deadlines.add(request.arrival_s + request.params.timeout_s, request_id)
        if gate is not None:
            self._waiting.gate(sequence, gate)
        else:
            self._waiting.put(sequence)
        return None

    def cancel(self, request_id: int, now_s: float = 0.0) -> Completion | None:
        """End a request wherever it is, with what it has generated; return None when it is not
        live.

        Tokens of steps in flight are dropped.
        """
        return self._end(request_id, FinishReason.ABORT, now_s)

    def preempt(self, request_id: int) -> bool:
        """Put an admitted sequence back to the front of the queue; return whether it was admitted.

        What it computed is lost, its tokens stay; tokens of steps in flight are dropped and drawn
        again.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None or not sequence.slot:
            return False
        self._put_back(sequence)
        return True

    def schedule(self, now_s: float = 0.0, only: StepKind | None = None) -> StepPlan | None:
        """Plan the next step; None when nothing can run before a step in flight is applied or a
        gate opens.

        only  the kind that ranks have agreed on; then None also when there is nothing of it

        Requests whose deadline has passed end first; `take_completions` returns them.
        """
        for request_id in self._deadlines.passed(now_s):
            told = "the request took longer than its timeout_s"
            completion = self._end(request_id, FinishReason.TIMEOUT, now_s, told)
            if completion is not None:
                self._reports.keep(completion)
        for request_id, told in self._waiting.open_gates():
            reason = FinishReason.STRUCTURED_OUTPUT_ERROR
            completion = self._end(request_id, reason, now_s, told)
            assert completion is not None, request_id
            self._reports.keep(completion)
        plan: StepPlan | None = None
        if self._wants_prefill() if only is None else only is StepKind.PREFILL:
            plan = self._plan_prefill()
        if plan is None and self._running and only is not StepKind.PREFILL:
            plan = self._plan_decode(now_s)
            if plan is None and only is None and self._can_prefill():  # a growing one was put back
                plan = self._plan_prefill()
        if plan is None and only is not None:
            waits = only is StepKind.DECODE and self._can_prefill()
            self._pace.planned(None, can_prefill=waits, can_decode=False)
            return None
        if plan is None:
            assert self._in_flight or self._waiting.num_gated == len(self._sequences), (
                "work is left but nothing can run"
            )
            return None
        can_prefill = plan.kind is StepKind.DECODE and self._can_prefill()
        self._pace.planned(plan.kind, can_prefill=can_prefill, can_decode=bool(self._running))
        self._step_id += 1
        return plan

    def apply(self, result: StepResult, now_s: float = 0.0) -> list[Completion]:
        """Take a step's outcome: extend sequences, finish those that stop, free what they held."""
        launched = self._in_flight.popleft()
        plan = launched.plan
        assert plan.step_id == result.step_id, (plan.step_id, result.step_id)
        outcomes = iter(result.rows)
        completions: list[Completion] = []
        generated = ran = 0
        counted: list[tuple[DraftOutcome, tuple[float, ...]]] = []
        for row, sequence in zip(plan.rows, launched.sequences, strict=True):
            outcome = next(outcomes) if row.samples or row.scored_ids else None
            sequence.in_flight -= 1
            if sequence.stale:  # launched before it was put back
                sequence.stale -= 1
                self._holdings.drop_saves(row)
                continue
            if sequence.finish_reason is not None:
                self._holdings.drop_saves(row)
                continue
            if outcome is None:
                sequence.ahead_tokens -= len(row.token_ids)
                sequence.num_computed += len(row.token_ids)
                self._holdings.learn(sequence, row)
                continue
            assert outcome.request_id == row.request_id, (outcome.request_id, row.request_id)
            if row.token_ids:
                sequence.num_computed += len(row.token_ids)
                sequence.ahead_tokens -= len(row.token_ids)
                if outcome.error is None:
                    self._holdings.learn(sequence, row)
                else:
                    self._holdings.drop_saves(row)
            else:
                sequence.num_computed += len(outcome.token_ids)
                sequence.ahead_tokens -= 1 + row.num_drafts
            if outcome.prompt_logprobs is not None:
                _add_prompt_logprobs(sequence, row.start, outcome.prompt_logprobs)
            if not row.samples and outcome.error is None:
                continue
            sequence.ahead_draws -= row.samples
            if outcome.error is not None:
                sequence.finish(FinishReason.NUMERICAL, now_s, outcome.error)
            else:
                assert outcome.token_ids, (row.request_id, "a live sequence drew nothing")
                before = sequence.confidences
                sequence.drafts, sequence.confidences = outcome.drafts, outcome.confidences
                kept = commit(sequence, outcome, now_s)
                generated += kept
                sequence.num_steps += 1
                if self._planner is not None and not row.token_ids:
                    accepted = min(outcome.num_accepted, kept)
                    counts = (outcome.num_proposed, outcome.num_verified, accepted, kept)
                    sequence.outcomes[counts] = sequence.outcomes.get(counts, 0) + 1
                    ran += 1 + outcome.num_verified
                    counted.append((counts, before))
            if sequence.is_finished():
                self._retire(sequence)
                completions.append(self._reports.end(sequence))
            elif sequence.request.streams:
                self._reports.progress(sequence)
        assert next(outcomes, None) is None, "more outcomes than reporting rows"
        self.num_generated += generated
        if counted and self._planner is not None:
            self._planner.count(counted)
            spent_s = result.device_s if result.is_usual else 0.0
            self._planner.observe(ran, len(plan.rows), plan.propose, spent_s)
        self._pace.went_well(plan.kind)
        return completions

    def abandon(
        self, error: str, now_s: float = 0.0, *, retry: bool = False, smaller: bool = False
    ) -> list[Completion]:
        """Give up the steps in flight after a failure; return the requests that ended by it.

        Their cache contents are in an unknown state; other requests are untouched.

        retry    requests that failed in company are put back and tried again alone, each once;
                 otherwise all that the steps name end with `abort`
        smaller  prefill steps take half as much for a while; what failed in one may try again
                 until they cannot shrink
        """
        failed: list[Sequence] = []
        if self._in_flight:
            failed = self._in_flight[0].sequences
            smaller = smaller and self._pace.budget > 1
            smaller = smaller and self._in_flight[0].plan.kind is StepKind.PREFILL
        named = {s.order: s for launched in self._in_flight for s in launched.sequences}
        for launched in self._in_flight:
            for row in launched.plan.rows:
                self._holdings.drop_saves(row)
        self._in_flight.clear()
        if smaller:
            self._pace.shrink()
        completions = []
        for _, sequence in sorted(named.items(), reverse=True):
            sequence.in_flight = sequence.stale = 0
            if sequence.is_finished():
                continue
            if sequence in failed and not smaller:
                sequence.num_failures += 1 if len(failed) > 1 else _MAX_FAILURES
            if retry and sequence.num_failures < _MAX_FAILURES:
                if sequence.slot:
                    self._put_back(sequence)
                continue
            sequence.finish(
                FinishReason.ENGINE_ERROR if retry else FinishReason.ABORT, now_s, error
            )
            self._retire(sequence)
            completions.append(self._reports.end(sequence))
        return completions[::-1]

    def fill_masks(self, plan: StepPlan) -> Masks:
        """Return what the grammars allow in the steps of a plan, as far as they have come.

        Due after the outcome of every earlier step is applied.
        """
        found: list[Constrained] = []
        for idx, row in enumerate(plan.rows):
            sequence = self._sequences.get(row.request_id)
            if sequence is None or sequence.matcher is None or not row.samples or sequence.stale:
                continue
            found.append(Constrained(idx, sequence.matcher, sequence.drafts[: row.num_drafts]))
        return build_masks(found, self.limits.vocab_size, self._fill_rows, self._mask_buffer)

    def take_chunks(self) -> list[Chunk]:
        """Return what streamed requests gained since the last call."""
        return self._reports.take_chunks()

    def take_completions(self) -> list[Completion]:
        """Return requests that ended while a step was planned, since the last call."""
        return self._reports.take_completions()

    def _end(
        self, request_id: int, reason: FinishReason, now_s: float, error: str | None = None
    ) -> Completion | None:
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        sequence.finish(reason, now_s, error)
        self._retire(sequence)
        return self._reports.end(sequence)

    def _can_admit(self, sequence: Sequence) -> bool:
        admitted = chain(self._prefilling.values(), self._running.values())
        return self._holdings.can_admit(sequence, admitted, self.num_running)

    def _can_prefill(self) -> bool:
        if self._prefilling:
            return True
        head = self._waiting.head
        return head is not None and self._can_admit(head)

    def _wants_prefill(self) -> bool:
        return self._can_prefill() and self._pace.wants_prefill(
            num_prefilling=len(self._prefilling),
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            waiting_tokens=self._waiting.num_tokens,
        )

    def _prefill_order(self) -> Iterator[Sequence]:
        yield from list(self._prefilling.values())
        while (head := self._waiting.head) is not None:
            yield head  # whoever takes it admits it, or takes no more

    def _plan_prefill(self) -> StepPlan | None:
        rows: list[RowPlan] = []
        sequences: list[Sequence] = []
        admissions: list[Admission] = []
        restores: list[SlotCopy] = []
        loads: list[StateLoad] = []
        budget = self._pace.budget
        for sequence in self._prefill_order():
            suspect = sequence.num_failures > 0
            if suspect and rows:
                break
            is_new = sequence.slot == 0
            if is_new and not self._can_admit(sequence):
                break
            hit = self._holdings.look(sequence) if is_new else None
            if sequence.saved is not None:
                sequence.num_computed = sequence.saved.num_computed
            elif hit is not None:
                sequence.num_computed = hit.num_tokens
            count = self._pace.chunk(sequence, budget)
            if count == 0:
                sequence.num_computed = 0 if is_new else sequence.num_computed
                break
            if is_new:
                admissions.append(self._admit(sequence, hit))
                if hit is not None:
                    restores.append(SlotCopy(hit.checkpoint, sequence.slot))
            if sequence.saved is not None:
                loads.append(self._holdings.load(sequence))
            budget -= count
            begin, end = sequence.num_scheduled, sequence.num_scheduled + count
            samples = count == sequence.num_remaining
            rows.append(
                RowPlan(
                    request_id=sequence.request.request_id,
                    slot=sequence.slot,
                    start=begin,
                    token_ids=sequence.token_ids[begin:end],
                    blocks=sequence.blocks[: self._holdings.blocks_of(end)],
                    samples=samples,
                    scored_ids=_scored_ids(sequence, begin, end),
                    floor=self._holdings.floor(sequence),
                    saves=self._holdings.reserve_saves(sequence, begin, end),
                )
            )
            sequences.append(sequence)
            sequence.ahead_tokens += count
            if suspect or not samples:
                if samples:
                    self._start_running(sequence)
                break
            self._start_running(sequence)
        if not rows:
            return None
        masked = any(r.samples and s.matcher for r, s in zip(rows, sequences, strict=True))
        return self._launch(
            StepPlan(
                self._step_id,
                StepKind.PREFILL,
                tuple(rows),
                tuple(admissions),
                masked,
                propose=self._planner is None or self._planner.is_drafting,
                restores=tuple(restores),
                loads=tuple(loads),
            ),
            sequences,
        )

    def _start_running(self, sequence: Sequence) -> None:
        """Move a sequence on whose last chunk is planned: it draws its next token."""
        sequence.ahead_draws += 1
        request_id = sequence.request.request_id
        self._prefilling.pop(request_id, None)
        self._running[request_id] = sequence
        self._num_constrained += sequence.matcher is not None

    def _launch(self, plan: StepPlan, sequences: list[Sequence]) -> StepPlan:
        for sequence in sequences:
            sequence.in_flight += 1
        self._in_flight.append(_Launched(plan, sequences))
        return plan

    def _admit(self, sequence: Sequence, hit: PrefixHit | None) -> Admission:
        request = sequence.request
        self._waiting.leave(sequence)
        self._holdings.admit(sequence, hit)
        self._prefilling[request.request_id] = sequence
        return Admission(
            sequence.slot,
            sequence.num_prompt_tokens,
            request.params,
            request.seed,
            sequence.limit,
            tuple(sequence.ending_ids),
            len(sequence.token_ids),
            tuple(sequence.token_ids) if request.params.processor_factories else (),
        )

    def _plan_decode(self, now_s: float) -> StepPlan | None:
        ready = [s for s in self._running.values() if len(s.token_ids) + s.ahead_draws < s.limit]
        choice = Choice(0, None, False)
        if self._planner is not None:
            choice = self._planner.choose([s.confidences for s in ready])
        most = choice.num_drafts
        if not self.limits.reserve:
            ready = self._grow(ready, most, now_s)
        if not ready:
            return None
        rows = []
        for sequence in ready:
            num_drafts = 0
            if most:
                room = sequence.limit - len(sequence.token_ids) - sequence.ahead_draws
                num_drafts = min(most, room - 1)
            row = sequence.decode_row
            if row is None or row.num_drafts != num_drafts or row.blocks is not sequence.blocks:
                row = RowPlan(
                    sequence.request.request_id,
                    sequence.slot,
                    FROM_SLOT,
                    (),
                    sequence.blocks,
                    True,
                    num_drafts,
                )
                sequence.decode_row = row
            rows.append(row)
            sequence.ahead_tokens += 1 + num_drafts
            sequence.ahead_draws += 1
            sequence.in_flight += 1
        masked = self._num_constrained > 0 and any(s.matcher is not None for s in ready)
        plan = StepPlan(
            self._step_id,
            StepKind.DECODE,
            tuple(rows),
            (),
            masked,
            choice.budget,
            choice.propose,
        )
        self._in_flight.append(_Launched(plan, ready))
        return plan

    def _grow(self, ready: list[Sequence], num_drafts: int, now_s: float) -> list[Sequence]:
        """Add the blocks that a step may need, putting back the latest arrivals when short."""
        while not self._holdings.grow(ready, 1 + num_drafts):
            victim = max(
                (*self._running.values(), *self._prefilling.values()), key=lambda s: s.order
            )
            ready = [s for s in ready if s is not victim]
            if victim.num_preemptions >= _MAX_PREEMPTIONS:
                told = (
                    f"put back {victim.num_preemptions} times for want of cache blocks: raise "
                    "cache.memory_bytes or lower scheduling.max_num_seqs"
                )
                completion = self._end(
                    victim.request.request_id,
                    FinishReason.INSUFFICIENT_SYSTEM_RESOURCE,
                    now_s,
                    told,
                )
                assert completion is not None, victim.request.request_id
                self._reports.keep(completion)
            else:
                self._put_back(victim)
        return ready

    def _put_back(self, sequence: Sequence) -> None:
        """Free what an admitted sequence holds and let it wait in front."""
        self._free(sequence)
        sequence.put_back()
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.put(sequence)

    def _free(self, sequence: Sequence) -> None:
        """Take a sequence out of the running ones. Whatever gets its slot and blocks runs later
        than all steps that name them.
        """
        request_id = sequence.request.request_id
        self._prefilling.pop(request_id, None)
        if self._running.pop(request_id, None) is not None:
            self._num_constrained -= sequence.matcher is not None
        self._holdings.give_back(sequence)

    def _retire(self, sequence: Sequence) -> None:
        """Forget a finished sequence and free what it holds."""
        self._waiting.leave(sequence)
        self._free(sequence)
        del self._sequences[sequence.request.request_id]


def _add_prompt_logprobs(sequence: Sequence, start: int, values: tuple[float, ...]) -> None:
    """Take the logprobs of the prompt's tokens start + 1, start + 2, ..., if they are new."""
    assert sequence.prompt_logprobs is not None, sequence.request.request_id
    sequence.prompt_logprobs.extend(values[len(sequence.prompt_logprobs) - start :])


def _scored_ids(sequence: Sequence, begin: int, end: int) -> list[int]:
    """Return the prompt tokens that rows begin..end-1 predict, when their logprobs are asked."""
    if not sequence.request.params.prompt_logprobs:
        return []
    return sequence.token_ids[begin + 1 : min(end + 1, sequence.num_prompt_tokens)]
