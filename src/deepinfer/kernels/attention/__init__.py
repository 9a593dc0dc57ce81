"""Attention of each row to its own list of entries, with a sink."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from deepinfer.errors import ShapeError
from deepinfer.kernels.attention import reference
from deepinfer.kernels.contract import check

__all__ = ["sparse_attention"]

_Impl = Callable[
    [Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor, float, bool], Tensor
]


def sparse_attention(
    q: Tensor,
    window_kv: Tensor,
    window_idx: Tensor,
    main_kv: Tensor | None,
    main_idx: Tensor | None,
    sink: Tensor,
    scale: float,
    round_weights: bool,
    *,
    impl: _Impl = reference.sparse_attention,
) -> Tensor:
    """Attend to window slots and selected entries in one softmax; an entry is key and value.

    q              [T, H, D]   bf16 or fp32
    window_kv      [N, D]      fp32, dequantized; or [T, W, D], already gathered, with any finite
                               entry where absent
    window_idx     [T, W]      int64 rows of window_kv, -1 = absent; absent slots keep their place
    main_kv        [M, D] or [T, K, D] fp32, or None for a layer with a window only
    main_idx       [T, K]      int64 rows of main_kv, -1 = absent
    sink           [H]         fp32 logits that enter the denominator only, unscaled
    round_weights  round exp(score - maximum so far) to bf16 for the weighted sum
    returns        [T, H, D]   dtype of q, rounded once; 0 for a row without entries
    Walks the joined slots in blocks of 64 with a running maximum. Source: backbone specification,
    3.5.
    """
    check(
        "sparse_attention",
        ("q", q, "T H D"),
        ("window_kv", window_kv, "_ D" if window_kv.ndim == 2 else "T _ D"),
        ("window_idx", window_idx, "T _"),
        ("sink", sink, "H"),
    )
    if (main_kv is None) != (main_idx is None):
        raise ShapeError("sparse_attention: main_kv and main_idx come together or not at all")
    if main_kv is not None and main_idx is not None:
        check(
            "sparse_attention",
            ("q", q, "T H D"),
            ("main_kv", main_kv, "_ D" if main_kv.ndim == 2 else "T _ D"),
            ("main_idx", main_idx, "T _"),
        )
    if not q.shape[0]:
        return q
    return impl(q, window_kv, window_idx, main_kv, main_idx, sink, scale, round_weights)
