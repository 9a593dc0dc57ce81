"""`deepinfer compare`: where two traces part, value by value in the order of the computation."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from deepinfer.cli.common import SubParsers, UsageError, note
from deepinfer.cli.trace import add_job, make_trace, read_job
from deepinfer.cli.values import KINDS, LayerIds, in_order
from deepinfer.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Difference", "add_parser", "compare_values", "report", "run"]

_RTOL: Final = 1e-4
_ATOL: Final = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How one value of one layer differs.

    problem      why the two cannot be compared number by number: absent, or another shape or type
    positions    how many positions have a number beyond tolerance, of `num_positions`
    first        the first of them, and in it the element that is furthest off with both numbers
    max_abs, rms largest and root-mean-square difference; infinite where only one side is finite
    exact        whether it holds integers, which must be equal
    """

    name: str
    layer: int | None
    num_positions: int = 0
    positions: int = 0
    first: int | None = None
    where: str = ""
    max_abs: float = 0.0
    rms: float = 0.0
    exact: bool = False
    problem: str | None = None

    @property
    def differs(self) -> bool:
        """Whether this is a difference beyond tolerance."""
        return self.problem is not None or self.first is not None

    @property
    def title(self) -> str:
        """The name, and the layer where there is one."""
        return self.name if self.layer is None else f"{self.name} of layer {self.layer}"


def add_parser(subparsers: SubParsers[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "compare",
        help="compare two traces, or the fast model with the reference",
        description="Compare two files of `deepinfer trace`, or run both paths of a model and "
        "compare these. Prints the first value and position beyond tolerance and the errors of "
        "every layer; the exit code is 1 when anything differs. Integers must be equal.",
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="two traces: A and B")
    parser.add_argument("--model", help="checkpoint folder, 'demo' or 'golden', in place of files")
    add_job(parser, required=False)
    parser.add_argument("--rtol", type=_tolerance, default=_RTOL, help=f"relative to B ({_RTOL:g})")
    parser.add_argument("--atol", type=_tolerance, default=_ATOL, help=f"absolute ({_ATOL:g})")
    parser.set_defaults(func=run)


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value >= 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number >= 0")
    return value


def run(args: argparse.Namespace) -> int:
    """Compare and print."""
    if args.model is None:
        if len(args.files) != 2:
            raise UsageError(
                f"compare takes two files, or --model with --token-ids; got {len(args.files)} files"
            )
        if args.token_ids is not None:
            raise UsageError("--token-ids needs --model: files hold their own tokens")
        (a, ids), (b, _) = _read(args.files[0]), _read(args.files[1])
        names = (str(args.files[0]), str(args.files[1]))
    else:
        if args.files:
            raise UsageError("compare takes two files or --model, not both")
        if args.token_ids is None:
            raise UsageError("--model needs --token-ids, the prompt to run")
        job = read_job(args, "full")
        note("running the fast path")
        a = make_trace(job, "fast")
        note("running the reference")
        b = make_trace(job, "reference")
        ids, names = LayerIds.of(job.config), ("fast", "reference")
    found = compare_values(a, b, ids, args.rtol, args.atol)
    print(report(found, names, args.rtol, args.atol))
    return 1 if any(one.differs for one in found) else 0


def _read(name: str) -> tuple[dict[str, Tensor], LayerIds]:
    """Read a trace; raises CheckpointError when that fails."""
    from safetensors import SafetensorError, safe_open

    path = Path(name).expanduser()
    try:
        with safe_open(path, "pt") as file:
            values = {key: file.get_tensor(key) for key in list(file.keys())}
            return values, LayerIds.from_metadata(file.metadata() or {})
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from error


def compare_values(
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    layer_ids: LayerIds,
    rtol: float = _RTOL,
    atol: float = _ATOL,
) -> list[Difference]:
    """Return one Difference for each value, in the order of the computation.

    Numbers are equal when |a - b| <= atol + rtol |b|, or both are NaN, or both the same infinity.
    Experts of a position are compared as a set, their weights expert by expert.
    """
    a, b = dict(a), dict(b)
    found: list[Difference] = []
    for name in [*(n for n in KINDS if n in {*a, *b}), *sorted({*a, *b} - set(KINDS))]:
        problem = _incomparable(a.get(name), b.get(name))
        if problem is not None:
            found.append(Difference(name=name, layer=None, problem=problem))
            a.pop(name, None)
            b.pop(name, None)
    for side in (a, b):
        _sort_experts(side)
    pairs = zip(in_order(a, layer_ids), in_order(b, layer_ids), strict=True)
    found += [_compare(x.name, x.layer, x.value, y.value, rtol, atol) for x, y in pairs]
    return found


def _incomparable(a: Tensor | None, b: Tensor | None) -> str | None:
    if a is None or b is None:
        return f"is only in {'B' if a is None else 'A'}"
    if a.dtype != b.dtype:
        return f"has types {a.dtype} and {b.dtype}".replace("torch.", "")
    if a.shape != b.shape:
        return f"has shapes {list(a.shape)} and {list(b.shape)}"
    return None


def _sort_experts(values: dict[str, Tensor]) -> None:
    """Put the experts of every position in ascending order, and their weights with them."""
    experts, weights = values.get("route_idx"), values.get("route_weight")
    if experts is None or experts.dim() == 0:
        return
    values["route_idx"], order = experts.sort(-1)
    if weights is not None and weights.shape == experts.shape:
        values["route_weight"] = weights.gather(-1, order)


def _compare(
    name: str, layer: int | None, a: Tensor, b: Tensor, rtol: float, atol: float
) -> Difference:
    """Compare two tensors of one shape and type."""
    import torch

    exact = not a.is_floating_point()
    num_positions = a.shape[0] if a.dim() else 1
    if a.numel() == 0:
        return Difference(name=name, layer=layer, num_positions=num_positions, exact=exact)
    x = a.double().reshape(num_positions, -1)
    y = b.double().reshape(num_positions, -1)
    same = (x == y) | (x.isnan() & y.isnan())
    off = (x - y).abs().masked_fill(same, 0.0).nan_to_num(nan=math.inf, posinf=math.inf)
    beyond = ~same & ~(off.isfinite() & (off <= (0.0 if exact else atol + rtol * y.abs())))
    rows = beyond.any(1).nonzero().flatten()
    first, where = None, ""
    if len(rows):
        first = int(rows[0])
        place = int(off[first].masked_fill(~beyond[first], -1.0).argmax())
        index = torch.unravel_index(torch.tensor(place), a.shape[1:] or (1,))
        inner = ", ".join(str(int(i)) for i in index)
        where = f"[{inner}]: {float(x[first, place]):.7g} and {float(y[first, place]):.7g}"
    return Difference(
        name=name,
        layer=layer,
        num_positions=num_positions,
        positions=len(rows),
        first=first,
        where=where,
        max_abs=float(off.max()),
        rms=float(off.square().mean().sqrt()),
        exact=exact,
    )


def report(found: Sequence[Difference], names: tuple[str, str], rtol: float, atol: float) -> str:
    """Lay a comparison out: the first difference, the layers, then the values outside layers."""
    lines = [f"A: {names[0]}", f"B: {names[1]}", f"tolerance: {atol:g} + {rtol:g} |B|", ""]
    problems = [one for one in found if one.problem is not None]
    lines += [f"{one.title} {one.problem}" for one in problems]
    if not found:
        lines.append("nothing to compare: both are empty")
    first = next((one for one in found if one.first is not None), None)
    if first is not None:
        lines.append(f"first difference: {first.title}, position {first.first}, at {first.where}")
    elif not problems:
        equal = all(one.max_abs == 0 for one in found)
        lines.append("equal" + (", bit for bit" if equal else " within tolerance"))
    by_layer = [one for one in found if one.layer is not None]
    columns = [name for name in KINDS if any(one.name == name for one in by_layer)]
    if columns:
        lines += ["", "errors by layer: largest difference; of integers, positions that differ"]
        rows = [["layer", *columns]]
        for layer in sorted({one.layer for one in by_layer if one.layer is not None}):
            cells = {one.name: _cell(one) for one in by_layer if one.layer == layer}
            rows.append([str(layer), *(cells.get(column, "") for column in columns)])
        lines += _align(rows)
    others = [one for one in found if one.layer is None and one.problem is None]
    if others:
        rows = [["value", "largest", "rms", "positions beyond", "first"]]
        for one in others:
            at = "" if one.first is None else str(one.first)
            share = f"{one.positions}/{one.num_positions}"
            rows.append([one.name, f"{one.max_abs:.3g}", f"{one.rms:.3g}", share, at])
        lines += ["", *_align(rows)]
    return "\n".join(lines)


def _cell(one: Difference) -> str:
    """Spell one error; a star marks what is beyond tolerance."""
    mark = "*" if one.differs else ""
    if one.exact:
        return f"{one.positions}/{one.num_positions}{mark}"
    return f"{one.max_abs:.3g}{mark}"


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay rows out in columns, the first to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
