"""Routing in Triton: scores as a dense product, then one program per token picks its experts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.linear import DenseWeight
from deepinfer.kernels.linear.triton import dense_linear
from deepinfer.kernels.router.reference import EPS
from deepinfer.kernels.tiles import launch, next_power


@triton.jit
def _pick(logits, bias, chosen, weights, E, scaling, eps, K: tl.constexpr, BE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BE)
    held = expert < E
    logit = tl.load(logits + row * E + expert, held, 0.0)
    small = tl.log(1.0 + tl.exp(tl.where(logit > 20.0, 0.0, logit)))
    # log1p near 0: log(1 + y) loses y's bits, y itself keeps them.
    tiny = tl.exp(tl.where(logit > -10.0, -10.0, logit))
    small = tl.where(logit < -10.0, tiny - 0.5 * tiny * tiny, small)
    score = tl.sqrt_rn(tl.where(logit > 20.0, logit, small))
    biased = tl.where(held, score + tl.load(bias + expert, held, 0.0), float("-inf"))
    total = 0.0
    for _ in tl.static_range(K):
        best = tl.max(biased, 0)
        place = tl.min(tl.where((biased == best) & held, expert, BE), 0)
        total += tl.sum(tl.where(expert == place, score, 0.0), 0)
        biased = tl.where(expert == place, float("-inf"), biased)
        held = held & (expert != place)
    held = expert < E
    biased = tl.where(held, score + tl.load(bias + expert, held, 0.0), float("-inf"))
    for i in tl.static_range(K):
        best = tl.max(biased, 0)
        place = tl.min(tl.where((biased == best) & held, expert, BE), 0)
        mine = tl.sum(tl.where(expert == place, score, 0.0), 0)
        tl.store(chosen + row * K + i, place.to(tl.int64))
        tl.store(weights + row * K + i, tl.div_rn(mine, total + eps) * scaling)
        biased = tl.where(expert == place, float("-inf"), biased)
        held = held & (expert != place)


def route(
    x: Tensor, gate: DenseWeight, bias: Tensor, num_active: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """As the reference."""
    num_rows, num_experts = x.shape[0], bias.shape[0]
    chosen = torch.empty(num_rows, num_active, dtype=torch.int64, device=x.device)
    weights = torch.empty(num_rows, num_active, dtype=torch.float32, device=x.device)
    if not num_rows:
        return chosen, weights
    logits = dense_linear(x, gate, torch.float32)
    launch(
        _pick, (num_rows,), logits, bias, chosen, weights, num_experts, float(scaling), EPS,
        K=num_active, BE=next_power(num_experts),
    )  # fmt: skip
    return chosen, weights
