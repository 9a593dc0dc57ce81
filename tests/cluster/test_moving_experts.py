"""Experts that move between two processes while requests run: the same tokens."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer.engine.request import SamplingParams
from deepinfer.llm import LLM

BASE: dict[str, Any] = {
    "scheduling.max_num_seqs": 8,
    "cache.num_blocks": 100,
    "speculation.num_drafts": 1,
}
MOVING: dict[str, Any] = {
    "parallel.expert": 2,
    "parallel.copies": 4,
    "parallel.balance_window": 8,
    "parallel.balance_interval": 10,
    "parallel.balance_horizon": 1_000_000,
    "parallel.balance_spare": 4,
}


def run(config: dict[str, Any]) -> tuple[list[tuple[int, ...]], list[dict[str, Any]]]:
    """Generate; returns the tokens and what moved on each rank."""
    prompts = [f'{{"name": "n{i}", "list": [{i}, {i + 1}], "more": ' for i in range(8)]
    params = [
        SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=36, ignore_eos=True)
        for i in range(8)
    ]
    with LLM("demo", device="cpu", config=config) as llm:
        found = [tuple(c.token_ids) for c in llm.generate(list(prompts), params)]
        moved = []
        if llm._balancer is not None:
            moved = [llm._balancer.summary(), *llm._loop.ask("experts")]  # type: ignore[union-attr]
    return found, moved


@pytest.mark.slow
def test_tokens_stay_while_experts_move() -> None:
    alone, _ = run(BASE)
    together, (first, second) = run({**BASE, **MOVING})
    assert together == alone
    assert first["moves"] > 10 and first["placements"] == second["placements"]
    assert len(first["placements"]) == 2  # of the backbone and of the draft blocks
