"""Stores and loads through pages, in every format and layout."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels import twins
from torch import Tensor

from deepinfer.errors import ShapeError
from deepinfer.kernels.cache_io import CacheFormat, PagedCache, cache_load, cache_store
from deepinfer.kernels.cache_io.cases import empty_cache
from deepinfer.kernels.quantize import QuantFormat, round_trip

FORMATS: dict[CacheFormat, QuantFormat | None] = {
    "window_fp8": "act8",
    "main_fp4": "act4_e4",
    "index_fp4": "act4_e8",
    "fp32": None,
}
BLOCKS, ENTRIES, DIM = 4, 6, 64


def stored(values: Tensor, form: CacheFormat) -> Tensor:
    fmt = FORMATS[form]
    return values.float() if fmt is None else round_trip(values, fmt).float()


def snapshot(cache: PagedCache) -> list[Tensor]:
    kept = [cache.codes, cache.scales, cache.dense]
    return [part.clone() for part in kept if part is not None]


def test_every_format_is_tried() -> None:
    assert set(FORMATS) == set(get_args(CacheFormat))


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", FORMATS)
def test_loads_what_the_format_keeps(
    form: CacheFormat, dtype: torch.dtype, split: bool, dense: bool
) -> None:
    cache = empty_cache(form, BLOCKS, ENTRIES, DIM, dense=dense, split=split)
    values = (torch.randn(9, DIM) * 3).to(dtype)
    idx = torch.randperm(BLOCKS * ENTRIES)[:9]
    idx[4] = -1
    cache_store(cache, values, idx)
    want = stored(values, form)
    want[4] = 0.0
    got = cache_load(cache, idx)
    assert got.dtype == torch.float32 and torch.equal(got, want)
    assert torch.equal(got.double(), twins.cache_load(cache, idx))
    if FORMATS[form]:
        assert torch.equal(got, got.bfloat16().float())


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_other_entries_stay(form: CacheFormat, dense: bool) -> None:
    cache = empty_cache(form, BLOCKS, ENTRIES, DIM, dense=dense, split=False)
    everything = torch.arange(BLOCKS * ENTRIES)
    cache_store(cache, torch.randn(BLOCKS * ENTRIES, DIM), everything)
    before = snapshot(cache)
    cache_store(cache, 100.0 * torch.randn(3, DIM), torch.tensor([7, -1, 20]))
    changed = {7, 20}
    for old, new in zip(before, snapshot(cache), strict=True):
        differs = (old != new).flatten(2).any(-1).flatten()
        assert set(differs.nonzero().flatten().tolist()) == changed


@pytest.mark.parametrize("form", FORMATS)
def test_nothing_to_do(form: CacheFormat) -> None:
    cache = empty_cache(form, BLOCKS, ENTRIES, DIM, dense=False, split=False)
    before = snapshot(cache)
    cache_store(cache, torch.randn(2, DIM), torch.tensor([-1, -1]))
    cache_store(cache, torch.randn(0, DIM), torch.zeros(0, dtype=torch.int64))
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(cache), strict=True))
    empty = cache_load(cache, torch.zeros(0, dtype=torch.int64))
    assert empty.shape == (0, DIM) and empty.dtype == torch.float32


@given(data=st.data(), form=st.sampled_from(list(FORMATS)), dense=st.booleans())
def test_a_history_of_stores_equals_a_dictionary(
    data: st.DataObject, form: CacheFormat, dense: bool
) -> None:
    cache = empty_cache(form, BLOCKS, ENTRIES, DIM, dense=dense, split=form == "index_fp4")
    kept: dict[int, Tensor] = {}
    for _ in range(data.draw(st.integers(1, 4))):
        ids = data.draw(st.lists(st.integers(0, BLOCKS * ENTRIES - 1), max_size=6, unique=True))
        skipped = data.draw(st.integers(0, 2))
        values = torch.randn(len(ids) + skipped, DIM)
        cache_store(cache, values, torch.tensor([*ids, *[-1] * skipped], dtype=torch.int64))
        for entry, value in zip(ids, stored(values, form), strict=False):
            kept[entry] = value
    got = cache_load(cache, torch.arange(BLOCKS * ENTRIES))
    for entry, value in enumerate(got):
        assert torch.equal(value, kept.get(entry, torch.zeros(DIM)))


def test_wrong_shapes_are_refused() -> None:
    cache = empty_cache("fp32", BLOCKS, ENTRIES, DIM, dense=False, split=False)
    with pytest.raises(ShapeError, match="cache_store: idx"):
        cache_store(cache, torch.zeros(2, DIM), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ShapeError, match="cache_load: idx"):
        cache_load(cache, torch.zeros(3, 2, dtype=torch.int64))
