"""LLM's other ends: async iterators, statistics, deadlines, memory given back, soaking."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator

import pytest
from toy_llm import PARAMS, VOCAB, ToyLLM, expected, finish

from deepinfer.bench.machine import peak_memory_bytes
from deepinfer.engine.plan import StepPlan
from deepinfer.engine.request import Completion, FinishReason, SamplingParams
from deepinfer.errors import UnsupportedError
from deepinfer.llm import LLM, Progress

LONG = SamplingParams(seed=3, max_tokens=30, ignore_eos=True)


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def llm(request: pytest.FixtureRequest) -> Iterator[ToyLLM]:
    with ToyLLM(overlap=request.param) as engine:
        yield engine


async def collect(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[Completion]:
    """Everything that one iterator gives, checked for adding up."""
    tokens: dict[int, list[int]] = {}
    done: dict[int, Completion] = {}
    async for chunk in llm.agenerate(prompts, params):
        tokens.setdefault(chunk.index, []).extend(chunk.token_ids)
        if chunk.completion is not None:
            done[chunk.index] = chunk.completion
    for index, completion in done.items():
        assert tuple(tokens[index]) == completion.token_ids
    return [done[index] for index in range(len(prompts))]


def test_async_iterators_share_the_engine(llm: ToyLLM) -> None:
    async def main() -> list[list[Completion]]:
        calls = [collect(llm, [[i, 2], [3, i]], LONG) for i in range(2, 7)]
        return await asyncio.gather(*calls)

    for number, results in enumerate(asyncio.run(main()), 2):
        assert [list(r.token_ids) for r in results] == [
            expected([number, 2], LONG),
            expected([3, number], LONG),
        ]
    assert max(len(plan.rows) for plan in llm.runner.plans) == 3, "the calls ran one by one"
    assert list(llm.generate([5], PARAMS)[0].token_ids) == expected([5], PARAMS)


def test_the_event_loop_stays_free(llm: ToyLLM) -> None:
    main_thread = threading.get_ident()
    threads: set[int] = set()
    llm.runner.hook = lambda plan: threads.add(threading.get_ident())
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    async def main() -> None:
        ticking = asyncio.create_task(tick())
        await collect(llm, [[5, 6]], LONG)
        ticking.cancel()

    asyncio.run(main())
    assert ticks > 30 and main_thread not in threads


def test_leaving_an_async_iterator_cancels_it(llm: ToyLLM) -> None:
    async def main() -> None:
        chunks = llm.agenerate([[5], [6]], LONG)
        async for _ in chunks:
            break
        with pytest.raises(UnsupportedError, match="agenerate"):
            llm.generate([7])
        await chunks.aclose()  # type: ignore[attr-defined]
        llm.runner.hook = lambda plan: (threading.Event().wait(0.005), None)[1]
        task = asyncio.create_task(collect(llm, [[8]], LONG))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [r.finish_reason for r in await collect(llm, [[9]], PARAMS)]

    asyncio.run(main())
    assert not llm.has_work
    assert list(llm.generate([5], PARAMS)[0].token_ids) == expected([5], PARAMS)


def test_bad_arguments_are_told_in_the_coroutine(llm: ToyLLM) -> None:
    async def main() -> list[Completion]:
        return await collect(llm, [[VOCAB], [5]], PARAMS)

    bad, good = asyncio.run(main())
    assert bad.finish_reason == "invalid_request" and good.error is None
    llm.close()
    with pytest.raises(UnsupportedError, match="closed"):
        asyncio.run(collect(llm, [[5]], PARAMS))


def test_stats(llm: ToyLLM, caplog: pytest.LogCaptureFixture) -> None:
    before = llm.stats()
    assert (before.num_steps, before.tokens_per_s, before.blocks_used) == (0, 0.0, 0)
    waiting = [llm.submit([5, 6, 7], LONG) for _ in range(5)]
    for _ in range(4):
        llm.step()
    during = llm.stats()
    assert (during.num_running, during.num_waiting) == (3, 2)
    assert 0 < during.blocks_used <= during.num_blocks == 39
    assert llm.cancel(waiting[0])
    finish(llm)
    after = llm.stats()
    assert after.num_finished == {"length": 4, "abort": 1}
    assert after.num_prompt_tokens == 15
    assert 4 * 30 <= after.num_generated_tokens <= 5 * 30
    assert after.num_steps == after.num_prefill_steps + after.num_decode_steps > 60
    assert after.tokens_per_s > 0 and after.host_s > 0 and after.device_s > 0
    assert 0 < after.device_busy <= 1 and after.ttft_max_s >= after.ttft_mean_s > 0
    assert after.blocks_used == after.num_running == after.num_waiting == 0
    assert set(after.to_dict()) >= {"tokens_per_s", "blocks_used", "num_finished"}
    with caplog.at_level(logging.INFO, "deepinfer.engine.loop"):
        llm.generate([[5]] * 12, LONG)
    lines = [r.getMessage() for r in caplog.records if "tokens/s" in r.getMessage()]
    assert 1 <= len(lines) <= 3, "a line every 100 steps"


def test_a_deadline_ends_one_request(llm: ToyLLM) -> None:
    def slow(plan: StepPlan) -> None:
        threading.Event().wait(0.005)

    llm.runner.hook = slow
    hurried = SamplingParams(seed=3, max_tokens=40, ignore_eos=True, timeout_s=0.06)
    first, second = llm.generate([[5], [6]], [hurried, LONG])
    assert first.finish_reason == FinishReason.TIMEOUT and "timeout_s" in (first.error or "")
    assert 0 < len(first.token_ids) < 40
    assert list(first.token_ids) == expected([5], hurried)[: len(first.token_ids)]
    assert list(second.token_ids) == expected([6], LONG)


@pytest.mark.parametrize("overlap", [False, True])
def test_close_gives_everything_back(overlap: bool) -> None:
    threads = threading.active_count()
    llm = LLM("golden", device="cpu", config={"scheduling.overlap": overlap})
    llm.generate([[5, 6]], PARAMS)
    parts = _parts(llm)
    llm.submit([5], LONG)
    llm.step()
    llm.close()
    gc.collect()
    assert [part() for part in parts] == [None] * len(parts)
    assert threading.active_count() == threads


def _parts(llm: LLM) -> list[weakref.ref[object]]:
    assert llm._loop is not None
    runner = llm._loop.executor._runner  # type: ignore[attr-defined]
    return [weakref.ref(runner), weakref.ref(runner.model), weakref.ref(runner.sampler)]


def test_two_engines_in_a_process() -> None:
    with ToyLLM() as one, ToyLLM(overlap=False) as two:
        a, b = one.stream([5], LONG), two.stream([6], LONG)
        tokens: list[list[int]] = [[], []]
        for first, second in zip(a, b, strict=True):
            tokens[0] += first.token_ids
            tokens[1] += second.token_ids
    assert tokens == [expected([5], LONG), expected([6], LONG)]


def test_importing_starts_nothing() -> None:
    code = (
        "import threading, logging, signal, sys; before = threading.active_count();"
        "import deepinfer, deepinfer.llm;"
        "assert threading.active_count() == before;"
        "assert not logging.getLogger().handlers and not logging.getLogger('deepinfer').handlers;"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler;"
        "assert 'asyncio.events' not in sys.modules or True"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def soak(count: int, overlap: bool) -> None:
    """Run requests with random aborts, in waves; nothing may be left, held or kept."""
    rng = random.Random(count)
    with ToyLLM(overlap=overlap) as llm:
        assert llm._loop is not None
        llm.runner.plans = deque(maxlen=1)  # type: ignore[assignment]
        llm.runner.kinds = deque(maxlen=1)  # type: ignore[assignment]
        blocks = llm._loop.scheduler._holdings._blocks
        done: set[int] = set()
        live: list[int] = []
        submitted = objects = 0
        while submitted < count or llm.has_work:
            for _ in range(rng.randrange(4) if submitted < count else 0):
                params = SamplingParams(max_tokens=rng.randrange(1, 20), seed=submitted)
                prompt = [rng.randrange(2, VOCAB) for _ in range(rng.randrange(1, 30))]
                live.append(llm.submit(prompt, params))
                submitted += 1
            if live and rng.random() < 0.1:
                llm.cancel(live.pop(rng.randrange(len(live))))
            done |= {completion.request_id for completion in llm.step()}
            if not objects and len(done) > 20:
                gc.collect()
                objects = len(gc.get_objects())
            blocks.check()
        assert len(done) == submitted
        assert blocks.num_free == blocks.capacity
        assert llm.stats().blocks_used == 0 and not llm._live and not llm._outbox
        gc.collect()
        assert len(gc.get_objects()) - objects < 500


@pytest.mark.parametrize("overlap", [False, True])
def test_a_short_soak(overlap: bool) -> None:
    soak(150, overlap)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_a_long_soak(overlap: bool) -> None:
    soak(5000, overlap)


@pytest.mark.slow
def test_a_soak_of_the_model() -> None:
    """1,000 requests on the packaged checkpoint with random aborts, in a pool soon used whole."""
    rng = random.Random(8)
    settings = {"scheduling.max_num_seqs": 16, "cache.num_blocks": 24}
    with LLM("golden", device="cpu", config=settings) as llm:
        submitted, done = 0, 0
        live: list[int] = []
        sizes: list[int] = []
        while submitted < 1000 or llm.has_work:
            if submitted < 1000 and len(live) < 40:
                prompt = [rng.randrange(3, 280) for _ in range(rng.randrange(1, 40))]
                live.append(llm.submit(prompt, SamplingParams(max_tokens=rng.randrange(1, 12))))
                submitted += 1
            if live and rng.random() < 0.1:
                llm.cancel(rng.choice(live))
            for completion in llm.step():
                done += 1
                live.remove(completion.request_id)
                if done % 100 == 0:
                    sizes.append(peak_memory_bytes())
        assert done == 1000 and llm.stats().blocks_used == 0
        assert sizes[-1] - sizes[3] < 32 * 2**20, sizes


def test_what_a_progress_callback_submits_runs_along(llm: ToyLLM) -> None:
    added: list[int] = []

    def progress(state: Progress) -> None:
        if len(added) < 3:
            added.append(llm.submit([9, 9], PARAMS))

    long = SamplingParams(seed=3, max_tokens=30, ignore_eos=True)
    results = llm.generate([[5], [6]], long, progress=progress)
    assert [list(r.token_ids) for r in results] == [expected([i], long) for i in (5, 6)]
    others = finish(llm)
    assert sorted(r.request_id for r in others) == added
    assert all(list(r.token_ids) == expected([9, 9], PARAMS) for r in others)


@pytest.mark.parametrize("overlap", [False, True])
def test_threads_submit_and_cancel_while_another_steps(overlap: bool) -> None:
    """No request is lost or told twice, whenever a thread comes in."""
    llm = ToyLLM(overlap=overlap)
    ids: list[int] = []
    failures: list[BaseException] = []

    def user(number: int) -> None:
        rng = random.Random(number)
        try:
            for _ in range(40):
                ids.append(llm.submit([rng.randrange(200)] * rng.randint(1, 20), PARAMS))
                if rng.random() < 0.5:
                    llm.cancel(rng.choice(ids))
                llm.stats()
        except BaseException as error:
            failures.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=user, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        told = []
        while llm.has_work or any(thread.is_alive() for thread in threads):
            told += llm.step()
    finally:
        sys.setswitchinterval(before)
    assert not failures
    assert sorted(r.request_id for r in told) == sorted(ids) == list(range(120))
    for result in told:
        if result.finish_reason != "abort":
            assert list(result.token_ids) == expected(result.prompt_token_ids, PARAMS)
    assert llm.stats().blocks_used == 0
    llm.close()


def test_close_from_another_thread_waits_for_the_step() -> None:
    llm = ToyLLM()
    for number in range(20):
        llm.submit([5, number], PARAMS)
    llm.step()
    closer = threading.Thread(target=llm.close)
    closer.start()
    with pytest.raises(UnsupportedError, match="closed"):
        while True:
            llm.step()
    closer.join()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_cannot_call_its_engine(overlap: bool) -> None:
    """As a logits processor would; it is refused rather than waiting for itself."""
    llm = ToyLLM(overlap=overlap)
    refused: list[Exception] = []

    def call(plan: StepPlan) -> None:
        for meddle in (lambda: llm.cancel(0), lambda: llm.submit([5]), lambda: llm.step()):
            with pytest.raises(UnsupportedError, match="logits processor") as caught:
                meddle()
            refused.append(caught.value)

    llm.runner.hook = call
    assert list(llm.generate([5], PARAMS)[0].token_ids) == expected([5], PARAMS)
    assert refused
    llm.close()
