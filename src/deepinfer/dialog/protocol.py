"""Protocol bodies to engine requests, engine results to bodies and events: a library call, no
server.

    request = convert("/v1/chat/completions", body, tokenizer, max_model_len)
    completions = llm.generate(request.prompts, request.params)
    reply = request.respond(completions)                       # or, step by step:
    for event in request.stream(llm.stream(request.prompts, request.params)):
        send(event.sse())

Chat completions, responses and messages go through the companion library (`chat/protocol.py`);
plain completions are converted here.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from deepinfer.chat.encode import encode_prompt
from deepinfer.chat.messages import to_tool
from deepinfer.chat.protocol import (
    Api,
    ProtocolEvent,
    ProtocolReply,
    ProtocolRequest,
    Shape,
    errors_of,
    parse,
)
from deepinfer.chat.render import DSML, END_THINK
from deepinfer.chat.tokenizer import Tokenizer
from deepinfer.dialog.completions import CompletionsRequest
from deepinfer.dialog.samples import raise_failure, sample_params
from deepinfer.dialog.toolshape import tool_shape
from deepinfer.engine.request import Chunk, Completion, FinishReason, SamplingParams
from deepinfer.errors import ProtocolError, RequestError
from deepinfer.grammar.spec import Structured

__all__ = ["PATHS", "BodyRequest", "ChatRequest", "convert"]

PATHS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
"""What can be converted."""


class BodyRequest(Protocol):
    """A converted body: what the engine is asked, and how its results become a body again."""

    @property
    def prompts(self) -> list[list[int]]:
        """The token ids of each request."""
        ...

    @property
    def params(self) -> list[SamplingParams]:
        """The parameters of each request."""
        ...

    @property
    def streams(self) -> bool:
        """Whether the body asks for events."""
        ...

    def respond(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the response to one completion per request, in order.

        Raises ProtocolError when one has failed.
        """
        ...

    def stream(self, chunks: Iterator[Chunk]) -> Generator[ProtocolEvent]:
        """Yield the events of the response; closes `chunks` once nothing more is needed."""
        ...


def convert(
    path: str,
    body: bytes | str | Mapping[str, Any],
    tokenizer: Tokenizer,
    max_model_len: int,
    *,
    default_model: str = "deepinfer",
    reply_id: str | None = None,
) -> BodyRequest:
    """Convert a body that was sent to a path of PATHS.

    tokenizer, max_model_len  of the engine
    default_model             the name that responses carry where the body has none
    reply_id                  the unique part of the response's id, random by default
    Raises ProtocolError for a body that cannot be served, UnsupportedError without the extra
    `chat`.
    """
    if path not in PATHS:
        raise ProtocolError(f"{path} cannot be served: use one of {', '.join(PATHS)}", status=404)
    unique = uuid.uuid4().hex if reply_id is None else reply_id
    if path == "/v1/completions":
        return CompletionsRequest.of(body, tokenizer, max_model_len, default_model, unique)
    api = Api(path.removeprefix("/v1/"))
    with errors_of(api):
        request = parse(api, body, default_model)
        return ChatRequest.of(request, tokenizer, max_model_len, unique)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A converted body of chat completions, responses or messages: one request per sample."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    streams: bool
    request: ProtocolRequest
    reply_id: str
    tokenizer: Tokenizer

    @classmethod
    def of(
        cls, request: ProtocolRequest, tokenizer: Tokenizer, max_model_len: int, unique: str
    ) -> ChatRequest:
        """Encode the prompt and settle the parameters. Raises ProtocolError."""
        try:
            ids = encode_prompt(request.prompt, tokenizer, max_model_len)
            params = _params(request, tokenizer, len(ids), max_model_len)
        except ProtocolError:
            raise
        except RequestError as error:
            raise ProtocolError("; ".join([error.message, *error.problems])) from None
        n = request.sampling.n
        return cls(
            prompts=[ids] * n,
            params=[sample_params(params, i) for i in range(n)],
            streams=request.streams,
            request=request,
            reply_id=request.new_id(unique),
            tokenizer=tokenizer,
        )

    def respond(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the whole response."""
        bodies = []
        for completion in completions:
            with errors_of(self.request.api):
                raise_failure(completion)
            reply = self._reply()
            reply.push(completion.token_ids, _logprobs(completion))
            reply.finish(completion.finish_reason is FinishReason.LENGTH)
            bodies.append(reply.body())
        return self.request.join(bodies)

    def stream(self, chunks: Iterator[Chunk]) -> Generator[ProtocolEvent]:
        """Yield events as the engine brings tokens."""
        replies = [self._reply() for _ in self.prompts]
        done = [False] * len(replies)
        usage: list[dict[str, Any]] = []
        try:
            for chunk in chunks:
                place, last = chunk.index, chunk.completion
                if last is not None:
                    with errors_of(self.request.api):
                        raise_failure(last)
                if done[place]:
                    continue
                reply, events = replies[place], []
                events += reply.push(chunk.token_ids, _logprobs(chunk))
                if last is not None:
                    events += reply.finish(last.finish_reason is FinishReason.LENGTH)
                done[place] = last is not None or reply.is_finished
                if done[place]:
                    usage.append(reply.body())
                yield from self._number(events, place, all(done), usage)
                if all(done):
                    break
        finally:
            if isinstance(chunks, Generator):
                chunks.close()
        yield from replies[0].closing()

    def _number(
        self, events: list[ProtocolEvent], place: int, is_last: bool, bodies: list[dict[str, Any]]
    ) -> Iterable[ProtocolEvent]:
        """Give the events of a sample its index; what was used is told once, at the end."""
        if len(self.prompts) == 1 and not self.request.tells_usage:
            return events
        return self.request.numbered(events, place, bodies if is_last else None)

    def _reply(self) -> ProtocolReply:
        return self.request.reply(self.reply_id, self.tokenizer, len(self.prompts[0]))


def _params(
    request: ProtocolRequest, tokenizer: Tokenizer, num_prompt: int, max_model_len: int
) -> SamplingParams:
    """Return the engine's parameters of a body. Raises RequestError."""
    given = request.sampling
    values: dict[str, Any] = {
        "max_tokens": request.resolve_max_tokens(num_prompt, max_model_len),
        "temperature": given.temperature,
        "top_p": given.top_p,
        "top_k": given.top_k,
        "seed": given.seed,
    }
    return SamplingParams(
        **{name: value for name, value in values.items() if value is not None},
        stop=given.stop,
        stop_after=END_THINK if request.thinks and given.stop else "",  # the thinking goes on
        logprobs=given.logprobs,
        top_logprobs=given.top_logprobs,
        logit_bias=given.logit_bias,
        structured=_structured(request.shape, request.thinks, tokenizer),
    )


def _structured(shape: Shape | None, thinks: bool, tokenizer: Tokenizer) -> Structured | None:
    """Return what is to be enforced: the answer's form, with thinking from its end on, or the
    schemas of strict tools in calls.
    """
    if shape is None:
        return None
    if shape.kind in ("tool_call", "tool_call_required"):
        return tool_shape(
            [to_tool(tool) for tool in json.loads(shape.text)],
            is_inside=shape.kind == "tool_call_required",
            mark_id=tokenizer.token_id(DSML),
        )
    end = tokenizer.token_id(END_THINK)
    trigger: tuple[int, ...] = (end,) if thinks and end is not None else ()
    if shape.kind == "regex":
        return Structured(regex=shape.text, trigger=trigger)
    return Structured(json=shape.text or {"type": "object"}, trigger=trigger)


def _logprobs(
    found: Completion | Chunk,
) -> list[tuple[float, tuple[tuple[int, float], ...]]] | None:
    """Return each token's log-probability with its alternatives."""
    if found.logprobs is None:
        return None
    top = found.top_logprobs or ((),) * len(found.logprobs)
    return list(zip(found.logprobs, top, strict=True))
