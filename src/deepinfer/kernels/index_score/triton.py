"""Index scores in Triton: one program per row and stretch of keys, heads in order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.tiles import ceil_div, dot, launch, narrow, next_power, runs_on_bf16

_KEYS = 64


@triton.jit
def _round(x, BF16: tl.constexpr):
    return narrow(x, tl.bfloat16).to(tl.float32) if BF16 else x


@triton.jit
def _index_score(
    q, weight, keys, out, S, H, D, key_batch, key_row, BF16: tl.constexpr,
    EACH: tl.constexpr, LAST: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """EACH rounds every head's part to bf16, LAST the sum."""
    row = tl.program_id(1).to(tl.int64)
    key = tl.program_id(0).to(tl.int64) * BS + tl.arange(0, BS)
    head = tl.arange(0, BH)
    dim = tl.arange(0, BD)
    held = (head < H)[:, None] & (dim < D)[None, :]
    queries = tl.load(q + (row * H + head[:, None]) * D + dim[None, :], held, 0.0).to(tl.float32)
    held = (key < S)[:, None] & (dim < D)[None, :]
    at = keys + row * key_batch + key[:, None] * key_row + dim[None, :]
    entries = tl.load(at, held, 0.0)
    zero = tl.zeros((BH, BS), tl.float32)
    dots = _round(dot(queries, tl.trans(entries), zero, BF16), EACH)
    factor = tl.load(weight + row * H + head, head < H, 0.0).to(tl.float32)[:, None]
    dots = tl.where(dots > 0.0, dots, 0.0)
    scores = _round(tl.sum(_round(dots * factor, EACH), 0), LAST)
    tl.store(out + row * S + key, scores, key < S)


def index_score(q: Tensor, weight: Tensor, keys: Tensor, rounding: str) -> Tensor:
    """As the reference."""
    q, weight = q.contiguous(), weight.contiguous()
    keys = keys if keys.stride(-1) == 1 else keys.contiguous()
    num_rows, heads, dim = q.shape
    num_keys = keys.shape[-2]
    out = torch.empty(num_rows, num_keys, dtype=torch.float32, device=q.device)
    launch(
        _index_score, (ceil_div(num_keys, _KEYS), num_rows), q, weight, keys, out,
        num_keys, heads, dim, keys.stride(0) if keys.ndim == 3 else 0, keys.stride(-2),
        BF16=runs_on_bf16(q.dtype), EACH=rounding == "reference", LAST=rounding != "none",
        BH=next_power(heads, 16), BD=next_power(dim, 16), BS=_KEYS,
    )  # fmt: skip
    return out
