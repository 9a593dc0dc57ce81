"""Every code of every number format, and every bf16 value through the quantizers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.kernels import twins

from deepinfer.errors import ShapeError
from deepinfer.kernels.quantize import (
    GROUP_SIZE,
    QuantFormat,
    act4_e4,
    act4_e8,
    act8,
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    repeat_groups,
    round_trip,
)

EVERY_BYTE = torch.arange(256, dtype=torch.uint8)


def finite_bf16() -> torch.Tensor:
    """All 65,280 finite bf16 values, both zeros among them."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    values = bits.to(torch.int16).view(torch.bfloat16)
    return values[values.isfinite()]


def test_e4m3() -> None:
    want = [twins.e4m3(code) for code in range(256)]
    for codes in (EVERY_BYTE, EVERY_BYTE.view(torch.float8_e4m3fn)):
        for got, exact in zip(decode_e4m3(codes).tolist(), want, strict=True):
            same = math.isnan(got) and math.isnan(exact)
            assert same or (got == exact and math.copysign(1, got) == math.copysign(1, exact))
    assert sum(math.isnan(v) for v in want) == 2 and max(v for v in want if v == v) == 448.0


def test_e2m1() -> None:
    """Both nibbles of every byte: the even element is the low one."""
    got = decode_e2m1(EVERY_BYTE[:, None])
    assert got.shape == (256, 2) and got.dtype == torch.float32
    for byte, pair in enumerate(got.tolist()):
        for value, code in zip(pair, (byte & 15, byte >> 4), strict=True):
            exact = math.copysign(twins.E2M1[code & 7], -1.0 if code & 8 else 1.0)
            assert value == exact and math.copysign(1, value) == math.copysign(1, exact)
    assert decode_e2m1(EVERY_BYTE.view(4, 64)).shape == (4, 128)


def test_ue8m0() -> None:
    got = decode_ue8m0(EVERY_BYTE).double().numpy()
    assert np.array_equal(got[:255], np.ldexp(1.0, np.arange(255) - 127))
    assert math.isnan(got[255])


def test_repeat_groups() -> None:
    values, scale = torch.arange(24.0).view(2, 12), torch.tensor([[1.0, 2, 4], [8, 16, 32]])
    want = values * scale[:, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]]
    assert torch.equal(repeat_groups(values, scale), want)


def test_decoding_inverts_encoding() -> None:
    """What a quantizer stores decodes to what the round trip returns."""
    x = torch.randn(40, 5, 96).bfloat16() * 3
    codes, scales = act8(x)
    assert torch.equal(
        repeat_groups(decode_e4m3(codes), decode_ue8m0(scales)), round_trip(x, "act8").float()
    )
    codes, scales = act4_e8(x)
    assert torch.equal(
        repeat_groups(decode_e2m1(codes), decode_ue8m0(scales)), round_trip(x, "act4_e8").float()
    )
    codes, scales = act4_e4(x)
    assert torch.equal(
        repeat_groups(decode_e2m1(codes), decode_e4m3(scales)), round_trip(x, "act4_e4").float()
    )


@pytest.mark.parametrize(("fmt", "largest", "grid"), [("act8", 448.0, twins.E4M3)])
def test_every_bf16_below_a_group_of_scale_one(
    fmt: QuantFormat, largest: float, grid: list[float]
) -> None:
    """With 448 in the group the scale is 1: the codes are the nearest e4m3 values, ties to even."""
    x = finite_bf16()
    x = x[x.abs() <= largest].float()
    x = torch.nn.functional.pad(x, (0, -len(x) % 31)).view(-1, 31)
    group = torch.cat([x, torch.full((len(x), 1), largest)], 1).bfloat16()
    got = round_trip(group, fmt)[:, :31].double().numpy().ravel()
    exact = x.double().numpy().ravel()
    table = np.array(grid)
    size = np.abs(exact)
    above = np.searchsorted(table, size).clip(0, len(table) - 1)
    below = (above - 1).clip(0)
    to_above, to_below = table[above] - size, size - table[below]
    up = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    assert np.array_equal(got, np.copysign(np.where(up, table[above], table[below]), exact))


@pytest.mark.parametrize("fmt", GROUP_SIZE)
def test_every_finite_bf16_as_a_whole_group(fmt: QuantFormat) -> None:
    """A group of one value: odd in sign, finite, never further off than the format's step."""
    size = GROUP_SIZE[fmt]
    x = finite_bf16()
    x = x[x.abs() < 2.0**127]  # above, rounding up may leave bf16
    x = x[:, None].expand(-1, size).contiguous()
    once = round_trip(x, fmt)
    assert once.isfinite().all()
    assert torch.equal(round_trip(-x, fmt), -once)
    exact, got = x[:, 0].double(), once[:, 0].double()
    assert torch.equal(once, once[:, :1].expand(-1, size))
    floor, step = {
        "act8": (1e-4, 2.0**-4),  # three bits of mantissa
        "act4_e8": (6 * 2.0**-126, 0.25),  # one bit
        "act4_e4": (6 * 2.0**-6, 0.25),  # smaller scales are subnormal
    }[fmt]
    ceiling = 448.0 * 6 if fmt == "act4_e4" else math.inf
    inside = (exact.abs() >= floor) & (exact.abs() <= ceiling)
    assert ((got - exact).abs() <= step * exact.abs())[inside].all()
    if fmt == "act4_e4":
        assert got[exact > ceiling].eq(ceiling).all()


@pytest.mark.parametrize("quantizer", [act8, act4_e8, act4_e4])
def test_codes_keep_the_sign_of_zero(quantizer: object) -> None:
    assert callable(quantizer)
    x = torch.zeros(1, 32)
    x[0, 1] = -0.0
    codes, _ = quantizer(x)
    stored = codes.view(torch.uint8).flatten().tolist()
    assert stored[:2] == ([0, 0x80] if quantizer is act8 else [0x80, 0])


def test_nan_reaches_the_output() -> None:
    """Damaged activations must not turn into plausible numbers."""
    x = torch.ones(1, 32).bfloat16()
    x[0, 3] = math.nan
    assert round_trip(x, "act8").isnan().any()


@pytest.mark.parametrize("fmt", GROUP_SIZE)
def test_a_partial_group_is_refused(fmt: QuantFormat) -> None:
    with pytest.raises(ShapeError, match=rf"{fmt}: last dimension 40, expected a multiple of"):
        round_trip(torch.zeros(2, 40), fmt)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ShapeError, match="round_trip: format 'act5', expected one of"):
        round_trip(torch.zeros(2, 32), "act5")  # type: ignore[arg-type]
