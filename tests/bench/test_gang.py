"""Benchmarks over ranks: what they time is right first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer.bench import exchange, scaling


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_come_back_right_before_they_are_timed(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    shape = ["--width", "64", "--experts", "16", "--rows", "3", "--bytes", "4096"]
    exchange.main([*shape, "--back-ends", "exact,symm", "--out", str(out)])
    alone, exact, symm = read(out)
    assert alone["what"] == "all_to_all" and alone["bytes"] == 2048
    assert exact["right"] is True and float(str(exact["share"])) > 0
    assert "needs GPUs" in str(symm["error"])


def test_steps_of_two_ranks_beside_one(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    shape = ["--dims", "golden", "--depth", "1", "--sequences", "2", "--context", "40"]
    scaling.main([*shape, "--back-ends", "exact,symm", "--out", str(out)])
    lines = read(out)
    by_name = {str(line["what"]): line for line in lines if "step_us" in line}
    assert [line["bits_equal"] for line in lines if "bits_equal" in line] == [True]
    assert set(by_name) == {"exact", "slice", "whole"}
    assert "needs GPUs" in str(lines[-1]["error"])
    exact = by_name["exact"]
    efficiency = float(str(exact["slice_us"])) / float(str(exact["step_us"]))
    assert float(str(exact["efficiency"])) == pytest.approx(efficiency, abs=2e-3)
