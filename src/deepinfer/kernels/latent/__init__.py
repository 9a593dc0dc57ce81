"""What attention makes of its first product: the query latent and the window entry."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from deepinfer.errors import ShapeError
from deepinfer.kernels.contract import check
from deepinfer.kernels.latent import reference

__all__ = ["latent_entry"]


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
    if both.shape[1] != q_norm.shape[0] + kv_norm.shape[0]:
        raise ShapeError(
            f"latent_entry: rows of {both.shape[1]} values, expected "
            f"{q_norm.shape[0]} + {kv_norm.shape[0]}"
        )
    if not both.shape[0]:
        return both[:, : q_norm.shape[0]], both[:, q_norm.shape[0] :]
    return impl(both, q_norm, kv_norm, cos, sin, eps, quantize)
