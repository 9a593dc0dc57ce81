"""Attention of each row to its own list of packed cache entries, with a sink."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from deepinfer.errors import ShapeError
from deepinfer.kernels.cache_io import PagedCache
from deepinfer.kernels.contract import check
from deepinfer.kernels.paged_attention import reference
from deepinfer.kernels.quantize import QuantFormat

__all__ = ["paged_attention", "reads_packed"]

_Impl = Callable[..., Tensor]  # as below


def reads_packed(choice: str, heads: int, dim: int, rounded: bool) -> bool:
    """Whether an implementation reads packed entries itself, so that many rows need no memory.

    The others load every row's entries first, which suits the few rows of a decode step.
    """
    released = choice.startswith("cuda") and (heads, dim) == (64, 512)
    return rounded and choice != "reference" and (released or dim <= 128)


def paged_attention(
    q: Tensor,
    window: PagedCache,
    window_idx: Tensor,
    main: PagedCache | None,
    main_idx: Tensor | None,
    sink: Tensor,
    scale: float,
    round_weights: bool,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    quantize: QuantFormat | None = None,
    *,
    impl: _Impl = reference.paged_attention,
) -> Tensor:
    """Attend to window slots and selected entries where they lie in their caches.

    q              [T, H, D]   bf16 or fp32
    window         cache of D-wide entries, any format
    window_idx     [T, W]      int64 entry = block * entries + offset, -1 = absent
    main           cache of D-wide entries, or None for a layer with a window only
    main_idx       [T, K]      int64 entry of main, -1 = absent
    sink           [H]         fp32 logits that enter the denominator only, unscaled
    round_weights  round exp(score - maximum so far) to bf16 for the weighted sum
    cos, sin       [T, R/2]    fp32, or None: queries come not yet rotated (and are needed no more),
                   results are rotated back
    quantize       then round every vector to this format
    returns        [T, H, D]   dtype of q, rounded once; 0 for a row without entries
    Equals `cache_load` and then `sparse_attention`, between two of `rotate_tail` where cosines are
    given: bit for bit, whatever an implementation makes one kernel of. Source: backbone
    specification, 3.3, 3.5, 3.6 and 8.2.
    """
    check(
        "paged_attention",
        ("q", q, "T H D"),
        ("window_idx", window_idx, "T _"),
        ("sink", sink, "H"),
    )
    if (main is None) != (main_idx is None):
        raise ShapeError("paged_attention: main and main_idx come together or not at all")
    if main_idx is not None:
        check("paged_attention", ("q", q, "T H D"), ("main_idx", main_idx, "T _"))
    for name, cache in (("window", window), ("main", main)):
        if cache is not None and cache.dim != q.shape[2]:
            raise ShapeError(
                f"paged_attention: {name} has entries of {cache.dim} values, q has {q.shape[2]}"
            )
    if (cos is None) != (sin is None) or (quantize and cos is None):
        raise ShapeError("paged_attention: cos and sin come together, and with quantize")
    if cos is not None and sin is not None:
        check("paged_attention", ("q", q, "T H D"), ("cos", cos, "T R"), ("sin", sin, "T R"))
        if 2 * cos.shape[1] > q.shape[2]:
            raise ShapeError(
                f"paged_attention: cos turns {2 * cos.shape[1]} values, q has {q.shape[2]}"
            )
    if not q.shape[0]:
        return q
    arguments = (q, window, window_idx, main, main_idx, sink, scale, round_weights)
    return impl(*arguments, *((cos, sin, quantize) if cos is not None else ()))
