"""The attention kernel for Hopper without a card: run on a CPU by fibers, and compiled."""

from __future__ import annotations

import ctypes
import math
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.kernels.twins import E2M1, E4M3_BYTES
from torch import Tensor

from deepinfer.kernels import nvcc
from deepinfer.kernels.cache_io import PagedCache
from deepinfer.kernels.cache_io.cases import empty_cache
from deepinfer.kernels.paged_attention import paged_attention, sm90
from deepinfer.kernels.rope.reference import rotate_tail

HERE = Path(__file__).parent
FACTOR = 2.0**-8  # of every decoded value


@pytest.fixture(scope="module")
def library(host_library: Callable[..., ctypes.CDLL]) -> ctypes.CDLL:
    return host_library("paged_host.cpp", "-O2")


def test_every_code_and_scale_decodes_exactly(library: ctypes.CDLL) -> None:
    main, window = np.zeros((256, 16), np.uint16), np.zeros((256, 256), np.uint16)
    library.decoded(main.ctypes.data_as(ctypes.c_void_p), window.ctypes.data_as(ctypes.c_void_p))

    def values(bits: np.ndarray) -> Tensor:
        return torch.from_numpy((bits.astype(np.uint32) << 16).view(np.float32)).double()

    codes = torch.tensor(E2M1 + [-v for v in E2M1], dtype=torch.float64)
    scales = E4M3_BYTES[:127, None]
    assert torch.equal(values(main)[:127], codes * scales * FACTOR)
    codes = E4M3_BYTES.nan_to_num(0.0)
    powers = torch.exp2(torch.arange(255, dtype=torch.float64) - 127)[:, None]
    found, exact = values(window)[:255].clone(), codes * powers * FACTOR
    found[:, [127, 255]] = 0.0  # codes that are no number
    assert torch.equal(found[20:], exact[20:])
    assert (found - exact).abs().max() < 2.0**-125  # of scales that no record holds


def filled(form: str, blocks: int, entries: int, scales: range, seed: int) -> PagedCache:
    """Random codes and scales; every block is followed by bytes that no entry owns."""
    generator = torch.Generator().manual_seed(seed)
    cache = empty_cache(form, blocks, entries, 512, dense=False, split=False)  # type: ignore[arg-type]
    drawn = torch.randint(0, 256, cache.codes.shape, generator=generator, dtype=torch.uint8)
    if form == "window_fp8":
        drawn[(drawn & 127) == 127] = 0
    cache.codes.copy_(drawn)
    assert cache.scales is not None
    drawn = torch.randint(scales.start, scales.stop, cache.scales.shape, generator=generator)
    cache.scales.copy_(drawn.to(torch.uint8))
    cache.codes[-1, -1] = 0xFF  # an entry without a number, which no test names
    cache.scales[-1, -1] = 0xFF
    return cache


def launch(
    library: ctypes.CDLL,
    q: Tensor,
    window: PagedCache,
    window_idx: Tensor,
    main: PagedCache | None,
    main_idx: Tensor | None,
    sink: Tensor,
    shares: int,
    processors: int = 2,
    turn: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
) -> Tensor:
    """Run the kernel; shares = 0 cuts the rows into equal runs, one a processor."""
    out = torch.full_like(q, math.nan)
    integer, other = ctypes.c_longlong, main if main is not None else window
    status = library.paged_attention(
        *(nvcc.pointer(t) for t in (q, window.codes, window_idx, other.codes, main_idx, sink, out)),
        integer(q.shape[0]),
        integer(window_idx.shape[1]),
        integer(0 if main_idx is None else main_idx.shape[1]),
        integer(window.codes.shape[1]),
        integer(window.codes.stride(0)),
        integer(other.codes.shape[1]),
        integer(other.codes.stride(0)),
        integer(shares),
        ctypes.c_double(512**-0.5),
        integer(processors),
        *map(nvcc.pointer, turn),
    )
    assert not status  # no flag is left up
    return out


def inputs(
    num_rows: int, window: int, selected: int, absent: float, spread: float, seed: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = (torch.randn(num_rows, 64, 512, generator=generator) * spread).bfloat16()
    sink = torch.randn(64, generator=generator)
    lists = []
    for slots, total in ((window, 4 * 30 - 1), (selected, 9 * 64 - 1)):
        idx = torch.randint(0, total, (num_rows, slots), generator=generator)
        lists.append(idx.masked_fill(torch.rand(num_rows, slots, generator=generator) < absent, -1))
    return q, lists[0], lists[1] if selected else None, sink


@pytest.mark.parametrize(
    ("num_rows", "window", "selected", "shares", "absent", "spread"),
    [
        (5, 128, 512, 1, 0.1, 1.0),
        (3, 48, 24, 1, 0.5, 8.0),
        (3, 40, 0, 1, 0.3, 1.0),
        (2, 128, 512, 4, 0.0, 1.0),
        (2, 128, 200, 2, 0.9, 8.0),
        (2, 100, 100, 3, 0.2, 1.0),
        (2, 40, 0, 4, 0.3, 1.0),
        (3, 128, 300, 4, 0.3, 2.0),
        (2, 40, 64, 5, 0.3, 1.0),
    ],
)
def test_the_kernel_computes_attention(
    library: ctypes.CDLL,
    num_rows: int,
    window: int,
    selected: int,
    shares: int,
    absent: float,
    spread: float,
    seed: int,
) -> None:
    rings = filled("window_fp8", 4, 30, range(110, 118), seed)
    main = filled("main_fp4", 9, 64, range(0x38), seed + 1) if selected else None
    q, window_idx, main_idx, sink = inputs(num_rows, window, selected, absent, spread, seed)
    window_idx[0] = -1
    if main_idx is not None:
        main_idx[-1] = -1
        main_idx[0] = -1 if num_rows > 2 else main_idx[0]
    got = launch(library, q, rings, window_idx, main, main_idx, sink, shares).double()
    want = paged_attention(
        q.float(), rings, window_idx, main, main_idx, sink, 512**-0.5, False
    ).double()
    error = (got - want).flatten(1).norm(dim=1)
    assert (error <= 4e-3 * want.flatten(1).norm(dim=1)).all()
    if num_rows > 2:
        assert not got[0].any()
    alone = launch(
        library,
        q[1:2].contiguous(),
        rings,
        window_idx[1:2].contiguous(),
        main,
        None if main_idx is None else main_idx[1:2].contiguous(),
        sink,
        shares,
    ).double()
    assert torch.equal(alone[0], got[1])


@pytest.mark.parametrize(
    ("num_rows", "window", "selected", "processors"),
    [(4, 128, 128, 3), (3, 64, 0, 2), (7, 70, 64, 5)],
)
def test_rows_cut_into_equal_runs_keep_their_bits(
    library: ctypes.CDLL, num_rows: int, window: int, selected: int, processors: int, seed: int
) -> None:
    rings = filled("window_fp8", 4, 30, range(110, 118), seed)
    main = filled("main_fp4", 9, 64, range(0x38), seed + 1) if selected else None
    q, window_idx, main_idx, sink = inputs(num_rows, window, selected, 0.1, 8.0, seed)
    whole, cut = (
        launch(library, q, rings, window_idx, main, main_idx, sink, shares, processors)
        for shares in (1, 0)
    )
    assert torch.equal(cut, whole)


@pytest.mark.parametrize(
    ("num_rows", "window", "selected", "shares"),
    [(2, 64, 70, 1), (4, 64, 70, 0), (2, 70, 64, 3), (2, 64, 70, 5)],
)
def test_rotation_and_rounding_inside_have_the_bits_of_ops_around(
    library: ctypes.CDLL,
    num_rows: int,
    window: int,
    selected: int,
    shares: int,
    seed: int,
) -> None:
    rings = filled("window_fp8", 4, 30, range(110, 118), seed)
    main = filled("main_fp4", 9, 64, range(0x38), seed + 1) if selected else None
    q, window_idx, main_idx, sink = inputs(num_rows, window, selected, 0.2, 2.0, seed)
    window_idx[0] = -1
    if main_idx is not None:
        main_idx[0] = -1  # a row without entries
    angle = torch.rand(num_rows, 32, generator=torch.Generator().manual_seed(seed)) * 6
    turn = angle.cos(), angle.sin()
    rest = (rings, window_idx, main, main_idx, sink, shares, 3)
    inside = launch(library, q, *rest, turn)
    around = launch(library, rotate_tail(q, *turn), *rest)
    assert torch.equal(inside, rotate_tail(around, *turn, True, False, "act8"))


def test_what_a_block_passes_on_has_room(library: ctypes.CDLL) -> None:
    sizes = (ctypes.c_int * 2)()
    library.passed_sizes(sizes)
    assert tuple(sizes) == (sm90.PART, sm90.FLAGS)


def test_few_rows_are_split_and_odd_rounds_cut() -> None:
    plans = {rows: sm90.plan(rows, 10, 132) for rows in (6, 20, 28, 36, 66, 100, 192, 265, 768)}
    assert plans == {
        6: (10, True),
        20: (5, True),
        28: (4, True),
        36: (3, True),
        66: (2, True),
        100: (1, False),
        192: (1, True),
        265: (1, True),
        768: (1, False),
    }
    assert all(rows * n <= 132 for rows, (n, _) in plans.items() if n > 1)
    assert sm90.plan(32, 10, 132, whole=True) == (1, False)
    assert sm90.plan(192, 10, 132, whole=True) == (1, True)
    assert sm90.plan(192, 0, 132) == (1, False)


def test_accepts_the_release_and_nothing_else() -> None:
    rings = empty_cache("window_fp8", 2, 30, 512, dense=False, split=False)
    main = empty_cache("main_fp4", 2, 64, 512, dense=False, split=False)
    q, idx = torch.zeros(2, 64, 512, dtype=torch.bfloat16), torch.zeros(2, 8, dtype=torch.int64)
    assert sm90.accepts(q, rings, main, idx, True)
    assert sm90.accepts(q, rings, None, None, True)
    turn = torch.zeros(3, 32)
    assert sm90.turns(turn, turn, "act8") and not sm90.turns(turn, turn, None)
    assert not sm90.turns(turn[:, :16], turn, "act8")
    assert not sm90.turns(torch.zeros(3, 64)[:, ::2], turn, "act8")
    assert not sm90.accepts(q.float(), rings, main, idx, True)
    assert not sm90.accepts(q, rings, main, idx, False)
    assert not sm90.accepts(q[:, :32], rings, main, idx, True)
    split = empty_cache("main_fp4", 2, 64, 512, dense=False, split=True)
    assert not sm90.accepts(q, rings, split, idx, True)
    assert not sm90.accepts(
        q, empty_cache("fp32", 2, 30, 512, dense=False, split=False), None, None, True
    )


@pytest.mark.skipif(not nvcc.available(), reason="nvcc is not installed")
def test_the_kernel_compiles_and_keeps_its_registers(tmp_path: Path) -> None:
    command = nvcc.command(sm90.SOURCE, tmp_path / "sm90.cubin", "-cubin", "-Xptxas", "-v")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-3000:]
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", done.stderr)]
    assert len(spilled) == 9 and max(spilled) <= 128, spilled
    assert "wgmma" not in done.stderr  # no complaint that products wait for each other
