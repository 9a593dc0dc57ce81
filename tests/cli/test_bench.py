"""`deepinfer bench`: what it prints and keeps, and what it refuses before measuring."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from deepinfer.bench import balance as placing
from deepinfer.bench import cpu as suite
from deepinfer.bench.report import Figure, Record, read
from deepinfer.cli import bench
from deepinfer.cli.common import UsageError
from deepinfer.cli.main import main
from deepinfer.device.cpu import CpuDevice
from deepinfer.errors import ConfigError

RECORD = Record(
    suite="cpu",
    figure=Figure(name="load", unit="s", better="lower", values=(0.5,), warmup=0, how="x"),
    model="golden",
    when="2026-01-02T03:04:05+00:00",
    threads=1,
)


def call(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    args = parser.parse_args(["bench", *argv])
    result: int = args.func(args)
    return result


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Arguments of every measurement asked for; none runs."""
    calls: list[tuple[Any, ...]] = []

    def measure(model: str, config: Any, repeat: int, **more: Any) -> list[Record]:
        calls.append((model, config.to_dotted()["numerics.mode"], repeat))
        return [RECORD]

    monkeypatch.setattr(suite, "measure_cpu", measure)
    return calls


def test_measures_prints_and_appends(
    tmp_path: Path, asked: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.jsonl"
    argv = ["cpu", "--repeat", "3", "--set", "numerics.mode=noq", "--out", str(file)]
    assert call(*argv) == 0
    assert call(*argv) == 0
    assert asked == [("golden", "noq", 3)] * 2
    assert read(file) == [RECORD, RECORD]
    printed = capsys.readouterr()
    assert "load" in printed.out
    assert "1 records added" in printed.err
    assert call("show", str(file)) == 0
    assert capsys.readouterr().out.count("load") == 2


def test_keeps_nothing_unless_asked(
    tmp_path: Path, asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("cpu") == 0
    assert asked == [("golden", "official", 5)]
    assert not list(tmp_path.iterdir())


def test_balance(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[Any, ...]] = []

    def measure(model: str, folder: Path, config: Any, texts: int, seeds: int, **more: Any) -> Any:
        asked.append((model, folder.name, texts, seeds))
        return [RECORD]

    monkeypatch.setattr(placing, "measure_balance", measure)
    assert call("balance", "--texts", "7", "--repeat", "2") == 0
    assert asked == [("demo", "demo", 7, 2)]
    assert "load" in capsys.readouterr().out


def test_refuses_before_measuring(tmp_path: Path, asked: list[tuple[Any, ...]]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        call("cpu", "--out", str(tmp_path / "file" / "x.jsonl"))
    with pytest.raises(UsageError, match="numerics"):
        call("cpu", "--set", "numerics.mode=fast")
    with pytest.raises(ConfigError, match="does not exist"):
        call("cpu", "--model", str(tmp_path / "none"))
    assert asked == []


@pytest.mark.parametrize("argv", [[], ["cpu", "--repeat", "0"], ["gpu"], ["show", "a", "b"]])
def test_usage_errors(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        call(*argv)
    assert caught.value.code == 2


@pytest.mark.parametrize("form", ["decode", "slice"])
def test_steps_that_no_memory_holds_are_refused(
    form: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(CpuDevice, "available_bytes", lambda self: 10**9)
    assert main(["bench", form, "--device", "cpu", "--depth", "3"]) == 1
    assert "alone take" in capsys.readouterr().err


def test_an_empty_file_holds_no_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kept.jsonl"
    file.write_text("\n\n")
    for argv in (
        ["bench", "show"],
        ["sim", "check"],
        ["sim", "run", "--kernels"],
        ["eval", "--read"],
    ):
        assert main([*argv, str(file)]) == 1
        assert capsys.readouterr().err == f"deepinfer: {file} holds no records\n"


def test_show_of_an_absent_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        call("show", str(tmp_path / "none.jsonl"))
