"""`deepinfer synth` writes what `inspect` accepts."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from deepinfer.cli import synth
from deepinfer.errors import CheckpointError
from deepinfer.weights.reader import Checkpoint

BETA = Path(__file__).parents[1] / "data" / "beta" / "config.json"


def call(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    synth.add_parser(parser.add_subparsers())
    args = parser.parse_args(["synth", *argv])
    result: int = args.func(args)
    return result


def test_writes_once_and_again_by_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--config", str(BETA), "--seed", "5", "--out", str(tmp_path / "x")]
    assert call(*argv) == 0
    assert "bytes in 4 shards, seed 5" in capsys.readouterr().out
    assert Checkpoint.open(tmp_path / "x").config.vocab_size == 320
    with pytest.raises(CheckpointError, match="holds a checkpoint already"):
        call(*argv)
    assert call(*argv, "--force") == 0


@pytest.mark.parametrize(
    "argv", [["--seed", "1"], ["--config", "x"], ["--seed", "one"], ["--seed=-1"]]
)
def test_usage_errors(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        call(*argv)
    assert caught.value.code == 2
