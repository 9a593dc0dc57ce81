"""Quantizers for a CPU: a bf16 divided by a power of two is a bf16 again, so one look-up among all
65,536 of them rounds a value.

The tables are filled by the reference, which makes the bits its own. The main cache's scales are
no powers of two; what such a quotient has beyond bf16 only tells on which side of a midpoint it
lies, and is kept in the last bit.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.kernels.quantize import reference
from deepinfer.kernels.workspace import Pair, largest, shared

__all__ = ["Act8", "act8_values", "encode", "round_into", "round_trip"]

FloatArray = NDArray[np.float32]
ByteArray = NDArray[np.uint8]
HalfArray = NDArray[np.uint16]

_GROUP: Final = {"act8": 32, "act4_e8": 32, "act4_e4": 16}
_MAGNITUDE: Final = np.uint16(0x7FFF)
_LOW_HALF: Final = np.uint32(0xFFFF)
_KEPT_VALUES: Final = 1 << 15  # larger inputs get buffers of their own


@dataclass(frozen=True, slots=True)
class _Tables:
    """By the bits of a quotient: `values` fp32 and `codes` (an e4m3 byte or an e2m1 nibble) of the
    nearest code. By the bits of a group's largest magnitude: `scale` fp32, its exact reciprocal
    `factor` (None where there is none) and its byte `scale_codes`.
    """

    values: FloatArray
    codes: ByteArray
    scale: FloatArray
    factor: FloatArray | None
    scale_codes: ByteArray


@cache
def _tables(fmt: str) -> _Tables:
    with torch.inference_mode(False), np.errstate(all="ignore"):
        bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
        every = bits.view(torch.bfloat16).float()
        groups = every[: 1 << 15, None].expand(-1, _GROUP[fmt]).contiguous()
        if fmt == "act8":
            rounded, scale = every.to(torch.float8_e4m3fn), reference.scaled8(groups)[1]
            values, codes = rounded.float(), rounded.view(torch.uint8)
            scale_codes = reference.act8(groups)[1]
        else:
            values, scale = reference.nearest4(every), reference.scaled4(groups, _GROUP[fmt])[1]
            codes = reference.code4(values)
            encoded = reference.act4_e8 if fmt == "act4_e8" else reference.act4_e4
            scale_codes = encoded(groups)[1]
        scales: FloatArray = scale.flatten().numpy()
        factor = None if fmt == "act4_e4" else np.float32(1.0) / scales
        return _Tables(values.numpy(), codes.numpy(), scales, factor, scale_codes.flatten().numpy())


class _Scratch:
    """Buffers for inputs of one shape, each also seen by the upper halves of its numbers."""

    __slots__ = ("groups", "high", "magnitude", "quotient", "quotient_high", "magnitude_groups")

    def __init__(self, shape: tuple[int, ...], group: int) -> None:
        grouped = (*shape[:-1], shape[-1] // group, group)
        wide = np.zeros(shape, dtype=np.float32)
        self.high: HalfArray = wide.view(np.uint16)[..., 1::2]
        self.groups = wide.reshape(grouped)
        self.magnitude: HalfArray = np.empty(shape, dtype=np.uint16)
        self.magnitude_groups = self.magnitude.reshape(grouped)
        self.quotient = np.empty(grouped, dtype=np.float32)
        self.quotient_high: HalfArray = self.quotient.view(np.uint16)[..., 1::2]


class _Kept(threading.local):
    def __init__(self) -> None:
        self.scratch: dict[tuple[tuple[int, ...], int], _Scratch] = {}


_KEPT = _Kept()


def _scratch(shape: tuple[int, ...], group: int, size: int) -> _Scratch:
    if size > _KEPT_VALUES:
        return _Scratch(shape, group)
    found = _KEPT.scratch.get((shape, group))
    if found is None:
        found = _KEPT.scratch[shape, group] = _Scratch(shape, group)
    return found


def _look_up(x: Tensor, fmt: str) -> tuple[_Tables, HalfArray, HalfArray]:
    """Return the tables, quotients [..., D/g, g] and largest magnitudes [..., D/g] as their bits.

    x is bf16. The quotients hold until the next call for this shape.
    """
    tables = _tables(fmt)
    scratch = _scratch(x.shape, _GROUP[fmt], x.numel())
    bits = x.view(torch.int16).numpy().view(np.uint16)
    scratch.high[...] = bits
    np.bitwise_and(bits, _MAGNITUDE, scratch.magnitude)
    peak: HalfArray = np.asarray(np.maximum.reduce(scratch.magnitude_groups, -1))
    if tables.factor is not None:
        factor = tables.factor.take(peak)[..., None]
        np.multiply(scratch.groups, factor, scratch.quotient)
        return tables, scratch.quotient_high, peak
    np.divide(scratch.groups, tables.scale.take(peak)[..., None], scratch.quotient)
    beyond = (scratch.quotient.view(np.uint32) & _LOW_HALF) != 0
    return tables, scratch.quotient_high | beyond, peak


class Act8:
    """ACT8 of some columns of a pair, by the same tables, on buffers of its own.

    block   [16, K] fp32, or as many rows as the pair has: the rounded values for a product
    values  [T, K] those rows that count
    """

    def __init__(self, pair: Pair, columns: slice = slice(None)) -> None:
        self._tables = _tables("act8")
        assert self._tables.factor is not None
        self._factor = self._tables.factor
        self._bits = pair.bits[:, columns]
        num_rows, width = self._bits.shape
        grouped = (num_rows, width // _GROUP["act8"], _GROUP["act8"])
        self._groups = pair.array[:, columns].reshape(grouped)
        assert np.shares_memory(self._groups, pair.array)
        scratch = _Scratch((num_rows, width), _GROUP["act8"])
        self._magnitude, self._magnitude_groups = scratch.magnitude, scratch.magnitude_groups
        self._quotient, self._quotient_high = scratch.quotient, scratch.quotient_high
        self._peak = np.empty((*grouped[:2], 1), dtype=np.uint16)
        padded = pair.block.shape[0] != num_rows
        self.block, _, self.values = shared(num_rows, width, padded)
        self._value_groups = self.values.reshape(grouped)

    def run(self) -> Tensor:
        """Round the pair's values, which are on the bf16 grid, and return `block`."""
        np.bitwise_and(self._bits, _MAGNITUDE, self._magnitude)
        largest(self._magnitude_groups, -1, None, self._peak, True)
        factor = self._factor.take(self._peak)
        np.multiply(self._groups, factor, self._quotient)
        values = self._tables.values.take(self._quotient_high)
        np.divide(values, factor, self._value_groups)
        return self.block

    def encode(self) -> tuple[ByteArray, ByteArray, FloatArray]:
        """Run, and return codes [T, K], scale bytes [T, K/32] and `values`."""
        self.run()
        codes = self._tables.codes.take(self._quotient_high).reshape(self._bits.shape)
        return codes, self._tables.scale_codes.take(self._peak[..., 0]), self.values


def round_into(x: Tensor, fmt: str, out: FloatArray) -> None:
    """Quantize x and dequantize into `out`, fp32, contiguous, of the same number of values."""
    if x.dtype != torch.bfloat16:
        out[...] = reference.rounded_values(x, fmt).numpy()
        return
    tables, quotient, peak = _look_up(x, fmt)
    scale = tables.scale.take(peak)[..., None]
    with np.errstate(over="ignore"):  # the largest bf16 may round to infinity, as the reference's
        np.multiply(tables.values.take(quotient), scale, out.reshape(quotient.shape))


def round_trip(x: Tensor, fmt: str) -> Tensor:
    """As the reference."""
    out = np.empty(x.shape, dtype=np.float32)
    round_into(x, fmt, out)
    return torch.from_numpy(out).to(x.dtype)


def act8_values(x: Tensor) -> Tensor:
    """As the reference."""
    out = np.empty(x.shape, dtype=np.float32)
    round_into(x, "act8", out)
    return torch.from_numpy(out)


def encode(x: Tensor, fmt: str) -> tuple[ByteArray, ByteArray, FloatArray]:
    """Return what x [n, D] bf16 is stored as: codes, scale bytes, and the values they stand for."""
    tables, quotient, peak = _look_up(x, fmt)
    codes = tables.codes.take(quotient).reshape(x.shape)
    if fmt != "act8":
        codes = codes[:, ::2] | codes[:, 1::2] << np.uint8(4)
    values = tables.values.take(quotient) * tables.scale.take(peak)[..., None]
    return codes, tables.scale_codes.take(peak), values.reshape(x.shape)
