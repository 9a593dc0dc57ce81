"""Copies to and means over streams in Triton: one program per row and stretch of columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.tiles import ceil_div, in_turn, launch, narrow, next_power

_COLUMNS = 1024


@triton.jit
def _start(
    embed, ids, stream, pre, C, embed_row, M: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    in_turn()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = column < C
    source = embed + tl.load(ids + row) * embed_row
    values = tl.load(source + column, held, 0.0).to(stream.dtype.element_ty)
    for m in tl.static_range(M):
        tl.store(stream + (row * M + m) * C + column, values, held)
    if tl.program_id(1) == 0:
        place = tl.arange(0, BM)
        tl.store(pre + row * M + place, tl.where(place == 0, 1.0, 0.0), place < M)


@triton.jit
def _mean(stream, out, C, out_row, M: tl.constexpr, BLOCK: tl.constexpr):
    in_turn()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = column < C
    total = tl.load(stream + row * M * C + column, held, 0.0).to(tl.float32)
    for m in tl.static_range(1, M):
        total += tl.load(stream + (row * M + m) * C + column, held, 0.0).to(tl.float32)
    mean = tl.div_rn(total, tl.full((BLOCK,), M, tl.float32))
    tl.store(out + row * out_row + column, narrow(mean, out.dtype.element_ty), held)


def start_streams(
    embed: Tensor, token_ids: Tensor, num_streams: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As `streams.start_streams`."""
    num_rows, width = token_ids.shape[0], embed.shape[1]
    stream = torch.empty(num_rows, num_streams, width, dtype=dtype, device=embed.device)
    pre = torch.empty(num_rows, num_streams, dtype=torch.float32, device=embed.device)
    block = min(_COLUMNS, next_power(width))
    if num_rows:
        launch(
            _start, (num_rows, ceil_div(width, block)), embed, token_ids.contiguous(), stream, pre,
            width, embed.stride(0), M=num_streams, BM=next_power(num_streams), BLOCK=block,
        )  # fmt: skip
    return stream, pre


def mean_into(stream: Tensor, out: Tensor) -> None:
    """As `streams.mean_into`."""
    stream = stream.contiguous()
    num_rows, num_streams, width = stream.shape
    block = min(_COLUMNS, next_power(width))
    if num_rows:
        launch(
            _mean, (num_rows, ceil_div(width, block)), stream, out, width, out.stride(0),
            M=num_streams, BLOCK=block,
        )  # fmt: skip
