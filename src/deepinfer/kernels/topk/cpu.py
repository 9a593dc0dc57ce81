"""Selection among few rows on a CPU: fewer and cheaper calls, by numpy's stable sort."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.kernels.rows import ROW_BLOCK
from deepinfer.kernels.topk import reference
from deepinfer.kernels.workspace import FloatArray

__all__ = ["select_blocks", "select_topk"]

IntArray = NDArray[np.int64]
_NOTHING = np.float32(-np.inf)


def select_topk(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """As the reference."""
    seen = _visible(scores, visible)
    return reference.select_topk(scores, visible, count) if seen is None else _best(seen, count)


def select_blocks(scores: Tensor, visible: Tensor, num_blocks: int, block_size: int) -> Tensor:
    """As the reference."""
    seen = _visible(scores, visible)
    if seen is None:
        return reference.select_blocks(scores, visible, num_blocks, block_size)
    best = np.maximum.reduceat(seen, np.arange(0, seen.shape[1], block_size), 1)
    newest = (visible.numpy() - 1) // block_size
    best[np.arange(best.shape[1]) == newest[:, None]] = np.inf
    return _best(best, num_blocks)


def _visible(scores: Tensor, visible: Tensor) -> FloatArray | None:
    """Return the scores [T, S] that each row sees, -inf elsewhere; None if this module does not
    know how to sort them: many rows, none, or NaN, which torch sorts first and numpy last.
    """
    if scores.shape[0] > ROW_BLOCK or not scores.numel():
        return None
    hidden = np.arange(scores.shape[1]) >= visible.numpy()[:, None]
    seen: FloatArray = np.where(hidden, _NOTHING, scores.numpy())
    return None if np.isnan(seen).any() else seen


def _best(scores: FloatArray, count: int) -> Tensor:
    """Indices of the best entries, ascending, -1 padded; -inf is never picked."""
    num_rows, absent = scores.shape
    order = np.negative(scores).argsort(-1, kind="stable")[:, :count]
    order[scores[np.arange(num_rows)[:, None], order] == _NOTHING] = absent
    order.sort(-1)
    chosen: IntArray = np.full((num_rows, count), -1, dtype=np.int64)
    kept = chosen[:, : order.shape[1]]
    np.copyto(kept, order, where=order < absent)
    return torch.from_numpy(chosen)
