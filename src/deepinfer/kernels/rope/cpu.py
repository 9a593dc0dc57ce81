"""Rotary positions for a CPU: pairs times cosines plus swapped pairs times signed sines."""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels.rope import reference
from deepinfer.kernels.rope.reference import cos_sin
from deepinfer.kernels.rows import ROW_BLOCK
from deepinfer.kernels.workspace import FloatArray, as_array

__all__ = ["cos_sin", "rotate_tail"]

_KEPT_ROTATIONS = 8


class _Kept(threading.local):
    """This thread's last rotations, doubled: the layers of a step share one or two."""

    def __init__(self) -> None:
        self.doubled: dict[int, tuple[Tensor, FloatArray, FloatArray, FloatArray]] = {}


_KEPT = _Kept()


def rotate_tail(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """As the reference."""
    if x.shape[0] > ROW_BLOCK:
        return reference.rotate_tail(x, cos, sin, inverse)
    found = _KEPT.doubled.get(id(sin))
    if found is None or found[0] is not sin:
        if len(_KEPT.doubled) >= _KEPT_ROTATIONS:
            _KEPT.doubled.clear()
        found = _KEPT.doubled[id(sin)] = (sin, *_double(cos, sin))
    cosines, sines = found[1], found[3 if inverse else 2]
    if x.ndim == 3:
        cosines, sines = cosines[:, None], sines[:, None]
    out = x.clone()
    tail = out[..., -2 * cos.shape[1] :]
    pairs = as_array(tail).reshape(*tail.shape[:-1], -1, 2)
    rotated = pairs * cosines
    np.add(rotated, pairs[..., ::-1] * sines, rotated)
    tail.copy_(torch.from_numpy(rotated).view(tail.shape))
    return out


def _double(cos: Tensor, sin: Tensor) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return [T, R/2, 2] of cosines, of sines signed for the rotation and for its inverse."""
    c, s = cos.numpy(), sin.numpy()
    return np.stack([c, c], -1), np.stack([-s, s], -1), np.stack([s, -s], -1)
