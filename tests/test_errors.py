"""Errors: one base, readable text, all problems kept."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer import Structured, errors
from deepinfer.config.load import load_engine_config, read_json
from deepinfer.dialog import completions
from deepinfer.jobs.rows import read_row
from deepinfer.jobs.source import Line
from deepinfer.sim.settings import load_settings


def test_all_share_a_base() -> None:
    found = [getattr(errors, name) for name in errors.__all__ if name[0].isupper()]
    assert len(found) > 10 and all(issubclass(kind, errors.DeepInferError) for kind in found)


def test_text_and_problems() -> None:
    error = errors.ConfigError("two things are wrong", ["this", "that"])
    assert str(error) == "two things are wrong\n  - this\n  - that"
    assert error.problems == ("this", "that")
    assert str(errors.CacheError("alone")) == "alone"


@pytest.mark.parametrize("problems", [(), ("a", "b")])
def test_errors_travel_between_processes(problems: tuple[str, ...]) -> None:
    error = pickle.loads(pickle.dumps(errors.RequestError("no", problems)))
    assert type(error) is errors.RequestError
    assert (error.message, error.problems) == ("no", problems)


def test_missing_extra_names_what_to_install() -> None:
    error = errors.UnsupportedError.missing_extra("ray", "ray", "a cluster")
    assert "pip install 'deepinfer[ray]'" in str(error)


DEEP = 200_000  # levels: more than any reader takes


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b'{"a":' * DEEP + b"1" + b"}" * DEEP, "nested too deeply"),
        (b'{"a": 1,}', "at line 1 column "),
        (b"\xff", "not UTF-8"),
        (b"[]", "a list"),
        (b"null", "null"),
        (b"3", "a number"),
    ],
)
def test_whoever_reads_json_says_alike_what_is_wrong(
    text: bytes, told: str, tmp_path: Path
) -> None:
    """Never an error of the reader itself, and no names of Python's types."""
    file = tmp_path / "given.json"
    file.write_bytes(text)
    readers: list[Callable[[], object]] = [
        lambda: read_json(file),
        lambda: completions._read(text),
    ]
    if told != "not UTF-8":
        readers.append(lambda: Structured(json=text.decode()))
    for read in readers:
        with pytest.raises(errors.DeepInferError, match=told):
            read()
    assert told in str(read_row(Line(1, text), "").error)


@pytest.mark.parametrize("load", [load_settings, lambda file: load_engine_config(toml=file)])
def test_settings_nested_too_deeply_are_an_error(
    load: Callable[[Path], object], tmp_path: Path
) -> None:
    for name in ("deep.json", "deep.toml"):
        file = tmp_path / name
        file.write_text("a = " * name.endswith("toml") + "[" * DEEP + "]" * DEEP)
        with pytest.raises(errors.ConfigError, match="deep"):
            load(file)
