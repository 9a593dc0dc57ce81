"""The adapter of xgrammar, the second grammar library. It is given grammars only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from deepinfer.errors import UnsupportedError
from deepinfer.grammar.backend import (
    BackendError,
    Bits,
    Compiled,
    Position,
    Program,
    Vocabulary,
    bit_words,
)
from deepinfer.grammar.nodes import gbnf
from deepinfer.grammar.schema import Loosened

__all__ = ["XGrammar"]


def _library() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise UnsupportedError.missing_extra(
            "xgrammar", "xgrammar", "grammar.backend xgrammar"
        ) from error
    return xgrammar


class XGrammar:
    """Compiles with xgrammar for one vocabulary.

    threads  how many compile a grammar, and fill rows, at a time
    """

    def __init__(self, vocabulary: Vocabulary, threads: int = 1) -> None:
        library = self._library = _library()
        size = len(vocabulary.pieces)
        info = library.TokenizerInfo(
            list(vocabulary.pieces),
            library.VocabType.RAW,
            vocab_size=size,
            stop_token_ids=[vocabulary.end_token_id],
        )
        self._compiler = library.GrammarCompiler(info, max_threads=threads, cache_enabled=False)
        self._batch = library.BatchGrammarMatcher(max_threads=threads)
        self._words = bit_words(size)
        self._text = vocabulary.text_bits

    limits = Loosened(counts=True, patterns=True, formats=True, multiples=True)
    wants_rules = True

    def loosen(self, error: BackendError, loosened: Loosened) -> Loosened | None:
        """Return None: what the rules do not express is known beforehand."""
        return None

    def compile(self, program: Program) -> Compiled:
        """Compile a program, which must have rules."""
        assert program.rules is not None, "a schema must be turned into rules first"
        try:
            grammar = self._library.Grammar.from_ebnf(gbnf(program.rules, "root"))
            compiled = self._compiler.compile_grammar(grammar)
        except RuntimeError as error:
            raise BackendError(str(error).splitlines()[0]) from None
        return _Compiled(self._library, compiled, self._words, self._text)

    def fill(self, work: Sequence[tuple[Position, int]], bits: Bits) -> None:
        """Fill rows."""
        if not work:
            return
        matchers = [_matcher(position) for position, _ in work]
        rows = [row for _, row in work]
        signed = bits.view(np.int32)
        try:
            if len(matchers) == 1:
                matchers[0].fill_next_token_bitmask(signed, rows[0])
            else:
                self._batch.batch_fill_next_token_bitmask(matchers, signed, rows)
        except RuntimeError as error:
            raise BackendError(str(error).splitlines()[0]) from None


class _Compiled:
    def __init__(self, library: Any, compiled: Any, words: int, text: Bits) -> None:
        self._library = library
        self._compiled = compiled
        self._words = words
        self._text = text
        self.num_bytes = int(compiled.memory_size_bytes)

    def start(self) -> Position:
        """Return a position at the beginning."""
        return _Position(self._library.GrammarMatcher(self._compiled), self._words, self._text)


class _Position:
    def __init__(self, matcher: Any, words: int, text: Bits) -> None:
        self.matcher = matcher
        self._words = words
        self._text = text

    def accept(self, token_id: int) -> bool:
        """Move over an id."""
        return bool(self.matcher.accept_token(token_id))

    def rollback(self, count: int) -> None:
        """Move back."""
        if count:
            self.matcher.rollback(count)

    def is_complete(self) -> bool:
        """Whether the output may end."""
        return bool(self.matcher.is_completed())

    def is_stopped(self) -> bool:
        """Whether the output must end. The library does not say; its next row does."""
        if not self.is_complete():
            return False
        row = np.zeros((1, self._words), np.uint32)
        self.matcher.fill_next_token_bitmask(row.view(np.int32), 0)
        return not (row[0] & self._text).any()


def _matcher(position: Position) -> Any:
    assert isinstance(position, _Position), position
    return position.matcher
