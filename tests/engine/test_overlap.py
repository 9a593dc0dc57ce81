"""Plain and overlapped order, with and without drafts, give the same tokens, whatever ends them."""

from __future__ import annotations

import itertools

import pytest
from toy import EOS, VOCAB, EvenOdd, Toy, expected_tokens, toy_limits, toy_request

from deepinfer.device.queue import no_wait
from deepinfer.engine.plan import StepPlan
from deepinfer.engine.request import Completion, FinishReason, Request, SamplingParams
from deepinfer.engine.text import TextStream

DRAFTS = 3
MODES = list(itertools.product([False, True], [0, DRAFTS]))
ENDS = range(1, 2 * DRAFTS + 4)  # every place within two steps of the most tokens, and beyond


class Signs:
    """Decodes every id as a sign of its own."""

    def push(self, token_id: int) -> str:
        return chr(0x100 + token_id)

    def finish(self) -> str:
        return ""


class Open:
    """A gate that is open at the second look."""

    def __init__(self, matcher: EvenOdd | str) -> None:
        self.matcher = matcher
        self.looks = 0

    def poll(self) -> EvenOdd | str | None:
        self.looks += 1
        return self.matcher if self.looks > 1 else None


def sequence_without_repeats(length: int) -> Request:
    """A request whose first `length` outputs are all different and never EOS."""
    for number in range(1000):
        request = toy_request(number, 5, max_tokens=length, ignore_eos=True)
        tokens = expected_tokens(request, 1000)
        if len(set(tokens)) == length and EOS not in tokens:
            return request
    raise AssertionError("no such request")


LONG = sequence_without_repeats(len(ENDS) + 4)
TOKENS = expected_tokens(LONG, 1000)


def make_toy(overlap: bool, num_drafts: int, **limits: int) -> Toy:
    """A toy in which every draft is right, so that a step ends at every place."""
    toy = Toy(
        toy_limits(**{"max_model_len": 80, **limits}),
        num_blocks=80,
        overlap=overlap,
        num_drafts=num_drafts,
    )
    toy.runner.always_right = True
    return toy


def lengthened(**params: object) -> Request:
    """LONG with other parameters."""
    return Request(
        request_id=LONG.request_id,
        prompt_token_ids=LONG.prompt_token_ids,
        params=SamplingParams(**{"max_tokens": 40, **params}),  # type: ignore[arg-type]
        seed=LONG.seed,
    )


def finish(toy: Toy, steps: int = 200) -> dict[int, Completion]:
    """Step to the end."""
    done: dict[int, Completion] = {}
    for _ in range(steps):
        if not toy.loop.has_work:
            break
        toy.clock += 1.0
        for completion in toy.loop.step():
            assert completion.request_id not in done
            done[completion.request_id] = completion
        toy.check()
    toy.loop.flush()
    toy.assert_idle()
    return done


@pytest.mark.parametrize(("overlap", "num_drafts"), MODES)
@pytest.mark.parametrize("count", ENDS)
@pytest.mark.parametrize("way", ["eos", "stop id", "stop string", "max_tokens", "model length"])
def test_every_end_at_every_place(way: str, count: int, overlap: bool, num_drafts: int) -> None:
    last = TOKENS[count - 1]
    toy = make_toy(overlap, num_drafts)
    text: TextStream | None = None
    reason = FinishReason.STOP
    request = lengthened(ignore_eos=True)
    if way == "eos":
        toy = make_toy(overlap, num_drafts, eos_token_id=last)
        request = lengthened()
    elif way == "stop id":
        request = lengthened(stop_token_ids=[last, VOCAB + 3])
    elif way == "stop string":
        stop = "".join(chr(0x100 + t) for t in TOKENS[max(0, count - 2) : count])
        text = TextStream(Signs(), [stop])
    elif way == "max_tokens":
        request, reason = lengthened(max_tokens=count, ignore_eos=True), FinishReason.LENGTH
    else:
        toy = make_toy(overlap, num_drafts, max_model_len=4 + count)
        reason = FinishReason.LENGTH
    other = toy_request(900, 3, max_tokens=7, ignore_eos=True)
    toy.loop.submit(request, text)
    toy.loop.submit(other)
    done = finish(toy)
    result = done[request.request_id]
    assert (list(result.token_ids), result.finish_reason) == (TOKENS[:count], reason)
    assert list(done[900].token_ids) == expected_tokens(other, toy.limits.max_model_len)
    if num_drafts and way in {"max_tokens", "model length"}:
        assert result.num_draft_accepted > 0 or count < 3


@pytest.mark.parametrize(("overlap", "num_drafts"), MODES)
@pytest.mark.parametrize("count", ENDS)
def test_a_grammar_ends_at_every_place(count: int, overlap: bool, num_drafts: int) -> None:
    toy = make_toy(overlap, num_drafts)
    request = lengthened()
    free = toy_request(901, 6, max_tokens=9, ignore_eos=True)
    toy.loop.submit(request, gate=Open(EvenOdd(count)))
    toy.loop.submit(free)
    done = finish(toy)
    expected = expected_tokens(request, 80, matcher=EvenOdd(count))
    assert list(done[request.request_id].token_ids) == expected and len(expected) == count
    assert done[request.request_id].finish_reason == FinishReason.STOP
    assert list(done[901].token_ids) == expected_tokens(free, 80)
    assert any(plan.needs_masks for plan in toy.runner.plans)
    assert not all(plan.needs_masks for plan in toy.runner.plans)


@pytest.mark.parametrize(("overlap", "num_drafts"), MODES)
def test_a_grammar_that_does_not_compile(overlap: bool, num_drafts: int) -> None:
    toy = make_toy(overlap, num_drafts)
    toy.loop.submit(lengthened(), gate=Open("no such rule"))
    toy.loop.submit(toy_request(901, 6, max_tokens=3, ignore_eos=True))
    done = finish(toy)
    result = done[LONG.request_id]
    assert (result.finish_reason, result.error) == ("structured_output_error", "no such rule")
    assert len(done[901].token_ids) == 3


@pytest.mark.parametrize(("overlap", "num_drafts"), MODES)
def test_a_token_that_the_grammar_refuses(overlap: bool, num_drafts: int) -> None:
    class Refusing(EvenOdd):
        def accept(self, token_id: int) -> bool:
            return self.taken < 4 and super().accept(token_id)

        def try_drafts(self, drafts: object) -> int:
            return 0

    toy = make_toy(overlap, num_drafts)
    toy.loop.submit(lengthened(), gate=Open(Refusing(20)))
    result = finish(toy)[LONG.request_id]
    assert result.finish_reason == "structured_output_error" and len(result.token_ids) == 4
    assert "refuses" in (result.error or "")


@pytest.mark.parametrize(("overlap", "num_drafts"), MODES)
@pytest.mark.parametrize("step", range(1, 6))
@pytest.mark.parametrize("way", ["abort", "timeout", "numerical", "preempt"])
def test_ends_from_outside(way: str, step: int, overlap: bool, num_drafts: int) -> None:
    toy = make_toy(overlap, num_drafts)
    other = toy_request(902, 9, max_tokens=30, ignore_eos=True)
    timeout = step - 0.5 if way == "timeout" else None
    toy.loop.submit(lengthened(ignore_eos=True, timeout_s=timeout))
    toy.loop.submit(other)
    early: list[Completion] = []
    for _ in range(step - 1):
        toy.clock += 1.0
        early += toy.loop.step()
    if way == "abort":
        assert toy.loop.cancel(LONG.request_id)
    elif way == "numerical":
        toy.runner.fail_requests.add(LONG.request_id)
    elif way == "preempt":
        assert toy.scheduler.preempt(LONG.request_id) == (step > 1)
    early += toy.loop.take_finished()
    done = finish(toy) | {c.request_id: c for c in early}
    result = done[LONG.request_id]
    whole = expected_tokens(lengthened(ignore_eos=True), 80)
    if way == "preempt":
        assert list(result.token_ids) == whole
        assert result.num_preemptions == (step > 1)
    else:
        assert result.finish_reason == way
        assert list(result.token_ids) == whole[: len(result.token_ids)]
        assert (result.error is None) == (way == "abort")
    assert list(done[902].token_ids) == expected_tokens(other, 80)


def test_an_ended_row_costs_nothing_once_the_device_knows() -> None:
    runs = {}
    for overlap in (False, True):
        toy = make_toy(overlap, 0, eos_token_id=TOKENS[4])
        toy.loop.submit(lengthened())
        finish(toy)
        runs[overlap] = toy.runner.num_rows_run
        assert len(toy.runner.plans) == 5 + overlap
    assert runs[False] == runs[True]


def test_a_budget_that_is_surely_used_up_plans_no_row() -> None:
    toy = make_toy(True, 0)
    toy.loop.submit(lengthened(max_tokens=5, ignore_eos=True))
    finish(toy)
    assert len(toy.runner.plans) == 5


def test_overlap_reads_a_step_late() -> None:
    toy = make_toy(True, 0)
    toy.loop.submit(lengthened())
    toy.loop.step()
    assert toy.runner.plans == [] and toy.scheduler.num_in_flight == 1
    toy.loop.step()
    assert len(toy.runner.plans) == 1 and toy.scheduler.num_in_flight == 1
    finish(toy)


def test_a_thread_gives_the_same_tokens() -> None:
    done = {}
    for threaded in (False, True):
        toy = Toy(toy_limits(), num_blocks=60, overlap=True, num_drafts=2, threaded=threaded)
        for i in range(20):
            toy.loop.submit(toy_request(i, 1 + i % 7, max_tokens=1 + i % 9))
        done[threaded] = {i: c.token_ids for i, c in finish(toy, 2000).items()}
        toy.loop.stop()
    assert done[False] == done[True] and len(done[True]) == 20


def test_a_wait_inside_a_launch_raises() -> None:
    toy = make_toy(True, 0)
    toy.loop.submit(lengthened())
    plan = toy.scheduler.schedule()
    assert plan is not None
    handle = toy.executor.launch(plan)
    with no_wait(), pytest.raises(RuntimeError, match="a launch waited"):
        handle.result()
    assert handle.result().step_id == plan.step_id


class TestFailures:
    """What a step that raises costs."""

    @pytest.mark.parametrize(("overlap", "num_drafts"), MODES)
    def test_once(self, overlap: bool, num_drafts: int) -> None:
        toy = make_toy(overlap, num_drafts)
        calls = 0

        def hook(plan: StepPlan) -> None:
            nonlocal calls
            calls += 1
            if calls == 4:
                raise RuntimeError("a cable came loose")

        toy.runner.hook = hook
        requests = [toy_request(i, 6, max_tokens=12, ignore_eos=True) for i in range(5)]
        for request in requests:
            toy.loop.submit(request)
        done = finish(toy)
        for request in requests:
            assert list(done[request.request_id].token_ids) == expected_tokens(request, 80)
        assert toy.loop.stats.num_failed_steps == 1

    @pytest.mark.parametrize(("overlap", "num_drafts"), MODES)
    def test_the_one_that_causes_it_ends_alone(self, overlap: bool, num_drafts: int) -> None:
        toy = make_toy(overlap, num_drafts)

        def hook(plan: StepPlan) -> None:
            if any(row.request_id == 1 and not row.from_slot for row in plan.rows):
                raise RuntimeError("cannot bear it")

        toy.runner.hook = hook
        requests = [toy_request(i, 6, max_tokens=8, ignore_eos=True) for i in range(6)]
        for request in requests:
            toy.loop.submit(request)
        done = finish(toy)
        assert done[1].finish_reason == "engine_error" and "cannot bear it" in (done[1].error or "")
        for request in requests:
            if request.request_id != 1:
                assert list(done[request.request_id].token_ids) == expected_tokens(request, 80)

    @pytest.mark.parametrize(("overlap", "num_drafts"), MODES)
    def test_memory_that_only_holds_small_steps(self, overlap: bool, num_drafts: int) -> None:
        toy = make_toy(overlap, num_drafts, max_num_batched_tokens=32, chunk_tokens=16)

        def hook(plan: StepPlan) -> None:
            if plan.num_tokens > 13:
                raise MemoryError("no room")

        toy.runner.hook = hook
        request = toy_request(3, 30, max_tokens=8, ignore_eos=True)
        toy.loop.submit(request)
        done = finish(toy)
        assert list(done[3].token_ids) == expected_tokens(request, 80)

    @pytest.mark.parametrize("overlap", [False, True])
    def test_when_nothing_runs_everything_ends(self, overlap: bool) -> None:
        toy = make_toy(overlap, 0)

        def hook(plan: StepPlan) -> None:
            raise RuntimeError("dead")

        toy.runner.hook = hook
        for i in range(9):
            toy.loop.submit(toy_request(i, 6, max_tokens=8))
        done = finish(toy)
        assert {c.finish_reason for c in done.values()} == {FinishReason.ENGINE_ERROR}
        assert len(done) == 9
