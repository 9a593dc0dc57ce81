"""CUDA sources for SM90 without a card: built by nvcc, and run on the CPU thread by thread.

`cuda_host.h` turns a source into C++ whose threads are fibers, so what runs here is the kernel,
with its barriers, its shared memory and its places in tensor instructions. What it leaves out:
timing, memory ordering, and how a card rounds inside a tensor instruction.
"""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepinfer.kernels import nvcc
from deepinfer.kernels.cache_io import PagedCache
from deepinfer.kernels.cache_io.cases import empty_cache
from deepinfer.kernels.cache_io.reference import cache_store
from deepinfer.kernels.expert_linear import gate as expert_gate
from deepinfer.kernels.expert_linear.reference import swiglu
from deepinfer.kernels.grouping import Terms, whole
from deepinfer.kernels.hyper.reference import hyper_collapse, hyper_expand, hyper_mix
from deepinfer.kernels.hyper_site import SiteWeights
from deepinfer.kernels.hyper_site import sm90 as site
from deepinfer.kernels.linear import DenseWeight
from deepinfer.kernels.paged_index import sm90 as index
from deepinfer.kernels.paged_index.reference import paged_index_score
from deepinfer.kernels.quantize import QuantFormat
from deepinfer.kernels.quantize import sm90 as quantize
from deepinfer.kernels.quantize.reference import round_trip
from deepinfer.kernels.rms_norm.reference import rms_norm
from deepinfer.kernels.rope import reference as rope_reference
from deepinfer.kernels.rope import sm90 as rope
from deepinfer.kernels.router import reference as router_reference
from deepinfer.kernels.router import sm90 as router
from deepinfer.kernels.topk import reference as topk_reference
from deepinfer.kernels.topk import sm90 as topk
from deepinfer.parallel.experts import SPREAD, ExpertMaps, LayerExperts
from deepinfer.parallel.placement import initial_placement

SOURCES = {
    f"{source.parent.name}_{source.stem}": source
    for source in (
        topk.SOURCE,
        index.SOURCE,
        site.SOURCE,
        rope.SOURCE,
        quantize.SOURCE,
        router.SOURCE,
        expert_gate.SOURCE,
    )
}
needs_gcc = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


@pytest.fixture(scope="session")
def host(built_once: Callable[..., Path]) -> dict[str, ctypes.CDLL]:
    """The sources as libraries of this machine."""
    flags = (
        "-std=c++17",
        "-fno-gnu-unique",  # else two such libraries in a process share their fibers
        "-O1",
        "-w",
        "-shared",
        "-fPIC",
        "-DHOST_TWIN",
        f"-I{Path(__file__).parent}",
    )

    def make(folder: Path) -> None:
        running = [
            subprocess.Popen(["g++", "-x", "c++", *flags, "-o", str(folder / name), str(source)])
            for name, source in SOURCES.items()
        ]
        assert [process.wait() for process in running] == [0] * len(running)

    folder = built_once("sm90_host", make)
    return {name: ctypes.CDLL(str(folder / name)) for name in SOURCES}


@pytest.fixture
def on_host(host: dict[str, ctypes.CDLL], monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrappers call the host's libraries, and what they allocate is poisoned."""

    def call(library: ctypes.CDLL, name: str, device: torch.device, *arguments: object) -> None:
        passed = [
            nvcc.pointer(a)
            if a is None or isinstance(a, Tensor)
            else ctypes.c_double(a)
            if isinstance(a, float)
            else ctypes.c_longlong(a)
            for a in arguments
        ]
        assert library[name](*passed, None) == 0

    def poisoned(make):
        def empty(*args, **kwargs):
            made = make(*args, **kwargs)
            made.view(torch.uint8).fill_(0xA5) if made.numel() else None
            return made

        return empty

    monkeypatch.setattr(nvcc, "load", lambda source: host[f"{source.parent.name}_{source.stem}"])
    monkeypatch.setattr(nvcc, "call", call)
    monkeypatch.setattr(nvcc, "processors", lambda device: 132)
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))


@pytest.mark.skipif(not nvcc.available(), reason="nvcc is not installed")
@pytest.mark.parametrize("name", SOURCES)
def test_sources_build_for_the_card_without_spills(name: str, tmp_path: Path) -> None:
    command = nvcc.command(SOURCES[name], tmp_path / "out.cubin", "-cubin", "-Xptxas", "-v")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "serialized" not in done.stderr  # of warp-group products


def draw(kind: str, rows: int, entries: int, dtype: torch.dtype, gen: torch.Generator) -> Tensor:
    """Scores of one awkward kind."""
    x = torch.randn(rows, entries, generator=gen)
    u = torch.rand(rows, entries, generator=gen)
    place = torch.arange(entries)
    changed = {
        "normal": lambda: x,
        "ties": lambda: (x * 3).round(),
        "equal": lambda: torch.zeros_like(x),
        "mostly -inf": lambda: x.masked_fill(u < 0.97, -math.inf),
        "ascending": lambda: x.sort(1).values,
        "zeros of both signs": lambda: torch.where(u < 0.5, -0.0, 0.0),
        "nan": lambda: x.masked_fill(u < 0.01, math.nan),
        "best together": lambda: x + 20 * (place < 700),
        "best in few threads": lambda: x + 20 * (place // 16 % 512 < 40),
    }
    return changed[kind]().to(dtype)


KINDS = (
    "normal", "ties", "equal", "mostly -inf", "ascending", "zeros of both signs", "nan",
    "best together", "best in few threads",
)  # fmt: skip


@needs_gcc
@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_selections_equal_the_reference(kind: str, dtype: torch.dtype, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    for rows, entries, count in ((0, 64, 16), (2, 72, 16), (1, 20000, 512)):
        scores = draw(kind, rows, entries, dtype, gen)
        visible = torch.randint(0, entries + 1, (rows,), generator=gen)
        visible[:1] = entries
        assert topk.accepts_topk(scores, visible, count)
        want = topk_reference.select_topk(scores.float(), visible, count)
        assert torch.equal(topk.select_topk(scores, visible, count), want)
        assert topk.accepts_blocks(scores, visible, count, 8)
        want = topk_reference.select_blocks(scores.float(), visible, count, 8)
        assert torch.equal(topk.select_blocks(scores, visible, count, 8), want)


@needs_gcc
@pytest.mark.usefixtures("on_host")
def test_many_rows_of_a_block_and_rows_alone(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Blocks take row after row, and ask for the next before they are done with one."""
    monkeypatch.setattr(nvcc, "processors", lambda device: 1)
    gen = torch.Generator().manual_seed(seed)
    scores = draw("ties", 7, 8192 + 24, torch.bfloat16, gen)
    visible = torch.tensor([8216, 0, 5, 8192, 8193, 1, 4000])
    want = topk_reference.select_topk(scores.float(), visible, 64)
    assert torch.equal(topk.select_topk(scores, visible, 64), want)
    alone = [topk.select_topk(scores[i : i + 1], visible[i : i + 1], 64) for i in range(7)]
    assert torch.equal(torch.cat(alone), want)
    want = topk_reference.select_blocks(scores.float(), visible, 100, 16)
    assert torch.equal(topk.select_blocks(scores, visible, 100, 16), want)


def keys(per_block: int, spread: float, gen: torch.Generator) -> tuple[PagedCache, Tensor]:
    """A cache of three sequences of 224 entries, its blocks in any order, and their table."""
    width = 224 // per_block
    cache = empty_cache("index_fp4", 3 * width + 1, per_block, 128, dense=False, split=True)
    total = (3 * width + 1) * per_block
    sizes = torch.exp(spread * torch.randn(total, 4, generator=gen)).repeat_interleave(32, 1)
    values = torch.randn(total, 128, generator=gen) * sizes
    values[per_block + 5], values[per_block + 6, :64] = 0, 0
    cache_store(cache, values.bfloat16(), torch.arange(total))
    return cache, torch.randperm(3 * width, generator=gen).view(3, width) + 1


@needs_gcc
@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize(("per_block", "spread"), [(16, 3.0), (32, 0.3)])
def test_index_scores_equal_the_reference(per_block: int, spread: float, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    cache, table = keys(per_block, spread, gen)
    for each, owners in ((6, [0] * 6 + [2]), (8, [1] * 5 + [0]), (1, [0, 2])):
        rows = torch.tensor(owners)
        num = len(owners)
        q = round_trip(torch.randn(num, 32, 128, generator=gen).bfloat16(), "act4_e8")
        weight = (torch.randn(num, 32, generator=gen) / 64).bfloat16()
        visible = torch.randint(0, 220, (num,), generator=gen)
        visible[0], visible[-1] = 219, 0
        blocks = torch.stack([torch.randperm(27, generator=gen)[:9].sort().values for _ in rows])
        blocks[:, 7:] = -1
        for chosen in (None, blocks):
            for rounding in ("final", "none"):
                call = (q, weight, cache, table, rows, visible, chosen, 8, 219, rounding)
                assert index.accepts(q, weight, cache, chosen, 8, rounding)
                got = index.paged_index_score(*call, each=each, chunk=128)
                want = paged_index_score(*call)
                assert got.dtype == (torch.bfloat16 if rounding == "final" else torch.float32)
                assert torch.equal(torch.isneginf(got), torch.isneginf(want))
                seen = ~torch.isneginf(want)
                error = (got.double() - want.double())[seen].abs()
                step = 2**-7 * want.double()[seen].abs() if rounding == "final" else 0.0
                assert ((error - step) <= 2e-5 * want[seen].square().mean().sqrt()).all()


def test_stretches_fill_the_last_round() -> None:
    assert index.stretch(65536, 128, 396, 64, 1 << 20) == 21888  # 3 x 128 of 396
    for entries, groups in ((64, 1), (65536, 1), (131072, 32), (1 << 20, 700)):
        size = index.stretch(entries, groups, 396, 64, 1 << 21)
        assert size % 64 == 0
        assert size <= entries + 64


def site_inputs(num: int, gen: torch.Generator) -> list[Tensor]:
    """Streams, output, post, comb and pre of any number of tokens."""
    h = torch.randn(num, 4, 5120, generator=gen).bfloat16()
    y = torch.randn(num, 5120, generator=gen).bfloat16()
    post, pre = 2 * torch.rand(num, 4, generator=gen), torch.rand(num, 4, generator=gen)
    return [h, y, post, torch.rand(num, 4, 4, generator=gen) / 2, pre]


@needs_gcc
@pytest.mark.usefixtures("on_host")
def test_a_site_equals_the_four_ops_and_its_rows_do_not_depend_on_their_batch(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Also where two groups take a whole tile each, share what is left, and add terms up."""
    monkeypatch.setattr(nvcc, "processors", lambda device: 40)
    gen = torch.Generator().manual_seed(seed)
    fn = torch.randn(24, 4 * 5120, generator=gen) * (4 * 5120) ** -0.5
    norm = (1 + 0.1 * torch.randn(5120, generator=gen)).bfloat16()
    scale, base = torch.rand(3, generator=gen) + 0.5, torch.randn(24, generator=gen)
    weights = SiteWeights(DenseWeight(fn, fn), scale, base, norm)
    inputs = site_inputs(35, gen)
    place = torch.stack([torch.randperm(40, generator=gen)[:5] for _ in range(35)])
    place[1, 2:] = place[2] = -1
    terms = Terms(torch.randn(40, 5120, generator=gen).bfloat16(), place, inputs[1])
    inputs[1] = whole(terms)
    first: list[Tensor] = []
    for num in (3, 35):
        h, y, post, comb, pre = (x[:num] for x in inputs)
        given = h, terms if num == 35 else y, post, comb, pre, weights
        *got, rounded = site.hyper_site_rounded(*given, 1e-20, 1e-6, 20)
        assert torch.equal(rounded, round_trip(got[1], "act8"))
        assert not site._workspace(h.device)[2].any()
        streams = hyper_expand(h, y, post, comb)
        exact = 2**-7 * streams.double().abs() + 1e-5
        assert ((got[0].double() - streams.double()).abs() <= exact).all()
        x = rms_norm(hyper_collapse(got[0], pre), norm, 1e-20).double()
        off = (got[1].double() - x).abs() - 2**-7 * x.abs()
        assert off.max() <= 0.02 and (off > 0).double().mean() < 1e-3  # a flipped bit of the mix
        mix = hyper_mix(got[0], DenseWeight(fn, fn), scale, base, 1e-20, 1e-6, 20)
        alone = site.coefficients(got[0], DenseWeight(fn, fn), scale, base, 1e-20, 1e-6, 20)
        assert not site._workspace(h.device)[2].any()
        assert all(torch.equal(x, y) for x, y in zip(got[2:], alone, strict=True))
        for mine, theirs in zip(got[2:], mix, strict=True):
            assert ((mine - theirs).abs() <= 4e-5 * theirs.square().mean().sqrt()).all()
        first = first or [x[:3] for x in got]
        assert all(torch.equal(x[:3], y) for x, y in zip(got, first, strict=True))


@needs_gcc
@pytest.mark.usefixtures("on_host")
def test_routes_equal_the_reference_and_do_not_depend_on_their_batch(seed: int) -> None:
    """Ties go to the smaller id, NaN is the best; blocks of 48 and of 96 experts add up alike."""
    gen = torch.Generator().manual_seed(seed)
    stored = (torch.randn(384, 5120, generator=gen) * 5120**-0.5).bfloat16()
    bias = 0.1 * torch.randn(384, generator=gen)
    stored[1::2], bias[1::2] = stored[::2], bias[::2]
    bias[7] = math.inf
    gate = DenseWeight(stored, None)
    wider = torch.randn(18, 5200, generator=gen).bfloat16()
    wider[3] *= 40
    x = wider[:, :5120]
    assert router.accepts(x, gate, bias, 6)
    rounded = torch.empty(18, 5120, dtype=torch.bfloat16)
    chosen, weights = router._route(x, gate, bias, 6, 1.5, rounded, wide=True)
    assert not router._counters(x.device).any()
    want = router_reference.route(x, gate, bias, 6, 1.5)
    assert torch.equal(chosen, want[0])
    assert torch.allclose(weights, want[1], rtol=1e-5, atol=0)
    assert torch.equal(rounded, round_trip(x, "act8"))
    alone = router.route(x[16:], gate, bias, 6, 1.5)
    assert all(torch.equal(a, b[16:]) for a, b in zip(alone, (chosen, weights), strict=True))
    maps = ExpertMaps.of(initial_placement(1, 400, 4, 0), 0, 2, x.device)
    layer = LayerExperts(maps, exchange=None, counts=torch.zeros(384, dtype=torch.int64))
    live = torch.rand(18, generator=gen) < 0.7
    sent = layer.choose(chosen, weights, live)
    counts = layer.counts.clone()
    given = maps.log2phy, maps.copies, layer.counts.zero_(), maps.place, SPREAD
    got = router.route_slots(x, gate, bias, 6, 1.5, router.SlotMaps(*given), live)
    assert torch.equal(got[0], sent[0]) and torch.equal(got[2], sent[2])
    assert torch.equal(got[1][sent[0] >= 0], sent[1][sent[0] >= 0])
    assert torch.equal(layer.counts, counts)
    bias[300], bias[7] = math.nan, -math.inf
    want = router_reference.route(x[:1], gate, bias, 32, 1.5)
    assert want[0][0, 0] == 300
    assert torch.equal(router.route(x[:1], gate, bias, 32, 1.5)[0], want[0])


@needs_gcc
@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("quantize", [None, "act8", "act4_e8"])
@pytest.mark.parametrize("heads", [1, 5, 40])
def test_rotations_equal_the_reference(heads: int, quantize: QuantFormat | None, seed: int) -> None:
    """Also inside wider rows, and with groups of zeros and of one large value."""
    gen = torch.Generator().manual_seed(seed)
    dim = 128 if quantize == "act4_e8" else 512
    wide = torch.randn(3, heads, dim + 8, generator=gen).bfloat16()
    wide[0, 0, 64:96], wide[1, 0, 8], wide[2] = 0, 448 * 2.0**9, (3 * wide[2]).round() / 4
    x = wide[..., :dim]
    angles = rope_reference.cos_sin(torch.tensor([0, 5, 70000]), torch.rand(32, generator=gen))
    for inverse in (False, True):
        want = rope_reference.rotate_tail(x, *angles, inverse, False, quantize)
        copy = wide.clone()
        given = copy[..., :dim]
        assert rope.accepts(given, *angles, True, quantize)
        got = rope.rotate_tail(given, *angles, inverse, True, quantize)
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))
        assert got.data_ptr() == copy.data_ptr()
        assert torch.equal(copy[..., dim:], wide[..., dim:])


@needs_gcc
@pytest.mark.usefixtures("on_host")
def test_rounding_equals_the_reference(seed: int) -> None:
    """Every size of group, down to where its scale stops, and every bf16 number once."""
    gen = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.linspace(-30, 60, 70))[:, None]
    x = (torch.randn(70, 96, generator=gen) * sizes).bfloat16()
    every = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16).view(-1, 32)
    every = every[every.isfinite().all(1)]
    for values in (x, every, every.T.contiguous().view(-1, 32)[:999]):
        got, want = quantize.round_trip(values, "act8"), round_trip(values, "act8")
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@needs_gcc
@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("limit", [0.0, 1.5])
def test_gates_equal_the_reference(limit: float, weighted: bool, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    both = 3 * torch.randn(3, 2 * 1312, generator=gen).bfloat16()
    gate, up = both[:, :1312], both[:, 1312:]
    weight = torch.rand(3, generator=gen) if weighted else None
    assert expert_gate.accepts(gate, up)
    got, want = (f(gate, up, limit, weight) for f in (expert_gate.swiglu, swiglu))
    assert ((got.double() - want.double()).abs() <= 2**-7 * want.double().abs()).all()
    assert (got != want).double().mean() < 1e-3
    assert torch.equal(expert_gate.swiglu(gate, up, limit, weight, True), round_trip(got, "act8"))


def test_all_blocks_run_at_once() -> None:
    for num in range(1, 2000, 7):
        assert site.SLICES * site.groups(num, 132) <= 132
        assert site.groups(num, 132) <= num


@pytest.mark.parametrize("change", ["dtype", "row", "count"])
def test_what_the_contract_leaves_out(change: str) -> None:
    scores, visible = torch.zeros(2, 64), torch.zeros(2, dtype=torch.int64)
    if change == "dtype":
        scores = scores.half()
    if change == "row":
        scores = torch.zeros(2, 62)
    assert not topk.accepts_topk(scores, visible, 4096 if change == "count" else 16)
