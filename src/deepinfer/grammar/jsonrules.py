"""From a rewritten JSON Schema to rules, for a library that is given grammars only (pure).

Properties come in the order of the schema, as the other library writes them. What rules do not say
is noted as a loss: they then allow more than the schema does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import ceil, floor
from typing import Any, Final

from deepinfer.grammar.nodes import (
    ALL,
    EMPTY,
    NOTHING,
    Alt,
    Chars,
    Node,
    Ref,
    Repeat,
    Seq,
    alt,
    chars,
    complement,
    literal,
    merge,
    seq,
)
from deepinfer.grammar.regex import parse_regex
from deepinfer.grammar.schema import PLACE, Schema

__all__ = ["Loss", "json_rules"]

_WS: Final = "ws"
_ANY: Final = "any"
_QUOTE: Final = literal('"')
_SHORT_ESCAPES: Final = {
    '"': '"',
    "\\": "\\",
    "\b": "b",
    "\f": "f",
    "\n": "n",
    "\r": "r",
    "\t": "t",
}
_PLAIN: Final = complement(merge([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]))
_ONE_CHAR: Final = Chars(ALL)
_DIGIT: Final = Chars(((0x30, 0x39),))
_TYPES: Final = ("null", "boolean", "object", "array", "number", "string")
_MOST_WAYS: Final = 64
_MAX_DEPTH: Final = 24
_MERGED_BY_MAX: Final = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_MERGED_BY_MIN: Final = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")

Plain = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Loss:
    """A keyword that the rules do not say in full."""

    pointer: str
    keyword: str
    note: str


def json_rules(
    schema: Schema, max_whitespace: int, satisfies: Callable[[Schema, Any], bool]
) -> tuple[dict[str, Node], list[Loss]]:
    """Return rules whose start rule is `root`, and what they leave out.

    schema     as `grammar/schema.py` rewrites it
    satisfies  whether a value satisfies a part of the schema
    """
    builder = _Builder(schema, max_whitespace, satisfies)
    return builder.run()


class _Builder:
    def __init__(
        self, schema: Schema, max_whitespace: int, satisfies: Callable[[Schema, Any], bool]
    ) -> None:
        self._schema = schema
        self._defs: dict[str, Schema] = schema.get("$defs", {}) if isinstance(schema, dict) else {}
        self._max_whitespace = max_whitespace
        self._satisfies = satisfies
        self._rules: dict[str, Node] = {}
        self._memo: dict[str, Node] = {}
        self._losses: dict[Loss, None] = {}

    def run(self) -> tuple[dict[str, Node], list[Loss]]:
        root = self._schema
        if isinstance(root, dict):
            root = {key: value for key, value in root.items() if key != "$defs"}
        self._rules["root"] = EMPTY  # comes first
        self._rules["root"] = self._value(root)
        self._rules[_WS] = self._whitespace()
        return self._rules, list(self._losses)

    def _whitespace(self) -> Node:
        most = self._max_whitespace
        if most == 0:
            return EMPTY
        indent = Repeat(chars(" \t"), 0, most - 1) if most > 1 else EMPTY
        return alt(EMPTY, literal(" "), seq(literal("\n"), indent))

    def _lose(self, schema: Plain, keyword: str, note: str) -> None:
        self._losses[Loss(schema.get(PLACE, ""), keyword, note)] = None

    def _value(self, schema: Schema) -> Node:
        """Return the texts of the values that satisfy a schema."""
        if schema is False:
            return NOTHING
        if schema is True or not set(schema) - {PLACE}:
            return self._anything()
        key = json.dumps(schema)
        found = self._memo.get(key)
        if found is None:
            name = f"v{len(self._memo)}"
            found = self._memo[key] = Ref(name)
            self._rules[name] = NOTHING
            self._rules[name] = self._build(schema)
        return found

    def _build(self, schema: Plain) -> Node:
        own = set(schema) - {PLACE}
        if own == {"$ref"}:
            return self._value(self._target(schema))
        if own == {"anyOf"}:
            return alt(*map(self._value, schema["anyOf"]))
        return alt(*(self._plain(way) for way in self._ways(schema, 0)))

    def _target(self, schema: Plain) -> Schema:
        return self._defs[schema["$ref"].rpartition("/")[2]]

    def _anything(self) -> Node:
        if _ANY not in self._rules:
            self._rules[_ANY] = EMPTY
            self._rules[_ANY] = alt(*(self._of_type(kind, {}) for kind in _TYPES))
        return Ref(_ANY)

    # Schemas that apply together.

    def _ways(self, schema: Schema, depth: int) -> list[Plain]:
        """Return schemas without references and branches, one of which must hold."""
        if schema is True:
            return [{}]
        if schema is False:
            return []
        if depth > _MAX_DEPTH:
            self._lose(schema, "$ref", "it applies together with others too deeply")
            return [{}]
        rest = {k: v for k, v in schema.items() if k not in ("$ref", "allOf", "anyOf")}
        ways: list[Plain] = [rest]
        parts: list[tuple[str, list[Plain]]] = []
        if "$ref" in schema:
            parts.append(("$ref", self._ways(self._target(schema), depth + 1)))
        parts += [("allOf", self._ways(sub, depth + 1)) for sub in schema.get("allOf", ())]
        if "anyOf" in schema:
            found = [way for sub in schema["anyOf"] for way in self._ways(sub, depth + 1)]
            parts.append(("anyOf", found))
        for keyword, found in parts:
            if len(ways) * len(found) > _MOST_WAYS:
                self._lose(schema, keyword, "it can be combined with others in too many ways")
                continue
            ways = [both for a in ways for b in found if (both := self._both(a, b)) is not None]
        return ways

    def _both(self, a: Plain, b: Plain) -> Plain | None:
        """Return what two schemas without branches say together, None when nothing satisfies it."""
        out = dict(a)
        kinds = _common_types(a.get("type"), b.get("type"))
        if kinds is not None:
            if not kinds:
                return None
            out["type"] = kinds
        for keyword, value in b.items():
            if keyword in ("type", "additionalProperties", "items", "properties", "prefixItems"):
                continue
            if keyword not in a:
                out[keyword] = value
            elif keyword in _MERGED_BY_MAX:
                out[keyword] = max(a[keyword], value)
            elif keyword in _MERGED_BY_MIN:
                out[keyword] = min(a[keyword], value)
            elif keyword == "required":
                out[keyword] = list(dict.fromkeys([*a[keyword], *value]))
            elif keyword == "enum":
                out[keyword] = [x for x in a[keyword] if self._satisfies({"enum": value}, x)]
            elif keyword == "const":
                if not self._satisfies({"const": value}, a[keyword]):
                    return None
            elif keyword != PLACE and a[keyword] != value:
                self._lose(b, keyword, "it holds together with another of its kind")
        self._both_objects(a, b, out)
        self._both_arrays(a, b, out)
        return out

    def _both_objects(self, a: Plain, b: Plain, out: Plain) -> None:
        names = {**a.get("properties", {}), **b.get("properties", {})}
        if names:
            out["properties"] = {
                name: _together(
                    *(side.get("properties", {}).get(name, _rest(side)) for side in (a, b))
                )
                for name in names
            }
        if "additionalProperties" in a or "additionalProperties" in b:
            out["additionalProperties"] = _together(_rest(a), _rest(b))

    def _both_arrays(self, a: Plain, b: Plain, out: Plain) -> None:
        first = [side.get("prefixItems", []) for side in (a, b)]
        most = max(map(len, first))
        rest = [side.get("items", True) for side in (a, b)]
        if most:
            out["prefixItems"] = [
                _together(*(f[i] if i < len(f) else r for f, r in zip(first, rest, strict=True)))
                for i in range(most)
            ]
        if "items" in a or "items" in b:
            out["items"] = _together(*rest)

    # One schema without references and branches.

    def _plain(self, schema: Plain) -> Node:
        if "const" in schema or "enum" in schema:
            # Whether a value of an enumeration is in it need not be asked: it may be a long one.
            listed = "const" if "const" in schema else "enum"
            values = schema[listed] if listed == "enum" else [schema[listed]]
            rest = {key: value for key, value in schema.items() if key != listed}
            return alt(*(self._literal(v) for v in values if self._satisfies(rest, v)))
        kinds = schema.get("type", _TYPES)
        kinds = [kinds] if isinstance(kinds, str) else list(kinds)
        if "number" in kinds and "integer" in kinds:
            kinds.remove("integer")
        return alt(*(self._of_type(kind, schema) for kind in kinds))

    def _literal(self, value: Any) -> Node:
        """Return the text of one value, with room for white space."""
        ws = Ref(_WS)
        if isinstance(value, list):
            items = _joined([self._literal(item) for item in value])
            return seq(literal("["), ws, items, ws, literal("]")) if value else _empty("[", "]")
        if isinstance(value, dict):
            pairs = [self._pair(literal(_quoted(k)), self._literal(v)) for k, v in value.items()]
            return (
                seq(literal("{"), ws, _joined(pairs), ws, literal("}"))
                if pairs
                else _empty("{", "}")
            )
        return literal(_quoted(value))

    def _pair(self, name: Node, value: Node) -> Node:
        ws = Ref(_WS)
        return seq(name, ws, literal(":"), ws, value)

    def _of_type(self, kind: str, schema: Plain) -> Node:
        if kind == "null":
            return literal("null")
        if kind == "boolean":
            return alt(literal("true"), literal("false"))
        if kind == "string":
            return self._string(schema)
        if kind == "array":
            return self._array(schema)
        if kind == "object":
            return self._object(schema)
        return self._number(schema, kind == "integer")

    def _string(self, schema: Plain) -> Node:
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        if high is not None and high < low:
            return NOTHING
        if "pattern" not in schema:
            return seq(_QUOTE, _jsonify(Repeat(_ONE_CHAR, low, high)), _QUOTE)
        body = parse_regex(schema["pattern"], whole=False, ecma=True)
        shortest, longest = _lengths(body)
        for keyword, fits in (
            ("minLength", shortest >= low),
            ("maxLength", high is None or (longest is not None and longest <= high)),
        ):
            if keyword in schema and not fits:
                self._lose(schema, keyword, "it holds together with a pattern")
        return seq(_QUOTE, _jsonify(body), _QUOTE)

    def _number(self, schema: Plain, whole: bool) -> Node:
        low, low_open = _bound(schema.get("minimum"), schema.get("exclusiveMinimum"), max)
        high, high_open = _bound(schema.get("maximum"), schema.get("exclusiveMaximum"), min)
        if whole:
            least = None if low is None else floor(low) + 1 if low_open else ceil(low)
            most = None if high is None else ceil(high) - 1 if high_open else floor(high)
            return _signed(least, False, most, False, _integers)
        if low is None and high is None:
            sign, exponent = Repeat(literal("-"), 0, 1), seq(chars("eE"), Repeat(chars("+-"), 0, 1))
            return seq(
                sign,
                _integers(0, False, None, False),
                Repeat(_fraction(), 0, 1),
                Repeat(seq(exponent, Repeat(_DIGIT, 1, None)), 0, 1),
            )
        if low is not None and low != floor(low):
            self._lose(schema, "minimum", f"{low} is rounded to {floor(low)}")
            low, low_open = floor(low), False
        if high is not None and high != floor(high):
            self._lose(schema, "maximum", f"{high} is rounded to {ceil(high)}")
            high, high_open = ceil(high), False
        return _signed(
            None if low is None else int(low),
            low_open,
            None if high is None else int(high),
            high_open,
            _decimals,
        )

    def _array(self, schema: Plain) -> Node:
        ws, comma = Ref(_WS), _comma()
        first = [self._value(sub) for sub in schema.get("prefixItems", ())]
        rest = self._value(schema.get("items", True))
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        if high is not None and high < low:
            return NOTHING

        def tail(count: int) -> Node:
            """What may follow `count` items."""
            if count >= len(first):
                most = None if high is None else high - count
                if rest == NOTHING or most == 0:
                    return EMPTY if low <= count else NOTHING
                return Repeat(seq(comma, rest), max(0, low - count), most)
            if count == high:
                return EMPTY
            more = seq(comma, first[count], tail(count + 1))
            return alt(EMPTY, more) if count >= low else more

        start = first[0] if first else rest
        filled = NOTHING if start == NOTHING or high == 0 else seq(start, tail(1))
        some = NOTHING if filled == NOTHING else seq(filled, ws)
        inner = alt(EMPTY, some) if low == 0 and some != NOTHING else EMPTY if low == 0 else some
        return seq(literal("["), ws, inner, literal("]"))

    def _object(self, schema: Plain) -> Node:
        ws = Ref(_WS)
        named = dict(schema.get("properties", {}))
        required = set(schema.get("required", ()))
        rest = _rest(schema)
        for name in schema.get("required", ()):
            named.setdefault(name, rest)
        pairs = []
        for name, sub in named.items():
            value = self._value(sub)
            pairs.append((name in required, self._pair(literal(_quoted(name)), value), value))
        other = self._value(rest)
        if other == NOTHING:
            more: Node = NOTHING
        else:
            name = seq(_QUOTE, _jsonify(_none_of(named)), _QUOTE)
            more = self._pair(name, other)
        inner = self._members(pairs, more)
        return NOTHING if inner == NOTHING else seq(literal("{"), ws, inner, literal("}"))

    def _members(self, pairs: list[tuple[bool, Node, Node]], more: Node) -> Node:
        """Return the members of an object, in order, with commas between those that are there."""
        ws, comma = Ref(_WS), _comma()
        after: Node = EMPTY if more == NOTHING else Repeat(seq(comma, more), 0, None)
        alone: Node = EMPTY if more == NOTHING else alt(EMPTY, seq(more, after, ws))
        after = seq(after, ws)
        for needed, pair, value in reversed(pairs):
            if value == NOTHING:
                if needed:
                    return NOTHING
                continue
            after, alone = self._share(after), self._share(alone)
            first, later = seq(pair, after), seq(comma, pair, after)
            after = later if needed else alt(later, after)
            alone = first if needed else alt(first, alone)
        return alone

    def _share(self, node: Node) -> Node:
        """Return a node that stands for another, so that using it twice costs nothing."""
        if isinstance(node, Chars | Ref) or node in (EMPTY, NOTHING):
            return node
        name = f"m{len(self._rules)}"
        self._rules[name] = node
        return Ref(name)


def _comma() -> Node:
    return seq(Ref(_WS), literal(","), Ref(_WS))


def _empty(opening: str, closing: str) -> Node:
    return seq(literal(opening), Ref(_WS), literal(closing))


def _joined(items: list[Node]) -> Node:
    out: list[Node] = []
    for item in items:
        out += [_comma(), item] if out else [item]
    return seq(*out)


def _quoted(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _together(a: Schema, b: Schema) -> Schema:
    if a is True:
        return b
    if b is True or a == b:
        return a
    return False if a is False or b is False else {"allOf": [a, b]}


def _rest(schema: Plain) -> Schema:
    found: Schema = schema.get("additionalProperties", True)
    return found


def _common_types(a: Any, b: Any) -> list[str] | None:
    """Return the types that both allow, None when neither says; an integer is a number."""
    if a is None or b is None:
        found = a if b is None else b
        return None if found is None else [found] if isinstance(found, str) else list(found)
    first, second = ([x] if isinstance(x, str) else list(x) for x in (a, b))
    common = [kind for kind in first if kind in second]
    for mine, other in ((first, second), (second, first)):
        if "integer" in mine and "number" in other and "integer" not in common:
            common.append("integer")
    return common


def _bound(
    closed: Any, opened: Any, tighter: Callable[..., Any]
) -> tuple[int | float | None, bool]:
    """Return the tighter of two bounds, and whether it is itself left out."""
    if closed is None or opened is None:
        return (opened, True) if closed is None else (closed, False)
    return (opened, True) if tighter(closed, opened) == opened else (closed, False)


Range = Callable[[int, bool, int | None, bool], Node]


def _signed(
    low: int | None, low_open: bool, high: int | None, high_open: bool, ranged: Range
) -> Node:
    """Return the numbers of a range, from ranges of numbers that are not negative."""
    parts: list[Node] = []
    if low is None or low < 0:
        if high is None or high >= 0:
            below = ranged(0, True, None if low is None else -low, low_open)
        else:
            below = ranged(-high, high_open, None if low is None else -low, low_open)
        parts.append(seq(literal("-"), below))
    if high is None or high >= 0:
        start = 0 if low is None or low < 0 else low
        parts.append(ranged(start, low_open and low is not None and low >= 0, high, high_open))
    return alt(*(part for part in parts if part != NOTHING))


def _fraction() -> Node:
    return seq(literal("."), Repeat(_DIGIT, 1, None))


def _zeros() -> Node:
    return Repeat(seq(literal("."), Repeat(literal("0"), 1, None)), 0, 1)


def _decimals(low: int, low_open: bool, high: int | None, high_open: bool) -> Node:
    """Return decimals without exponent from `low` on, both 0 or more."""
    if high is not None and (high < low or (high == low and (low_open or high_open))):
        return NOTHING
    if high == low:
        return seq(literal(str(low)), _zeros())
    nonzero = Chars(((0x31, 0x39),))
    some = Repeat(_DIGIT, 0, None)
    above = seq(literal(str(low)), literal("."), some, nonzero, some)
    parts = [above if low_open else seq(literal(str(low)), Repeat(_fraction(), 0, 1))]
    last = None if high is None else high - 1
    parts.append(seq(_integers(low + 1, False, last, False), Repeat(_fraction(), 0, 1)))
    if high is not None and not high_open:
        parts.append(seq(literal(str(high)), _zeros()))
    return alt(*(part for part in parts if part != NOTHING))


def _integers(low: int, low_open: bool, high: int | None, high_open: bool) -> Node:
    """Return integers from `low` on, both 0 or more, without leading zeros."""
    low += low_open
    high = high if high is None or not high_open else high - 1
    if high is not None and high < low:
        return NOTHING
    if high is None:
        width = len(str(low))
        longer = seq(Chars(((0x31, 0x39),)), Repeat(_DIGIT, width, None))
        if low == 0:
            return alt(literal("0"), seq(Chars(((0x31, 0x39),)), Repeat(_DIGIT, 0, None)))
        return alt(_between(str(low), "9" * width), longer)
    parts: list[Node] = []
    while low <= high:
        last = min(high, 10 ** len(str(low)) - 1)
        parts.append(_between(str(low), str(last)))
        low = last + 1
    return alt(*parts)


def _between(low: str, high: str) -> Node:
    """Return the digits from `low` to `high`, of equal length."""
    if not low:
        return EMPTY
    if low[0] == high[0]:
        return seq(literal(low[0]), _between(low[1:], high[1:]))
    width = len(low) - 1
    first, last = int(low[0]), int(high[0])
    parts: list[Node] = []
    if low[1:] != "0" * width:
        parts.append(seq(literal(low[0]), _between(low[1:], "9" * width)))
        first += 1
    ends_early = high[1:] != "9" * width
    if ends_early:
        last -= 1
    if first <= last:
        middle = Chars(((0x30 + first, 0x30 + last),))
        parts.append(seq(middle, Repeat(_DIGIT, width, width)) if width else middle)
    if ends_early:
        parts.append(seq(literal(high[0]), _between("0" * width, high[1:])))
    return alt(*parts)


def _jsonify(node: Node) -> Node:
    """Return the texts inside quotes that stand for the texts of a node.

    Characters that JSON escapes have their short escape; control characters without one are left
    out.
    """
    if isinstance(node, Chars):
        plain = _overlap(node.ranges, _PLAIN)
        held = [c for c in _SHORT_ESCAPES if any(lo <= ord(c) <= hi for lo, hi in node.ranges)]
        options: list[Node] = [Chars(plain)] if plain else []
        if held:
            options.append(seq(literal("\\"), chars("".join(_SHORT_ESCAPES[c] for c in held))))
        return alt(*options)
    if isinstance(node, Repeat):
        inner = _jsonify(node.item)
        if inner == NOTHING:
            return EMPTY if node.low == 0 else NOTHING
        return Repeat(inner, node.low, node.high)
    if isinstance(node, Seq):
        return seq(*map(_jsonify, node.items))
    assert isinstance(node, Alt), node
    return alt(*(found for item in node.items if (found := _jsonify(item)) != NOTHING))


def _overlap(a: Iterable[tuple[int, int]], b: Iterable[tuple[int, int]]) -> Any:
    right = tuple(b)
    return merge(
        (max(lo, low), min(hi, high))
        for lo, hi in a
        for low, high in right
        if max(lo, low) <= min(hi, high)
    )


def _none_of(words: Mapping[str, object]) -> Node:
    """Return every text but some words."""
    anything = Repeat(_ONE_CHAR, 0, None)
    heads: dict[str, dict[str, object]] = {}
    for word in words:
        if word:
            heads.setdefault(word[0], {})[word[1:]] = None
    others = complement(merge((ord(c), ord(c)) for c in heads))
    parts: list[Node] = [] if "" in words else [EMPTY]
    parts.append(seq(Chars(others), anything))
    parts += [seq(literal(head), _none_of(tails)) for head, tails in heads.items()]
    return alt(*parts)


def _lengths(node: Node) -> tuple[int, int | None]:
    """Return the shortest and longest number of characters of a node's texts."""
    if isinstance(node, Chars):
        return 1, 1
    if isinstance(node, Repeat):
        low, high = _lengths(node.item)
        most = None if node.high is None or high is None else high * node.high
        return low * node.low, 0 if high == 0 else most
    assert isinstance(node, Seq | Alt), node
    found = [_lengths(item) for item in node.items]
    lows, highs = [low for low, _ in found], [high for _, high in found]
    unbounded = any(high is None for high in highs)
    if isinstance(node, Seq):
        return sum(lows), None if unbounded else sum(high or 0 for high in highs)
    return min(lows, default=0), None if unbounded else max(
        (high or 0 for high in highs), default=0
    )
