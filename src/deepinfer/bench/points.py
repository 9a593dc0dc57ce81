"""What `deepinfer bench kernels` times: every op's cases, grouped by task with the peers' points.

A task is what several implementations do in their own ways ("attention decode"); members of one
task and row count are timed in alternation. Ops join by what their folders list: a large case with
`timed` row counts is enough.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, Literal

import torch
from torch import Tensor

from deepinfer.bench.timing import Call, num_sets
from deepinfer.kernels.cases import Arguments, Case, all_cases
from deepinfer.kernels.libraries import LIBRARIES, is_usable
from deepinfer.kernels.table import TABLE, Implementation

__all__ = [
    "Member", "Work", "clone_set", "list_members", "member_key", "op_work", "shared_inputs",
    "stored_bytes",
]  # fmt: skip

Shape = Literal["small", "real"]

_TASKS: Final = (  # op pattern, case pattern, task
    (r"attention", r"real.*decode", "attention decode"),
    (r"attention", r"real.*prefill", "attention prefill"),
    (r"expert_linear", r"real (gate and up|down)", r"experts \1"),
    (r"expert", r"real", "experts both"),
    (r"paged_index", r"real$", "index scores"),
    (r"paged_index", r"real, candidates", "index scores, candidates"),
    (r"index_score", r"real", "index scores, shared keys"),
    (r"select_topk", r"real", "top-512"),
    (r"hyper_site", r"real", "hyper site"),
    (r"fp8_linear", r"real (.*)", r"dense \1"),
    (r"grouped_linear", r"real (.*)", r"dense \1"),
)
_SMALL_ROWS: Final = 5
_CHECKED_ROWS: Final = 24
_SEED: Final = 7


@dataclass(slots=True, kw_only=True)
class Work:
    """Prepared calls on buffer sets of their own.

    check  relative error against the exact result, None when there is nothing to compare with
    """

    calls: Sequence[Call]
    flops: float
    bytes: float
    check: Callable[[], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One way to do a task with some rows.

    name  "triton" of the table, or a peer's, e.g. "Humming W4A8"
    op    "" for a peer
    math  the tensor cores' format that bounds it
    note  in what it differs from the op, "" = nothing
    built module of a kernel that is compiled for half a minute at its first use, "" = none
    """

    task: str
    rows: int
    name: str
    build: Callable[[torch.device], Work]
    op: str = ""
    case: str = ""
    math: Literal["bf16", "fp8"] = "bf16"
    invariant: bool = False
    tolerance: float | None = None
    note: str = ""
    built: str = ""

    @property
    def key(self) -> str:
        """Name it among all members."""
        return member_key(self.task, self.rows, self.op, self.case, self.name)


def member_key(task: str, rows: int, op: str, case: str, name: str) -> str:
    """Name a member among all."""
    return f"{task} | {rows} | {op or 'peer'} | {case} | {name}"


def list_members(
    shape: Shape,
    arch: str,
    only: str = "",
    peers: bool = False,
    skip: Sequence[str] = (),
    points: Collection[tuple[str, int]] | None = None,
) -> list[Member]:
    """Return what can be timed on an architecture; `only` is searched in op, task and case.

    skip    implementations to leave out: "name", "op/name" of one op, or a pattern with "|" in
            it, which is searched in keys of members
    points  (task, rows) to keep, None = all
    """
    found: list[Member] = []
    seen: set[str] = set()
    for case in all_cases():
        if case.large != (shape == "real"):
            continue
        if shape == "small":
            if case.op in seen:
                continue
            seen.add(case.op)
        for rows in case.timed if case.large else (_SMALL_ROWS,):
            found += [
                _member(case, rows, line)
                for line in TABLE[case.op]
                if _runs(line, arch)
                and _takes(line, case)
                and not {line.name, f"{case.op}/{line.name}"} & {*skip}
            ]
    if peers:
        from deepinfer.bench.peers import list_peers

        found += [p for p in list_peers(shape, arch) if p.name not in skip]
    for text in skip:
        if "|" in text:
            found = [m for m in found if not re.search(text, m.key)]
    pattern = re.compile(only)
    found = [m for m in found if any(map(pattern.search, (m.task, m.op, m.case)))]
    if points is not None:
        found = [m for m in found if (m.task, m.rows) in points]
    named = [task for _, _, task in _TASKS]
    order = {task: place for place, task in enumerate(named)}
    return sorted(found, key=lambda m: (order.get(_family(m.task), len(named)), m.rows, m.task))


def _family(task: str) -> str:
    """Return the pattern that a task's name came from."""
    for family in ("dense", "experts"):
        if task.startswith(family):
            return next(t for _, _, t in _TASKS if t.startswith(family))
    return task


def _runs(line: Implementation, arch: str) -> bool:
    if line.needs and not is_usable(line.needs):
        return False
    return not line.archs or arch in line.archs


def _takes(line: Implementation, case: Case) -> bool:
    """Whether an implementation does not refuse a case of real dimensions outright."""
    return line.module != "linear.deepgemm" or not case.large or "scales of 128" in case.name


def _task(case: Case) -> str:
    for op, name, task in _TASKS:
        match = re.search(name, case.name)
        if re.search(op, case.op) and match:
            return match.expand(task)
    return f"{case.op}: {case.name.removeprefix('real').strip(', ')}".removesuffix(": ")


def _member(case: Case, rows: int, line: Implementation) -> Member:
    def build(device: torch.device) -> Work:
        return op_work(case, rows, line, device)

    return Member(
        task=_task(case),
        rows=rows,
        name=line.name,
        build=build,
        op=case.op,
        case=case.name,
        math="fp8" if re.search(r"fp8|w4a8", line.name, re.IGNORECASE) else "bf16",
        invariant=line.invariant,
        tolerance=case.tolerance,
        built=_built(line, case.op),
    )


def _built(line: Implementation, op: str) -> str:
    """Name what is compiled for long: a source of ours once, a library's kernels op by op."""
    if line.needs == "nvcc":
        return line.module
    return f"{line.module}.{op}" if line.needs in LIBRARIES else ""


_shared: list[dict[tuple[str, str, int], list[Arguments]]] = []


@contextmanager
def shared_inputs() -> Iterator[None]:
    """Let implementations of a case take the same inputs inside: for timing."""
    _shared.append({})
    try:
        yield
    finally:
        _shared.pop()


def op_work(case: Case, rows: int, line: Implementation, device: torch.device) -> Work:
    """Prepare one implementation of an op on rotated inputs."""
    function = getattr(import_module(f"deepinfer.kernels.{line.module}"), case.op)
    held_sets = _shared[-1] if _shared else {}
    sets = held_sets.setdefault((case.op, case.name, rows), [])
    if not sets:
        with torch.device(device):
            sets.append(case.build(rows, torch.Generator(device).manual_seed(_SEED)))
    arguments = sets[0]
    result = function(*arguments)
    moved = case.moved(arguments) if case.moved else stored_bytes(arguments) + stored_bytes(result)
    held = _storage_bytes(arguments)
    count = num_sets(int(moved), _most_bytes(device))
    count = max(1, min(count, _most_bytes(device) // max(held, 1)))
    while len(sets) < count:
        sets.append(clone_set(arguments))

    def call(at: Arguments) -> Call:
        return lambda: function(*at)

    return Work(
        calls=[call(at) for at in sets[:count]],
        flops=float(case.row_flops * rows),
        bytes=float(moved),
        check=lambda: _error(case, rows, function, arguments, device),
    )


def _most_bytes(device: torch.device) -> int:
    return 12 << 30 if device.type == "cuda" else 1 << 28


def _error(
    case: Case, rows: int, function: Callable[..., Any], arguments: Arguments, device: torch.device
) -> float | None:
    """Compare some rows with the reference in fp32: relative L2, or the share of other integers."""
    lines = [line for line in TABLE[case.op] if line.name == "reference"]
    if not lines:
        return None
    reference = getattr(import_module(f"deepinfer.kernels.{lines[0].module}"), case.op)
    count = min(rows, _CHECKED_ROWS)
    with torch.device(device):
        index = torch.arange(count) * rows // count
        exact = case.select(arguments, index)  # first: some write over what they are given
    got = _tensors(function(*arguments))
    wide = tuple(
        v.float() if isinstance(v, Tensor) and v.dtype == torch.bfloat16 else v for v in exact
    )
    want = _tensors(reference(*wide))
    worst = 0.0
    for mine, right in zip(got, want, strict=True):
        part = mine[index] if mine.shape[0] == rows else mine
        if not right.dtype.is_floating_point:
            worst = max(worst, float((part != right).float().mean()))
            continue
        found, sought = part.double(), right.double()
        same = found == sought  # -inf too: entries that a row does not see
        norm = float(sought[sought.isfinite()].norm())
        gap = float((found - sought).masked_fill(same, 0.0).norm())
        worst = max(worst, gap / norm if norm else gap)
        if gap != gap:  # NaN passes no comparison
            return float("nan")
    return worst


def _tensors(result: object) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [part for part in result if isinstance(part, Tensor)]  # type: ignore[attr-defined]


def _walk(value: object) -> list[Tensor]:
    """Return the tensors inside a value; copies that only a CPU keeps do not count."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in _walk(part)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value) if f.name not in ("dense", "twice")]
        return [tensor for name in names for tensor in _walk(getattr(value, name))]
    return []


def stored_bytes(value: object) -> int:
    """Add up the bytes of all tensors inside a value."""
    return sum(t.numel() * t.element_size() for t in _walk(value))


def _storage_bytes(value: object) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in _walk(value)}
    return sum(storage.nbytes() for storage in storages.values())


def clone_set(arguments: Arguments) -> Arguments:
    """Copy arguments to memory of their own, views of one pool to views of one copy."""
    copies: dict[int, torch.UntypedStorage] = {}

    def copy(value: object) -> object:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            made = copies.setdefault(storage.data_ptr(), storage.clone())  # type: ignore[no-untyped-call]
            blank = torch.empty(0, dtype=value.dtype, device=value.device)
            return blank.set_(made, value.storage_offset(), value.shape, value.stride())
        if isinstance(value, (tuple, list)):
            parts = [copy(part) for part in value]
            return value._make(parts) if hasattr(value, "_make") else type(value)(parts)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: copy(getattr(value, f.name)) for f in dataclasses.fields(value)}
            return type(value)(**fields)
        return value

    return tuple(copy(part) for part in arguments)
