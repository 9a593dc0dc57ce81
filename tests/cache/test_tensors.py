"""Views of the two pools: each writes through into its own bytes and no others."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from deepinfer.cache.layout import CacheLayout
from deepinfer.cache.tensors import Caches
from deepinfer.config import ModelConfig
from deepinfer.config.load import load_model_config, resolve_model
from deepinfer.kernels.cache_io import PagedCache, cache_load, cache_store
from deepinfer.kernels.quantize import act4_e4, act4_e8, act8

MODES: tuple[Literal["official", "noq"], ...] = ("official", "noq")
BLOCKS, SLOTS = 3, 2


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return load_model_config(resolve_model("golden"))


def allocate(
    config: ModelConfig, mode: Literal["official", "noq"] = "official", dense: int = 0
) -> Caches:
    layout = CacheLayout.build(config, mode, 32)
    return Caches.allocate(layout, BLOCKS, SLOTS, "cpu", dense)


def raw(x: Tensor) -> list[int]:
    return x.contiguous().view(torch.uint8).flatten().tolist()


def touched(pool: Tensor) -> list[tuple[int, int]]:
    return [(int(row), int(byte)) for row, byte in pool.nonzero()]


def every_view(caches: Caches) -> list[tuple[Tensor, Tensor]]:
    """All views with the pool they are cut from."""
    views: list[tuple[Tensor, Tensor]] = []
    paged = [(c, caches.blocks) for c in (*caches.main.values(), *caches.index.values())]
    paged += [(c, caches.slots) for c in caches.windows]
    for cache, pool in paged:
        views += [(part, pool) for part in (cache.codes, cache.scales) if part is not None]
    views += [(tail, caches.slots) for tail in caches.tails.values()]
    if caches.engram_tail is not None:
        views.append((caches.engram_tail, caches.slots))
    return views


@pytest.mark.parametrize("mode", MODES)
def test_pools_start_as_zeros(config: ModelConfig, mode: Literal["official", "noq"]) -> None:
    caches = allocate(config, mode)
    layout = caches.layout
    assert caches.blocks.shape == (BLOCKS, layout.block_bytes)
    assert caches.slots.shape == (SLOTS, layout.slot_bytes)
    assert not caches.blocks.any() and not caches.slots.any()
    backbone, drafts = config.num_hidden_layers, config.num_nextn_predict_layers
    assert len(caches.windows) == backbone + drafts
    owners = [layer.layer_id for layer in config.layers if layer.owns_kv]
    assert list(caches.main) == list(caches.index) == owners
    assert list(caches.tails) == [i for i in owners if config.layers[i].ratio > 1]


@pytest.mark.parametrize("mode", MODES)
def test_every_byte_belongs_to_one_view(
    config: ModelConfig, mode: Literal["official", "noq"]
) -> None:
    """Ones written through the views alone cover each pool once, up to the alignment."""
    caches = allocate(config, mode)
    written = 0
    for view, pool in every_view(caches):
        before = int(pool.count_nonzero())
        if view.dtype == torch.uint8:
            view.fill_(1)
        else:  # four bytes that are not zero
            view.copy_(torch.full(view.shape, 0x01010101, dtype=torch.int32).view(view.dtype))
        num_bytes = view.numel() * view.element_size()
        assert int(pool.count_nonzero()) == before + num_bytes  # nothing was there before
        written += num_bytes
    layout = caches.layout
    rings = [*layout.windows, *(ring for _, ring in layout.tails)]
    rings += [layout.engram_tail] if layout.engram_tail else []
    parts = BLOCKS * sum(part.num_bytes for part in layout.parts)
    assert written == parts + SLOTS * sum(ring.length * ring.entry_bytes for ring in rings)


def test_main_entries_interleave_codes_and_scales(config: ModelConfig) -> None:
    caches = allocate(config)
    for part in (p for p in caches.layout.parts if p.kind == "main"):
        value = torch.randn(1, config.head_dim) + 3.0
        codes, scales = act4_e4(value)
        entry = part.num_entries - 2
        caches.blocks.zero_()
        cache_store(caches.main[part.layer_id], value, torch.tensor([2 * part.num_entries + entry]))
        start = part.offset + entry * part.format.entry_bytes
        stored = caches.blocks[2, start : start + part.format.entry_bytes]
        assert stored.tolist() == raw(codes) + raw(scales)
        assert all(
            row == 2 and start <= byte < start + part.format.entry_bytes
            for row, byte in touched(caches.blocks)
        )


def test_index_keys_keep_all_codes_before_all_scales(config: ModelConfig) -> None:
    caches = allocate(config)
    for part in (p for p in caches.layout.parts if p.kind == "index"):
        values = torch.randn(part.num_entries, config.index_head_dim) + 3.0
        codes, scales = act4_e8(values)
        caches.blocks.zero_()
        ids = part.num_entries + torch.arange(part.num_entries)
        cache_store(caches.index[part.layer_id], values, ids)
        stored = caches.blocks[1, part.offset : part.offset + part.num_bytes]
        assert stored.tolist() == raw(codes) + raw(scales)
        assert int(caches.blocks.count_nonzero()) == int(stored.count_nonzero())


def test_window_rings_interleave_in_their_slot(config: ModelConfig) -> None:
    caches = allocate(config)
    length = caches.layout.ring_length
    for ring, cache in zip(caches.layout.windows, caches.windows, strict=True):
        value = torch.randn(1, config.head_dim) + 3.0
        codes, scales = act8(value)
        caches.slots.zero_()
        cache_store(cache, value, torch.tensor([length + length - 1]))
        start = ring.offset + (length - 1) * ring.entry_bytes
        assert caches.slots[1, start : start + ring.entry_bytes].tolist() == raw(codes) + raw(
            scales
        )
        assert int(caches.slots[0].count_nonzero()) == 0


def test_tails_are_pairs_of_gate_and_value(config: ModelConfig) -> None:
    caches = allocate(config)
    length, dim = caches.layout.tail_length, config.head_dim
    assert caches.tails
    for layer_id, ring in caches.layout.tails:
        tail = caches.tails[layer_id]
        assert tail.shape == (SLOTS, length, 2, dim) and tail.dtype == torch.float32
        tail[1, 2, 0, 0], tail[1, 2, 1, 0] = 1.5, -2.5
        start = ring.offset + 2 * ring.entry_bytes
        slot = caches.slots[1]
        assert slot[start : start + 4].view(torch.float32).item() == 1.5
        assert slot[start + 4 * dim : start + 4 * dim + 4].view(torch.float32).item() == -2.5


def test_the_engram_tail_holds_ids(config: ModelConfig) -> None:
    caches = allocate(config)
    ring = caches.layout.engram_tail
    assert ring is not None and caches.engram_tail is not None
    assert caches.engram_tail.shape == (SLOTS, ring.length)
    caches.engram_tail[0, 1] = 0x01020304
    start = ring.offset + 4
    assert caches.slots[0, start : start + 4].tolist() == [4, 3, 2, 1]


def test_strict_entries_are_unrounded(config: ModelConfig) -> None:
    caches = allocate(config, "noq")
    values = torch.randn(2, config.head_dim)
    ids = torch.tensor([5, 1])
    for cache in (*caches.main.values(), caches.windows[0]):
        cache_store(cache, values, ids)
        assert torch.equal(cache_load(cache, ids), values)


def dense_bytes(caches: list[PagedCache]) -> int:
    return sum(4 * c.dim * c.codes.shape[0] * c.codes.shape[1] for c in caches)


def test_decoded_copies_come_in_order_and_whole(config: ModelConfig) -> None:
    bare = allocate(config)
    kinds = [list(bare.windows), list(bare.index.values()), list(bare.main.values())]
    sizes = [dense_bytes(kind) for kind in kinds]
    for budget, want in [
        (0, (False, False, False)),
        (sizes[0] - 1, None),
        (sizes[0], (True, False, False)),
        (sizes[0] + sizes[1], (True, True, False)),
        (sum(sizes) - 1, (True, True, False)),
        (sum(sizes), (True, True, True)),
    ]:
        caches = allocate(config, dense=budget)
        groups = [list(caches.windows), list(caches.index.values()), list(caches.main.values())]
        has = tuple({c.dense is not None for c in group} for group in groups)
        assert all(len(one) == 1 for one in has)  # a kind has all of them or none
        kept = [c for group in groups for c in group if c.dense is not None]
        assert dense_bytes(kept) <= budget
        if want is not None:
            assert tuple(one.pop() for one in has) == want


@pytest.mark.parametrize("mode", MODES)
def test_decoded_copies_change_no_bit(
    config: ModelConfig, mode: Literal["official", "noq"]
) -> None:
    bare, kept = allocate(config, mode), allocate(config, mode, dense=1 << 40)
    for plain, copied in zip(
        (*bare.windows, *bare.main.values(), *bare.index.values()),
        (*kept.windows, *kept.main.values(), *kept.index.values()),
        strict=True,
    ):
        values, ids = torch.randn(5, plain.dim), torch.tensor([3, 0, -1, 9, 17])
        cache_store(plain, values, ids)
        cache_store(copied, values, ids)
        assert torch.equal(cache_load(plain, ids), cache_load(copied, ids))
    assert torch.equal(bare.blocks, kept.blocks) and torch.equal(bare.slots, kept.slots)
