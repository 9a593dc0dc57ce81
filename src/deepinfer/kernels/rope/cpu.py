"""Rotary positions for a CPU, in numpy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels.rope.reference import cos_sin
from deepinfer.kernels.workspace import as_array

__all__ = ["cos_sin", "rotate_tail"]


def rotate_tail(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """As the reference."""
    c, s = cos.numpy(), sin.numpy()
    dims = 2 * c.shape[1]
    if x.ndim == 3:
        c, s = c[:, None], s[:, None]
    out = x.clone()
    tail = out[..., -dims:]
    values = as_array(tail)
    even, odd = values[..., 0::2], values[..., 1::2]
    rotated = np.empty_like(values)
    if inverse:
        np.add(even * c, odd * s, rotated[..., 0::2])
        np.subtract(odd * c, even * s, rotated[..., 1::2])
    else:
        np.subtract(even * c, odd * s, rotated[..., 0::2])
        np.add(even * s, odd * c, rotated[..., 1::2])
    tail.copy_(torch.from_numpy(rotated))
    return out
