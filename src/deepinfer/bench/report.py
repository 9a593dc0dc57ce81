"""Figures as JSON lines, and the table that people read (pure)."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, Literal, Protocol, TypeVar

from deepinfer.config.engine import EngineConfig
from deepinfer.config.fields import show
from deepinfer.errors import ConfigError, json_problem

__all__ = ["Figure", "Record", "append", "changed_settings", "read", "read_lines", "table"]

_FORMAT: Final = 1
_Line = TypeVar("_Line")


def changed_settings(config: EngineConfig) -> dict[str, object]:
    """Return the settings that are not the defaults, by dotted key."""
    plain = EngineConfig().to_dotted()
    return {key: value for key, value in config.to_dotted().items() if value != plain[key]}


class _Spelled(Protocol):
    def to_json(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured figure.

    values  one a repeat, in the order taken; warm-up runs are not among them
    warmup  runs before the first value
    better  which direction is better
    how     what exactly was measured
    """

    name: str
    unit: str
    better: Literal["higher", "lower"]
    values: tuple[float, ...]
    warmup: int
    how: str

    @property
    def median(self) -> float:
        """The middle value."""
        return statistics.median(self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A figure with everything that it depends on.

    settings  dotted keys that differ from the defaults
    when      UTC, to the second
    """

    suite: str
    figure: Figure
    model: str
    when: str
    threads: int
    machine: Mapping[str, str | int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the record as one line."""
        values = self.figure.values
        spread = {"min": min(values), "median": self.figure.median, "max": max(values)}
        return json.dumps({"format": _FORMAT, **asdict(self), **spread}, ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> Record:
        """Read what `to_json` wrote; raises ValueError when the line is no record."""
        found = json.loads(line)
        if not isinstance(found, dict) or found.get("format") != _FORMAT:
            raise ValueError(f"expected an object of format {_FORMAT}, found {show(found)}")
        for derived in ("format", "min", "median", "max"):
            found.pop(derived, None)
        try:
            figure = found.pop("figure")
            values = tuple(float(value) for value in figure.pop("values"))
            record = cls(figure=Figure(values=values, **figure), **found)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"not a record: {error}") from error
        if not values:
            raise ValueError("not a record: no values")
        return record


def append(file: Path, records: Iterable[_Spelled]) -> None:
    """Add records to the end of a file, making it and its folder when absent."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        out.writelines(record.to_json() + "\n" for record in records)


def read(file: Path) -> list[Record]:
    """Read the records of a file; raises ConfigError naming the first bad line."""
    return read_lines(file, Record.from_json)


def read_lines(file: Path, parse: Callable[[str], _Line]) -> list[_Line]:
    """Parse the lines of a file that are not empty; `parse` raises ValueError for a bad one.

    Raises ConfigError naming the first bad line, or saying that there is none at all.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {file}: {json_problem(error)}") from error
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            records.append(parse(line))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file}, line {number}: {json_problem(error)}") from error
    if not records:
        raise ConfigError(f"{file} holds no records")
    return records


def table(records: Sequence[Record]) -> str:
    """Lay records out, one block for each run: machine and versions, then its figures."""
    blocks: list[str] = []
    head = ""
    for record in records:
        title = _title(record)
        if title != head:
            head = title
            blocks.append(("\n" if blocks else "") + title)
            blocks.append(f"  {'figure':<28} {'least':>10} {'middle':>10} {'most':>10}  unit")
        figure = record.figure
        low, middle, high = min(figure.values), figure.median, max(figure.values)
        blocks.append(
            f"  {figure.name:<28} {_number(low):>10} {_number(middle):>10} {_number(high):>10}  "
            f"{figure.unit} ({len(figure.values)} runs, {figure.better} is better)"
        )
    return "\n".join(blocks)


def _title(record: Record) -> str:
    machine, versions = record.machine, record.versions
    memory = machine.get("memory_bytes", 0)
    size = f"{memory / 2**30:.1f} GiB, " if isinstance(memory, int) and memory else ""
    lines = [
        f"{record.suite} {record.when}, model {record.model}",
        f"  {machine.get('cpu', '?')}, {machine.get('cpu_count', '?')} processors, {size}"
        f"{machine.get('system', '?')}; {record.threads} threads of torch",
        "  " + ", ".join(f"{name} {version}" for name, version in versions.items()),
    ]
    if record.settings:
        lines.append("  " + ", ".join(f"{k} = {show(v)}" for k, v in record.settings.items()))
    return "\n".join(lines)


def _number(value: float) -> str:
    """Spell a number with three or four digits that count."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
