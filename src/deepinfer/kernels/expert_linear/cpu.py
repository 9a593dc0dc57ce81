"""Expert products for a CPU: through kept 16-row buffers, elementwise work in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels.expert_linear import Fp4Weight
from deepinfer.kernels.expert_linear.reference import borders
from deepinfer.kernels.quantize import act8_values
from deepinfer.kernels.quantize.cpu import round_into
from deepinfer.kernels.rows import ROW_BLOCK
from deepinfer.kernels.workspace import as_array, as_tensor, kept_rows, multiply


def expert_linear(
    x: Tensor, weight: Fp4Weight, offsets: Sequence[int] | Tensor, quantize_input: bool
) -> Tensor:
    """As the reference: each expert's rows in the same 16-row blocks."""
    num_rows, width = x.shape
    if quantize_input:
        values = np.empty((num_rows, width), dtype=np.float32)
        round_into(x, "act8", values)
    else:
        values = as_array(x)
    out = np.empty((num_rows, weight.codes.shape[1]), dtype=np.float32)
    for expert, (begin, end) in enumerate(pairwise(borders(offsets))):
        if begin == end:
            continue
        matrix = weight.dequantize(expert)
        for start in range(begin, end, ROW_BLOCK):
            stop = min(start + ROW_BLOCK, end)
            rows = kept_rows(stop - start, width)
            rows.array[...] = values[start:stop]
            out[start:stop] = multiply(rows, matrix).array
    return as_tensor(out, x.dtype)


def swiglu(
    gate: Tensor, up: Tensor, limit: float, weight: Tensor | None, quantize: bool = False
) -> Tensor:
    """As the reference; the exponential is torch's, for numpy's has other bits."""
    g, u = as_array(gate), as_array(up)
    if limit > 0:
        g, u = np.minimum(g, limit), np.minimum(np.maximum(u, -limit), limit)
    exps = torch.exp(torch.from_numpy(np.negative(g))).numpy()
    np.add(exps, np.float32(1.0), exps)
    np.divide(g, exps, exps)
    np.multiply(exps, u, exps)
    if weight is not None:
        np.multiply(weight.numpy()[:, None], exps, exps)
    out = as_tensor(exps, gate.dtype)
    return act8_values(out).to(gate.dtype) if quantize else out
