"""Stable choice of entries and of candidate blocks; ties go to the smaller index."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from deepinfer.kernels.contract import check
from deepinfer.kernels.topk import reference

__all__ = ["block_mask", "select_blocks", "select_topk"]


def select_topk(
    scores: Tensor,
    visible: Tensor,
    count: int,
    *,
    impl: Callable[[Tensor, Tensor, int], Tensor] = reference.select_topk,
) -> Tensor:
    """Pick the best visible entries of each row.

    scores   [T, S] fp32 or bf16; -inf is never picked, NaN is above every number
    visible  [T] int64, entries 0..visible-1 may be picked
    returns  [T, count] int64, ascending, -1 padded
    Source: backbone specification, 5.3.
    """
    check("select_topk", ("scores", scores, "T S"), ("visible", visible, "T"))
    return impl(scores, visible, count)


def select_blocks(
    scores: Tensor,
    visible: Tensor,
    num_blocks: int,
    block_size: int,
    *,
    impl: Callable[[Tensor, Tensor, int, int], Tensor] = reference.select_blocks,
) -> Tensor:
    """Pick the blocks with the best visible entries; the newest visible block always.

    returns [T, num_blocks] int64, ascending, -1 padded. Source: backbone specification, 5.4.
    """
    check("select_blocks", ("scores", scores, "T S"), ("visible", visible, "T"))
    return impl(scores, visible, num_blocks, block_size)


def block_mask(
    blocks: Tensor,
    num_entries: int,
    block_size: int,
    *,
    impl: Callable[[Tensor, int, int], Tensor] = reference.block_mask,
) -> Tensor:
    """Mark the entries inside the chosen blocks [T, K] (-1 padded): [T, num_entries] bool."""
    check("block_mask", ("blocks", blocks, "T K"))
    return impl(blocks, num_entries, block_size)
