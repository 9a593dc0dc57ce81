"""Conversations of every kind, and a Hypothesis strategy for more."""

from __future__ import annotations

import json
from typing import Final

from hypothesis import strategies as st

from deepinfer.chat.messages import (
    Conversation,
    Message,
    ResponseFormat,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
)

SPELLINGS: Final = [
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜System｜>", "<｜User｜>",
    "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>", "<｜image｜>",
    "<｜action｜>", "\n\n<｜DSML｜ calls>", "</｜DSML｜ calls>", "<tool_result>", "</tool_result>",
]  # fmt: skip
EDGES: Final = [
    "", " ", "\n", "\n\n", "\r\n", "\t", "a\n", "\na", "\n\nhi\n\n", "  two  spaces  ", "é", "漢字",
    "e\u0301", "\u200b", "\u2028", "😀", "\x00", "\x7f", "0123456789", '"quoted"', "back\\slash",
    "{}", "[1]",
]  # fmt: skip
TEXTS: Final = [
    *EDGES,
    *SPELLINGS,
    *(f"a{s}b" for s in SPELLINGS),
    *(f"{s}\n" for s in SPELLINGS),
    *(s[:-1] for s in SPELLINGS),
    *(f"{a}{b}" for a in SPELLINGS[3:9] for b in SPELLINGS[3:9]),
]
ARGUMENTS: Final = [
    "{}", "", " ", "null", "[1]", "5", '"text"', "not json", '"{}"', '{"a":1}', ' {"a": 1}\n',
    '{"a":"x","a":"y"}',
    '{"a":1,"b":2,"a":"3"}', '{"a":-0}', '{"a":-0.0}', '{"a":1e-7}', '{"a":1e16}', '{"a":1E5}',
    '{"a":123456789012345678901}', '{"a":18446744073709551615}', '{"a":18446744073709551616}',
    '{"a":-9223372036854775808}', '{"a":-9223372036854775809}', '{"a":5e-324}', '{"a":1e400}',
    '{"a":NaN}', '{"a":Infinity}', '{"a":"\\ud800"}', '{"a":"\\ud83d\\ude00"}', '{"\\udc00":1}',
    '{"a":["\\u0001\\b\\f\\/\\"\\\\"]}', '{"a":"multi\\nline\\ttab"}', '{"a":01}', '{"a":1,}',
    "\ufeff{}", "\x0b{}", "\u00a0{}", '{"":""}', '{"k\\"ey":"</｜DSML｜ parameter>"}',
    '{"a":{"z":1,"b":[true,null]}}',
    '{"a":' + "[" * 126 + "]" * 126 + "}", '{"a":' + "[" * 127 + "]" * 127 + "}",
    '{"a":' + "[" * 126 + "1" + "]" * 126 + "}", '{"a":"tab\there"}', '{"a":1}x', "{" * 5000,
]  # fmt: skip

WEATHER: Final = Tool(
    "get_weather",
    "Get the weather.",
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)
BARE: Final = Tool("bare")
ODD: Final = Tool(
    "ns::é", "ü\n<｜User｜>｜DSML｜", {"b": 1, "a": [1.0, 1e30, -0.0, "\u2028</think>"]}, True
)

system, user, assistant = Message.system, Message.user, Message.assistant
tool, reminder = Message.tool, Message.reminder


def call(call_id: str, arguments: str = "{}", name: str = "get_weather") -> ToolCall:
    """Return a call."""
    return ToolCall(call_id, name, arguments)


def _settings() -> list[Conversation]:
    """Return one conversation under every setting."""
    base = (system("s"), user("u"), assistant("a", reasoning="r"), user("v"))
    found = []
    for messages in (base, base[1:], base[:2], (system(""),), (reminder("m"), user("u"))):
        for thinking in (True, False):
            for effort in (None, "minimal", "low", "medium", "high", "xhigh", "max"):
                found.append(Conversation(messages=messages, thinking=thinking, effort=effort))
            for tools in ((WEATHER,), (WEATHER, BARE, ODD)):
                for choice in ToolChoice:
                    if choice is ToolChoice.REQUIRED and thinking:
                        continue
                    found.append(
                        Conversation(
                            messages=messages, thinking=thinking, tools=tools, tool_choice=choice
                        )
                    )
            for form in (
                ResponseFormat("json_object"),
                ResponseFormat("json_schema", schema={"b": 1, "a": ["é\n<think>", 1e22, -0.0]}),
                ResponseFormat("json_schema", schema=True),
                ResponseFormat("regex", regex="a+"),
            ):
                for tools in ((), (WEATHER,)):
                    found.append(
                        Conversation(
                            messages=messages, thinking=thinking, response_format=form, tools=tools
                        )
                    )
    return found


_ORDERS: Final = [
    (user("a"), user("b")),
    (user("a"), user(""), user("b")),
    (user((TextPart("a"), TextPart(""), TextPart("b"))),),
    (user(()),),
    (system("a"), system("b"), user("u")),
    (system("a"), user("u"), system("b")),
    (user("u"), system("b"), assistant("x"), system("c"), user("v")),
    (user("u"), assistant("a"), assistant("b")),
    (assistant("first"), user("u")),
    (user("u"), reminder("m"), user("v")),
    (user("u"), assistant("a", reasoning="r"), reminder("m")),
    (reminder("1"), reminder("2"), user("u"), reminder("3"), reminder("4")),
    (system("s"), reminder("1"), system("t"), reminder("2"), assistant("a")),
    (user("u"), assistant("b", prefix=True)),
    (user("u"), assistant("", prefix=True)),
    (user("u"), assistant("b", reasoning="r", prefix=True)),
    (user("u"), assistant("", reasoning="r", prefix=True)),
    (user("u"), assistant("a", reasoning="q"), assistant("b", reasoning="r", prefix=True)),
    (assistant("b", reasoning="r", prefix=True),),
    (assistant("", reasoning="r", prefix=True),),
    (system("s"), assistant("b", reasoning="r", prefix=True)),
    (assistant("a", reasoning="q"), assistant("", reasoning="r", prefix=True)),
    (system("s", tools=[WEATHER]), user("u"), assistant("a", reasoning="r"), user("v")),
    (system("s"), user("u"), system("", tools=[BARE, ODD]), user("v")),
    (user("u"), assistant("", tool_calls=[call("1"), call("2")]), tool("r", "2"), tool("q", "1")),
    (
        user("u"),
        assistant("a", reasoning="r", tool_calls=[call("1"), call("2"), call("3")]),
        tool("r3", "3"),
        user("between"),
        tool("r1", "1"),
        tool("r2", "2"),
        assistant("done", reasoning="q"),
        user("more"),
        tool("again", "2"),
        tool("and", "1"),
    ),
    (
        user("u"),
        assistant("", tool_calls=[call("1"), call("2")]),
        tool("r", "2"),
        reminder("m"),
        tool("q", "1"),
        assistant("", tool_calls=[call("4"), call("3")]),
        tool("x", "3"),
        tool("y", "4"),
    ),
]  # fmt: skip


def corpus() -> list[Conversation]:
    """Return the corpus: settings, orders of messages, texts at every place, arguments."""
    found = _settings()
    for messages in _ORDERS:
        for thinking in (True, False):
            for tools in ((), (WEATHER,)):
                found.append(Conversation(messages=messages, thinking=thinking, tools=tools))
    for text in TEXTS:
        messages = (
            system(text),
            user(text),
            user(text),
            assistant(text, reasoning=text, tool_calls=[call("1", json.dumps({text: text}), text)]),
            tool(text, "1"),
            reminder(text),
            assistant(text),
            user(text),
        )
        tools = (Tool(text or "x", text, {text: text}),)
        form = ResponseFormat("json_schema", schema={text: text})
        found.append(Conversation(messages=messages, tools=tools, response_format=form))
        found.append(Conversation(messages=messages, thinking=False))
        prefix = assistant(text, reasoning=text, prefix=True)
        found.append(Conversation(messages=(user(text), prefix)))
    for arguments in ARGUMENTS:
        calls = [call("1", arguments), call("2", "{}", "bare")]
        messages = (user("u"), assistant("", tool_calls=calls), tool("r", "1"), tool("q", "2"))
        found.append(Conversation(messages=messages, thinking=False))
    return found


_text = st.one_of(st.sampled_from(TEXTS), st.text(max_size=8))
_numbers = st.one_of(
    st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False, allow_infinity=False)
)
_json = st.recursive(
    st.one_of(st.none(), st.booleans(), _numbers, _text),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_text, inner, max_size=3)),
    max_leaves=6,
)  # fmt: skip
_arguments = st.one_of(
    st.sampled_from(ARGUMENTS),
    st.dictionaries(_text, _json, max_size=3).map(lambda d: json.dumps(d, ensure_ascii=False)),
    st.dictionaries(_text, _json, max_size=3).map(json.dumps),
    _text,
)


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    """Draw a conversation that is accepted."""
    messages: list[Message] = []
    known: tuple[str, ...] = ()
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["system", "user", "assistant", "tool", "reminder"]))
        if kind == "system":
            messages.append(
                system(draw(_text), draw(st.sampled_from([(), (), (BARE,), (ODD, WEATHER)])))
            )
        elif kind == "assistant":
            ids = draw(st.lists(st.sampled_from("abc"), unique=True, max_size=3))
            calls = [call(i, draw(_arguments), draw(_text)) for i in ids]
            known = tuple(ids) or known
            reasoning = draw(st.one_of(st.none(), _text))
            messages.append(assistant(draw(_text), reasoning=reasoning, tool_calls=calls))
        elif kind == "tool" and known:
            messages.append(tool(draw(_text), draw(st.sampled_from(known))))
        elif kind == "reminder":
            messages.append(reminder(draw(_text)))
        else:
            messages.append(user(draw(_text)))
    if messages and messages[-1].role == "assistant" and draw(st.booleans()):
        last = messages.pop()
        content = str(last.content)
        messages.append(assistant(content, reasoning=last.reasoning, prefix=True))
    tools = draw(st.sampled_from([(), (WEATHER,), (BARE, ODD)]))
    thinking = draw(st.booleans())
    choices = [ToolChoice.AUTO, ToolChoice.NONE]
    if tools and not thinking:
        choices.append(ToolChoice.REQUIRED)
    form = draw(
        st.one_of(
            st.just(ResponseFormat()),
            st.just(ResponseFormat("json_object")),
            _json.filter(lambda v: v is not None).map(
                lambda s: ResponseFormat("json_schema", schema=s)
            ),
        )
    )
    return Conversation(
        messages=tuple(messages),
        thinking=thinking,
        effort=draw(st.sampled_from([None, "low", "high", "max"])),
        tools=tools,
        tool_choice=draw(st.sampled_from(choices)),
        response_format=form,
    )
