"""Scheduler: every request ends, budgets are kept, nothing leaks, tokens as in a lone run."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import BLOCK, EOS, EvenOdd, Toy, expected_tokens, toy_limits, toy_request

from deepinfer.engine.plan import StepKind, StepPlan, StepResult
from deepinfer.engine.request import Completion, FinishReason, Request
from deepinfer.engine.text import TextStream


def drive(toy: Toy, requests: list[Request], max_steps: int = 2000) -> dict[int, Completion]:
    """Submit everything, run to the end, return completions by request id."""
    done: dict[int, Completion] = {}
    for request in requests:
        toy.loop.submit(request)
    for _ in range(max_steps):
        if not toy.loop.has_work:
            break
        toy.clock += 1.0
        for completion in toy.loop.step():
            assert completion.request_id not in done
            done[completion.request_id] = completion
        toy.check()
    return done


def outcome_of(toy: Toy, plan: StepPlan) -> StepResult:
    """The outcome of a plan."""
    return toy.runner.run(plan, lambda: None)


def test_tokens_are_those_of_a_lone_run() -> None:
    toy = Toy(toy_limits())
    requests = [toy_request(i, 1 + 3 * i, max_tokens=1 + i % 6) for i in range(12)]
    done = drive(toy, requests)
    assert sorted(done) == list(range(12))
    for request in requests:
        expected = expected_tokens(request, toy.limits.max_model_len)
        assert list(done[request.request_id].token_ids) == expected
    assert StepKind.DECODE in toy.runner.kinds
    assert max(len(plan.rows) for plan in toy.runner.plans) == 3
    toy.assert_idle()


@pytest.mark.parametrize(
    ("length", "max_tokens", "reason", "count"),
    [
        (1, 1, FinishReason.LENGTH, 1),
        (8, 3, FinishReason.LENGTH, 3),
        (9, 3, FinishReason.LENGTH, 3),
        (38, 10, FinishReason.LENGTH, 3),  # the model's limit ends it
        (40, 10, FinishReason.LENGTH, 1),  # a prompt of exactly the limit yields one token
        (41, 1, FinishReason.PROMPT_LENGTH_EXCEEDED, 0),
    ],
)
def test_length_limits(length: int, max_tokens: int, reason: FinishReason, count: int) -> None:
    toy = Toy(toy_limits(eos_token_id=-1))
    done = drive(toy, [toy_request(0, length, max_tokens=max_tokens)])
    assert done[0].finish_reason == reason
    assert len(done[0].token_ids) == count
    assert (done[0].error is not None) == (reason == FinishReason.PROMPT_LENGTH_EXCEEDED)
    toy.assert_idle()


def test_request_that_can_never_fit_is_refused_and_others_run() -> None:
    toy = Toy(toy_limits(), num_blocks=4)  # 12 tokens of room
    done = drive(toy, [toy_request(0, 10, max_tokens=10), toy_request(1, 3, max_tokens=4)])
    assert done[0].finish_reason == FinishReason.PROMPT_LENGTH_EXCEEDED
    assert "cache.memory_bytes" in (done[0].error or "")
    assert done[1].finish_reason in {FinishReason.LENGTH, FinishReason.STOP}
    toy.assert_idle()


def test_block_exactly_at_the_boundary_fits() -> None:
    toy = Toy(toy_limits(eos_token_id=-1), num_blocks=4)
    done = drive(toy, [toy_request(0, 8, max_tokens=4), toy_request(1, 8, max_tokens=4)])
    assert {len(done[i].token_ids) for i in (0, 1)} == {4}
    assert all(len(plan.rows) == 1 for plan in toy.runner.plans)


def test_stop_ids_and_eos() -> None:
    toy = Toy(toy_limits(max_model_len=4000, chunk_tokens=16), num_blocks=3000)
    plain = toy_request(3, 4, max_tokens=900)
    expected = expected_tokens(plain, 4000)
    assert expected[-1] == EOS and len(expected) > 3
    stopped = Request(
        request_id=4,
        prompt_token_ids=plain.prompt_token_ids,
        params=toy_request(3, 4, max_tokens=900, stop_token_ids=[expected[2]]).params,
        seed=plain.seed,
    )
    through = Request(
        request_id=5,
        prompt_token_ids=plain.prompt_token_ids,
        params=toy_request(3, 4, max_tokens=len(expected) + 2, ignore_eos=True).params,
        seed=plain.seed,
    )
    done = drive(toy, [plain, stopped, through])
    assert list(done[3].token_ids) == expected
    assert done[3].finish_reason == FinishReason.STOP
    assert list(done[4].token_ids) == expected[: expected.index(expected[2]) + 1]
    assert len(done[5].token_ids) == len(expected) + 2
    assert done[5].finish_reason == FinishReason.LENGTH
    toy.assert_idle()


def test_fixed_chunks_depend_on_the_request_alone() -> None:
    def chunks(toy: Toy, request_id: int) -> list[tuple[int, int]]:
        return [
            (row.start, len(row.token_ids))
            for plan in toy.runner.plans
            if plan.kind is StepKind.PREFILL
            for row in plan.rows
            if row.request_id == request_id
        ]

    limits = toy_limits(max_num_batched_tokens=12)
    alone = Toy(limits)
    drive(alone, [toy_request(9, 29, max_tokens=2)])
    assert chunks(alone, 9) == [(0, 8), (8, 8), (16, 8), (24, 5)]
    for length in range(1, 12):  # whatever of the budget the request before it leaves
        crowd = Toy(limits, num_blocks=40)
        drive(crowd, [toy_request(0, length, max_tokens=3), toy_request(9, 29, max_tokens=2)])
        assert chunks(crowd, 9) == chunks(alone, 9)


@pytest.mark.parametrize(("num_slots", "most"), [(3, 2), (9, 3)])
def test_both_slots_and_max_num_seqs_bound_the_batch(num_slots: int, most: int) -> None:
    toy = Toy(toy_limits(eos_token_id=-1), num_blocks=90, num_slots=num_slots)
    drive(toy, [toy_request(i, 1, max_tokens=9) for i in range(8)])
    assert max(len(plan.rows) for plan in toy.runner.plans) == most
    toy.assert_idle()


def test_free_chunks_fill_the_budget() -> None:
    toy = Toy(toy_limits(fixed_chunks=False, chunk_tokens=16), num_blocks=40)
    drive(toy, [toy_request(0, 10, max_tokens=2), toy_request(1, 20, max_tokens=2)])
    assert [plan.num_tokens for plan in toy.runner.plans[:2]] == [16, 14]


def test_numerical_error_ends_one_request_only() -> None:
    toy = Toy(toy_limits())
    toy.runner.fail_requests.add(1)
    requests = [toy_request(i, 6, max_tokens=4) for i in range(3)]
    done = drive(toy, requests)
    assert done[1].finish_reason == FinishReason.NUMERICAL
    assert done[1].token_ids == () and "layer 3" in (done[1].error or "")
    for i in (0, 2):
        assert list(done[i].token_ids) == expected_tokens(requests[i], 40)
    toy.assert_idle()


def test_neither_prefill_nor_decode_starves() -> None:
    limits = toy_limits(
        max_num_seqs=8, max_prefill_wait_steps=5, max_decode_wait_steps=2, eos_token_id=-1
    )
    toy = Toy(limits, num_blocks=200)
    toy.scheduler.add(toy_request(0, 2, max_tokens=30))
    for i in range(1, 200):
        toy.scheduler.add(toy_request(i, 17, max_tokens=1 + i % 3))
    run = 0
    for step in range(40):
        plan = toy.scheduler.schedule()
        assert plan is not None
        if plan.kind is StepKind.PREFILL and step > 0:
            run += 1
            assert run <= 2
        else:
            run = 0
        toy.scheduler.apply(outcome_of(toy, plan))


def test_late_arrival_joins_within_the_wait_limit() -> None:
    limits = toy_limits(
        max_num_seqs=30, max_prefill_wait_steps=4, prefill_gain=0.5, eos_token_id=-1
    )
    toy = Toy(limits, num_blocks=200)
    for i in range(10):
        toy.scheduler.add(toy_request(i, 1, max_tokens=30))
    kinds = []
    for step in range(12):
        if step == 2:
            toy.scheduler.add(toy_request(50, 1, max_tokens=2))
        plan = toy.scheduler.schedule()
        assert plan is not None
        kinds.append(plan.kind)
        toy.scheduler.apply(outcome_of(toy, plan))
    assert [i for i, kind in enumerate(kinds) if kind is StepKind.PREFILL] == [0, 6]


def test_cancel_while_a_step_is_in_flight() -> None:
    toy = Toy(toy_limits(eos_token_id=-1))
    requests = [toy_request(i, 4, max_tokens=5) for i in range(2)]
    for request in requests:
        toy.scheduler.add(request)
    plan = toy.scheduler.schedule()
    assert plan is not None
    result = outcome_of(toy, plan)
    cancelled = toy.scheduler.cancel(0, 1.0)
    assert cancelled is not None and cancelled.finish_reason == FinishReason.ABORT
    assert toy.scheduler.cancel(0) is None
    assert toy.slots.num_free == 2, "freed at once: what takes it runs later"
    assert toy.scheduler.apply(result) == []
    done = drive(toy, [])
    assert list(done) == [1]
    assert list(done[1].token_ids) == expected_tokens(requests[1], 40, eos=-1)
    toy.assert_idle()


def test_abandon_ends_the_requests_of_the_step_only() -> None:
    toy = Toy(toy_limits(max_num_seqs=1, eos_token_id=-1))
    requests = [toy_request(i, 4, max_tokens=3) for i in range(2)]
    for request in requests:
        toy.scheduler.add(request)
    assert toy.scheduler.schedule() is not None
    (lost,) = toy.scheduler.abandon("the step failed")
    assert (lost.request_id, lost.finish_reason) == (0, "abort")
    assert lost.error == "the step failed"
    done = drive(toy, [])
    assert list(done[1].token_ids) == expected_tokens(requests[1], 40, eos=-1)
    toy.assert_idle()


class Letters:
    """Decodes id i as the i-th letter."""

    def push(self, token_id: int) -> str:
        return chr(ord("A") + token_id)

    def finish(self) -> str:
        return ""


def test_stop_string_at_the_last_allowed_token_counts_as_stop() -> None:
    toy = Toy(toy_limits(eos_token_id=-1))
    request = toy_request(0, 3, max_tokens=4)
    text = "".join(chr(ord("A") + t) for t in expected_tokens(request, 40, eos=-1))
    stream = TextStream(Letters(), [text[2:4]])
    toy.scheduler.add(request, stream)
    done = drive(toy, [])
    assert (done[0].finish_reason, done[0].text) == ("stop", text[:2])
    assert len(done[0].token_ids) == 4


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 12),  # step of arrival
        st.integers(1, 44),  # prompt length, some beyond the limit
        st.integers(1, 12),  # max_tokens
        st.one_of(st.none(), st.integers(0, 40)),  # step of an event
        st.sampled_from(["cancel", "preempt", "timeout", "fail"]),
        st.one_of(st.none(), st.none(), st.integers(1, 14)),  # length of its grammar
    ),
    min_size=1,
    max_size=14,
)
Arrival = tuple[int, int, int, int | None, str, int | None]
TRAFFIC = {
    "arrivals": ARRIVALS,
    "num_blocks": st.integers(2, 24),
    "max_num_seqs": st.integers(1, 4),
    "budget": st.integers(1, 20),
    "chunk": st.integers(1, 20),
    "fixed": st.booleans(),
    "reserve": st.booleans(),
    "overlap": st.booleans(),
    "drafts": st.integers(0, 3),
}


class Ready:
    """An open gate."""

    def __init__(self, matcher: EvenOdd) -> None:
        self.matcher = matcher

    def poll(self) -> EvenOdd:
        return self.matcher


def check_traffic(
    arrivals: list[Arrival],
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    chunk: int,
    fixed: bool,
    reserve: bool,
    overlap: bool,
    drafts: int,
) -> None:
    """Run some traffic and check everything that must hold."""
    limits = toy_limits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        chunk_tokens=min(chunk, budget),
        fixed_chunks=fixed,
        reserve=reserve,
        max_prefill_wait_steps=3,
    )
    toy = Toy(limits, num_blocks, overlap=overlap, num_drafts=drafts, varied=True)
    requests = {
        i: toy_request(
            i,
            a[1],
            max_tokens=a[2],
            timeout_s=a[3] + 0.5 if a[3] is not None and a[4] == "timeout" else None,
        )
        for i, a in enumerate(arrivals)
    }
    done: dict[int, Completion] = {}
    last_arrival = max(a[0] for a in arrivals)
    preempted: set[int] = set()

    def take(completions: list[Completion]) -> None:
        for completion in completions:
            assert completion.request_id not in done, "a request ended twice"
            done[completion.request_id] = completion

    step = 0
    while step <= last_arrival or toy.loop.has_work:
        toy.clock = float(step)
        for i, (arrival, _, _, when, event, length) in enumerate(arrivals):
            if arrival == step:
                gate = Ready(EvenOdd(length)) if length is not None else None
                toy.loop.submit(requests[i], gate=gate)
            if when == step and event == "cancel":
                toy.loop.cancel(i)
            elif when == step and event == "preempt" and toy.scheduler.preempt(i):
                preempted.add(i)
            elif when == step and event == "fail":
                toy.runner.fail_requests.add(i)
        take(toy.loop.step())
        toy.check()
        step += 1
        assert step < 3000, "the traffic never ends"
    toy.loop.flush()
    assert set(done) == set(requests), "a request never ended"
    toy.assert_idle()

    if not toy.scheduler.num_preemptions:
        order = [
            next(row.request_id for row in plan.rows if row.slot == admission.slot)
            for plan in toy.runner.plans
            for admission in plan.admissions
        ]
        first_come = sorted(order, key=lambda i: (arrivals[i][0], i))
        assert order == first_come, "admission out of order"
    assert reserve is False or toy.scheduler.num_preemptions == len(preempted)
    for i, completion in done.items():
        if completion.finish_reason is FinishReason.PROMPT_LENGTH_EXCEEDED:
            most = -(-min(arrivals[i][1] + arrivals[i][2], 40) // BLOCK)
            assert arrivals[i][1] > 40 or most >= num_blocks
            continue
        length = arrivals[i][5]
        matcher = EvenOdd(length) if length is not None else None
        expected = expected_tokens(requests[i], limits.max_model_len, matcher=matcher)
        tokens = list(completion.token_ids)
        if completion.finish_reason in {FinishReason.STOP, FinishReason.LENGTH}:
            assert tokens == expected
        else:
            assert completion.finish_reason in {
                FinishReason.ABORT,
                FinishReason.TIMEOUT,
                FinishReason.NUMERICAL,
                FinishReason.INSUFFICIENT_SYSTEM_RESOURCE,
            }
            assert tokens == expected[: len(tokens)]
            assert completion.finish_reason is not FinishReason.INSUFFICIENT_SYSTEM_RESOURCE or (
                not reserve and completion.num_preemptions >= 3
            )


@settings(max_examples=150, deadline=None)
@given(**TRAFFIC)
def test_any_traffic(**traffic: Any) -> None:
    check_traffic(**traffic)


@pytest.mark.slow
@settings(max_examples=4000, deadline=None)
@given(**TRAFFIC)
def test_a_lot_of_traffic(**traffic: Any) -> None:
    check_traffic(**traffic)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafts", [0, 3])
def test_growing_sequences_put_back_the_latest(overlap: bool, drafts: int) -> None:
    limits = toy_limits(max_num_seqs=6, reserve=False, eos_token_id=-1)
    toy = Toy(limits, num_blocks=17, overlap=overlap, num_drafts=drafts)
    requests = [toy_request(i, 8, max_tokens=20) for i in range(8)]
    done = drive(toy, requests)
    toy.loop.flush()
    for request in requests:
        result = done[request.request_id]
        expected = expected_tokens(request, 40, eos=-1)
        assert list(result.token_ids) == expected[: len(result.token_ids)]
        assert result.finish_reason == "length" or result.num_preemptions == 3
    assert toy.scheduler.num_preemptions > 0
    assert done[0].num_preemptions == 0, "the first come was put back"
    toy.assert_idle()


@pytest.mark.parametrize("overlap", [False, True])
def test_waiting_is_bounded(overlap: bool) -> None:
    """Whoever is admissible waits at most max_prefill_wait_steps decode steps for its prefill."""
    limits = toy_limits(
        max_num_seqs=40, max_prefill_wait_steps=4, prefill_gain=0.9, eos_token_id=-1
    )
    toy = Toy(limits, num_blocks=600, overlap=overlap)
    for i in range(10):
        toy.loop.submit(toy_request(i, 1, max_tokens=30))
    submitted: dict[int, int] = {}
    for step in range(60):
        if step % 3 == 0 and step < 30:
            submitted[100 + step] = step
            toy.loop.submit(toy_request(100 + step, 1, max_tokens=2))
        toy.loop.step()
    toy.loop.flush()
    for number, plan in enumerate(toy.runner.plans):
        for row in plan.rows:
            if row.request_id in submitted and not row.from_slot:
                assert number - submitted[row.request_id] <= 5
