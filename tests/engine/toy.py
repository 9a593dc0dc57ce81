"""A toy device: the next token is a hash of all earlier tokens, read back through block tables and
slots.

A wrong table, slot, start or chunk changes the tokens, so comparing with `expected_tokens` catches
it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from deepinfer.cache.blocks import BlockPool
from deepinfer.cache.slots import SlotPool
from deepinfer.engine.plan import RowPlan, RowResult, StepKind, StepPlan, StepResult
from deepinfer.engine.request import Request, SamplingParams
from deepinfer.engine.scheduler import Limits, Scheduler

VOCAB = 50
EOS = 1
BLOCK = 4


def next_token(tokens: Sequence[int], seed: int, vocab: int = VOCAB) -> int:
    """The token that follows, as a hash of everything before."""
    digest = hashlib.blake2b(repr((list(tokens), seed)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % vocab


def expected_tokens(request: Request, max_model_len: int, eos: int = EOS) -> list[int]:
    """What a request must generate when run alone, without any cache."""
    tokens = list(request.prompt_token_ids)
    output: list[int] = []
    while True:
        token = next_token(tokens, request.seed)
        tokens.append(token)
        output.append(token)
        ended = token == eos and not request.params.ignore_eos
        if ended or token in request.params.stop_ids:
            return output
        if len(output) == request.params.max_tokens or len(tokens) > max_model_len:
            return output


class ToyRunner:
    """Runs plans on dictionaries that stand for blocks and slots, checking every row on the way."""

    def __init__(self, limits: Limits, num_blocks: int) -> None:
        self.limits = limits
        self.num_blocks = num_blocks
        self.cells: dict[tuple[int, int], int] = {}
        self.slots: dict[int, list[int]] = {}
        self.seeds: dict[int, int] = {}
        self.kinds: list[StepKind] = []
        self.plans: list[StepPlan] = []
        self.fail_requests: set[int] = set()

    def launch(self, plan: StepPlan) -> ToyHandle:
        """Run a step at once."""
        limits = self.limits
        assert plan.rows
        assert len({row.slot for row in plan.rows}) == len(plan.rows)
        used = [block for row in plan.rows for block in row.blocks]
        assert len(set(used)) == len(used), "a block is in two tables"
        assert all(0 < block < self.num_blocks for block in used)
        if plan.kind is StepKind.PREFILL:
            assert plan.num_tokens <= limits.max_num_batched_tokens
        else:
            assert len(plan.rows) <= limits.max_num_seqs
            assert all(len(row.token_ids) == 1 and row.samples for row in plan.rows)
        for admission in plan.admissions:
            self.seeds[admission.slot] = admission.seed
            self.slots[admission.slot] = []
        self.kinds.append(plan.kind)
        self.plans.append(plan)
        results = tuple(self._run(row) for row in plan.rows)
        return ToyHandle(StepResult(plan.step_id, tuple(r for r in results if r is not None)))

    def _run(self, row: RowPlan) -> RowResult | None:
        assert row.slot > 0 and row.token_ids
        state = self.slots[row.slot]
        assert len(state) == row.start, (len(state), row.start)
        state.extend(row.token_ids)
        for offset, token in enumerate(row.token_ids):
            position = row.start + offset
            self.cells[row.blocks[position // BLOCK], position % BLOCK] = token
        end = row.start + len(row.token_ids)
        seen = [self.cells[row.blocks[p // BLOCK], p % BLOCK] for p in range(end)]
        assert len(row.blocks) == -(-end // BLOCK), "more blocks than the rows need"
        assert seen == state, "blocks and slot tell different stories"
        if not row.samples:
            return None
        if row.request_id in self.fail_requests:
            return RowResult(row.request_id, (), error="layer 3 is not finite")
        token = next_token(seen, self.seeds[row.slot])
        return RowResult(row.request_id, (token,), logprobs=(-float(token),))


class ToyHandle:
    """A finished step."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        """Return the outcome."""
        return self._result


def toy_limits(**changes: int | float | bool) -> Limits:
    """Small limits that make every boundary frequent."""
    values: dict[str, int | float | bool] = {
        "max_num_seqs": 3,
        "max_num_batched_tokens": 16,
        "max_model_len": 40,
        "chunk_tokens": 8,
        "eos_token_id": EOS,
    }
    return Limits(**(values | changes))  # type: ignore[arg-type]


class Toy:
    """A scheduler with its pools and a toy runner."""

    def __init__(self, limits: Limits, num_blocks: int = 21, num_slots: int = 0) -> None:
        self.limits = limits
        self.blocks = BlockPool(num_blocks)
        self.slots = SlotPool(num_slots or limits.max_num_seqs + 1)
        self.scheduler = Scheduler(limits, self.blocks, self.slots, BLOCK)
        self.runner = ToyRunner(limits, num_blocks)

    def check(self) -> None:
        """Assert that the bookkeeping is consistent."""
        self.blocks.check()
        self.slots.check()

    def assert_idle(self) -> None:
        """Assert that nothing is held."""
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
