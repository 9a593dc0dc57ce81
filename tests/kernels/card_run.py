"""Every implementation of a card on small inputs: `python tests/kernels/card_run.py [PATTERN]`.

PATTERN is searched in "op/implementation". Inputs are every op's small cases, and cases of the
released dimensions with small caches and few experts, which alone reach kernels written for them.
Results are held to the reference on the same device; memory handed to kernels is poisoned; rows
come 0, 1, 7, 129 and more at a time, and where the table says so a row alone must have the bits of
the batch.

Under `compute-sanitizer` the same program shows that no kernel leaves its memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.device import pick_device
from deepinfer.kernels import nvcc
from deepinfer.kernels.cases import Arguments, Case, all_cases
from deepinfer.kernels.expert_linear import cases as experts
from deepinfer.kernels.hyper import cases as hyper
from deepinfer.kernels.hyper_site import cases as sites
from deepinfer.kernels.libraries import is_usable
from deepinfer.kernels.linear import cases as linear
from deepinfer.kernels.ops import _PUBLIC
from deepinfer.kernels.paged_attention import cases as attention
from deepinfer.kernels.paged_index import cases as index
from deepinfer.kernels.quantize import cases as quantize
from deepinfer.kernels.rope import cases as rope
from deepinfer.kernels.rope.reference import rotate_tail
from deepinfer.kernels.routed_experts import cases as routed
from deepinfer.kernels.router import cases as router
from deepinfer.kernels.table import COPIES, TABLE, W4A8, Implementation
from deepinfer.kernels.topk import cases as topk

_BF16: Final = torch.bfloat16
ROWS: Final = (0, 1, 7, 129)
_MORE: Final = {
    "routed_experts": (250, 350, 700),  # 50, 70 and 140 an expert
    "expert_linear": (250, 350, 700),
    "fp8_linear": (8, 33, 65, 300, 600),
    "grouped_linear": (8, 33, 300, 600),
    "paged_attention": (40, 200),
    "paged_index_score": (2, 3, 12),
}
"""Rows at which an op takes other schedules."""
_LIGHT: Final = ("rms_norm", "latent_entry", "latent_store", "hyper_collapse", "hyper_expand")
"""Ops whose large cases are small enough for this program."""
_BY_ROW: Final = {W4A8: 0.15}
"""Implementation -> how far a row may be off, relative L2: last bits turn codes on the way."""
_SUMS: Final = 1e-4
"""What a card's order of sums is granted, relative to the RMS, besides one step of the type."""
_TURNED: Final = 1e-3
"""Share of values that a last bit may turn to the other neighbour where something is rounded."""
_FAR: Final = 0.05
"""How far those may be off, relative to the RMS, besides two steps of ACT8."""


def released() -> list[Case]:
    """Cases of the released dimensions, small in everything else."""
    return [
        attention._case("published", 64, 512, 128, 512),
        attention._case("published, windows alone", 64, 512, 128, 0),
        attention._case("published, all present", 64, 512, 128, 512, absent=0.0),
        attention._case("published, turned", 64, 512, 128, 512, turned=64),
        attention._case("published, in one", 64, 512, 128, 512, turned=64, quantize="act8"),
        index._case("published", 32, 128, 128, 900, "final"),
        index._case("published, not rounded", 32, 128, 64, 700, "none"),
        index._case("published, candidates", 32, 128, 128, 5000, "final", candidates=64),
        topk._topk("published, ties", 20000, 512, 40),
        topk._topk("published, bf16", 3000, 512, 0, timed=(1,)),
        topk._blocks("published, ties", 20000, 64, 8, 40),
        topk._blocks("published, bf16", 3008, 64, 8, 0, timed=(1,)),
        experts._experts("packed", 5, 512, 768, copied=False),
        experts._experts("packed, skewed", 5, 256, 512, copied=False, skewed=True),
        experts._swiglu("published", 2304, 10.0, True, _BF16),
        routed._case("packed", 5, 256, 512),
        linear._fp8("packed, rounded", 512, 1024, copied=False),
        linear._fp8("packed, as it is", 256, 4096, quantize=False, copied=False),
        linear._fp8("packed, tall", 5120, 512, quantize=False, copied=False),
        linear._grouped("packed", 3, 256, 512, False),
        linear._grouped("packed, rounded", 2, 256, 2048, True),
        linear._grouped("packed, outputs rounded", 2, 512, 1024, False, rounds=True),
        rope._rotation("published, in place", (64, 512), 64, _BF16, reuse=True),
        rope._rotation("published, rounded", (64, 512), 64, _BF16, True, quantize="act8"),
        rope._rotation("published index", (32, 128), 64, _BF16, reuse=True, quantize="act4_e8"),
        quantize._random("act8", _BF16, 5120),
        router._case("published", 384, 6, 5120, 1.0),
        dataclasses.replace(router._case("published", 384, 6, 5120, 1.0), op="route_rounded"),
        hyper._mix("published", 4, 5120, _BF16),
        sites._case("published", 4, 5120, _BF16),
        sites._case("published", 4, 5120, _BF16, op="hyper_site_rounded"),
        linear._dense("of one output", 1, 5632, _BF16, torch.float32),
        linear._dense("of few outputs", 96, 5120, _BF16, _BF16),
        *(dataclasses.replace(c, large=False) for c in all_cases() if c.op in _LIGHT and c.large),
    ]


def moved(value: Any, device: torch.device) -> Any:
    """Copy arguments to a device, padding of strided tensors poisoned."""
    if isinstance(value, Tensor):
        if not value.numel() or not all(s > 0 for s in value.stride()):
            return value.to(device, copy=True)
        span = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
        fill = 0xFF if value.dtype.is_floating_point else 0x7F
        held = torch.full((span * value.element_size() + 64,), fill, dtype=torch.uint8)
        flat = held[: span * value.element_size()].view(value.dtype)
        flat.as_strided(value.shape, value.stride()).copy_(value)
        there = held.to(device)[: span * value.element_size()].view(value.dtype)
        return there.as_strided(value.shape, value.stride())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        held = {n: t for n, t in fields.items() if isinstance(t, Tensor) and t.element_size() == 1}
        if len(held) > 1 and len({t.untyped_storage().data_ptr() for t in held.values()}) == 1:
            there = beside(held, device)  # as kernels expect entries
        else:
            there = {}
        rest = {n: moved(x, device) for n, x in fields.items() if n not in there}
        return dataclasses.replace(value, **there, **rest)
    if isinstance(value, tuple):
        parts = [moved(part, device) for part in value]
        return value._make(parts) if hasattr(value, "_make") else tuple(parts)
    return value


def beside(views: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copy views of one storage to a device with the places they have beside each other."""
    storage = next(iter(views.values())).untyped_storage()
    there = torch.empty(0, dtype=torch.uint8).set_(storage).to(device, copy=True)
    return {
        name: there.view(t.dtype).as_strided(t.shape, t.stride(), t.storage_offset())
        for name, t in views.items()
    }


def poison() -> None:
    """Fill what kernels are handed to write with bytes that no result holds."""

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def empty(*args: Any, **kwargs: Any) -> Tensor:
            out = make(*args, **kwargs)
            if out.numel() and out.is_contiguous():
                out.view(-1).view(torch.uint8).fill_(0xA5)
            return out

        return empty

    torch.empty, torch.empty_like = poisoned(torch.empty), poisoned(torch.empty_like)
    Tensor.new_empty = poisoned(Tensor.new_empty)  # type: ignore[method-assign]


def tensors(result: object) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)  # type: ignore[call-overload]


def problem(tolerance: float, got: Tensor, want: Tensor, turned: float = 0.0) -> str:
    """Say what is wrong with a result against the reference's, "" = nothing.

    turned  share of values that may be rounded the other way to a coarse grid
    """
    if got.shape != want.shape:
        return f"{tuple(got.shape)}, not {tuple(want.shape)}"
    if not want.numel():
        return ""
    if not want.dtype.is_floating_point or tolerance == 0.0:
        wrong = int((got != want).sum())
        return f"{wrong} of {want.numel()} values differ" if wrong else ""
    narrow = got.dtype if got.dtype != torch.float32 else want.dtype
    got, exact = got.float(), want.double()
    finite = exact.isfinite()
    if not torch.equal(got[~finite], want.float()[~finite]):
        return "other infinities"
    got, exact = got[finite], exact[finite]
    if not exact.numel():
        return ""
    step = torch.finfo(narrow).eps * exact.abs() if narrow != torch.float32 else 0.0
    gaps = ((got.double() - exact).abs() - step).nan_to_num(1e30, posinf=1e30)
    allowed = 4 * tolerance * float(exact.square().mean().sqrt())
    over = gaps > allowed
    if float(over.double().mean()) <= turned:
        gaps = gaps - exact.abs() / 4 - _FAR * exact.square().mean().sqrt()
    error = float(gaps.max())
    if error <= allowed:
        return ""
    return f"error {error:.2e}, allowed {allowed:.2e}, {int(over.sum())} of {over.numel()} values"


def row_problem(limit: float, got: Tensor, want: Tensor) -> str:
    """Say by how much the worst row is off where it is by more than `limit`, relative L2."""
    if got.shape != want.shape:
        return f"{tuple(got.shape)}, not {tuple(want.shape)}"
    exact = want.double().flatten(1)
    gaps = (got.double().flatten(1) - exact).nan_to_num(1e30).norm(dim=1)
    worst = float((gaps / exact.norm(dim=1).clamp(min=1e-30)).max()) if len(gaps) else 0.0
    return "" if worst <= limit else f"a row is off by {worst:.2e}, allowed {limit:.2e}"


def subsets(rows: int) -> Iterator[Tensor]:
    """Rows to run without the others."""
    for kept in ([0], [2, 6], list(range(1, 7)), [64], [128], list(range(33, 80))):
        if kept[-1] < rows:
            yield torch.tensor(kept)


def calls_of_ours() -> list[str]:
    """Count the launches of CUDA sources from now on: their names come into the list."""
    seen: list[str] = []
    plain = nvcc.call

    def call(library: Any, name: str, *arguments: Any) -> None:
        seen.append(name)
        plain(library, name, *arguments)

    nvcc.call = call
    return seen


def tried(
    case: Case,
    line: Implementation,
    device: torch.device,
    seen: list[str],
    rows: int,
    alone: bool,
) -> list[str]:
    """Return what is wrong with an implementation, errors among it."""
    try:
        return list(check(case, line, device, seen, rows, alone))
    except Exception as error:
        if "CUDA error" in str(error):  # nothing after it can be believed
            raise
        return [f"{case.name}, {rows} rows: {type(error).__name__} {str(error)[:120]}"]


@lru_cache(maxsize=2)
def wanted(case: Case, rows: int, device: torch.device) -> tuple[Arguments, list[Tensor]]:
    """Return arguments and what the reference makes of them."""
    arguments = case.build(rows, torch.Generator().manual_seed(rows))
    found = tensors(_PUBLIC[case.op](*moved(arguments, device)))
    return arguments, [part.cpu() for part in found]


def check(
    case: Case,
    line: Implementation,
    device: torch.device,
    seen: list[str],
    rows: int,
    alone: bool,
) -> Iterator[str]:
    """Run one case, then some of its rows without the others; yield what is wrong."""
    public = _PUBLIC[case.op]
    arguments, want = wanted(case, rows, device)

    def run(line: Implementation, given: Arguments) -> list[Tensor]:
        impl = getattr(import_module(f"deepinfer.kernels.{line.module}"), case.op)
        found = tensors(public(*moved(given, device), impl=impl))
        return [part.cpu() for part in found]

    seen.clear()
    got = run(line, arguments)
    in_one = "in one" in case.name
    if in_one:  # a last bit would turn roundings: its own steps say what is right
        if line.needs != "nvcc":
            return  # it runs the steps themselves
        want = in_steps(lambda given: run(line, given), arguments)
    least = _SUMS if line.needs == "nvcc" else 0.0
    tolerance = max(case.tolerance, least) if case.tolerance and not in_one else 0.0
    turned = _TURNED if re.search("rounded|hyper_site", f"{case.op} {case.name}") else 0.0
    for place, (mine, right) in enumerate(zip(got, want, strict=True)):
        if line.name in _BY_ROW:
            text = row_problem(_BY_ROW[line.name], mine, right)
        else:
            text = problem(tolerance, mine, right, turned)
        if text:
            yield f"{case.name}, {rows} rows, result {place}: {text}"
    meant = line.needs == "nvcc" and line.name != COPIES  # cuBLAS has many rows there
    if rows and meant and case.name.startswith(("published", "packed")) and not seen:
        yield f"{case.name}, {rows} rows: another implementation ran"
    for kept in subsets(rows) if line.invariant and alone else ():
        apart = run(line, case.select(arguments, kept))
        if not all(torch.equal(a, g[kept]) for a, g in zip(apart, got, strict=True)):
            yield f"{case.name}: rows {kept[:3].tolist()} of {rows} have other bits alone"


def in_steps(run: Callable[[Arguments], list[Tensor]], arguments: Arguments) -> list[Tensor]:
    """Attend between rotations of their own."""
    q, *rest, cos, sin, quantize = arguments
    out = run((rotate_tail(q, cos, sin), *rest))[0]  # type: ignore[arg-type]
    return [rotate_tail(out, cos, sin, True, False, quantize)]  # type: ignore[arg-type]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pattern", nargs="?", default="")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--few", action="store_true", help="cases of the released dimensions alone")
    parser.add_argument("--once", action="store_true", help="no rows without their batch")
    asked = parser.parse_args(argv)
    picked = pick_device(asked.device)
    device, arch = picked.torch_device, picked.capability.arch
    torch.set_num_threads(4)
    poison()
    seen = calls_of_ours()
    plain = [] if asked.few else [case for case in all_cases() if not case.large]
    told: dict[tuple[str, str], list[str]] = {}
    count, begin = 0, time.perf_counter()
    for case in [*plain, *released()]:
        lines = [
            line
            for line in TABLE[case.op]
            if ((line.archs and arch in line.archs) or line.name == "reference")
            and (not line.needs or is_usable(line.needs))
            and (line.chosen or line.needs == "nvcc")
            and re.search(asked.pattern, f"{case.op}/{line.name}")
        ]
        for line in lines:
            told.setdefault((case.op, line.name), [])
        for rows in (*ROWS, *_MORE.get(case.op, ())) if lines else ():
            count += len(lines)
            with torch.inference_mode():
                for line in lines:
                    told[case.op, line.name] += tried(
                        case, line, device, seen, rows, not asked.once
                    )
    for (op, name), problems in told.items():
        print(f"{op}/{name}", "; ".join(problems[:4]) if problems else "ok", flush=True)
    bad = sum(map(bool, told.values()))
    spent = time.perf_counter() - begin
    print(f"{len(told)} implementations, {count} runs, bad: {bad}, {spent:.0f} s")
    return int(bad > 0 or not told)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
