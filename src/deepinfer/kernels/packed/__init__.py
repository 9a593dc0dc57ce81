"""Few-bit weights packed for SM90's products: in the order in which tensor instructions read them.

A block is 64 rows by 64 inputs: each thread's codes of one load, then its scales. Packing loses
nothing: products of packed weights are products of the stored values, or packing is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from deepinfer.errors import UnsupportedError

__all__ = ["Decoded", "Packed", "accepts", "pack_fp4", "pack_fp8"]

ROWS = 256
"""Rows that one program computes: the outputs are a multiple of it."""


class Decoded(Enum):
    """What the codes become in registers, and the token type they are multiplied with.

    FP4_E4M3  e4m3, exact where the scales of a row lie within 12 powers of two
    FP4_BF16  bf16, exact where they lie within 100
    FP8_BF16  bf16 of e4m3 codes
    """

    FP4_E4M3 = 0
    FP4_BF16 = 1
    FP8_BF16 = 2


@dataclass(frozen=True, slots=True)
class Packed:
    """Matrices [N, K] of E experts.

    data       [E, N/256, K/64, 4, bytes of a block] uint8
    row_scale  [E, N] fp32 power of two that decoded values lack
    """

    decoded: Decoded
    data: Tensor
    row_scale: Tensor
    inputs: int

    @property
    def experts(self) -> int:
        return self.row_scale.shape[0]

    @property
    def outputs(self) -> int:
        return self.row_scale.shape[1]


def accepts(outputs: int, inputs: int) -> bool:
    """Whether matrices of this size can be packed."""
    return outputs % ROWS == 0 and inputs % 256 == 0 and inputs > 0


def pack_fp4(codes: Tensor, scale: Tensor, decoded: Decoded) -> Packed:
    """Pack MXFP4 matrices: codes [E, N, K/2] uint8, scale [E, N, K/32] uint8 (ue8m0).

    Raises UnsupportedError where a row's scales lie too far apart for `decoded`.
    """
    experts, outputs, halves = codes.shape
    inputs = 2 * halves
    _check_size(outputs, inputs)
    shape = (experts, outputs // ROWS, inputs // 64, 4, 2048 + 128)
    data = torch.empty(shape, dtype=torch.uint8, device=codes.device)
    row_scale = torch.empty(experts, outputs, dtype=torch.float32, device=codes.device)
    for e in range(experts):
        nibbles = torch.stack((codes[e] & 15, codes[e] >> 4), -1).view(outputs, inputs)
        held = (nibbles.view(outputs, -1, 32) & 7).amax(2) != 0
        steps, row_scale[e] = _steps(scale[e].int(), held, decoded)
        data[e, ..., :2048] = _words(nibbles, decoded).view(*shape[1:4], 2048)
        rows = steps.view(outputs // ROWS, 4, 4, 2, 8, inputs // 64, 2)  # nb mt warp half g kb k32
        data[e, ..., 2048:] = rows.permute(0, 5, 1, 2, 4, 3, 6).reshape(*shape[1:4], 128)
    return Packed(decoded, data, row_scale, inputs)


def pack_fp8(codes: Tensor, scale: Tensor) -> Packed:
    """Pack an e4m3 matrix: codes [N, K], scale [N/32, K/32] uint8 (ue8m0)."""
    outputs, inputs = codes.shape
    _check_size(outputs, inputs)
    held = codes.view(torch.uint8).view(outputs // 32, 32, inputs // 32, 32) & 127
    if bool((held == 127).any()):
        raise UnsupportedError("packing FP8 weights: NaN codes")
    steps, row_scale = _steps(scale.int(), held.amax((1, 3)) != 0, Decoded.FP8_BF16)
    v = codes.view(torch.uint8).view(outputs // ROWS, 4, 4, 2, 8, inputs // 64, 2, 2, 2, 4, 2)
    # nb mt warp half g | kb k32 k16 h t i  ->  nb kb mt | k32 warp g t k16 h i half
    v = v.permute(0, 5, 1, 6, 2, 4, 9, 7, 8, 10, 3).reshape(-1, 2).int()
    first, second = v[:, 0], v[:, 1]  # where no bit of one is another's: `fp8_to_pairs`
    v = (first & 128) << 8 | (first & 127) << 4
    v |= (second & 112) << 8 | (second & 128) << 4 | second & 15
    shape = (1, outputs // ROWS, inputs // 64, 4, 4096 + 16)
    data = torch.zeros(shape, dtype=torch.uint8, device=codes.device)
    data[0, ..., :4096] = v.short().view(torch.uint8).view(*shape[1:4], 4096)
    # rows of 32: nb mt pair | kb k32; four bytes for each pair of warps
    s = steps.view(outputs // ROWS, 4, 2, inputs // 64, 2).permute(0, 3, 1, 2, 4)
    data[0, ..., 4096:].view(*shape[1:4], 4, 4)[..., :2, :2] = s
    return Packed(
        Decoded.FP8_BF16,
        data,
        row_scale.repeat_interleave(32).view(1, outputs).contiguous(),
        inputs,
    )


def _check_size(outputs: int, inputs: int) -> None:
    if not accepts(outputs, inputs):
        raise UnsupportedError(
            f"packing weights [{outputs}, {inputs}]: outputs must be a multiple of {ROWS}, inputs "
            "of 256; smaller matrices run on the portable kernels"
        )


def _steps(scale: Tensor, held: Tensor, decoded: Decoded) -> tuple[Tensor, Tensor]:
    """Split scales [R, K/32] int32 into each group's byte and the row's power of two.

    held  groups with any value but zero: the others' scales do not count
    """
    if bool((scale == 255).any()):
        raise UnsupportedError("packing weights: NaN scales")
    low = scale.where(held, 255).amin(1, keepdim=True).clamp(max=254)
    high = scale.where(held, 0).amax(1, keepdim=True)
    limit = 11 if decoded is Decoded.FP4_E4M3 else 100
    widest = int((high - low).amax())
    if widest > limit:
        raise UnsupportedError(
            f"packing weights as {decoded.name}: scales of one row span {widest} powers of two, "
            f"at most {limit} are exact"
        )
    if decoded is Decoded.FP4_E4M3:
        steps, exponent = (scale - low) * 8, low - 127 + 5
    else:
        top = 253 if decoded is Decoded.FP4_BF16 else 247
        steps, exponent = scale - high + top, high - 127
    steps = steps.where(held, 0 if decoded is Decoded.FP4_E4M3 else 127)
    bits = (exponent.clamp(-126, 127) + 127) << 23
    return steps.to(torch.uint8), bits.view(torch.float32).squeeze(1)


def _words(nibbles: Tensor, decoded: Decoded) -> Tensor:
    """Codes [N, K] in the threads' order, as bytes."""
    outputs, inputs = nibbles.shape
    lead = (outputs // ROWS, 4, 4, 2, 8, inputs // 64)  # nb mt warp half g kb
    if decoded is Decoded.FP4_E4M3:
        v = nibbles.view(*lead, 2, 2, 4, 4)  # k32 h t i
        v = v.permute(0, 5, 1, 2, 4, 8, 6, 3, 7, 9)  # nb kb mt warp g t k32 half | h i
        v = v.reshape(-1, 8).int()
        places = [(4 * j, 8 * j + 7 if j < 4 else 8 * (j - 4) + 3) for j in range(8)]
        word = torch.zeros(v.shape[0], dtype=torch.int32, device=v.device)
        for j, (magnitude, sign) in enumerate(places):
            word |= ((v[:, j] & 7) << magnitude) | ((v[:, j] >> 3) << sign)
        return word.view(torch.uint8)
    v = nibbles.view(*lead, 4, 2, 4, 2)  # k16 h t i
    v = v.permute(0, 5, 1, 2, 4, 8, 6, 7, 3, 9)  # nb kb mt warp g t k16 | h half i
    v = v.reshape(-1, 2, 2, 2).int()
    word = torch.zeros(v.shape[0], dtype=torch.int32, device=v.device)
    for h in range(2):
        for half in range(2):
            for i in range(2):
                code, at = v[:, h, half, i], 16 * half + 2 * h + 8 * i
                word |= ((code & 3) << at) | ((code >> 2) << (at + 4))
    return word.view(torch.uint8)
