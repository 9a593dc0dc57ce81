"""Drafts through the whole engine: they change how many steps it takes, never what comes out."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer.engine.request import Completion, SamplingParams
from deepinfer.errors import ConfigError, RequestError
from deepinfer.llm import LLM

Config = Mapping[str, object]
Told = tuple[Any, ...]

BASE = {
    "scheduling.max_num_seqs": 8,
    "scheduling.overlap": True,
    "speculation.cost_cache_seconds": 0,
}
PROMPTS = [[i + 3, i + 9, 7] for i in range(3)] + [[(5 * i) % 200 + 3 for i in range(150)], [9]]
MIX = [
    SamplingParams(max_tokens=24, temperature=0.0, top_logprobs=2),
    SamplingParams(max_tokens=17, seed=5, logprobs=True),
    SamplingParams(max_tokens=24, seed=6, temperature=0.7, top_p=0.8, top_k=12, logprobs=True),
    SamplingParams(max_tokens=12, seed=7, min_tokens=9, logit_bias={20: 3.0, 21: 3.0}),
    SamplingParams(max_tokens=13, temperature=0.0, forced_token_ids=[40, 41, 42, 43, 44]),
]


def told(results: Sequence[Completion]) -> list[Told]:
    """What must not depend on drafts."""
    return [
        (r.token_ids, r.text, r.finish_reason, r.logprobs, r.top_logprobs, r.prompt_logprobs)
        for r in results
    ]


def run(
    config: Config, prompts: Any = PROMPTS, params: Any = MIX
) -> tuple[list[Told], dict[str, Any]]:
    with LLM("golden", config={**BASE, **config}) as llm:
        results = llm.generate(prompts, params)
        if not llm.config.cache.prefix:
            assert llm.stats().blocks_used == 0
        else:  # once more, behind what the first run has left
            again = llm.generate(prompts, params)
            assert told(again) == told(results)
        return told(results), llm.stats().speculation or {}


@pytest.fixture(scope="module")
def plain() -> list[Told]:
    return run({})[0]


@pytest.mark.parametrize(
    "config",
    [
        {"speculation.num_drafts": 1},
        {"speculation.num_drafts": 3, "scheduling.overlap": False},
        {"speculation.num_drafts": 5},
        {"speculation.num_drafts": 5, "speculation.variable": True},
        {"speculation.num_drafts": 4, "speculation.variable": True, "scheduling.overlap": False},
        {"speculation.num_drafts": 5, "scheduling.chunk_size": 32, "scheduling.max_num_seqs": 2},
        {"speculation.num_drafts": 5, "cache.tokens_per_block": 8, "cache.prefix": True},
    ],
    ids=str,
)
def test_output_with_drafts_is_output_without(config: Config, plain: list[Told]) -> None:
    got, stats = run(config)
    assert got == plain
    accepted, verified = stats["accepted"], stats["verified"]
    assert sum(accepted) > 0, "nothing was accepted, so nothing is shown"
    assert stats["wasted_rows"] == sum(verified) - sum(accepted)


def test_sequences_put_back_draft_on(plain: list[Told]) -> None:
    """Preempted at every third step, under growing blocks, with drafts."""
    config = {**BASE, "speculation.num_drafts": 3}
    with LLM("golden", config=config) as llm:
        ids = [llm.submit(p, q) for p, q in zip(PROMPTS, MIX, strict=True)]
        done: dict[int, Completion] = {}
        step = 0
        while len(done) < len(ids):
            done |= {r.request_id: r for r in llm.step()}
            step += 1
            loop = llm._loop
            if step % 3 == 0 and step < 30 and loop is not None:
                loop.scheduler.preempt(ids[step % len(ids)])
        results = [done[i] for i in ids]
    assert told(results) == plain
    assert sum(r.num_preemptions for r in results) >= 4


def test_stop_strings_and_ids_inside_a_step(plain: list[Told]) -> None:
    """Whatever token ends the request, the accepted drafts behind it are dropped."""
    endings = sorted(set(plain[0][0]))[:6]
    params = [SamplingParams(max_tokens=24, temperature=0.0, stop_token_ids=[e]) for e in endings]
    prompts = [PROMPTS[0]] * len(params)
    want, _ = run({}, prompts, params)
    got, _ = run({"speculation.num_drafts": 5}, prompts, params)
    assert got == want and all(len(w[0]) <= 24 for w in want)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 6, 7])
def test_limits_are_met_exactly(max_tokens: int, plain: list[Told]) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    with LLM("golden", config={**BASE, "speculation.num_drafts": 5}) as llm:
        (result,) = llm.generate([PROMPTS[0]], params)
    assert result.token_ids == plain[0][0][:max_tokens]
    assert result.num_steps <= max_tokens
    assert result.num_draft_accepted <= result.num_draft_verified <= result.num_draft_proposed


def test_accounting_adds_up() -> None:
    with LLM("golden", config={**BASE, "speculation.num_drafts": 3}) as llm:
        results = llm.generate(PROMPTS, SamplingParams(max_tokens=20, temperature=0.0))
        stats: Any = llm.stats().speculation
    assert stats is not None
    json.dumps(stats)
    # The first token comes from prefill; the others from decode steps.
    decoded = sum(len(r.token_ids) - 1 for r in results)
    steps = sum(r.num_steps - 1 for r in results)
    assert stats["tokens"] == decoded and stats["steps"] == steps
    assert sum(r.num_draft_verified for r in results) == sum(stats["verified"])
    accepted = sum(r.num_draft_accepted for r in results)
    assert accepted == sum(stats["accepted"])
    told: list[Any] = [r.drafts.to_json() for r in results if r.drafts is not None]
    for name in ("proposed", "verified", "accepted"):
        lists: list[Any] = [row[name] for row in told]
        assert [sum(c) for c in itertools.zip_longest(*lists, fillvalue=0)] == stats[name]
    for name in ("steps", "tokens", "bonus", "wasted_rows"):
        assert sum(row[name] for row in told) == stats[name]
    assert stats["proposed"] == stats["verified"], "all drafts are verified"
    assert decoded == steps + accepted, "each step brings what it accepted and one more"
    assert stats["rows"] == steps + sum(stats["verified"])


def test_accounting_is_that_of_a_count_by_hand(plain: list[Told]) -> None:
    """One request, stopped at every length within its steps, against a walk over its tokens."""
    whole = plain[0][0]
    for length in (*range(1, 8), len(whole)):
        params = SamplingParams(max_tokens=24, temperature=0.0, stop_token_ids=[whole[length - 1]])
        end = whole.index(whole[length - 1]) + 1
        with LLM("golden", config={**BASE, "speculation.num_drafts": 3}) as llm:
            number = llm.submit(PROMPTS[0], params)
            (sequence,) = llm._loop.scheduler._sequences.values()  # type: ignore[union-attr]
            done: list[Completion] = []
            before: tuple[int, tuple[int, ...]] = (sequence.num_prompt_tokens, ())
            steps: list[tuple[tuple[int, ...], int]] = []
            while not done:
                done = llm.step()
                held = len(sequence.token_ids)
                if held > before[0] > sequence.num_prompt_tokens:
                    steps.append((before[1], held - before[0]))
                before = (held, sequence.drafts)
            stats: Any = llm.stats().speculation
        assert done[0].request_id == number
        assert done[0].token_ids == whole[:end]
        hits = list(_hits(steps, whole))
        verified = [sum(len(drafts) > place for drafts, _ in hits) for place in range(3)]
        accepted = [sum(hit > place for _, hit in hits) for place in range(3)]
        bonus = sum(
            0 < hit == len(drafts) < kept
            for (drafts, hit), (_, kept) in zip(hits, steps, strict=True)
        )
        assert stats["proposed"] == stats["verified"] == verified
        assert (stats["accepted"], stats["bonus"]) == (accepted, bonus)
        assert stats["tokens"] == end - 1 and stats["steps"] == len(steps)
        assert stats["wasted_rows"] == sum(verified) - sum(accepted)
        if steps:
            assert done[0].drafts is not None
            assert done[0].drafts.mean_accepted_length == (end - 1) / len(steps)
            tried = sum(min(len(drafts), hit + 1) for drafts, hit in hits)
            assert sum(row["count"] for row in stats["calibration"]) == tried


def _hits(
    steps: Sequence[tuple[Sequence[int], int]], whole: Sequence[int]
) -> Iterator[tuple[Sequence[int], int]]:
    """Each step's drafts, and how many were right and kept."""
    at = 1
    for drafts, kept in steps:
        pairs = zip(drafts, whole[at : at + kept], strict=False)
        yield drafts, len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        at += kept


@pytest.mark.slow
def test_rejection_draws_from_the_same_distribution() -> None:
    """Second tokens of 600 seeds, by rejection and by coupling, with a chi-square test."""
    prompts = [PROMPTS[0]] * 600
    config = {"scheduling.max_num_seqs": 128, "speculation.num_drafts": 2}
    counts = []
    for method, first in (("coupled", 0), ("rejection", 10_000)):
        seeded = [SamplingParams(max_tokens=3, seed=first + i, top_k=6) for i in range(600)]
        with LLM("golden", config={**BASE, **config, "speculation.method": method}) as llm:
            results = llm.generate(prompts, seeded)
            assert llm.stats().num_verified_drafts > 0
        third: dict[int, int] = {}
        for result in results:
            third[result.token_ids[1]] = third.get(result.token_ids[1], 0) + 1
        counts.append(third)
    cells = [(counts[0].get(t, 0), counts[1].get(t, 0)) for t in set(counts[0]) | set(counts[1])]
    live = [(a, b) for a, b in cells if a + b >= 10]
    statistic = sum((a - b) ** 2 / (a + b) for a, b in live)
    freedom = len(live) - 1
    part = 2 / (9 * freedom)
    assert statistic < freedom * (1 - part + 3.7 * part**0.5) ** 3


def test_rejection_is_exact_where_nothing_is_drawn(plain: list[Told]) -> None:
    got, _ = run({"speculation.num_drafts": 3, "speculation.method": "rejection"})
    assert got[0] == plain[0] and got[4] == plain[4]
    again, _ = run({"speculation.num_drafts": 3, "speculation.method": "rejection"})
    assert again == got, "the draws are a function of the seeds"


@pytest.mark.parametrize(
    "config",
    [{}, {"speculation.variable": True}, {"speculation.method": "rejection"}],
    ids=str,
)
@pytest.mark.parametrize("part", ["norm", "main_norm"])
def test_damaged_draft_blocks_only_cost_time(config: Config, part: str, plain: list[Told]) -> None:
    with LLM("golden", config={**BASE, "speculation.num_drafts": 3, **config}) as llm:
        executor: Any = llm._loop.executor if llm._loop is not None else None
        with torch.inference_mode():
            getattr(executor._runner.model.draft, part).fill_(torch.nan)
        results = llm.generate(PROMPTS, MIX)
        stats: Any = llm.stats().speculation
    json.dumps(stats, allow_nan=False)
    assert all(r.finish_reason == p[2] for r, p in zip(results, plain, strict=True))
    exact = (0, 4) if "speculation.method" in config else range(len(plain))
    assert all(told(results)[i] == plain[i] for i in exact)


def test_processors_see_drafts_as_history() -> None:
    """A processor that forbids the last token again, with tokens that come from drafts."""

    def make() -> object:
        def forbid(tokens: Sequence[int], logits: Tensor) -> Tensor:
            logits[list(tokens[-3:])] = -torch.inf
            return logits

        return forbid

    params = SamplingParams(max_tokens=20, temperature=0.0, logits_processors=[make])
    want, _ = run({}, PROMPTS, params)
    got, _ = run({"speculation.num_drafts": 4}, PROMPTS, params)
    assert got == want
    for row in got:
        ids = np.array(row[0])
        assert not (ids[1:] == ids[:-1]).any()


def test_grammars_hold_within_a_step() -> None:
    pytest.importorskip("llguidance")
    shapes: list[dict[str, object]] = [
        {"json": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
        {"regex": "[a-f]{3,9}(-[0-9]+)*"},
    ]
    params = [
        SamplingParams(
            max_tokens=30, seed=i, temperature=i % 2, structured=shapes[i // 2], logprobs=True
        )
        for i in range(4)
    ]
    want, _ = run({}, PROMPTS[:4], params)
    for overlap in (True, False):
        config = {"speculation.num_drafts": 4, "scheduling.overlap": overlap}
        got, stats = run(config, PROMPTS[:4], params)
        assert got == want and sum(stats["verified"]) > 0


def test_samples_of_a_prompt() -> None:
    params = SamplingParams(max_tokens=6, seed=3, n=3)
    with LLM("golden", config=BASE) as llm:
        results = llm.generate([PROMPTS[0], PROMPTS[1]], params)
        one = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=6, seed=3))
        chunks = list(llm.stream([PROMPTS[0]], params))
        with pytest.raises(RequestError, match="n=3"):
            llm.submit(PROMPTS[0], params)
    assert [(r.index, r.sample_index) for r in results] == [
        (i, s) for i in (0, 1) for s in range(3)
    ]
    assert results[0].token_ids == one[0].token_ids, "sample 0 has the request's own seed"
    assert len({r.token_ids for r in results[:3]}) == 3
    ended = {c.sample_index: c.completion for c in chunks if c.completion is not None}
    assert [ended[s].token_ids for s in range(3)] == [r.token_ids for r in results[:3]]


@pytest.fixture
def most() -> Iterator[int]:
    with LLM("golden", config=BASE) as llm:
        yield llm.model_config.dspark_block_size


def test_what_cannot_work_is_refused_by_name(most: int) -> None:
    for config, name in (
        ({"speculation.num_drafts": most + 1}, "speculation.num_drafts"),
        ({"speculation.variable": True}, "speculation.variable"),
        (
            {"speculation.num_drafts": 3, "speculation.confidence_temperatures": [1.0, 1.0]},
            "speculation.confidence_temperatures",
        ),
        (
            {
                "speculation.num_drafts": 3,
                "speculation.variable": True,
                "speculation.method": "rejection",
            },
            "numerics.batch_invariant",
        ),
    ):
        with pytest.raises(ConfigError, match=name):
            LLM("golden", config=config)
    ok = {"speculation.num_drafts": 2, "speculation.confidence_temperatures": [0.5, 2.0]}
    assert run(ok, [[5]], SamplingParams(max_tokens=3))[0]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["golden", "demo"])
def test_hundreds_of_prompts_are_lossless(model: str) -> None:
    generator = np.random.default_rng(11)
    with LLM(model, config=BASE) as llm:
        vocab = llm.model_config.vocab_size
    lengths = generator.integers(1, 200, 200).tolist()
    prompts = [generator.integers(3, vocab, n).tolist() for n in lengths]
    params = [
        SamplingParams(max_tokens=24, temperature=0.0, logprobs=True)
        if i % 2
        else SamplingParams(max_tokens=24, seed=i, temperature=0.9, top_p=0.95, logprobs=True)
        for i in range(200)
    ]
    results: list[list[Told]] = []
    for config in (
        {},
        {"speculation.num_drafts": 1},
        {"speculation.num_drafts": 3, "scheduling.overlap": False},
        {"speculation.num_drafts": 5},
        {"speculation.num_drafts": 5, "speculation.variable": True},
    ):
        with LLM(model, config={**BASE, "scheduling.max_num_seqs": 32, **config}) as llm:
            results.append(told(llm.generate(prompts, params)))
    assert all(result == results[0] for result in results[1:])
