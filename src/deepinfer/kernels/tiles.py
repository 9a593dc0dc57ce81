"""What the Triton kernels share: launching, tile products, and the number formats by their bits.

Formats are taken apart with integer operations, so that one source serves every card from SM80 on,
whether or not it has the type, and gives the reference's bits. Divisions are correctly rounded.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import core

__all__ = [
    "act4_e4_scale",
    "act4_e8_scale",
    "act8_round_trip",
    "act8_scale",
    "ceil_div",
    "dot",
    "e2m1_code",
    "e2m1_round",
    "e2m1_value",
    "e4m3_code",
    "e4m3_round",
    "e4m3_value",
    "in_turn",
    "launch",
    "narrow",
    "next_power",
    "pow2_inverse",
    "runs_on_bf16",
    "sigmoid",
    "takes_turn",
    "ue8m0_value",
]


_WIDE = 1 << 31
_compiled: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: object, **constants: object) -> None:
    """Run a kernel over a grid. The one way in: the tests put a compiler in its place.

    A kernel that calls `in_turn` itself may begin while the one before it ends, where the card can.
    What was compiled for arguments of the same kinds is launched without Triton's own search for
    it, which takes most of a launch's time on the host.
    """
    cards = _new_cards()
    if not cards:
        kernel[grid](*arguments, **constants)
        return
    card = torch.cuda.current_device()
    if cards[card] and takes_turn(kernel):
        constants["launch_pdl"] = True
    key: list[object] = [card, kernel.fn, *constants, *constants.values()]
    for value in arguments:
        if isinstance(value, torch.Tensor):
            key.append(value.dtype)
            key.append(value.data_ptr() & 15 == 0)
        elif type(value) is int:  # Triton compiles for 1, for multiples of 16, for wide integers
            wide = not -_WIDE <= value < _WIDE
            key.append(value if wide else -1 if value == 1 else -2 if value & 15 else -3)
        else:
            key.append(float if type(value) is float else value)
    kind = tuple(key)
    found = _compiled.get(kind)
    if found is not None:
        found[0][(*grid, 1, 1)](*arguments, *found[1])
        return
    made = kernel[grid](*arguments, **constants)
    if made is not None:
        _compiled[kind] = made, tuple(constants[n] for n in kernel.arg_names if n in constants)


def takes_turn(kernel: Any) -> bool:
    """Whether a kernel's own body calls `in_turn`."""
    return "in_turn" in kernel.fn.__code__.co_names


@cache
def _new_cards() -> tuple[bool, ...]:
    """Whether each NVIDIA card lets a kernel begin before the one ahead of it has ended."""
    if triton.knobs.runtime.interpret or torch.version.hip or not torch.cuda.is_available():
        return ()
    cards = range(torch.cuda.device_count())
    return tuple(torch.cuda.get_device_capability(card) >= (9, 0) for card in cards)


if triton.knobs.runtime.interpret:

    @triton.jit
    def in_turn():
        """Nothing: one kernel runs at a time."""

else:

    @core.extern
    def in_turn(_semantic=None):
        """Wait for what the kernels before this one wrote and read, and let the next one begin.

        The first statement of a kernel, but for reads of weights: what is before it must touch
        nothing that another kernel of a step writes. Compiles to nothing unless the launch is one
        that begins early. Kernels that begin early must all wait, since the end of one only tells
        of the end of all before it then.
        """
        if getattr(_semantic.builder.options, "launch_pdl", False):
            for instruction in ("wait", "launch_dependents"):
                core.inline_asm_elementwise(
                    f"griddepcontrol.{instruction}; // $0",
                    "=r",
                    [],
                    dtype=core.int32,
                    is_pure=False,
                    pack=1,
                    _semantic=_semantic,
                )


def runs_on_bf16(dtype: torch.dtype) -> bool:
    """Whether tile products of operands that are exact in this type may run on bf16.

    Never under the interpreter, whose bf16 products are wrong.
    """
    return dtype == torch.bfloat16 and not triton.knobs.runtime.interpret


def ceil_div(size: int, part: int) -> int:
    """Parts that cover a size."""
    return -(-size // part)


def next_power(size: int, least: int = 1) -> int:
    """Smallest power of two that is at least `size` and `least`."""
    return max(least, 1 << max(0, size - 1).bit_length())


@triton.jit
def dot(a, b, acc, BF16: tl.constexpr):
    """acc + a @ b, in bf16 where that is exact, else in full fp32."""
    if BF16:
        acc = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Round fp32 to a type, to even, also under the interpreter, whose own cast cuts bits off."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x != x, x, even.to(tl.float32, bitcast=True))
    return x.to(dtype)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit
def e4m3_value(code):
    """fp32 of e4m3 bytes (uint8)."""
    c = code.to(tl.int32)
    e = (c >> 3) & 15
    m = c & 7
    normal = (((e + 120) << 23) | (m << 20)).to(tl.float32, bitcast=True)
    value = tl.where(e == 0, m.to(tl.float32) * 0.001953125, normal)
    value = tl.where((c & 127) == 127, float("nan"), value)
    return tl.where(c >= 128, -value, value)


@triton.jit
def ue8m0_value(code):
    """fp32 power of two of ue8m0 bytes (uint8)."""
    c = code.to(tl.int32)
    bits = tl.where(c == 0, 0x00400000, tl.where(c == 255, 0x7FC00000, c << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e2m1_value(code):
    """fp32 of e2m1 codes 0..15 (int32)."""
    e = (code >> 1) & 3
    m = code & 1
    normal = (((e + 126) << 23) | (m << 22)).to(tl.float32, bitcast=True)
    value = tl.where(e == 0, m.to(tl.float32) * 0.5, normal)
    return tl.where(code >= 8, -value, value)


@triton.jit
def _pow2_ceil(x):
    bits = (x.to(tl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def pow2_inverse(scale):
    """1 / scale of a normal power of two, exact."""
    return ((254 << 23) - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _with_sign(size, x):
    bits = size.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & -2147483648)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e4m3_round(x):
    """Round fp32 to the e4m3 grid, to even, clipped to +-448; keeps the sign of zero."""
    size = tl.abs(x)
    e = tl.maximum(size.to(tl.int32, bitcast=True) >> 23, 121)
    step = ((e - 3) << 23).to(tl.float32, bitcast=True)
    inverse = ((257 - e) << 23).to(tl.float32, bitcast=True)
    rounded = (size * inverse + 8388608.0) - 8388608.0
    rounded = rounded * step
    return _with_sign(tl.where(rounded > 448.0, 448.0, rounded), x)


@triton.jit
def e4m3_code(rounded):
    """Bytes (int32) of fp32 values on the e4m3 grid."""
    bits = rounded.to(tl.int32, bitcast=True)
    e = (bits >> 23) & 255
    normal = ((e - 120) << 3) | ((bits >> 20) & 7)
    small = (tl.abs(rounded) * 512.0).to(tl.int32)
    code = tl.where(e >= 121, normal, small)
    code = tl.where(rounded != rounded, 127, code)
    return code | ((bits >> 24) & 128)


@triton.jit
def e2m1_round(x):
    """Round fp32 to the e2m1 grid, to even, clipped to +-6; keeps the sign of zero."""
    size = tl.abs(x)
    size = tl.where(size > 6.0, 6.0, size)
    step = tl.where(size < 2.0, 0.5, tl.where(size < 4.0, 1.0, 2.0))
    inverse = tl.where(size < 2.0, 2.0, tl.where(size < 4.0, 1.0, 0.5))
    rounded = ((size * inverse + 8388608.0) - 8388608.0) * step
    return _with_sign(rounded, x)


@triton.jit
def e2m1_code(rounded):
    """Codes 0..15 (int32) of fp32 values on the e2m1 grid."""
    size = tl.abs(rounded)
    code = tl.where(size < 2.0, size * 2.0, tl.where(size < 4.0, size + 2.0, size * 0.5 + 4.0))
    return code.to(tl.int32) | ((rounded.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def act8_scale(amax):
    """Power-of-two scale of a group's largest magnitude, ACT8."""
    return _pow2_ceil(tl.div_rn(tl.maximum(amax, 1e-4), 448.0))


@triton.jit
def act4_e8_scale(amax):
    """Power-of-two scale of a group's largest magnitude, ACT4-E8."""
    return _pow2_ceil(tl.div_rn(tl.maximum(amax, 7.052966104933725e-38), 6.0))


@triton.jit
def act4_e4_scale(amax):
    """e4m3 scale of a group's largest magnitude, ACT4-E4."""
    return e4m3_round(tl.div_rn(tl.maximum(amax, 0.01171875), 6.0))


@triton.jit
def act8_round_trip(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Quantize and dequantize a tile [ROWS, COLUMNS] in groups of 32 columns."""
    groups = tl.reshape(x, (ROWS, COLUMNS // 32, 32))
    scale = act8_scale(tl.max(tl.abs(groups), 2))[:, :, None]
    return tl.reshape(e4m3_round(groups * pow2_inverse(scale)) * scale, (ROWS, COLUMNS))
