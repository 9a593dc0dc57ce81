"""The runner of an accelerator, on a CPU without graphs: the outcomes of the plain runner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch

import deepinfer.assembly
from deepinfer.engine import device_runner
from deepinfer.engine.device_runner import DeviceRunner, settle
from deepinfer.engine.graphs import GraphCache, StepKey, bound_bucket, draft_bucket, row_bucket
from deepinfer.engine.request import Completion, SamplingParams
from deepinfer.engine.speculation import Choice
from deepinfer.llm import LLM

DRAFTS = {"speculation.num_drafts": 3, "cache.tokens_per_block": 32}


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LLM]]:
    """Makes engines whose device side is that of a card, on the CPU."""

    def make(config, sizes, model, caches, layout, sampler, *rest):
        sampler._fixed = True
        most = sizes.max_model_len + config.speculation.num_drafts + 1
        return DeviceRunner(
            *(model, caches, layout, sampler, *rest, config.replay.mode),
            max_sequences=config.scheduling.max_num_seqs,
            max_blocks=-(-most // layout.tokens_per_block),
            graphs=False,
        )

    made: list[LLM] = []

    def start(model: str = "golden", **settings: object) -> LLM:
        monkeypatch.setattr(deepinfer.assembly, "make_runner", make)
        made.append(LLM(model, device="cpu", config=settings))
        monkeypatch.undo()
        return made[-1]

    yield start
    for llm in made:
        llm.close()


def outcome(result: Completion) -> tuple[object, ...]:
    return result.token_ids, result.finish_reason, result.logprobs, result.top_logprobs


def requests(plain: bool) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 280, n).tolist() for n in (1, 31, 128, 129)]
    params = [
        SamplingParams(
            temperature=(0.0, 0.7, 1.0)[i % 3],
            top_p=1.0 if plain else (1.0, 0.8)[i % 2],
            top_k=-1 if plain else (-1, 20)[i % 2],
            seed=i,
            max_tokens=4 + i,
            ignore_eos=i % 2 == 0,
            min_tokens=0 if plain else i % 3,
            logit_bias={} if plain or i % 3 else {7: 3.0},
            logprobs=0 if plain else i % 2,
            top_logprobs=0 if plain else 2 * (i % 2),
        )
        for i in range(len(prompts))
    ]
    return prompts, params


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("drafts", [{}, DRAFTS])
def test_outcomes_are_those_of_the_plain_runner(
    plain: bool, drafts: dict[str, object], on_device: Callable[..., LLM]
) -> None:
    settings = {**drafts, "scheduling.overlap": plain}
    with LLM("golden", device="cpu", config=settings) as llm:
        want = [outcome(r) for r in llm.generate(*requests(plain))]
    llm = on_device(**settings, **{"scheduling.max_num_seqs": 3})
    got = [outcome(r) for r in llm.generate(*requests(plain))]
    for mine, other in zip(got, want, strict=True):
        assert mine[:2] == other[:2]
        assert (mine[2] is None) == (other[2] is None)
        if mine[2] is not None:
            assert np.allclose(mine[2], other[2], atol=1e-5)
    alone = [outcome(llm.generate(p, own)[0]) for p, own in zip(*requests(plain), strict=True)]
    assert alone == got


@pytest.mark.parametrize("drafts", [{}, DRAFTS])
def test_shapes_and_rules_hold_on_the_device_too(
    drafts: dict[str, object], on_device: Callable[..., LLM]
) -> None:
    """Grammar masks, forced ids, prompt logprobs and processors, beside free rows."""
    pytest.importorskip("llguidance")

    def fewer(tokens: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        logits[::2] = -torch.inf
        return logits

    params = [
        SamplingParams(max_tokens=6, seed=1, structured={"regex": "[ab]{2,4}c"}),
        SamplingParams(max_tokens=5, seed=2, ignore_eos=True),
        SamplingParams(max_tokens=5, temperature=0, forced_token_ids=(5, 9), prompt_logprobs=True),
        SamplingParams(max_tokens=4, seed=3, logits_processors=(lambda: fewer,), ignore_eos=True),
    ]
    prompts = [[5, 6, 7], list(range(9, 50)), [3] * 20, [100, 101]]
    with LLM("demo", device="cpu", config=drafts) as llm:
        want = llm.generate(prompts, params)
    got = on_device("demo", **drafts).generate(prompts, params)
    for mine, other in zip(got, want, strict=True):
        assert (mine.token_ids, mine.finish_reason) == (other.token_ids, other.finish_reason)
    assert np.allclose(got[2].prompt_logprobs[1:], want[2].prompt_logprobs[1:], atol=1e-5)


def test_damage_is_named(on_device: Callable[..., LLM]) -> None:
    llm = on_device()
    model = llm._loop.executor._runner.model
    model.blocks[3].attention.kv_norm.fill_(torch.nan)
    (result,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3))
    assert not result.token_ids and "layers.3 is the first bad layer" in str(result.error)


def test_buckets_cover_and_waste_little() -> None:
    for count in range(1, 3000):
        padded = row_bucket(count)
        assert count <= padded and row_bucket(padded) == padded
        assert count < 64 or padded <= count * 1.25
    assert [row_bucket(n) for n in (1, 2, 3, 9, 64, 65, 129)] == [1, 2, 4, 16, 64, 80, 160]
    assert [draft_bucket(8, n) for n in (0, 1, 4, 5, 40)] == [8, 12, 12, 16, 48]
    assert [draft_bucket(1, n) for n in (0, 1, 5)] == [1, 2, 6]
    assert [bound_bucket(n, 512, 5000) for n in (1, 512, 513, 2049)] == [512, 512, 2048, 5000]


def test_weights_settle_on_a_row_of_nothing() -> None:
    with LLM("golden", device="cpu", config=DRAFTS) as llm:
        runner = llm._loop.executor._runner
        model, layout = runner.model, runner.layout
        before = [runner.caches.slots.clone(), runner.caches.blocks.clone()]
        settle(model, layout)
        assert torch.equal(before[0], runner.caches.slots)
        assert torch.equal(before[1], runner.caches.blocks)


class _Recorder(GraphCache[int]):
    """Counts recordings instead of making them."""

    def _record(self, key: StepKey, work: Callable[[], int]) -> object:
        self.num_recorded += 1
        graph = type("Graph", (), {"replay": lambda _: None})()
        self._graphs[key] = (graph, work())
        return self._graphs[key]


def test_a_step_is_recorded_at_its_second_run() -> None:
    key = StepKey(4, 4, 512, False, False, False, "greedy")
    ran: list[int] = []
    cache = _Recorder(enabled=True)
    for _ in range(4):
        cache.run(key, lambda: ran.append(1) or len(ran))
    assert len(ran) == 2 and cache.num_recorded == 1
    cache.forget()
    cache.run(key, lambda: ran.append(1) or 0)
    assert cache.num_recorded == 2, "seen before, so recorded at once"
    plain: GraphCache[int] = GraphCache(enabled=False)
    assert [plain.run(key, lambda: 7) for _ in range(3)] == [7, 7, 7]


def test_larger_recordings_serve_until_they_have_wasted_a_recording() -> None:
    cache = _Recorder(enabled=True)
    wide = StepKey(4, 16, 512, True, True, True, "greedy")
    key = wide._replace(rows=8)

    def step(key: StepKey, wide: StepKey = wide) -> StepKey:
        found = cache.choose(key, wide)
        cache.run(found, lambda: 0)
        return found

    assert [step(key) for _ in range(3)] == [wide] * 3 and cache.num_recorded == 1
    less = wide._replace(sequences=2, rows=2, drafted=False, budgeted=False)
    assert step(less) == wide, "a step without drafts is one that verifies none"
    own = [wide._replace(propose=False), wide._replace(draws="draw"), wide._replace(rows=17)]
    own += [wide._replace(most_tokens=2048), wide._replace(sequences=8)]
    assert [cache.choose(other, other) for other in own] == own, "no recording serves these"
    for _ in range(700):
        step(key)
    assert cache.choose(key, wide) == key in cache._graphs and cache.num_recorded == 2
    assert step(less) == key, "of those that serve, the one of fewest rows"
    assert step(less._replace(rows=12)) == wide
    off: GraphCache[int] = GraphCache(enabled=False)
    assert off.choose(key, wide) == key


class _Again(GraphCache[tuple[torch.Tensor, ...]]):
    """Recordings that run the work of when they were made."""

    def _record(self, key: StepKey, work: Callable[[], tuple[torch.Tensor, ...]]) -> object:
        made: list[torch.Tensor] = []

        def replay(_: object) -> None:
            made[:] = work()

        self.num_recorded += 1
        self._graphs[key] = type("Graph", (), {"replay": replay})(), made
        return self._graphs[key]


def test_steps_in_larger_recordings_have_the_same_outcomes(on_device: Callable[..., LLM]) -> None:
    """Streams end apart, budgets change, drafts come and go: few recordings serve all steps."""
    sizes = {**DRAFTS, "scheduling.max_num_seqs": 4, "scheduling.max_model_len": 512}
    prompts = [[5 + i] * (3 + 2 * i) for i in range(6)]
    params = [
        SamplingParams(temperature=0, max_tokens=6 + 3 * (i % 4), ignore_eos=True)
        for i in range(len(prompts))
    ]
    with LLM("golden", device="cpu", config=sizes) as plain:
        want = [outcome(r) for r in plain.generate(prompts, params)]
    llm = on_device(**sizes)
    runner = llm._loop.executor._runner
    runner.graphs, runner._varies = _Again(enabled=True), True
    keys: set[StepKey] = set()
    asked, choose = set(), runner.graphs.choose
    rng = np.random.default_rng(3)

    def chosen(key: StepKey, wide: StepKey) -> StepKey:
        asked.add(key)
        keys.add(found := choose(key, wide))
        return found

    runner.graphs.choose = chosen
    llm.planner.choose = lambda _: Choice(3, int(rng.integers(0, 13)), bool(rng.random() < 0.8))
    assert [outcome(r) for r in llm.generate(prompts, params)] == want
    assert len(keys) <= 6 and len(asked) >= 2 * len(keys), (keys, asked)


def test_usual_steps_are_recorded_at_the_start(
    on_device: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All numbers of sequences, with all drafts; running them leaves caches and slots alone."""
    sizes = {"scheduling.max_num_seqs": 3, "scheduling.max_model_len": 1024}
    runner = on_device(**DRAFTS, **sizes)._loop.executor._runner
    monkeypatch.setattr(device_runner, "_PREPARE_S", 1e9)
    runner.graphs = _Recorder(enabled=True)
    runner._varies = True
    before = runner.caches.slots.clone(), runner.state.length.clone(), runner.state.drafts.clone()
    runner.prepare()
    found = list(runner.graphs._graphs)
    assert found[0] == max(found) and len(set(found)) == len(found) == 10
    assert {(key.sequences, key.rows, key.propose) for key in found} == {
        (n, n * each, makes)
        for n in (1, 2, 4)
        for each, makes in ((1, False), (1, True), (4, True))
    }
    after = runner.caches.slots, runner.state.length, runner.state.drafts
    assert all(torch.equal(a[1:], b[1:]) for a, b in zip(before, after, strict=True))
