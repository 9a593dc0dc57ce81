"""Prefix reuse, saved requests and bounded replay through LLM: what changes, and what must not."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepinfer import LLM, Completion, SamplingParams, State
from deepinfer.errors import ConfigError, RequestError, StateError

GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=True)


def llm(model: str = "golden", **settings: object) -> LLM:
    dotted: dict[str, object] = {
        "scheduling.max_num_seqs": 8,
        "scheduling.overlap": True,
        "cache.tokens_per_block": 32,
    }
    dotted |= {key.replace("__", "."): value for key, value in settings.items()}
    return LLM(model, "cpu", dotted)


def ids(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 280) for _ in range(count)]


def outcome(completions: Sequence[Completion]) -> list[tuple[object, ...]]:
    """All that must not depend on how the caches were used."""
    return [(c.token_ids, c.logprobs, c.text, c.finish_reason, c.error) for c in completions]


def hits(engine: LLM) -> tuple[int, int]:
    """Sequences that began behind a prefix, and the tokens that they did not compute."""
    prefix = engine._open_loop().scheduler._holdings._prefix
    assert prefix is not None
    prefix.check()
    return prefix.stats.num_hits, prefix.stats.num_hit_tokens


SYSTEM = ids(1, 110)
PROMPTS = [
    SYSTEM + ids(2, 40),
    SYSTEM + ids(3, 17),
    SYSTEM + ids(2, 40) + ids(5, 70),
    SYSTEM[:96] + ids(6, 3),
    SYSTEM[:96],
    ids(4, 70),
]
PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_tokens=5, top_logprobs=2),
] * 3


@pytest.fixture(scope="module")
def without() -> list[tuple[object, ...]]:
    """What the prompts give when nothing is reused."""
    with llm() as engine:
        return outcome(engine.generate(PROMPTS, PARAMS))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"scheduling__overlap": False, "scheduling__chunk_size": 50},
        {"cache__tokens_per_block": 16, "cache__prefix_checkpoints": 2},
        {"numerics__batch_invariant": False, "cache__num_blocks": 12},
    ],
    ids=lambda s: ",".join(s) or "default",
)
def test_reuse_changes_nothing(
    settings: Mapping[str, object], without: list[tuple[object, ...]]
) -> None:
    """Together, then one by one in another order: always the same."""
    with llm(cache__prefix=True, **settings) as engine:
        assert outcome(engine.generate(PROMPTS, PARAMS)) == without
        order = [3, 0, 1, 5, 4, 2]
        alone = [engine.generate([PROMPTS[i]], [PARAMS[i]])[0] for i in order]
        assert outcome(alone) == [without[i] for i in order]
        num, tokens = hits(engine)
        assert num > 0 and tokens % engine.config.cache.tokens_per_block == 0


def test_what_is_reused() -> None:
    """A shared beginning from the third prompt on, a repeated prompt from the second."""
    with llm(cache__prefix=True) as engine:
        for last in range(3):
            engine.generate([SYSTEM + ids(20 + last, 30)], GREEDY)
        assert hits(engine) == (1, 96)
        engine.generate([SYSTEM + ids(22, 30)], GREEDY)
        assert hits(engine) == (2, 96 + 128)
        counts = engine.stats().prefix
        assert counts is not None and counts["num_lookups"] == 4
        assert counts["num_hit_tokens"] == 224 and counts["num_checkpoints"] > 0
        scheduler = engine._open_loop().scheduler
        assert scheduler.num_blocks_used == scheduler._holdings._prefix.num_idle  # type: ignore[union-attr]


def test_scored_prompts_are_computed() -> None:
    """Prompt logprobs need every row, so such a request begins at its first token."""
    scored = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=True)
    with llm(cache__prefix=True) as engine:
        first = engine.generate([PROMPTS[0]], scored)[0]
        again = engine.generate([PROMPTS[0]], scored)[0]
        assert hits(engine) == (0, 0)
    assert first.prompt_logprobs == again.prompt_logprobs
    assert len(first.prompt_logprobs or ()) == len(PROMPTS[0]) - 1


def test_cancelled_prompts_leave_nothing_half_done() -> None:
    with llm(cache__prefix=True, scheduling__chunk_size=64) as engine:
        request = engine.submit(PROMPTS[0], GREEDY)
        for _ in range(3):
            engine.step()
        engine.cancel(request)
        engine.step()
        got = engine.generate([PROMPTS[0]], GREEDY)
        hits(engine)
    with llm() as engine:
        assert outcome(got) == outcome(engine.generate([PROMPTS[0]], GREEDY))


# Saved requests


def finish(engine: LLM, request: int) -> Completion:
    """Run until a request is done."""
    while True:
        for completion in engine.step():
            if completion.request_id == request:
                return completion


@pytest.fixture(scope="module")
def engine() -> Iterator[LLM]:
    with llm(scheduling__chunk_size=64) as built:
        yield built


SAVED = [
    SamplingParams(temperature=0, max_tokens=6, top_logprobs=3),
    SamplingParams(temperature=0.8, max_tokens=6, seed=3, stop=["zzzz"], logit_bias={9: 1.0}),
    # Its random seed travels along; any seed must still run when it is saved.
    SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True),
]


@pytest.mark.parametrize(
    ("params", "steps"),
    [(0, 0), (0, 2), (0, 6), (1, 3), (1, 6), (2, 1), (2, 5)],
)
def test_a_saved_request_goes_on(engine: LLM, tmp_path: Path, params: int, steps: int) -> None:
    """Saved anywhere, in the prompt or behind it, and taken up by this and another engine."""
    prompt = ids(30, 140)
    other = engine.submit(ids(31, 90), SamplingParams(temperature=0, max_tokens=20))
    request = engine.submit(prompt, SAVED[params])
    done: list[Completion] = []
    for _ in range(steps):
        done += engine.step()
    assert all(completion.request_id != request for completion in done)
    state = engine.snapshot(request)
    state.save(tmp_path / "request")
    whole = finish(engine, request)
    resumed = finish(engine, engine.resume(state))
    assert outcome([resumed]) == outcome([whole]), steps
    engine.cancel(other)
    with llm(scheduling__overlap=False, cache__tokens_per_block=128, cache__prefix=True) as second:
        loaded = State.load(tmp_path / "request")
        moved = finish(second, second.resume(loaded))
        assert outcome([moved]) == outcome([whole]), steps


def test_a_state_of_a_state(engine: LLM) -> None:
    """A resumed request can be saved before it ran, and after."""
    params = SamplingParams(temperature=0, max_tokens=10, logprobs=True)
    whole = engine.generate([ids(40, 70)], params)[0]
    request = engine.submit(ids(40, 70), params)
    for _ in range(5):
        engine.step()
    state = engine.snapshot(request)
    engine.cancel(request)
    again = engine.resume(state)
    waiting = engine.snapshot(again)
    assert waiting.num_computed == state.num_computed and waiting.token_ids == state.token_ids
    engine.step()
    engine.step()
    later = engine.snapshot(again)
    assert len(later.token_ids) > len(state.token_ids)
    engine.cancel(again)
    assert outcome([finish(engine, engine.resume(later))]) == outcome([whole])


def test_states_that_do_not_fit(engine: LLM) -> None:
    request = engine.submit(ids(50, 70), GREEDY)
    for _ in range(4):
        engine.step()
    state = engine.snapshot(request)
    finish(engine, request)
    with pytest.raises(RequestError, match="has ended"):
        engine.snapshot(request)
    with pytest.raises(RequestError, match="State"):
        engine.resume("a file")  # type: ignore[arg-type]
    wide = {name: part.astype("float32") for name, part in state.parts.items()}
    with pytest.raises(StateError, match=r"shapes of this model: .*window\.0"):
        engine.resume(replace(state, parts=wide))
    with pytest.raises(StateError, match="contradicts itself"):
        engine.resume(replace(state, num_computed=5000))
    with llm(numerics__mode="noq") as other, pytest.raises(StateError, match="the arithmetic"):
        other.resume(state)
    with llm(replay__mode="mask") as other, pytest.raises(StateError, match="bounded replay"):
        other.resume(state)
    with llm("demo") as other, pytest.raises(StateError, match="weights") as caught:
        other.resume(state)
    assert "the model config" in str(caught.value)
    with (
        llm(scheduling__max_model_len=64) as other,
        pytest.raises(RequestError, match=r"scheduling\.max_model_len"),
    ):
        other.resume(state)


# Bounded replay


LONG = [SYSTEM + ids(2, 90), SYSTEM + ids(9, 60), SYSTEM[:20]]


def test_replay_modes_agree() -> None:
    """Both modes give the same, whatever the chunks, the order, reuse of prefixes."""
    found = []
    for settings in (
        {"replay__mode": "mask"},
        {"replay__mode": "compact"},
        {"replay__mode": "compact", "scheduling__chunk_size": 70, "scheduling__overlap": False},
        {"replay__mode": "compact", "cache__prefix": True, "scheduling__chunk_size": 100},
    ):
        with llm(**settings) as engine:
            first = outcome(engine.generate(LONG, PARAMS[:3]))
            found.append(first)
            if "cache__prefix" in settings:
                assert outcome(engine.generate(LONG, PARAMS[:3])) == first, settings
                assert hits(engine)[0] > 0
    assert all(one == found[0] for one in found)


def test_replay_that_keeps_enough_is_exact() -> None:
    """The exact bound of this checkpoint's 3 decoder layers: 128 + 2 * 127."""
    found = []
    for settings in ({}, {"replay__mode": "compact", "replay__keep_tokens": 382}):
        with llm(**settings) as engine:
            found.append(outcome(engine.generate([ids(70, 400)], GREEDY)))
    assert found[0] == found[1]


def test_replay_refusals() -> None:
    with pytest.raises(ConfigError, match=r"replay\.keep_tokens: found 100"):
        llm(replay__mode="compact", replay__keep_tokens=100)
    with llm(replay__mode="compact") as engine:
        scored = engine.generate([[5, 6, 7]], SamplingParams(prompt_logprobs=True))[0]
        assert scored.error is not None and "prompt_logprobs" in scored.error
        assert "replay.mode" in scored.error


def test_replay_states(tmp_path: Path) -> None:
    """A saved request goes on from the same kept suffix, also when saved before it."""
    prompt = ids(60, 190)
    with llm(replay__mode="compact", scheduling__chunk_size=50) as engine:
        whole = engine.generate([prompt], GREEDY)[0]
        for steps in (2, 6):
            request = engine.submit(prompt, GREEDY)
            for _ in range(steps):
                engine.step()
            state = engine.snapshot(request)
            engine.cancel(request)
            with llm(replay__mode="mask") as other:
                assert outcome([finish(other, other.resume(state))]) == outcome([whole]), steps


# All of it with drafts, and with grammars


def test_drafts_change_nothing(without: list[tuple[object, ...]], tmp_path: Path) -> None:
    """Draft keys come along with prefixes and saved requests: the same tokens and drafts."""
    settings: dict[str, Any] = {"speculation__num_drafts": 3, "speculation__variable": False}
    with llm(cache__prefix=True, scheduling__chunk_size=50, **settings) as engine:
        first = engine.generate(PROMPTS, PARAMS)
        again = engine.generate(PROMPTS, PARAMS)
        assert hits(engine)[0] > 0
        request = engine.submit(ids(30, 140), GREEDY)
        for _ in range(5):
            engine.step()
        state = engine.snapshot(request)
        whole = finish(engine, request)
        resumed = finish(engine, engine.resume(state))
    assert outcome(first) == outcome(again) == without
    assert outcome([resumed]) == outcome([whole])
    with llm(**settings) as plain:
        alone = [
            plain.generate([p], [params])[0] for p, params in zip(PROMPTS, PARAMS, strict=True)
        ]
    counts = [c.num_draft_accepted for c in alone]
    assert counts == [c.num_draft_accepted for c in first]  # the drafts are the same, too
    assert counts == [c.num_draft_accepted for c in again]


def test_replay_with_drafts() -> None:
    """Whether drafts are on or off, kept rows are the same ones."""
    found = []
    for drafts, mode in ((0, "mask"), (4, "compact"), (2, "mask")):
        with llm(replay__mode=mode, speculation__num_drafts=drafts) as engine:
            found.append(outcome(engine.generate(LONG, PARAMS[:3])))
    assert all(one == found[0] for one in found)


def test_a_grammar_goes_on(tmp_path: Path) -> None:
    """A saved request keeps its place in its grammar; reuse and replay leave it alone."""
    pytest.importorskip("llguidance")
    params = SamplingParams(
        temperature=0.9, seed=1, max_tokens=12, structured={"regex": "[a-d]{3}-[0-9]{6}"}
    )
    prompt = ids(80, 150)
    with llm(cache__prefix=True) as engine:
        whole = engine.generate([prompt], params)[0]
        assert whole.error is None and whole.text is not None
        assert outcome(engine.generate([prompt], params)) == outcome([whole])
        request = engine.submit(prompt, params)
        while not engine.snapshot(request).token_ids[3:]:
            engine.step()
        engine.snapshot(request).save(tmp_path / "state")
        engine.cancel(request)
    with llm() as other:
        resumed = finish(other, other.resume(State.load(tmp_path / "state")))
        assert outcome([resumed]) == outcome([whole])


def test_grammars_under_replay() -> None:
    """Shapes hold, and both modes give the same, with chunks, reuse, drafts and preemptions."""
    pytest.importorskip("llguidance")
    shapes = [{"regex": "[a-d]{3}-[0-9]{6}"}, {"choice": ["yes it is", "no it is not"]}, None]
    params = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=16, structured=shape)
        for i, shape in enumerate(shapes)
    ]
    prompts = [ids(80, 190), ids(80, 150) + ids(81, 60), ids(82, 150)]
    found = []
    for settings in (
        {"replay__mode": "mask"},
        {
            "replay__mode": "compact",
            "scheduling__chunk_size": 70,
            "cache__prefix": True,
            "speculation__num_drafts": 5,
        },
        {
            "replay__mode": "compact",
            "scheduling__overlap": False,
            "numerics__batch_invariant": False,
            "cache__num_blocks": 14,
        },
    ):
        with llm(**settings) as engine:
            for _ in range(2 if "cache__prefix" in settings else 1):
                found.append(outcome(engine.generate(prompts, params)))
    assert all(one == found[0] for one in found)
    assert re.fullmatch("[a-d]{3}-[0-9]{6}", str(found[0][0][2]))
    assert found[0][1][2] in ("yes it is", "no it is not")
