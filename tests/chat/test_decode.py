"""Answers: split as the companion library splits them, however the text is cut."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tests.chat.conversations import WEATHER, corpus

from deepinfer.chat import companion
from deepinfer.chat.decode import (
    Answer,
    AnswerParser,
    Content,
    Event,
    Reasoning,
    Start,
    Unparsed,
    parser_for,
)
from deepinfer.chat.messages import Conversation, Message, ToolCall, ToolChoice
from deepinfer.chat.render import CALLS_BEGIN, CALLS_END, DSML, render

BEGIN, END = CALLS_BEGIN + "\n", CALLS_END


def parameter(name: str, value: str, is_string: bool = True) -> str:
    flag = "true" if is_string else "false"
    return f'<{DSML} parameter name="{name}" string="{flag}">{value}</{DSML} parameter>'


def invoke(name: str, *parameters: str) -> str:
    return f'<{DSML} invoke name="{name}">\n' + "\n".join(parameters) + f"\n</{DSML} invoke>\n"


def read(text: str, start: Start = Start.CONTENT, parses_calls: bool = True) -> Answer:
    parser = AnswerParser(start, parses_calls=parses_calls)
    parser.push(text)
    parser.finish()
    return parser.answer()


def merged(events: list[Event]) -> list[Event]:
    """Join neighbouring texts of one kind."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + event.text)
        else:
            found.append(event)
    return found


PIECES = [
    "x", "<", "\n", "\n\n", " ", "é", "</think>", "<think>", "</thi", DSML, f"<{DSML}", CALLS_BEGIN,
    BEGIN, END, invoke("f"), invoke("g", parameter("a", "x\n"), parameter("b", "[1, 2]", False)),
    invoke("h", parameter("a", 'q"\\\x01é')), f'<{DSML} invoke name="', '">', f"</{DSML} invoke>\n",
    parameter("k", "v"), parameter("k", "v", False), parameter("", "v"), f"</{DSML} parameter>",
    f'<{DSML} parameter name="k', '" string="true">', '" string="false">', "1", "{",
]  # fmt: skip
texts = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=9).map("".join),
    st.lists(st.sampled_from(PIECES), max_size=4).map(
        lambda parts: "".join(["x", BEGIN, *parts, END])
    ),
)


@settings(max_examples=300)
@given(texts, st.lists(st.integers(0, 200), max_size=12), st.sampled_from(Start), st.booleans())
@example(
    "r\n\n</think>\n\nx" + BEGIN + invoke("f") + END, list(range(1, 90)), Start.REASONING, True
)
def test_cuts_change_nothing(text: str, cuts: list[int], start: Start, calls: bool) -> None:
    whole = AnswerParser(start, parses_calls=calls)
    expected = [*whole.push(text), *whole.finish()]
    places = sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})
    for bounds in (places, list(range(len(text) + 1))):
        parser = AnswerParser(start, parses_calls=calls)
        events: list[Event] = []
        for a, b in pairwise(bounds):
            events += parser.push(text[a:b])
        events += parser.finish()
        assert merged(events) == merged(expected)
        assert parser.answer() == whole.answer()


@pytest.mark.skipif(not companion.is_installed(), reason="needs deepinfer[chat]")
@settings(max_examples=300)
@given(texts, st.booleans())
def test_equals_the_library(text: str, thinks: bool) -> None:
    """Texts are split alike; calls are equal wherever we find nothing to complain of.

    Left out are the beginning of a mark before line feeds, of which the library keeps one, and
    names with quotes, which it cuts there.
    """
    assume(not re.search(r"<(/|/thi)?\n", text))
    ours = read(text, Start.REASONING if thinks else Start.CONTENT)
    theirs = library_answer(text, thinks)
    assert (ours.content, ours.reasoning) == (theirs.content, theirs.reasoning)
    names = [name for call in ours.tool_calls for name in (call.name, *(call.parsed() or ()))]
    assume(not any('"' in name for name in names))
    found = [(call.name, call.arguments) for call in ours.tool_calls]
    others = [(call.name, call.arguments) for call in theirs.tool_calls]
    if ours.unparsed is None:
        assert found == others
    else:
        assert found == others[: len(found)]


def library_answer(text: str, thinks: bool) -> Answer:
    import deepseek_recipe as recipe

    body = {
        "model": "DeepSeek-V4.1-Flash",
        "messages": [{"role": "user", "content": "u"}],
        "thinking": {"type": "enabled" if thinks else "disabled"},
    }
    request = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
    stage = recipe.ThinkingInitialStage.ReasoningStart if thinks else None
    processor = recipe.StreamProcessor(
        recipe.ChatCompletionRequest.chunk_generator(request, "id", "m"),
        recipe.ParsingOptions(thinking_initial_stage=stage),
    )
    response = recipe.ChatCompletionResponse("id", "m", 0, 0, 0)
    for chunk in (
        recipe.InferenceChunk.ready(),
        recipe.InferenceChunk.text(text, 1),
        recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop),
    ):
        for event in processor.push(chunk):
            response.accumulate(event)
    message = json.loads(response.to_json())["choices"][0]["message"]
    calls = message.get("tool_calls") or []
    functions = [call["function"] for call in calls]
    return Answer(
        reasoning=message.get("reasoning_content"),
        content=message["content"],
        tool_calls=tuple(ToolCall("", f["name"], f["arguments"]) for f in functions),
    )


def test_a_whole_answer() -> None:
    call = invoke("f", parameter("a", 'x"\n'), parameter("b", "[1, 2]", False))
    answer = read(f"\nr\n\n</think>\n\nc{BEGIN}{call}{invoke('g')}{END}", Start.REASONING)
    assert answer == Answer(
        reasoning="r",
        content="c",
        tool_calls=(
            ToolCall("call_0", "f", '{"a": "x\\"\\n", "b": [1, 2]}'),
            ToolCall("call_1", "g", "{}"),
        ),
    )
    assert answer.tool_calls[0].parsed() == {"a": 'x"\n', "b": [1, 2]}
    assert answer.message().tool_calls == answer.tool_calls


@pytest.mark.parametrize(
    ("block", "num_calls", "problem"),
    [
        (BEGIN, 0, "does not end"),
        (BEGIN + invoke("f"), 1, "does not end"),
        (BEGIN + invoke("f")[:-4], 0, "does not end"),
        (BEGIN + invoke("f") + END + "more", 1, "nothing may follow"),
        (BEGIN + "junk" + invoke("f") + END, 0, "may hold calls only"),
        (BEGIN + invoke("f") + "junk" + END, 1, "may hold calls only"),
        (BEGIN + invoke("f", "junk") + END, 0, "may hold parameters only"),
        (BEGIN + invoke("") + END, 0, "must have a name"),
        (BEGIN + invoke("f", parameter("", "1")) + END, 0, "must have a name and say"),
        (BEGIN + invoke("f", *[parameter("a", "1")] * 2) + END, 0, "'a' is given twice"),
        (BEGIN + invoke("f", parameter("a", "x", False)) + END, 0, "'a' is no JSON"),
        (BEGIN + invoke("f", parameter("a", "NaN", False)) + END, 0, "'a' is no JSON"),
        (BEGIN + invoke("f", parameter("a", "[" * 99999, False)) + END, 0, "'a' is no JSON"),
        (f"\n\n<{DSML}calls>\n{invoke('f')}{END}", 0, "must begin with its tag"),
    ],
)  # fmt: skip
def test_what_is_out_of_format_is_told(block: str, num_calls: int, problem: str) -> None:
    answer = read("c" + block)
    assert answer.content == "c" and len(answer.tool_calls) == num_calls
    assert answer.unparsed is not None and problem in answer.unparsed.problem
    assert block.endswith(answer.unparsed.text)


def test_without_tools_markup_is_content() -> None:
    text = "c" + BEGIN + invoke("f") + END
    assert read(text, parses_calls=False) == Answer(reasoning=None, content=text)


def test_nothing_is_held_longer_than_needed() -> None:
    parser = AnswerParser(Start.REASONING)
    assert parser.push("\nab<") == [Reasoning("ab")]
    assert parser.push("c\n") == [Reasoning("<c")]
    assert parser.push("</think") == [] and parser.push(">") == []
    assert parser.push("\nd\n\n") == [Content("d")]
    assert parser.push(f"<{DSML}") == []
    assert parser.push(f" calls>{invoke('f')}") == [ToolCall("call_0", "f", "{}")]
    assert parser.has_called
    assert parser.finish() == [Unparsed("\n", "the block of tool calls does not end")]
    assert parser.finish() == []


def test_history_of_calls_is_read_back() -> None:
    """What the renderer shows of an answer, the parser takes apart again."""
    for conversation in corpus():
        for message in conversation.messages:
            if not message.tool_calls or any(c.parsed() is None for c in message.tool_calls):
                continue
            if any(not c.name or "" in (c.parsed() or {}) for c in message.tool_calls):
                continue
            shown = Conversation(messages=(Message.user("u"), message), thinking=False)
            text = render(shown).text.split("</think>", 1)[1].rsplit("<｜end▁of▁sentence｜>", 1)[0]
            if DSML in str(message.content) + str(
                [c.arguments + c.name for c in message.tool_calls]
            ):
                continue
            answer = read(text)
            assert [c.name for c in answer.tool_calls] == [c.name for c in message.tool_calls]


@pytest.mark.parametrize(
    ("messages", "settings", "start"),
    [
        ((Message.user("u"),), {}, Start.REASONING),
        ((Message.user("u"),), {"thinking": False}, Start.CONTENT),
        ((Message.user("u"), Message.assistant("c", prefix=True)), {}, Start.CONTENT_CONTINUED),
        ((Message.user("u"), Message.assistant("", prefix=True)), {}, Start.REASONING),
        (
            (Message.user("u"), Message.assistant("", reasoning="r", prefix=True)),
            {},
            Start.REASONING_CONTINUED,
        ),
        (
            (Message.user("u"), Message.assistant("c", prefix=True)),
            {"thinking": False},
            Start.CONTENT_CONTINUED,
        ),
        ((Message.user("u"), Message.assistant(prefix=True)), {"thinking": False}, Start.CONTENT),
        ((Message.assistant("c", prefix=True),), {}, Start.CONTENT_CONTINUED),
        (
            (Message.user("u"),),
            {"thinking": False, "tools": (WEATHER,), "tool_choice": ToolChoice.REQUIRED},
            Start.CALLS,
        ),
    ],
)
def test_where_an_answer_begins(
    messages: tuple[Message, ...], settings: dict[str, object], start: Start
) -> None:
    conversation = Conversation(messages=messages, **settings)  # type: ignore[arg-type]
    text = {
        Start.CALLS: invoke("f") + END,
        Start.REASONING: "\nr\n</think>c",
        Start.REASONING_CONTINUED: "\nr\n</think>c",
    }.get(start, "\nc")
    parser = parser_for(conversation, render(conversation))
    parser.push(text)
    parser.finish()
    expected = AnswerParser(
        start, parses_calls=start is Start.CALLS, name_call=f"call_{len(messages)}_{{}}".format
    )
    expected.push(text)
    expected.finish()
    assert parser.answer() == expected.answer()
