"""The last word on JSON output: a JSON Schema validator, made exact and immune to bad patterns.

Patterns are matched by `Automaton`, in linear time, and multiples are exact decimals. Nothing is
fetched: references are followed inside the schema only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import lru_cache
from json import loads
from math import isinf
from typing import Any

from deepinfer.errors import UnsupportedError
from deepinfer.grammar.formats import PATTERNS
from deepinfer.grammar.nodes import Automaton
from deepinfer.grammar.regex import parse_regex
from deepinfer.grammar.schema import DRAFTS

__all__ = ["check_json", "make_check", "make_test", "meta_errors"]

_MAX_SHOWN = 200


def _library() -> Any:
    try:
        import jsonschema
        import jsonschema.validators
    except ImportError as error:
        raise UnsupportedError.missing_extra("jsonschema", "grammar", "a JSON Schema") from error
    return jsonschema


def meta_errors(document: object, draft: str) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield path and message of everything in which a document is no schema of its draft."""
    validator = _meta_validator(draft)
    for error in validator.iter_errors(document):
        deepest = error
        while deepest.context:  # the branch that looked most promising
            deepest = max(deepest.context, key=lambda e: len(e.absolute_path))
        yield tuple(deepest.absolute_path), _short(deepest.message)


@lru_cache(maxsize=8)
def _meta_validator(draft: str) -> Any:
    cls = _base(draft)
    return cls(cls.META_SCHEMA)


def _base(draft: str) -> Any:
    return _library().validators.validator_for({"$schema": draft})


def make_check(schema: dict[str, Any] | bool, draft: str) -> Callable[[str], str | None]:
    """Return the check of a text: None when it is JSON that satisfies the schema."""
    validator: list[Any] = []

    def check(text: str) -> str | None:
        if not validator:
            validator.append(_validator(schema, draft))
        return check_json(text, validator[0])

    return check


def make_test(schema: dict[str, Any] | bool) -> Callable[[dict[str, Any] | bool, Any], bool]:
    """Return a test whether a value satisfies a part of a rewritten schema."""
    validator = _validator(schema, DRAFTS[0])

    def satisfies(part: dict[str, Any] | bool, value: Any) -> bool:
        return bool(validator.evolve(schema=part).is_valid(value))

    return satisfies


def check_json(text: str, validator: Any) -> str | None:
    """Return what is wrong with a text under a validator, or None."""
    try:
        value = loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        return f"the output is no JSON: {error}"
    try:
        found: Any = next(iter(validator.iter_errors(value)), None)
    except RecursionError:
        return "the output is nested too deeply to be checked"
    if found is None:
        return None
    where = "".join(f"/{part}" for part in found.absolute_path) or "/"
    rule = "".join(f"/{part}" for part in found.absolute_schema_path)
    return f"the output violates the schema: {where}: {_short(found.message)} (rule {rule})"


def _short(message: str) -> str:
    return message if len(message) <= _MAX_SHOWN else message[:_MAX_SHOWN] + "..."


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


def _validator(schema: dict[str, Any] | bool, draft: str) -> Any:
    import referencing

    words = _Words()
    cls = _library().validators.extend(
        _base(draft),
        {
            "pattern": words.pattern,
            "patternProperties": words.pattern_properties,
            "additionalProperties": words.additional_properties,
            "multipleOf": _multiple_of,
            "format": words.format,
        },
    )
    return cls(schema, registry=referencing.Registry())


class _Words:
    """Keywords with patterns, whose automata are kept as long as the validator is."""

    def __init__(self) -> None:
        self._automata: dict[str, Automaton] = {}

    def _matches(self, pattern: str, text: str) -> bool:
        found = self._automata.get(pattern)
        if found is None:
            found = self._automata[pattern] = Automaton(parse_regex(pattern, whole=False))
        return found.matches(text)

    def pattern(self, validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
        if validator.is_type(instance, "string") and not self._matches(pattern, instance):
            yield _library().ValidationError(f"{instance!r} does not match {pattern!r}")

    def format(self, validator: Any, name: str, instance: Any, schema: Any) -> Iterator[Any]:
        pattern = PATTERNS.get(name)
        if pattern is not None and validator.is_type(instance, "string"):
            if not self._matches(pattern, instance):
                yield _library().ValidationError(f"{instance!r} is no {name}")

    def pattern_properties(
        self, validator: Any, value: Any, instance: Any, schema: Any
    ) -> Iterator[Any]:
        if not validator.is_type(instance, "object"):
            return
        for pattern, subschema in value.items():
            for key, item in instance.items():
                if self._matches(pattern, key):
                    yield from validator.descend(item, subschema, path=key, schema_path=pattern)

    def additional_properties(
        self, validator: Any, value: Any, instance: Any, schema: Any
    ) -> Iterator[Any]:
        if not validator.is_type(instance, "object"):
            return
        named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        for key, item in instance.items():
            if key not in named and not any(self._matches(p, key) for p in patterns):
                if value is False:
                    yield _library().ValidationError(f"the property {key!r} is not allowed")
                else:
                    yield from validator.descend(item, value, path=key)


def _multiple_of(validator: Any, divisor: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if not validator.is_type(instance, "number"):
        return
    if isinstance(instance, float) and isinf(instance):
        yield _library().ValidationError("a number is too large to be divided")
    elif (Fraction(str(instance)) / Fraction(str(divisor))).denominator != 1:
        yield _library().ValidationError(f"{instance} is not a multiple of {divisor}")
