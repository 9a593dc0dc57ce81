"""Longer lexemes for grammars that one character decides (pure).

llguidance reads a grammar by lexemes, and a lexeme takes all it can. With one character a lexeme
that never matters, but a mask then costs a hundred times more. Here the regular parts of a grammar
become lexemes where that cannot change what the grammar says: when in every place the next
character alone decides what comes next (LL(1)), and no lexeme could go on where it may end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from deepinfer.grammar.nodes import (
    EMPTY,
    Alt,
    Automaton,
    Chars,
    Node,
    Ranges,
    Ref,
    Repeat,
    Rules,
    Seq,
    alt,
    complement,
    inline,
    is_nullable,
    merge,
    references,
    rust_regex,
    seq,
    size,
)

__all__ = ["lark_of_lexemes"]

_MOST_SIZE = 2000
_MOST_WORK = 200_000


@dataclass(frozen=True, slots=True)
class _Lexeme:
    """A regular part that matches at least one character."""

    node: Node


_Part = _Lexeme | Seq | Alt | Repeat | Ref


class _Conflict(Exception):
    """One character does not decide."""


def lark_of_lexemes(rules: Rules, root: str) -> str | None:
    """Return the grammar in Lark with long lexemes, None when they would change its meaning."""
    whole = {name: inline(rules, name, _MOST_SIZE) for name in rules}
    regular = {name: node for name, node in whole.items() if node is not None}
    parts: dict[str, Node] = {
        name: _group(_replaced(node, regular))
        for name, node in rules.items()
        if name not in regular or name == root
    }
    table = _Table(parts, root)
    try:
        table.check()
    except _Conflict:
        return None
    names = {name: "start" if name == root else f"r{idx}" for idx, name in enumerate(parts)}
    return "".join(f"{names[name]}: {_spell(part, names)}\n" for name, part in parts.items())


def _replaced(node: Node, regular: Mapping[str, Node]) -> Node:
    if isinstance(node, Ref):
        return regular.get(node.name, node)
    if isinstance(node, Repeat):
        return Repeat(_replaced(node.item, regular), node.low, node.high)
    if isinstance(node, Seq):
        return seq(*(_replaced(item, regular) for item in node.items))
    if isinstance(node, Alt):
        return alt(*(_replaced(item, regular) for item in node.items))
    return node


def _is_regular(node: Node) -> bool:
    return not any(references(node))


def _group(node: Node) -> Node:
    """Turn the largest regular parts of a node into lexemes."""
    if _is_regular(node):
        return _lexeme(node)
    if isinstance(node, Repeat):
        return Repeat(_group(node.item), node.low, node.high)
    if isinstance(node, Seq):
        out: list[Node] = []
        run: list[Node] = []
        for item in node.items:
            if _is_regular(item):
                run.append(item)
                continue
            out += [_lexeme(seq(*run))] if run else []
            run = []
            out.append(_group(item))
        out += [_lexeme(seq(*run))] if run else []
        return Seq(tuple(out))
    if isinstance(node, Alt):
        flat = [item for item in node.items if _is_regular(item)]
        rest = [_group(item) for item in node.items if not _is_regular(item)]
        return Alt((*([_lexeme(alt(*flat))] if flat else []), *rest))
    return node


def _lexeme(node: Node) -> Node:
    if node == EMPTY:
        return EMPTY
    if not is_nullable(node):
        return _Lexeme(node)  # type: ignore[return-value]  # one more kind of node, in here
    filled = _nonempty(node)
    return Alt((EMPTY, _Lexeme(filled)))  # type: ignore[arg-type]


def _nonempty(node: Node) -> Node:
    """Return the texts of a node without the empty one."""
    if isinstance(node, Chars) or not is_nullable(node):
        return node
    if isinstance(node, Repeat):
        if is_nullable(node.item):
            return Repeat(_nonempty(node.item), 1, node.high)
        return Repeat(node.item, 1, node.high)
    assert isinstance(node, Seq | Alt), node
    if isinstance(node, Alt):
        return alt(*(_nonempty(item) for item in node.items if item != EMPTY))
    options = (seq(_nonempty(item), *node.items[idx + 1 :]) for idx, item in enumerate(node.items))
    return alt(*options)


@dataclass
class _Table:
    """What can stand first in every rule, and behind it."""

    parts: Mapping[str, Node]
    root: str
    nullable: dict[str, bool] = field(default_factory=dict)
    first: dict[str, Ranges] = field(default_factory=dict)
    follow: dict[str, Ranges] = field(default_factory=dict)

    def check(self) -> None:
        """Raise _Conflict unless one character decides everywhere."""
        self.nullable = dict.fromkeys(self.parts, False)
        self.first = dict.fromkeys(self.parts, ())
        self.follow = dict.fromkeys(self.parts, ())
        while True:
            before = (dict(self.nullable), dict(self.first))
            for name, part in self.parts.items():
                self.nullable[name] = self._empty(part)
                self.first[name] = self._first(part)
            if before == (self.nullable, self.first):
                break
        while True:
            known = dict(self.follow)
            for name, part in self.parts.items():
                self._walk(part, self.follow[name], check=False)
            if known == self.follow:
                break
        for name, part in self.parts.items():
            self._walk(part, self.follow[name], check=True)

    def _empty(self, part: Node | _Lexeme) -> bool:
        if isinstance(part, _Lexeme):
            return False
        if isinstance(part, Ref):
            return self.nullable[part.name]
        if isinstance(part, Repeat):
            return part.low == 0 or self._empty(part.item)
        assert isinstance(part, Seq | Alt), part
        found = (self._empty(item) for item in part.items)
        return all(found) if isinstance(part, Seq) else any(found)

    def _first(self, part: Node | _Lexeme) -> Ranges:
        if isinstance(part, _Lexeme):
            return _firsts(part.node)
        if isinstance(part, Ref):
            return self.first[part.name]
        if isinstance(part, Repeat):
            return self._first(part.item)
        assert isinstance(part, Seq | Alt), part
        found: list[tuple[int, int]] = []
        for item in part.items:
            found += self._first(item)
            if isinstance(part, Seq) and not self._empty(item):
                break
        return merge(found)

    def _walk(self, part: Node | _Lexeme, follow: Ranges, check: bool) -> None:
        """Pass what follows a part on to the rules in it; look for conflicts when asked to."""
        if isinstance(part, _Lexeme):
            if check:
                _need_disjoint(_continuations(part.node), follow)
        elif isinstance(part, Ref):
            self.follow[part.name] = merge((*self.follow[part.name], *follow))
        elif isinstance(part, Repeat):
            first = self._first(part.item)
            if check and (self._empty(part.item) or part.low != part.high):
                if self._empty(part.item):
                    raise _Conflict
                _need_disjoint(first, follow)
            again = () if part.high == 1 else first
            self._walk(part.item, merge((*again, *follow)), check)
        elif isinstance(part, Seq):
            for item in reversed(part.items):
                self._walk(item, follow, check)
                own = self._first(item)
                follow = merge((*own, *follow)) if self._empty(item) else own
        else:
            assert isinstance(part, Alt), part
            if check:
                seen: Ranges = ()
                for item in part.items:
                    own = self._first(item)
                    _need_disjoint(seen, own)
                    seen = merge((*seen, *own))
                empties = sum(map(self._empty, part.items))
                if empties > 1:
                    raise _Conflict
                if empties:
                    _need_disjoint(seen, follow)
            for item in part.items:
                self._walk(item, follow, check)


def _need_disjoint(a: Ranges, b: Ranges) -> None:
    both = sorted((*a, *b))
    if any(high >= low for (_, high), (low, _) in pairwise(both)):
        raise _Conflict


def _firsts(node: Node) -> Ranges:
    """Return the characters with which the texts of a regular node begin."""
    if isinstance(node, Chars):
        return node.ranges
    if isinstance(node, Repeat):
        return _firsts(node.item)
    assert isinstance(node, Seq | Alt), node
    found: list[tuple[int, int]] = []
    for item in node.items:
        found += _firsts(item)
        if isinstance(node, Seq) and not is_nullable(item):
            break
    return merge(found)


def _continuations(node: Node) -> Ranges:
    """Return the characters with which a text of a regular node can go on to a longer one.

    Every character, when finding out would take too long.
    """
    if size(node) > _MOST_SIZE:
        return complement(())
    automaton = Automaton(node)
    start = automaton.start()
    seen = {start}
    todo = [start]
    found: Ranges = ()
    work = 0
    while todo:
        states = todo.pop()
        moves = automaton.moves(states)
        if automaton.is_final(states):
            found = merge((*found, *(span for ranges, _ in moves for span in ranges)))
        cuts = sorted({c for ranges, _ in moves for lo, hi in ranges for c in (lo, hi + 1)})
        work += len(cuts) * max(1, len(moves))
        if work > _MOST_WORK:
            return complement(())
        for code in cuts:
            after = automaton.step(states, code)
            if after and after not in seen:
                seen.add(after)
                todo.append(after)
    return found


def _spell(part: Node | _Lexeme, names: Mapping[str, str]) -> str:
    if isinstance(part, _Lexeme):
        return f"/{rust_regex(part.node)}/"
    if isinstance(part, Ref):
        return names[part.name]
    if isinstance(part, Repeat):
        low, high = part.low, "" if part.high is None else part.high
        return f"({_spell(part.item, names)}){{{low},{high}}}"
    assert isinstance(part, Seq | Alt), part
    if isinstance(part, Alt):
        return " | ".join(f"({_spell(item, names)})" for item in part.items)
    if not part.items:
        return '""'
    return " ".join(f"({_spell(item, names)})" for item in part.items)
