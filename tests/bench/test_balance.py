"""The table of synthetic skews, steps from recorded routing, and how figures come out."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from deepinfer.bench import balance as suite
from deepinfer.bench.balance import Routing, measure_balance, steps_of, synthetic_loads
from deepinfer.config.engine import EngineConfig
from deepinfer.parallel.balance import plan_by_steps
from deepinfer.parallel.placement import balancedness, initial_placement


@pytest.mark.parametrize(
    ("skew", "ranks", "copies", "wanted"),
    [("mild", 64, 64, 0.88), ("strong", 64, 64, 0.73), ("mild", 8, 16, 0.97)],
)
def test_table_on_unseen_steps(
    skew: Literal["mild", "strong"], ranks: int, copies: int, wanted: float
) -> None:
    """Mean over rank with the most load, as parallelism's specification foresees it."""
    found, before = [], []
    for seed in range(2):
        loads = synthetic_loads(skew, seed, 24)
        plan = plan_by_steps(loads[:16], ranks, 384 + copies)
        found.append(balancedness(plan, loads[16:]))
        before.append(balancedness(initial_placement(1, 384, ranks, copies), loads[16:]))
    assert np.mean(found) >= wanted - 0.005
    assert np.mean(before) < np.mean(found) - 0.05


def test_synthetic_loads() -> None:
    loads = synthetic_loads("strong", 3, 40)
    assert loads.shape == (40, 1, 384)
    assert (loads.sum(axis=2) == 4096 * 6).all()
    mean = loads.mean(axis=0)[0]
    assert mean.max() / mean.mean() == pytest.approx(12, rel=0.12)
    assert np.array_equal(loads[:4], synthetic_loads("strong", 3, 4))


def routing(texts: int, length: int) -> Routing:
    rng = np.random.default_rng(0)
    chosen = np.stack(
        [
            np.stack([rng.permutation(8)[:2] for _ in range(2 * length)]).reshape(2, length, 2)
            for _ in range(texts)
        ]
    )
    return Routing(chosen.astype(np.int16), 8)


def test_steps() -> None:
    found = routing(5, 6)
    steps = list(steps_of(found, 2, 3))
    assert len(steps) == 4  # two groups of two texts, the fifth left over
    for rows, where in steps:
        assert rows.shape == (2, 6, 2)
        for row, (text, at) in enumerate(where):
            assert np.array_equal(rows[:, row], found.chosen[text, :, at])
    seen = [tuple(pair) for _, where in steps for pair in where.tolist()]
    assert sorted(seen) == [(text, at) for text in range(4) for at in range(6)]


def test_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "SIZES", ((8, 16),))
    monkeypatch.setattr(suite, "_TOKENS", (1, 8))
    monkeypatch.setattr(suite, "_SOURCES", {"natural": (32, 64), "generated": (32, 128)})
    monkeypatch.setattr(suite, "collect_routing", lambda *given: routing(256, 32))
    told: list[str] = []
    records = measure_balance("demo", Path("."), EngineConfig(), 256, 1, told.append)
    assert len(told) == 4
    by_name = {record.figure.name: record for record in records}
    assert len(by_name) == len(records)
    mild = by_name["mild EP8+16 steps"]
    assert (mild.model, mild.suite, mild.figure.unit) == ("synthetic", "balance", "max/mean")
    assert 1 <= mild.figure.median < by_name["mild EP8+16 none"].figure.median
    real = by_name["natural real EP4 64 tokens steps"]
    assert real.model == "demo"
    assert "8 experts in 12 slots" in real.figure.how
    assert all(value >= 1 for record in records for value in record.figure.values)
