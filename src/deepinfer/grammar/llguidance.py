"""The adapter of llguidance, the default grammar library."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from deepinfer.errors import UnsupportedError
from deepinfer.grammar.backend import (
    DEAD_END,
    BackendError,
    Bits,
    Compiled,
    Position,
    Program,
    Vocabulary,
)
from deepinfer.grammar.lexemes import lark_of_lexemes
from deepinfer.grammar.nodes import inline, lark, rust_regex
from deepinfer.grammar.regex import parse_regex
from deepinfer.grammar.schema import PLACE, Loosened

__all__ = ["LLGuidance"]

# Without this, text with one continuation is limited to the tokens of one spelling of it.
_OPTIONS: Final = '%llguidance {"no_forcing": true}\n'
# Escapes of characters that JSON strings cannot hold as they are; \uXXXX would give every name and
# value a second spelling that patterns and enumerations do not know.
_ESCAPES: Final = '"\\bfnrt'
# What its messages say when it does not express something, and what is then left out.
_SIGNS: Final = {
    "min/maxProperties": "counts",
    "are not disjoint": "patterns",
    "format": "formats",
    "for 'multipleOf'": "multiples",
}
_BYTES_PER_SOURCE_BYTE: Final = 64
_LEAST_BYTES: Final = 1 << 16


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise UnsupportedError.missing_extra(
            "llguidance", "grammar", "structured output"
        ) from error
    return llguidance


class LLGuidance:
    """Compiles with llguidance for one vocabulary.

    threads  how many fill rows at a time
    """

    def __init__(self, vocabulary: Vocabulary, threads: int = 1) -> None:
        self._library = _library()
        library = self._library
        wrapped = library.TokenizerWrapper(_Pieces(vocabulary))
        self._tokenizer = library.LLTokenizer(wrapped)
        self._executor = library.LLExecutor(num_threads=threads)

    limits = Loosened(wide=True)
    wants_rules = False

    def loosen(self, error: BackendError, loosened: Loosened) -> Loosened | None:
        """Return what to leave out as well."""
        told = str(error)
        for sign, change in _SIGNS.items():
            if sign in told:
                return replace(loosened, **{change: True})
        return None

    def compile(self, program: Program) -> Compiled:
        """Compile a program."""
        source = _source(program)
        limits = self._library.LLParserLimits(
            max_lexer_states=program.max_states,
            max_grammar_size=max(program.max_states, 1000),
            verbose_errors=False,
        )
        matcher = self._library.LLMatcher(
            self._tokenizer,
            self._library.LLMatcher.grammar_from_lark(source),
            log_level=0,
            limits=limits,
        )
        if matcher.is_error():
            raise BackendError(_first_line(matcher.get_error()))
        return _Compiled(matcher, max(_LEAST_BYTES, len(source) * _BYTES_PER_SOURCE_BYTE))

    def fill(self, work: Sequence[tuple[Position, int]], bits: Bits) -> None:
        """Fill rows."""
        if not work:
            return
        row_bytes = bits.shape[1] * bits.itemsize
        jobs = [(_matcher(position), row) for position, row in work]
        try:
            if len(jobs) == 1:
                matcher, row = jobs[0]
                matcher.unsafe_compute_mask_ptr(bits[row].ctypes.data, row_bytes)
            else:
                self._executor.unsafe_compute_mask_ptr(jobs, bits.ctypes.data, row_bytes, len(bits))
        except ValueError as error:
            raise BackendError(_first_line(str(error))) from None
        for matcher, _ in jobs:
            if matcher.is_error():
                raise BackendError(_first_line(matcher.get_error()))


class _Pieces:
    """The vocabulary as llguidance wants it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.end_token_id
        self.bos_token_id = None
        self.tokens = vocabulary.pieces
        self.special_token_ids = [i for i, piece in enumerate(vocabulary.pieces) if not piece]
        self._by_piece = {piece: i for i, piece in enumerate(vocabulary.pieces) if piece}

    def __call__(self, data: bytes) -> list[int]:
        """Return some ids for bytes. Asked only where text is forced, which is off."""
        return [i for b in data if (i := self._by_piece.get(bytes([b]))) is not None]


class _Compiled:
    def __init__(self, matcher: Any, num_bytes: int) -> None:
        self._matcher = matcher
        self.num_bytes = num_bytes

    def start(self) -> Position:
        """Return a position at the beginning."""
        return _Position(self._matcher.deep_copy())


class _Position:
    """A matcher of the library."""

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher

    def accept(self, token_id: int) -> bool:
        """Move over an id."""
        taken: int = self.matcher.try_consume_tokens([token_id])
        if not taken and self.matcher.is_error():
            raise BackendError(_first_line(self.matcher.get_error()))
        return taken == 1

    def rollback(self, count: int) -> None:
        """Move back."""
        if count and not self.matcher.rollback(count):
            raise BackendError(_first_line(self.matcher.get_error()))

    def is_complete(self) -> bool:
        """Whether the output may end."""
        return bool(self.matcher.is_accepting())

    def is_stopped(self) -> bool:
        """Whether the output must end."""
        return bool(self.matcher.is_stopped())


def _matcher(position: Position) -> Any:
    assert isinstance(position, _Position), position
    return position.matcher


def _first_line(text: str) -> str:
    """Return what an error says, without the place in the text that we generated."""
    if "NoExtensionBias" in text:
        return DEAD_END
    if "too many states" in text:
        return "the library needs more states than grammar.max_states: simplify it, or raise that"
    line = next((line.strip() for line in text.splitlines() if line.strip()), "unknown error")
    return re.sub(r"^(at \d+\(\d+\): )?(failed to compile JSON schema: )?", "", line)


def _source(program: Program) -> str:
    """Spell a program in the library's language."""
    if program.rules is not None:
        whole = inline(program.rules, "root", program.max_states)
        if whole is not None:
            return f"{_OPTIONS}start: /{rust_regex(whole)}/\n"
        return _OPTIONS + (lark_of_lexemes(program.rules, "root") or lark(program.rules, "root"))
    count = program.max_whitespace
    options = {
        "whitespace_flexible": count > 0,
        "whitespace_pattern": rf"\x20|\x0A[\x20\x09]{{0,{count - 1}}}" if count else None,
        "item_separator": ",",
        "key_separator": ":",
        "coerce_one_of": False,
        "json_allowed_escapes": _ESCAPES,
    }
    given = {key: value for key, value in options.items() if value is not None}
    schema = _spelled(program.schema)
    if not isinstance(schema, dict):
        schema = {"anyOf": [schema]}
    return f"{_OPTIONS}start: %json {json.dumps({**schema, 'x-guidance': given})}\n"


def _spelled(schema: Any) -> Any:
    """Return a schema with its patterns in the library's syntax."""
    if isinstance(schema, list):
        return [_spelled(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword == PLACE:
            continue
        if keyword == "pattern":
            out[keyword] = _anchored(value)
        elif keyword == "patternProperties":
            out[keyword] = {_anchored(pattern): _spelled(sub) for pattern, sub in value.items()}
        elif keyword in ("properties", "$defs"):
            out[keyword] = {name: _spelled(sub) for name, sub in value.items()}
        elif keyword in ("enum", "const", "required"):
            out[keyword] = value
        else:
            out[keyword] = _spelled(value)
    return out


def _anchored(pattern: str) -> str:
    return f"^(?:{rust_regex(parse_regex(pattern, whole=False, ecma=True))})$"
