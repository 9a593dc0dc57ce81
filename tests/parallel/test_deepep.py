"""The adapter of DeepEP, held to its documented calls by a stand-in: the library is not here."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.errors import UnsupportedError
from deepinfer.parallel.comm import Group
from deepinfer.parallel.deepep import DeepEp
from deepinfer.parallel.experts import RowShape, make_exchange

SHAPE = RowShape(capacity=8, columns=32, active=2, experts=4, dtype=torch.bfloat16)


class Event:
    """Must be waited for before what it stands for is read."""

    def __init__(self) -> None:
        self.waited = False

    def current_stream_wait(self) -> None:
        self.waited = True


class Buffer:
    """One rank's `deep_ep.Buffer`: every expert is here, rows come in another order."""

    def __init__(self, group: object, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        assert num_nvl_bytes > 0 and num_rdma_bytes == 0
        self.order: Tensor | None = None

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int, **options: Any) -> Any:
        assert topk_idx.dtype == torch.int64 and topk_idx.shape[1] == 1
        counts = torch.bincount(topk_idx.flatten(), minlength=num_experts)
        there = torch.ones(len(topk_idx), 1, dtype=torch.bool)
        return torch.tensor([len(topk_idx)]), None, counts, there, Event()

    def dispatch(self, x: Tensor, *, topk_idx: Tensor, topk_weights: Tensor,
                 num_tokens_per_expert: Tensor, is_token_in_rank: Tensor,
                 num_tokens_per_rank: Tensor, num_tokens_per_rdma_rank: Any,
                 previous_event: Event, async_finish: bool) -> Any:  # fmt: skip
        assert topk_weights.dtype == torch.float32 and len(x) == len(topk_idx) and async_finish
        order = torch.arange(len(x)).flip(0)
        counts = num_tokens_per_expert.tolist()
        return x[order], topk_idx[order], topk_weights[order], counts, order, Event()

    def combine(self, x: Tensor, handle: Tensor, async_finish: bool) -> Any:
        back = torch.empty_like(x)
        back[handle] = x  # one row a token: its sum is itself
        return back, None, Event()


def test_rows_come_back_choice_by_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("deep_ep")
    library.Buffer = Buffer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deep_ep", library)
    exchange = DeepEp(Group("expert", [0], 0), SHAPE, quantize=False)
    exchange.begin(3)
    x = torch.randn(3, 32).bfloat16()
    slots = torch.tensor([[3, 0], [1, 3], [0, 2]])
    weight = torch.rand(3, 2)
    pending = exchange.dispatch(x, slots, weight, 4)
    found = pending.wait()
    assert found.offsets.tolist() == [0, 2, 3, 4, 6]
    owner = torch.repeat_interleave(torch.arange(4), found.offsets.diff())
    rows = found.values[found.rows].float()
    outputs = (rows * (owner + 1).unsqueeze(1) * found.weight.unsqueeze(1)).bfloat16()
    wanted = (x.float().unsqueeze(1) * (slots + 1).unsqueeze(2) * weight.unsqueeze(2)).bfloat16()
    assert torch.equal(exchange.combine(pending, outputs), wanted)


def test_what_cannot_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    with pytest.raises(UnsupportedError, match="deep_ep"):
        DeepEp(Group("expert", [0], 0), SHAPE)
    for name in ("symm", "deepep"):
        with pytest.raises(UnsupportedError, match="needs GPUs"):
            make_exchange(name, Group("expert", [0], 0), True, device=torch.device("cpu"))
