"""Products of packed weights on SM90a: the schedules of `sm90.cu`, and which one a call takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from deepinfer.kernels import nvcc
from deepinfer.kernels.packed import Decoded, Packed
from deepinfer.kernels.packed.tokens import gather_tokens

__all__ = ["SOURCE", "Schedules", "in_order", "launches", "multiply"]

SOURCE: Final = Path(__file__).with_name("sm90.cu")

Schedules = Mapping[Decoded, tuple[tuple[int | None, str], ...]]

_SCHEDULES: Final[Schedules] = {
    Decoded.FP4_E4M3: ((27, "fp8_32"), (80, "fp8_64"), (None, "fp8_128")),
    Decoded.FP4_BF16: ((8, "exact_few"), (27, "exact_32"), (60, "exact_64"), (None, "exact_136")),
}
"""Schedules by the most rows that an expert has on average, where a card found them faster."""

_FEW: Final = 8
"""Rows an expert up to which a schedule is not worth a launch where more rows are possible."""
_BOXED: Final = ("exact_64", "exact_136", "fp8_128")
_ALL: Final = (1 << 31) - 1


def launches(
    decoded: Decoded, rows: int, experts: int, schedules: Schedules = _SCHEDULES
) -> list[tuple[str, int, int]]:
    """Return what to launch for at most `rows` rows: schedules, each with its range of row counts.

    How many rows there really are stands on the device alone; every launch but one finds its range
    missed there and ends. Bits do not depend on the schedule.
    """
    found = []
    least = 0
    for limit, name in schedules[decoded]:
        most = _ALL if limit is None else limit * experts + 1
        if limit is not None and limit <= _FEW and rows >= most:
            continue
        found.append((name, least, most))
        if rows < most:
            break
        least = most
    return found


def in_order(decoded: Decoded, rows: int, experts: int) -> bool:
    """Whether a product of at most `rows` rows reads tokens as boxes, whose rows are neighbours."""
    return any(name in _BOXED for name, *_ in launches(decoded, rows, experts))


def multiply(
    x: Tensor,
    weight: Packed,
    offsets: Tensor,
    *,
    token_scale: Tensor | None = None,
    source: Tensor | None = None,
    out: Tensor | None = None,
    name: str = "",
) -> Tensor:
    """Multiply rows sorted by expert by their expert's matrix; returns [R, N] bf16.

    x            [R, K] bf16, or e4m3 codes where the weights decode to e4m3
    offsets      [E+1] int64 on the device: rows offsets[e]..offsets[e+1]-1 belong to expert e
    token_scale  one fp32 per row of x, of e4m3 codes
    source       [R] int64: row r of the result is of row source[r] of x; not for codes that are
                 read `in_order`
    name         the schedule, by default those that the number of rows allows
    """
    rows = x.shape[0] if source is None else source.shape[0]
    if out is None:
        out = torch.empty(rows, weight.outputs, dtype=torch.bfloat16, device=x.device)
    chosen = [(name, 0, _ALL)] if name else launches(weight.decoded, rows, weight.experts)
    if source is not None and any(schedule in _BOXED for schedule, *_ in chosen):
        assert token_scale is None, "codes are gathered where they are folded"
        x, source = gather_tokens(x, source, offsets), None
    for schedule, least, most in chosen:
        nvcc.call(
            nvcc.load(SOURCE), schedule, x.device,
            x, token_scale, source, weight.data, weight.row_scale, offsets, out,
            weight.experts, weight.outputs, weight.inputs, x.stride(0) * x.element_size(),
            x.shape[0], least, most, nvcc.processors(x.device),
        )  # fmt: skip
    return out
