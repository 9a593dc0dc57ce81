"""Sequences that share beginnings: any traffic gives the tokens of each request alone, and all
blocks, slots and checkpoints come back.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import BLOCK, Toy, expected_tokens, toy_limits, toy_request

from deepinfer.engine.plan import StepPlan
from deepinfer.engine.request import Completion, FinishReason, Request

PARTS = ((7, 8, 9, 2), (7, 8, 9, 3), (4, 4, 4, 4, 4, 4, 4, 4), (5,), (6, 5, 6))


def request_of(request_id: int, parts: list[int], max_tokens: int) -> Request:
    """A request whose prompt is made of parts that others have, too."""
    request = toy_request(request_id, 1, max_tokens=max_tokens)
    return replace(request, prompt_token_ids=tuple(t for part in parts for t in PARTS[part]))


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 12),  # step of arrival
        st.lists(st.integers(0, 4), min_size=1, max_size=5),
        st.integers(1, 8),  # max_tokens
        st.one_of(st.none(), st.integers(0, 30)),  # step of an event
        st.sampled_from(["cancel", "preempt", "bad logits", "failed step"]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=120, deadline=None)
@given(
    arrivals=ARRIVALS,
    num_blocks=st.integers(6, 24),
    checkpoints=st.integers(0, 4),
    chunk=st.integers(1, 20),
    reserve=st.booleans(),
    overlap=st.booleans(),
    drafts=st.sampled_from([0, 2]),
    keep=st.sampled_from([None, 6]),
)
def test_any_traffic(
    arrivals: list[tuple[int, list[int], int, int | None, str]],
    num_blocks: int,
    checkpoints: int,
    chunk: int,
    reserve: bool,
    overlap: bool,
    drafts: int,
    keep: int | None,
) -> None:
    limits = replace(
        toy_limits(chunk_tokens=min(chunk, 16), reserve=reserve, max_prefill_wait_steps=3),
        keep_tokens=keep,
    )
    toy = Toy(limits, num_blocks, overlap=overlap, num_drafts=drafts, checkpoints=checkpoints)
    requests = {i: request_of(i, a[1], a[2]) for i, a in enumerate(arrivals)}
    done: dict[int, Completion] = {}
    failing: set[int] = set()

    def fail(plan: StepPlan) -> None:
        named = {row.request_id for row in plan.rows} & failing
        if named:
            failing.difference_update(named)
            raise RuntimeError("a step fails")

    toy.runner.hook = fail
    step, last = 0, max(a[0] for a in arrivals)
    while step <= last or toy.loop.has_work:
        for i, (arrival, _, _, when, event) in enumerate(arrivals):
            if arrival == step:
                toy.loop.submit(requests[i])
            if when != step:
                continue
            if event == "cancel":
                toy.loop.cancel(i)
            elif event == "preempt":
                toy.scheduler.preempt(i)
            elif event == "bad logits":
                toy.runner.fail_requests.add(i)
            else:
                failing.add(i)
        for completion in toy.loop.step():
            assert completion.request_id not in done
            done[completion.request_id] = completion
        toy.check()
        step += 1
        assert step < 2000, "the traffic never ends"
    toy.loop.flush()
    toy.assert_idle()
    assert set(done) == set(requests)
    for i, completion in done.items():
        if completion.finish_reason is FinishReason.PROMPT_LENGTH_EXCEEDED:
            continue
        expected = expected_tokens(requests[i], limits.max_model_len)
        tokens = list(completion.token_ids)
        if completion.finish_reason in {FinishReason.STOP, FinishReason.LENGTH}:
            assert tokens == expected
        else:
            assert tokens == expected[: len(tokens)]
    for plan in toy.runner.plans:
        for row in plan.rows:
            if keep is None:
                assert row.floor == 0
            elif not row.from_slot:  # the kept suffix is always computed
                assert row.floor == max(0, len(requests[row.request_id].prompt_token_ids) - keep)
    if keep is not None:
        starts = {
            row.request_id: row.start
            for plan in toy.runner.plans
            for row in plan.rows
            if row.slot in {r.slot for r in plan.restores}
        }
        for i, start in starts.items():
            assert start <= max(0, len(requests[i].prompt_token_ids) - keep), i


@pytest.mark.parametrize("overlap", [False, True])
def test_reuse_saves_rows(overlap: bool) -> None:
    """Ten prompts with a common beginning, one after the other, compute it twice at most."""
    toy = Toy(toy_limits(max_model_len=60, eos_token_id=-1), 60, overlap=overlap, checkpoints=8)
    shared = [2, 2, 0, 1]
    num_shared = sum(len(PARTS[part]) for part in shared)
    assert num_shared % BLOCK == 0
    for i in range(10):
        request = request_of(i, shared, 2)
        own = tuple(10 + (3 * i + j) % 30 for j in range(6))
        toy.loop.submit(replace(request, prompt_token_ids=request.prompt_token_ids + own))
        while toy.loop.has_work:
            toy.loop.step()
        toy.check()
    toy.loop.flush()
    assert toy.prefix is not None
    assert toy.prefix.stats.num_hits == 8
    assert toy.prefix.stats.num_hit_tokens == 8 * num_shared
    prompts = sum(plan.num_tokens for plan in toy.runner.plans if plan.kind == "prefill")
    assert prompts == 10 * 6 + 2 * num_shared


@pytest.mark.parametrize("overlap", [False, True])
def test_those_that_come_together_share(overlap: bool) -> None:
    """Of eight samples of one prompt one computes it; of prompts with one beginning two do."""
    for own, rest, computed in ((False, 3, 1), (True, 6, 2)):
        limits = toy_limits(
            max_num_seqs=8, max_model_len=60, max_num_batched_tokens=60, eos_token_id=-1
        )
        toy = Toy(limits, 200, overlap=overlap, checkpoints=8)
        shared = [2, 2, 0, 1]
        for i in range(8):
            request = request_of(i, shared, 2)
            tail = tuple(10 + ((3 * i if own else 0) + j) % 30 for j in range(rest))
            toy.loop.submit(replace(request, prompt_token_ids=request.prompt_token_ids + tail))
        while toy.loop.has_work:
            toy.loop.step()
            toy.check()
        toy.loop.flush()
        length = sum(len(PARTS[part]) for part in shared)
        prompts = sum(plan.num_tokens for plan in toy.runner.plans if plan.kind == "prefill")
        assert prompts == 8 * rest + computed * length, own
