"""Bodies of public chat protocols to prompts, token ids back to bodies and events (pure: no torch).

Conversion, rendering and the forms of responses are the companion library's. On our side stand what
it leaves out: several samples (`n`), `max_completion_tokens`, `logit_bias`, sampling as requested,
shapes to enforce, and for messages strict tools, a required call and the form of errors. What needs
an engine is `dialog/protocol.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from types import ModuleType
from typing import Any, Final

from deepinfer.chat import companion
from deepinfer.chat.render import CALLS_BEGIN, DSML, Piece, Prompt
from deepinfer.chat.tokenizer import Tokenizer
from deepinfer.errors import ProtocolError, json_kind, json_problem

__all__ = [
    "Api",
    "ProtocolEvent",
    "ProtocolReply",
    "ProtocolRequest",
    "Sampling",
    "Shape",
    "errors_of",
    "parse",
]


class Api(StrEnum):
    """A protocol; the value is its path below /v1."""

    CHAT_COMPLETIONS = "chat/completions"
    RESPONSES = "responses"
    MESSAGES = "messages"


_ID_PREFIX: Final = {Api.CHAT_COMPLETIONS: "chatcmpl", Api.RESPONSES: "resp", Api.MESSAGES: "msg"}
_MAX_SAMPLES: Final = 128
Logprobs = Sequence[tuple[float, Sequence[tuple[int, float]]]]
"""For each token its log-probability, and (id, log-probability) of alternatives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What a body says about sampling, None where it says nothing."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    n: int = 1


@dataclass(frozen=True, slots=True)
class Shape:
    """What a body wants enforced: `json` (a schema's text, "" for any object), `regex`, or calls of
    tools (`tool_call`, `tool_call_required`: the tools as a JSON list).
    """

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class ProtocolEvent:
    """One event of a streamed response.

    name  what stands in the event field of server-sent events, None for none
    data  JSON, or the closing mark of the protocol
    """

    name: str | None
    data: str

    def sse(self) -> bytes:
        """Return the event as server-sent events are written."""
        head = "" if self.name is None else f"event: {self.name}\n"
        return f"{head}data: {self.data}\n\n".encode()


class ProtocolRequest:
    """A converted body. Build with `parse`.

    prompt       the rendered conversation
    sampling     what it says about sampling
    shape        what it wants enforced, None for nothing
    streams      whether it asks for events
    thinks       whether the answer begins with thinking
    tells_usage  whether events end with one that has no choices and what was used
    """

    def __init__(
        self, api: Api, recipe: ModuleType, body: dict[str, Any], n: int, model: str
    ) -> None:
        self.api = api
        self.model = model
        self._recipe = recipe
        self._echo: object = None
        self._namespaces: dict[str, tuple[str, str]] = {}
        self._converted = self._convert(body)
        converted = self._converted
        if any(message.image_sources for message in converted.conversation.messages):
            raise ProtocolError("the body holds an image, and this model takes text only")
        rendered = recipe.DeepseekV41Encoding().render_conversation(converted.conversation)
        self.prompt: Prompt = companion.pieces_of(rendered)
        options, parsing = converted.inference_options, converted.parsing_options
        stage = parsing.thinking_initial_stage
        self.thinks = bool(stage is not None and stage.starts_in_reasoning())
        self.streams = bool(converted.stream)
        constraint = options.output_constraint
        self.shape = None if constraint is None else Shape(constraint.kind, constraint.schema)
        self.sampling = _sampling(body, n, options, parsing.stop_sequences)
        told = body.get("stream_options")
        self.tells_usage = (
            api is Api.CHAT_COMPLETIONS
            and isinstance(told, Mapping)
            and told.get("include_usage") is True
        )
        self._opening = ""
        if api is Api.MESSAGES:
            self._complete_messages(body)

    def _complete_messages(self, body: Mapping[str, Any]) -> None:
        """Add what the library leaves out of messages. Raises ProtocolError."""
        if self.shape is not None and self.shape.kind.startswith("tool_call"):
            strict = {tool.get("name") for tool in body["tools"] if tool.get("strict") is True}
            tools = json.loads(self.shape.text)
            for tool in tools:
                tool["function"]["strict"] = tool["function"]["name"] in strict
            kind, choice = self.shape.kind, body.get("tool_choice")
            if isinstance(choice, Mapping) and choice.get("type") == "any":
                if self.thinks:
                    raise ProtocolError("tool_choice any goes without thinking only: disable it")
                kind, self._opening = "tool_call_required", f"{CALLS_BEGIN}\n"
                parts = self._opening.partition(DSML)
                opening = [Piece(part, part == DSML) for part in parts]
                self.prompt = Prompt.join([*self.prompt.pieces, *opening])
            self.shape = Shape(kind, json.dumps(tools))
        form = body.get("output_format")
        if isinstance(body.get("output_config"), Mapping):
            form = body["output_config"].get("format", form)
        if form is None:
            return
        schema = form.get("schema") if isinstance(form, Mapping) else None
        if not isinstance(schema, Mapping | bool) or form.get("type") != "json_schema":
            raise ProtocolError("the output format must be of type json_schema, with a schema")
        if self.shape is not None:
            raise ProtocolError("an output format cannot be combined with tools")
        self.shape = Shape("json", json.dumps(schema))

    def resolve_max_tokens(self, prompt_tokens: int, context_tokens: int) -> int:
        """Return the most tokens to generate; raises ProtocolError for too small a context."""
        try:
            return int(self._converted.resolve_max_tokens(prompt_tokens, context_tokens))
        except self._recipe.ConversionError as error:
            raise _converted_error(error) from None

    def new_id(self, unique: str) -> str:
        """Return the id of a response from something unique."""
        return f"{_ID_PREFIX[self.api]}-{unique}"

    def reply(
        self, reply_id: str, tokenizer: Tokenizer, prompt_tokens: int, num_cached: int = 0
    ) -> ProtocolReply:
        """Return what turns one sample's tokens into a response."""
        return ProtocolReply(self, reply_id, tokenizer, prompt_tokens, num_cached)

    def join(self, bodies: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return one body for the samples of a request."""
        whole = dict(bodies[0])
        if len(bodies) > 1:
            whole["choices"] = [
                {**choice, "index": index}
                for index, body in enumerate(bodies)
                for choice in body["choices"]
            ]
            whole["usage"] = _add_usage([body["usage"] for body in bodies])
        return whole

    def numbered(
        self, events: Sequence[ProtocolEvent], index: int, bodies: Sequence[dict[str, Any]] | None
    ) -> list[ProtocolEvent]:
        """Return the events of one sample with its index.

        bodies  the samples' bodies, for the last events of all: what was used is told once, in an
                event of its own where the body asks for it
        """
        found = []
        for place, event in enumerate(events):
            data = json.loads(event.data)
            for choice in data.get("choices", ()):
                choice["index"] = index
            data.pop("usage", None)
            told = [data]
            if self.tells_usage:
                data["usage"] = None
            if bodies and place == len(events) - 1:
                if self.tells_usage:
                    told.append({**data, "choices": []})
                told[-1]["usage"] = _add_usage([body["usage"] for body in bodies])
            found += [ProtocolEvent(event.name, json.dumps(d, ensure_ascii=False)) for d in told]
        return found

    def _convert(self, body: dict[str, Any]) -> Any:  # the library's own type
        recipe = self._recipe
        kinds = {
            Api.CHAT_COMPLETIONS: recipe.ChatCompletionRequest,
            Api.RESPONSES: recipe.ResponsesRequest,
            Api.MESSAGES: recipe.MessagesRequest,
        }
        options = recipe.ConversionOptions().with_model_versions_by_name(
            {self.model: recipe.ModelVersion.DeepseekV41Flash}
        )
        try:
            request = kinds[self.api](json.dumps({**body, "model": self.model}))
            if self.api is Api.RESPONSES:
                self._echo = request.echo()
                self._namespaces = request.namespace_tool_map(options)
            return request.convert(options)
        except recipe.ConversionError as error:
            raise _converted_error(error) from None
        except (ValueError, OverflowError) as error:
            raise ProtocolError(str(error)) from None

    def _generator(self, reply_id: str) -> Any:  # the library's own type
        recipe, converted = self._recipe, self._converted
        if self.api is Api.CHAT_COMPLETIONS:
            return recipe.ChatCompletionRequest.chunk_generator(converted, reply_id, self.model)
        if self.api is Api.MESSAGES:
            return recipe.MessagesRequest.chunk_generator(converted, reply_id, self.model)
        generator = recipe.ResponsesRequest.chunk_generator(converted, reply_id, self.model)
        if self._namespaces:
            generator = generator.with_namespace_tool_map(self._namespaces)
        return generator.with_echo(self._echo)


class ProtocolReply:
    """One sample's response, as it grows: push ids, then finish; both return events."""

    def __init__(
        self,
        request: ProtocolRequest,
        reply_id: str,
        tokenizer: Tokenizer,
        prompt_tokens: int,
        num_cached: int,
    ) -> None:
        recipe = request._recipe
        self._recipe = recipe
        self._tokenizer = tokenizer
        kinds = {
            Api.CHAT_COMPLETIONS: recipe.ChatCompletionResponse,
            Api.RESPONSES: recipe.ResponsesResponse,
            Api.MESSAGES: recipe.MessagesResponse,
        }
        self._kind = kinds[request.api]
        created = int(time.time())
        self._response = self._kind(reply_id, request.model, created, prompt_tokens, num_cached)
        self._processor = recipe.StreamProcessor(
            request._generator(reply_id),
            request._converted.parsing_options,
            _library_tokenizer(tokenizer),
        )
        usage = recipe.PromptUsage(prompt_tokens=prompt_tokens, prompt_cache_hit_tokens=num_cached)
        self._begin = recipe.InferenceChunk.ready(prompt_usage=usage)
        self._has_begun = False
        self._opening = request._opening

    @property
    def is_finished(self) -> bool:
        """Whether a stop sequence has ended the answer: nothing more is needed."""
        return bool(self._processor.finished)

    def push(
        self, token_ids: Iterable[int], logprobs: Logprobs | None = None
    ) -> list[ProtocolEvent]:
        """Take generated ids and return the events they make."""
        chunk = self._recipe.InferenceChunk
        events = self._start()
        for place, token_id in enumerate(token_ids):
            if self.is_finished:
                break
            if self._tokenizer.is_special(token_id):  # it has no text, but it was generated
                events += self._take(chunk.text("", 1))
            else:
                pair = None if logprobs is None else [logprobs[place]]
                events += self._take(chunk.tokens([token_id], pair))
        return events

    def finish(self, is_cut: bool) -> list[ProtocolEvent]:
        """Return the last events.

        is_cut  the answer reached its limit
        """
        reasons = self._recipe.InferenceFinishReason
        events = self._start()
        if not self.is_finished:
            reason = reasons.Length if is_cut else reasons.Stop
            events += self._take(self._recipe.InferenceChunk.finish(reason))
        return events

    def body(self) -> dict[str, Any]:
        """Return the response so far; the whole one once finished."""
        found: dict[str, Any] = json.loads(self._response.to_json())
        return found

    def closing(self) -> list[ProtocolEvent]:
        """Return what the protocol sends after the last event of all."""
        mark: str | None = self._kind.sse_done_data()
        return [] if mark is None else [ProtocolEvent(None, mark)]

    def _start(self) -> list[ProtocolEvent]:
        if self._has_begun:
            return []
        self._has_begun = True
        events = self._take(self._begin)
        if self._opening:  # the prompt ends with it
            events += self._take(self._recipe.InferenceChunk.text(self._opening, 0))
        return events

    def _take(self, chunk: object) -> list[ProtocolEvent]:
        events = []
        for event in self._processor.push(chunk):
            events.append(ProtocolEvent(self._kind.sse_event_name(event), event.to_json()))
            self._response.accumulate(event)
        return events


def parse(api: Api, body: bytes | str | Mapping[str, Any], default_model: str) -> ProtocolRequest:
    """Convert a body.

    default_model  the name that responses carry where the body names none; any name is accepted
    Raises ProtocolError for a body that cannot be served, UnsupportedError without the companion
    library.
    """
    recipe = companion.library("protocol conversion")
    if isinstance(body, Mapping):
        found = dict(body)
    else:
        try:
            found = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"the body is no JSON: {json_problem(error)}") from None
    if not isinstance(found, dict):
        raise ProtocolError(f"the body must be a JSON object, not {json_kind(found)}")
    model = found.get("model") or default_model
    if not isinstance(model, str) or not model.isprintable():  # halves of pairs are not
        raise ProtocolError("model must be a text of characters that can be printed")
    _refuse_unserved(found)
    prepared = {k: v for k, v in found.items() if k not in ("n", "max_completion_tokens")}
    if found.get("max_tokens") is None and found.get("max_completion_tokens") is not None:
        prepared["max_tokens"] = found["max_completion_tokens"]
    return ProtocolRequest(api, recipe, prepared, _samples(api, found), model)


@contextmanager
def errors_of(api: Api) -> Iterator[None]:
    """Give the errors inside the form that a protocol's senders read."""
    try:
        yield
    except ProtocolError as error:
        if api is not Api.MESSAGES:
            raise
        kind = "invalid_request_error" if error.status < 500 else "api_error"
        body = {"type": "error", "error": {"type": kind, "message": error.message}}
        raise ProtocolError(error.message, status=error.status, body=json.dumps(body)) from error


def _samples(api: Api, body: Mapping[str, Any]) -> int:
    """Return how many samples a body asks for."""
    n = body.get("n")
    if n is None:
        return 1
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= _MAX_SAMPLES:
        raise ProtocolError(f"n must be an integer from 1 to {_MAX_SAMPLES}, not {n!r}")
    if n > 1 and api is not Api.CHAT_COMPLETIONS:
        raise ProtocolError("n above 1 goes with chat completions only")
    return n


_UNSERVED: Final[Mapping[str, tuple[object, ...]]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "functions": (),
    "function_call": (),
    "audio": (),
    "background": (False,),
    "conversation": (),
}
"""What would change the answer and is not served, and the values that change nothing."""


def _refuse_unserved(body: Mapping[str, Any]) -> None:
    """Raise ProtocolError for what would change the answer and is not served."""
    given = {name: neutral for name, neutral in _UNSERVED.items() if body.get(name) is not None}
    named = [name for name, neutral in given.items() if body[name] not in neutral]
    if named:
        values = "".join(f", or give {_UNSERVED[name][0]}" for name in named[:1] if given[name])
        raise ProtocolError(f"{' and '.join(named)} cannot be served: leave out{values}")
    stored = body.get("previous_response_id") is not None and "previous_response_id"
    stored = stored or (isinstance(body.get("prompt"), Mapping) and "prompt")
    if stored:
        raise ProtocolError(f"{stored} cannot be served: nothing is stored; give input")
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if kind in ("required", "any") and not body.get("tools"):
        raise ProtocolError(f"tool_choice {kind} needs tools, and none is declared")


def _sampling(body: Mapping[str, Any], n: int, options: Any, stop: Sequence[str]) -> Sampling:
    """Return what a body says about sampling.

    The library has checked the ranges. It rounds temperature and changes it and `top_p` to what its
    own service uses; here they are as the body says.
    """
    bias = body.get("logit_bias") or {}
    try:
        logit_bias = {int(token_id): float(value) for token_id, value in bias.items()}
    except (AttributeError, TypeError, ValueError):
        raise ProtocolError("logit_bias must map token ids to numbers") from None
    top_k = body.get("top_k")
    return Sampling(
        max_tokens=options.max_tokens,
        temperature=body.get("temperature"),
        top_p=body.get("top_p"),
        top_k=top_k,
        seed=options.seed,
        stop=tuple(stop),
        logprobs=options.logprobs,
        top_logprobs=options.top_logprobs or 0,
        logit_bias=logit_bias,
        n=n,
    )


def _add_usage(usages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add what samples of one prompt used: the prompt counts once."""
    total = json.loads(json.dumps(usages[0]))
    for usage in usages[1:]:
        total["completion_tokens"] += usage["completion_tokens"]
        details = usage.get("completion_tokens_details") or {}
        for name, count in details.items():
            found = total.setdefault("completion_tokens_details", {})
            found[name] = found.get(name, 0) + count
    total["total_tokens"] = total["prompt_tokens"] + total["completion_tokens"]
    return dict(total)


@lru_cache(maxsize=2)
def _library_tokenizer(tokenizer: Tokenizer) -> Any:  # the library's own type
    """Return the same tokenizer as the library's own, by which it reads ids."""
    return companion.library("protocol conversion").Tokenizer.from_str(tokenizer.to_json())


def _converted_error(error: Any) -> ProtocolError:  # the library's own type
    try:
        message = str(json.loads(error.body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = str(error.body)
    return ProtocolError(message, status=int(error.status_code), body=error.body)
