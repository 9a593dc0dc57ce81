"""Conversations through an engine: what it is asked, and how its answers are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from deepinfer.chat.decode import Content, Reasoning
from deepinfer.chat.messages import Message, ResponseFormat, Tool, ToolCall
from deepinfer.chat.tokenizer import Tokenizer
from deepinfer.config.load import load_model_config, resolve_model
from deepinfer.dialog.chat import (
    ChatCompletion,
    ChatOptions,
    answer,
    make_turns,
    stream_answers,
)
from deepinfer.engine.request import Chunk, Completion, FinishReason, SamplingParams
from deepinfer.errors import RequestError, UnsupportedError
from deepinfer.grammar.spec import Structured
from deepinfer.llm import LLM

FOLDER = resolve_model("demo")
TOKENIZER = Tokenizer.load(FOLDER, load_model_config(FOLDER))
END_THINK = TOKENIZER.token_id("</think>")
USER = {"role": "user", "content": "u"}
TOOL = Tool("f", "d", {"type": "object"})
CALLS = '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'


class Script:
    """An engine that says what it is told to."""

    def __init__(self, *texts: str, reason: FinishReason = FinishReason.STOP) -> None:
        self.texts, self.reason = texts, reason
        self.ids: list[list[int]] = []
        self.params: list[SamplingParams] = []

    def generate(self, ids: list[list[int]], params: list[SamplingParams]) -> list[Completion]:
        self.ids, self.params = ids, params
        return [self._completion(i, text) for i, text in enumerate(self.texts)]

    def stream(self, ids: list[list[int]], params: list[SamplingParams]) -> Iterator[Chunk]:
        for i, text in enumerate(self.texts):
            for c in text:
                yield Chunk(index=i, request_id=i, token_ids=(5,), text=c)
            last = self._completion(i, text)
            yield Chunk(index=i, request_id=i, token_ids=(), text="", completion=last)

    def _completion(self, index: int, text: str) -> Completion:
        return Completion(
            index=index,
            request_id=index,
            prompt_token_ids=(0,),
            text=text,
            finish_reason=self.reason,
        )


def ask(
    script: Script, messages: Any, params: SamplingParams | None = None, **options: Any
) -> list[ChatCompletion]:
    turns = make_turns(messages, params, ChatOptions(**options), TOKENIZER, 2048)
    return answer(turns, script.generate)


def test_an_answer_is_taken_apart() -> None:
    script = Script("\nr\n</think>\n\nc" + CALLS)
    (result,) = ask(script, [USER], tools=[TOOL])
    call = ToolCall("call_1_0", "f", "{}")
    assert result.message == Message.assistant("c", reasoning="r", tool_calls=[call])
    assert (result.content, result.finish_reason, result.error) == ("c", "tool_calls", None)
    follow_up = [USER, result.message, {"role": "tool", "tool_call_id": "call_1_0", "content": "x"}]
    (result,) = ask(Script("</think>done"), follow_up, tools=[TOOL])
    assert result.content == "done" and result.answer.reasoning == ""


@pytest.mark.parametrize(
    ("reason", "text", "expected"),
    [
        (FinishReason.STOP, "a", "stop"),
        (FinishReason.LENGTH, "a" + CALLS, "length"),
        (FinishReason.STOP, "a" + CALLS, "tool_calls"),
        (FinishReason.ABORT, "a", "abort"),
    ],
)
def test_finish_reasons(reason: FinishReason, text: str, expected: str) -> None:
    (result,) = ask(Script(text, reason=reason), [USER], thinking=False, tools=[TOOL])
    assert result.finish_reason == expected


def test_bad_conversations_do_not_stop_the_others() -> None:
    script = Script("one", "two")
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    results = ask(
        script, [[USER], [{"role": "wizard"}], [image], [USER], []], thinking=False
    )  # fmt: skip
    assert [r.content for r in results] == ["one", "", "", "two", ""]
    assert [r.completion.index for r in results] == [0, 1, 2, 3, 4]
    assert "unknown role 'wizard'" in str(results[1].error)
    assert "holds an image" in str(results[2].error)
    assert "there is no message" in str(results[4].error)
    assert results[1].finish_reason == "invalid_request"


@pytest.mark.parametrize(
    ("options", "limit"),
    [({"thinking": False}, 8192), ({}, 65536), ({"effort": "max"}, 131072),
     ({"effort": 100}, 131072)],
)  # fmt: skip
def test_room_for_the_answer(options: dict[str, Any], limit: int) -> None:
    for max_model_len in (200_000, 2048):
        turns = make_turns([USER], None, ChatOptions(**options), TOKENIZER, max_model_len)
        turn = turns[0]
        assert not isinstance(turn, ChatCompletion)
        room = max_model_len - len(turn.prompt_token_ids)
        assert turn.params.max_tokens == min(limit, room)
    turns = make_turns([USER], SamplingParams(max_tokens=3), ChatOptions(), TOKENIZER, 2048)
    assert not isinstance(turns[0], ChatCompletion) and turns[0].params.max_tokens == 3


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"response_format": ResponseFormat("json_object")}, Structured(json={"type": "object"})),
        ({"response_format": ResponseFormat("json_schema", schema=True)}, Structured(json=True)),
        ({"response_format": ResponseFormat("regex", regex="a+")}, Structured(regex="a+")),
        ({"structured": {"choice": ["a"]}}, Structured(choice=["a"])),
    ],
)
def test_shapes(options: dict[str, Any], expected: Structured | None) -> None:
    script = Script("x")
    ask(script, [USER], SamplingParams(), thinking=False, **options)
    assert script.params[0].structured == expected
    ask(script, [USER], SamplingParams(), **options)
    found = script.params[0].structured
    if expected is None:
        assert found is None
    else:
        assert isinstance(found, Structured) and found.trigger == (END_THINK,)
    (prefix,) = [Message.assistant("c", prefix=True)]
    ask(script, [USER, prefix], SamplingParams(), **options)
    assert script.params[0].structured == expected


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        ("hello", {}),
        (USER, {}),
        (3, {}),
        ([USER, [USER]], {}),
        ([USER], {"effort": "extreme"}),
        ([USER], {"tools": [{"type": "x"}]}),
        ([USER], {"structured": {"regex": 3}}),
    ],
)
def test_bad_calls_raise(messages: Any, options: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        ask(Script(), messages, **options)


def test_no_tokenizer() -> None:
    with pytest.raises(UnsupportedError, match="conversations need"):
        make_turns([USER], None, ChatOptions(), None, 2048)


def test_streamed_answers() -> None:
    script = Script("\nr</think>c" + CALLS, "</think>d")
    options = ChatOptions(tools=[TOOL])
    turns = make_turns([[USER], [{"role": "x"}], [USER]], None, options, TOKENIZER, 2048)
    deltas = list(stream_answers(turns, script.stream))
    events = [event for delta in deltas if delta.index == 0 for event in delta.events]
    assert events == [Reasoning("r"), Content("c"), ToolCall("call_1_0", "f", "{}")]
    results = {d.index: d.result for d in deltas if d.result is not None}
    assert results.keys() == {0, 1, 2}
    whole = answer(turns, script.generate)
    assert [results[i] for i in range(3)] == whole


def test_leaving_a_stream_closes_the_engines() -> None:
    closed = []

    def stream(ids: Sequence[object], params: Sequence[object]) -> Iterator[Chunk]:
        try:
            yield from Script("</think>abc").stream([], [])
        finally:
            closed.append(True)

    deltas = stream_answers(make_turns([USER], None, ChatOptions(), TOKENIZER, 2048), stream)
    next(deltas)
    deltas.close()  # type: ignore[attr-defined]  # it is a generator
    assert closed == [True]


def test_with_the_demo_checkpoint() -> None:
    params = SamplingParams(max_tokens=3, temperature=0)
    with LLM("demo") as llm:
        one, two = llm.chat([[USER], [USER]], params, thinking=False)
        assert one.content == two.content and len(one.completion.token_ids) == 3
        assert one.completion.prompt_token_ids[-1] == END_THINK
        deltas = list(llm.stream_chat([USER], params, ChatOptions(thinking=False)))
        last = deltas[-1].result
        assert last is not None and last.answer == one.answer
        # Without a word it answers in the form that it was trained on.
        (same,) = llm.chat([USER], params)
        last = list(llm.stream_chat([USER], params))[-1].result
        assert last is not None and same.answer == last.answer == one.answer
        (long,) = llm.chat([{"role": "user", "content": "long " * 5000}], params)
        assert long.finish_reason == "prompt_length_exceeded" and long.error


@pytest.mark.parametrize(
    ("thinking", "given", "expected"),
    [(True, "", "</think>"), (False, "", ""), (True, "x", "x")],
)
def test_stop_texts_end_the_answer_and_not_the_thinking(
    thinking: bool, given: str, expected: str
) -> None:
    params = SamplingParams(stop="a", stop_after=given)
    (turn,) = make_turns([USER], params, ChatOptions(thinking=thinking), TOKENIZER, 2048)
    assert not isinstance(turn, ChatCompletion) and turn.params.stop_after == expected
    (turn,) = make_turns([USER], SamplingParams(), ChatOptions(), TOKENIZER, 2048)
    assert not isinstance(turn, ChatCompletion) and turn.params.stop_after == ""


def test_the_engine_ends_an_answer_at_its_stop_text_behind_the_thinking() -> None:
    said = TOKENIZER.encode("a STOP b</think>c STOP d and on and on")[1:]
    with LLM("demo") as llm:
        params = SamplingParams(
            max_tokens=len(said), forced_token_ids=said, stop="STOP", temperature=0
        )
        (result,) = llm.chat([USER], params, thinking=True)
        deltas = list(llm.stream_chat([USER], params, ChatOptions(thinking=True)))
    assert (result.answer.reasoning, result.content) == ("a STOP b", "c ")
    assert result.finish_reason == "stop"
    assert len(result.completion.token_ids) < len(said)
    last = deltas[-1].result
    assert last is not None and last.answer == result.answer
    events = [event for delta in deltas for event in delta.events]
    assert "".join(e.text for e in events if isinstance(e, Content)) == "c "
