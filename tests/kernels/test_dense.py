"""Dense e4m3 products for Hopper without a card: on a CPU by fibers, compiled, and on copies."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepinfer.kernels import nvcc
from deepinfer.kernels.linear import Fp8Weight, copied, reference
from deepinfer.kernels.linear.reference import dequantize_blocks
from deepinfer.kernels.packed import pack_fp8
from deepinfer.kernels.packed.dense import SOURCE, fixed_split, plan, rounds_inside, share_of
from deepinfer.kernels.quantize import round_trip


@pytest.fixture(scope="module")
def library(host_library: Callable[..., ctypes.CDLL]) -> ctypes.CDLL:
    return host_library("dense_host.cpp", "-O1")


def draw(generator: torch.Generator, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    codes = torch.randint(0, 256, (outputs, inputs), generator=generator, dtype=torch.uint8)
    codes[(codes & 127) == 127] = 1
    shape = (outputs // 32, inputs // 32)
    scale = torch.randint(100, 104, shape, generator=generator, dtype=torch.uint8)
    return codes.view(torch.float8_e4m3fn), scale


def multiply(
    library: ctypes.CDLL, name: str, x: Tensor, weight: Fp8Weight, split: int, rounds: bool = False
) -> Tensor:
    """Products on two blocks at a time, into poisoned memory."""
    rows, groups, inputs = x.shape
    outputs = weight.codes.shape[0]
    packed = pack_fp8(weight.codes, weight.scale)
    out = torch.full((rows, outputs), torch.nan, dtype=torch.bfloat16)
    arguments = (
        x, packed.data, packed.row_scale, out, groups, outputs // groups, inputs, x.stride(0) * 2,
        rows, share_of(rows, name), outputs, int(rounds), 2, split,
    )  # fmt: skip
    passed = [ctypes.c_longlong(v) if isinstance(v, int) else nvcc.pointer(v) for v in arguments]
    assert library[name](*passed, None) == 0
    return out


@pytest.mark.parametrize(
    ("name", "rows", "size", "split"),
    [
        ("few_128", 1, (256, 512, 1), 1),
        ("few_128", 9, (512, 768, 2), 3),
        ("some_128", 40, (512, 256, 2), 1),
        ("step_128", 120, (256, 256, 1), 1),
        ("step_192", 70, (256, 512, 1), 2),
        ("few_64", 23, (256, 512, 2), 4),
        ("half_128", 110, (256, 512, 1), 2),
        ("wide_128", 100, (256, 256, 1), 1),
        ("wide_192", 193, (256, 256, 1), 2),
        ("wide_192", 170, (256, 256, 1), 1),
        ("whole_128", 131, (256, 512, 1), 3),
        ("slim_8", 7, (512, 1280, 2), 1),
        ("slim_4", 5, (256, 512, 1), 1),
    ],
)
def test_products(
    library: ctypes.CDLL, name: str, rows: int, size: tuple[int, int, int], split: int, seed: int
) -> None:
    outputs, inputs, groups = size
    generator = torch.Generator().manual_seed(seed)
    weight = Fp8Weight(*draw(generator, outputs, inputs), None)
    x = torch.randint(-1, 2, (rows, groups, inputs), generator=generator).bfloat16()
    out = multiply(library, name, x, weight, split)
    matrix = dequantize_blocks(weight.codes, weight.scale).view(groups, -1, inputs)
    exact = torch.einsum("tgk,gnk->tgn", x.double(), matrix.double()).reshape(rows, outputs)
    error = (out.double() - exact).norm() / exact.norm()
    assert error < 2.5e-3  # bf16's own is 1.7e-3
    # a row's bits depend on how K is shared, and on nothing else
    same = name if name.startswith("slim") else "few_128"
    alone = multiply(library, same, x[-1:].contiguous(), weight, split)
    assert torch.equal(alone[0], out[-1])
    # rounding as the product stores is rounding what it stored
    assert rounds_inside(name, split)
    rounded = multiply(library, name, x, weight, split, rounds=True)
    assert torch.equal(rounded, round_trip(out, "act8"))


def test_schedules_follow_the_size_and_fixed_splits_the_matrix() -> None:
    sizes = {(1792, 1, 5120): 8, (32768, 1, 1280): 1, (5120, 1, 8192): 4, (1024, 8, 4096): 2}
    assert {size: fixed_split(*size) for size in sizes} == sizes
    wo_b = 5120, 1, 8192
    plans = [plan(*wo_b, rows) for rows in (1, 64, 192, 4096)]
    assert plans == [("slim_8", 1), ("some_128", 5), ("wide_192", 4), ("wide_192", 1)]
    assert plan(*wo_b, 192, 4) == ("wide_192", 4)
    assert plan(*wo_b, 4096, 4) == ("whole_wide", 4)
    assert plan(32768, 1, 1280, 6) == ("slim_4", 1)
    assert plan(1792, 1, 5120, 6) == ("few_64", 8)
    assert plan(1024, 8, 4096, 8) == ("slim_8", 1)
    assert plan(*wo_b, 6, 4) == ("few_64", 4)
    assert plan(256, 1, 256, 1)[1] == 1  # too few inputs to share
    shares = [share_of(rows, "wide_128") for rows in (1, 192, 193, 384, 4096)]
    assert shares == [8, 192, 104, 192, 192]
    assert [share_of(4096, "wide_192", high) for high in (10, 24, 27)] == [160, 192, 176]


@pytest.mark.skipif(not nvcc.available(), reason="nvcc is not installed")
def test_it_builds_for_hopper_with_tensor_instructions(tmp_path: Path) -> None:
    options = ("-cubin", "-Xptxas", "-v")
    done = subprocess.run(
        nvcc.command(SOURCE, tmp_path / "dense.cubin", *options),
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr[-3000:]
    assert "serialized" not in done.stderr  # products that wait for each other


@pytest.mark.parametrize("rows", [copied.LEAST_ROWS, copied.LEAST_ROWS + 7])
def test_products_of_many_rows_on_copies(rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = Fp8Weight(*draw(generator, 96, 128), None)
    x = torch.randint(-2, 3, (rows, 128), generator=generator).bfloat16()
    before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    out = copied.fp8_linear(x, weight, False)
    torch.testing.assert_close(out, reference.fp8_linear(x, weight, False))
    grouped = torch.stack((x, -x, x.flip(0)), dim=1)
    out = copied.grouped_linear(grouped, weight, False)
    torch.testing.assert_close(out, reference.grouped_linear(grouped, weight, False))
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction is before
    assert len(copied._kept) == 1
    del weight
    assert not copied._kept
