"""Vocabularies, walks and services for the tests of structured output."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import cache

import numpy as np

from deepinfer.config.engine import GrammarConfig
from deepinfer.grammar.backend import Vocabulary, bit_words
from deepinfer.grammar.compiler import GrammarService
from deepinfer.grammar.matcher import Matcher
from deepinfer.grammar.spec import Structured

END = 256
BACKENDS = ("llguidance", "xgrammar")
WORDS = (
    *("hello", "he", "hell", "abc", "ab", "12", "123", "{", "}", '"', "é", "😀", '{"'),
    *(
        '": ',
        "true",
        "false",
        "null",
        "\n  ",
        ", ",
        ",",
        "[",
        "]",
        '":',
        '",',
        "-",
        "0.5",
        "1e3",
        "\\n",
        "\\",
    ),
)
PIECES = (*(bytes([i]) for i in range(256)), b"", *(word.encode() for word in WORDS), b"")

CLOSING = tuple(i for i, piece in enumerate(PIECES) if piece[:1] in (b'"', b"]", b"}"))


@cache
def vocabulary() -> Vocabulary:
    """Return all bytes, an end, some words, half a character, and an id without text."""
    return Vocabulary((*PIECES[:-1], b"\xc3", b"\xf0\x9f", b""), END)


_SERVICES: dict[tuple[str, int], GrammarService] = {}


def service(backend: str, max_whitespace: int = 2) -> GrammarService:
    """Return a service that all tests share."""
    key = (backend, max_whitespace)
    if key not in _SERVICES:
        config = GrammarConfig(backend=backend, threads=1, max_whitespace=max_whitespace)
        _SERVICES[key] = GrammarService(config, vocabulary)
    return _SERVICES[key]


def matcher(backend: str, shape: Structured, ends: Sequence[int] = (END,)) -> Matcher:
    """Return a matcher at the beginning; raises AssertionError with the error of a bad shape."""
    gate = service(backend).gate(shape, ends)
    until = time.monotonic() + 30
    while (found := gate.poll()) is None:
        assert time.monotonic() < until, "not compiled"
        time.sleep(0.0005)
    assert isinstance(found, Matcher), found
    return found


def error_of(backend: str, shape: Structured) -> str:
    """Return the error that a shape's request gets."""
    gate = service(backend).gate(shape, (END,))
    while (found := gate.poll()) is None:
        time.sleep(0.0005)
    assert isinstance(found, str), "the shape is usable"
    return found


def legal(at: Matcher) -> list[int]:
    """Return the ids that are legal next."""
    row = np.zeros(bit_words(len(vocabulary().pieces)), np.uint32)
    at.fill(row)
    flags = np.unpackbits(row.view(np.uint8), bitorder="little")
    return np.flatnonzero(flags).tolist()  # type: ignore[no-any-return]


def walk(at: Matcher, rng: random.Random, most: int = 300, keen: float = 0.0) -> str | None:
    """Take random legal ids until the output ends; return its text, None when it grew too long.

    keen  how often an end is taken where it is legal, or an id that closes something
    """
    ids: list[int] = []
    for _ in range(most):
        options = legal(at)
        assert at.problem is None, (at.problem, ids)
        if END in options and (len(options) == 1 or rng.random() < max(keen, 0.2)):
            told = at.check()
            assert told is None, (told, text_of(ids))
            return text_of(ids)
        options = [i for i in options if i != END]
        closing = [i for i in CLOSING if i in options] if rng.random() < keen else []
        chosen = rng.choice(closing or options)
        assert at.accept(chosen), (chosen, ids)
        ids.append(chosen)
        if at.is_finished():
            told = at.check()
            assert told is None, (told, text_of(ids))
            return text_of(ids)
    return None


def text_of(ids: Sequence[int]) -> str:
    """Return the text of ids."""
    return vocabulary().text(ids).decode()
