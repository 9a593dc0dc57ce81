"""The page of the evaluation shows what the kept records say."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer.bench.evaldata import data_sha256
from deepinfer.bench.evalreport import last_run, summary

ROOT = Path(__file__).parents[2]
FILE = ROOT / "benchmarks" / "eval-demo.jsonl"


@pytest.mark.skipif(not FILE.exists(), reason="no records are kept")
def test_the_page_shows_the_records() -> None:
    records = last_run(FILE)
    assert summary(records) in (ROOT / "docs" / "eval.md").read_text("utf-8")
    assert {record.data for record in records} == {data_sha256()}
    assert records[0].limit is None and records[0].model == "demo"
