"""The page of the evaluation shows what the kept records say, and these reach what they should."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer.bench.evaldata import data_sha256
from deepinfer.bench.evalreport import EvalRecord, last_run, summary, verdicts

ROOT = Path(__file__).parents[2]
FILE = ROOT / "benchmarks" / "eval-demo.jsonl"

MISSED: set[str] = set()


@pytest.fixture(scope="module")
def records() -> list[EvalRecord]:
    """The kept run."""
    return last_run(FILE)


def test_the_page_shows_the_records(records: list[EvalRecord]) -> None:
    assert summary(records) in (ROOT / "docs" / "eval.md").read_text("utf-8")
    assert {record.data for record in records} == {data_sha256()}
    assert records[0].limit is None and records[0].model == "demo"


def test_the_records_reach_their_goals(records: list[EvalRecord]) -> None:
    """What is missed is named here: nothing joins it unseen, and nothing stays by habit."""
    found = list(verdicts([record.figure for record in records]))
    assert len(found) == 7
    assert {verdict.what for verdict in found if not verdict.met} == MISSED


def test_experts_are_used_within_bounds(records: list[EvalRecord]) -> None:
    """Over all held-out text 0.2x to 4x; within one source some rest, but none takes more."""
    loads = [r.figure for r in records if r.figure.task == "experts"]
    assert len({f.labels["source"] for f in loads}) == 7
    assert all(0.2 <= f.value <= 4 for f in loads if f.labels["source"] == "natural")
    assert all(0 < f.value <= 4 for f in loads)
