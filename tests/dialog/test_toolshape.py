"""Calls of strict tools: what the grammar lets through, and that the model's calls satisfy it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.chat.test_decode import END, invoke, parameter
from tests.dialog.test_chat import TOKENIZER, USER

from deepinfer.chat.decode import AnswerParser, Start
from deepinfer.chat.messages import Tool
from deepinfer.config.engine import GrammarConfig
from deepinfer.dialog.chat import ChatOptions, make_turn
from deepinfer.dialog.protocol import convert
from deepinfer.dialog.toolshape import tool_shape
from deepinfer.engine.request import SamplingParams
from deepinfer.errors import RequestError
from deepinfer.grammar.backend import Vocabulary
from deepinfer.grammar.compiler import make_backend
from deepinfer.grammar.prepare import compile_shape
from deepinfer.grammar.spec import Structured
from deepinfer.llm import LLM

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

WEATHER = Tool(
    "weather",
    "",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
            "unit": {"enum": ["C", "F", None]},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}},
        },
        "required": ["city", "days"],
        "$defs": {"tag": {"type": "string", "maxLength": 3}},
    },
    strict=True,
)
MAYBE = Tool("maybe", "", {"properties": {"a": {"type": ["string", "null"]}, "b": {}}}, strict=True)
LOOSE = Tool("loose", "", {"type": "object", "properties": {"a": {"type": "integer"}}})
CITY, DAYS = parameter("city", "Paris"), parameter("days", "3", False)


def accepts(shape: Structured | None, text: str, library: str = "llguidance") -> bool:
    """Tell whether a shape lets a whole text through, byte by byte."""
    assert shape is not None
    pieces = (*(bytes([b]) for b in range(256)), b"")
    config = GrammarConfig(backend=library)
    backend = make_backend(config, Vocabulary(pieces, 256))
    _, compiled = compile_shape(shape, config, backend)
    position = compiled.start()
    return all(position.accept(byte) for byte in text.encode()) and position.is_complete()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (invoke("weather", CITY, DAYS) + END, True),
        (invoke("weather", CITY, DAYS) * 2 + END, True),
        (invoke("weather", CITY, DAYS, parameter("unit", "C")) + END, True),
        (invoke("weather", CITY, DAYS, parameter("unit", "null", False)) + END, True),
        (invoke("weather", CITY, DAYS, parameter("tags", '["abc", "d"]', False)) + END, True),
        (invoke("weather", parameter("city", 'a</b>\n"<</<｜'), DAYS) + END, True),
        (invoke("maybe") + END, True),
        (invoke("maybe", parameter("a", "x")) + END, True),
        (invoke("maybe", parameter("a", "null", False), parameter("b", "x")) + END, True),
        (invoke("maybe", parameter("b", '{"c": [1]}', False)) + END, True),
        (invoke("loose", parameter("z", "anything"), parameter("a", '"x"', False)) + END, True),
        (invoke("loose") + END, True),
        (END, False),
        (invoke("weather", CITY, DAYS), False),
        (invoke("other") + END, False),
        (invoke("weather", CITY) + END, False),
        (invoke("weather", DAYS, CITY) + END, False),
        (invoke("weather", CITY, CITY, DAYS) + END, False),
        (invoke("weather", CITY, parameter("days", "3")) + END, False),
        (invoke("weather", CITY, parameter("days", "8", False)) + END, False),
        (invoke("weather", CITY, DAYS, parameter("unit", "K")) + END, False),
        (invoke("weather", CITY, DAYS, parameter("tags", '["abcd"]', False)) + END, False),
        (invoke("weather", CITY, DAYS, parameter("more", "x")) + END, False),
        (invoke("maybe", parameter("a", "1", False)) + END, False),
        (invoke("loose", parameter("a", "{", False)) + END, False),
    ],
)
def test_what_is_let_through(text: str, expected: bool) -> None:
    shape = tool_shape([WEATHER, MAYBE, LOOSE], is_inside=True, mark_id=None)
    assert accepts(shape, text) == expected
    if expected:
        parser = AnswerParser(Start.CALLS)
        parser.push(text)
        parser.finish()
        answer = parser.answer()
        assert answer.unparsed is None and answer.tool_calls
        schemas = {"weather": WEATHER.parameters, "maybe": MAYBE.parameters}
        for call in answer.tool_calls:
            if call.name in schemas:
                jsonschema.validate(call.parsed(), schemas[call.name])


def test_the_second_library_agrees() -> None:
    pytest.importorskip("xgrammar")
    shape = tool_shape([WEATHER, MAYBE, LOOSE], is_inside=True, mark_id=None)
    good = (
        invoke("weather", parameter("city", 'a</b>\n"<</<｜'), DAYS, parameter("unit", "C")) + END
    )
    assert accepts(shape, good, "xgrammar")
    assert not accepts(shape, good.replace(">3<", ">8<"), "xgrammar")
    assert not accepts(shape, invoke("weather", CITY) + END, "xgrammar")


def test_calls_after_free_text_begin_at_the_mark() -> None:
    shape = tool_shape([WEATHER], is_inside=False, mark_id=8)
    assert shape is not None and shape.trigger == (8,)
    assert accepts(shape, " calls>\n" + invoke("weather", CITY, DAYS) + END)


def test_only_strict_tools_need_a_shape() -> None:
    assert tool_shape([LOOSE], is_inside=True, mark_id=None) is None
    assert tool_shape([WEATHER], is_inside=False, mark_id=None) is None
    assert tool_shape([], is_inside=True, mark_id=None) is None


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"properties": {"a": {"type": "strin"}}}, "'a': "),
        ({"properties": {"a": {"$ref": "#/nowhere"}}}, "'a': "),
        ({"properties": {}, "required": ["b"]}, "'b' is required, but not described"),
        ({"properties": ["a"]}, "`properties` must be an object"),
        ({"properties": {}, "required": 3}, "`required` a list"),
    ],
)
def test_bad_schemas_are_named(schema: dict[str, Any], problem: str) -> None:
    with pytest.raises(RequestError) as caught:
        tool_shape([Tool("f", "", schema, True)], is_inside=True, mark_id=None)
    assert "strict tools cannot be enforced" in str(caught.value) and problem in str(caught.value)


def test_conversations_and_bodies_ask_for_it() -> None:
    mark = TOKENIZER.token_id("｜DSML｜")
    options = ChatOptions(tools=[WEATHER])
    turn = make_turn([USER], options, TOKENIZER, SamplingParams(), 2048)
    assert turn.params.structured == tool_shape([WEATHER], is_inside=False, mark_id=mark)
    both = ChatOptions(tools=[WEATHER], structured={"regex": "a"})
    with pytest.raises(RequestError, match="cannot be combined"):
        make_turn([USER], both, TOKENIZER, None, 2048)
    pytest.importorskip("deepseek_recipe")
    strict = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    function = {"name": "f", "parameters": strict, "strict": True}
    body = {
        "messages": [USER],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "thinking": {"type": "disabled"},
    }
    (params,) = convert("/v1/chat/completions", body, TOKENIZER, 2048).params
    shape = params.structured
    assert isinstance(shape, Structured)
    assert accepts(shape, invoke("f", parameter("a", "3", False)) + END)
    assert not accepts(shape, invoke("f", parameter("a", "x", False)) + END)


def test_the_model_calls_within_the_schema() -> None:
    params = SamplingParams(max_tokens=120, temperature=1.2, seed=3, n=2)
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    with LLM("demo") as llm:
        found = llm.chat(question, params, tools=[WEATHER], tool_choice="required", thinking=False)
    for result in found:
        assert result.error is None
        for call in result.answer.tool_calls:
            jsonschema.validate(json.loads(call.arguments), WEATHER.parameters)
        assert result.answer.tool_calls or result.finish_reason == "length"
