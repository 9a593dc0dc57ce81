"""Latent and entry in plain torch: norm, norm, rotate."""

from __future__ import annotations

from torch import Tensor

from deepinfer.kernels.quantize.reference import round_trip
from deepinfer.kernels.rms_norm.reference import rms_norm
from deepinfer.kernels.rope.reference import rotate_tail


def latent_entry(
    both: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    quantize: bool = False,
) -> tuple[Tensor, Tensor]:
    """Two norms and a rotation."""
    rank = q_norm.shape[0]
    entry = rms_norm(both[:, rank:], kv_norm, eps)
    latent = rms_norm(both[:, :rank], q_norm, eps)
    latent = round_trip(latent, "act8") if quantize else latent
    return latent, rotate_tail(entry, cos, sin)
