"""The JSON-Schema test suite: what is recorded, and the run itself where the suite is at hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.grammar.helpers import BACKENDS
from tests.grammar.json_suite import DRAFT, byte_vocabulary, run_file

from deepinfer.config.engine import GrammarConfig
from deepinfer.grammar.compiler import GrammarService

ROOT = Path(__file__).parents[2]
SUITE = ROOT / ".venv" / "jsonschema-4.26.0" / "json" / "tests"  # `make json-suite` brings it


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_record_holds_no_wrongly_accepted_document(backend: str) -> None:
    lines = (ROOT / "benchmarks" / f"json-suite-{backend}.jsonl").read_text("utf-8").splitlines()
    records = {record["file"]: record for record in map(json.loads, lines)}
    total = records["(all)"]
    assert total["documents"] > 1000 and total["valid_accepted"] > 650
    assert total["wrong"] == 0 and total["grammar_wrong_though_exact"] == 0
    assert all(record["wrong"] == 0 for name, record in records.items() if "optional" not in name)


@pytest.mark.skipif(not SUITE.is_dir(), reason="the suite is not at hand: make json-suite")
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_document_is_wrongly_accepted(backend: str) -> None:
    service = GrammarService(GrammarConfig(backend=backend, threads=1), byte_vocabulary)
    for path in sorted((SUITE / DRAFT).glob("*.json")):
        outcome = run_file(path, service)
        assert outcome.wrong == 0 and outcome.grammar_wrong_though_exact == 0, outcome
