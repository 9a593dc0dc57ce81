"""The evaluation on the packaged checkpoint: scores, drafts, selections, records, the command."""

from __future__ import annotations

import itertools
import json
import lzma
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer.bench import evalmodel, evaluate
from deepinfer.bench.evaldata import (
    generated_documents,
    held_out_documents,
    json_chat_parts,
    pick,
)
from deepinfer.bench.evalmodel import EvalModel, Scored
from deepinfer.bench.evaluate import (
    TASKS,
    Evaluation,
    bucket,
    cut,
    draft_along,
    locate,
    run_tasks,
)
from deepinfer.bench.measures import Drafting, bits, fits_schema
from deepinfer.bench.tasks import copy_case, filler_of, needle_case
from deepinfer.cli.eval import TASK_NAMES
from deepinfer.config.engine import EngineConfig
from deepinfer.engine.request import SamplingParams
from deepinfer.errors import RequestError
from deepinfer.llm import LLM
from deepinfer.model.fast.session import Session

TEXT = (
    "Fellow citizens of the Senate and of the House, the table is created by the statement and "
    "the column has a default value. The whale was seen by the sailors of the ship at night."
)


@pytest.fixture(scope="module")
def model(demo_folder: Path) -> EvalModel:
    return EvalModel(demo_folder, EngineConfig())


@pytest.fixture(scope="module")
def small(demo_folder: Path) -> Evaluation:
    return Evaluation(demo_folder, EngineConfig(), limit=1)


def test_scores_are_the_engines_log_probabilities(model: EvalModel, demo_folder: Path) -> None:
    ids = model.tokenizer.encode(TEXT)
    scored = model.score(ids, loads=True, chunk=16)
    with LLM(demo_folder, device="cpu") as llm:
        forced = SamplingParams(
            temperature=0,
            max_tokens=len(ids) - 1,
            ignore_eos=True,
            logprobs=True,
            forced_token_ids=ids[1:],
        )
        (result,) = llm.generate([ids[:1]], forced)
    assert result.logprobs is not None
    assert np.allclose(scored.log_probs, result.logprobs, atol=1e-5)
    layers, active = model.config.num_hidden_layers, model.config.num_experts_per_tok
    assert scored.loads is not None
    assert scored.loads.sum(1).tolist() == [active * (len(ids) - 1)] * layers
    whole = model.score(ids)
    assert np.array_equal(whole.log_probs, scored.log_probs) and whole.loads is None


def test_a_uniform_model_costs_the_bits_of_its_vocabulary(
    model: EvalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = model.model.forward
    monkeypatch.setattr(model.model, "forward", lambda *args: forward(*args) * 0)
    ids = model.tokenizer.encode(TEXT)
    found = bits(model.score(ids).log_probs)
    assert found == pytest.approx((len(ids) - 1) * math.log2(model.config.vocab_size), rel=1e-6)


def test_two_processes_score_alike(model: EvalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    texts = [(model.tokenizer.encode(TEXT) * 3)[: 70 + i] for i in range(4)]
    with model.selecting("random"):
        alone = [model.score(text, loads=True) for text in texts]
    used: list[int] = []
    for count in (1, 2):
        monkeypatch.setattr(evalmodel, "cpu_count", lambda count=count: count)
        monkeypatch.setattr(evalmodel, "_TEXTS_A_WORKER", 2)
        start = model.model.forward

        def forward(*args: Any, start: Any = start, count: int = count) -> Any:
            used.append(count)
            return start(*args)

        monkeypatch.setattr(model.model, "forward", forward)
        with model.selecting("random"):
            found = model.score_all(texts, loads=True)
        monkeypatch.undo()
        for one, other in zip(alone, found, strict=True):
            assert one.token_ids == other.token_ids
            assert np.array_equal(one.log_probs, other.log_probs)
            assert np.array_equal(one.loads, other.loads)  # type: ignore[arg-type]
    assert used.count(1) == 4 and used.count(2) in (0, 4), "0 when processes could be forked"


def test_too_long_a_text_is_refused(model: EvalModel) -> None:
    with pytest.raises(RequestError, match="longer than the 2048"):
        model.score([5] * 2050)


def by_verification(
    model: EvalModel, prompt: Sequence[int], num_tokens: int
) -> tuple[list[int], list[int]]:
    """Speculate as the textbook says: draft a block, run it through the model, keep what agrees.

    Returns the tokens and the accepted length of every block.
    """
    tokens = [int(Session(model.model, len(prompt)).prefill(prompt)[-1].argmax())]
    lengths = []
    while len(tokens) < num_tokens:
        session = Session(model.model, len(prompt) + len(tokens) + 8)
        session.prefill([*prompt, *tokens[:-1]])
        block = session.draft(tokens[-1])[0].tolist()
        greedy = session.prefill(block).argmax(-1).tolist()
        kept = 0
        while kept < len(block) - 1 and greedy[kept] == block[kept + 1]:
            kept += 1
        tokens += greedy[: kept + 1]
        lengths.append(kept + 1)
    return tokens, lengths


def test_drafted_streams_equal_speculation_by_hand(model: EvalModel) -> None:
    prompts = [model.tokenizer.encode(TEXT)[:n] for n in (12, 40)]
    for prompt, (drafting, tokens) in zip(prompts, draft_along(model, prompts, 16), strict=True):
        wanted, lengths = by_verification(model, prompt, 16)
        size = min(len(tokens), len(wanted))
        assert size >= 10 and tokens[:size] == wanted[:size]
        assert drafting.lengths == lengths[: len(drafting.lengths)]
        assert 1 + sum(drafting.lengths) <= len(tokens) < 1 + sum(drafting.lengths) + 6


def test_selections_differ_where_not_everything_fits(model: EvalModel) -> None:
    filler = filler_of([d.text for d in held_out_documents() if d.source == "speeches"])
    case = needle_case(random.Random(1), filler, 1500, 3)
    ids, answers = locate(case, model.tokenizer)
    own = model.score(ids)
    found = {}
    for selection in ("random", "all"):
        with model.selecting(selection):  # type: ignore[arg-type]
            found[selection] = model.score(ids, chunk=128)
    again = model.score(ids)
    assert np.array_equal(own.log_probs, again.log_probs)
    # Nothing is selected while everything visible fits: 64 entries of the ratio-1 layers.
    for other in found.values():
        assert np.array_equal(own.log_probs[:63], other.log_probs[:63])
        assert not np.array_equal(own.log_probs, other.log_probs)
    digits = [i for first, last, _ in answers for i in range(first - 1, last - 1)]
    cost = {name: bits(scored.log_probs[digits]) for name, scored in found.items()}
    assert cost["all"] < bits(own.log_probs[digits]) + 1
    assert cost["random"] > cost["all"] + 4
    assert bits(found["random"].log_probs) > bits(own.log_probs)


def test_located_answers_spell_the_codes(model: EvalModel) -> None:
    filler = filler_of([d.text for d in held_out_documents() if d.source == "python"])
    for case in (
        needle_case(random.Random(2), filler, 900, 4),
        copy_case(random.Random(3), 12),
    ):
        ids, answers = locate(case, model.tokenizer)
        data = case.text.encode()
        assert len(answers) == len(case.answers)
        for (first, last, distance), answer in zip(answers, case.answers, strict=True):
            spelled = b"".join(map(model.tokenizer.piece, ids[first:last]))
            asked = data[answer.start : answer.end]
            assert asked in spelled and len(spelled) <= len(asked) + 1
            source = b"".join(map(model.tokenizer.piece, ids[first - distance : last - distance]))
            assert source.strip() == asked.strip()


def test_rows_hold_every_byte_once(model: EvalModel) -> None:
    for document in held_out_documents()[:4]:
        rows = list(cut(document, model.tokenizer, 100))
        assert b"".join(row.data for row in rows) == document.text.encode()
        assert all(row.token_ids[0] == model.tokenizer.bos_token_id for row in rows)
        assert all(len(row.token_ids) == row.counted + 1 <= 101 for row in rows)
        assert len({row.name for row in rows}) == len(rows)


def test_packaged_texts() -> None:
    held = held_out_documents()
    assert {d.source for d in held} >= {"speeches", "sqlite", "python", "wordnet"}
    assert len({(d.source, d.name) for d in held}) == len(held) == len({d.text for d in held})
    assert 500_000 < sum(len(d.text.encode()) for d in held) < 2_000_000
    for document in generated_documents("json_chat"):
        prompt, schema, answer = json_chat_parts(document.text)
        assert prompt.endswith("</think>") and fits_schema(json.loads(answer), schema)
    assert len(generated_documents("json")) == 64


def test_a_limit_picks_by_hash_and_keeps_the_order() -> None:
    names = [f"item {i}" for i in range(50)]
    few, more = pick(names, 5, str), pick(names, 9, str)
    assert len(few) == 5 and set(few) < set(more) and list(more) == sorted(more, key=names.index)
    assert pick(names, None, str) == names
    assert pick([*names, "another"], 5, str)[:4] == list(few)[:4] or "another" in pick(
        [*names, "another"], 5, str
    )


@pytest.mark.parametrize(
    ("distance", "low"), [(0, 0), (127, 0), (128, 128), (1023, 512), (5000, 2048)]
)
def test_buckets(distance: int, low: int) -> None:
    assert bucket(distance) == low


def test_shares_bits_and_lengths_of_the_tasks(
    small: Evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sources of known bits and loads; blocks of known lengths."""
    config = small.model.config
    size = (config.num_hidden_layers, config.n_routed_experts)
    even = np.full(size, 4, np.int64)
    skewed = even.copy()
    skewed[1, 0], skewed[1, 1] = 0, 8

    def scored(each: float, loads: np.ndarray[Any, Any]) -> Scored:
        return Scored([0, 5, 6], np.full(2, -each * math.log(2)), np.zeros(2, bool), loads)

    rows = [
        (evaluate.Row(source=s, name=s, token_ids=[0, 5, 6], data=data, counted=2), found)
        for s, data, found in (
            ("speeches", b"abcd", scored(4, even)),
            ("wordnet", b"a" * 12, scored(8, skewed)),
        )
    ]
    first = Drafting()
    first.offer([1, 2], [0.0, 9.0])
    assert [first.take(t) for t in (1, 2, 3)] == [False, False, True]
    first.offer([1, 2], [0.0, 9.0])
    assert first.take(7)
    monkeypatch.setitem(vars(small), "natural", rows)
    monkeypatch.setitem(
        vars(small), "drafted", {"speeches": [(first, [9, 1, 2, 3, 7])], "json": []}
    )
    found = {
        (f.name, f.labels["source"]): f
        for f in TASKS["bpb"].run(small)
        if f.name == "model" and f.labels["source"] not in ("json", "json_chat")
    }
    assert {source: f.value for (_, source), f in found.items()} == {
        "natural": 24 / 16,
        "natural without glosses": 2.0,
        "speeches": 2.0,
        "wordnet": 16 / 12,
    }
    worst = {
        (f.name, f.labels["source"], f.labels["layer"]): f.value
        for f in TASKS["experts"].run(small)
    }
    assert worst["least load", "natural", "all"] == 0.5
    assert worst["most load", "natural", 1] == 1.5
    assert worst["least load", "wordnet", "all"] == 0 and worst["most load", "speeches", 0] == 1
    drafts = {
        (f.name, f.labels.get("place")): (f.value, f.count)
        for f in itertools.islice(TASKS["drafts"].run(small), 4)
        if f.labels["source"] == "natural"
    }
    assert drafts["mean accepted length", None] == (2.0, 2)
    assert drafts["acceptance", 1] == (0.5, 2) and drafts["acceptance", 2] == (1.0, 1)


def test_compressors_see_the_same_bytes() -> None:
    data = b"the same words again and again " * 40
    found = evaluate._compressed(data)
    assert found["xz -9"] == len(lzma.compress(data, preset=9))
    assert set(found) <= {"xz -9", "PPMd"} and all(0 < size < 200 for size in found.values())


def test_every_task_runs_on_a_little(demo_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real model on one row or case of each kind, shorter than the real ones."""
    for name, value in {"_PROMPT": 16, "_CONTINUED": 8, "_ANSWER_TOKENS": 8}.items():
        monkeypatch.setattr(evaluate, name, value)
    monkeypatch.setattr(evaluate, "_NEEDLES", ((300, 2, 1),))
    monkeypatch.setattr(evaluate, "_COPIES", ((16, 1),))
    run = Evaluation(demo_folder, EngineConfig(), limit=1)
    figures = run_tasks(run, ["retrieval", "drafts", "calibration", "json"])
    assert {f.task for f in figures} == {"retrieval", "drafts", "calibration", "json"}
    selections = {f.labels["selection"] for f in figures if f.task == "retrieval"}
    assert selections == {"indexer", "random", "all"}
    assert all(math.isfinite(f.value) and f.count >= 1 for f in figures)
    same = [f.value for f in figures if f.name == "same tokens, engine"]
    assert len(same) == 8 and set(same) == {1.0}
    errors = [f for f in figures if f.name == "expected calibration error"]
    assert all(0 <= f.value <= 1 for f in errors)
    assert tuple(TASKS) == TASK_NAMES


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
