"""Shapes: structured outputs of one engine, joined with its tokenizer.

Owns the bridge from a tokenizer to the bytes that grammars are about, and turns the texts of
triggers into ids. Compiling and matching are `grammar`'s. Pure.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from deepinfer.chat.render import DSML
from deepinfer.chat.tokenizer import Tokenizer
from deepinfer.config.engine import GrammarConfig
from deepinfer.engine.commit import TokenMatcher
from deepinfer.engine.request import SamplingParams
from deepinfer.errors import RequestError
from deepinfer.grammar.backend import Vocabulary
from deepinfer.grammar.compiler import Gate, GrammarService
from deepinfer.grammar.matcher import Matcher, fill_rows
from deepinfer.grammar.report import Report
from deepinfer.grammar.spec import Structured

__all__ = ["Shapes", "fill_matchers", "make_vocabulary"]


def make_vocabulary(
    tokenizer: Tokenizer, vocab_size: int, end_token_id: int, banned: Container[int] = ()
) -> Vocabulary:
    """Return the bytes of every id. Special and added tokens are no text to a grammar, but for the
    markup of tool calls, which a grammar of calls spells out; nor are ids that are never drawn.

    Raises RequestError for a tokenizer of whole words.
    """
    if tokenizer.separator:
        raise RequestError(
            "structured output needs a tokenizer of bytes; this checkpoint's writes whole words"
        )
    markup = tokenizer.token_id(DSML)
    pieces = tuple(
        b"" if i in banned or (tokenizer.is_added(i) and i != markup) else tokenizer.piece(i)
        for i in range(vocab_size)
    )
    return Vocabulary(pieces, end_token_id)


def fill_matchers(work: Sequence[tuple[TokenMatcher, int]], bits: NDArray[np.uint32]) -> None:
    """Write what each matcher allows into the row that it names, all at once."""
    fill_rows([(m, row) for m, row in work if isinstance(m, Matcher)], bits)


class Shapes:
    """What an engine needs to serve structured outputs."""

    def __init__(
        self,
        config: GrammarConfig,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        end_token_id: int,
        banned: Container[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_id = end_token_id
        self._banned = banned
        self._service = GrammarService(config, self._vocabulary)

    def resolve(self, params: SamplingParams) -> Structured | None:
        """Return a request's shape with its trigger as ids, None when output is free.

        Raises RequestError when this checkpoint cannot serve it.
        """
        shape = params.shape
        if shape is None:
            return None
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise RequestError("structured output needs the checkpoint's tokenizer.json")
        trigger, bound = shape.trigger, shape.bound
        if isinstance(trigger, str):
            trigger = self._ids(tokenizer, trigger)
        if isinstance(bound, str):
            found = self._ids(tokenizer, bound)
            if len(found) != 1:
                raise RequestError(
                    f"structured bound must be one token, {bound!r} is {len(found)} of them"
                )
            bound = found[0]
        shape = replace(shape, trigger=trigger, bound=bound)
        last = self._vocab_size - 1
        for name, ids in (("trigger", shape.trigger_ids), ("bound", (shape.bound_id,))):
            bad = [i for i in ids if i is not None and i > last]
            if bad:
                raise RequestError(
                    f"structured {name} holds {bad[0]}, outside the vocabulary 0..{last}"
                )
        never = [i for i in shape.trigger_ids if i in self._banned]
        if never:
            raise RequestError(
                f"structured trigger holds {never[0]}, which sampling.banned_token_ids rules out"
            )
        return shape

    def gate(self, shape: Structured, params: SamplingParams) -> Gate:
        """Begin to compile a resolved shape; return what its request waits for."""
        return self._service.gate(shape, (self._end_token_id, *params.stop_ids))

    def report(self, shape: Structured) -> Report:
        """Say what will be enforced of a shape; raises RequestError when it cannot be used."""
        return self._service.report(shape)

    def close(self) -> None:
        """Let threads and grammars go."""
        self._service.close()

    def _ids(self, tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
        ids = tokenizer.encode(text)
        return tuple(ids[1:] if tokenizer.adds_bos and len(ids) > 1 else ids)

    def _vocabulary(self) -> Vocabulary:
        assert self._tokenizer is not None
        return make_vocabulary(self._tokenizer, self._vocab_size, self._end_token_id, self._banned)
