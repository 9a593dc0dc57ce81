"""Records survive a file, and bad files say where."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from deepinfer.bench.report import Figure, Record, append, read, table
from deepinfer.errors import ConfigError


def record(
    name: str = "decode_1", values: tuple[float, ...] = (3.0, 1.0, 2.5), **more: str
) -> Record:
    figure = Figure(
        name=name, unit="tokens/s", better="higher", values=values, warmup=1, how="said in words"
    )
    return Record(
        suite="cpu",
        figure=figure,
        model="demo",
        when=more.get("when", "2026-01-02T03:04:05+00:00"),
        threads=2,
        machine={"cpu": "A Processor", "cpu_count": 2, "memory_bytes": 2**34, "system": "Linux"},
        versions={"torch": "2.11.0"},
        settings={"numerics.mode": "noq", "sampling.banned_token_ids": [1, 2]},
    )


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "new" / "cpu.jsonl"
    append(file, [record()])
    append(file, [record("load"), record("other")])
    assert read(file) == [record(), record("load"), record("other")]
    first = json.loads(file.read_text().splitlines()[0])
    assert (first["min"], first["median"], first["max"]) == (1.0, 2.5, 3.0)


@pytest.mark.parametrize(
    "line", ["{", "3", "[]", "{}", '{"format": 1}', '{"format": 2}', "null", '"x"']
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(record().to_json() + "\n\n" + line + "\n")
    with pytest.raises(ConfigError, match="line 3"):
        read(file)


def test_a_record_without_values_is_refused() -> None:
    found = json.loads(record().to_json())
    found["figure"]["values"] = []
    with pytest.raises(ValueError, match="no values"):
        Record.from_json(json.dumps(found))


def test_absent_and_undecodable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read(tmp_path / "none")
    (tmp_path / "x").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        read(tmp_path / "x")


def test_the_table_has_one_heading_for_each_run() -> None:
    later = record("load", when="2026-01-03T00:00:00+00:00")
    text = table([record(), record("decode_16", (1234.5,)), later])
    assert text.count("A Processor, 2 processors, 16.0 GiB") == 2
    assert text.count("numerics.mode") == 2
    (line,) = [line for line in text.splitlines() if "decode_16" in line]
    assert line.split()[1:4] == ["1,234", "1,234", "1,234"]
    (line,) = [line for line in text.splitlines() if "decode_1 " in line]
    assert line.split()[1:4] == ["1", "2.5", "3"]


def test_records_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        record().suite = "x"  # type: ignore[misc]
