"""Structured: what shape a request's output must have (pure).

A value object that engine and command line pass around. Whether a grammar library can enforce it is
the compiler's matter (`grammar/compiler.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from json import dumps, loads
from numbers import Integral
from typing import Final, Literal

from deepinfer.errors import RequestError, json_kind, json_problem, unique_keys

__all__ = ["Kind", "Structured"]

Kind = Literal["json", "regex", "ebnf", "choice"]

_KINDS: Final[tuple[Kind, ...]] = ("json", "regex", "ebnf", "choice")
_ALIAS_KEYS: Final = ("schema_type", "schema", "trigger_token_ids", "bound_token_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Structured:
    """The shape of one request's output. Exactly one of `json`, `regex`, `ebnf` and `choice`.

    json     a JSON Schema (draft 2020-12, or the one that its `$schema` names): a mapping, True for
             any JSON, or the text of a schema; stored as text
    regex    a pattern in Python's syntax that the whole output must match
    ebnf     a grammar in the GBNF dialect; its start rule is `root`
    choice   texts, one of which the output must be
    trigger  ids, or a text that a tokenizer turns into them: output is free until exactly this
             sequence has been generated; the shape holds from the next token on
    bound    needs a trigger: when this id (or text of one token) is generated while the output is
             still free, the trigger is forced token by token
    strict   refuse a schema with any keyword that can only be approximated
    closed   objects with `properties` take no others, where the schema does not say

    Raises RequestError listing every bad field.
    """

    json: str | bool | Mapping[str, object] | None = None
    regex: str | None = None
    ebnf: str | None = None
    choice: Iterable[str] | None = None
    trigger: str | Iterable[int] = ()
    bound: str | int | None = None
    strict: bool = False
    closed: bool = False

    def __post_init__(self) -> None:
        """Check every field, then store each in one canonical form."""
        problems: list[str] = []
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            problems.append(f"exactly one of {', '.join(_KINDS)} must be given, not {found}")
        if self.json is not None:
            self._put("json", _schema_text(self.json, problems))
        for name in ("regex", "ebnf"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                problems.append(f"{name} must be a text, not {type(value).__name__}")
            elif value is not None:
                problems += _surrogates(name, value)
        if self.choice is not None:
            self._check_choice(problems)
        self._check_trigger(problems)
        for name in ("strict", "closed"):
            if not isinstance(getattr(self, name), bool):
                problems.append(f"{name} must be True or False, not {getattr(self, name)!r}")
        if problems:
            raise RequestError("Structured cannot be used", problems)

    @classmethod
    def of(cls, value: object) -> Structured:
        """Return a Structured as it is, or build one from a mapping.

        The mapping holds fields of this class, or the keys `schema_type` ("json", "regex", "ebnf"),
        `schema`, `trigger_token_ids` and `bound_token_id`. Raises RequestError for anything else.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise RequestError(
                f"structured must be a Structured or a mapping, not {type(value).__name__}"
            )
        if "schema_type" in value or "schema" in value:
            return cls._of_alias(value)
        known = cls.__slots__  # the fields' names
        unknown = [str(key) for key in value if key not in known]
        if unknown:
            raise RequestError(
                f"structured holds {', '.join(unknown)}; the fields are {', '.join(known)}"
            )
        return cls(**value)

    @classmethod
    def _of_alias(cls, value: Mapping[str, object]) -> Structured:
        unknown = [str(key) for key in value if key not in _ALIAS_KEYS]
        kind, schema = value.get("schema_type"), value.get("schema")
        problems = [f"{key}: unknown key; the keys are {', '.join(_ALIAS_KEYS)}" for key in unknown]
        if kind not in ("json", "regex", "ebnf"):
            problems.append(f"schema_type must be 'json', 'regex' or 'ebnf', not {kind!r}")
        if not isinstance(schema, str):
            problems.append(f"schema must be a text, not {type(schema).__name__}")
        trigger = value.get("trigger_token_ids")
        if trigger is not None and (isinstance(trigger, str) or not isinstance(trigger, Iterable)):
            problems.append(f"trigger_token_ids must be token ids, not {trigger!r}")
        bound = value.get("bound_token_id")
        if isinstance(bound, str):
            problems.append(f"bound_token_id must be a token id, not {bound!r}")
        if problems:
            raise RequestError("structured cannot be used", problems)
        return cls(
            **{str(kind): schema},  # type: ignore[arg-type]  # one of the kinds, and a text
            trigger=() if trigger is None else trigger,  # type: ignore[arg-type]  # checked by the class
            bound=bound,  # type: ignore[arg-type]
            closed=kind == "json",
        )

    @property
    def kind(self) -> Kind:
        """Which of the four is given."""
        return next(name for name in _KINDS if getattr(self, name) is not None)

    @property
    def text(self) -> str:
        """The schema, pattern or grammar as one text; choices as a JSON list."""
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else dumps(value, ensure_ascii=False)

    @property
    def choices(self) -> tuple[str, ...]:
        """`choice` in its stored form; empty for the other kinds."""
        return self.choice if isinstance(self.choice, tuple) else ()

    @property
    def trigger_ids(self) -> tuple[int, ...]:
        """`trigger` in its stored form; only once its text has been turned into ids."""
        assert isinstance(self.trigger, tuple), self.trigger
        return self.trigger

    @property
    def bound_id(self) -> int | None:
        """`bound` once its text has been turned into an id."""
        assert not isinstance(self.bound, str), self.bound
        return self.bound

    def _put(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_choice(self, problems: list[str]) -> None:
        given = self.choice
        texts = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else ()
        if not texts or not all(isinstance(text, str) for text in texts):
            problems.append(f"choice must be one or several texts in a list, not {given!r}")
            return
        for text in texts:
            problems += _surrogates("choice", text)
        self._put("choice", tuple(dict.fromkeys(texts)))

    def _check_trigger(self, problems: list[str]) -> None:
        trigger, bound = self.trigger, self.bound
        if not isinstance(trigger, str):
            ids = tuple(trigger) if isinstance(trigger, Iterable) else (None,)
            checked = tuple(int(i) for i in ids if i is not None and _is_id(i))
            if len(checked) == len(ids):
                self._put("trigger", checked)
            else:
                problems.append(f"trigger must be a text or token ids >= 0, not {trigger!r}")
        if bound is None:
            return
        if not (isinstance(bound, str) and bound) and not _is_id(bound):
            problems.append(f"bound must be a token id >= 0 or the text of one, not {bound!r}")
        elif not isinstance(bound, str):
            self._put("bound", int(bound))
        if self.trigger == () or self.trigger == "":
            problems.append("bound needs a trigger: it forces the trigger once it is generated")


def _is_id(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 0


def _surrogates(name: str, text: str) -> list[str]:
    """Return the problem of a text that holds code points which are no characters."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return [f"{name} holds a lone surrogate at character {error.start}"]
    return []


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


def _schema_text(value: object, problems: list[str]) -> str | None:
    """Return a schema as JSON text, with the order of its keys kept."""
    if isinstance(value, str):
        try:
            parsed = loads(value, parse_constant=_no_constant, object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            problems.append(f"json is no JSON: {json_problem(error)}")
            return None
    else:
        parsed = value
    if not isinstance(parsed, Mapping | bool):
        problems.append(
            f"json must be a schema (an object, true or false), not {json_kind(parsed)}"
        )
        return None
    try:
        text = dumps(_plain(parsed), ensure_ascii=False, allow_nan=False)
    except TypeError as error:
        problems.append(f"json is no JSON: {error}")
        return None
    except (ValueError, RecursionError) as error:
        problems.append(f"json is no JSON: {json_problem(error)}")
        return None
    problems += _surrogates("json", text)
    return text


def _plain(value: object) -> object:
    """Return a value with every mapping as a dict and every tuple as a list."""
    if isinstance(value, Mapping):
        bad = [key for key in value if not isinstance(key, str)]
        if bad:
            raise TypeError(f"the key {bad[0]!r} is no text")
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
