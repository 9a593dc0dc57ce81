"""Latent and entry in plain torch: norm, norm, rotate, store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from deepinfer.kernels.cache_io.reference import cache_store
from deepinfer.kernels.quantize.reference import round_trip
from deepinfer.kernels.rms_norm.reference import rms_norm
from deepinfer.kernels.rope.reference import rotate_tail

if TYPE_CHECKING:
    from deepinfer.kernels.cache_io import PagedCache


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


def latent_store(
    both: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    quantize: bool,
    cache: PagedCache,
    idx: Tensor,
) -> Tensor:
    """Latent and entry, then the store."""
    latent, entry = latent_entry(both, q_norm, kv_norm, cos, sin, eps, quantize)
    cache_store(cache, entry, idx)
    return latent


def entry_store(
    x: Tensor,
    norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    cache: PagedCache,
    idx: Tensor,
) -> None:
    """Norm, rotate, store."""
    x = x if norm is None else rms_norm(x, norm, eps)
    cache_store(cache, rotate_tail(x, cos, sin), idx)
