"""Attention to packed entries in CUDA C++ for Hopper: one kernel, entries decoded on the way."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from deepinfer.kernels import nvcc

if TYPE_CHECKING:
    from deepinfer.kernels.cache_io import PagedCache
    from deepinfer.kernels.quantize import QuantFormat

SOURCE: Final = Path(__file__).with_suffix(".cu")
HEADS: Final = 64
DIM: Final = 512
PAIRS: Final = 32  # of values that rotate
_TILE: Final = 64  # slots that a block of threads takes at once
_ROW_TILES: Final = 2  # what beginning and ending a row costs, in tiles
_MEETING_TILES: Final = 1  # what it costs blocks to add their shares of a row
_PASSING_TILES: Final = 2  # what it costs a block to pass on half a row and to take one over
_WORTH: Final = 1.03  # what runs must gain
_SHARES: Final = (2, 3, 4, 5, 10)  # blocks that may take a row together
PART: Final = 33280  # floats that a block passes on: sums and maxima
FLAGS: Final = 12  # one for each of those warps
_ROOM: dict[int, tuple[Tensor, Tensor]] = {}  # by device; launches of one follow each other
_CODE_BYTES: Final = {"window_fp8": 512, "main_fp4": 256}
_ENTRY_BYTES: Final = {"window_fp8": 528, "main_fp4": 288}


def paged_attention(
    q: Tensor,
    window: PagedCache,
    window_idx: Tensor,
    main: PagedCache | None,
    main_idx: Tensor | None,
    sink: Tensor,
    scale: float,
    round_weights: bool,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    quantize: QuantFormat | None = None,
    *,
    whole: bool = False,
) -> Tensor:
    """As the reference, but for where weights round; other dims and formats take Triton.

    whole  one block of threads a row; else few rows are split, so that a row's bits depend on its
           batch
    """
    packed, turn = accepts(q, window, main, main_idx, round_weights), None
    out: Tensor
    if cos is not None and sin is not None:
        turn = cos, sin
        if not (packed and turns(cos, sin, quantize)):
            rotate = import_module("deepinfer.kernels.rope.sm90").rotate_tail
            q, caches = rotate(q, cos, sin, reuse=True), (window, window_idx, main, main_idx)
            out = paged_attention(q, *caches, sink, scale, round_weights, whole=whole)
            return rotate(out, cos, sin, True, True, quantize)  # type: ignore[no-any-return]
    if not packed:
        portable = import_module("deepinfer.kernels.paged_attention.triton").paged_attention
        out = portable(q, window, window_idx, main, main_idx, sink, scale, round_weights)
        return out
    tiles = math.ceil(window_idx.shape[1] / _TILE)
    tiles += 0 if main_idx is None else math.ceil(main_idx.shape[1] / _TILE)
    shares, passing = plan(q.shape[0], tiles, nvcc.processors(q.device), whole)
    return attend(
        q, window, window_idx, main, main_idx, sink, scale, shares, passing=passing, turn=turn
    )  # fmt: skip


def accepts(
    q: Tensor, window: PagedCache, main: PagedCache | None, main_idx: Tensor | None, rounded: bool
) -> bool:
    """Whether the kernel takes these: 64 heads of 512 in bf16, entries packed side by side."""
    if q.shape[1:] != (HEADS, DIM) or q.dtype != torch.bfloat16 or not rounded:
        return False
    caches = [(window, "window_fp8")]
    if main is not None and main_idx is not None:
        caches.append((main, "main_fp4"))
    return all(_packed(cache, form) for cache, form in caches)


def turns(cos: Tensor, sin: Tensor, quantize: QuantFormat | None) -> bool:
    """Whether the kernel rotates: 64 dimensions, by aligned values, and ACT8 behind that."""
    return quantize == "act8" and all(
        t.shape[1] == PAIRS and t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (cos, sin)
    )


def _packed(cache: PagedCache, form: str) -> bool:
    """Whether entries are 16-byte aligned, their scales right behind their codes."""
    codes, scales = cache.codes, cache.scales
    if cache.format != form or scales is None:
        return False
    return (
        codes.shape[1] > 1
        and codes.stride()[1:] == (_ENTRY_BYTES[form], 1)
        and scales.stride() == codes.stride()
        and scales.data_ptr() - codes.data_ptr() == _CODE_BYTES[form]
        and codes.data_ptr() % 16 == 0
        and codes.stride(0) % 16 == 0
    )


def plan(num_rows: int, tiles: int, processors: int, whole: bool = False) -> tuple[int, bool]:
    """Return how many blocks of threads take a row, and whether blocks pass sums on in memory.

    One block a row passes on the rest of a row where rows are cut into equal runs, with the bits of
    whole rows; more wait for each other, so the card must take all of them at once.
    """

    def round_of(shares: int) -> int:
        return _ROW_TILES + math.ceil(tiles / shares) + (_MEETING_TILES if shares > 1 else 0)

    rows = num_rows / processors  # of a block
    options: list[tuple[float, int, bool]] = [(math.ceil(rows) * round_of(1), 1, False)]
    if not whole:
        options += [(round_of(n), n, True) for n in _SHARES if num_rows * n <= processors]
    if rows > 1 and tiles:
        runs = rows * tiles + (rows + 1) * _ROW_TILES + _PASSING_TILES
        options.append((runs * _WORTH, 1, True))
    return min(options)[1:]


def _room(device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Return memory for what blocks pass on, and flags that are 0 before and after a launch."""
    index = device.index
    if index not in _ROOM:
        if torch.cuda.is_current_stream_capturing():
            return None, None  # the first launch of a graph does without
        blocks = nvcc.processors(device)
        _ROOM[index] = (
            torch.empty(blocks * PART, device=device),
            torch.zeros(blocks * FLAGS, dtype=torch.int32, device=device),
        )
    return _ROOM[index]


def attend(
    q: Tensor,
    window: PagedCache,
    window_idx: Tensor,
    main: PagedCache | None,
    main_idx: Tensor | None,
    sink: Tensor,
    scale: float,
    shares: int,
    source: Path = SOURCE,
    *,
    passing: bool = False,
    turn: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Run the kernel with `shares` blocks of threads a row; each number has its own bits.

    passing  through memory: where shares meet, or one block a row takes equal runs of tiles
    turn     cosines and sines: queries are rotated on the way in, results back on the way out and
             rounded with ACT8
    """
    room = _room(q.device) if passing else (None, None)
    if room[0] is None:
        shares = 1
    q = q.contiguous()
    out = torch.empty_like(q)
    other = main if main is not None and main_idx is not None else None
    nvcc.call(
        nvcc.load(source),
        "paged_attention",
        q.device,
        q,
        window.codes,
        window_idx.contiguous(),
        other.codes if other is not None else None,
        main_idx.contiguous() if main_idx is not None else None,
        sink,
        out,
        q.shape[0],
        window_idx.shape[1],
        main_idx.shape[1] if main_idx is not None else 0,
        window.codes.shape[1],
        window.codes.stride(0),
        other.codes.shape[1] if other is not None else 1,
        other.codes.stride(0) if other is not None else 0,
        shares,
        scale,
        *room,
        *(turn or (None, None)),
    )
    return out
