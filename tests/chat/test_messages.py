"""Messages: what is accepted, and one clear sentence for everything that is not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from tests.chat.conversations import corpus

from deepinfer.chat.messages import (
    Conversation,
    ImagePart,
    Message,
    ResponseFormat,
    TextPart,
    Tool,
    ToolCall,
    to_mapping,
    to_message,
    to_tool,
)
from deepinfer.errors import RequestError

USER: dict[str, object] = {"role": "user", "content": "u"}
CALL: dict[str, object] = {
    "id": "1",
    "type": "function",
    "function": {"name": "f", "arguments": "{}"},
}


def test_protocol_forms() -> None:
    assert to_message(USER) == Message.user("u")
    assert to_message({"role": "developer", "content": "s"}) == Message.system("s")
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "http://x"}}]
    assert to_message({"role": "user", "content": parts}).parts == (
        TextPart("a"),
        ImagePart("http://x"),
    )
    assert to_message(
        {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL]}
    ) == Message.assistant(reasoning="r", tool_calls=[ToolCall("1", "f", "{}")])
    flat = {"id": "1", "name": "f", "arguments": {"a": "é"}}
    assert to_message({"role": "assistant", "tool_calls": [flat]}).tool_calls == (
        ToolCall("1", "f", '{"a": "é"}'),
    )
    assert to_message({"role": "tool", "tool_call_id": "1", "content": "r"}) == Message.tool(
        "r", "1"
    )
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    tool = Tool("f", "d", {"type": "object"}, True)
    assert to_tool({"type": "function", "function": function}) == to_tool(function) == tool


def test_protocol_form_and_back() -> None:
    for conversation in corpus():
        for message in conversation.messages:
            assert to_message(json.loads(json.dumps(to_mapping(message)))) == message
    image = Message.user((TextPart("a"), ImagePart("http://x", "low")))
    assert to_message(to_mapping(image)) == image
    with pytest.raises(RequestError, match="data URL"):
        to_mapping(Message.user((ImagePart(b"x"),)))


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "wizard", "content": "x"}, "unknown role 'wizard': use one of system, user"),
        ({"content": "x"}, "unknown role None"),
        ({"role": "user", "content": 3}, "content must be a text or a list of parts, not int"),
        ({"role": "user"}, "content is missing"),
        ({"role": "user", "content": [{"type": "audio"}]}, "content part 0 must be of type text"),
        ({"role": "user", "content": "x", "colour": 1}, "unknown keys: colour"),
        ({"role": "assistant", "tool_calls": [{}]}, "tool call 0 needs id, name and arguments"),
        ({"role": "assistant", "tool_calls": ["f"]}, "tool call 0 must be a mapping"),
        ({"role": "assistant", "content": "x", "prefix": 1}, "prefix must be true or false"),
        ({"role": "assistant", "reasoning_content": 1}, "reasoning_content must be a text"),
        ({"role": "tool", "tool_call_id": 1}, "tool_call_id must be a text"),
        ("hello", "a message is a Message or a mapping, not str"),
    ],
)
def test_bad_messages(message: Mapping[str, object], problem: str) -> None:
    with pytest.raises(RequestError) as caught:
        Conversation.of([USER, message])
    assert f"message 1: {problem}" in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "there is no message"),
        ([Message.tool("r", "1")], "message 0 (tool): tool result without a call:"),
        (
            [Message.assistant(tool_calls=[ToolCall("1", "f", "{}")]), Message.tool("r", "2")],
            "tool result without a call: tool_call_id '2' is none of the preceding calls (1)",
        ),
        ([Message.assistant("a", prefix=True), Message.user("u")], "prefix is for the last"),
        ([Message.assistant(tool_calls=[ToolCall("1", "f", "{}")] * 2)], "have the same id"),
        ([Message.user("\ud800")], "lone surrogates"),
        ([Message(role=Message.user("").role, reasoning="r")], "reasoning is for assistant"),
    ],
)  # fmt: skip
def test_bad_conversations(messages: list[Message], problem: str) -> None:
    with pytest.raises(RequestError) as caught:
        Conversation.of(messages)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"effort": "extreme"}, "effort must be one of minimal, low"),
        ({"effort": 0}, "an integer from 1 to 100, not 0"),
        ({"effort": True}, "not True"),
        ({"thinking": 1}, "thinking must be True or False, not 1"),
        ({"tool_choice": "maybe"}, "tool_choice must be auto, none or required"),
        ({"tool_choice": "required", "thinking": False}, "needs tools"),
        ({"tool_choice": "required", "tools": [Tool("f")]}, "without thinking only"),
        ({"tools": [Tool("f"), Tool("f")]}, "the tool 'f' is declared twice"),
        ({"tools": [{"type": "retrieval"}]}, "tool 0: tools of type 'retrieval' are unknown"),
        ({"tools": [{"name": "f", "parameters": {"a": {1, 2}}}]}, "cannot be written as JSON"),
    ],
)
def test_bad_settings(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(RequestError) as caught:
        Conversation.of([USER], **settings)
    assert problem in str(caught.value)


@pytest.mark.parametrize("texts", [("\ud800", "d"), ("f", "\udfff")])
def test_tools_of_halves_of_characters(texts: tuple[str, str]) -> None:
    with pytest.raises(RequestError, match="cannot be written as JSON"):
        Tool(*texts)


def test_all_problems_come_together() -> None:
    with pytest.raises(RequestError) as caught:
        Conversation.of([{"role": "x", "content": ""}, {"role": "y"}], tools=[{}], tool_choice="z")
    assert len(caught.value.problems) == 5  # of the second message its role and its content


@pytest.mark.parametrize(
    "arguments",
    [("yaml",), ("json_schema",), ("json_object", {}), ("regex",), ("text", None, "a"),
     ("json_schema", {1})],
)  # fmt: skip
def test_bad_response_formats(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(RequestError):
        ResponseFormat(*arguments)
