"""What a line asks for, what the engine is asked, and the record that answers it.

A line is a request of a batch file, {"custom_id", "method", "url", "body"}, or plain: {"prompt"} or
{"messages"} beside the fields of SamplingParams.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from deepinfer.chat.encode import refuse_long
from deepinfer.chat.messages import ResponseFormat, to_mapping
from deepinfer.chat.tokenizer import Tokenizer
from deepinfer.config.fields import near_matches
from deepinfer.dialog.chat import ChatOptions, default_max_tokens, make_turn, read_completion
from deepinfer.dialog.protocol import convert
from deepinfer.dialog.samples import raise_failure, sample_params
from deepinfer.engine.prompts import BadPrompt, check_prompt
from deepinfer.engine.request import Completion, SamplingParams
from deepinfer.errors import (
    DeepInferError,
    ProtocolError,
    RequestError,
    json_kind,
    json_problem,
    unique_keys,
)
from deepinfer.jobs.output import Record
from deepinfer.jobs.source import MAX_LINE_BYTES, Line

__all__ = ["Context", "Row", "Work", "failure", "prepare", "read_row"]

_SAMPLING: Final = frozenset(
    "temperature top_p top_k max_tokens min_tokens seed stop stop_after stop_token_ids ignore_eos "
    "logprobs top_logprobs logprobs_mode logit_bias n structured timeout_s prompt_logprobs".split()
)
_CHAT: Final = frozenset(("thinking", "effort", "tools", "tool_choice", "response_format"))
_MAX_SAMPLES: Final = 128
_MAX_MESSAGE: Final = 2000


@dataclass(frozen=True, slots=True)
class Context:
    """What rows are understood under.

    defaults  fields of SamplingParams for plain rows that lack them
    thinking  whether plain rows with messages think where they do not say
    model     the name that responses carry where a body names none
    settings  a digest of all that changes results: model, engine settings, the fields above
    """

    tokenizer: Tokenizer | None
    max_model_len: int
    vocab_size: int
    model: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    thinking: bool = True
    settings: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A line as far as it can be understood without an engine.

    key      identifies the row in every run: its custom_id, or its line number
    request  a digest of what it asks for and of the settings
    content  the JSON object, None where there is none; then `error` says why
    """

    line: int
    key: str
    custom_id: str | None
    request: str
    content: dict[str, Any] | None
    error: str | None = None

    def as_duplicate(self, of: int) -> Row:
        """Return the row as an error: its custom_id is that of an earlier line."""
        return replace(
            self,
            key=f"duplicate:{self.line}:{self.custom_id}",
            error=f"custom_id {self.custom_id!r} is that of line {of}: give every row its own",
        )


@dataclass(frozen=True, slots=True)
class Work:
    """What the engine is asked for a row, and what makes the record of its completions."""

    prompts: list[Sequence[int]]
    params: list[SamplingParams]
    respond: Callable[[Sequence[Completion]], Record]


def read_row(line: Line, settings: str) -> Row:
    """Understand a line as far as that goes without an engine; never raises."""
    key = f"line:{line.number}"
    if line.data is None:
        error = f"the line is longer than {MAX_LINE_BYTES} bytes"
        return Row(line.number, key, None, _digest(str(line.number), settings), None, error)
    try:
        content = json.loads(line.data, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as failed:
        error = f"the line is no JSON: {json_problem(failed)}"
        return Row(line.number, key, None, _digest(repr(line.data), settings), None, error)
    if not isinstance(content, dict):
        error = f"the line must hold a JSON object, not {json_kind(content)}"
        return Row(line.number, key, None, _digest(repr(line.data), settings), None, error)
    custom_id = content.pop("custom_id", None)
    error_found = None
    if isinstance(custom_id, int) and not isinstance(custom_id, bool):
        custom_id = str(custom_id)
    if custom_id is not None and not isinstance(custom_id, str):
        error_found, custom_id = "custom_id must be a text", None
    if custom_id is not None:
        key = f"id:{custom_id}"
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return Row(line.number, key, custom_id, _digest(text, settings), content, error_found)


def prepare(row: Row, context: Context) -> Work:
    """Return what the engine is asked. Raises RequestError (ProtocolError for batch requests)."""
    if row.error is not None or row.content is None:
        raise RequestError(row.error or "the line is empty")
    if "url" in row.content or "body" in row.content:
        return _batch(row, row.content, context)
    if "messages" in row.content:
        return _conversation(row, row.content, context)
    if "prompt" in row.content:
        return _plain(row, row.content, context)
    raise RequestError("the row must hold url and body, prompt, or messages")


def failure(row: Row, error: DeepInferError) -> Record:
    """Return the record of a row that could not be answered."""
    message = "; ".join([error.message, *error.problems])
    if len(message) > _MAX_MESSAGE:  # it may repeat what the row holds
        message = message[:_MAX_MESSAGE] + "..."
    status = error.status if isinstance(error, ProtocolError) else 400
    code = "invalid_request" if status < 500 else "server_error"
    record: Record = {"custom_id": row.custom_id}
    if row.content is not None and "url" in row.content:
        body = error.body if isinstance(error, ProtocolError) else ProtocolError(message).body
        record = {"id": _reply_id(row), **record}
        record["response"] = {
            "status_code": status,
            "request_id": row.request,
            "body": json.loads(body),
        }
    record["error"] = {"code": code, "message": message}
    return record | _run(row)


def _batch(row: Row, content: dict[str, Any], context: Context) -> Work:
    """Convert a request of a batch file."""
    unknown = sorted(content.keys() - {"url", "method", "body"})
    url, method, body = content.get("url"), content.get("method", "POST"), content.get("body")
    problems = []
    if unknown:
        keys = "custom_id, method, url and body"
        problems.append(f"unknown keys: {', '.join(unknown)}; beside a body stand {keys}")
    if method != "POST":
        problems.append(f"method must be POST, not {method!r}")
    if not isinstance(url, str):
        problems.append("url must be a text such as /v1/chat/completions")
    if not isinstance(body, dict):
        problems.append("body must be a JSON object")
    if problems:
        raise ProtocolError("; ".join(problems))
    assert isinstance(url, str) and isinstance(body, dict)
    request = convert(
        url,
        body,
        _tokenizer(context),
        context.max_model_len,
        default_model=context.model,
        reply_id=row.request,
    )

    def respond(completions: Sequence[Completion]) -> Record:
        response = {
            "status_code": 200,
            "request_id": row.request,
            "body": request.respond(completions),
        }
        head = {"id": _reply_id(row), "custom_id": row.custom_id}
        return head | {"response": response, "error": None} | _run(row)

    return Work(list(request.prompts), request.params, respond)


def _plain(row: Row, content: dict[str, Any], context: Context) -> Work:
    """Read a prompt, text or ids."""
    params, n = _sampling(content, context, {"prompt"})
    encode = context.tokenizer.encode if context.tokenizer is not None else None
    if context.tokenizer is not None and isinstance(content["prompt"], str):
        refuse_long(content["prompt"], context.tokenizer, context.max_model_len)
    ids = check_prompt(content["prompt"], context.vocab_size, encode)
    if isinstance(ids, BadPrompt):
        raise RequestError(ids.error)

    def respond(completions: Sequence[Completion]) -> Record:
        for completion in completions:
            raise_failure(completion)
        results = [_completion(completion) for completion in completions]
        answer = results[0] if n == 1 else {"samples": results}
        return {"custom_id": row.custom_id} | answer | {"error": None} | _run(row)

    return Work([ids] * n, [sample_params(params, i) for i in range(n)], respond)


def _conversation(row: Row, content: dict[str, Any], context: Context) -> Work:
    """Read messages beside the options of a conversation."""
    params, n = _sampling(content, context, {"messages"} | _CHAT)
    messages = content["messages"]
    if not isinstance(messages, list):
        raise RequestError("messages must be a list")
    given = {name: content[name] for name in _CHAT if content.get(name) is not None}
    if "response_format" in given:
        given["response_format"] = _response_format(given["response_format"])
    given = {"thinking": context.thinking, "structured": params.structured, **given}
    params = replace(params, structured=None)
    options = ChatOptions(**given)
    if "max_tokens" not in content and "max_tokens" not in context.defaults:
        params = replace(params, max_tokens=default_max_tokens(options.thinking, options.effort))
    turn = make_turn(messages, options, _tokenizer(context), params, context.max_model_len)

    def respond(completions: Sequence[Completion]) -> Record:
        results = []
        for completion in completions:
            raise_failure(completion)
            found = read_completion(completion, turn.new_parser())
            result = {"message": to_mapping(found.message)} | _completion(completion)
            results.append(result | {"finish_reason": found.finish_reason})
        answer = results[0] if n == 1 else {"samples": results}
        return {"custom_id": row.custom_id} | answer | {"error": None} | _run(row)

    ids = turn.prompt_token_ids
    return Work([ids] * n, [sample_params(turn.params, i) for i in range(n)], respond)


def _response_format(given: object) -> ResponseFormat:
    if not isinstance(given, Mapping):
        raise RequestError("response_format must be a mapping with a type")
    kind, inner = str(given.get("type")), given.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, Mapping) else given.get("schema")
    return ResponseFormat(kind, schema=schema, regex=given.get("regex"))


def _sampling(
    content: Mapping[str, Any], context: Context, own: set[str] | frozenset[str]
) -> tuple[SamplingParams, int]:
    """Return the parameters of a plain row, for one sample, and how many it wants."""
    known = own | _SAMPLING
    unknown = sorted(content.keys() - known)
    if "prompt" in unknown:
        raise RequestError("the row holds prompt and messages: give one of them")
    if unknown:
        hints = ", ".join(f"{key}{near_matches(key, known)}" for key in unknown)
        raise RequestError(f"unknown keys: {hints}; accepted are {', '.join(sorted(known))}")
    given = {name: value for name, value in content.items() if name in _SAMPLING}
    values = {**context.defaults, **{k: v for k, v in given.items() if v is not None}}
    if "logit_bias" in values and isinstance(values["logit_bias"], Mapping):
        try:
            values["logit_bias"] = {int(i): v for i, v in values["logit_bias"].items()}
        except ValueError:
            raise RequestError("logit_bias must map token ids to numbers") from None
    n = values.pop("n", 1)
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= _MAX_SAMPLES:
        raise RequestError(f"n must be an integer from 1 to {_MAX_SAMPLES}, not {n!r}")
    return SamplingParams(**values), n


def _completion(completion: Completion) -> Record:
    found: Record = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": str(completion.finish_reason),
    }
    if completion.logprobs is not None:
        found["logprobs"] = list(completion.logprobs)
    if completion.top_logprobs is not None:
        found["top_logprobs"] = [[list(p) for p in step] for step in completion.top_logprobs]
    if completion.prompt_logprobs is not None:
        found["prompt_logprobs"] = list(completion.prompt_logprobs)
    if completion.drafts is not None:
        found["drafts"] = completion.drafts.to_json()
    return found


def _tokenizer(context: Context) -> Tokenizer:
    if context.tokenizer is None:
        raise RequestError("texts need the checkpoint's tokenizer.json: give prompts as token ids")
    return context.tokenizer


def _run(row: Row) -> Record:
    """Return what the next run needs to know of a record."""
    return {"run": {"line": row.line, "key": row.key, "request": row.request}}


def _reply_id(row: Row) -> str:
    return f"batch_req_{row.request}"


def _digest(text: str, settings: str) -> str:
    return hashlib.sha256(f"{settings}\n{text}".encode("utf-8", "surrogatepass")).hexdigest()[:32]
