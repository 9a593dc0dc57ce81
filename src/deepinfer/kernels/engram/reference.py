"""Engram in plain torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer.kernels.quantize import decode_e4m3, decode_ue8m0, repeat_groups
from deepinfer.kernels.rows import sigmoid


def engram_hash(ngrams: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    """Exclusive-or of products, one order after the other, modulo each head's prime."""
    acc = ngrams[:, 0] * multipliers[0]
    columns = []
    for order in range(primes.shape[0]):
        acc = acc ^ (ngrams[:, order + 1] * multipliers[order + 1])
        columns.append(acc[:, None] % primes[order])
    return torch.cat(columns, dim=1) + offsets


def engram_lookup(codes: Tensor, scale: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Gather bytes, decode, scale."""
    index = rows.flatten()
    values = decode_e4m3(codes.view(torch.uint8).index_select(0, index))
    scales = decode_ue8m0(scale.index_select(0, index))
    return repeat_groups(values, scales).view(rows.shape[0], -1).to(dtype)


def engram_gate(x: Tensor, kv: Tensor, qk_weight: Tensor, eps: float) -> Tensor:
    """Sigmoid of the signed square root of a normalized dot product."""
    x32 = x.float()
    parts = torch.unflatten(kv.float(), -1, (-1, x.shape[2]))
    key, value = parts[:, :-1], parts[:, -1:]
    norm_x = torch.rsqrt(x32.square().mean(-1) + eps)
    norm_key = torch.rsqrt(key.square().mean(-1) + eps)
    dot = (x32 * qk_weight * key).sum(-1) * norm_x * norm_key / math.sqrt(x.shape[2])
    gate = sigmoid(torch.copysign(torch.sqrt(dot.abs().clamp(min=1e-6)), dot))
    return (x32 + gate.unsqueeze(-1) * value).to(x.dtype)
