"""The exchange of experts through the library DeepEP, where it is installed (`deepep`).

DeepEP sums what a rank's experts return before it sends, in an order that follows the placement. So
that sums stay ours, each choice travels as a row of its own: one expert a row, and nothing to sum.
That sends a row once for each expert instead of once for each rank. Against the library itself this
has not run; the calls are held to its documentation with a stand-in.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from deepinfer.errors import UnsupportedError
from deepinfer.kernels.quantize import round_trip
from deepinfer.parallel.comm import Group
from deepinfer.parallel.experts import Received, RowShape

__all__ = ["DeepEp"]


class _Sent:
    """A dispatch under way."""

    def __init__(self, slots: Tensor, columns: int, found: tuple[Any, ...]) -> None:
        self.slots, self.columns = slots, columns
        *self._found, self.handle, self._event = found
        self.order: Tensor | None = None

    def wait(self) -> Received:
        """Return this rank's rows."""
        self._event.current_stream_wait()
        rows, slot, weight, counts = self._found
        self.order = torch.argsort(slot.flatten(), stable=True)
        offsets = torch.tensor([0, *counts]).cumsum(0).to(rows.device)
        return Received(rows, self.order, weight.flatten()[self.order], offsets)


class DeepEp:
    """DeepEP's normal mode; the host waits for the counts.

    Raises UnsupportedError when the library is absent.
    """

    flows = False

    def __init__(self, group: Group, shape: RowShape, quantize: bool = True) -> None:
        try:
            library: Any = import_module("deep_ep")
        except ImportError as error:
            raise UnsupportedError(
                "parallel.backend deepep needs the library deep_ep, which is not installed: build "
                "it for your cards, or take symm or fixed"
            ) from error
        self._experts = shape.experts
        self._quantize = quantize
        row = shape.columns * shape.dtype.itemsize
        num_bytes = 2 * group.size * shape.capacity * shape.active * row
        self._buffer: Any = library.Buffer(group.backend, num_bytes, 0)

    def begin(self, most_rows: int) -> None:
        """Nothing: counts travel."""

    def check(self) -> None:
        """Do nothing: the library has limits of its own."""

    def dispatch(self, x: Tensor, slots: Tensor, weight: Tensor, num_local: int) -> _Sent:
        """Start sending a row for every choice."""
        active = slots.shape[1]
        rows = (round_trip(x, "act8") if self._quantize else x).repeat_interleave(active, 0)
        wanted, share = slots.reshape(-1, 1), weight.reshape(-1, 1)
        per_rank, per_node, per_expert, is_there, event = self._buffer.get_dispatch_layout(
            wanted, self._experts, async_finish=True
        )
        found = self._buffer.dispatch(
            rows,
            topk_idx=wanted,
            topk_weights=share,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=is_there,
            num_tokens_per_expert=per_expert,
            previous_event=event,
            async_finish=True,
        )
        return _Sent(slots, x.shape[1], found)

    def combine(self, pending: object, outputs: Tensor) -> Tensor:
        """Return every choice's output row to its source."""
        assert isinstance(pending, _Sent) and pending.order is not None
        back = torch.empty_like(outputs)
        back[pending.order] = outputs
        terms, _, event = self._buffer.combine(back, pending.handle, async_finish=True)
        event.current_stream_wait()
        found: Tensor = terms.view(*pending.slots.shape, pending.columns)
        return found
