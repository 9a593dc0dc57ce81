"""Structured output through the whole engine, on the recorded checkpoint."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import pytest

from deepinfer import LLM, Completion, SamplingParams, Structured
from deepinfer.engine.request import FinishReason
from deepinfer.errors import RequestError

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SHAPES: list[Structured | None] = [
    Structured(json=SCHEMA),
    Structured(regex=r"[a-z]{2,5}-\d{2}"),
    Structured(choice=["yes", "no", "maybe"]),
    Structured(ebnf='root ::= "(" root? ")" | [0-9]{1,2}'),
    None,
    Structured(json=SCHEMA, trigger="</think>", bound=9),
    Structured(json={"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}),
    Structured(regex="[ab]{3}", trigger=[40, 41]),
]


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts and parameters of a mixed batch."""
    rng = random.Random(5)
    prompts = [[0, *(rng.randrange(40, 250) for _ in range(rng.randrange(3, 9)))] for _ in SHAPES]
    params = [
        SamplingParams(max_tokens=32, temperature=1.0 if i % 3 else 0.0, seed=i, structured=shape)
        for i, shape in enumerate(SHAPES)
    ]
    return prompts, params


def run(
    config: Mapping[str, object], order: list[int] | None = None, alone: bool = False
) -> list[Completion]:
    """Return the completions of the batch, in the order of the requests."""
    prompts, params = requests()
    order = list(range(len(prompts))) if order is None else order
    settings = {"cache.num_blocks": 40, "scheduling.max_model_len": 128, **config}
    with LLM("golden", "cpu", settings) as llm:
        groups = [[i] for i in order] if alone else [order]
        found: dict[int, Completion] = {}
        for group in groups:
            results = llm.generate([prompts[i] for i in group], [params[i] for i in group])
            found.update(zip(group, results, strict=True))
    return [found[i] for i in range(len(prompts))]


@pytest.fixture(scope="module")
def alone() -> list[Completion]:
    """One request at a time, in the plain order: what all else must equal."""
    return run({"scheduling.overlap": False, "speculation.num_drafts": 0}, alone=True)


def outcome(completions: list[Completion]) -> list[tuple[Any, ...]]:
    return [(c.finish_reason, c.token_ids, c.text, c.error) for c in completions]


def test_finished_outputs_have_their_shape(alone: list[Completion]) -> None:
    for shape, completion in zip(SHAPES, alone, strict=True):
        assert completion.error is None, completion
        if shape is None or completion.finish_reason is not FinishReason.STOP:
            continue
        text = completion.text or ""
        if shape.kind == "json":
            json.loads(text.rpartition("</think>")[2])
        if shape.kind == "choice":
            assert text in shape.choices
    assert sum(c.finish_reason is FinishReason.STOP for c in alone) >= 4


@pytest.mark.parametrize(("overlap", "drafts"), [(True, 0), (False, 3), (True, 3)])
def test_batches_overlap_and_drafts_change_nothing(
    alone: list[Completion], overlap: bool, drafts: int
) -> None:
    order = list(range(len(SHAPES)))
    random.Random(f"{overlap} {drafts}").shuffle(order)
    config = {"scheduling.overlap": overlap, "speculation.num_drafts": drafts}
    assert outcome(run(config, order)) == outcome(alone)


def test_preemption_changes_nothing() -> None:
    """Three prompts fill their blocks; the first to need another one takes it from the last."""
    rng = random.Random(7)
    prompts = [[0, *(rng.randrange(40, 250) for _ in range(119))] for _ in range(3)]
    shape = Structured(json=SCHEMA, trigger=[40], bound=41)
    params = [
        SamplingParams(max_tokens=40, temperature=1.0, seed=i, structured=shape if i else SHAPES[6])
        for i in range(3)
    ]
    settings = {"scheduling.max_model_len": 256, "numerics.batch_invariant": False}
    with LLM("golden", "cpu", {**settings, "cache.num_blocks": 40}) as llm:
        expected = llm.generate(prompts, params)
    with LLM("golden", "cpu", {**settings, "cache.num_blocks": 4}) as llm:
        found = llm.generate(prompts, params)
    assert outcome(found) == outcome(expected)
    assert sum(c.num_preemptions for c in found) > 0


def test_the_second_library_serves_the_same_engine(alone: list[Completion]) -> None:
    found = run({"grammar.backend": "xgrammar"})
    for shape, one, other in zip(SHAPES, alone, found, strict=True):
        if shape is None or shape.kind != "json":
            assert one.token_ids == other.token_ids
        assert other.error is None


def test_a_bad_shape_is_its_own_request_s_problem() -> None:
    shapes = [
        Structured(json={"$ref": "#"}),
        Structured(regex="(a"),
        Structured(ebnf="root ::= root"),
        Structured(json={"type": "array", "maxItems": 2**64 - 1}),
        Structured(json={"uniqueItems": True}, strict=True),
        Structured(choice=["ok"]),
    ]
    params = [SamplingParams(max_tokens=4, structured=shape) for shape in shapes]
    with LLM("golden", "cpu", {"cache.num_blocks": 40, "scheduling.max_model_len": 128}) as llm:
        *bad, good = llm.generate([[0, 5, 6]] * len(shapes), params)
        for completion in bad:
            assert completion.finish_reason is FinishReason.STRUCTURED_OUTPUT_ERROR
            assert completion.error and completion.token_ids == ()
        assert good.text == "ok" and good.finish_reason is FinishReason.STOP
        report = llm.structured_report(Structured(json=SCHEMA))
        assert report.is_exact
        with pytest.raises(RequestError, match="cycle of references"):
            llm.structured_report({"json": {"$ref": "#"}})
        outside = SamplingParams(structured=Structured(regex="a", trigger=[10**6]))
        (refused,) = llm.generate([[0, 5]], outside)
        assert refused.finish_reason is FinishReason.INVALID_REQUEST
        two = Structured(regex="a", trigger=[5], bound="two words")
        (wide,) = llm.generate([[0, 5]], SamplingParams(structured=two))
        assert "must be one token" in str(wide.error)


def test_an_output_that_only_approximates_ends_with_an_error() -> None:
    schema = {"type": "array", "items": {"const": 1}, "uniqueItems": True, "minItems": 2}
    shape = Structured(json=schema)
    with LLM("golden", "cpu", {"cache.num_blocks": 40, "scheduling.max_model_len": 128}) as llm:
        (found,) = llm.generate([[0, 5]], SamplingParams(max_tokens=60, structured=shape, seed=1))
    assert found.finish_reason is FinishReason.STRUCTURED_OUTPUT_ERROR
    assert "rule /uniqueItems" in str(found.error) and found.text


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_stop_string_within_a_shape_is_no_success(drafts: int) -> None:
    shapes = [Structured(regex="[ab]{3}END"), Structured(ebnf='root ::= "x" root? "y"')]
    shapes.append(Structured(regex="[ab]{3}"))
    stops = ["END", "y", "c"]
    params = [
        SamplingParams(max_tokens=40, seed=1, structured=shape, stop=stop)
        for shape, stop in zip(shapes, stops, strict=True)
    ]
    config = {"cache.num_blocks": 40, "scheduling.max_model_len": 128}
    with LLM("golden", "cpu", {**config, "speculation.num_drafts": drafts}) as llm:
        *cut, whole = llm.generate([[0, 5]] * 3, params)
    for found in cut:
        assert found.finish_reason is FinishReason.STRUCTURED_OUTPUT_ERROR
        assert "a stop string ended the output" in str(found.error)
    assert whole.finish_reason is FinishReason.STOP and len(whole.text or "") == 3


def test_banned_ids_are_no_way_out_of_a_shape() -> None:
    config = {"cache.num_blocks": 40, "scheduling.max_model_len": 128}
    with LLM("golden", "cpu", config) as llm:
        one, other = (llm.generate([[0, 5]], only(text))[0].token_ids[0] for text in "ab")
    with LLM("golden", "cpu", {**config, "sampling.banned_token_ids": [one]}) as llm:
        params = [only("a"), only("[ab]"), only("b", trigger=[one], bound=other)]
        dead, alive, never = llm.generate([[0, 5]] * 3, params)
    assert dead.finish_reason is FinishReason.STRUCTURED_OUTPUT_ERROR
    assert "no token of this vocabulary" in str(dead.error)
    assert alive.text == "b" and alive.finish_reason is FinishReason.STOP
    assert never.finish_reason is FinishReason.INVALID_REQUEST
    assert "sampling.banned_token_ids rules out" in str(never.error)


def only(pattern: str, **trigger: Any) -> SamplingParams:
    return SamplingParams(max_tokens=4, seed=1, structured=Structured(regex=pattern, **trigger))


def test_streamed_output_is_the_same() -> None:
    params = SamplingParams(max_tokens=48, temperature=1.0, seed=1, structured=SHAPES[1])
    with LLM("golden", "cpu", {"cache.num_blocks": 40, "scheduling.max_model_len": 128}) as llm:
        (whole,) = llm.generate([[0, 50, 60]], params)
        chunks = list(llm.stream([[0, 50, 60]], params))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert chunks[-1].completion is not None
    assert chunks[-1].completion.token_ids == whole.token_ids
