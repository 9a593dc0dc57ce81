"""Protocol bodies in, protocol bodies out, whole and streamed, without a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from deepinfer.chat import companion
from deepinfer.chat.tokenizer import Tokenizer
from deepinfer.config.load import load_model_config, resolve_model
from deepinfer.dialog.protocol import BodyRequest, convert
from deepinfer.engine.request import Chunk, Completion, FinishReason
from deepinfer.errors import ProtocolError
from deepinfer.grammar.spec import Structured
from deepinfer.sampling.noise import derive_seed

pytestmark = pytest.mark.skipif(
    not companion.is_installed(), reason="needs deepseek-recipe: pip install 'deepinfer[chat]'"
)
FOLDER = resolve_model("demo")
TOKENIZER = Tokenizer.load(FOLDER, load_model_config(FOLDER))
EOS, END_THINK = 1, TOKENIZER.token_id("</think>")
USER = {"role": "user", "content": "u"}
OFF = {"type": "disabled"}
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
CALLS = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="a" string="true">x'
    "</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)


def chat(path: str = "chat/completions", **body: Any) -> BodyRequest:
    base: dict[str, Any] = {"model": "m"}
    base["input" if path == "responses" else "messages"] = [USER]
    if path == "messages":
        base["max_tokens"] = 50
    return convert(f"/v1/{path}", base | body, TOKENIZER, 2048, reply_id="x")


def completion(
    text: str,
    index: int = 0,
    reason: FinishReason = FinishReason.STOP,
    error: str | None = None,
    logprobs: bool = False,
) -> Completion:
    ids = (*TOKENIZER.encode(text)[1:], *([EOS] if reason is FinishReason.STOP else []))
    return Completion(
        index=index,
        request_id=index,
        prompt_token_ids=(0,),
        token_ids=ids,
        text=text,
        finish_reason=reason,
        error=error,
        logprobs=tuple(-0.5 for _ in ids) if logprobs else None,
        top_logprobs=tuple(((i, -0.5), (9, -1.0)) for i in ids) if logprobs else None,
    )


def chunks(*completions: Completion) -> Iterator[Chunk]:
    """Stream completions token by token, in turns."""
    longest = max(len(c.token_ids) for c in completions)
    decoders = [TOKENIZER.stream() for _ in completions]
    for step in range(longest):
        for place, whole in enumerate(completions):
            if step < len(whole.token_ids):
                token_id = whole.token_ids[step]
                last = whole if step == len(whole.token_ids) - 1 else None
                text = decoders[place].push(token_id)
                now = slice(step, step + 1)
                yield Chunk(
                    index=place,
                    request_id=place,
                    token_ids=(token_id,),
                    text=text,
                    completion=last,
                    logprobs=None if whole.logprobs is None else whole.logprobs[now],
                    top_logprobs=None if whole.top_logprobs is None else whole.top_logprobs[now],
                )


def events(request: BodyRequest, *completions: Completion) -> list[tuple[str | None, Any]]:
    found = []
    for event in request.stream(chunks(*completions)):
        assert event.sse().endswith(f"data: {event.data}\n\n".encode())
        found.append((event.name, event.data if event.data == "[DONE]" else json.loads(event.data)))
    return found


def test_chat_completion() -> None:
    request = chat()
    assert TOKENIZER.decode(request.prompts[0], False).endswith("<｜User｜>u<｜Assistant｜><think>")
    body = request.respond([completion("hm</think>Hé!")])
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hé!", "reasoning_content": "hm"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"]["completion_tokens"] == 8
    assert body["usage"]["prompt_tokens"] == len(request.prompts[0])
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    assert (body["id"], body["object"], body["model"]) == ("chatcmpl-x", "chat.completion", "m")


def test_parameters() -> None:
    body = {"thinking": OFF, "temperature": 0.3, "top_p": 0.5, "top_k": 7, "seed": 5, "stop": ["z"]}
    (params,) = chat(**body, max_completion_tokens=9, logit_bias={"5": 1.5}).params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.3, 0.5, 7, 5)
    assert (params.max_tokens, params.stop, params.logit_bias) == (9, ("z",), {5: 1.5})
    (params,) = chat(stop="z").params
    assert (params.temperature, params.top_p, params.stop) == (1.0, 1.0, ("z",))
    assert params.stop_after == "</think>"
    assert params.max_tokens == 2048 - len(chat().prompts[0])
    assert chat(max_tokens=7).params[0].max_tokens == 7


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
@pytest.mark.parametrize("text", ["hm</think>Hello there!", "hm\n</think>\n\nHi" + CALLS])
def test_streamed_events_add_up_to_the_body(path: str, text: str) -> None:
    """What a client makes of the events is what the whole response says."""
    function = TOOL if path == "responses" else {"function": TOOL}
    tool = {"type": "function", **function}
    if path == "messages":
        tool = {"name": "f", "input_schema": TOOL["parameters"]}
    request = chat(path, tools=[tool], stream=True)
    assert request.streams
    body = request.respond([completion(text)])
    found = events(request, completion(text))
    if path == "chat/completions":
        assert found.pop() == (None, "[DONE]")
        deltas = [data["choices"][0]["delta"] for _, data in found]
        message = body["choices"][0]["message"]
        for key in ("content", "reasoning_content"):
            assert "".join(d.get(key) or "" for d in deltas) == message[key]
        parts = [c["function"]["arguments"] for d in deltas for c in d.get("tool_calls", ())]
        calls = message.get("tool_calls", [])
        assert "".join(parts) == "".join(c["function"]["arguments"] for c in calls)
        assert found[-1][1]["usage"] == body["usage"]
        assert found[-1][1]["choices"][0]["finish_reason"] == body["choices"][0]["finish_reason"]
    elif path == "responses":
        assert found[-1][0] == "response.completed"
        last, whole = found[-1][1]["response"], dict(body)
        kinds = [item["type"] for item in whole["output"]]
        assert kinds == [item["type"] for item in last["output"]]
        assert last["usage"] == whole["usage"]
        assert ("function_call" in kinds) == (CALLS in text)
    else:
        assert found[-1][0] == "message_stop"
        deltas = [data["delta"] for name, data in found if name == "content_block_delta"]
        said = "".join(d.get("text", "") for d in deltas)
        blocks = body["content"]
        assert said == "".join(b.get("text", "") for b in blocks)
        assert any(b["type"] == "tool_use" for b in blocks) == (CALLS in text)


def test_several_samples() -> None:
    request = chat(n=2, seed=5, stream=True, thinking=OFF)
    assert len(request.prompts) == 2
    assert [params.seed for params in request.params] == [derive_seed(5, 0), derive_seed(5, 1)]
    wholes = [completion("one", 0), completion("two two", 1)]
    body = request.respond(wholes)
    assert [c["index"] for c in body["choices"]] == [0, 1]
    assert [c["message"]["content"] for c in body["choices"]] == ["one", "two two"]
    total = sum(len(whole.token_ids) for whole in wholes)
    assert body["usage"]["completion_tokens"] == total
    assert body["usage"]["total_tokens"] == total + len(request.prompts[0])
    found = events(request, *wholes)[:-1]
    for index, text in enumerate(["one", "two two"]):
        mine = [d["choices"][0] for _, d in found if d["choices"][0]["index"] == index]
        assert "".join(c["delta"].get("content") or "" for c in mine) == text
        assert mine[-1]["finish_reason"] == "stop"
    assert [d["usage"] for _, d in found if d.get("usage")] == [body["usage"]]


def test_logprobs() -> None:
    request = chat(logprobs=True, top_logprobs=2, stream=True)
    assert request.params[0].logprobs and request.params[0].top_logprobs == 2
    whole = completion("hm</think>é", logprobs=True)
    content = request.respond([whole])["choices"][0]["logprobs"]["content"]
    assert [bytes(entry["bytes"]) for entry in content] == [b"\xc3", b"\xa9"]
    assert content[0]["logprob"] == -0.5 and len(content[0]["top_logprobs"]) == 2
    streamed = [d["choices"][0]["logprobs"] for _, d in events(request, whole)[:-1]]
    told = [entry for logprobs in streamed if logprobs for entry in logprobs.get("content") or ()]
    assert told == content


def test_stop_texts_end_the_answer_and_the_stream() -> None:
    closed = []

    def engine() -> Iterator[Chunk]:
        try:
            yield from chunks(completion("aSTb</think>cSTdef"))
        finally:
            closed.append(True)

    request = chat(stop=["ST"], stream=True)
    found = list(request.stream(engine()))
    assert closed == [True]
    deltas = [json.loads(e.data)["choices"][0]["delta"] for e in found[:-1]]
    assert "".join(d.get("content") or "" for d in deltas) == "c"
    assert "".join(d.get("reasoning_content") or "" for d in deltas) == "aSTb"
    body = request.respond([completion("aSTb</think>cSTdef")])
    assert body["choices"][0]["message"]["content"] == "c"


def test_tool_calls() -> None:
    request = chat(tools=[{"type": "function", "function": TOOL}], thinking=OFF)
    choice = request.respond([completion("Hi" + CALLS)])["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Hi"
    assert call["function"] == {"name": "f", "arguments": '{"a": "x"}'}
    required = chat(
        tools=[{"type": "function", "function": TOOL}], tool_choice="required", thinking=OFF
    )
    assert TOKENIZER.decode(required.prompts[0], False).endswith("</think>\n\n<｜DSML｜ calls>\n")


def test_cut_answers() -> None:
    cut = completion("hm</think>c", reason=FinishReason.LENGTH)
    assert chat().respond([cut])["choices"][0]["finish_reason"] == "length"
    assert chat("responses").respond([cut])["status"] == "incomplete"
    assert chat("messages").respond([cut])["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"type": "json_object"}, Structured(json={"type": "object"}, trigger=(END_THINK,))),
        ({"type": "regex", "regex": "a+"}, Structured(regex="a+", trigger=(END_THINK,))),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}},
            Structured(json='{"type": "array"}', trigger=(END_THINK,)),
        ),
        ({"type": "text"}, None),
    ],
)
def test_shapes(form: dict[str, Any], expected: Structured | None) -> None:
    messages = [{"role": "user", "content": "json"}]
    assert chat(response_format=form, messages=messages).params[0].structured == expected


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"messages": []}, "Empty input messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "unknown variant `wizard`"),
        ({"messages": [{"role": "tool", "tool_call_id": "1", "content": "x"}]}, "role 'tool'"),
        ({"messages": [USER], "temperature": 3}, "temperature"),
        ({"messages": [USER], "n": 0}, "n must be an integer"),
        ({"messages": [USER], "max_tokens": 5000}, "context"),
        ({"messages": [{"role": "user", "content": "long " * 3000}]}, "context"),
        ({"messages": [USER], "presence_penalty": 1}, "presence_penalty cannot be served"),
        ({"messages": [USER], "logit_bias": {"a": 1}}, "logit_bias must map"),
        ({"messages": [USER], "logit_bias": [1]}, "logit_bias must map"),
        ({"messages": [USER], "model": 3}, "model must be a text"),
        ({"messages": [USER], "model": "\ud800"}, "model must be a text"),
        ({"messages": [USER], "top_k": 0}, "top_k must be"),
        ("{", "the body is no JSON"),
        ("[]", "must be a JSON object"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y"}}]}
                ]
            },
            "holds an image, and this model takes text only",
        ),
    ],
)  # fmt: skip
def test_bad_bodies(body: Any, problem: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        convert("/v1/chat/completions", body, TOKENIZER, 2048)
    assert problem in str(caught.value) and caught.value.status == 400
    assert json.loads(caught.value.body)["error"]["message"]


def test_other_bad_requests() -> None:
    with pytest.raises(ProtocolError, match="cannot be served: use one of") as caught:
        convert("/v1/embeddings", {}, TOKENIZER, 2048)
    assert caught.value.status == 404
    with pytest.raises(ProtocolError, match="nothing is stored"):
        chat("responses", previous_response_id="x")
    with pytest.raises(ProtocolError, match="chat completions only"):
        chat("messages", n=2)


@pytest.mark.parametrize(
    ("reason", "text", "status"),
    [
        (FinishReason.INVALID_REQUEST, "", 400),
        (FinishReason.PROMPT_LENGTH_EXCEEDED, "", 400),
        (FinishReason.STRUCTURED_OUTPUT_ERROR, "", 400),
        (FinishReason.STRUCTURED_OUTPUT_ERROR, "begun", 500),
        (FinishReason.NUMERICAL, "", 500),
        (FinishReason.ABORT, "", 500),
    ],
)
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_failed_completions(path: str, reason: FinishReason, text: str, status: int) -> None:
    failed = completion(text, reason=reason, error="it failed")
    request = chat(path, prompt="x")
    with pytest.raises(ProtocolError, match="it failed") as caught:
        request.respond([failed])
    assert caught.value.status == status
    last = Chunk(index=0, request_id=0, token_ids=(), text="", completion=failed)
    with pytest.raises(ProtocolError, match="it failed"):
        list(request.stream(iter([last])))


def plain(**body: Any) -> BodyRequest:
    return convert("/v1/completions", {"prompt": "ab"} | body, TOKENIZER, 2048, reply_id="x")


def test_plain_completions() -> None:
    request = plain(
        prompt=["ab", [5, 6]], n=2, seed=1, max_tokens=3, echo=True, logprobs=1, stop="z"
    )
    ab = TOKENIZER.encode("ab")
    assert request.prompts == [ab, ab, [5, 6], [5, 6]]
    assert [p.seed == 1 for p in request.params] == [True, False, True, False]
    assert request.params[0].top_logprobs == 1 and request.params[0].max_tokens == 3
    texts = ["one", "two", "three", "four"]
    wholes = [completion(text, i, logprobs=True) for i, text in enumerate(texts)]
    body = request.respond(wholes)
    assert [c["text"] for c in body["choices"]][:2] == ["abone", "abtwo"]
    logprobs = body["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == "one<｜end▁of▁sentence｜>"
    assert logprobs["text_offset"][:2] == [2, 2 + len(logprobs["tokens"][0])]
    assert body["usage"]["prompt_tokens"] == len(ab) + 2
    found = events(request, *wholes)
    assert found.pop() == (None, "[DONE]")
    for index, choice in enumerate(body["choices"]):
        mine = [d["choices"][0] for _, d in found if d["choices"][0]["index"] == index]
        assert "".join(c["text"] for c in mine) == choice["text"]
        for key, values in choice["logprobs"].items():
            assert [v for c in mine for v in c["logprobs"][key]] == values
    assert found[-1][1]["usage"] == body["usage"]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"prompt": None}, "prompt must be a text"),
        ({"prompt": []}, "at least one"),
        ({"prompt": ["a", 3]}, "prompt must be a text"),
        ({"prompt": "\ud800"}, "surrogates"),
        ({"n": 0.5}, "n must be"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix cannot be served"),
        ({"max_tokens": 9999}, "exceed what the context holds"),
        ({"temperature": -1}, "temperature must be"),
        ({"logit_bias": 3}, "logit_bias must map"),
        ({"model": 3}, "model must be"),
        ({"response_format": {"type": "xml"}}, "response_format must be"),
    ],
)
def test_bad_plain_completions(body: dict[str, Any], problem: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        plain(**body)
    assert problem in str(caught.value)


def test_plain_shapes() -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "array"}}}
    assert plain(response_format=schema).params[0].structured == Structured(json={"type": "array"})
    assert plain(response_format={"type": "regex", "regex": "a"}).params[
        0
    ].structured == Structured(regex="a")


STRICT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
STRICT["additionalProperties"] = False


def test_messages_hold_strict_tools() -> None:
    tools = [{"name": "f", "input_schema": STRICT, "strict": True}, {"name": "g"}]
    tools[1]["input_schema"] = STRICT
    (params,) = chat("messages", tools=tools, thinking=OFF).params
    assert params.structured is not None and params.structured.trigger != ()
    (params,) = chat("messages", tools=tools[1:], thinking=OFF).params
    assert params.structured is None


def test_messages_can_require_a_call_of_any_tool() -> None:
    tools = [{"name": name, "input_schema": STRICT} for name in "fg"]
    choice = {"type": "any"}
    request = chat("messages", tools=tools, tool_choice=choice, thinking=OFF)
    opening = "\n\n<｜DSML｜ calls>\n"
    assert TOKENIZER.decode(request.prompts[0]).endswith(opening)
    assert request.prompts[0].count(TOKENIZER.token_id("｜DSML｜")) > 0
    rest = completion(CALLS.removeprefix(opening))
    body = request.respond([rest])
    (block,) = body["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "f", {"a": "x"})
    assert body["stop_reason"] == "tool_use"
    assert body["usage"]["output_tokens"] == len(rest.token_ids)
    names = [name for name, _ in events(request, rest)]
    assert names[:2] == ["message_start", "content_block_start"]
    with pytest.raises(ProtocolError, match="without thinking only"):
        chat("messages", tools=tools, tool_choice=choice)


@pytest.mark.parametrize("place", ["output_config", "output_format"])
def test_messages_have_output_formats(place: str) -> None:
    form = {"type": "json_schema", "schema": STRICT}
    body = {place: {"format": form} if place == "output_config" else form}
    (params,) = chat("messages", thinking=OFF, **body).params
    assert params.structured == Structured(json=STRICT)
    (params,) = chat("messages", **body).params
    assert params.structured is not None and params.structured.trigger == (END_THINK,)
    with pytest.raises(ProtocolError, match="must be of type json_schema"):
        chat("messages", output_format={"type": "json"})
    with pytest.raises(ProtocolError, match="cannot be combined with tools"):
        chat("messages", tools=[{"name": "f", "input_schema": STRICT}], **body)


def test_errors_of_messages_have_their_own_form() -> None:
    with pytest.raises(ProtocolError) as caught:
        chat("messages", n=2)
    error = {"type": "invalid_request_error", "message": caught.value.message}
    assert json.loads(caught.value.body) == {"type": "error", "error": error}
    failed = completion("", reason=FinishReason.NUMERICAL, error="it failed")
    with pytest.raises(ProtocolError) as caught:
        chat("messages").respond([failed])
    assert json.loads(caught.value.body)["error"] == {"type": "api_error", "message": "it failed"}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_usage_is_told_in_an_event_of_its_own(path: str, n: int) -> None:
    told = {"include_usage": True}
    request = chat(path, prompt="x", n=n, thinking=OFF, stream=True, stream_options=told)
    answers = [completion("abc", i) for i in range(n)]
    found = [data for _, data in events(request, *answers)]
    assert found[-1] == "[DONE]" and found[-2]["choices"] == []
    assert found[-2]["usage"] == request.respond(answers)["usage"]
    assert found[-2]["id"] == found[0]["id"]
    assert all(data["usage"] is None and data["choices"] for data in found[:-2])


@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        ("chat/completions", {"tool_choice": "required"}, "needs tools"),
        ("messages", {"tool_choice": {"type": "any"}}, "needs tools"),
        ("chat/completions", {"functions": [TOOL]}, "functions cannot be served"),
        ("chat/completions", {"repetition_penalty": 1.2}, "leave out, or give 1"),
        ("responses", {"prompt": {"id": "p"}}, "prompt cannot be served: nothing is stored"),
        ("responses", {"background": True}, "background cannot be served"),
        ("completions", {"prompt": 5}, "prompt must be a text"),
        ("completions", {"prompt": "x", "stream": 1}, "stream must be true or false, not 1"),
        ("completions", {"prompt": "x", "echo": "x"}, "echo must be true or false"),
        ("completions", {"prompt": "x", "stream_options": 3}, "stream_options must be an object"),
    ],
)
def test_what_is_not_served_is_refused(path: str, body: dict[str, Any], problem: str) -> None:
    with pytest.raises(ProtocolError, match=problem):
        chat(path, **body)
    neutral = {"repetition_penalty": 1.0, "background": False, "min_p": 0, "functions": None}
    assert chat(path, **{"prompt": "x", **neutral}).params


def test_log_probabilities_hold_the_token_itself() -> None:
    request = chat("completions", prompt="ab", logprobs=1, echo=True)
    drawn = completion("cd", logprobs=True)
    (choice,) = request.respond([drawn])["choices"]
    told = choice["logprobs"]
    for top, token in zip(told["top_logprobs"], told["tokens"], strict=True):
        assert len(top) == 2 and token in top
    assert told["text_offset"][0] == len("ab")
    assert choice["text"][told["text_offset"][0] :].startswith(told["tokens"][0])
    streamed = [data["choices"][0] for _, data in events(request, drawn)[:-1]]
    offsets = [o for c in streamed for o in c["logprobs"]["text_offset"]]
    assert offsets == told["text_offset"]
