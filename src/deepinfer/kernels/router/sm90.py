"""Routing in CUDA C++ for SM90: scores, choice and rounding in one launch.

`sm90.cu` says how. Other dimensions than 384 experts of 5120 bf16 inputs run in Triton. Calls on
one device share counters, so they belong to one stream at a time.
"""

from __future__ import annotations

import weakref
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from deepinfer.kernels import nvcc
from deepinfer.kernels.router import triton
from deepinfer.kernels.router.reference import EPS

if TYPE_CHECKING:
    from deepinfer.kernels.linear import DenseWeight

__all__ = ["SlotMaps", "accepts", "groups", "route", "route_rounded", "route_slots"]

SOURCE: Final = Path(__file__).with_name("sm90.cu")
EXPERTS, WIDTH, PARTS, TILE = 384, 5120, 8, 16
MOST_ACTIVE: Final = 32
FEW_ROWS: Final = 32  # up to here blocks take 48 experts, else 96
_BLOCKS: Final = 64  # of a group, half of them where they are wide
_MOST_GROUPS: Final = 64
_EXPERTS: Final = (None,) * 5 + (0,) * 3  # no slots


class SlotMaps(NamedTuple):
    """Which slots hold an expert, as `expert_exchange.triton.choose_slots` takes it."""

    log2phy: Tensor
    copies: Tensor
    counts: Tensor
    place: int
    spread: int


def accepts(x: Tensor, gate: DenseWeight, bias: Tensor, num_active: int) -> bool:
    """Whether the kernel takes a call: bf16 in aligned pieces, the published dimensions.

    A slice of a card without multiprocessors for all blocks that wait for each other runs Triton.
    """
    stored = gate.stored
    return (
        x.dtype == stored.dtype == torch.bfloat16
        and tuple(stored.shape) == (EXPERTS, WIDTH)
        and stored.is_contiguous()
        and x.stride(1) == 1
        and all(n % 16 == 0 for n in (x.data_ptr(), stored.data_ptr(), 2 * x.stride(0)))
        and bias.dtype == torch.float32
        and bias.is_contiguous()
        and 0 < num_active <= MOST_ACTIVE
        and nvcc.processors(x.device) >= _BLOCKS
    )


def groups(num_rows: int, processors: int, wide: bool) -> int:
    """How many groups of tokens are under way at once: all their blocks must run."""
    return max(1, min(processors // (_BLOCKS // 2 if wide else _BLOCKS), -(-num_rows // TILE)))


_settled: set[int] = set()


def _settle(stored: Tensor) -> None:
    """Launches read a weight before the kernel in front has ended: wait for it at its first use."""
    key = id(stored)
    if key not in _settled and not (stored.is_cuda and torch.cuda.is_current_stream_capturing()):
        if stored.is_cuda:
            torch.cuda.current_stream(stored.device).synchronize()
        _settled.add(key)
        weakref.finalize(stored, _settled.discard, key)


@cache
def _counters(device: torch.device) -> Tensor:
    """A counter for each group, zero between launches."""
    return torch.zeros(_MOST_GROUPS, dtype=torch.int32, device=device)


def route(
    x: Tensor, gate: DenseWeight, bias: Tensor, num_active: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """As the reference."""
    if not accepts(x, gate, bias, num_active):
        return triton.route(x, gate, bias, num_active, scaling)
    return _route(x, gate, bias, num_active, scaling, None)


def route_rounded(
    x: Tensor, gate: DenseWeight, bias: Tensor, num_active: int, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference."""
    if not accepts(x, gate, bias, num_active):
        return triton.route_rounded(x, gate, bias, num_active, scaling)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return *_route(x, gate, bias, num_active, scaling, out), out


def route_slots(
    x: Tensor,
    gate: DenseWeight,
    bias: Tensor,
    num_active: int,
    scaling: float,
    maps: SlotMaps,
    live: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Equal `route` and `choose_slots`: slots, weights and places [T, k], in one launch.

    Of calls that `accepts` takes.
    """
    places = torch.empty(x.shape[0], num_active, dtype=torch.int64, device=x.device)
    slotted = (*maps[:3], live, places, maps.log2phy.shape[1], maps.place, maps.spread)
    return *_route(x, gate, bias, num_active, scaling, None, slotted=slotted), places


def _route(
    x: Tensor,
    gate: DenseWeight,
    bias: Tensor,
    num_active: int,
    scaling: float,
    out: Tensor | None,
    *,
    wide: bool | None = None,
    slotted: tuple[Tensor | int | None, ...] = _EXPERTS,
) -> tuple[Tensor, Tensor]:
    """Route, and round x into `out` where there is one."""
    num_rows = x.shape[0]
    chosen = torch.empty(num_rows, num_active, dtype=torch.int64, device=x.device)
    weights = torch.empty(num_rows, num_active, dtype=torch.float32, device=x.device)
    if not num_rows:
        return chosen, weights
    _settle(gate.stored)
    wide = num_rows > FEW_ROWS if wide is None else wide
    sums = torch.empty(PARTS, num_rows, EXPERTS, dtype=torch.float32, device=x.device)
    nvcc.call(
        nvcc.load(SOURCE), "route", x.device, x, x.stride(0), gate.stored, bias, sums,
        _counters(x.device), chosen, weights, out, num_rows,
        groups(num_rows, nvcc.processors(x.device), wide), int(wide), num_active, float(scaling),
        EPS, *slotted,
    )  # fmt: skip
    return chosen, weights
