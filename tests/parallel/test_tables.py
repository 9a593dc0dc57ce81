"""Engram rows read by a thread."""

from __future__ import annotations

from mmap import PAGESIZE

import pytest
import torch
from torch import Tensor

import deepinfer.assembly
from deepinfer.engine.request import SamplingParams
from deepinfer.kernels.engram import engram_lookup
from deepinfer.llm import LLM
from deepinfer.parallel.tables import HostRows, MappedRows, _Pages


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


def test_rows_that_were_read_ahead_and_rows_that_were_not() -> None:
    codes = torch.arange(11 * 64).remainder(120).to(torch.uint8).view(11, 64)
    scale = (121 + torch.arange(22) % 5).to(torch.uint8).view(11, 2)
    table = HostRows(codes.view(torch.float8_e4m3fn), scale)
    rows = torch.tensor([[0, 10], [3, 3], [7, 0]])
    wanted = engram_lookup(codes.view(torch.float8_e4m3fn), scale, rows, torch.bfloat16)
    for ahead, found in (([[3, 10], [10, 9]], 3), ([[1, 2]], 0), ([[0, 10], [3, 7]], 6)):
        table.found = table.late = 0
        table.look_ahead(torch.tensor(ahead))
        assert torch.equal(table.start(rows).wait(torch.bfloat16), wanted)
        assert (table.found, table.late) == (found, 6 - found)
    table.look_ahead(torch.empty(0, 2, dtype=torch.int64))
    assert torch.equal(table.start(rows).wait(torch.bfloat16), wanted)
    assert torch.equal(table.start(rows).wait(torch.bfloat16), wanted)  # nothing is kept


def test_tokens_do_not_depend_on_where_rows_are() -> None:
    """Rows of drafts are read before the step that verifies them: all of them, by their place."""
    prompts, params = [[5, 6, 7], list(range(30))], SamplingParams(max_tokens=9, seed=1)
    tables: list[HostRows] = []

    def kept(codes: Tensor, scale: Tensor) -> HostRows:
        tables.append(HostRows(codes, scale))
        return tables[-1]

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepinfer.assembly, "HostRows", kept)
        for where in ("device", "host"):
            settings = {"parallel.engram_rows": where, "speculation.num_drafts": 2}
            with LLM("golden", "cpu", settings) as llm:
                found.append([c.token_ids for c in llm.generate(prompts, params)])
    assert found[0] == found[1] and tables
    for table in tables:
        assert table.found > 0 and table.late == 0


class Runtime:
    """What registers pages, as a card's does: it refuses pages that it has."""

    def __init__(self, flags: int) -> None:
        self.flags = flags
        self.pages: set[int] = set()

    def cudaHostRegister(self, begin: int, size: int, flags: int) -> int:
        assert begin % PAGESIZE == 0 and size > 0 and size % PAGESIZE == 0
        pages = set(range(begin, begin + size, PAGESIZE))
        if flags != self.flags or pages & self.pages:
            return 712
        self.pages |= pages
        return 0

    def cudaHostUnregister(self, begin: int) -> int:
        self.pages.remove(begin)  # the first page of what was registered
        return 0


def test_pages_are_registered_once_and_let_go() -> None:
    memory = torch.zeros(12 * PAGESIZE, dtype=torch.uint8)
    start = -memory.data_ptr() % PAGESIZE
    runtime = Runtime(flags=1)
    pages = _Pages(runtime)

    def part(first: float, last: float) -> torch.Tensor:
        return memory[start + int(first * PAGESIZE) : start + int(last * PAGESIZE)]

    assert pages.add(part(4.5, 5.5)) and len(runtime.pages) == 2
    assert pages.add(part(5.2, 5.7)) and len(runtime.pages) == 2
    assert pages.add(part(8.1, 8.2)) and len(runtime.pages) == 3
    assert pages.add(part(1.5, 9.5)) and len(runtime.pages) == 9  # before, between and behind
    begins = [begin for begin, _ in pages._held]
    assert len(begins) == 5 and len(set(begins)) == 5
    runtime.pages = set(begins)
    del pages
    assert not runtime.pages
    assert not _Pages(Runtime(flags=4)).add(part(0, 1))


def test_mapped_rows_are_read_where_they_are_needed() -> None:
    codes = torch.arange(11 * 64).remainder(120).to(torch.uint8).view(11, 64)
    codes, scale = codes.view(torch.float8_e4m3fn), (121 + torch.arange(22) % 5).byte().view(11, 2)
    table = MappedRows(codes, scale, engram_lookup, None)
    rows = torch.tensor([[0, 10], [3, 3]])
    assert table.flows and not HostRows.flows
    wanted = engram_lookup(codes, scale, rows, torch.bfloat16)
    assert torch.equal(table.start(rows).wait(torch.bfloat16), wanted)
