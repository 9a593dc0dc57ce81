"""Sparse attention of a decode step on a CPU: windows are read where they lie in the cache.

Products stay torch's, row by row; scores, maxima and sums of all rows are numpy's, all exponentials
one call of torch's. What a window's absent slots hold is not looked at before it gets a weight of
0: should it not have been finite, the result is not, and the reference computes again. Anything
else, prefill above all, goes to the reference at once.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.kernels.attention import reference
from deepinfer.kernels.attention.reference import SLOT_BLOCK
from deepinfer.kernels.rows import ROW_BLOCK
from deepinfer.kernels.workspace import FloatArray, as_tensor

_KEY_BLOCK = 16  # as in the reference
_KEPT_SHAPES = 4
_LOWEST = np.float32(-1e30)


_Window = tuple[Tensor, tuple[Tensor, ...]]
"""Views of one row's entries: all as keys [D, W], and their blocks [64, D]."""


class _Buffers:
    """What one shape of call needs, made once.

    exps     [T, H, S + blocks + 1]: scores of S slots, fading from block to block, the sink
    value    [blocks, T, H, D] weighted sum of each block
    """

    def __init__(self, num_rows: int, num_heads: int, dim: int, width: int, selected: int) -> None:
        end = -(-(width + selected) // SLOT_BLOCK) * SLOT_BLOCK
        self.num_blocks = end // SLOT_BLOCK
        shape = (num_rows, num_heads, end + self.num_blocks + 1)
        exps = np.full(shape, -np.inf, dtype=np.float32)
        self.value = np.empty((self.num_blocks, num_rows, num_heads, dim), dtype=np.float32)
        self.held = exps[:, :, : width + selected]
        self.window, self.main = exps[:, :, :width], exps[:, :, width : width + selected]
        self.blocks = exps[:, :, :end].reshape(num_rows, num_heads, -1, SLOT_BLOCK)
        self.first_fade, self.fade = exps[:, :, end], exps[:, :, end + 1 : -1]
        self.sink = exps[:, :, -1]
        self.exps = np.empty_like(exps)
        with torch.inference_mode(False):
            self.terms, self.result = torch.from_numpy(exps), torch.from_numpy(self.exps)
            self.weights = torch.unflatten(self.result[:, :, :end], 2, (-1, SLOT_BLOCK))
            self.by_row = self.terms[:, :, :width].unbind()
            self.main_terms = self.terms[:, :, width : width + selected]
            self.values = torch.from_numpy(self.value).unbind()
            self.values_by_row = [value.unbind() for value in self.values]
        self.fades, self.sinks = self.exps[:, :, end:-1], self.exps[:, :, -1]


class _Kept(threading.local):
    """This thread's buffers, and what it found in the last index tensors it saw."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[int, ...], _Buffers] = {}
        self.absent: dict[int, tuple[Tensor, NDArray[np.bool_] | None]] = {}
        self.runs: tuple[Tensor | None, list[int] | None] = (None, None)


_KEPT = _Kept()


def sparse_attention(
    q: Tensor,
    window_kv: Tensor,
    window_idx: Tensor,
    main_kv: Tensor | None,
    main_idx: Tensor | None,
    sink: Tensor,
    scale: float,
    round_weights: bool,
) -> Tensor:
    """As the reference."""
    arguments = q, window_kv, window_idx, main_kv, main_idx, sink, scale, round_weights
    return as_tensor(attend(*arguments), q.dtype)


def attend(
    q: Tensor,
    window_kv: Tensor,
    window_idx: Tensor,
    main_kv: Tensor | None,
    main_idx: Tensor | None,
    sink: Tensor,
    scale: float,
    round_weights: bool,
) -> FloatArray:
    """As the reference, before rounding to the type of q."""
    arguments = q, window_kv, window_idx, main_kv, main_idx, sink, scale, round_weights
    windows = _windows(q, window_kv, window_idx, main_kv)
    out = None if windows is None else _attend(windows, *arguments)
    if out is not None:
        return out
    return reference.sparse_attention(q.float(), *arguments[1:]).numpy()


def _attend(
    windows: list[_Window],
    q: Tensor,
    window_kv: Tensor,
    window_idx: Tensor,
    main_kv: Tensor | None,
    main_idx: Tensor | None,
    sink: Tensor,
    scale: float,
    round_weights: bool,
) -> FloatArray | None:
    """Attend each row to its window [W, D] and its other entries; None if that is not finite."""
    shape = (*q.shape, window_idx.shape[1], 0 if main_idx is None else main_idx.shape[1])
    kept = _KEPT.buffers.get(shape)
    if kept is None:
        if len(_KEPT.buffers) >= _KEPT_SHAPES:
            _KEPT.buffers.clear()
        kept = _KEPT.buffers[shape] = _Buffers(*shape)
    queries = q.float()
    for query, (keys, _), result in zip(queries.unbind(), windows, kept.by_row, strict=True):
        torch.mm(query, keys, out=result)
    if main_kv is not None and main_idx is not None:
        torch.bmm(queries, main_kv.transpose(1, 2), out=kept.main_terms)
        _hide(kept.main, main_idx)
    _hide(kept.window, window_idx)
    np.multiply(kept.held, np.float32(scale), kept.held)
    peak = np.maximum(np.maximum.reduce(kept.blocks, -1), _LOWEST)
    np.maximum.accumulate(peak, -1, None, peak)
    np.subtract(kept.blocks, peak[..., None], kept.blocks)
    np.subtract(_LOWEST, peak[..., 0], kept.first_fade)
    np.subtract(peak[..., :-1], peak[..., 1:], kept.fade)
    np.subtract(sink.numpy(), peak[..., -1], kept.sink)
    torch.exp(kept.terms, out=kept.result)
    weights, fades = kept.weights, kept.fades
    sums = weights.sum(-1).numpy()
    if round_weights:
        weights = weights.bfloat16().float()
    in_windows = window_idx.shape[1] // SLOT_BLOCK
    later = () if main_kv is None else torch.split(main_kv, SLOT_BLOCK, dim=1)
    total: FloatArray = np.zeros_like(kept.sinks)
    acc: FloatArray = np.zeros_like(kept.value[0])
    for block, weight in enumerate(weights.unbind(2)):
        if block < in_windows:
            rows = zip(weight.unbind(), windows, kept.values_by_row[block], strict=True)
            for row, (_, blocks), result in rows:
                torch.mm(row, blocks[block], out=result)
        else:
            entries = later[block - in_windows]
            torch.bmm(weight[..., : entries.shape[1]], entries, out=kept.values[block])
        fade = fades[..., block]
        np.add(total * fade, sums[..., block], total)
        np.multiply(acc, fade[..., None], acc)
        np.add(acc, kept.value[block], acc)
    np.divide(acc, (total + kept.sinks)[..., None], acc)
    return acc if np.isfinite(acc).all() else None


def _hide(scores: FloatArray, idx: Tensor) -> None:
    """Take absent slots idx [T, S] out of scores [T, H, S]."""
    seen = _KEPT.absent.get(idx.shape[1])
    if seen is None or seen[0] is not idx:
        absent = idx.numpy() < 0
        seen = idx, (absent[:, None] if absent.any() else None)
        _KEPT.absent[idx.shape[1]] = seen
    if seen[1] is not None:
        np.copyto(scores, -np.inf, where=seen[1])


def _windows(
    q: Tensor, window_kv: Tensor, window_idx: Tensor, main_kv: Tensor | None
) -> list[_Window] | None:
    """Return each row's window, if this module knows how to attend to all."""
    num_slots, dim = window_idx.shape[1], window_kv.shape[-1]
    if q.shape[0] > ROW_BLOCK or q.shape[1] % 4 or num_slots % SLOT_BLOCK:
        return None
    if main_kv is not None and (main_kv.ndim == 2 or main_kv.shape[1] % _KEY_BLOCK):
        return None
    if window_kv.ndim == 3:
        blocks = torch.unflatten(window_kv, 1, (-1, SLOT_BLOCK)).unbind()
        keys = window_kv.transpose(1, 2).unbind()
        return [(k, b.unbind()) for k, b in zip(keys, blocks, strict=True)]
    seen, starts = _KEPT.runs
    if seen is not window_idx:
        starts = _run_starts(window_idx)
        _KEPT.runs = window_idx, starts
    if starts is None or max(starts) + num_slots > window_kv.shape[0]:
        return None
    shape, stride = (num_slots // SLOT_BLOCK, SLOT_BLOCK, dim), (SLOT_BLOCK * dim, dim, 1)
    offsets = [window_kv.storage_offset() + start * dim for start in starts]
    view = window_kv.as_strided
    return [
        (view((dim, num_slots), (1, dim), offset), view(shape, stride, offset).unbind())
        for offset in offsets
    ]


def _run_starts(idx: Tensor) -> list[int] | None:
    """Return the first of each row's slots if they are neighbours, but for absent ones."""
    index = idx.numpy()
    first = index[:, :1]
    runs = first + np.arange(index.shape[1])
    if first.min() < 0 or not ((index == runs) | (index < 0)).all():
        return None
    starts: list[int] = first[:, 0].tolist()
    return starts
