"""What attention makes of its first product: the query latent, and entries for caches."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from deepinfer.errors import ShapeError
from deepinfer.kernels.cache_io import PagedCache
from deepinfer.kernels.contract import check
from deepinfer.kernels.latent import reference

__all__ = ["entry_store", "latent_entry", "latent_store"]


def latent_entry(
    both: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    quantize: bool = False,
    *,
    impl: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]
    ] = reference.latent_entry,
) -> tuple[Tensor, Tensor]:
    """Norm the two parts of a row, and rotate the second.

    both            [T, Q+D]  bf16 or fp32
    q_norm, kv_norm [Q], [D]  fp32
    cos, sin        [T, R/2]  fp32
    quantize        round the latent with ACT8, which all that reads it would do
    returns         latent [T, Q] and entry [T, D], dtype of `both`
    Equals `rms_norm` of each part, then `rotate_tail` of the entry.
    """
    check(
        "latent_entry",
        ("both", both, "T _"),
        ("q_norm", q_norm, "Q"),
        ("kv_norm", kv_norm, "D"),
        ("cos", cos, "T _"),
        ("sin", sin, "T _"),
    )
    _check_width("latent_entry", both, q_norm, kv_norm)
    if not both.shape[0]:
        return both[:, : q_norm.shape[0]], both[:, q_norm.shape[0] :]
    return impl(both, q_norm, kv_norm, cos, sin, eps, quantize)


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
    *,
    impl: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, float, bool, PagedCache, Tensor], Tensor
    ] = reference.latent_store,
) -> Tensor:
    """Equal `latent_entry` and `cache_store` of its entry; return the latent.

    idx  [T] int64, entries of the cache, -1 = not stored; no other is named twice
    """
    check(
        "latent_store",
        ("both", both, "T _"),
        ("q_norm", q_norm, "Q"),
        ("kv_norm", kv_norm, "D"),
        ("cos", cos, "T _"),
        ("sin", sin, "T _"),
        ("idx", idx, "T"),
    )
    _check_width("latent_store", both, q_norm, kv_norm)
    if not both.shape[0]:
        return both[:, : q_norm.shape[0]]
    return impl(both, q_norm, kv_norm, cos, sin, eps, quantize, cache, idx)


def entry_store(
    x: Tensor,
    norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    cache: PagedCache,
    idx: Tensor,
    *,
    impl: Callable[
        [Tensor, Tensor | None, Tensor, Tensor, float, PagedCache, Tensor], None
    ] = reference.entry_store,
) -> None:
    """Norm rows x [n, D] where there is a `norm` [D], rotate them and store them.

    cos, sin  [n, R/2] fp32
    idx       [n] int64, entries of the cache, -1 = not stored; no other is named twice
    Equals `rms_norm`, `rotate_tail` and `cache_store`.
    """
    check(
        "entry_store", ("x", x, "n D"), ("cos", cos, "n _"), ("sin", sin, "n _"), ("idx", idx, "n")
    )
    if idx.shape[0]:
        impl(x, norm, cos, sin, eps, cache, idx)


def _check_width(op: str, both: Tensor, q_norm: Tensor, kv_norm: Tensor) -> None:
    if both.shape[1] != q_norm.shape[0] + kv_norm.shape[0]:
        raise ShapeError(
            f"{op}: rows of {both.shape[1]} values, expected {q_norm.shape[0]} + {kv_norm.shape[0]}"
        )
