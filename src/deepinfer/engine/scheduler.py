"""Scheduler: which sequences run in the next step, and what a step's outcome means for them.

Pure policy: no tensor, clock or queue; the same calls give the same plans. It owns the BlockPool
and SlotPool it is given. Requests are served in order of arrival. A request is admitted when a slot
and all the blocks it can ever need are free, so nothing admitted is ever put back
(`numerics.batch_invariant` demands that, and the first form has no preemption).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from deepinfer.cache.blocks import BlockPool
from deepinfer.cache.slots import SlotPool
from deepinfer.engine.plan import Admission, RowPlan, StepKind, StepPlan, StepResult
from deepinfer.engine.request import Chunk, Completion, FinishReason, Request
from deepinfer.engine.sequence import Sequence
from deepinfer.engine.text import TextStream

__all__ = ["Limits", "Scheduler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The numbers a Scheduler keeps to.

    max_num_seqs            running sequences at once
    max_num_batched_tokens  tokens of one prefill step
    max_model_len           most tokens of prompt plus output; a prompt of exactly this length still
                            yields one token
    chunk_tokens            tokens of one prompt chunk. With `fixed_chunks` boundaries are multiples
                            of it from position 0, whatever else runs; otherwise a chunk also
                            shrinks to the budget that is left
    prefill_gain            prefill once new sequences would enlarge the running batch by this share
    max_prefill_wait_steps  most decode steps that admissible waiting work sits through
    max_decode_wait_steps   most prefill steps in a row while something is ready to decode
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    chunk_tokens: int
    eos_token_id: int
    fixed_chunks: bool = True
    prefill_gain: float = 0.1
    max_prefill_wait_steps: int = 100
    max_decode_wait_steps: int = 8

    def __post_init__(self) -> None:
        """Check what every caller relies on."""
        assert 1 <= self.chunk_tokens <= self.max_num_batched_tokens, self
        assert self.max_num_seqs >= 1 and self.max_model_len >= 1, self
        assert self.max_prefill_wait_steps >= 1 and self.max_decode_wait_steps >= 1, self


class Scheduler:
    """Admits, chunks, extends and finishes sequences: `add`, `cancel`, `schedule`, `apply`.

    Sequences move from `waiting` (nothing held) to `prefilling` (slot and blocks held, prompt
    partly computed) to `running` (one token a step), and leave from anywhere. `num_generated`
    counts tokens generated so far. One that a launched step names is retired only when that step is
    applied.
    """

    def __init__(
        self, limits: Limits, blocks: BlockPool, slots: SlotPool, tokens_per_block: int
    ) -> None:
        self.limits = limits
        self._blocks = blocks
        self._slots = slots
        self._tokens_per_block = tokens_per_block
        self._sequences: dict[int, Sequence] = {}
        self._waiting: OrderedDict[int, Sequence] = OrderedDict()
        self._waiting_tokens = 0
        self._prefilling: dict[int, Sequence] = {}
        self._running: dict[int, Sequence] = {}
        self._in_flight: deque[StepPlan] = deque()
        self._chunks: list[Chunk] = []
        self._step_id = 0
        self.num_generated = 0
        self._prefill_wait_steps = 0
        self._decode_wait_steps = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._sequences)

    @property
    def num_waiting(self) -> int:
        """Requests not admitted yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._prefilling) + len(self._running)

    def add(
        self, request: Request, text: TextStream | None = None, now_s: float = 0.0
    ) -> Completion | None:
        """Queue a request; return its completion at once when it can never run.

        text  follows the request's tokens; needed for stop strings and streamed text
        """
        assert request.request_id not in self._sequences, request.request_id
        sequence = Sequence(request, text)
        problem = self._never_fits(request)
        if problem is not None:
            sequence.finish(FinishReason.PROMPT_LENGTH_EXCEEDED, now_s, problem)
            return self._report(sequence)
        self._sequences[request.request_id] = sequence
        self._waiting[request.request_id] = sequence
        self._waiting_tokens += sequence.num_remaining
        return None

    def cancel(self, request_id: int, now_s: float = 0.0) -> Completion | None:
        """End a request wherever it is, with what it has generated; return None when it is not
        live.

        Tokens of a step in flight are dropped, and what the request holds is freed when that step
        is applied.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.is_finished():
            return None
        sequence.finish(FinishReason.ABORT, now_s)
        self._retire(sequence)
        return self._report(sequence)

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None when there is nothing to run."""
        assert not self._in_flight, "the plain scheduler plans a step after the last one is applied"
        plan: StepPlan | None = None
        if self._wants_prefill():
            plan = self._plan_prefill()
        if plan is None and self._running:
            plan = self._plan_decode()
        if plan is None:
            assert not self._sequences, "work is left but nothing can run"
            return None
        if plan.kind is StepKind.PREFILL:
            self._prefill_wait_steps = 0
            self._decode_wait_steps = self._decode_wait_steps + 1 if self._running else 0
        else:
            self._prefill_wait_steps = self._prefill_wait_steps + 1 if self._can_prefill() else 0
            self._decode_wait_steps = 0
        self._step_id += 1
        self._in_flight.append(plan)
        for row in plan.rows:
            self._sequences[row.request_id].in_flight += 1
        return plan

    def apply(self, result: StepResult, now_s: float = 0.0) -> list[Completion]:
        """Take a step's outcome: extend sequences, finish those that stop, free what they held."""
        plan = self._in_flight.popleft()
        assert plan.step_id == result.step_id, (plan.step_id, result.step_id)
        outcomes = iter(result.rows)
        completions: list[Completion] = []
        for row in plan.rows:
            sequence = self._sequences[row.request_id]
            outcome = next(outcomes) if row.samples else None
            sequence.in_flight -= 1
            if sequence.is_finished():  # cancelled while the step ran
                self._retire(sequence)
                continue
            sequence.num_computed += len(row.token_ids)
            if outcome is None:
                continue
            assert outcome.request_id == row.request_id, (outcome.request_id, row.request_id)
            if outcome.error is not None:
                sequence.finish(FinishReason.NUMERICAL, now_s, outcome.error)
            else:
                limits = self.limits
                before = len(sequence.token_ids)
                sequence.extend(outcome, limits.eos_token_id, limits.max_model_len, now_s)
                self.num_generated += len(sequence.token_ids) - before
            if sequence.is_finished():
                self._retire(sequence)
                completions.append(self._report(sequence))
                continue
            self._prefilling.pop(row.request_id, None)
            self._running[row.request_id] = sequence
            if sequence.request.streams:
                self._report_progress(sequence, None)
        assert next(outcomes, None) is None, "more outcomes than sampling rows"
        return completions

    def abandon(self, error: str, now_s: float = 0.0) -> list[Completion]:
        """Give up the steps in flight after a failed launch: end every request they name.

        Their cache contents are in an unknown state; other requests are untouched.
        """
        completions = []
        while self._in_flight:
            for row in self._in_flight.popleft().rows:
                sequence = self._sequences[row.request_id]
                sequence.in_flight -= 1
                if not sequence.is_finished():
                    sequence.finish(FinishReason.ABORT, now_s, error)
                    completions.append(self._report(sequence))
                self._retire(sequence)
        return completions

    def take_chunks(self) -> list[Chunk]:
        """Return what streamed requests gained since the last call."""
        chunks, self._chunks = self._chunks, []
        return chunks

    def _blocks_needed(self, request: Request) -> int:
        most = min(
            len(request.prompt_token_ids) + request.params.max_tokens, self.limits.max_model_len
        )
        return -(-most // self._tokens_per_block)

    def _never_fits(self, request: Request) -> str | None:
        length = len(request.prompt_token_ids)
        if length > self.limits.max_model_len:
            return (
                f"the prompt has {length} tokens, the limit is {self.limits.max_model_len}: "
                "shorten it, or raise scheduling.max_model_len, or the cache.num_blocks that it "
                "follows"
            )
        needed = self._blocks_needed(request)
        if needed > self._blocks.capacity:
            room = self._blocks.capacity * self._tokens_per_block
            return (
                "prompt and max_tokens together need room for "
                f"{needed * self._tokens_per_block} tokens, the caches hold {room}: "
                "lower max_tokens or raise cache.memory_bytes"
            )
        return None

    def _can_admit(self, sequence: Sequence) -> bool:
        return (
            self.num_running < self.limits.max_num_seqs
            and self._slots.num_free > 0
            and self._blocks.num_free >= self._blocks_needed(sequence.request)
        )

    def _can_prefill(self) -> bool:
        if self._prefilling:
            return True
        head = next(iter(self._waiting.values()), None)
        return head is not None and self._can_admit(head)

    def _wants_prefill(self) -> bool:
        limits = self.limits
        if not self._can_prefill():
            return False
        if not self._running:
            return True
        if self._decode_wait_steps >= limits.max_decode_wait_steps:
            return False
        if self._prefilling or self._prefill_wait_steps >= limits.max_prefill_wait_steps:
            return True
        gain = min(limits.max_num_seqs - self.num_running, len(self._waiting))
        if gain >= limits.prefill_gain * len(self._running):
            return True
        return self._waiting_tokens >= 0.5 * limits.max_num_batched_tokens

    def _prefill_order(self) -> Iterator[Sequence]:
        yield from list(self._prefilling.values())
        while self._waiting:  # whoever takes the head admits it, or takes no more
            yield next(iter(self._waiting.values()))

    def _plan_prefill(self) -> StepPlan | None:
        rows: list[RowPlan] = []
        admissions: list[Admission] = []
        budget = self.limits.max_num_batched_tokens
        for sequence in self._prefill_order():
            is_new = sequence.slot == 0
            if is_new and not self._can_admit(sequence):
                break
            count = self._chunk(sequence, budget)
            if count == 0:
                break
            if is_new:
                admissions.append(self._admit(sequence))
            budget -= count
            begin, end = sequence.num_computed, sequence.num_computed + count
            samples = count == sequence.num_remaining
            rows.append(
                RowPlan(
                    request_id=sequence.request.request_id,
                    slot=sequence.slot,
                    start=begin,
                    token_ids=sequence.token_ids[begin:end],
                    blocks=self._table(sequence, end),
                    samples=samples,
                )
            )
            if not samples:
                break
        if not rows:
            return None
        return StepPlan(self._step_id, StepKind.PREFILL, tuple(rows), tuple(admissions))

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """Tokens of the next chunk, 0 to wait for a later step."""
        size = self.limits.chunk_tokens
        wanted = min(sequence.num_remaining, size - sequence.num_computed % size)
        if self.limits.fixed_chunks:
            return wanted if wanted <= budget else 0
        return min(sequence.num_remaining, size, budget)

    def _admit(self, sequence: Sequence) -> Admission:
        request = sequence.request
        sequence.slot = self._slots.acquire()
        sequence.blocks = tuple(self._blocks.allocate(self._blocks_needed(request)))
        self._leave_waiting(request.request_id)
        self._prefilling[request.request_id] = sequence
        return Admission(sequence.slot, sequence.num_prompt_tokens, request.params, request.seed)

    def _leave_waiting(self, request_id: int) -> None:
        sequence = self._waiting.pop(request_id, None)
        if sequence is not None:
            self._waiting_tokens -= sequence.num_remaining

    def _plan_decode(self) -> StepPlan:
        rows = tuple(
            RowPlan(
                request_id=request_id,
                slot=sequence.slot,
                start=sequence.num_computed,
                token_ids=sequence.token_ids[sequence.num_computed :],
                blocks=self._table(sequence, len(sequence.token_ids)),
                samples=True,
            )
            for request_id, sequence in self._running.items()
        )
        return StepPlan(self._step_id, StepKind.DECODE, rows)

    def _table(self, sequence: Sequence, end: int) -> tuple[int, ...]:
        """Return the blocks of positions 0..end-1; the sequence holds those of its future too."""
        return sequence.blocks[: -(-end // self._tokens_per_block)]

    def _retire(self, sequence: Sequence) -> None:
        """Forget a finished sequence and free what it holds, once no step in flight names it."""
        request_id = sequence.request.request_id
        self._leave_waiting(request_id)
        self._prefilling.pop(request_id, None)
        self._running.pop(request_id, None)
        if sequence.in_flight:
            return
        self._blocks.release(sequence.blocks)
        if sequence.slot:
            self._slots.release(sequence.slot)
        sequence.blocks, sequence.slot = (), 0
        del self._sequences[request_id]

    def _report(self, sequence: Sequence) -> Completion:
        completion = sequence.completion()
        if sequence.request.streams:
            self._report_progress(sequence, completion)
        return completion

    def _report_progress(self, sequence: Sequence, completion: Completion | None) -> None:
        begin = sequence.num_prompt_tokens + sequence.num_reported
        new_ids = tuple(sequence.token_ids[begin:])
        sequence.num_reported += len(new_ids)
        text = sequence.text.take() if sequence.text is not None else ""
        if new_ids or text or completion is not None:
            request = sequence.request
            self._chunks.append(
                Chunk(
                    index=request.index,
                    request_id=request.request_id,
                    token_ids=new_ids,
                    text=text,
                    completion=completion,
                )
            )
