"""What a Structured accepts, and what it says about the rest."""

from __future__ import annotations

import pytest

from deepinfer import SamplingParams, Structured
from deepinfer.errors import RequestError

GOOD = [
    ({"json": {"type": "object"}}, "json", '{"type": "object"}'),
    ({"json": '{"b": 1, "a": 2}'}, "json", '{"b": 1, "a": 2}'),
    ({"json": True}, "json", "true"),
    ({"regex": "a+"}, "regex", "a+"),
    ({"ebnf": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
    ({"choice": ["yes", "no", "yes"]}, "choice", '["yes", "no"]'),
]


@pytest.mark.parametrize(("given", "kind", "text"), GOOD)
def test_each_kind_is_kept_as_text(given: dict[str, object], kind: str, text: str) -> None:
    shape = Structured(**given)  # type: ignore[arg-type]
    assert (shape.kind, shape.text) == (kind, text)
    assert hash(shape) == hash(Structured(**given))  # type: ignore[arg-type]


BAD = [
    ({}, "exactly one of"),
    ({"json": "{}", "regex": "a"}, "not json and regex"),
    ({"json": "{"}, "line 1 column 2"),
    ({"json": "[1]"}, "must be a schema"),
    ({"json": {1: 2}}, "the key 1 is no text"),
    ({"json": '{"a": NaN}'}, "NaN is no JSON"),
    ({"json": {"a": float("inf")}}, "json is no JSON"),
    ({"json": {"a": {1, 2}}}, "json is no JSON"),
    ({"json": "[" * 100_000}, "json is no JSON"),
    ({"regex": 3}, "regex must be a text"),
    ({"regex": "\ud800"}, "lone surrogate at character 0"),
    ({"choice": []}, "choice must be"),
    ({"choice": "ab"}, "choice must be"),
    ({"choice": [1]}, "choice must be"),
    ({"regex": "a", "trigger": [-1]}, "trigger must be"),
    ({"regex": "a", "trigger": [True]}, "trigger must be"),
    ({"regex": "a", "trigger": 3}, "trigger must be"),
    ({"regex": "a", "bound": 3}, "bound needs a trigger"),
    ({"regex": "a", "bound": "", "trigger": [1]}, "bound must be"),
    ({"regex": "a", "bound": -3, "trigger": [1]}, "bound must be"),
    ({"regex": "a", "strict": 1}, "strict must be"),
]


@pytest.mark.parametrize(("given", "told"), BAD)
def test_a_bad_field_is_named(given: dict[str, object], told: str) -> None:
    with pytest.raises(RequestError) as caught:
        Structured(**given)  # type: ignore[arg-type]
    assert told in str(caught.value)


def test_all_bad_fields_are_named_together() -> None:
    with pytest.raises(RequestError) as caught:
        Structured(regex=3, trigger=[-1], strict="no")  # type: ignore[arg-type]
    assert len(caught.value.problems) == 3


def test_a_trigger_without_a_bound_is_legal() -> None:
    assert Structured(regex="a", trigger=[7, 8]).trigger_ids == (7, 8)


def test_a_mapping_makes_one() -> None:
    params = SamplingParams(structured={"regex": "a", "trigger": [5], "bound": 6})
    assert params.structured == Structured(regex="a", trigger=(5,), bound=6)


def test_the_alias_of_the_original_closes_objects() -> None:
    alias = {"schema_type": "json", "schema": "{}", "trigger_token_ids": [1], "bound_token_id": 2}
    expected = Structured(json={}, trigger=(1,), bound=2, closed=True)
    assert SamplingParams(structured=alias).structured == expected


@pytest.mark.parametrize(
    ("alias", "told"),
    [
        ({"schema_type": "yaml", "schema": ""}, "schema_type must be"),
        ({"schema_type": "json"}, "schema must be a text"),
        ({"schema_type": "regex", "schema": "a", "trigger_token_ids": "x"}, "token ids"),
        ({"schema_type": "regex", "schema": "a", "bound_token_id": "x"}, "a token id"),
        ({"schema_type": "regex", "schema": "a", "bound_token_id": 4}, "bound needs a trigger"),
        ({"schema_type": "regex", "schema": "a", "other": 4}, "other: unknown key"),
        ({"regexp": "a"}, "regexp; the fields are"),
        (3, "a Structured or a mapping"),
    ],
)
def test_a_bad_mapping_is_explained(alias: object, told: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(structured=alias)  # type: ignore[arg-type]
    assert told in str(caught.value)


@pytest.mark.parametrize("other", [{"ignore_eos": True}, {"min_tokens": 3}])
def test_what_decides_the_end_cannot_be_combined(other: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="cannot be combined with structured"):
        SamplingParams(structured=Structured(regex="a"), **other)  # type: ignore[arg-type]
