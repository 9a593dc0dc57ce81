"""Two GPUs: the tokens of one, through every back end."""

from __future__ import annotations

import pytest
import torch

from deepinfer.engine.request import SamplingParams
from deepinfer.llm import LLM

pytestmark = [pytest.mark.gpu, pytest.mark.multi]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["exact", "fixed", "gathered", "symm"])
def test_two_cards_give_the_tokens_of_one(name: str) -> None:
    prompts = [[(7 * i + j) % 400 + 3 for j in range(3 + 9 * i)] for i in range(10)]
    params = [SamplingParams(max_tokens=8 + i, seed=i, temperature=i % 2) for i in range(10)]
    settings = {"scheduling.max_num_seqs": 8, "speculation.num_drafts": 2}
    with LLM("golden", "cuda:0", settings) as one:
        wanted = [c.token_ids for c in one.generate(prompts, params)]
    ranks = {"parallel.expert": 2, "parallel.backend": name}
    with LLM("golden", "cuda", {**settings, **ranks}) as llm:
        assert [c.token_ids for c in llm.generate(prompts, params)] == wanted
