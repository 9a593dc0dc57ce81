"""Every exception that DeepInfer raises on purpose.

A message says what was given, what is accepted and what to do. When several things are wrong at
once they travel together in `problems`, one short sentence each. Internal mistakes are assertions
and are not listed here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

__all__ = [
    "CacheError",
    "CheckpointError",
    "ConfigError",
    "DeepInferError",
    "NumericalError",
    "ProtocolError",
    "RankError",
    "RequestError",
    "ShapeError",
    "StateError",
    "TokenizerError",
    "UnsupportedError",
    "json_kind",
    "json_problem",
    "unique_keys",
]


def json_problem(error: ValueError | RecursionError) -> str:
    """Return what a JSON reader's error says, in words that need no knowledge of the reader."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply; some hundred levels are accepted"
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at line {error.lineno} column {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8: {error.reason} at byte {error.start}"
    return str(error)


def unique_keys(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """Build a JSON object, for `object_pairs_hook`; raises ValueError when a key comes twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(
            f"repeated key {', '.join(sorted({k for k in keys if keys.count(k) > 1}))}"
        )
    return result


def json_kind(value: object) -> str:
    """Return what JSON calls a value, with its article."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    if value is None:
        return "null"
    return names.get(type(value), "a number" if isinstance(value, int | float) else "no JSON value")


class DeepInferError(Exception):
    """Base of all errors raised on purpose; catch it to catch them all.

    message   one sentence that stands alone
    problems  zero or more details, printed one a line below the message
    """

    message: str
    problems: tuple[str, ...]

    def __init__(self, message: str, problems: Iterable[str] = ()) -> None:
        self.message = message
        self.problems = tuple(problems)
        super().__init__(message, self.problems)

    def __str__(self) -> str:
        """Return the message, then every problem on an indented line of its own."""
        return "\n".join([self.message, *(f"  - {problem}" for problem in self.problems)])


class ConfigError(DeepInferError):
    """A value of `config.json`, a setting or an option is missing, unknown or not supported."""


class CheckpointError(DeepInferError):
    """A checkpoint folder is absent, incomplete, damaged or does not match its config."""


class TokenizerError(DeepInferError):
    """A tokenizer file is absent, unreadable or disagrees with the config."""


class RequestError(DeepInferError):
    """One request cannot be served as given; its completion ends with reason `invalid_request`."""


class ProtocolError(RequestError):
    """A protocol body cannot be served; `status` and `body` are what its sender is to be told."""

    def __init__(self, message: str, *, status: int = 400, body: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        error = {"message": message, "type": kind, "param": None, "code": kind}
        self.body = json.dumps({"error": error}) if body is None else body


class NumericalError(DeepInferError):
    """A computation produced NaN or infinity; the message names the layer."""


class UnsupportedError(DeepInferError):
    """Something that exists elsewhere is missing here: a device, an optional package, a feature."""

    @classmethod
    def missing_extra(cls, package: str, extra: str, needed_for: str) -> UnsupportedError:
        """Build the error for an optional package that is absent, naming the extra to install."""
        return cls(
            f"{needed_for} needs the package '{package}', which is not installed: "
            f"pip install 'deepinfer[{extra}]'"
        )


class CacheError(DeepInferError):
    """The caches cannot hold what was asked for; the message names the settings that change it."""


class RankError(DeepInferError):
    """A process of an engine of several ranks has ended, hangs or failed; the engine has ended with
    it. The message names the rank and its last step. What had finished is with the caller, and
    `deepinfer run` goes on from there.
    """


class ShapeError(DeepInferError):
    """A tensor given to an op has the wrong shape, dtype or layout."""


class StateError(DeepInferError):
    """A saved request cannot be read, or belongs to other weights, config or arithmetic."""
