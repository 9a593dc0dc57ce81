"""An engine whose prompts two processes share, with experts that move and drafts: same tokens."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer.engine.request import SamplingParams
from deepinfer.llm import LLM

MOVING: dict[str, Any] = {
    "parallel.balance_window": 4,
    "parallel.balance_interval": 5,
    "parallel.balance_horizon": 1_000_000,
    "parallel.balance_spare": 8,
}
LENGTHS = (3, 2, 40, 190, 77, 2, 2, 19)
BASE: dict[str, Any] = {
    "scheduling.max_num_seqs": 4,
    "scheduling.max_num_batched_tokens": 128,
    "scheduling.chunk_size": 64,
    "cache.num_blocks": 64,
    "speculation.num_drafts": 2,
    "replay.mode": "compact",
    "replay.keep_tokens": 140,
}


def run(
    **more: object,
) -> tuple[list[tuple[int, ...]], list[dict[str, dict[str, int]]], list[dict[str, Any]]]:
    """Generate greedy and drawn tokens; returns them, the followers' collectives, what moved."""
    prompts = [[5 + (7 * i + n) % 200 for i in range(n)] for n in LENGTHS]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=14, ignore_eos=True)
        for i in range(len(prompts))
    ]
    with LLM("golden", device="cpu", config={**BASE, **more}) as llm:
        found = [tuple(c.token_ids) for c in llm.generate(prompts, params)]
        asked: list[dict[str, dict[str, int]]] = []
        moved: list[dict[str, Any]] = []
        if llm.config.mesh.world > 1:
            asked = llm._loop.ask("collectives")  # type: ignore[union-attr]
        if llm._balancer is not None:
            moved = [llm._balancer.summary(), *llm._loop.ask("experts")]  # type: ignore[union-attr]
    return found, asked, moved


def test_two_processes_that_share_prompts_and_experts_give_the_tokens_of_one() -> None:
    alone, _, _ = run()
    sizes = {"parallel.context": 2, "parallel.expert": 2, "parallel.copies": 2}
    together, (counts,), moved = run(**sizes, **MOVING)
    assert together == alone
    assert moved[0]["moves"] > 0 and moved[0]["placements"] == moved[1]["placements"]
    assert counts["context"]["all_gather"] > 50 and counts["context control"]["broadcast"] > 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"parallel.context": 4},
        {
            "parallel.data": 2,
            "parallel.context": 2,
            "parallel.expert": 4,
            "parallel.copies": 4,
            "parallel.context_exchange": "all",
        },
    ],
)
def test_four_processes_give_the_tokens_of_one(sizes: dict[str, Any]) -> None:
    alone, _, _ = run()
    together, _, _ = run(**sizes)
    assert together == alone
