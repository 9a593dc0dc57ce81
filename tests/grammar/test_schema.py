"""JSON Schemas: what is reported, what is refused and where, and that reports are true."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.grammar.helpers import BACKENDS, error_of, matcher, service

from deepinfer import Structured
from deepinfer.errors import RequestError
from deepinfer.grammar.jsonrules import json_rules
from deepinfer.grammar.nodes import Automaton, inline
from deepinfer.grammar.report import Report, Status
from deepinfer.grammar.schema import rewrite
from deepinfer.grammar.verdict import make_check, make_test

DRAFT = "https://json-schema.org/draft/2020-12/schema"
both = pytest.mark.parametrize("backend", BACKENDS)


def accepts(backend: str, schema: object, text: str) -> bool:
    """Whether the grammar alone accepts a text."""
    at = matcher(backend, Structured(json=schema))  # type: ignore[arg-type]
    return all(at.accept(byte) for byte in text.encode()) and at.is_complete()


def statuses(report: Report) -> dict[str, Status]:
    return {finding.pointer: finding.status for finding in report.findings}


REFUSED: list[tuple[Any, str]] = [
    ({"type": "nope"}, "/type: refused, 'nope' is not one of"),
    ({"properties": {"a": {"minimum": "x"}}}, "/properties/a/minimum: refused"),
    ({"items": {"pattern": "(a"}}, "/items/pattern: refused, missing )"),
    ({"pattern": "a(?=b)"}, "/pattern: refused, look-around"),
    ({"patternProperties": {"a/b~(": {}}}, "/patternProperties/a~1b~0(: refused"),
    ({"$ref": "#"}, "/$ref: refused, a cycle of references"),
    (
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}},
        },
        "refused, a cycle of references that never reaches a value",
    ),
    ({"anyOf": [{"type": "null"}, {"not": {"$ref": "#"}}]}, "a cycle of references"),
    ({"$ref": "#/$defs/none"}, "/$ref: refused, '#/$defs/none' leads nowhere"),
    ({"$ref": "https://example.com/s.json"}, "lies outside the schema, and nothing is fetched"),
    ({"properties": {"a": {"not": {"$ref": "other.json"}}}}, "/properties/a/not/$ref: refused"),
    ({"$dynamicRef": "#x"}, "/$dynamicRef: refused, dynamic references are not followed"),
    ({"$schema": "http://json-schema.org/draft-04/schema#"}, "/$schema: refused"),
    ({"type": "array", "maxItems": 2**64 - 1}, "/maxItems: refused, found 18446744073709551615"),
    ({"items": {"type": "array", "minItems": 2**63}}, "/items/minItems: refused"),
    ({"type": "string", "maxLength": 2**64}, "/maxLength: refused"),
    ({"pattern": "(a{1,1000}){1,1000}"}, "/pattern: refused, larger than"),
    (
        {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}},
        "no finite value satisfies it",
    ),
    ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "no finite value satisfies it"),
    (False, "structured json cannot be used"),
]


@both
@pytest.mark.parametrize(("schema", "told"), REFUSED)
def test_a_bad_schema_fails_at_once_with_its_place(backend: str, schema: Any, told: str) -> None:
    assert service(backend).backend is not None
    start = time.process_time()
    assert told in error_of(backend, Structured(json=schema))
    assert time.process_time() - start < 1  # some milliseconds on a quiet machine


def test_all_places_are_named_together() -> None:
    told = error_of("llguidance", Structured(json={"type": "x", "minimum": "y", "items": 3}))
    assert all(place in told for place in ("/type", "/minimum", "/items"))


@both
def test_depth_beyond_reason_is_refused(backend: str) -> None:
    schema: dict[str, Any] = {}
    for _ in range(150):
        schema = {"items": schema}
    told = error_of(backend, Structured(json=schema))
    assert "nested too deeply" in told


APPROXIMATED: list[tuple[dict[str, Any], str, str]] = [
    ({"not": {"const": 1}}, "/not", "1"),
    ({"if": {"const": 1}, "then": {"const": 2}}, "/if", "1"),
    ({"type": "array", "uniqueItems": True}, "/uniqueItems", "[1,1]"),
    ({"type": "array", "contains": {"const": 3}}, "/contains", "[1]"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "/dependentRequired", '{"a":1}'),
    ({"type": "object", "propertyNames": {"maxLength": 1}}, "/propertyNames", '{"ab":1}'),
    ({"type": "object", "unevaluatedProperties": False}, "/unevaluatedProperties", '{"a":1}'),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "/oneOf", "1"),
    ({"type": "object", "minProperties": 2}, "/minProperties", '{"a":1,"a":2}'),
]


@both
@pytest.mark.parametrize(("schema", "pointer", "wrong"), APPROXIMATED)
def test_what_is_approximated_is_caught_in_the_end(
    backend: str, schema: dict[str, Any], pointer: str, wrong: str
) -> None:
    shape = Structured(json=schema)
    assert statuses(service(backend).report(shape))[pointer] is Status.APPROXIMATED
    at = matcher(backend, shape)
    assert all(at.accept(byte) for byte in wrong.encode()) and at.is_complete()
    assert "violates the schema" in str(at.check())
    with pytest.raises(RequestError, match="cannot be strictly enforced"):
        service(backend).report(Structured(json=schema, strict=True))


ENFORCED: list[tuple[Any, list[str], list[str]]] = [
    (
        {"type": "integer", "minimum": -3, "maximum": 12},
        ["-3", "0", "12"],
        ["-4", "13", "01", "1.0"],
    ),
    (
        {"type": "string", "minLength": 1, "maxLength": 2},
        ['"a"', '"é😀"', r'"\n\""'],
        ['""', '"abc"'],
    ),
    ({"type": "string", "pattern": "^a+$"}, ['"a"', '"aaa"'], ['"b"', '""']),
    ({"type": "string", "pattern": "b"}, ['"b"', '"abc"'], ['"a"']),
    ({"enum": ["x", 1, None, {"a": [1]}]}, ['"x"', "1", "null", '{"a":[1]}'], ['"y"', "2", "{}"]),
    ({"const": 'a"b'}, [r'"a\"b"'], ['"ab"']),
    (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        ['{"a":1}', '{"a":1,"b":[]}', '{ "a": 1}', '{\n "a": 1\n}'],
        ["{}", '{"a":"x"}', '{"b":1}', '{"a":1,"a":"x"}', r'{"\u0061":"x","a":1}', '{  "a":1}'],
    ),
    (
        {"type": "object", "properties": {"a": {}, "b": {}}, "additionalProperties": False},
        ["{}", '{"a":1}', '{"b":2}', '{"a":1,"b":2}'],
        ['{"c":1}', '{"a":1,"c":1}', '{"a":1,}', '{,"a":1}'],
    ),
    (
        {"type": "object", "additionalProperties": {"type": "null"}, "required": ["z"]},
        ['{"z":null}', '{"z":null,"y":null}'],
        ['{"y":null}', '{"z":1}'],
    ),
    (
        {
            "type": "array",
            "prefixItems": [{"type": "null"}],
            "items": {"type": "boolean"},
            "maxItems": 3,
        },
        ["[]", "[null]", "[null,true]", "[null,true,false]"],
        ["[true]", "[null,null]", "[null,true,true,true]"],
    ),
    ({"type": "array", "items": {"const": 1}, "minItems": 2}, ["[1,1]", "[1,1,1]"], ["[]", "[1]"]),
    (
        {"allOf": [{"type": "object", "required": ["a"]}, {"properties": {"a": {"type": "null"}}}]},
        ['{"a":null}'],
        ["{}", '{"a":1}', "1"],
    ),
    (
        {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 1}]},
        ["null", '"a"'],
        ['"ab"', "1"],
    ),
    (
        {
            "oneOf": [
                {"properties": {"k": {"const": c}}, "required": ["k"], "type": "object"}
                for c in "ab"
            ]
        },
        ['{"k":"a"}', '{"k":"b"}'],
        ['{"k":"c"}', "{}"],
    ),
    (
        {
            "$defs": {
                "n": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/p"}]},
                "p": {"type": "array", "items": {"$ref": "#/$defs/n"}},
            },
            "$ref": "#/$defs/n",
        },
        ["null", "[]", "[null,[[]]]"],
        ["1", "[1]", "[null,[1]]"],
    ),
    (
        {"type": "number", "minimum": 0, "maximum": 10},
        ["0", "9.99", "10", "10.0"],
        ["-1", "10.1", "11"],
    ),
    (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "items": [{"type": "null"}],
            "additionalItems": False,
            "type": "array",
        },
        ["[]", "[null]"],
        ["[1]", "[null,null]"],
    ),
    (
        {"$id": "https://x.test/a", "$ref": "#t", "$defs": {"q": {"$anchor": "t", "type": "null"}}},
        ["null"],
        ["1"],
    ),
]


@both
@pytest.mark.parametrize(("schema", "good", "bad"), ENFORCED)
def test_what_is_enforced_needs_no_validator(
    backend: str, schema: Any, good: list[str], bad: list[str]
) -> None:
    assert service(backend).report(Structured(json=schema)).is_exact
    assert {text: accepts(backend, schema, text) for text in good} == dict.fromkeys(good, True)
    assert {text: accepts(backend, schema, text) for text in bad} == dict.fromkeys(bad, False)
    check = make_check(schema, schema.get("$schema", DRAFT).rstrip("#"))
    assert all(check(text) is None for text in good)


def test_a_closed_shape_takes_no_other_properties() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {}}}}
    for backend in BACKENDS:
        at = matcher(backend, Structured(json=schema, closed=True))
        assert all(at.accept(byte) for byte in b'{"a":{')
        assert not at.accept(ord('"')) and at.accept(ord("}"))


def test_white_space_is_bounded() -> None:
    for backend in BACKENDS:
        assert accepts(backend, True, "[ 1,\n 2]")
        assert not accepts(backend, True, "[  1]")
        assert not accepts(backend, True, "[\n\n1]")


def test_unknown_keywords_are_annotations_with_a_hint() -> None:
    report = service("llguidance").report(Structured(json={"maxLenght": 3, "x-mine": 1}))
    notes = {finding.keyword: finding.note for finding in report.findings}
    assert "did you mean maxLength" in notes["maxLenght"] and "annotation" in notes["x-mine"]


def test_formats_are_enforced_where_a_grammar_can() -> None:
    report = service("llguidance").report(Structured(json={"format": "uuid"}))
    assert report.is_exact and "/format: enforced" in str(report)
    report = service("llguidance").report(Structured(json={"format": "iri"}))
    assert not report.is_exact


@settings(max_examples=120, deadline=None)
@given(
    st.integers(-1200, 1200),
    st.integers(0, 400),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["integer", "number"]),
    st.booleans(),
    st.booleans(),
)
def test_ranges_of_numbers_are_exact(
    low: int, width: int, low_open: bool, high_open: bool, kind: str, has_low: bool, has_high: bool
) -> None:
    schema: dict[str, Any] = {"type": kind}
    if has_low:
        schema["exclusiveMinimum" if low_open else "minimum"] = low
    if has_high:
        schema["exclusiveMaximum" if high_open else "maximum"] = low + width
    rules, losses = json_rules(schema, 0, make_test(schema))
    node = inline(rules, "root", 100_000)
    assert node is not None and not losses
    automaton, check = Automaton(node), make_check(schema, DRAFT)
    edges = {
        low - 1,
        low,
        low + 1,
        low + width - 1,
        low + width,
        low + width + 1,
        0,
        9,
        10,
        -10,
        5000,
    }
    for value in edges:
        texts = [str(value)] + ([f"{value}.0", f"{value}.5"] if kind == "number" else [])
        for text in texts:
            assert automaton.matches(text) == (check(text) is None), (text, schema)


@pytest.mark.parametrize("value", [0.07, 1.1, 0.3, 12.34])
def test_multiples_are_exact_decimals(value: float) -> None:
    check = make_check({"multipleOf": 0.01}, DRAFT)
    assert check(json.dumps(value)) is None
    assert check(json.dumps(value + 0.001)) is not None


def test_the_last_word_refuses_what_is_no_json() -> None:
    check = make_check(True, DRAFT)
    for text in ("", "{", "NaN", "[1,]", "1 2", "[" * 100_000):
        assert "no JSON" in str(check(text))


def test_the_last_word_is_immune_to_patterns() -> None:
    schema = {"anyOf": [{"pattern": "^(a+)+$"}, {"pattern": "b$"}]}
    start = time.process_time()
    assert make_check(schema, DRAFT)(json.dumps("a" * 40 + "b")) is None
    assert time.process_time() - start < 1


def test_references_stay_inside() -> None:
    found = rewrite(json.dumps({"$ref": "#/properties/a", "properties": {"a": {"type": "null"}}}))
    assert isinstance(found.schema, dict)
    assert found.schema["$ref"] in ("#/$defs/r0",)
    assert found.report.is_exact


@pytest.mark.parametrize("keyword", ["minimum", "maximum", "exclusiveMinimum", "multipleOf"])
def test_numbers_beyond_what_a_library_counts_are_approximated(keyword: str) -> None:
    shape = Structured(json={"type": "integer", keyword: 10**30})
    assert not service("llguidance").report(shape).is_exact
    assert service("llguidance").report(Structured(json={"minimum": 10**15})).is_exact
    assert keyword == "multipleOf" or service("xgrammar").report(shape).is_exact


def test_many_values_and_branches_are_compiled_in_time() -> None:
    values = [f"value {i}" for i in range(2000)]
    assert service("xgrammar").report(Structured(json={"enum": values})).is_exact
    branches = [{"const": value} for value in values]
    assert not service("llguidance").report(Structured(json={"oneOf": branches})).is_exact


def test_an_infinite_number_has_no_multiple() -> None:
    check = make_check({"multipleOf": 2}, DRAFT)
    assert "too large to be divided" in str(check("1e400")) and check("1e300") is None
