"""Packed products for Hopper without a card: run on a CPU by fibers, and compiled."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepinfer.errors import UnsupportedError
from deepinfer.kernels import nvcc
from deepinfer.kernels.expert_linear import Fp4Weight
from deepinfer.kernels.expert_linear.packed import experts as packed_experts
from deepinfer.kernels.expert_linear.reference import dequantize_rows, swiglu
from deepinfer.kernels.packed import Decoded, Packed, accepts, pack_fp4
from deepinfer.kernels.packed import experts as chain
from deepinfer.kernels.packed.kept import _kept, kept_fp4, kept_fp8, repack_fp4
from deepinfer.kernels.packed.run import SOURCE, in_order, launches
from deepinfer.kernels.quantize import act8, act8_values, decode_ue8m0
from deepinfer.kernels.routed_experts.reference import routed_experts

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def library(host_library: Callable[..., ctypes.CDLL]) -> ctypes.CDLL:
    return host_library("packed_host.cpp", "-O1")


def call(library: ctypes.CDLL, name: str, *arguments: Tensor | float | None) -> None:
    passed = [
        ctypes.c_longlong(value)
        if isinstance(value, int)
        else ctypes.c_double(value)
        if isinstance(value, float)
        else nvcc.pointer(value)
        for value in arguments
    ]
    assert library[name](*passed, None) == 0


def experts(
    library: ctypes.CDLL,
    name: str,
    weight: Packed,
    x: Tensor,
    counts: list[int],
    scale: Tensor | None = None,
    source: Tensor | None = None,
    programs: int = 3,
    most: int = 1 << 20,
) -> Tensor:
    """Products of rows sorted by expert, into poisoned memory."""
    rows = sum(counts)
    out = torch.full((rows, weight.outputs), torch.nan, dtype=torch.bfloat16)
    offsets = torch.tensor([0, *counts]).cumsum(0)
    call(
        library, name, x, scale, source, weight.data, weight.row_scale, offsets, out,
        weight.experts, weight.outputs, weight.inputs, x.stride(0) * x.element_size(),
        x.shape[0], 0, most, programs,
    )  # fmt: skip
    return out


@pytest.fixture
def on_host(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ops that call the packed kernels run them on this CPU."""

    def host(_: object, name: str, __: object, *arguments: Tensor | float | None) -> None:
        call(library, name, *arguments)

    monkeypatch.setattr(nvcc, "load", lambda source: library)
    monkeypatch.setattr(nvcc, "call", host)


def draw(
    generator: torch.Generator, experts: int, outputs: int, inputs: int
) -> tuple[Tensor, Tensor]:
    shape = (experts, outputs, inputs // 2)
    codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    shape = (experts, outputs, inputs // 32)
    return codes, torch.randint(115, 127, shape, generator=generator, dtype=torch.uint8)


def e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and one power of two per row; small integers are exact."""
    return x.to(torch.float8_e4m3fn).view(torch.uint8), torch.full((x.shape[0],), 0.25)


CASES = [
    ("fp8_32", [0, 1, 7, 40, 0, 17]),
    ("fp8_64", [65, 0, 30]),
    ("fp8_128", [129, 3]),
    ("exact_few", [0, 1, 7, 40, 0, 17]),
    ("exact_32", [0, 1, 7, 40, 0, 17]),
    ("exact_64", [65, 0, 30]),
    ("exact_136", [137, 0, 3]),
]


@pytest.mark.parametrize(("name", "counts"), CASES)
def test_expert_products_and_a_row_alone(
    library: ctypes.CDLL, name: str, counts: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes, scale = draw(generator, len(counts), 256, 512)
    decoded = Decoded.FP4_E4M3 if name.startswith("fp8") else Decoded.FP4_BF16
    weight = pack_fp4(codes, scale, decoded)
    x = torch.randint(-8, 9, (sum(counts), 512), generator=generator).float()
    tokens, factor = e4m3(x) if decoded is Decoded.FP4_E4M3 else (x.bfloat16(), None)
    out = experts(library, name, weight, tokens, counts, factor)
    parts = x.split(counts)
    exact = torch.cat(
        [p @ dequantize_rows(c, s).T for p, c, s in zip(parts, codes, scale, strict=True)]
    )
    exact = exact * (1.0 if factor is None else 0.25)
    # integers times few bits add up exactly in fp32, so only the last rounding is left
    assert torch.equal(out, exact.bfloat16())
    last = len(counts) - 1
    alone = [0] * last + [1]
    row = tokens[-1:].contiguous()
    factor = None if factor is None else factor[-1:].clone()
    assert torch.equal(experts(library, name, weight, row, alone, factor), out[-1:])


def test_rows_are_taken_from_their_sources(library: ctypes.CDLL, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = pack_fp4(*draw(generator, 2, 256, 256), Decoded.FP4_BF16)
    x = torch.randn(4, 256, generator=generator).bfloat16()
    source = torch.tensor([3, 0, 3, 1, 2])
    out = experts(library, "exact_32", weight, x, [2, 3], source=source)
    assert torch.equal(out, experts(library, "exact_32", weight, x[source], [2, 3]))
    assert experts(library, "exact_32", weight, x[source], [2, 3], most=5).isnan().all()


@pytest.mark.parametrize("decoded", [Decoded.FP4_E4M3, Decoded.FP4_BF16])
def test_every_code_decodes_exactly(library: ctypes.CDLL, decoded: Decoded, seed: int) -> None:
    """One-hot tokens bring out each weight."""
    generator = torch.Generator().manual_seed(seed)
    codes, scale = draw(generator, 1, 256, 256)
    if decoded is Decoded.FP4_BF16:
        scale = torch.randint(40, 140, scale.shape, generator=generator, dtype=torch.uint8)
    codes[0, 5, :16] = 0  # a group of zeros may have any scale
    scale[0, 5, 0] = 0
    one = torch.eye(256)
    fp8 = decoded is Decoded.FP4_E4M3
    tokens, factor = e4m3(one) if fp8 else (one.bfloat16(), None)
    name = "fp8_128" if fp8 else "exact_136"
    out = experts(library, name, pack_fp4(codes, scale, decoded), tokens, [256], factor)
    assert torch.equal(out.float() * (4 if fp8 else 1), dequantize_rows(codes[0], scale[0]).T)


def test_tokens_are_folded_and_gated(library: ctypes.CDLL, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 768, generator=generator).bfloat16()
    x[1] *= 1e-6  # the least scale
    x[2, 5] = 448 * 4  # a scale's border
    codes, scale = torch.empty(3, 768, dtype=torch.uint8), torch.empty(3)
    call(library, "fold", x, codes, scale, None, None, 3, 0, 768, 768, None, 0)
    _, exponents = act8(x.float().abs().amax(1, keepdim=True).expand(3, 32).contiguous())
    assert torch.equal(scale, decode_ue8m0(exponents).flatten())
    kept = (x.float() / scale[:, None]).to(torch.float8_e4m3fn)
    assert torch.equal(codes, kept.view(torch.uint8))
    source, offsets = torch.tensor([2, 0, 7]), torch.tensor([0, 2])
    taken, factor = torch.empty_like(codes), torch.empty(3)
    call(library, "fold", x, taken, factor, source, offsets, 3, 1, 768, 768, None, 0)
    assert torch.equal(taken[:2], codes[source[:2]])
    assert torch.equal(factor[:2], scale[source[:2]])
    rows = torch.full_like(x, torch.nan)
    call(library, "gather", x, rows, source, offsets, 3, 1, 768, 768, None, 0)
    assert torch.equal(rows[:2], x[source[:2]]) and rows[2].isnan().all()

    weight, offsets = torch.rand(3, generator=generator), torch.tensor([0, 1, 2])
    gate_up = torch.randn(3, 512, generator=generator).mul(8).bfloat16()
    wanted = [swiglu(*gate_up.chunk(2, 1), 10.0, weight, quantize) for quantize in (False, True)]
    for quantize in (0, 1):
        out = torch.full((3, 256), torch.nan, dtype=torch.bfloat16)
        call(library, "gate", gate_up, weight, out, None, offsets, 3, 2, 256, 10.0, quantize, 0)
        assert torch.equal(out[:2], wanted[quantize][:2]) and out[2].isnan().all()
    codes, again = torch.empty(3, 256, dtype=torch.uint8), torch.empty(3, 256, dtype=torch.uint8)
    call(library, "gate", gate_up, weight, codes, scale, offsets, 3, 2, 256, 10.0, 1, 1)
    call(library, "fold", wanted[0], again, torch.empty(3), None, None, 3, 0, 256, 256, None, 0)
    assert torch.equal(codes[:2], again[:2])


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize(("decoded", "choices"), [(Decoded.FP4_BF16, 125), (Decoded.FP4_E4M3, 165)])
def test_a_chain_of_many_rows_reads_them_in_order(
    monkeypatch: pytest.MonkeyPatch,
    decoded: Decoded,
    choices: int,
    seed: int,
) -> None:
    """All of routed experts on this CPU: what no run takes is neither read nor written."""
    monkeypatch.setattr(nvcc, "processors", lambda device: 2)
    generator = torch.Generator().manual_seed(seed)
    (up, down), bound = (draw(generator, 2, n, 256) for n in (512, 256)), choices + 3
    x = act8_values(torch.randn(9, 256, generator=generator).bfloat16()).bfloat16()
    rows = torch.randint(0, 9, (bound,), generator=generator)
    rows[choices:] = 1 << 40  # left out: no row of x
    offsets, weight = torch.tensor([0, 20, choices]), torch.rand(bound, generator=generator)
    assert in_order(decoded, bound, 2)
    first, second = pack_fp4(*up, decoded), pack_fp4(*down, decoded)
    out = packed_experts(x, rows, offsets, weight, first, second, 10.0, True)[:choices]
    weights = (Fp4Weight(*up, None), Fp4Weight(*down, None))
    exact = routed_experts(
        x, rows[:choices], weight[:choices], offsets, *weights, 10.0, True
    ).double()
    assert (out.double() - exact).norm() / exact.norm() < (
        5e-3 if decoded is Decoded.FP4_BF16 else 2e-2
    )


CHAINS = [name for table in chain.SCHEDULES.values() for _, name in table]


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize(
    ("name", "blocks"), [*((name, 3) for name in CHAINS), (CHAINS[0], -2), (CHAINS[-1], 1)]
)
def test_one_launch_of_both_products_has_the_bits_of_two(
    monkeypatch: pytest.MonkeyPatch, name: str, blocks: int, seed: int
) -> None:
    """Blocks take tiles from a counter, in poisoned memory; one alone makes all of them."""
    monkeypatch.setattr(nvcc, "processors", lambda device: 3)
    generator, counts = torch.Generator().manual_seed(seed), [0, 9, 1, 3]
    decoded = Decoded.FP4_E4M3 if name.startswith("fp8") else Decoded.FP4_BF16
    first, second = (pack_fp4(*draw(generator, 4, n, 256), decoded) for n in (512, 256))
    x = act8_values(torch.randn(5, 256, generator=generator).bfloat16()).bfloat16()
    rows = torch.randint(0, 5, (15,), generator=generator)
    rows[13:] = 1 << 40  # left out
    offsets, weight = torch.tensor([0, *counts]).cumsum(0), torch.rand(15, generator=generator)
    given = x, rows, offsets, weight, first, second, 10.0, True
    two = packed_experts(*given)[:13]
    monkeypatch.setattr(nvcc, "processors", lambda device: blocks)
    monkeypatch.setattr(torch, "empty", poisoned)
    assert torch.equal(chain.experts(*given, name=name)[:13], two)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("count", [9, 45])
def test_a_launch_for_other_numbers_of_rows_takes_no_tile(
    monkeypatch: pytest.MonkeyPatch, count: int, seed: int
) -> None:
    monkeypatch.setattr(nvcc, "processors", lambda device: 2)
    form = Decoded.FP4_BF16
    ranges = {form: ((20, "exact_48_ahead"), (None, "exact_64_four"))}
    assert len(launches(form, 50, 1, ranges)) == 2
    monkeypatch.setattr(chain, "SCHEDULES", ranges)
    generator = torch.Generator().manual_seed(seed)
    first, second = (pack_fp4(*draw(generator, 1, n, 256), form) for n in (512, 256))
    x = act8_values(torch.randn(5, 256, generator=generator).bfloat16()).bfloat16()
    rows = torch.randint(0, 5, (50,), generator=generator)
    given = x, rows, torch.tensor([0, count]), torch.rand(50, generator=generator), first, second
    both = chain.experts(*given, 10.0, True)[:count]
    assert torch.equal(both, chain.experts(*given, 10.0, True, name="exact_64_four")[:count])


def poisoned(*size: int, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    value = torch.nan if dtype.is_floating_point else 127
    return torch.full(size, value, dtype=dtype, device=device)


def test_scales_too_far_apart_are_refused(seed: int) -> None:
    codes, scale = draw(torch.Generator().manual_seed(seed), 1, 256, 256)
    scale[0, 7, 0], scale[0, 7, 1] = 100, 112
    codes[0, 7] |= 1
    with pytest.raises(UnsupportedError, match="powers of two"):
        pack_fp4(codes, scale, Decoded.FP4_E4M3)
    pack_fp4(codes, scale, Decoded.FP4_BF16)
    scale[0, 7, 1] = 255
    with pytest.raises(UnsupportedError, match="NaN"):
        pack_fp4(codes, scale, Decoded.FP4_BF16)
    assert accepts(4608, 5120) and not accepts(64, 5120) and not accepts(256, 128)
    with pytest.raises(UnsupportedError, match="multiple of 256"):
        pack_fp4(codes[:, :64], scale[:, :64], Decoded.FP4_BF16)


def test_launches_cover_all_row_counts_once() -> None:
    for decoded in (Decoded.FP4_E4M3, Decoded.FP4_BF16):
        for bound, count in ((36, 1), (1152, 1), (2304, 2), (24576, 3)):
            found = launches(decoded, bound, 48)
            assert len(found) == count
            for rows in (0, 1, 36, 1296, 1297, 2304, 2880, 3840, 3841, 24576):
                taken = sum(least <= rows < most for _, least, most in found)
                assert taken == 1 if rows <= bound else taken <= 1
    assert [n for n, *_ in launches(Decoded.FP4_BF16, 36, 48)] == ["exact_few"]
    assert [in_order(Decoded.FP4_BF16, bound, 48) for bound in (1296, 1297)] == [False, True]
    assert [n for n, *_ in found] == ["exact_32", "exact_64", "exact_136"]


@pytest.mark.skipif(not nvcc.available(), reason="nvcc is not installed")
def test_it_builds_for_hopper_with_tensor_instructions(tmp_path: Path) -> None:
    target = tmp_path / "packed.cubin"
    options = ("-cubin", "-Xptxas", "-v")
    done = subprocess.run(
        nvcc.command(SOURCE, target, *options), capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr[-3000:]
    assert "serialized" not in done.stderr  # products that wait for each other


def test_copies_live_as_long_as_their_weights_and_follow_them(seed: int) -> None:
    codes, scale = draw(torch.Generator().manual_seed(seed), 2, 256, 256)
    first = kept_fp4(codes, scale, Decoded.FP4_BF16)
    assert first is not None and kept_fp4(codes, scale, Decoded.FP4_BF16) is first
    before = first.data.clone()
    codes[1] ^= 3
    repack_fp4(codes, scale, 1)
    assert torch.equal(first.data[0], before[0]) and not torch.equal(first.data[1], before[1])
    assert torch.equal(first.data, pack_fp4(codes, scale, Decoded.FP4_BF16).data)
    scale[0, 0, 0], scale[0, 0, 1] = 90, 120
    codes[0, 0] |= 1
    assert kept_fp4(codes, scale, Decoded.FP4_E4M3) is None  # the exact products take over
    assert kept_fp8(torch.zeros(64, 64, dtype=torch.float8_e4m3fn), scale[0]) is None
    held = len(_kept)
    del codes
    assert len(_kept) == held - 2
