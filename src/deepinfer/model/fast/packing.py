"""Weights brought into the form that a card's kernels read, block by block, and stored bytes freed.

Kernels of a card keep packed copies of weights, made at a weight's first use
(`kernels/packed/kept.py`). A block is packed as soon as it is loaded, by running its products on a
row of zeros, so that never more than one block lies in both forms.
"""

from __future__ import annotations

import torch

from deepinfer.kernels.expert_linear import Fp4Weight
from deepinfer.kernels.linear import Fp8Weight
from deepinfer.kernels.ops import Ops
from deepinfer.kernels.packed.kept import release
from deepinfer.model.fast.step import Numerics
from deepinfer.model.fast.weights import BlockWeights

__all__ = ["pack_block", "pack_linear"]


def pack_block(ops: Ops, numerics: Numerics, block: BlockWeights, groups: int) -> int:
    """Pack a block's matrices and free the stored bytes of those that have a packed form.

    groups   of the output projection
    returns  bytes freed
    What has none, by its size, its type or the chosen kernels, stays as it is.
    """
    attention, moe = block.attention, block.moe
    freed = 0
    for weight in (
        attention.wq_a_wkv,
        attention.wq_b,
        attention.wo_b,
        moe.shared_w1_w3,
        moe.shared_w2,
        *([] if block.indexer is None else [block.indexer.wq_b]),
        *([] if block.engram is None else [block.engram.wkv]),
    ):
        freed += pack_linear(ops, numerics, weight)
    wo_a = attention.wo_a
    row = _zeros(numerics, wo_a.codes, groups, wo_a.codes.shape[1])
    ops.grouped_linear(row, wo_a, False)
    freed += release((wo_a.codes, wo_a.scale))
    return freed + _pack_experts(ops, numerics, moe.w1_w3, moe.w2)


def pack_linear(ops: Ops, numerics: Numerics, weight: Fp8Weight) -> int:
    """As `pack_block`, of one matrix."""
    ops.fp8_linear(_zeros(numerics, weight.codes, weight.codes.shape[1]), weight, False)
    return release((weight.codes, weight.scale))


def _pack_experts(ops: Ops, numerics: Numerics, w1_w3: Fp4Weight, w2: Fp4Weight) -> int:
    experts, width = w2.codes.shape[:2]
    if not experts:
        return 0
    device = w2.codes.device
    offsets = torch.ones(experts + 1, dtype=torch.int64, device=device)
    offsets[:1] = 0
    row = torch.zeros(1, dtype=torch.int64, device=device)
    weight = torch.zeros(1, device=device)
    x = _zeros(numerics, w2.codes, width)
    ops.routed_experts(x, row, weight, offsets, w1_w3, w2, 0.0, numerics.quantize)
    # Both or none: where one has no packed form both go another way.
    return release((w1_w3.codes, w1_w3.scale), (w2.codes, w2.scale))


def _zeros(numerics: Numerics, like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return one row of zeros."""
    return torch.zeros(1, *shape, dtype=numerics.dtype, device=like.device)
