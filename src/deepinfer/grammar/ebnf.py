"""Grammars in the GBNF dialect, reduced to rules of nodes (pure).

The dialect is described in `docs/structured.md`. Left recursion and rules that can never be
complete are refused here, with line and column, so that both libraries behave alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from deepinfer.grammar.nodes import (
    ALL,
    EMPTY,
    NOTHING,
    Alt,
    Chars,
    Node,
    Ref,
    Repeat,
    Rules,
    Seq,
    alt,
    complement,
    is_nullable,
    literal,
    merge,
    references,
    seq,
)

__all__ = ["ROOT", "GrammarError", "completes", "parse_ebnf", "prune"]

ROOT: Final = "root"
_MAX_DEPTH: Final = 100
_MAX_COUNT: Final = 2**31 - 1
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_TOKEN: Final = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#[^\n]*)
    |(?P<define>::=)
    |(?P<name>[A-Za-z_][A-Za-z0-9_-]*)
    |(?P<text>"(?:[^"\\\n]|\\.)*")
    |(?P<set>\[(?:[^\]\\\n]|\\.)*\])
    |(?P<count>\{\s*\d+\s*(?:,\s*\d*\s*)?\})
    |(?P<sign>[()|*+?.])""",
    re.VERBOSE,
)
_ESCAPES: Final = {"n": 10, "r": 13, "t": 9}
_HEX: Final = {"x": 2, "u": 4, "U": 8}


class GrammarError(Exception):
    """A grammar that cannot be used; the text says why and where."""


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    place: int


def parse_ebnf(text: str) -> dict[str, Node]:
    """Return the rules of a grammar by name; the start rule is `root`.

    Raises GrammarError with the line and column of what is wrong.
    """
    parser = _Parser(text)
    try:
        rules, places = parser.rules()
    except RecursionError:
        raise GrammarError("the grammar is nested too deeply") from None
    if ROOT not in rules:
        raise GrammarError(f"the grammar has no rule '{ROOT}': add {ROOT} ::= ...")
    for name, place in parser.mentions.items():
        if name not in rules:
            raise GrammarError(f"{parser.at(place)}: the rule '{name}' is not defined")
    _refuse_left_recursion(rules, places, parser)
    hopeless = _never_complete(rules)
    for name in rules:
        if name in hopeless:
            raise GrammarError(
                f"{parser.at(places[name])}: the rule '{name}' can never be complete: give it an "
                "alternative that ends"
            )
    return rules


class _Parser:
    """Reads one grammar by recursive descent."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(self._scan())
        self._next = 0
        self.mentions: dict[str, int] = {}

    def at(self, place: int) -> str:
        """Spell a place in the text."""
        line = self._text.count("\n", 0, place) + 1
        column = place - (self._text.rfind("\n", 0, place) + 1) + 1
        return f"line {line} column {column}"

    def rules(self) -> tuple[dict[str, Node], dict[str, int]]:
        """Read all rules; return them and where each is defined."""
        rules: dict[str, Node] = {}
        places: dict[str, int] = {}
        while self._peek().kind != "end":
            name = self._take()
            if name.kind != "name" or self._peek().kind != "define":
                self._fail(name, "a rule, name ::= ...")
            if name.text in rules:
                raise GrammarError(f"{self.at(name.place)}: the rule '{name.text}' comes twice")
            self._take()
            rules[name.text] = self._choice(0)
            places[name.text] = name.place
        return rules, places

    def _scan(self) -> Iterator[_Token]:
        place = 0
        while place < len(self._text):
            found = _TOKEN.match(self._text, place)
            if found is None:
                raise GrammarError(
                    f"{self.at(place)}: cannot read {self._text[place : place + 12]!r}"
                )
            kind = str(found.lastgroup)
            if kind != "space":
                yield _Token(kind, found.group(), place)
            place = found.end()
        yield _Token("end", "", place)

    def _peek(self, ahead: int = 0) -> _Token:
        return self._tokens[min(self._next + ahead, len(self._tokens) - 1)]

    def _take(self) -> _Token:
        token = self._peek()
        self._next += 1
        return token

    def _fail(self, token: _Token, expected: str) -> None:
        found = repr(token.text) if token.kind != "end" else "the end"
        raise GrammarError(f"{self.at(token.place)}: found {found}, expected {expected}")

    def _choice(self, depth: int) -> Node:
        if depth > _MAX_DEPTH:
            raise GrammarError(f"{self.at(self._peek().place)}: nested too deeply")
        options = [self._sequence(depth)]
        while self._peek().text == "|" and self._peek().kind == "sign":
            self._take()
            options.append(self._sequence(depth))
        return alt(*options)

    def _sequence(self, depth: int) -> Node:
        items: list[Node] = []
        while True:
            token = self._peek()
            if token.kind == "name" and self._peek(1).kind == "define":
                break
            item = self._element(token, depth)
            if item is None:
                break
            items.append(self._repeated(item))
        return seq(*items)

    def _element(self, token: _Token, depth: int) -> Node | None:
        if token.kind == "text":
            self._take()
            codes = self._codes(token.text[1:-1], token.place + 1)
            return literal("".join(map(chr, codes)))
        if token.kind == "set":
            self._take()
            return self._set(token)
        if token.kind == "name":
            self._take()
            self.mentions.setdefault(token.text, token.place)
            return Ref(token.text)
        if token.text == ".":
            self._take()
            return Chars(ALL)
        if token.text == "(":
            self._take()
            if self._text.startswith("=", token.place + 1):
                raise GrammarError(f"{self.at(token.place)}: look-ahead, (= ...), is not supported")
            inner = self._choice(depth + 1)
            if self._peek().text != ")":
                self._fail(self._peek(), "')'")
            self._take()
            return inner
        if token.kind in ("define", "count") or token.text in ("*", "+", "?"):
            self._fail(token, "a text, a class, a name or a group")
        return None

    def _repeated(self, item: Node) -> Node:
        while True:
            token = self._peek()
            if token.kind == "count":
                low, high = self._count(token)
            elif token.kind == "sign" and token.text in ("*", "+", "?"):
                low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[token.text]
            else:
                return item
            self._take()
            item = EMPTY if high == 0 else Repeat(item, low, high)

    def _count(self, token: _Token) -> tuple[int, int | None]:
        first, comma, last = token.text[1:-1].replace(" ", "").partition(",")
        low = int(first)
        high = low if not comma else int(last) if last.strip() else None
        if low > _MAX_COUNT or (high is not None and (high > _MAX_COUNT or high < low)):
            self._fail(token, f"a repetition {{m,n}} with m <= n <= {_MAX_COUNT}")
        return low, high

    def _set(self, token: _Token) -> Node:
        body, place = token.text[1:-1], token.place + 1
        negated = body.startswith("^")
        if negated:
            body, place = body[1:], place + 1
        ranges: list[tuple[int, int]] = []
        codes = list(self._codes(body, place, in_set=True))
        idx = 0
        while idx < len(codes):
            low = abs(codes[idx]) if codes[idx] != _DASH else ord("-")
            if idx + 2 < len(codes) and codes[idx + 1] == _DASH:
                high = codes[idx + 2] if codes[idx + 2] != _DASH else ord("-")
                if high < low:
                    self._fail(token, "ranges from low to high")
                ranges.append((low, high))
                idx += 3
            else:
                ranges.append((low, low))
                idx += 1
        found = merge(ranges)
        return Chars(complement(found) if negated else found)

    def _codes(self, body: str, place: int, in_set: bool = False) -> Iterator[int]:
        """Yield the code points of a text or set; a bare dash in a set is _DASH."""
        idx = 0
        while idx < len(body):
            char = body[idx]
            if char != "\\":
                yield _DASH if in_set and char == "-" else ord(char)
                idx += 1
                continue
            mark = body[idx + 1]
            digits = _HEX.get(mark, 0)
            if mark in _ESCAPES:
                yield _ESCAPES[mark]
            elif digits:
                code = self._hex(body[idx + 2 : idx + 2 + digits], digits, place + idx)
                yield code
            elif mark in "\\\"'[]-^/.":
                yield ord(mark)
            else:
                raise GrammarError(f"{self.at(place + idx)}: unknown escape \\{mark}")
            idx += 2 + digits

    def _hex(self, text: str, digits: int, place: int) -> int:
        try:
            code = int(text, 16) if len(text) == digits and text.isalnum() else -1
        except ValueError:
            code = -1
        if not 0 <= code <= 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise GrammarError(f"{self.at(place)}: {text!r} is not the code of a character")
        return code


_DASH: Final = -1


def _nullable(rules: dict[str, Node]) -> set[str]:
    """Return the rules that match the empty text."""
    found: set[str] = set()
    changed = True
    while changed:
        changed = False
        for name, node in rules.items():
            if name not in found and is_nullable(node, found):
                found.add(name)
                changed = True
    return found


def _firsts(node: Node, nullable: set[str]) -> Iterator[str]:
    """Yield the rules that can stand at the very beginning of a node."""
    if isinstance(node, Ref):
        yield node.name
    elif isinstance(node, Repeat):
        yield from _firsts(node.item, nullable)
    elif isinstance(node, Alt):
        for item in node.items:
            yield from _firsts(item, nullable)
    elif isinstance(node, Seq):
        for item in node.items:
            yield from _firsts(item, nullable)
            if not is_nullable(item, nullable):
                return


def _refuse_left_recursion(rules: dict[str, Node], places: dict[str, int], parser: _Parser) -> None:
    nullable = _nullable(rules)
    firsts = {name: set(_firsts(node, nullable)) for name, node in rules.items()}
    for name in rules:
        seen: set[str] = set()
        path = [(name, [name])]
        while path:
            current, way = path.pop()
            for other in firsts[current]:
                if other == name:
                    raise GrammarError(
                        f"{parser.at(places[name])}: left recursion, {' -> '.join([*way, name])}: "
                        "write it as a repetition, or put the recursive part last"
                    )
                if other not in seen:
                    seen.add(other)
                    path.append((other, [*way, other]))


def _never_complete(rules: Rules) -> set[str]:
    """Return the rules that need themselves to be complete, without end."""
    complete: set[str] = set()
    changed = True
    while changed:
        changed = False
        for name, node in rules.items():
            if name not in complete and _completes(node, complete):
                complete.add(name)
                changed = True
    return set(rules) - complete


def completes(rules: Rules, name: str) -> bool:
    """Tell whether some text belongs to a rule."""
    return name not in _never_complete(rules)


def prune(rules: dict[str, Node], root: str) -> dict[str, Node]:
    """Return the rules without what can never be complete, and without those that nobody names."""
    hopeless = _never_complete(rules)
    clean = {name: _without(node, hopeless) for name, node in rules.items()}
    wanted: dict[str, None] = {}
    todo = [root]
    while todo:
        name = todo.pop()
        if name not in wanted:
            wanted[name] = None
            todo += references(clean[name])
    return {name: node for name, node in clean.items() if name in wanted}


def _without(node: Node, hopeless: set[str]) -> Node:
    if isinstance(node, Ref):
        return NOTHING if node.name in hopeless else node
    if isinstance(node, Chars):
        return node if node.ranges else NOTHING
    if isinstance(node, Repeat):
        inner = _without(node.item, hopeless)
        if inner == NOTHING:
            return EMPTY if node.low == 0 else NOTHING
        return Repeat(inner, node.low, node.high)
    items = (_without(item, hopeless) for item in node.items)
    if isinstance(node, Seq):
        return seq(*items)
    return alt(*(item for item in items if item != NOTHING))


def _completes(node: Node, known: set[str]) -> bool:
    if isinstance(node, Chars):
        return bool(node.ranges)
    if isinstance(node, Ref):
        return node.name in known
    if isinstance(node, Repeat):
        return node.low == 0 or _completes(node.item, known)
    if isinstance(node, Seq):
        return all(_completes(item, known) for item in node.items)
    return any(_completes(item, known) for item in node.items)
