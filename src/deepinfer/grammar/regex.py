"""Regular expressions in Python's syntax, reduced to nodes (pure).

Python's own parser reads the pattern, so that it means what `re` says it means. What describes no
regular language is refused: references to groups, look-around, word boundaries, atomic groups.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import groupby
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any, Final

from deepinfer.grammar.nodes import (
    ALL,
    ANYTHING,
    EMPTY,
    NOTHING,
    Chars,
    Node,
    Ranges,
    Repeat,
    alt,
    complement,
    merge,
    seq,
)

__all__ = ["PatternError", "parse_regex"]

_NEWLINE: Final[Ranges] = ((10, 10),)
_BYTE_ORDER_MARK: Final = (0xFEFF, 0xFEFF)
_SURROGATES: Final = (0xD800, 0xDFFF)
# Categories by their opcode: the class to look up, and whether its complement is meant.
_CATEGORIES: Final = {
    ops.CATEGORY_DIGIT: (r"\d", False),
    ops.CATEGORY_NOT_DIGIT: (r"\d", True),
    ops.CATEGORY_SPACE: (r"\s", False),
    ops.CATEGORY_NOT_SPACE: (r"\s", True),
    ops.CATEGORY_WORD: (r"\w", False),
    ops.CATEGORY_NOT_WORD: (r"\w", True),
}
_REFUSED: Final = {
    ops.ASSERT: "look-around, (?=...) or (?<=...)",
    ops.ASSERT_NOT: "look-around, (?!...) or (?<!...)",
    ops.GROUPREF: "a reference to a group, \\1 or (?P=name)",
    ops.GROUPREF_IGNORE: "a reference to a group",
    ops.GROUPREF_EXISTS: "a condition on a group, (?(1)...)",
    ops.ATOMIC_GROUP: "an atomic group, (?>...)",
    ops.POSSESSIVE_REPEAT: "a possessive repetition, as in a*+",
}
# Letters outside ASCII that fold to an ASCII letter.
_FOLDED: Final = {"k": "\u212a", "s": "\u017f", "i": "\u0130\u0131"}
_MAX_DEPTH: Final = 200


class PatternError(Exception):
    """A pattern that cannot be used; the text says why and, where known, at which character."""


class _Start:
    """The beginning of the text."""


class _End:
    """The end of the text."""


_START, _END = _Start(), _End()
# While anchors are being moved outwards, they stand among the nodes.
_Part = Any


def parse_regex(pattern: str, *, whole: bool = True, ecma: bool = False) -> Node:
    r"""Return the texts that a pattern matches: as a whole, or anywhere in them.

    ecma  read classes narrowly enough for both Python and ECMA 262: \d and \w of a positive class
          are ASCII, and their complements leave out all of Unicode's
    Raises PatternError.
    """
    try:
        parsed = _parser.parse(pattern)
    except re.error as error:
        place = "" if error.pos is None else f" at character {error.pos}"
        raise PatternError(f"{error.msg}{place}") from None
    except OverflowError as error:
        raise PatternError(f"too large: {error}") from None
    except RecursionError:
        raise PatternError("nested too deeply") from None
    try:
        node = _Reader(ecma).sequence(parsed, parsed.state.flags, 0)
        parts = [
            (at_start, at_end, part)
            for at_start, left in _peel(node, _Start)
            for at_end, part in _peel(left, _End)
        ]
    except RecursionError:
        raise PatternError("nested too deeply") from None
    results: list[Node] = []
    for at_start, at_end, part in parts:
        if _has(part, _Start) or _has(part, _End):
            raise PatternError("an anchor inside the pattern (^ or $ with characters beyond it)")
        before = EMPTY if whole or at_start else ANYTHING
        after = EMPTY if whole or at_end else ANYTHING
        results.append(seq(before, part, after))
    return alt(*results)


class _Reader:
    """Turns the parser's opcodes into nodes and anchors."""

    def __init__(self, ecma: bool) -> None:
        self._ecma = ecma

    def sequence(self, items: Iterable[tuple[Any, Any]], flags: int, depth: int) -> _Part:
        if depth > _MAX_DEPTH:
            raise PatternError("nested too deeply")
        return _join([self._one(op, value, flags, depth) for op, value in items])

    def _one(self, op: Any, value: Any, flags: int, depth: int) -> _Part:
        if op is ops.LITERAL:
            return Chars(self._literal(value, flags))
        if op is ops.NOT_LITERAL:
            return Chars(complement(self._literal(value, flags)))
        if op is ops.ANY:
            return Chars(ALL if flags & re.DOTALL else complement(_NEWLINE))
        if op is ops.IN:
            return Chars(self._set(value, flags))
        if op is ops.BRANCH:
            return _either([self.sequence(item, flags, depth + 1) for item in value[1]])
        if op is ops.SUBPATTERN:
            _, added, removed, body = value
            return self.sequence(body, (flags | added) & ~removed, depth + 1)
        if op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            low, high, body = value
            item = self.sequence(body, flags, depth + 1)
            most = None if high is ops.MAXREPEAT else int(high)
            if most == 0:
                return EMPTY
            if _has(item, _Start) or _has(item, _End):
                if (low, most) == (0, 1):
                    return _either([EMPTY, item])
                if (low, most) != (1, 1):
                    raise PatternError("an anchor inside a repetition")
                return item
            return Repeat(item, int(low), most)
        if op is ops.AT:
            return _anchor(value, flags)
        if op is ops.FAILURE:
            return NOTHING
        raise PatternError(f"{_REFUSED.get(op, str(op).lower())} describes no regular language")

    def _literal(self, code: int, flags: int) -> Ranges:
        if not flags & re.IGNORECASE:
            return merge([(code, code)])
        char = chr(code)
        if not char.isascii():
            return _scan(re.escape(char), flags & (re.IGNORECASE | re.ASCII))
        candidates = {char, char.lower(), char.upper(), *_FOLDED.get(char.lower(), "")}
        same = re.compile(re.escape(char), flags & (re.IGNORECASE | re.ASCII))
        return merge((ord(c), ord(c)) for c in candidates if same.fullmatch(c))

    def _set(self, items: list[tuple[Any, Any]], flags: int) -> Ranges:
        negated = bool(items) and items[0][0] is ops.NEGATE
        items = items[1:] if negated else items
        if flags & re.IGNORECASE:
            text = "".join(map(_spell, items))
            found = _scan(f"[{text}]", flags & (re.IGNORECASE | re.ASCII))
            if self._ecma and not negated and any(op is ops.CATEGORY for op, _ in items):
                raise PatternError("a class such as \\w under (?i)")
            return complement(found) if negated else found
        found_ranges: list[tuple[int, int]] = []
        for op, value in items:
            if op is ops.LITERAL:
                found_ranges.append((value, value))
            elif op is ops.RANGE:
                found_ranges.append(value)
            else:
                found_ranges += self._category(value, flags, negated)
        ranges = merge(found_ranges)
        return complement(ranges) if negated else ranges

    def _category(self, value: Any, flags: int, negated: bool) -> Ranges:
        name, inverse = _CATEGORIES[value]
        ascii_only = bool(flags & re.ASCII)
        if self._ecma and not ascii_only:
            # What is left out must be left out under both readings, whatever the nesting.
            ascii_only = not (negated ^ inverse)
        ranges = _scan(name, re.ASCII if ascii_only else 0)
        if self._ecma and not ascii_only and name == r"\s":
            ranges = merge((*ranges, _BYTE_ORDER_MARK))  # white space in ECMA 262 only
        return complement(ranges) if inverse else ranges


def _anchor(value: Any, flags: int) -> _Part:
    lines = bool(flags & re.MULTILINE)
    if value is ops.AT_BEGINNING_STRING or (value is ops.AT_BEGINNING and not lines):
        return _START
    if value is ops.AT_END_STRING or (value is ops.AT_END and not lines):
        return _END
    if value in (ops.AT_BEGINNING, ops.AT_END):
        raise PatternError("^ and $ of lines, under (?m)")
    raise PatternError("a word boundary, \\b or \\B, describes no regular language here")


def _spell(item: tuple[Any, Any]) -> str:
    """Spell one member of a set again."""
    op, value = item
    if op is ops.LITERAL:
        return _code(value)
    if op is ops.RANGE:
        return f"{_code(value[0])}-{_code(value[1])}"
    name, inverse = _CATEGORIES[value]
    return name.upper() if inverse else name


def _code(value: int) -> str:
    return f"\\U{value:08x}"


@lru_cache(maxsize=256)
def _scan(pattern: str, flags: int) -> Ranges:
    """Return the characters that a pattern of one character matches, by asking for each."""
    found = map(ord, re.compile(pattern, flags).findall(_every_character()))
    spans = []
    for _, run in groupby(enumerate(found), lambda pair: pair[1] - pair[0]):
        codes = [code for _, code in run]
        spans.append((codes[0], codes[-1]))
    return merge(spans)


@lru_cache(maxsize=1)
def _every_character() -> str:
    low, high = _SURROGATES
    return "".join(chr(code) for code in range(0x110000) if not low <= code <= high)


def _join(parts: list[_Part]) -> _Part:
    if any(isinstance(part, _Start | _End | tuple) for part in parts):
        return ("seq", parts)
    return seq(*parts)


def _either(parts: list[_Part]) -> _Part:
    if any(isinstance(part, _Start | _End | tuple) for part in parts):
        return ("alt", parts)
    return alt(*parts)


def _has(part: _Part, kind: type) -> bool:
    if isinstance(part, tuple):
        return any(_has(item, kind) for item in part[1])
    return isinstance(part, kind)


def _peel(part: _Part, kind: type) -> list[tuple[bool, _Part]]:
    """Split a pattern into alternatives whose outermost anchor of one kind has been taken off.

    The bool tells whether the anchor was there.
    """
    if not _has(part, kind):
        return [(False, part)]
    if isinstance(part, kind):
        return [(True, EMPTY)]
    name, items = part
    if name == "alt":
        return [found for item in items for found in _peel(item, kind)]
    outer, rest = (items[0], items[1:]) if kind is _Start else (items[-1], items[:-1])
    results: list[tuple[bool, _Part]] = []
    for anchored, inner in _peel(outer, kind):
        if inner == EMPTY:
            results += [(anchored or a, p) for a, p in _peel(_join(rest), kind)]
        else:
            results.append((anchored, _join([inner, *rest] if kind is _Start else [*rest, inner])))
    return results
