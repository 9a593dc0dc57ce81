"""Lines of JSONL that are records of one suite: read the same way everywhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

__all__ = ["record_of"]

T = TypeVar("T")


def record_of(line: str, suite: str, make: Callable[..., T]) -> T:
    """Return the record of a line; raises ValueError when it is no record of this suite."""
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError(f"not a record of {suite}")
    if (found.pop("format", 0), found.pop("suite", "")) != (1, suite):
        raise ValueError(f"not a record of {suite}")
    try:
        return make(**found)
    except TypeError as error:
        raise ValueError(f"not a record of {suite}: {error}") from error
