"""The suite of structured output, small."""

from __future__ import annotations

import pytest

from deepinfer.bench.grammar import measure_grammar
from deepinfer.config.engine import GrammarConfig


@pytest.mark.parametrize("backend", ["llguidance"])
def test_every_figure_is_measured(backend: str) -> None:
    config = GrammarConfig(backend=backend, threads=1)  # type: ignore[arg-type]
    records = measure_grammar(config, 1, rows=4, steps=3, vocab_size=600, device_s=0.001)
    names = [record.figure.name for record in records]
    assert len(set(names)) == len(names) and "masks of 4 rows, 3 drafts CPU p99" in names
    assert {record.suite for record in records} == {"grammar"}
    assert all(value >= 0 for record in records for value in record.figure.values)
    assert records[0].settings == {"grammar.threads": 1}
