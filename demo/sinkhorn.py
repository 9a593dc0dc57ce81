"""Sinkhorn normalization of the hyper-connections with a hand-written gradient (Triton on a GPU, torch elsewhere)."""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch
    triton = None

_BLOCK = 64

if triton is not None:

    @triton.jit
    def _forward_kernel(
        raw, out, rows, cols, n, EPS: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr
    ):
        t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        i = tl.arange(0, 4)
        at = t[:, None, None] * 16 + i[None, :, None] * 4 + i[None, None, :]
        keep = (t < n)[:, None, None]
        row_at = t[:, None, None] * 4 + i[None, :, None]
        col_at = t[:, None, None] * 4 + i[None, None, :]
        x = tl.load(raw + at, mask=keep, other=0.0)
        c = tl.exp(x - tl.max(x, axis=2, keep_dims=True))
        c = c / tl.sum(c, axis=2, keep_dims=True) + EPS
        s = tl.sum(c, axis=1, keep_dims=True) + EPS
        c = c / s
        tl.store(cols + col_at, s, mask=keep)
        for k in range(1, STEPS):
            s = tl.sum(c, axis=2, keep_dims=True) + EPS
            c = c / s
            tl.store(rows + k * n * 4 + row_at, s, mask=keep)
            s = tl.sum(c, axis=1, keep_dims=True) + EPS
            c = c / s
            tl.store(cols + k * n * 4 + col_at, s, mask=keep)
        tl.store(out + at, c, mask=keep)

    @triton.jit
    def _backward_kernel(
        out,
        rows,
        cols,
        grad,
        result,
        n,
        EPS: tl.constexpr,
        STEPS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        i = tl.arange(0, 4)
        at = t[:, None, None] * 16 + i[None, :, None] * 4 + i[None, None, :]
        keep = (t < n)[:, None, None]
        row_at = t[:, None, None] * 4 + i[None, :, None]
        col_at = t[:, None, None] * 4 + i[None, None, :]
        c = tl.load(out + at, mask=keep, other=0.0)
        g = tl.load(grad + at, mask=keep, other=0.0)
        for m in range(1, STEPS):
            k = STEPS - m
            s = tl.load(cols + k * n * 4 + col_at, mask=keep, other=1.0)
            g = (g - tl.sum(g * c, axis=1, keep_dims=True)) / s
            c = c * s
            s = tl.load(rows + k * n * 4 + row_at, mask=keep, other=1.0)
            g = (g - tl.sum(g * c, axis=2, keep_dims=True)) / s
            c = c * s
        s = tl.load(cols + col_at, mask=keep, other=1.0)
        g = (g - tl.sum(g * c, axis=1, keep_dims=True)) / s
        p = c * s - EPS
        g = p * (g - tl.sum(g * p, axis=2, keep_dims=True))
        tl.store(result + at, g, mask=keep)


@torch.library.custom_op("demo::sinkhorn", mutates_args=())
def _sinkhorn(raw: Tensor, steps: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (normalized [N,4,4], row sums [steps,N,4], column sums [steps,N,4])."""
    raw = raw.contiguous()
    n = raw.shape[0]
    rows, cols = raw.new_ones(steps, n, 4), raw.new_empty(steps, n, 4)
    if raw.is_cuda:
        out = torch.empty_like(raw)
        _forward_kernel[(triton.cdiv(n, _BLOCK),)](
            raw, out, rows, cols, n, EPS=eps, STEPS=steps, BLOCK=_BLOCK
        )
        return out, rows, cols
    c = torch.softmax(raw, -1) + eps
    for k in range(steps):
        if k:
            s = c.sum(2, keepdim=True) + eps
            c = c / s
            rows[k] = s[:, :, 0]
        s = c.sum(1, keepdim=True) + eps
        c = c / s
        cols[k] = s[:, 0]
    return c, rows, cols


@_sinkhorn.register_fake
def _(raw: Tensor, steps: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    n = raw.shape[0]
    return torch.empty_like(raw), raw.new_empty(steps, n, 4), raw.new_empty(steps, n, 4)


@torch.library.custom_op("demo::sinkhorn_gradient", mutates_args=())
def _sinkhorn_gradient(c: Tensor, rows: Tensor, cols: Tensor, grad: Tensor, eps: float) -> Tensor:
    steps, n, _ = rows.shape
    grad = grad.contiguous()
    if c.is_cuda:
        result = torch.empty_like(c)
        grid = (triton.cdiv(n, _BLOCK),)
        _backward_kernel[grid](c, rows, cols, grad, result, n, EPS=eps, STEPS=steps, BLOCK=_BLOCK)
        return result
    g = grad
    for k in reversed(range(steps)):
        s = cols[k][:, None, :]
        g = (g - (g * c).sum(1, keepdim=True)) / s
        c = c * s
        if k:
            s = rows[k][:, :, None]
            g = (g - (g * c).sum(2, keepdim=True)) / s
            c = c * s
    p = c - eps
    return p * (g - (g * p).sum(2, keepdim=True))


@_sinkhorn_gradient.register_fake
def _(c: Tensor, rows: Tensor, cols: Tensor, grad: Tensor, eps: float) -> Tensor:
    return torch.empty_like(c)


def _save(ctx: object, inputs: tuple[object, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output)  # type: ignore[attr-defined]
    ctx.eps = inputs[2]  # type: ignore[attr-defined]


def _backward(ctx: object, grad: Tensor, _rows: object, _cols: object) -> tuple[Tensor, None, None]:
    c, rows, cols = ctx.saved_tensors  # type: ignore[attr-defined]
    return torch.ops.demo.sinkhorn_gradient(c, rows, cols, grad, ctx.eps), None, None  # type: ignore[attr-defined]


_sinkhorn.register_autograd(_backward, setup_context=_save)


def sinkhorn(raw: Tensor, steps: int, eps: float) -> Tensor:
    """Return the doubly normalized [N, 4, 4] fp32 of `raw`. Source: backbone specification, 2.2."""
    out: Tensor = torch.ops.demo.sinkhorn(raw, steps, eps)[0]
    return out
