"""Index scores in Triton on cached keys: one program per row and stretch of 64 keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.tiles import (
    ceil_div,
    dot,
    e2m1_value,
    in_turn,
    launch,
    narrow,
    next_power,
    runs_on_bf16,
    ue8m0_value,
)

if TYPE_CHECKING:
    from deepinfer.kernels.cache_io import PagedCache

_KEYS = 64


@triton.jit
def _round(x, BF16: tl.constexpr):
    return narrow(x, tl.bfloat16).to(tl.float32) if BF16 else x


@triton.jit
def _score(
    q, weight, codes, scales, table, rows, visible, blocks, out,
    columns, H, D, width, per_block, block_size, num_blocks,
    code_block, code_entry, scale_block, scale_entry,
    PACKED: tl.constexpr, CHOSEN: tl.constexpr, BF16: tl.constexpr, EACH: tl.constexpr,
    LAST: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """CHOSEN: columns run through candidate blocks. EACH and LAST say what is rounded to bf16."""
    in_turn()
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BS + tl.arange(0, BS)
    seen = tl.load(visible + row)
    if CHOSEN:
        group = column // block_size
        block = tl.load(blocks + row * num_blocks + group, column < columns, -1)
        entry = tl.where(block < 0, -1, block * block_size + column % block_size)
    else:
        entry = column.to(tl.int64)
    held = (entry >= 0) & (entry < seen) & (column < columns)
    scores = tl.full((BS,), float("-inf"), tl.float32)
    if tl.max(held.to(tl.int32), 0) > 0:
        entry = tl.where(held, entry, 0)
        own = tl.load(rows + row)
        page = tl.load(table + own * width + entry // per_block, held, 0)
        inside = entry % per_block
        head = tl.arange(0, BH)
        dim = tl.arange(0, BD)
        at = q + (row * H + head[:, None]) * D + dim[None, :]
        queries = tl.load(at, (head < H)[:, None] & (dim < D)[None, :], 0.0).to(tl.float32)
        source = codes + page * code_block + inside * code_entry
        if PACKED:
            pair = tl.arange(0, BD // 2)
            known = held[:, None] & (pair < D // 2)[None, :]
            both = tl.load(source[:, None] + pair[None, :], known, 0).to(tl.int32)
            part = tl.arange(0, BD // 32)
            known = held[:, None] & (part < D // 32)[None, :]
            at_scale = scales + page * scale_block + inside * scale_entry
            factor = ue8m0_value(tl.load(at_scale[:, None] + part[None, :], known, 127))
            keys = tl.reshape(
                tl.join(e2m1_value(both & 15), e2m1_value(both >> 4)), (BS, BD // 32, 32)
            )
            keys = tl.reshape(keys * factor[:, :, None], (BS, BD))
        else:
            known = held[:, None] & (dim < D)[None, :]
            keys = tl.load(source[:, None] + dim[None, :], known, 0.0)
        zero = tl.zeros((BH, BS), tl.float32)
        dots = _round(dot(queries, tl.trans(keys), zero, BF16), EACH)
        factor = tl.load(weight + row * H + head, head < H, 0.0).to(tl.float32)[:, None]
        dots = tl.where(dots > 0.0, dots, 0.0)
        found = _round(tl.sum(_round(dots * factor, EACH), 0), LAST)
        scores = tl.where(held, found, scores)
    tl.store(out + row * columns + column, scores, column < columns)


def paged_index_score(
    q: Tensor,
    weight: Tensor,
    cache: PagedCache,
    table: Tensor,
    rows: Tensor,
    visible: Tensor,
    blocks: Tensor | None,
    block_size: int,
    num_entries: int,
    rounding: str,
) -> Tensor:
    """As the reference, with the bits of `index_score` in Triton."""
    q, weight = q.contiguous(), weight.contiguous()
    num_rows, heads, dim = q.shape
    num_blocks = 0 if blocks is None else blocks.shape[1]
    columns = num_entries if blocks is None else num_blocks * block_size
    out = torch.empty(num_rows, columns, dtype=torch.float32, device=q.device)
    codes, scales = cache.codes, cache.codes if cache.scales is None else cache.scales
    table = table if table.stride(1) == 1 else table.contiguous()
    launch(
        _score, (ceil_div(columns, _KEYS), num_rows), q, weight, codes, scales, table,
        rows.contiguous(), visible.contiguous(), table if blocks is None else blocks.contiguous(),
        out, columns, heads, dim, table.stride(0), codes.shape[1], block_size, num_blocks,
        codes.stride(0), codes.stride(1), scales.stride(0), scales.stride(1),
        PACKED=cache.scales is not None, CHOSEN=blocks is not None, BF16=runs_on_bf16(q.dtype),
        EACH=rounding == "reference", LAST=rounding != "none",
        BH=next_power(heads, 16), BD=next_power(dim, 32), BS=_KEYS,
    )  # fmt: skip
    return out


@triton.jit
def _flat(
    entries, table, rows, blocks, out, K, per_block, width, N, size,
    CHOSEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    in_turn()
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = column < K
    entry = tl.load(entries + row * K + column, held, -1)
    known = held & (entry >= 0)
    entry = tl.where(known, entry, 0)
    if CHOSEN:
        entry = tl.load(blocks + row * N + entry // size, known, 0) * size + entry % size
    page = tl.load(table + tl.load(rows + row) * width + entry // per_block, known, 0)
    flat = page * per_block + entry % per_block
    tl.store(out + row * K + column, tl.where(known, flat, -1), held)


def flat_entries(
    entries: Tensor, table: Tensor, rows: Tensor, per_block: int, blocks: Tensor | None, size: int
) -> Tensor:
    """As `places.flat_entries`."""
    entries, table = entries.contiguous(), table if table.stride(1) == 1 else table.contiguous()
    out = torch.empty_like(entries)
    num_rows, count = entries.shape
    if out.numel():
        block = min(512, next_power(count))
        chosen = table if blocks is None else blocks.contiguous()
        launch(
            _flat, (ceil_div(count, block), num_rows), entries, table, rows.contiguous(), chosen,
            out, count, per_block, table.stride(0), chosen.shape[1], size,
            CHOSEN=blocks is not None, BLOCK=block,
        )  # fmt: skip
    return out
