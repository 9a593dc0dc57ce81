"""The Triton kernels over every case: interpreted, or compiled for cards that are absent.

Triton decides when a kernel is defined whether it is interpreted, so each use needs a process of
its own: `python tests/kernels/triton_run.py run` or `compile ARCH...`. Prints a line per case.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from importlib import import_module

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1" if sys.argv[1] == "run" else "0"

import torch
from torch import Tensor

from deepinfer.kernels import draft_block, grouping, pool_pairs, tiles, turn
from deepinfer.kernels import streams as plain_streams
from deepinfer.kernels.cache_io import copy_entries
from deepinfer.kernels.cache_io.cases import empty_cache
from deepinfer.kernels.cases import Case, all_cases
from deepinfer.kernels.decode_rows import LayoutForm, lay_out_plain
from deepinfer.kernels.draw import largest
from deepinfer.kernels.engram import places as engram_places
from deepinfer.kernels.expert_linear.reference import swiglu
from deepinfer.kernels.paged_index.places import flat_entries
from deepinfer.kernels.quantize import act8_values
from deepinfer.kernels.table import TABLE
from deepinfer.sampling.noise import LARGEST_UNIFORM
from deepinfer.sampling.sampler import draw


def implementation(op: str, name: str) -> object:
    (line,) = (entry for entry in TABLE[op] if entry.name == name)
    return getattr(import_module(f"deepinfer.kernels.{line.module}"), op)


def tensors(result: object) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def poison() -> None:
    """Fill what a kernel is handed to write with bytes that no result holds."""

    def poisoned(make):
        def empty(*args, **kwargs):
            out = make(*args, **kwargs)
            out.view(torch.uint8).fill_(0xA5) if out.numel() else None
            return out

        return empty

    torch.empty, torch.empty_like = poisoned(torch.empty), poisoned(torch.empty_like)


def problem(case: Case, got: Tensor, want: Tensor) -> str | None:
    """What is wrong with a result against the reference's."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{tuple(got.shape)} {got.dtype}, not {tuple(want.shape)} {want.dtype}"
    if case.tolerance == 0.0 or not got.dtype.is_floating_point:
        wrong = int((got != want).sum())
        return f"{wrong} values differ" if wrong else None
    infinite = want.isinf()
    if not torch.equal(got[infinite], want[infinite]):
        return "other infinities"
    got, exact = got[~infinite], want[~infinite].double()
    # Both were rounded once to the result's type, so they may differ by one step of it.
    step = torch.finfo(got.dtype).eps * exact.abs() if got.dtype != torch.float32 else 0.0
    error = ((got.double() - exact).abs() - step).max()
    allowed = 4 * case.tolerance * exact.square().mean().sqrt()
    return None if error <= allowed else f"error {error:.3e}, allowed {allowed:.3e}"


def stored(name: str, rows: int, form: str, dense: bool, split: bool) -> list[Tensor]:
    """What a cache holds after one implementation stored the same rows."""
    dim = 96 if form == "fp32" else 128
    generator = torch.Generator().manual_seed(7)
    cache = empty_cache(form, 4, 6, dim, dense=dense, split=split)
    values = (torch.randn(rows, dim, generator=generator) * 3).bfloat16()
    values[0] = 0.0
    idx = torch.randperm(24, generator=generator)[:rows]
    idx[-1] = -1
    implementation("cache_store", name)(cache, values, idx)
    return [part for part in (cache.codes, cache.scales, cache.dense) if part is not None]


def entries_stored(name: str, form: str, normed: bool, dense: bool) -> list[Tensor]:
    """What a cache holds after `entry_store`, and after `latent_store` beside its latent."""
    dim = 96 if form == "fp32" else 128
    generator = torch.Generator().manual_seed(8)
    both = (torch.randn(5, 64 + dim, generator=generator) * 3).bfloat16()
    both[1] = 0.0
    angle = torch.arange(160.0).view(5, 32)
    norms = torch.rand(64, generator=generator), torch.rand(dim, generator=generator)
    idx = torch.randperm(24, generator=generator)[:5]
    idx[-1] = -1
    cache = empty_cache(form, 4, 6, dim, dense=dense, split=dense)
    rows, norm = both[:, 64:], norms[1] if normed else None
    turns = angle.cos(), angle.sin()
    implementation("entry_store", name)(rows, norm, *turns, 1e-20, cache, idx)
    beside = empty_cache(form, 4, 6, dim, dense=dense, split=dense)
    latent = implementation("latent_store", name)(both, *norms, *turns, 1e-20, normed, beside, idx)
    held = [part for c in (cache, beside) for part in (c.codes, c.scales, c.dense)]
    return [latent, *(part for part in held if part is not None)]


def copied(copy, form: str, split: bool, placed: bool) -> list[Tensor]:
    """What a cache holds after entries of another were copied into it."""
    generator = torch.Generator().manual_seed(9)
    source = empty_cache(form, 3, 5, 128, dense=False, split=split)
    target = empty_cache(form, 1, 15, 128, dense=False, split=not split)
    for part in (source.codes, source.scales):
        part.random_(0, 256, generator=generator)
    idx, places = torch.randperm(15, generator=generator)[:7], torch.arange(7) * 2
    idx[2] = -1
    places[4] = -1
    copy(source, idx, target, places if placed else None)
    return [target.codes, target.scales]


COPIED = [("window_fp8", False, True), ("window_fp8", True, False), ("main_fp4", False, True)]
ENTRIES = [
    ("fp32", True, False), ("window_fp8", True, False), ("main_fp4", False, True),
    ("index_fp4", True, True),
]  # fmt: skip
STORED = [
    (rows, form, dense, split)
    for rows, form in ((1, "fp32"), (5, "window_fp8"), (5, "main_fp4"), (5, "index_fp4"))
    for dense, split in ((False, False), (True, True))
    if form != "fp32" or not dense
]


def grouped(module, rows: int, active: int, experts: int, dtype: torch.dtype) -> list[Tensor]:
    """Choices grouped and summed back by `grouping` or its Triton twin; some are left out."""
    generator = torch.Generator().manual_seed(rows)
    chosen = torch.randint(-1, experts, (rows, active), generator=generator)
    weight = torch.rand(rows, active, generator=generator)
    live = torch.rand(rows, generator=generator) < 0.8 if rows > 3 else None
    found = module.group(chosen, weight, experts, live)
    routed = torch.randn(rows * active, 40, generator=generator).to(dtype)
    shared = torch.randn(rows, 40, generator=generator).to(dtype)
    return [*found, module.combine(routed, found.place, shared)]


def site(made: bool) -> list[Tensor]:
    """A site whose sublayer's output is terms, added up beforehand or not."""
    case = next(c for c in all_cases() if c.op == "hyper_site_rounded" and not c.large)
    h, y, *rest = case.build(3, torch.Generator().manual_seed(2))
    place = torch.tensor([[5, 0], [3, -1], [1, 4]])
    terms = grouping.Terms(torch.linspace(-3, 3, 6 * y.shape[1]).view(6, -1).to(y.dtype), place, y)
    given = grouping.whole(terms) if made else terms
    return list(implementation("hyper_site_rounded", "triton")(h, given, *rest))


def laid_out(function, ratios: tuple[int, ...], tail: int, engram: int) -> list[Tensor]:
    """Rows of three sequences, one with drafts, and of padding."""
    form = LayoutForm(20, 25, ratios, 8, tail, 3 if engram else 0, engram)
    slots = torch.tensor([2, 1, 1, 1, 3, 0, 0])
    places = torch.tensor([0, 0, 1, 2, 0, 0, 0])
    generator = torch.Generator().manual_seed(tail)
    tokens = torch.randint(1, 90, (4, 5), generator=generator)
    table = torch.randperm(60, generator=generator)[:40].view(4, 10)
    length = torch.tensor([7, 1, 63, 24])
    return list(function(slots, places, length, tokens[:, 0], tokens[:, 1:], table, form))


def drawn(function, rows: int, width: int, stream: int) -> Tensor:
    """Tokens drawn by `sampler.draw` or its Triton twin; some ids are not allowed."""
    generator = torch.Generator().manual_seed(width)
    logits = torch.randn(rows, width, generator=generator) * 3
    logits[0, :3] = float("-inf")
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    positions = torch.randint(0, 1 << 20, (rows,), generator=generator)
    return function(logits, seeds, positions, stream)


def token_problem(rows: int, width: int, seed: int) -> str | None:
    """Whether tokens of packed products are those of the ops one after the other."""
    twin = import_module("deepinfer.kernels.packed.triton")
    generator = torch.Generator().manual_seed(seed)
    gate_up = (torch.randn(rows, 2 * width, generator=generator) * 3).bfloat16()
    weight, offsets = torch.rand(rows, generator=generator), torch.tensor([0, 1, rows - 1])
    want = act8_values(swiglu(*gate_up.chunk(2, 1), 10.0, weight))[:-1]
    mine = twin.gate_tokens(gate_up, weight, offsets, 10.0, True, False)[0][:-1]
    if not torch.equal(mine.float(), want):
        return "gate_tokens: other values"
    gated = twin.gate_tokens(gate_up, weight, offsets, 10.0, True, True)
    folded = (gated, twin.fold_tokens(gate_up))
    for (codes, scale), exact in zip(folded, (want, act8_values(gate_up)), strict=True):
        codes, scale = codes[: len(exact)], scale[: len(exact), None]
        back = codes.view(torch.float8_e4m3fn).float() * scale
        normal = exact.abs() >= scale / 64
        if not torch.equal(back[normal], exact[normal]):
            return "folded tokens: other values"
        if (back - exact).abs().gt(scale * 2.0**-9).any():
            return "folded tokens: small values too far off"
    return None


def drafted(blocks, choose) -> list[Tensor]:
    """Rows of draft blocks, near the begin of a ring and behind, and the way between drafts."""
    generator = torch.Generator().manual_seed(6)
    slots, last = torch.tensor([3, 0, 1, 2]), torch.tensor([40, -2, 6, 15])
    laid = blocks.lay_out_block(slots, last, torch.tensor([7, 0, 9, 11]), 5, 16, 23, 99)
    embed = torch.randn(30, 24, generator=generator).bfloat16()
    hidden = torch.randn(4, 3, 1100, generator=generator).bfloat16()
    weight = torch.randn(1, 1124, generator=generator).bfloat16()
    confidence = torch.zeros(4, 3)
    tokens = torch.tensor([[4, 5], [0, 1], [29, 3], [7, 7]])[:, 0]
    rows = blocks.markov_step(embed, tokens, hidden[:, 1], weight, confidence[:, 2])
    logits = torch.randn(4, 2, 5000, generator=generator)
    logits[0, 1, [17, 4900]] = 9.0
    logits[1, 1, 4500], logits[2, 1, 3] = float("inf"), float("nan")
    logits[3, 1, :5] = float("-inf")
    plus = torch.randn(4, 5000, generator=generator).round()
    ids, bad = choose(logits[:, 1])
    ids[2] = 0  # any
    more = choose(logits[:, 0], plus)
    return [*laid, rows, confidence.round(decimals=2), ids, bad, *more]


def turned(module, drafts: int, plain: bool, given: bool) -> list[Tensor]:
    """Rows spread, a step ended and drafts kept, on the state of six slots."""
    generator = torch.Generator().manual_seed(9)

    def ids(*shape: int) -> Tensor:
        return torch.randint(0, 4, shape, generator=generator)

    state = turn.Slots(
        length=torch.tensor([0, 9, 20, 7, 30, 12]),
        last_token=ids(6),
        alive=torch.tensor([False, True, True, True, True, False]),
        limit=torch.tensor([0, 11, 40, 50, 60, 70]),
        drafts=ids(6, drafts),
        num_drafts=ids(6).clamp(max=drafts),
        confidences=torch.rand(6, drafts, generator=generator),
        endings=torch.tensor([[-1, -1], [-1, -1], [2, -1], [-1, -1], [3, 1], [0, -1]]),
    )
    slots = torch.tensor([4, 1, 5, 2, 3, 0, 0])
    asked = None if plain else ids(7).clamp(max=drafts)
    rows = len(slots) if plain else 3 * len(slots)
    valid = torch.tensor([1, 0, 0, 1, 0, 0, 0]) if given else None
    laid = module.spread(slots, state, rows, asked, valid)
    tokens, bad = ids(rows), torch.rand(rows, generator=generator) < 0.2
    packed = torch.full((len(slots), turn.FIXED + 1 + 3 * drafts), -7)
    module.finish(state, laid, tokens, bad, packed)
    fresh = None, None
    if drafts and not given:
        raw = torch.randn(len(slots), drafts, generator=generator)
        raw[0] = float("nan")
        fresh = ids(len(slots), drafts + 1)[:, 1:], raw
    temperatures = torch.linspace(0.5, 2.0, drafts) if drafts else None
    sure = module.keep_drafts(state, laid.held, *fresh, temperatures, packed)
    real = state.confidences[1:].clone(), sure[laid.held > 0]
    integers = (part[1:] for part in state if part.dtype != torch.float32)
    return [*laid, packed[laid.held > 0], *integers, *(part.round(decimals=5) for part in real)]


def pooled(module, dtype: torch.dtype) -> list[Tensor]:
    """Pairs of a decode step pooled, one half from the ring, and what the ring holds then."""
    generator = torch.Generator().manual_seed(5)
    both = torch.randn(6, 112, generator=generator) * 3
    gate, value = both.chunk(2, 1)
    ring = torch.randn(4, 7, 2, 56, generator=generator)
    ring[0] = float("nan")  # of nobody
    load = torch.tensor([9, -1, -1, 20, 8, 23])
    rows = torch.tensor([[6, 0], [7, 6], [8, 7], [9, 3], [10, 4], [11, 5]])
    emit, norm = torch.tensor([0, 2, 3, 5]), torch.rand(56, generator=generator)
    out = module.pool_pairs(gate, value, ring, load, rows, emit, norm, 1e-20, dtype)
    module.keep_tail(gate, value, ring, torch.tensor([10, 11, 21]), torch.tensor([1, 2, 3]))
    return [out, ring[1:]]


def looked_back(module) -> list[Tensor]:
    """N-grams of five rows, two of which reach back, and what the ring holds then."""
    generator = torch.Generator().manual_seed(4)
    token_map = torch.randperm(40, generator=generator)
    ids = torch.randint(0, 40, (5,), generator=generator)
    ring = torch.randint(0, 40, (3, 6), generator=generator, dtype=torch.int32)
    load = torch.tensor([7, 6, -1, 13, -1, -1])
    rows = torch.tensor([[6, 0, 1], [7, 6, 0], [8, 3, 2], [9, 8, 3], [10, 4, 5]])
    found = module.gather_ngrams(ids, token_map, ring, load, rows, 39)
    module.keep_ids(ids, token_map, ring, torch.tensor([8, 9, 14]), torch.tensor([0, 1, 3]))
    return [found, ring]


TURNED = [(3, False, False), (3, False, True), (0, True, False), (2, True, False)]
DRAWN = [(5, 288, 0), (3, 5001, 1), (9, 10, 0)]


READ_NORMS = ("_latent_entry", "_latent_store")
"""Kernels that read weights, which no kernel of a step writes, before their turn."""


def flat_places() -> Iterator[tuple[Tensor, Tensor, Tensor, int, Tensor | None, int]]:
    """Entries of five rows of three sequences, some absent, or columns of candidate blocks."""
    generator = torch.Generator().manual_seed(1)
    entries = torch.randint(-1, 60, (5, 21), generator=generator)
    table = torch.randperm(30, generator=generator).view(3, 10)
    rows = torch.tensor([2, 0, 1, 1, 0])
    yield entries, table, rows, 6, None, 1
    yield entries, table, rows, 6, torch.randint(0, 7, (5, 8), generator=generator), 8


def streams(module, dtype: torch.dtype) -> list[Tensor]:
    """Streams begun, and their means beside each other, by `kernels/streams` or its twin."""
    generator = torch.Generator().manual_seed(3)
    embed = torch.randn(9, 72, generator=generator).bfloat16()
    made = module.start_streams(embed, torch.tensor([4, 0, 8]), 4, dtype)
    out = torch.zeros(3, 144, dtype=dtype)
    for at in range(2):
        stream = torch.randn(3, 4, 72, generator=generator).to(dtype)
        module.mean_into(stream, out[:, 72 * at : 72 * at + 72])
    return [*made, out]


def rounding(seed: int) -> dict[str, tuple[object, ...]]:
    """Arguments with which ops round what they return."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return (4 * torch.randn(shape, generator=generator)).bfloat16()

    angle = torch.arange(60.0).view(5, 12)
    turns = angle.cos(), angle.sin()
    return {
        "rotate_tail": (normal(5, 3, 96), *turns, True, False, "act8"),
        "swiglu": (normal(5, 64), normal(5, 64), 10.0, None, True),
        "latent_entry": (normal(5, 160), torch.ones(96), torch.ones(64), *turns, 1e-20, True),
    }


def rounded(seed: int) -> list[str]:
    """What differs from the reference where ops round what they return."""
    failures = []
    for op, arguments in rounding(seed).items():
        mine, want = (tensors(implementation(op, n)(*arguments)) for n in ("triton", "reference"))
        if not all(torch.equal(a, b) for a, b in zip(mine, want, strict=True)):
            failures.append(f"{op} rounded: other values")
    return failures


LAID_OUT = [((1, 2), 7, 9), ((2,), 0, 0), ((), 0, 3)]
GROUPED = [
    (1, 1, 3, torch.float32), (7, 3, 8, torch.bfloat16), (129, 6, 24, torch.bfloat16),
]  # fmt: skip


def run(seed: int) -> list[str]:
    """Every case in several sizes against the reference; some rows alone; returns the failures."""
    poison()
    failures = []
    for setting in STORED:
        pairs = zip(stored("triton", *setting), stored("reference", *setting), strict=True)
        if not all(torch.equal(mine, want) for mine, want in pairs):
            failures.append(f"cache_store {setting}: other bytes")
    for setting in ENTRIES:
        both = (entries_stored(name, *setting) for name in ("triton", "reference"))
        if not all(torch.equal(mine, want) for mine, want in zip(*both, strict=True)):
            failures.append(f"entry_store {setting}: other bytes")
    twin = import_module("deepinfer.kernels.grouping.triton")
    for setting in GROUPED:
        pairs = zip(grouped(twin, *setting), grouped(grouping, *setting), strict=True)
        if not all(torch.equal(mine, want) for mine, want in pairs):
            failures.append(f"grouping {setting}: other values")
    if not all(map(torch.equal, site(False), site(True))):
        failures.append("a site of terms: other values")
    twin = import_module("deepinfer.kernels.streams.triton")
    for dtype in (torch.bfloat16, torch.float32):
        pairs = zip(streams(twin, dtype), streams(plain_streams, dtype), strict=True)
        if not all(torch.equal(mine, want) for mine, want in pairs):
            failures.append(f"streams {dtype}: other values")
    failures += [text for text in (token_problem(4, w, seed) for w in (32, 2080)) if text]
    for heads, dtype in ((None, torch.float32), (3, torch.bfloat16), (20, torch.bfloat16)):
        generator = torch.Generator().manual_seed(seed)
        shape = (5, 48) if heads is None else (5, heads, 48)
        x, angle = torch.randn(shape, generator=generator).to(dtype), torch.arange(60.0).view(5, 12)
        want = implementation("rotate_tail", "triton")(x, angle.cos(), angle.sin(), True)
        got = implementation("rotate_tail", "triton")(x, angle.cos(), angle.sin(), True, True)
        if got is not x or not torch.equal(got, want):
            failures.append(f"rotate_tail in place, {heads} heads: other values")
    failures += rounded(seed)
    twin = import_module("deepinfer.kernels.paged_index.triton")
    for places in flat_places():
        if not torch.equal(twin.flat_entries(*places), flat_entries(*places)):
            failures.append("flat_entries: other values")
    twin = import_module("deepinfer.kernels.draw.triton")
    for setting in DRAWN:
        mine = drawn(lambda *given: twin.draw(*given, LARGEST_UNIFORM), *setting)
        if not torch.equal(mine, drawn(draw, *setting)):
            failures.append(f"draw {setting}: other tokens")
    blocks, chosen = (
        import_module(f"deepinfer.kernels.{n}.triton") for n in ("draft_block", "draw")
    )
    pairs = zip(drafted(blocks, chosen.largest), drafted(draft_block, largest), strict=True)
    for at, (mine, want) in enumerate(pairs):
        if not torch.equal(mine, want):
            failures.append(f"drafts {at}: other values")
    twin = import_module("deepinfer.kernels.pool_pairs.triton")
    for dtype in (torch.bfloat16, torch.float32):
        for mine, want in zip(pooled(twin, dtype), pooled(pool_pairs, dtype), strict=True):
            if not torch.allclose(mine.float(), want.float(), rtol=8e-3, atol=1e-6):
                failures.append(f"pool_pairs {dtype}: other values")
    twin = import_module("deepinfer.kernels.cache_io.triton").copy_entries
    for copying in COPIED:
        pairs = zip(copied(twin, *copying), copied(copy_entries, *copying), strict=True)
        if not all(torch.equal(mine, want) for mine, want in pairs):
            failures.append(f"copy_entries {copying}: other values")
    twin = import_module("deepinfer.kernels.engram.triton")
    pairs = zip(looked_back(twin), looked_back(engram_places), strict=True)
    if not all(torch.equal(mine, want) for mine, want in pairs):
        failures.append("n-grams: other values")
    twin = import_module("deepinfer.kernels.turn.triton")
    for setting in TURNED:
        for at, pair in enumerate(zip(turned(twin, *setting), turned(turn, *setting), strict=True)):
            if not torch.equal(*pair):
                failures.append(f"turn {setting}, {at}: other values")
    rows = torch.randn(5, 3001, generator=torch.Generator().manual_seed(seed)) * 9
    rows[1, ::2] = float("-inf")
    drawing = import_module("deepinfer.kernels.draw.triton")
    if not torch.allclose(drawing.log_sum_exp(rows), torch.logsumexp(rows, 1, True), atol=1e-5):
        failures.append("log_sum_exp: other values")
    twin = import_module("deepinfer.kernels.decode_rows.triton")
    for setting in LAID_OUT:
        pairs = zip(
            laid_out(twin.lay_out, *setting), laid_out(lay_out_plain, *setting), strict=True
        )
        if not all(torch.equal(mine, want) for mine, want in pairs):
            failures.append(f"rows laid out, {setting}: other values")
    for case in all_cases():
        if case.large:
            continue
        op = implementation(case.op, "triton")
        define = implementation(case.op, "reference")
        told = set()
        # Interpreted, every entry that attention loads takes milliseconds.
        count = 5 if case.op == "paged_attention" else 9
        arguments = case.build(count, torch.Generator().manual_seed(seed))
        together = tensors(op(*arguments))
        for mine, want in zip(together, tensors(define(*arguments)), strict=True):
            told.add(problem(case, mine, want))
        for rows in (torch.tensor([0]), torch.tensor([2, count - 1])):
            apart = tensors(op(*case.select(arguments, rows)))
            for mine, whole in zip(apart, together, strict=True):
                if not torch.equal(mine, whole[rows]):
                    told.add(f"rows {rows.tolist()} have other bits in a batch")
        failures += [f"{case.op} {case.name}: {text}" for text in told if text]
        print("ran", case.op, case.name, flush=True)
    return failures


def lowered(kernel, signature: dict[str, str], constants: dict[str, object]) -> None:
    """Lower a kernel to Triton's own form, as if an argument were 1: Triton makes it a constant."""
    import triton
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", 90, 32)
    backend = triton.compiler.make_backend(target)
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options), backend.get_module_map()
    source = triton.compiler.ASTSource(kernel, signature, constexprs=constants)
    source.make_ir(target, options, *functions, context)


def compile_all(archs: list[int]) -> list[str]:
    """Compile each kernel, once per set of constants and types, for each architecture."""
    import triton
    from triton.backends.compiler import GPUTarget

    failures, seen, ones = [], set(), set()
    types = {
        torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64",
        torch.uint8: "*u8", torch.int8: "*i8", torch.int32: "*i32", torch.float64: "*fp64",
    }  # fmt: skip

    def record(kernel, grid, *arguments, **constants) -> None:
        warps = constants.pop("num_warps", 4)
        names = kernel.arg_names
        fixed = [name for name in names if name in constants]
        free = [name for name in names if name not in constants]
        assert len(free) == len(arguments) and free == names[: len(free)], (kernel, names)
        signature = dict.fromkeys(fixed, "constexpr")
        for name, value in zip(free, arguments, strict=True):
            if isinstance(value, Tensor):
                signature[name] = types[value.dtype]
            else:
                signature[name] = "i32" if isinstance(value, int) else "fp32"
        signature = {name: signature[name] for name in names}
        key = str((kernel.fn.__module__, kernel.fn.__name__, signature, constants))
        early = tiles.takes_turn(kernel)
        if key in seen:
            return
        seen.add(key)
        for name in [n for n, kind in signature.items() if kind == "i32" and 90 in archs]:
            if (kernel, name) not in ones:
                ones.add((kernel, name))
                try:
                    lowered(kernel, signature | {name: "constexpr"}, constants | {name: 1})
                except Exception as error:
                    failures.append(f"{key}, {name} = 1: {str(error)[-300:]}")
        source = triton.compiler.ASTSource(kernel, signature, constexprs=constants)
        for arch in archs:
            try:
                target = GPUTarget("cuda", arch, 32)
                options = {"num_warps": warps, "launch_pdl": early and arch >= 90}
                made = triton.compile(source, target=target, options=options)
                assert made.asm["cubin"], "no binary"
                if options["launch_pdl"] and kernel.fn.__name__ not in READ_NORMS:
                    waited = made.asm["ptx"].index("griddepcontrol.wait")
                    touched = re.search(r"\b(ld|st|atom|red|cp)\.\S*global", made.asm["ptx"])
                    assert touched is None or waited < touched.start(), "memory before its turn"
            except Exception as error:
                failures.append(f"{key} for sm_{arch}: {str(error)[-300:]}")

    # On a card bf16 products run as such: compile that, though this process has no card.
    modules = {line.module.partition(".")[0] for lines in TABLE.values() for line in lines}
    helpers = "grouping decode_rows draw packed streams draft_block turn pool_pairs".split()
    for module in modules | set(helpers):
        try:
            kernels = import_module(f"deepinfer.kernels.{module}.triton")
        except ModuleNotFoundError:
            continue
        kernels.launch = record
    done = set()
    for case in all_cases():
        if case.large or (case.op, case.name.partition(",")[2]) in done:
            continue
        done.add((case.op, case.name.partition(",")[2]))
        arguments = case.build(2, torch.Generator().manual_seed(0))
        implementation(case.op, "triton")(*arguments)
    for setting in STORED:
        stored("triton", *setting)
    for setting in ENTRIES:
        entries_stored("triton", *setting)
    copied(import_module("deepinfer.kernels.cache_io.triton").copy_entries, *COPIED[0])
    copied(import_module("deepinfer.kernels.cache_io.triton").copy_entries, *COPIED[1])
    streams(import_module("deepinfer.kernels.streams.triton"), torch.bfloat16)
    for setting in GROUPED:
        grouped(import_module("deepinfer.kernels.grouping.triton"), *setting)
    site(False)
    case = next(c for c in all_cases() if c.op == "paged_attention" and c.name == "turned")
    arguments = case.build(2, torch.Generator().manual_seed(0))
    implementation("paged_attention", "triton")(*arguments[:10], "act8")
    angle = torch.zeros(5, 12)
    implementation("rotate_tail", "triton")(
        torch.zeros(5, 3, 48).bfloat16(), angle, angle, True, True
    )
    for op, arguments in rounding(0).items():
        implementation(op, "triton")(*arguments)
    for places in flat_places():
        import_module("deepinfer.kernels.paged_index.triton").flat_entries(*places)
    made = import_module("deepinfer.kernels.draw.triton")
    drawn(lambda *given: made.draw(*given, LARGEST_UNIFORM), *DRAWN[0])
    made.log_sum_exp(torch.randn(2, 300))
    drafted(import_module("deepinfer.kernels.draft_block.triton"), made.largest)
    for setting in TURNED:
        turned(import_module("deepinfer.kernels.turn.triton"), *setting)
    pooled(import_module("deepinfer.kernels.pool_pairs.triton"), torch.bfloat16)
    looked_back(import_module("deepinfer.kernels.engram.triton"))
    for setting in LAID_OUT:
        laid_out(import_module("deepinfer.kernels.decode_rows.triton").lay_out, *setting)
    made = import_module("deepinfer.kernels.packed.triton")
    made.fold_tokens(torch.zeros(4, 64, dtype=torch.bfloat16))
    for fold in (False, True):
        rows = torch.zeros(4, 64, dtype=torch.bfloat16)
        made.gate_tokens(rows, torch.ones(4), torch.tensor([0, 4]), 10.0, True, fold)
    assert tiles.launch is not record
    print(len(seen), "kernels", flush=True)
    return failures


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "run":
        found = run(int(sys.argv[2]))
    else:
        found = compile_all([int(arch) for arch in sys.argv[2:]])
    print("\n".join(found))
    sys.exit(bool(found))
