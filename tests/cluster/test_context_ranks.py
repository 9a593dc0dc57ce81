"""An engine whose prompts two processes share, experts and drafts included: the same tokens."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer.engine.request import SamplingParams
from deepinfer.llm import LLM

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


def run(**more: object) -> tuple[list[tuple[int, ...]], list[dict[str, dict[str, int]]]]:
    """Generate greedy and drawn tokens; returns them and the followers' collectives."""
    prompts = [[5 + (7 * i + n) % 200 for i in range(n)] for n in LENGTHS]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=6, ignore_eos=True)
        for i in range(len(prompts))
    ]
    with LLM("golden", device="cpu", config={**BASE, **more}) as llm:
        found = [tuple(c.token_ids) for c in llm.generate(prompts, params)]
        asked: list[dict[str, dict[str, int]]] = []
        if llm.config.mesh.world > 1:
            asked = llm._loop.ask("collectives")  # type: ignore[union-attr]
    return found, asked


def test_two_processes_that_share_prompts_and_experts_give_the_tokens_of_one() -> None:
    alone, _ = run()
    together, (counts,) = run(**{"parallel.context": 2, "parallel.expert": 2, "parallel.copies": 2})
    assert together == alone
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
    alone, _ = run()
    together, _ = run(**sizes)
    assert together == alone
