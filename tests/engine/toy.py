"""A toy device: the next token is a hash of all earlier tokens, read back through block tables and
slots.

A wrong table, slot, start or chunk changes the tokens, so comparing with `expected_tokens` catches
it. With drafts, a step brings several tokens; how many depends on a hash too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deepinfer.cache.blocks import BlockPool
from deepinfer.cache.prefix import PrefixCache
from deepinfer.cache.slots import SlotPool
from deepinfer.device.queue import InlineQueue, ThreadQueue
from deepinfer.engine.executor import InProcessExecutor
from deepinfer.engine.loop import EngineLoop
from deepinfer.engine.plan import (
    Admission,
    Masks,
    RowPlan,
    RowResult,
    StepKind,
    StepPlan,
    StepResult,
)
from deepinfer.engine.request import DraftOutcome, Request, SamplingParams
from deepinfer.engine.scheduler import Limits, Scheduler
from deepinfer.engine.speculation import Choice

VOCAB = 50
EOS = 1
BLOCK = 4


def hashed(*values: object) -> int:
    """A number that depends on every value."""
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def next_token(tokens: Sequence[int], seed: int, vocab: int = VOCAB) -> int:
    """The token that follows, as a hash of everything before."""
    return hashed(list(tokens), seed) % vocab


class EvenOdd:
    """A grammar: even and odd ids take turns, beginning with even ones; over after `length` ids."""

    problem: str | None = None

    def __init__(self, length: int) -> None:
        self.length = length
        self.taken = 0

    def accept(self, token_id: int) -> bool:
        if token_id % 2 != self.taken % 2:
            return False
        self.taken += 1
        return True

    def is_finished(self) -> bool:
        return self.taken >= self.length

    def fill(self, bits: NDArray[np.uint32]) -> bool:
        bits[:] = 0
        for token_id in range(self.taken % 2, VOCAB, 2):
            if token_id != EOS:
                bits[token_id // 32] |= np.uint32(1 << token_id % 32)
        return True

    def try_drafts(self, drafts: Sequence[int]) -> int:
        taken = 0
        for token_id in drafts:
            if self.is_finished() or not self.accept(token_id):
                break
            taken += 1
        return taken

    def rollback(self, count: int) -> None:
        self.taken -= count

    def check(self) -> str | None:
        return None


def allowed_token(token: int, bits: NDArray[np.uint32] | None) -> int:
    """The token, or the next allowed one."""
    if bits is None:
        return token
    while not bits[token // 32] >> np.uint32(token % 32) & 1:
        token = (token + 1) % VOCAB
    return token


def expected_tokens(
    request: Request, max_model_len: int, eos: int = EOS, matcher: EvenOdd | None = None
) -> list[int]:
    """What a request must generate when run alone, without any cache."""
    tokens = list(request.prompt_token_ids)
    output: list[int] = []
    bits = np.zeros(2, np.uint32)
    while True:
        token = next_token(tokens, request.seed)
        if matcher is not None:
            matcher.fill(bits)
            token = allowed_token(token, bits)
            assert matcher.accept(token)
        tokens.append(token)
        output.append(token)
        ended = token == eos and not request.params.ignore_eos
        if ended or token in request.params.stop_ids:
            return output
        if matcher is not None and matcher.is_finished():
            return output
        if len(output) == request.params.max_tokens or len(tokens) > max_model_len:
            return output


@dataclass
class ToySlot:
    """What the toy device knows of a sequence."""

    admission: Admission
    tokens: list[int] = field(default_factory=list)  # committed, the last one not computed
    drafts: list[int] = field(default_factory=list)
    alive: bool = True


class ToyRunner:
    """Runs plans on dictionaries that stand for blocks and slots, checking every row on the way."""

    def __init__(self, limits: Limits, num_blocks: int, num_drafts: int = 0) -> None:
        self.limits = limits
        self.num_blocks = num_blocks
        self.num_drafts = num_drafts
        self.cells: dict[tuple[int, int], int] = {}
        self.slots: dict[int, ToySlot] = {}
        self.kinds: list[StepKind] = []
        self.plans: list[StepPlan] = []
        self.num_rows_run = 0
        self.always_right = False
        self.fail_requests: set[int] = set()
        self.hook: Callable[[StepPlan], None] = lambda plan: None
        self.shares_blocks = False
        self.checkpoints: dict[int, list[int]] = {}

    def run(self, plan: StepPlan, masks: Callable[[], Masks | None]) -> StepResult:
        """Run a step."""
        self.hook(plan)
        limits = self.limits
        assert plan.rows
        assert len({row.slot for row in plan.rows}) == len(plan.rows)
        used = [block for row in plan.rows for block in row.blocks]
        assert self.shares_blocks or len(set(used)) == len(used), "a block is in two tables"
        assert all(0 < block < self.num_blocks for block in used)
        if plan.kind is StepKind.PREFILL:
            assert plan.num_tokens <= limits.max_num_batched_tokens
            assert not any(row.from_slot for row in plan.rows)
        else:
            assert len(plan.rows) <= limits.max_num_seqs
            assert all(row.from_slot and row.samples for row in plan.rows)
        for admission in plan.admissions:
            self.slots[admission.slot] = ToySlot(admission)
        for restore in plan.restores:
            assert not self.slots[restore.slot].tokens, "restored into a slot in use"
            self.slots[restore.slot].tokens = list(self.checkpoints[restore.checkpoint])
        self.kinds.append(plan.kind)
        self.plans.append(plan)
        ready = [self._forward(row) for row in plan.rows]
        found = masks() if plan.needs_masks else None
        results = []
        for idx, (row, inputs) in enumerate(zip(plan.rows, ready, strict=True)):
            bits = {}
            if found is not None:
                bits = {d: found.bits[i] for i, (r, d) in enumerate(found.rows) if r == idx}
            result = self._draw(row, inputs, bits)
            if row.reports:
                assert result is not None
                results.append(result)
        return StepResult(plan.step_id, tuple(results))

    def _forward(self, row: RowPlan) -> list[int] | None:
        """Write a row's tokens into its blocks; return them, None for an ended sequence."""
        assert row.slot > 0
        slot = self.slots[row.slot]
        if not slot.alive:
            return None
        if row.from_slot:
            start = len(slot.tokens) - 1
            room = slot.admission.limit - len(slot.tokens)
            inputs = [slot.tokens[-1], *slot.drafts[: min(row.num_drafts, room - 1)]]
        else:
            start, inputs = row.start, list(row.token_ids)
            assert len(slot.tokens) == start, (len(slot.tokens), start)
            slot.tokens += inputs
            assert len(row.blocks) == -(-(start + len(inputs)) // BLOCK)
        self.num_rows_run += len(inputs)
        for offset, token in enumerate(inputs):
            position = start + offset
            self.cells[row.blocks[position // BLOCK], position % BLOCK] = token
        seen = [self.cells[row.blocks[p // BLOCK], p % BLOCK] for p in range(len(slot.tokens))]
        assert seen == slot.tokens, "blocks and slot tell different stories"
        for end, checkpoint in row.saves:
            assert start < end <= len(slot.tokens), (start, end)
            self.checkpoints[checkpoint] = slot.tokens[:end]
        return inputs

    def _draw(
        self, row: RowPlan, inputs: list[int] | None, bits: dict[int, NDArray[np.uint32]]
    ) -> RowResult | None:
        if inputs is None or not row.samples:
            return RowResult(row.request_id, ())
        slot = self.slots[row.slot]
        if row.request_id in self.fail_requests:
            slot.alive = False
            return RowResult(row.request_id, (), error="layer 3 is not finite")
        seed, limit = slot.admission.seed, slot.admission.limit
        verified = inputs[1:] if row.from_slot else []
        drawn: list[int] = []
        for place in range(len(verified) + 1):
            token = allowed_token(next_token(slot.tokens, seed), bits.get(place))
            drawn.append(token)
            slot.tokens.append(token)
            if place == len(verified) or verified[place] != token:
                break
        ending = slot.admission.ending_ids
        slot.alive = not any(t in ending for t in drawn) and len(slot.tokens) < limit
        proposed = len(slot.drafts)
        slot.drafts = self._propose(slot.tokens, seed) if slot.alive else []
        return RowResult(
            row.request_id,
            tuple(drawn),
            logprobs=tuple(-float(t) for t in drawn),
            num_proposed=proposed,
            num_verified=len(verified),
            num_accepted=len(drawn) - 1,
            drafts=tuple(slot.drafts),
            confidences=(0.5,) * len(slot.drafts),
        )

    def _propose(self, tokens: list[int], seed: int) -> list[int]:
        """Right drafts, up to a place that a hash chooses."""
        right = hashed("drafts", tokens, seed) % (self.num_drafts + 1)
        if self.always_right:
            right = self.num_drafts
        ahead = list(tokens)
        for place in range(self.num_drafts):
            ahead.append(next_token(ahead, seed) if place < right else EOS)
        return ahead[len(tokens) :]


class AllDrafts:
    """A planner: verify everything, or a hash's choice."""

    def __init__(self, num_drafts: int, varied: bool = False) -> None:
        self.num_drafts = num_drafts
        self.varied = varied
        self.is_drafting = True
        self.calls = 0

    def choose(self, confidences: list[tuple[float, ...]]) -> Choice:
        self.calls += 1
        most = hashed(self.calls) % (self.num_drafts + 1) if self.varied else self.num_drafts
        return Choice(most, None, True)

    def count(self, rows: list[tuple[DraftOutcome, tuple[float, ...]]]) -> None:
        for (proposed, verified, accepted, kept), _ in rows:
            assert proposed >= verified >= accepted >= 0 and kept >= accepted, rows

    def observe(self, rows: int, sequences: int, proposed: bool, seconds: float) -> None:
        assert rows >= 1

    def summary(self) -> dict[str, object]:
        return {}


def toy_limits(**changes: int | float | bool) -> Limits:
    """Small limits that make every boundary frequent."""
    values: dict[str, int | float | bool] = {
        "max_num_seqs": 3,
        "max_num_batched_tokens": 16,
        "max_model_len": 40,
        "chunk_tokens": 8,
        "eos_token_id": EOS,
        "vocab_size": VOCAB,
    }
    return Limits(**(values | changes))  # type: ignore[arg-type]


class Toy:
    """A scheduler with its pools, a toy runner and a loop."""

    def __init__(
        self,
        limits: Limits,
        num_blocks: int = 21,
        num_slots: int = 0,
        *,
        overlap: bool = False,
        num_drafts: int = 0,
        varied: bool = False,
        threaded: bool = False,
        checkpoints: int | None = None,
    ) -> None:
        self.limits = limits
        self.blocks = BlockPool(num_blocks)
        self.slots = SlotPool(num_slots or limits.max_num_seqs + 1)
        planner = AllDrafts(num_drafts, varied) if num_drafts else None
        self.prefix: PrefixCache | None = None
        if checkpoints is not None:
            self.prefix = PrefixCache(self.blocks, BLOCK, range(1000, 1000 + checkpoints))
        self.scheduler = Scheduler(
            limits, self.blocks, self.slots, BLOCK, self.prefix, planner=planner
        )
        self.runner = ToyRunner(limits, num_blocks, num_drafts)
        self.runner.shares_blocks = self.prefix is not None
        self.clock = 0.0
        self.executor = InProcessExecutor(self.runner, ThreadQueue() if threaded else InlineQueue())
        self.loop = EngineLoop(self.scheduler, self.executor, self._now, overlap)

    def _now(self) -> float:
        return self.clock

    def check(self) -> None:
        """Assert that the bookkeeping is consistent."""
        self.blocks.check()
        self.slots.check()
        live = [s for s in self.scheduler._sequences.values() if s.slot]
        held = [block for sequence in live for block in sequence.blocks]
        idle = 0
        if self.prefix is not None:
            self.prefix.check()
            held = list(set(held))
            idle = self.prefix.num_idle
        assert len(held) == len(set(held)) == self.blocks.capacity - self.blocks.num_free - idle
        assert (
            len({s.slot for s in live})
            == len(live)
            == self.slots.num_slots - 1 - (self.slots.num_free)
        )
        assert len(live) <= self.limits.max_num_seqs
        waiting = self.scheduler._waiting
        assert waiting.num_tokens == sum(len(s.token_ids) for s in waiting._queue.values())

    def assert_idle(self) -> None:
        """Assert that nothing is held."""
        if self.prefix is not None:
            self.prefix.clear()
        self.check()
        assert self.blocks.num_free == self.blocks.capacity
        assert self.slots.num_free == self.slots.num_slots - 1
        assert not self.scheduler.has_work
        assert self.scheduler.num_waiting == self.scheduler.num_running == 0


def toy_request(request_id: int, length: int, **params: object) -> Request:
    """A request with a prompt of the given length that no other request shares."""
    prompt = tuple((request_id * 7 + i * 3) % VOCAB for i in range(length))
    return Request(
        request_id=request_id,
        index=request_id,
        prompt_token_ids=prompt,
        params=SamplingParams(**params),  # type: ignore[arg-type]
        seed=request_id * 1000003,
    )
