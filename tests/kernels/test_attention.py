"""The slot walk of sparse attention, bit for bit, and what must not matter to it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.errors import ShapeError
from deepinfer.kernels.attention import cpu, reference, sparse_attention

BLOCK = 64
SCALE = 0.17


def walk(q: Tensor, entries: Tensor, slots: Tensor, sink: Tensor, round_weights: bool) -> Tensor:
    """One row at a time over full blocks of 64 slots, all of them, with a running maximum."""
    slots = F.pad(slots, (0, -slots.shape[1] % BLOCK), value=-1)
    rows = []
    for t in range(len(q)):
        peak = torch.full((q.shape[1], 1), -1e30)
        total, acc = torch.zeros_like(peak), torch.zeros(q.shape[1:])
        for idx in slots[t].split(BLOCK):
            keys = entries[idx.clamp(min=0)]
            scores = torch.bmm(q[t : t + 1].float(), keys.T[None])[0] * SCALE
            scores = scores.masked_fill(idx < 0, -math.inf)
            new = torch.maximum(peak, scores.amax(-1, keepdim=True))
            weights, decay = torch.exp(scores - new), torch.exp(peak - new)
            total = total * decay + weights.sum(-1, keepdim=True)
            rounded = weights.bfloat16().float() if round_weights else weights
            acc = acc * decay + torch.bmm(rounded[None], keys[None])[0]
            peak = new
        rows.append(acc / (total + torch.exp(sink[:, None] - peak)))
    return torch.stack(rows).to(q.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("window", "selected"),
    [(128, 0), (128, 16), (128, 5), (128, 32), (128, 48), (128, 70), (48, 16), (16, 9), (1, 0)],
)
@pytest.mark.parametrize("dim", [64, 512])
def test_equals_the_plain_walk(dtype: torch.dtype, window: int, selected: int, dim: int) -> None:
    rows, heads = 11, 4
    q = torch.randn(rows, heads, dim).to(dtype)
    window_kv, main_kv = torch.randn(90, dim), torch.randn(40, dim)
    window_idx = torch.randint(-1, 90, (rows, window))
    main_idx = torch.randint(-1, 40, (rows, selected))
    main_idx[::4] = -1
    sink = torch.randn(heads)
    joined = torch.cat([window_idx, torch.where(main_idx < 0, main_idx, main_idx + 90)], 1)
    rounded = dtype == torch.bfloat16
    want = walk(q, torch.cat([window_kv, main_kv]), joined, sink, rounded)
    main = (main_kv, main_idx) if selected else (None, None)
    got = sparse_attention(q, window_kv, window_idx, *main, sink, SCALE, rounded)
    assert torch.equal(got, want)


@pytest.mark.parametrize("window", [16, 128])
@pytest.mark.parametrize("start", [0, 5, 200])
def test_a_sliding_window_is_like_any_list(window: int, start: int) -> None:
    """The rows of a prefill chunk, whose windows overlap, against the same entries elsewhere."""
    rows, heads, dim = 70, 4, 64
    positions = start + torch.arange(rows)
    held = (positions[:, None] - window + 1).clamp(min=0) + torch.arange(window)
    held = held.masked_fill(held > positions[:, None], -1)
    q, sink = torch.randn(rows, heads, dim).bfloat16(), torch.randn(heads)
    kv = torch.randn(280, dim)
    got = sparse_attention(q, kv, held, None, None, sink, SCALE, True)
    order = torch.randperm(280)
    place = torch.argsort(order)
    moved = torch.where(held < 0, held, place[held])
    assert torch.equal(got, sparse_attention(q, kv[order], moved, None, None, sink, SCALE, True))
    assert torch.equal(got, walk(q, kv, held, sink, True))


def test_entries_may_come_gathered() -> None:
    rows, heads, dim = 9, 3, 64
    q, sink = torch.randn(rows, heads, dim).bfloat16(), torch.randn(heads)
    kv, main = torch.randn(50, dim), torch.randn(30, dim)
    idx, main_idx = torch.randint(-1, 50, (rows, 128)), torch.randint(-1, 30, (rows, 16))
    want = sparse_attention(q, kv, idx, main, main_idx, sink, SCALE, True)
    gathered, main_gathered = kv[idx.clamp(min=0)], main[main_idx.clamp(min=0)]
    got = sparse_attention(q, gathered, idx, main_gathered, main_idx, sink, SCALE, True)
    assert torch.equal(got, want)


@pytest.mark.parametrize("round_weights", [False, True])
def test_no_entry_gives_zero(round_weights: bool) -> None:
    q, kv = torch.randn(3, 2, 32), torch.randn(4, 32)
    idx = torch.tensor([[-1, -1], [2, -1], [-1, -1]])
    out = sparse_attention(q, kv, idx, None, None, torch.zeros(2), SCALE, round_weights)
    assert out[0].eq(0).all() and out[2].eq(0).all() and not out[1].eq(0).any()


def test_the_sink_is_a_logit_of_its_own() -> None:
    q, kv, idx = torch.randn(1, 2, 32), torch.randn(3, 32), torch.tensor([[0, 1, 2]])
    free = sparse_attention(q, kv, idx, None, None, torch.full((2,), -1e4), SCALE, False)
    plain = torch.softmax(q[0] @ kv.T * SCALE, -1) @ kv
    torch.testing.assert_close(free[0], plain, atol=1e-6, rtol=1e-5)
    full = sparse_attention(q, kv, idx, None, None, torch.tensor([100.0, -1e4]), SCALE, False)
    assert full[0, 0].abs().max() < 1e-30 and torch.equal(full[0, 1], free[0, 1])


def test_twice_the_same_entry_counts_twice() -> None:
    q, kv = torch.randn(1, 2, 32), torch.randn(3, 32)
    twice = torch.tensor([[0, 1, 1]])
    got = sparse_attention(q, kv, twice, None, None, torch.zeros(2), SCALE, False)
    copies = torch.cat([kv, kv[1:2]])
    want = sparse_attention(
        q, copies, torch.tensor([[0, 1, 3]]), None, None, torch.zeros(2), SCALE, False
    )
    assert torch.equal(got, want)


def test_half_a_selection_is_refused() -> None:
    q, kv, idx = torch.randn(1, 2, 32), torch.randn(3, 32), torch.tensor([[0, 1, 2]])
    with pytest.raises(ShapeError, match="main_kv and main_idx"):
        sparse_attention(q, kv, idx, kv, None, torch.zeros(2), SCALE, False)
    with pytest.raises(ShapeError, match="main_kv"):
        sparse_attention(q, kv, idx, torch.randn(3, 16), idx, torch.zeros(2), SCALE, False)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_absent_slots_of_a_window_in_place_hold_does_not_matter(bad: float) -> None:
    """The CPU's form reads runs of entries as they lie, absent ones too."""
    q = torch.randn(2, 4, 64).bfloat16()
    pool = torch.randn(300, 64)
    idx = torch.stack([torch.arange(64), torch.arange(100, 164)])
    idx[0, 40:] = -1
    sink = torch.randn(4)
    want = reference.sparse_attention(q, pool, idx, None, None, sink, 0.125, True)
    assert torch.equal(cpu.sparse_attention(q, pool, idx, None, None, sink, 0.125, True), want)
    pool[50] = bad
    assert torch.equal(cpu.sparse_attention(q, pool, idx, None, None, sink, 0.125, True), want)
