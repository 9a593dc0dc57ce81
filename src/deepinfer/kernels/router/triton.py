"""Routing in Triton: a product cut over its inputs, then one program per token picks its experts.

The cuts lie in the same places in any batch, and parts are added up in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.linear import DenseWeight
from deepinfer.kernels.linear.triton import tile_rows
from deepinfer.kernels.router.reference import EPS
from deepinfer.kernels.tiles import (
    act8_round_trip,
    ceil_div,
    dot,
    in_turn,
    launch,
    narrow,
    next_power,
    runs_on_bf16,
)

_EXPERTS, _INPUTS, _PART = 64, 64, 640


@triton.jit
def _scores(
    x, gate, sums, T, E, C, x_row, part,
    BF16: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """sums [parts, T, E]: products over `part` of the inputs."""
    in_turn()
    row = tl.program_id(1).to(tl.int64) * BT + tl.arange(0, BT)
    expert = tl.program_id(0) * BN + tl.arange(0, BN)
    begin = tl.program_id(2) * part
    acc = tl.zeros((BN, BT), tl.float32)
    for start in range(begin, begin + part, BK):
        k = start + tl.arange(0, BK)
        held = (row < T)[:, None] & (k < C)[None, :]
        values = tl.load(x + row[:, None] * x_row + k[None, :], held, 0.0)
        held = (expert < E)[:, None] & (k < C)[None, :]
        weights = tl.load(gate + expert[:, None] * C + k[None, :], held, 0.0)
        if not BF16:
            values, weights = values.to(tl.float32), weights.to(tl.float32)
        acc = dot(weights, tl.trans(values), acc, BF16)
    at = sums + (tl.program_id(2) * T + row[:, None]) * E + expert[None, :]
    tl.store(at, tl.trans(acc), (row < T)[:, None] & (expert < E)[None, :])


@triton.jit
def _choose(
    sums, bias, chosen, weights, row, T, E, scaling, eps,
    PARTS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Pick a row's experts from the parts of its scores."""
    expert = tl.arange(0, BE)
    held = expert < E
    logit = tl.zeros((BE,), tl.float32)
    for part in tl.static_range(PARTS):
        logit += tl.load(sums + (row + part * T) * E + expert, held, 0.0)
    small = tl.log(1.0 + tl.exp(tl.where(logit > 20.0, 0.0, logit)))
    # log1p near 0: log(1 + y) loses y's bits, y itself keeps them.
    tiny = tl.exp(tl.where(logit > -10.0, -10.0, logit))
    small = tl.where(logit < -10.0, tiny - 0.5 * tiny * tiny, small)
    score = tl.sqrt_rn(tl.where(logit > 20.0, logit, small))
    biased = tl.where(held, score + tl.load(bias + expert, held, 0.0), float("-inf"))
    choice = tl.arange(0, BK)
    places = tl.zeros((BK,), tl.int32)
    scores = tl.zeros((BK,), tl.float32)
    total = 0.0
    for i in tl.static_range(K):
        best = tl.max(biased, 0)
        place = tl.min(tl.where((biased == best) & held, expert, BE), 0)
        mine = tl.sum(tl.where(expert == place, score, 0.0), 0)
        total += mine
        places = tl.where(choice == i, place, places)
        scores = tl.where(choice == i, mine, scores)
        biased = tl.where(expert == place, float("-inf"), biased)
        held = held & (expert != place)
    tl.store(chosen + row * K + choice, places.to(tl.int64), choice < K)
    tl.store(weights + row * K + choice, tl.div_rn(scores, total + eps) * scaling, choice < K)


@triton.jit
def _pick(
    sums, bias, chosen, weights, x, out, T, E, C, scaling, eps, x_row,
    PARTS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Program (row, 0) picks experts, program (row, i) rounds BC values of x with ACT8."""
    in_turn()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if part == 0:
        _choose(sums, bias, chosen, weights, row, T, E, scaling, eps, PARTS, K, BK, BE)
    else:
        column = (part - 1) * BC + tl.arange(0, BC)
        held = column < C
        values = tl.load(x + row * x_row + column, held, 0.0).to(tl.float32)
        values = tl.reshape(act8_round_trip(tl.reshape(values, (1, BC)), 1, BC), (BC,))
        tl.store(out + row * C + column, narrow(values, out.dtype.element_ty), held)


def route(
    x: Tensor, gate: DenseWeight, bias: Tensor, num_active: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """As the reference."""
    return _route(x, gate, bias, num_active, scaling, None)


def route_rounded(
    x: Tensor, gate: DenseWeight, bias: Tensor, num_active: int, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return *_route(x, gate, bias, num_active, scaling, out), out


def _route(
    x: Tensor, gate: DenseWeight, bias: Tensor, num_active: int, scaling: float, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Route, and round x into `out` where there is one."""
    num_rows, num_experts = x.shape[0], bias.shape[0]
    chosen = torch.empty(num_rows, num_active, dtype=torch.int64, device=x.device)
    weights = torch.empty(num_rows, num_active, dtype=torch.float32, device=x.device)
    if not num_rows:
        return chosen, weights
    stored = gate.stored.contiguous()
    x = x if x.stride(1) == 1 else x.contiguous()
    width, parts = x.shape[1], ceil_div(x.shape[1], _PART)
    bf16 = runs_on_bf16(x.dtype) and runs_on_bf16(stored.dtype)
    rows = tile_rows(num_rows, bf16)
    sums = torch.empty(parts, num_rows, num_experts, dtype=torch.float32, device=x.device)
    launch(
        _scores, (ceil_div(num_experts, _EXPERTS), ceil_div(num_rows, rows), parts),
        x, stored, sums, num_rows, num_experts, width, x.stride(0), _PART,
        BF16=bf16, BT=rows, BN=_EXPERTS, BK=_INPUTS,
    )  # fmt: skip
    block = min(512, next_power(width, 32))
    launch(
        _pick, (num_rows, 1 if out is None else 1 + ceil_div(width, block)), sums, bias, chosen,
        weights, x, x if out is None else out, num_rows, num_experts, width,
        float(scaling), EPS, x.stride(0), PARTS=parts, K=num_active, BK=next_power(num_active),
        BE=next_power(num_experts), BC=block, num_warps=1,
    )  # fmt: skip
    return chosen, weights
