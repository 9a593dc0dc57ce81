"""What of the caches belongs to one sequence at one length: read out, put back, compared.

The parts are in the order of positions, whatever the places in rings and pools, so they fit caches
of another size, and two sequences of the same tokens have equal parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from deepinfer.cache.layout import CacheLayout
from deepinfer.cache.tensors import Caches
from deepinfer.errors import ShapeError
from deepinfer.kernels.cache_io import PagedCache, cache_load

__all__ = ["copy_slot", "live_shapes", "read_live", "write_live"]

_Place = tuple[Tensor, Tensor]
"""Block (or slot) and offset of each entry, both [n] int64."""


def live_shapes(layout: CacheLayout, length: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return name -> dtype and shape of every part of a sequence of `length` tokens.

    window.L  last `window` entries of layer L, drafts behind the backbone: codes, then scales
    index.L   all complete index keys of layer L that owns them
    main.L    all complete main entries of layer L
    tail.L    fp32 (gate, value) of the tokens of an incomplete group
    engram    int32 compressed ids of the last tokens
    """
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    held = min(layout.window, length)
    plain = layout.mode == "noq"
    kind = torch.float32 if plain else torch.uint8
    form = layout.window_format
    for i in range(len(layout.windows)):
        shapes[f"window.{i}"] = (kind, (held, form.dim if plain else form.entry_bytes))
    for part in layout.parts:
        width = part.format.dim if plain else part.format.entry_bytes
        shapes[f"{part.kind}.{part.layer_id}"] = (kind, (length // part.ratio, width))
    ratios = {part.layer_id: part.ratio for part in layout.parts}
    for layer_id, ring in layout.tails:
        rest = length % ratios[layer_id]
        shapes[f"tail.{layer_id}"] = (torch.float32, (rest, 2, ring.entry_bytes // 8))
    if layout.engram_tail is not None:
        shapes["engram"] = (torch.int32, (min(layout.engram_history, length),))
    return shapes


def read_live(caches: Caches, slot: int, blocks: Sequence[int], length: int) -> dict[str, Tensor]:
    """Return copies of everything that later tokens of a sequence may read.

    slot, blocks  what the sequence holds; the block table covers `length` positions
    returns       the parts of `live_shapes`, on the caches' device
    """
    parts: dict[str, Tensor] = {}
    places = _places(caches, slot, blocks, length)
    for name, cache in _paged(caches).items():
        place = places[name]
        codes = cache.codes[place]
        parts[name] = codes if cache.scales is None else torch.cat([codes, cache.scales[place]], 1)
    for name, ring in _rings(caches).items():
        parts[name] = ring[places[name]]
    return parts


def write_live(
    caches: Caches, slot: int, blocks: Sequence[int], length: int, parts: Mapping[str, Tensor]
) -> None:
    """Put parts read by `read_live`, from these or other caches, into a slot and blocks.

    Raises ShapeError when the parts do not fit the layout.
    """
    shapes = live_shapes(caches.layout, length)
    found = {name: (part.dtype, tuple(part.shape)) for name, part in parts.items()}
    if found != shapes:
        wrong = sorted(n for n in found.keys() | shapes if found.get(n) != shapes.get(n))
        raise ShapeError(f"saved caches do not fit these: {', '.join(wrong)} differ in shape")
    places = _places(caches, slot, blocks, length)
    device = caches.blocks.device
    for name, cache in _paged(caches).items():
        place, part = places[name], parts[name].to(device)
        if cache.scales is None:
            cache.codes[place] = part
            continue
        width = cache.codes.shape[-1]
        cache.codes[place] = part[:, :width]
        cache.scales[place] = part[:, width:]
        if cache.dense is not None and part.shape[0]:
            flat = place[0] * cache.codes.shape[1] + place[1]
            cache.keep(*place, cache_load(replace(cache, dense=None, twice=None), flat))
    for name, ring in _rings(caches).items():
        ring[places[name]] = parts[name].to(device)


def copy_slot(caches: Caches, source: int, target: int) -> None:
    """Copy all that a slot holds, decoded entries included."""
    caches.slots[target] = caches.slots[source]
    for cache in caches.windows:
        for copies in (cache.dense, cache.twice):
            if copies is not None:
                copies[target] = copies[source]


def _paged(caches: Caches) -> dict[str, PagedCache]:
    """Return every cache of entries under the name of its part."""
    named = {f"window.{i}": cache for i, cache in enumerate(caches.windows)}
    named |= {f"index.{layer_id}": cache for layer_id, cache in caches.index.items()}
    return named | {f"main.{layer_id}": cache for layer_id, cache in caches.main.items()}


def _rings(caches: Caches) -> dict[str, Tensor]:
    """Return every ring that is no cache of entries under the name of its part."""
    named = {f"tail.{layer_id}": ring for layer_id, ring in caches.tails.items()}
    return named if caches.engram_tail is None else named | {"engram": caches.engram_tail}


def _places(caches: Caches, slot: int, blocks: Sequence[int], length: int) -> dict[str, _Place]:
    """Say where each part's entries lie, in the order of their positions."""
    layout, device = caches.layout, caches.blocks.device
    table = torch.tensor(list(blocks), dtype=torch.int64, device=device)
    places: dict[str, _Place] = {}

    def ring(name: str, count: int, size: int) -> None:
        """Place the last positions of the sequence in a ring of `size`."""
        offset = torch.arange(length - count, length, device=device) % size
        places[name] = (torch.full_like(offset, slot), offset)

    for name, (_, shape) in live_shapes(layout, length).items():
        kind, _, number = name.partition(".")
        if kind == "window":
            ring(name, shape[0], layout.windows[int(number)].length)
        elif kind == "tail":
            ring(name, shape[0], dict(layout.tails)[int(number)].length)
        elif kind == "engram":
            assert layout.engram_tail is not None
            ring(name, shape[0], layout.engram_tail.length)
        else:
            entry = torch.arange(shape[0], device=device)
            per_block = next(
                p.num_entries for p in layout.parts if (p.kind, p.layer_id) == (kind, int(number))
            )
            places[name] = (table[entry // per_block], entry % per_block)
    return places
