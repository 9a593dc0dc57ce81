"""Families of shapes for random walks: a generator each, from a random source."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from deepinfer import Structured
from deepinfer.grammar.formats import PATTERNS as PATTERNS_OF_FORMATS

__all__ = ["FAMILIES"]

PATTERNS = ("[a-c]{1,3}", r"\d{2}-\d{2}", "(ab|hello)+", "^[A-Z][a-z]*$", "[^x]{0,4}", r"\w+@\w+")

UNANCHORED = tuple(pattern for pattern in PATTERNS if "$" not in pattern)


def scalar(rng: random.Random) -> Any:
    """Return a schema of a scalar."""
    low = rng.randrange(-20, 20)
    return rng.choice(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"type": "integer"},
            {"type": "integer", "minimum": low, "maximum": low + rng.randrange(40)},
            {"type": "number", "exclusiveMinimum": low},
            {"type": "number"},
            {"type": "string", "maxLength": rng.randrange(1, 6)},
            {"type": "string", "minLength": 1, "maxLength": 3},
            {"type": "string", "pattern": rng.choice(PATTERNS)},
            {"enum": rng.sample(["x", "hello", 1, -2, None, True, 'q"', "é"], 3)},
            {"const": rng.choice(["only", 7, [1, {"a": None}]])},
        ]
    )


def value(rng: random.Random, depth: int) -> Any:
    """Return a schema of a value, nested up to a depth."""
    if depth == 0 or rng.random() < 0.4:
        return scalar(rng)
    return rng.choice([array, object_, union])(rng, depth - 1)


def array(rng: random.Random, depth: int) -> Any:
    """Return a schema of arrays."""
    schema: dict[str, Any] = {"type": "array", "items": value(rng, depth), "maxItems": 3}
    if rng.random() < 0.3:
        schema["prefixItems"] = [value(rng, depth)]
    if rng.random() < 0.3:
        schema["minItems"] = rng.randrange(3)
    return schema


def object_(rng: random.Random, depth: int) -> Any:
    """Return a schema of objects."""
    names = ["a", *rng.sample(["b", "name", "é", "a b", 'q"'], rng.randrange(3))]
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: value(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False if rng.random() < 0.7 else {"type": "integer"},
    }
    return schema


def union(rng: random.Random, depth: int) -> Any:
    """Return a schema with branches."""
    if rng.random() < 0.3:
        return {"allOf": [{"type": "object", "required": ["a"]}, object_(rng, depth)]}
    return {"anyOf": [value(rng, depth), scalar(rng)]}


def recursive(rng: random.Random) -> Structured:
    """Return a schema of trees or lists."""
    node = {
        "type": "object",
        "properties": {
            "v": scalar(rng),
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]},
            "kids": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2},
        },
        "required": ["v", "next"],
        "additionalProperties": False,
    }
    return Structured(json={"$ref": "#/$defs/n", "$defs": {"n": node}})


def formats(rng: random.Random) -> Structured:
    """Return a schema of texts in formats."""
    names = rng.sample(sorted(PATTERNS_OF_FORMATS), 2)
    texts = [{"type": "string", "format": name} for name in names]
    return Structured(json={"type": "array", "prefixItems": texts, "items": False, "minItems": 1})


def ebnf(rng: random.Random) -> Structured:
    """Return a recursive grammar."""
    opening, closing = rng.choice(["()", "[]", "{}"])
    leaf = rng.choice(["[0-9]{1,3}", '"hello" | "he"', '"\\"" [^"\\n]{0,4} "\\""'])
    return Structured(
        ebnf=f'root ::= "{opening}" (item ("," item)*)? "{closing}"\nitem ::= root | {leaf}\n'
    )


FAMILIES: dict[str, Callable[[random.Random], Structured]] = {
    "scalars": lambda rng: Structured(json=scalar(rng)),
    "arrays": lambda rng: Structured(json=array(rng, 1)),
    "objects": lambda rng: Structured(json=object_(rng, 2)),
    "unions": lambda rng: Structured(json=union(rng, 1)),
    "formats": formats,
    "recursive": recursive,
    "anything": lambda rng: Structured(json=True),
    "patterns": lambda rng: Structured(regex="".join(rng.sample(UNANCHORED, 2))),
    "grammars": ebnf,
    "choices": lambda rng: Structured(choice=rng.sample(["yes", "no", "hello", "hell", "é"], 3)),
}
