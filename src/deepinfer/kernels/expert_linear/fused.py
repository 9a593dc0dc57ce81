"""All experts of a few rows in one function for a CPU: what the single ops compute, bit for bit.

The shared expert is one more run of rows behind the routed ones, so that gate, rounding and
quantizer run once for all. Products take the same 16-row blocks; a routing weight of 1 changes
nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.kernels.expert_linear import Fp4Weight
from deepinfer.kernels.linear import Fp8Weight
from deepinfer.kernels.quantize.cpu import round_into
from deepinfer.kernels.rows import ROW_BLOCK
from deepinfer.kernels.workspace import FloatArray, as_array, as_tensor, kept_rows, multiply

__all__ = ["experts", "fits"]

_Run = tuple[int, int, tuple[Tensor, Tensor]]
"""Rows begin..end-1 and the two matrices of their expert."""


def fits(x: Tensor, w2: Fp4Weight, shared_w2: Fp8Weight) -> bool:
    """Whether `experts` knows how to run these rows: at most 16, equally wide experts."""
    return x.shape[0] <= ROW_BLOCK and 2 * w2.codes.shape[2] == shared_w2.codes.shape[1]


def experts(
    x: Tensor,
    chosen: Tensor,
    weight: Tensor,
    w1_w3: Fp4Weight,
    w2: Fp4Weight,
    shared_w1_w3: Fp8Weight,
    shared_w2: Fp8Weight,
    limit: float,
    quantize: bool,
) -> Tensor:
    """Run the chosen experts and the shared one on x [T, C]; returns [T, C] dtype of x.

    chosen    [T, k] int64, weight [T, k] fp32
    limit     of SwiGLU
    quantize  round the inputs of both products with ACT8
    A token's terms add up in fp32 in ascending expert order, the shared expert last.
    """
    num_rows, num_active = chosen.shape
    flat = chosen.numpy().ravel()
    order = flat.argsort(kind="stable")
    num_routed = order.shape[0]
    shared = shared_w1_w3.dequantize(), shared_w2.dequantize()
    runs = _runs(flat[order].tolist(), w1_w3, w2)
    runs.append((num_routed, num_routed + num_rows, shared))
    rows = kept_rows(num_rows, x.shape[1], "experts").array
    _fill(rows, x, quantize)
    spread = np.concatenate([rows[order // num_active], rows])
    gate_up = _rounded(_products(spread, runs, 0), x.dtype)
    half = gate_up.shape[1] // 2
    hidden = _swiglu(gate_up[:, :half], gate_up[:, half:], limit)
    routed = hidden[:num_routed]
    np.multiply(weight.numpy().ravel()[order][:, None], routed, routed)
    stored = as_tensor(hidden, x.dtype)
    if quantize or stored.dtype != torch.float32:
        _fill(hidden, stored, quantize)
    out = _rounded(_products(hidden, runs, 1), x.dtype)
    place = np.empty_like(order)
    place[order] = np.arange(num_routed)
    ascending = np.sort(place.reshape(num_rows, num_active), axis=1)
    total = np.add.reduce(out[ascending], axis=1)
    return as_tensor(total + out[num_routed:], x.dtype)


def _runs(owners: list[int], w1_w3: Fp4Weight, w2: Fp4Weight) -> list[_Run]:
    """Return one run for each expert among the rows' sorted owners."""
    starts = [i for i, owner in enumerate(owners) if not i or owner != owners[i - 1]]
    ends = [*starts[1:], len(owners)]
    return [
        (begin, end, (w1_w3.dequantize(owners[begin]), w2.dequantize(owners[begin])))
        for begin, end in zip(starts, ends, strict=True)
    ]


def _products(x: FloatArray, runs: list[_Run], which: int) -> FloatArray:
    """Multiply each run's rows by its first or second matrix."""
    out = np.empty((x.shape[0], runs[0][2][which].shape[0]), dtype=np.float32)
    for begin, end, matrices in runs:
        rows = kept_rows(end - begin, x.shape[1])
        rows.array[...] = x[begin:end]
        out[begin:end] = multiply(rows, matrices[which]).array
    return out


def _swiglu(gate: FloatArray, up: FloatArray, limit: float) -> FloatArray:
    if limit > 0:
        gate = np.minimum(gate, np.float32(limit))
        up = np.minimum(np.maximum(up, np.float32(-limit)), np.float32(limit))
    exps: FloatArray = torch.exp(torch.from_numpy(np.negative(gate))).numpy()
    np.add(exps, np.float32(1.0), exps)
    np.divide(gate, exps, exps)
    return np.multiply(exps, up, exps)


def _fill(out: FloatArray, x: Tensor, quantize: bool) -> None:
    if quantize:
        round_into(x, "act8", out)
    else:
        out[...] = as_array(x)


def _rounded(values: FloatArray, dtype: torch.dtype) -> NDArray[np.float32]:
    return values if dtype == torch.float32 else as_array(as_tensor(values, dtype))
