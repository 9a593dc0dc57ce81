"""The small language that patterns, grammars and choices are reduced to (pure).

A Node describes a set of texts over Unicode characters. `Rules` names nodes, so that they can be
recursive. Both grammar libraries get their input from here, and `Automaton` decides membership in
linear time, whatever the pattern: it has the last word on finished text.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

__all__ = [
    "ALL",
    "ANYTHING",
    "EMPTY",
    "MAX_SIZE",
    "NOTHING",
    "Alt",
    "Automaton",
    "Chars",
    "Node",
    "Ranges",
    "Ref",
    "Repeat",
    "Rules",
    "Seq",
    "alt",
    "chars",
    "complement",
    "gbnf",
    "inline",
    "is_nullable",
    "lark",
    "literal",
    "merge",
    "references",
    "rust_regex",
    "seq",
    "size",
]

Ranges = tuple[tuple[int, int], ...]
"""Sorted, disjoint, inclusive ranges of code points, none of them a surrogate."""

MAX_SIZE: Final = 1 << 62
ALL: Final[Ranges] = ((0, 0xD7FF), (0xE000, 0x10FFFF))


@dataclass(frozen=True, slots=True)
class Chars:
    """One character out of some; none when `ranges` is empty."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Seq:
    """Texts one after the other."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """One of several; nothing at all when there are none."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """From `low` to `high` times the same, without end when `high` is None."""

    item: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Ref:
    """What a rule of this name says."""

    name: str


Node = Chars | Seq | Alt | Repeat | Ref
Rules = Mapping[str, Node]

EMPTY: Final = Seq(())
NOTHING: Final = Alt(())
ANYTHING: Final = Repeat(Chars(ALL), 0, None)


def merge(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the union of ranges in canonical form, without surrogates."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    cut: list[tuple[int, int]] = []
    for low, high in found:
        cut += [(low, min(high, 0xD7FF)), (max(low, 0xE000), high)]
    return tuple((low, high) for low, high in cut if low <= high)


def complement(ranges: Ranges) -> Ranges:
    """Return the characters that the ranges leave out."""
    gaps: list[tuple[int, int]] = []
    start = 0
    for low, high in ranges:
        gaps.append((start, low - 1))
        start = high + 1
    gaps.append((start, 0x10FFFF))
    return merge((low, high) for low, high in gaps if low <= high)


def chars(text: str) -> Chars:
    """Return one character out of those of a text."""
    return Chars(merge((ord(c), ord(c)) for c in text))


def literal(text: str) -> Node:
    """Return exactly this text."""
    return seq(*(Chars(((ord(c), ord(c)),)) for c in text))


def seq(*items: Node) -> Node:
    """Return a sequence without nested sequences."""
    flat: list[Node] = []
    for item in items:
        flat += item.items if isinstance(item, Seq) else (item,)
    if any(item == NOTHING for item in flat):
        return NOTHING
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def alt(*items: Node) -> Node:
    """Return a choice without nested or repeated choices."""
    flat: dict[Node, None] = {}
    for item in items:
        flat.update(dict.fromkeys(item.items if isinstance(item, Alt) else (item,)))
    return next(iter(flat)) if len(flat) == 1 else Alt(tuple(flat))


def size(node: Node, sizes: Mapping[str, int] | None = None) -> int:
    """Return how many characters of a pattern remain when every repetition is written out.

    sizes  the sizes of rules; a name that is absent counts as 1. At most MAX_SIZE.
    """
    if isinstance(node, Chars):
        return 1
    if isinstance(node, Ref):
        return (sizes or {}).get(node.name, 1)
    if isinstance(node, Repeat):
        times = node.low + 1 if node.high is None else max(node.high, 1)
        return min(MAX_SIZE, size(node.item, sizes) * times)
    return min(MAX_SIZE, 1 + sum(size(item, sizes) for item in node.items))


def is_nullable(node: Node, known: Container[str] = ()) -> bool:
    """Tell whether the empty text belongs to a node.

    known  rules to which it belongs
    """
    if isinstance(node, Chars):
        return False
    if isinstance(node, Ref):
        return node.name in known
    if isinstance(node, Repeat):
        return node.low == 0 or is_nullable(node.item, known)
    found = (is_nullable(item, known) for item in node.items)
    return all(found) if isinstance(node, Seq) else any(found)


def references(node: Node) -> Iterable[str]:
    """Yield the names of the rules that a node mentions."""
    if isinstance(node, Ref):
        yield node.name
    elif isinstance(node, Repeat):
        yield from references(node.item)
    elif isinstance(node, Seq | Alt):
        for item in node.items:
            yield from references(item)


def inline(rules: Rules, root: str, most: int) -> Node | None:
    """Return the root rule with all others written into it.

    None when a rule is recursive, or when the result would be larger than `most`.
    """
    order: list[str] = []
    state: dict[str, bool] = {}
    stack = [(root, iter(tuple(references(rules[root]))))]
    state[root] = False
    while stack:
        name, names = stack[-1]
        for other in names:
            if state.get(other) is False:
                return None
            if other not in state:
                state[other] = False
                stack.append((other, iter(tuple(references(rules[other])))))
                break
        else:
            state[name] = True
            order.append(name)
            stack.pop()
    sizes: dict[str, int] = {}
    done: dict[str, Node] = {}
    for name in order:
        sizes[name] = size(rules[name], sizes)
        if sizes[name] > most:
            return None
        done[name] = _replace(rules[name], done)
    return done[root]


def _replace(node: Node, done: Mapping[str, Node]) -> Node:
    if isinstance(node, Ref):
        return done[node.name]
    if isinstance(node, Repeat):
        return Repeat(_replace(node.item, done), node.low, node.high)
    if isinstance(node, Seq):
        return seq(*(_replace(item, done) for item in node.items))
    if isinstance(node, Alt):
        return alt(*(_replace(item, done) for item in node.items))
    return node


def _count(low: int, high: int | None) -> str:
    """Spell a repetition as regular expressions and grammars alike do."""
    if (low, high) in _COUNTS:
        return _COUNTS[low, high]
    if low == high:
        return f"{{{low}}}"
    return f"{{{low},}}" if high is None else f"{{{low},{high}}}"


_COUNTS: Final[Mapping[tuple[int, int | None], str]] = {
    (0, None): "*",
    (1, None): "+",
    (0, 1): "?",
}


def rust_regex(node: Node) -> str:
    """Spell a node without references for a regular expression library of the RE2 family.

    The text is anchored by its user; it holds no character that such a syntax treats specially,
    except where it is meant.
    """
    if isinstance(node, Chars):
        if len(node.ranges) == 1 and node.ranges[0][0] == node.ranges[0][1]:
            return _rust_char(node.ranges[0][0])
        if not node.ranges:
            return r"[^\x{0}-\x{10FFFF}]"
        return "[" + _spans(node.ranges, _rust_char) + "]"
    if isinstance(node, Repeat):
        inner = rust_regex(node.item)
        if not isinstance(node.item, Chars):
            inner = f"(?:{inner})"
        return inner + _count(node.low, node.high)
    if isinstance(node, Seq):
        return "".join(
            f"(?:{rust_regex(item)})" if isinstance(item, Alt) else rust_regex(item)
            for item in node.items
        )
    assert isinstance(node, Alt), node
    if not node.items:
        return rust_regex(Chars(()))
    return "|".join(f"(?:{rust_regex(item)})" for item in node.items)


def _rust_char(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and (char.isalnum() or char in " _") else f"\\x{{{code:X}}}"


def _spans(ranges: Ranges, spell: Callable[[int], str]) -> str:
    return "".join(
        spell(low) if low == high else f"{spell(low)}-{spell(high)}" for low, high in ranges
    )


def _gbnf_char(code: int) -> str:
    char = chr(code)
    if char.isascii() and (char.isalnum() or char in " _"):
        return char
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def gbnf(rules: Rules, root: str) -> str:
    """Spell rules as a GBNF grammar whose start rule is `root`."""
    names = _names(rules, root, "root")
    return "".join(f"{names[name]} ::= {_gbnf(node, names)}\n" for name, node in rules.items())


def _gbnf(node: Node, names: Mapping[str, str]) -> str:
    if isinstance(node, Chars):
        return "[" + _spans(node.ranges, _gbnf_char) + "]"
    if isinstance(node, Ref):
        return names[node.name]
    if isinstance(node, Repeat):
        inner = _gbnf(node.item, names)
        if not isinstance(node.item, Chars | Ref):
            inner = f"({inner})"
        return inner + _count(node.low, node.high)
    if isinstance(node, Alt):
        return " | ".join(f"({_gbnf(item, names)})" for item in node.items)
    if not node.items:
        return '""'
    return " ".join(
        text
        for single, item in _runs(node.items)
        for text in (
            [f'"{"".join(_gbnf_char(c) for c in single)}"']
            if single
            else [f"({_gbnf(item, names)})" if isinstance(item, Alt) else _gbnf(item, names)]
        )
    )


def lark(rules: Rules, root: str) -> str:
    """Spell rules as a Lark grammar whose start rule is `start`.

    Every character is a lexeme of its own. Longer ones would be matched greedily, which a grammar
    does not say.
    """
    names = _names(rules, root, "start")
    return "".join(f"{names[name]}: {_lark(node, names)}\n" for name, node in rules.items())


def _lark(node: Node, names: Mapping[str, str]) -> str:
    if isinstance(node, Chars):
        return f"/{rust_regex(node)}/"
    if isinstance(node, Ref):
        return names[node.name]
    if isinstance(node, Repeat):
        inner = _lark(node.item, names)
        if not isinstance(node.item, Chars | Ref):
            inner = f"({inner})"
        return inner + _count(node.low, node.high)
    if isinstance(node, Alt):
        return " | ".join(f"({_lark(item, names)})" for item in node.items)
    if not node.items:
        return '""'
    return " ".join(
        f"({_lark(item, names)})" if isinstance(item, Alt) else _lark(item, names)
        for item in node.items
    )


def _names(rules: Rules, root: str, start: str) -> dict[str, str]:
    return {name: start if name == root else f"r{idx}" for idx, name in enumerate(rules)}


def _runs(items: tuple[Node, ...]) -> Iterable[tuple[list[int], Node]]:
    """Yield runs of single characters as their codes, and other items with an empty list."""
    run: list[int] = []
    for item in items:
        if isinstance(item, Chars) and len(item.ranges) == 1:
            low, high = item.ranges[0]
            if low == high:
                run.append(low)
                continue
        if run:
            yield run, EMPTY
            run = []
        yield [], item
    if run:
        yield run, EMPTY


class Automaton:
    """Decides whether a text belongs to a node without references.

    Time is the length of the text times the size of the node, never more.
    """

    def __init__(self, node: Node) -> None:
        self._moves: list[tuple[Ranges, int]] = []  # per state: what it reads and where it leads
        self._jumps: list[list[int]] = []
        start = self._state()
        self._final = self._build(node, start)
        self._start = start

    def matches(self, text: str) -> bool:
        """Tell whether the whole text belongs."""
        states = self.start()
        for char in text:
            states = self.step(states, ord(char))
            if not states:
                return False
        return self.is_final(states)

    def start(self) -> frozenset[int]:
        """Return the states before the first character."""
        return self._closure({self._start})

    def step(self, states: frozenset[int], code: int) -> frozenset[int]:
        """Return the states after a character."""
        return self._closure(
            {target for ranges, target in self.moves(states) if _holds(ranges, code)}
        )

    def moves(self, states: frozenset[int]) -> list[tuple[Ranges, int]]:
        """Return what can be read in some states, and where it leads."""
        return [self._moves[state] for state in states if self._moves[state][0]]

    def is_final(self, states: frozenset[int]) -> bool:
        """Tell whether the text may end in some states."""
        return self._final in states

    def _state(self) -> int:
        self._moves.append(((), -1))
        self._jumps.append([])
        return len(self._moves) - 1

    def _build(self, node: Node, start: int) -> int:
        """Add a node that begins in `start` and return the state in which it ends."""
        if isinstance(node, Chars):
            begin, end = self._state(), self._state()
            self._jumps[start].append(begin)
            self._moves[begin] = (node.ranges, end)
            return end
        if isinstance(node, Seq):
            for item in node.items:
                start = self._build(item, start)
            return start
        if isinstance(node, Alt):
            end = self._state()
            for item in node.items:
                self._jumps[self._build(item, start)].append(end)
            return end
        assert isinstance(node, Repeat), node
        for _ in range(node.low):
            start = self._build(node.item, start)
        end = self._state()
        self._jumps[start].append(end)
        if node.high is None:
            begin = self._state()
            self._jumps[start].append(begin)
            last = self._build(node.item, begin)
            self._jumps[last] += [begin, end]
        else:
            for _ in range(node.high - node.low):
                start = self._build(node.item, start)
                self._jumps[start].append(end)
        return end

    def _closure(self, states: set[int]) -> frozenset[int]:
        found = set(states)
        todo = list(states)
        while todo:
            for target in self._jumps[todo.pop()]:
                if target not in found:
                    found.add(target)
                    todo.append(target)
        return frozenset(found)


def _holds(ranges: Ranges, code: int) -> bool:
    if len(ranges) < 8:
        return any(low <= code <= high for low, high in ranges)
    idx = bisect_right(ranges, (code, 0x110000)) - 1
    return idx >= 0 and code <= ranges[idx][1]
