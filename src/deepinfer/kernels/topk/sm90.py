"""Selection in CUDA C++ for SM90: one read of the scores, then a few hundred entries again.

`sm90.cu` says how. What its contract leaves out runs in Triton.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from deepinfer.kernels import nvcc
from deepinfer.kernels.topk import triton

__all__ = ["block_mask", "select_blocks", "select_topk"]

SOURCE: Final = Path(__file__).with_name("sm90.cu")
MAX_COUNT: Final = 1024
SHARED: Final = 222 * 1024  # bytes that a block may take
_CHUNK: Final = 512 * 32  # entries of a stage of the ring

block_mask = triton.block_mask


def _row_bytes(scores: Tensor) -> int:
    return scores.stride(0) * scores.element_size()


def _readable(scores: Tensor, visible: Tensor) -> bool:
    """Whether rows are aligned runs of a known type."""
    return (
        scores.dtype in (torch.float32, torch.bfloat16)
        and scores.stride(1) == 1
        and scores.data_ptr() % 16 == 0
        and _row_bytes(scores) % 16 == 0
        and visible.is_contiguous()
        and visible.dtype == torch.int64
    )


def _up(n: int) -> int:
    return -(-n // 16) * 16


def _ring_bytes(size: int) -> int:
    return _CHUNK * size * 2 + 16


def _topk_bytes(entries: int, count: int, size: int) -> int:
    """Shared memory of a selection (`select_bytes`)."""
    listed = 2 * count if count > 512 else 1024
    keys = max(_up(-(-entries // 16) * size + 16), _up(listed * 16 * size + 16))
    return _ring_bytes(size) + keys + (listed + 2048) * 4


def accepts_topk(scores: Tensor, visible: Tensor, count: int) -> bool:
    """Whether the kernel takes a call: rows of 16-byte pieces, room for the keys."""
    size = scores.element_size()
    fits = _topk_bytes(scores.shape[1], count, size) <= SHARED
    return 0 < count <= MAX_COUNT and fits and _readable(scores, visible)


def select_topk(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """As the reference, of fp32 or bf16 scores. NaN is above every number, as in the reference."""
    if not accepts_topk(scores, visible, count):
        return triton.select_topk(scores, visible, count)
    num_rows, entries = scores.shape
    out = torch.empty(num_rows, count, dtype=torch.int64, device=scores.device)
    if num_rows:
        nvcc.call(
            nvcc.load(SOURCE), "select_topk", scores.device, scores, visible, out, num_rows,
            entries, scores.stride(0), count, scores.element_size(), nvcc.processors(scores.device),
        )  # fmt: skip
    return out


def accepts_blocks(scores: Tensor, visible: Tensor, num_blocks: int, block_size: int) -> bool:
    """Whether the kernel takes a call: blocks of 8 or 16, whose keys fit together."""
    size = scores.element_size()
    blocks = -(-scores.shape[1] // block_size)
    fits = _ring_bytes(size) + _up(blocks * size + 16) <= SHARED
    return num_blocks > 0 and fits and block_size in (8, 16) and _readable(scores, visible)


def select_blocks(scores: Tensor, visible: Tensor, num_blocks: int, block_size: int) -> Tensor:
    """As the reference, of fp32 or bf16 scores."""
    if not accepts_blocks(scores, visible, num_blocks, block_size):
        return triton.select_blocks(scores, visible, num_blocks, block_size)
    num_rows, entries = scores.shape
    out = torch.empty(num_rows, num_blocks, dtype=torch.int64, device=scores.device)
    if num_rows:
        nvcc.call(
            nvcc.load(SOURCE), "select_blocks", scores.device, scores, visible, out, num_rows,
            entries, scores.stride(0), num_blocks, block_size, scores.element_size(),
            nvcc.processors(scores.device),
        )  # fmt: skip
    return out
