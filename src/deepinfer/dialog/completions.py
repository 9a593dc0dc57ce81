"""Plain completions, /v1/completions: bodies to engine requests and back, without conversations."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from deepinfer.chat.encode import refuse_long
from deepinfer.chat.protocol import ProtocolEvent
from deepinfer.chat.tokenizer import Tokenizer
from deepinfer.dialog.samples import raise_failure, sample_params
from deepinfer.engine.request import Chunk, Completion, SamplingParams
from deepinfer.errors import (
    ProtocolError,
    RequestError,
    TokenizerError,
    json_kind,
    json_problem,
)
from deepinfer.grammar.spec import Structured

__all__ = ["CompletionsRequest"]

_MAX_SAMPLES: Final = 128
_SAMPLING: Final = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "logprobs")
_UNSERVED: Final = ("suffix", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, slots=True)
class CompletionsRequest:
    """A converted body: for each prompt, one request per sample."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    streams: bool
    reply_id: str
    model: str
    echoes: bool
    num_samples: int
    tells_usage: bool
    tokenizer: Tokenizer

    @classmethod
    def of(
        cls,
        body: bytes | str | Mapping[str, Any],
        tokenizer: Tokenizer,
        max_model_len: int,
        default_model: str,
        unique: str,
    ) -> CompletionsRequest:
        """Convert a body. Raises ProtocolError."""
        found = _read(body)
        prompts = _prompts(found.get("prompt"), tokenizer, max_model_len)
        n = found.get("n") or 1
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= _MAX_SAMPLES:
            raise ProtocolError(f"n must be an integer from 1 to {_MAX_SAMPLES}, not {n!r}")
        if found.get("best_of") not in (None, n):
            raise ProtocolError("best_of cannot be served: leave it out, or give what n is")
        unserved = [name for name in _UNSERVED if found.get(name)]
        if unserved:
            raise ProtocolError(f"{', '.join(unserved)} cannot be served: leave out")
        for name in ("stream", "echo"):
            if not isinstance(found.get(name), bool | None):
                raise ProtocolError(f"{name} must be true or false, not {found[name]!r}")
        told = found.get("stream_options")
        if not isinstance(told, Mapping | None):
            raise ProtocolError("stream_options must be an object")
        params = _params(found)
        longest = max(map(len, prompts))
        if longest + params.max_tokens > max_model_len:
            raise ProtocolError(
                f"a prompt of {longest} tokens and max_tokens {params.max_tokens} exceed what the "
                f"context holds, {max_model_len}"
            )
        model = found.get("model") or default_model
        if not isinstance(model, str):
            raise ProtocolError("model must be a text")
        return cls(
            prompts=[ids for ids in prompts for _ in range(n)],
            params=[sample_params(params, i) for _ in prompts for i in range(n)],
            streams=found.get("stream") is True,
            reply_id=f"cmpl-{unique}",
            model=model,
            echoes=found.get("echo") is True,
            num_samples=n,
            tells_usage=told is not None and told.get("include_usage") is True,
            tokenizer=tokenizer,
        )

    def respond(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the whole response."""
        for completion in completions:
            raise_failure(completion)
        choices = [self._choice(i, completion) for i, completion in enumerate(completions)]
        return self._body(choices) | {"usage": self._usage(completions)}

    def stream(self, chunks: Iterator[Chunk]) -> Generator[ProtocolEvent]:
        """Yield events as the engine brings tokens."""
        done: list[Completion] = []
        begun: set[int] = set()
        ends = [self._start(i) for i in range(len(self.prompts))]  # of the tokens' texts so far
        try:
            for chunk in chunks:
                last = chunk.completion
                if last is not None:
                    raise_failure(last)
                    done.append(last)
                text = chunk.text
                if self.echoes and chunk.index not in begun:
                    text = self._text_of_prompt(chunk.index) + text
                begun.add(chunk.index)
                if not text and last is None and chunk.logprobs is None:
                    continue
                logprobs, ends[chunk.index] = self._logprobs(chunk, ends[chunk.index])
                choice: dict[str, Any] = {
                    "index": chunk.index,
                    "text": text,
                    "logprobs": logprobs,
                    "finish_reason": None if last is None else str(last.finish_reason),
                }
                bodies = [self._body([choice])]
                is_over = len(done) == len(self.prompts)
                if self.tells_usage:
                    bodies[0]["usage"] = None
                    bodies += [self._body([])] if is_over else []
                if is_over:
                    bodies[-1]["usage"] = self._usage(done)
                for body in bodies:
                    yield ProtocolEvent(None, json.dumps(body, ensure_ascii=False))
                if is_over:
                    break
        finally:
            if isinstance(chunks, Generator):
                chunks.close()
        yield ProtocolEvent(None, "[DONE]")

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.reply_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.model,
            "choices": choices,
        }

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        echo = self._text_of_prompt(index) if self.echoes else ""
        return {
            "index": index,
            "text": echo + (completion.text or ""),
            "logprobs": self._logprobs(completion, len(echo))[0],
            "finish_reason": str(completion.finish_reason),
        }

    def _start(self, index: int) -> int:
        return len(self._text_of_prompt(index)) if self.echoes else 0

    def _text_of_prompt(self, index: int) -> str:
        return self.tokenizer.decode(self.prompts[index])

    def _usage(self, completions: Sequence[Completion]) -> dict[str, int]:
        prompt = sum(len(ids) for ids in self.prompts[:: self.num_samples])
        generated = sum(len(completion.token_ids) for completion in completions)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
        }

    def _logprobs(self, found: Completion | Chunk, start: int) -> tuple[dict[str, Any] | None, int]:
        """Return log-probabilities in the form of this protocol, parallel lists, and the end of the
        tokens' texts, which begin at `start`.
        """
        if found.logprobs is None:
            return None, start
        spell = self._spell
        texts = [spell(token_id) for token_id in found.token_ids]
        *offsets, end = accumulate(map(len, texts), initial=start)
        top = found.top_logprobs
        told: dict[str, Any] = {
            "tokens": texts,
            "token_logprobs": list(found.logprobs),
            "top_logprobs": None,
            "text_offset": offsets,
        }
        if top is not None:  # with the token itself, which may stand behind the likeliest
            drawn = zip(top, texts, found.logprobs, strict=True)
            told["top_logprobs"] = [{spell(i): p for i, p in t} | {s: q} for t, s, q in drawn]
        return told, end

    def _spell(self, token_id: int) -> str:
        return self.tokenizer.piece(token_id).decode("utf-8", "backslashreplace")


def _read(body: bytes | str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(body, Mapping):
        return dict(body)
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the body is no JSON: {json_problem(error)}") from None
    if not isinstance(found, dict):
        raise ProtocolError(f"the body must be a JSON object, not {json_kind(found)}")
    return found


def _prompts(given: object, tokenizer: Tokenizer, max_model_len: int) -> list[list[int]]:
    """Return the ids of one or several prompts, texts or ids."""
    entries: list[object] = given if isinstance(given, list) else [given]
    if isinstance(given, list) and given and all(type(i) is int for i in given):
        entries = [given]
    found = []
    for entry in entries:
        if isinstance(entry, str) and entry:
            try:
                refuse_long(entry, tokenizer, max_model_len)
                found.append(tokenizer.encode(entry))
            except (RequestError, TokenizerError) as error:
                raise ProtocolError(str(error)) from None
        elif isinstance(entry, list) and entry and all(type(i) is int for i in entry):
            found.append(entry)
        else:
            raise ProtocolError("prompt must be a text, a list of token ids, or a list of these")
    if not found:
        raise ProtocolError("prompt must hold at least one prompt")
    return found


def _params(body: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters of a body; a response format or `structured` is enforced."""
    values = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
    bias = body.get("logit_bias") or {}
    try:
        values["logit_bias"] = {int(i): float(v) for i, v in bias.items()}
    except (AttributeError, TypeError, ValueError):
        raise ProtocolError("logit_bias must map token ids to numbers") from None
    try:
        shape = _shape(body.get("response_format"))
        return SamplingParams(**values, structured=shape)
    except RequestError as error:
        raise ProtocolError("; ".join([error.message, *error.problems])) from None


def _shape(form: object) -> Structured | None:
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, Mapping) else None
    if isinstance(form, Mapping) and kind == "json_schema":
        inner = form.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if schema is not None:
            return Structured(json=schema)
    if isinstance(form, Mapping) and kind == "regex" and isinstance(form.get("regex"), str):
        return Structured(regex=form["regex"])
    if kind == "json_object":
        return Structured(json={"type": "object"})
    if kind == "text":
        return None
    raise RequestError("response_format must be text, json_object, json_schema or regex")
