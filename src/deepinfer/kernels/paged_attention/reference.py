"""Attention to packed entries in plain torch: load them, then attend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from deepinfer.kernels.attention.reference import sparse_attention
from deepinfer.kernels.cache_io.reference import cache_load
from deepinfer.kernels.rope.reference import rotate_tail

if TYPE_CHECKING:
    from collections.abc import Callable

    from deepinfer.kernels.cache_io import PagedCache
    from deepinfer.kernels.quantize import QuantFormat


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
) -> Tensor:
    """Load, attend and turn by the references."""
    steps = cache_load, sparse_attention, rotate_tail
    rest = sink, scale, round_weights, cos, sin, quantize
    return through_steps(steps, q, window, window_idx, main, main_idx, *rest)


def through_steps(
    steps: tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[..., Tensor]],
    q: Tensor,
    window: PagedCache,
    window_idx: Tensor,
    main: PagedCache | None,
    main_idx: Tensor | None,
    sink: Tensor,
    scale: float,
    round_weights: bool,
    cos: Tensor | None,
    sin: Tensor | None,
    quantize: QuantFormat | None,
) -> Tensor:
    """Bring every row's entries together, [T, slots, D], and attend to these.

    steps  `cache_load`, `sparse_attention` and `rotate_tail` of one implementation
    """
    cache_load, sparse_attention, rotate_tail = steps
    window_kv = cache_load(window, window_idx.flatten()).view(*window_idx.shape, window.dim)
    main_kv = None
    if main is not None and main_idx is not None:
        main_kv = cache_load(main, main_idx.flatten()).view(*main_idx.shape, main.dim)
    turned = q if cos is None or sin is None else rotate_tail(q, cos, sin, reuse=True)
    out = sparse_attention(
        turned, window_kv, window_idx, main_kv, main_idx, sink, scale, round_weights
    )
    return out if cos is None or sin is None else rotate_tail(out, cos, sin, True, True, quantize)
