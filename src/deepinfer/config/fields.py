"""Reading untrusted mappings: typed values out, every problem noted, nothing raised (pure).

`Section` wraps one JSON object. Each `take_*` call marks a key as known and returns its value, or
None after noting what is wrong; `close` notes the keys that nobody asked for. Cross-field rules
then run over a `Values` view, which skips a rule when a value that it needs is missing or bad, so
that one mistake is reported once.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Rule", "Section", "Values", "near_matches", "run_rules", "show"]


def show(value: object, levels: int = 4) -> str:
    """Spell a value as JSON would, shortened to fit a message; lists go down so many levels."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        text = f'"{value}"'
    elif isinstance(value, (list, tuple)):
        inside = ", ".join(show(item, levels - 1) for item in value) if levels else "..."
        text = f"[{inside}]"
    elif isinstance(value, Mapping):
        text = "an object"
    else:
        text = repr(value)
    return text if len(text) <= 80 else text[:60] + f"... ({len(text)} characters)"


def near_matches(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return '' or a hint that lists up to three known names close to `name`, with the prefix."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f" (did you mean {' or '.join(prefix + each for each in close)}?)" if close else ""


class Section:
    """One JSON object being read: its values, its place in the file, the list of problems."""

    def __init__(self, raw: Mapping[str, object], prefix: str, problems: list[str]) -> None:
        self._raw = raw
        self._prefix = prefix
        self._problems = problems
        self._known: set[str] = set()

    def has(self, key: str) -> bool:
        """Tell whether the key is present, and mark it as known."""
        self._known.add(key)
        return key in self._raw

    def raw(self, key: str) -> object:
        """Return the value as it stands, None when absent, and mark the key as known."""
        self._known.add(key)
        return self._raw.get(key)

    def note(self, key: str, expected: str) -> None:
        """Record that the value of a key is not what is expected, or that the key is missing."""
        if key in self._raw:
            found = f"found {show(self._raw[key])}"
        else:
            found = "missing"
        self._problems.append(f"{self._prefix}{key}: {found}, expected {expected}")

    def section(self, key: str, required: bool = True) -> Section | None:
        """Return the object under a key, or None when it is absent or no object."""
        value = self.raw(key)
        if isinstance(value, Mapping):
            return Section(value, f"{self._prefix}{key}.", self._problems)
        if required or value is not None:
            self.note(key, "an object")
        return None

    def take_int(self, key: str, low: int = 1, high: int | None = None) -> int | None:
        """Return an integer within [low, high]; true and false are no integers."""
        value = self.raw(key)
        if isinstance(value, int) and not isinstance(value, bool):
            if value >= low and (high is None or value <= high):
                return value
        limit = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
        self.note(key, limit)
        return None

    def take_number(self, key: str, low: float, exclusive: bool = False) -> float | None:
        """Return a finite number >= low (> low when `exclusive`) as a float."""
        value = self.raw(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            number = float(value)
            if math.isfinite(number) and (number > low if exclusive else number >= low):
                return number
        self.note(key, f"a finite number {'>' if exclusive else '>='} {low:g}")
        return None

    def take_ints(self, key: str, low: int = 0) -> tuple[int, ...] | None:
        """Return a list of integers, each >= low, as a tuple."""
        value = self.raw(key)
        if isinstance(value, (list, tuple)):
            items = [v for v in value if isinstance(v, int) and not isinstance(v, bool)]
            if len(items) == len(value) and all(v >= low for v in items):
                return tuple(items)
        self.note(key, f"a list of integers >= {low}")
        return None

    def take_flag(self, key: str) -> bool | None:
        """Return a true or false."""
        value = self.raw(key)
        if isinstance(value, bool):
            return value
        self.note(key, "true or false")
        return None

    def expect(self, key: str, accepted: object, required: bool = True, why: str = "") -> None:
        """Note the key unless it holds the one accepted value (or is absent and not required)."""
        if self.has(key) and _same(self._raw[key], accepted):
            return
        if key in self._raw or required:
            self.note(key, show(accepted) + (f" ({why})" if why else ""))

    def ignore(self, keys: Iterable[str]) -> None:
        """Mark keys that carry no meaning here as known."""
        self._known.update(keys)

    def close(self, ignored: Iterable[str] = ()) -> None:
        """Note every key that was never asked for."""
        self.ignore(ignored)
        for key in self._raw:
            if key not in self._known:
                self._problems.append(
                    f"{self._prefix}{key}: unknown key{near_matches(key, self._known)}"
                )


def _same(found: object, accepted: object) -> bool:
    """Compare a JSON value with an accepted one; 1 is not true, and 0 is 0.0."""
    if isinstance(found, bool) or isinstance(accepted, bool):
        return found is accepted
    if isinstance(found, (list, tuple)) and isinstance(accepted, (list, tuple)):
        return len(found) == len(accepted) and all(map(_same, found, accepted))
    return found == accepted


class _Skip(Exception):
    """A rule asked for a value that is missing or bad."""


@dataclass(frozen=True, slots=True)
class Values:
    """Typed look-ups over values that may be missing; a missing one ends the rule that asks."""

    items: Mapping[str, object]

    def one(self, key: str) -> int:
        """Return an integer value."""
        value = self.items.get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise _Skip
        return value

    def many(self, key: str) -> tuple[int, ...]:
        """Return a tuple of integers."""
        value = self.items.get(key)
        if not isinstance(value, tuple):
            raise _Skip
        return value

    def optional(self, key: str) -> int | None:
        """Return an integer value, or None where None is the value."""
        if key not in self.items:
            raise _Skip
        value = self.items[key]
        if value is not None and not isinstance(value, int):
            raise _Skip
        return value


Rule = Callable[[Values], Iterator[str]]


def run_rules(rules: Sequence[Rule], values: Values) -> list[str]:
    """Return the problems that the rules find; a rule stops where a value is missing."""
    problems: list[str] = []
    for rule in rules:
        try:
            problems.extend(rule(values))
        except _Skip:
            continue
    return problems
