"""Engram rows read by a thread."""

from __future__ import annotations

import torch

from deepinfer.engine.request import SamplingParams
from deepinfer.kernels.engram import engram_lookup
from deepinfer.llm import LLM
from deepinfer.parallel.tables import HostRows


def test_host_rows() -> None:
    codes = torch.arange(11 * 64).remainder(120).to(torch.uint8).view(11, 64)
    scale = (121 + torch.arange(22) % 5).to(torch.uint8).view(11, 2)
    table = HostRows(codes.view(torch.float8_e4m3fn), scale)
    reads = []
    for rows in (torch.tensor([[0, 10], [3, 3]]), torch.empty(0, 2, dtype=torch.int64)):
        reads.append((rows, table.start(rows)))  # both under way
    for rows, read in reads:
        wanted = engram_lookup(codes.view(torch.float8_e4m3fn), scale, rows, torch.bfloat16)
        assert torch.equal(read.wait(torch.bfloat16), wanted)


def test_tokens_do_not_depend_on_where_rows_are() -> None:
    prompts, params = [[5, 6, 7], list(range(30))], SamplingParams(max_tokens=6, seed=1)
    found = []
    for where in ("device", "host"):
        with LLM("golden", "cpu", {"parallel.engram_rows": where}) as llm:
            found.append([c.token_ids for c in llm.generate(prompts, params)])
    assert found[0] == found[1]
