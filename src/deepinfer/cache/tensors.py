"""The device buffers of all caches, and typed views into them.

Two byte pools; every other tensor here is a view of one. Which entry is written or read is decided
by the caller: flat entry ids are `block * entries + offset` (for rings: `slot * length + position %
length`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from deepinfer.cache.layout import CacheLayout, EntryFormat, Ring
from deepinfer.kernels.cache_io import PagedCache

__all__ = ["Caches"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caches:
    """All caches of one device.

    windows      one PagedCache per backbone layer, then per draft layer; a slot is a "block"
    main, index  layer that owns them -> PagedCache over the block pool
    tails        layer -> [slots, length, 2, D] fp32: gate, value
    engram_tail  [slots, length] int32 compressed ids, None without Engram layers
    """

    layout: CacheLayout
    blocks: Tensor
    slots: Tensor
    windows: tuple[PagedCache, ...]
    main: Mapping[int, PagedCache]
    index: Mapping[int, PagedCache]
    tails: Mapping[int, Tensor]
    engram_tail: Tensor | None

    @classmethod
    def allocate(
        cls,
        layout: CacheLayout,
        num_blocks: int,
        num_slots: int,
        device: torch.device | str,
        dequantized_bytes: int = 0,
    ) -> Caches:
        """Allocate zeroed pools; block 0 and slot 0 are padding and count.

        dequantized_bytes  what decoded fp32 copies may take beside the pools: window rings first,
                           then index keys, then main entries, each kind whole or not at all;
                           changes speed only
        """
        blocks = _zeros((num_blocks, layout.block_bytes), torch.uint8, device)
        slots = _zeros((num_slots, layout.slot_bytes), torch.uint8, device)
        caches: dict[str, dict[int, PagedCache]] = {"main": {}, "index": {}}
        for part in layout.parts:
            data = blocks[:, part.offset : part.offset + part.num_bytes]
            form = part.format
            if part.kind == "index" and form.scale_bytes:
                split = part.num_entries * form.code_bytes
                codes = torch.unflatten(data[:, :split], 1, (part.num_entries, form.code_bytes))
                scales = torch.unflatten(data[:, split:], 1, (part.num_entries, form.scale_bytes))
                cache = PagedCache(codes, scales, form.name, form.dim)
            else:
                cache = _interleaved(data, part.num_entries, form)
            caches[part.kind][part.layer_id] = cache
        windows = tuple(
            _interleaved(_region(slots, ring), ring.length, layout.window_format)
            for ring in layout.windows
        )
        on_cpu = torch.device(device).type == "cpu"
        rings, left = _with_dense(dict(enumerate(windows)), dequantized_bytes, twice=on_cpu)
        index, left = _with_dense(caches["index"], left)
        main, _ = _with_dense(caches["main"], left)
        tails = {
            layer_id: torch.unflatten(
                _region(slots, ring).view(torch.float32), 1, (ring.length, 2, -1)
            )
            for layer_id, ring in layout.tails
        }
        tail = layout.engram_tail
        engram_tail = None if tail is None else _region(slots, tail).view(torch.int32)
        return cls(
            layout=layout,
            blocks=blocks,
            slots=slots,
            windows=tuple(rings.values()),
            main=main,
            index=index,
            tails=tails,
            engram_tail=engram_tail,
        )


def _with_dense(
    caches: Mapping[int, PagedCache], budget: int, twice: bool = False
) -> tuple[Mapping[int, PagedCache], int]:
    """Give caches of one kind a decoded copy if the budget holds them; return what is left.

    twice  keep each ring twice in a row, if the budget holds that too
    """
    size = sum(
        4 * c.dim * c.codes.shape[0] * c.codes.shape[1]
        for c in caches.values()
        if c.scales is not None
    )
    if not size or size > budget:
        return caches, budget
    twice = twice and 2 * size <= budget
    dense: dict[int, PagedCache] = {}
    for key, cache in caches.items():
        blocks, entries = cache.codes.shape[:2]
        shape = (blocks, (1 + twice) * entries, cache.dim)
        copies = _zeros(shape, torch.float32, cache.codes.device)
        dense[key] = replace(cache, dense=copies[:, :entries], twice=copies if twice else None)
    return dense, budget - size * (1 + twice)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return zeros; on a CPU their pages take memory only when touched, unlike torch's own."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    kind = np.uint8 if dtype == torch.uint8 else np.float32
    return torch.from_numpy(np.zeros(shape, dtype=kind))


def _region(pool: Tensor, ring: Ring) -> Tensor:
    return pool[:, ring.offset : ring.offset + ring.length * ring.entry_bytes]


def _interleaved(data: Tensor, num_entries: int, form: EntryFormat) -> PagedCache:
    """View bytes as entries that keep their scales behind their codes."""
    if not form.scale_bytes:
        codes = torch.unflatten(data.view(torch.float32), 1, (num_entries, form.dim))
        return PagedCache(codes, None, form.name, form.dim)
    entries = torch.unflatten(data, 1, (num_entries, form.entry_bytes))
    codes, scales = entries.split_with_sizes([form.code_bytes, form.scale_bytes], dim=-1)
    return PagedCache(codes, scales, form.name, form.dim)
