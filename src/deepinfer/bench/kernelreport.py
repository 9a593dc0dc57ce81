"""The table of `deepinfer bench kernels`: members by task, sums of a layer, goals (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from deepinfer.bench.kernels import KernelRecord
from deepinfer.kernels.libraries import LIBRARIES
from deepinfer.kernels.table import TABLE

__all__ = ["GOALS", "GOAL_POINTS", "Goal", "kernel_table", "reached", "sums"]

_ADAPTERS: Final = {
    line.name for lines in TABLE.values() for line in lines if line.needs in LIBRARIES
}
_DENSE: Final = (
    "dense wq_a and wkv", "dense wq_b", "dense wo_a", "dense wo_b", "dense shared gate and up",
    "dense shared down",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A mark on one H200 under steady load, for one task or the sum of several.

    peer_us  the best public library measured before, 0 = none
    copies   whether bf16 copies of the weights are multiplied with, None = either
    """

    name: str
    tasks: tuple[str, ...]
    rows: int
    us: float
    peer_us: float = 0.0
    copies: bool | None = None


def _goals() -> Iterable[Goal]:
    for rows, us, peer in ((32, 12, 25.5), (192, 45, 86.7), (768, 160, 264)):
        task = "attention decode"
        yield Goal(name=task, tasks=(task,), rows=rows, us=us, peer_us=peer)
    task = "attention prefill"
    yield Goal(name=task, tasks=(task,), rows=4096, us=620, peer_us=688)
    both = ("experts gate and up", "experts down")
    for rows, us, peer in (
        (192, 220, 232), (768, 220, 247), (1152, 235, 0), (2304, 290, 0), (24576, 1590, 1818),
    ):  # fmt: skip
        yield Goal(name="experts, W4A8", tasks=both, rows=rows, us=us, peer_us=peer)
    for rows, us, peer in (
        (192, 300, 344), (768, 300, 395), (1152, 330, 0), (2304, 420, 0), (24576, 2718, 2871),
    ):  # fmt: skip
        yield Goal(name="experts, exact", tasks=both, rows=rows, us=us, peer_us=peer)
    for rows, us, peer in ((1, 60, 89), (32, 60, 103), (192, 115, 140), (384, 210, 218)):
        yield Goal(name="six dense linears", tasks=_DENSE, rows=rows, us=us, peer_us=peer)
    for copies, us, peer in ((False, 2050, 2269), (True, 1950, 1970)):
        name = "six dense linears, " + ("bf16 copies" if copies else "no copies")
        yield Goal(name=name, tasks=_DENSE, rows=4096, us=us, peer_us=peer, copies=copies)
    yield Goal(name="index scores", tasks=("index scores",), rows=768, us=550, peer_us=829)
    yield Goal(name="top-512", tasks=("top-512",), rows=768, us=75, peer_us=789)
    for rows, us, peer in ((32, 8, 18), (512, 20, 29), (4096, 135, 201)):
        yield Goal(name="hyper site", tasks=("hyper site",), rows=rows, us=us, peer_us=peer)


GOALS: Final = tuple(_goals())
GOAL_POINTS: Final = frozenset(
    (task, goal.rows)
    for goal in GOALS
    for task in (*goal.tasks, *(("experts both",) if "experts" in goal.name else ()))
)
"""(task, rows) that a goal speaks of."""
_OTHER_WEIGHTS: Final = "DeepGEMM FP8"
"""A library on weights of another format, which a goal's do not fit."""
_COPIED: Final = re.compile(r"cuBLAS")
_FP8: Final = re.compile(r"fp8|w4a8|e4m3", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """A goal beside what a run measured: the best of ours and the best library, 0 = none.

    cool_us  ours after a pause, as opposed to steady
    """

    goal: Goal
    us: float
    cool_us: float
    name: str
    peer_us: float
    peer: str


def reached(records: Sequence[KernelRecord]) -> list[Reached]:
    """Set the run's best beside every goal whose rows were measured."""
    found = []
    for goal in GOALS:
        us, cool_us, name = _best(records, goal, ours=True)
        peer_us, _, peer = _best(records, goal, ours=False)
        if us or peer_us:
            found.append(
                Reached(goal=goal, us=us, cool_us=cool_us, name=name, peer_us=peer_us, peer=peer)
            )
    return found


def _best(records: Sequence[KernelRecord], goal: Goal, ours: bool) -> tuple[float, float, str]:
    """Return the least time of a goal's tasks, the cool one of the same, and who took it.

    Zeros when a part is missing.
    """
    part = [
        r
        for r in records
        if r.rows == goal.rows and not r.failed and r.us and _own(r) == ours and _counts(r, goal)
    ]
    whole = [r for r in part if r.task == "experts both"] if "experts" in goal.name else []
    ways = [[min(whole, key=lambda r: r.us)]] if whole else []
    each = [[r for r in part if r.task == task] for task in goal.tasks]
    if all(each):
        ways.append([min(found, key=lambda r: r.us) for found in each])
    if not ways:
        return 0.0, 0.0, ""
    best = min(ways, key=lambda way: sum(r.us for r in way))
    who = " + ".join(dict.fromkeys(r.name for r in best))
    return sum(r.us for r in best), sum(r.us_burst for r in best), who


def _own(record: KernelRecord) -> bool:
    """Whether it is a kernel of ours, neither a peer nor an adapter."""
    return bool(record.op) and record.name not in _ADAPTERS


def _counts(record: KernelRecord, goal: Goal) -> bool:
    """Whether an implementation has the arithmetic, or the weights, that a goal speaks of."""
    if record.name == _OTHER_WEIGHTS:
        return False
    if goal.copies is not None:
        return bool(_COPIED.search(record.name)) == goal.copies
    if not goal.name.startswith("experts"):
        return True
    return bool(_FP8.search(record.name)) == ("W4A8" in goal.name)


def sums(records: Sequence[KernelRecord]) -> list[tuple[str, int, str, float]]:
    """Add up tasks that a layer runs together: (name, rows, implementation, microseconds).

    Only implementations that have every part; "best" takes the fastest of ours for each.
    """
    found: list[tuple[str, int, str, float]] = []
    parts = {goal.name.partition(",")[0]: goal.tasks for goal in GOALS if len(goal.tasks) > 1}
    for name, tasks in parts.items():
        of_sum = [r for r in records if r.task in tasks and not r.failed]
        for rows in sorted({r.rows for r in of_sum}):
            times = {(r.task, r.name): r.us for r in of_sum if r.rows == rows}
            names = list(dict.fromkeys(r.name for r in of_sum if r.rows == rows))
            found += [
                (name, rows, who, sum(times[task, who] for task in tasks))
                for who in names
                if all((task, who) in times for task in tasks)
            ]
            ours = {(r.task, r.name) for r in of_sum if r.rows == rows and r.op}
            best = [[times[key] for key in ours if key[0] == task] for task in tasks]
            if all(best):
                found.append((name, rows, "best of ours", sum(map(min, best))))
    return found


def kernel_table(records: Sequence[KernelRecord], brief: bool = False) -> str:
    """Lay runs out as text: ceilings, members by task and rows, sums, what was left out.

    brief  ceilings and goals alone
    """
    runs = [
        [r for r in records if r.when == when] for when in dict.fromkeys(r.when for r in records)
    ]
    return "\n\n".join(_run_table(run, brief) for run in runs)


def _run_table(records: Sequence[KernelRecord], brief: bool) -> str:
    lines = _head(records)
    if not brief:
        lines += _members(records)
    lines += _goal_lines(records)
    layer = [] if brief else sums(records)
    if layer:
        lines += ["", "sums"]
        lines += [f"{name:<28} {rows:>6}  {who:<24} {us:>9.1f}" for name, rows, who, us in layer]
    return "\n".join(lines)


def _members(records: Sequence[KernelRecord]) -> list[str]:
    lines = [
        f"{'task':<28} {'rows':>6}  {'implementation':<24} {'us':>9} {'cool':>9} {'floor':>6}"
        f" {'error':>8}  note"
    ]
    ordered = sorted(records, key=lambda r: (r.task, r.rows))
    for (task, rows), group in groupby(ordered, key=lambda r: (r.task, r.rows)):
        for record in sorted(group, key=lambda r: (bool(r.failed), r.us)):
            lines.append(f"{task:<28} {rows:>6}  {_line(record)}")
    return lines


def _goal_lines(records: Sequence[KernelRecord]) -> list[str]:
    lines: list[str] = []
    marks = reached(records)
    if marks:
        lines += [
            "",
            f"{'goal':<31} {'rows':>6} {'goal us':>8} {'ours':>8} {'cool':>8} {'library':>8}",
        ]
    for mark in marks:
        goal = mark.goal
        ours = f"{mark.us:.1f}" if mark.us else "-"
        cool = f"{mark.cool_us:.1f}" if mark.us else "-"
        peer = f"{mark.peer_us:.1f}" if mark.peer_us else "-"
        verdict = ""
        if mark.us:
            verdict = "reached" if mark.us <= goal.us else f"x {mark.us / goal.us:.2f}"
        who = f"{mark.name or '-'} / {mark.peer or '-'}"
        lines.append(
            f"{goal.name:<31} {goal.rows:>6} {goal.us:>8g} {ours:>8} {cool:>8} {peer:>8}"
            f"  {verdict:<8} {who}"
        )
    return lines


def _head(records: Sequence[KernelRecord]) -> list[str]:
    record = records[0]
    machine, found = record.machine or {}, record.ceilings or {}
    rates = ", ".join(
        f"{name} {value / 1e12:.2f} {'TB/s' if name in ('copy', 'read') else 'TFLOP/s'}"
        for name, value in found.items()
        if value
    )
    versions = ", ".join(f"{name} {version}" for name, version in (record.versions or {}).items())
    where = str(machine.get("card") or machine.get("cpu", "?"))
    rest_s = max(r.rest_s for r in records)
    where += f", each alone after {rest_s:g} s of pause" if rest_s else ""
    return [f"kernels {record.when}, {where}", f"  {versions}", f"  ceilings: {rates}"]


def _line(record: KernelRecord) -> str:
    note = "; ".join(
        part
        for part in (
            record.note,
            "" if record.mode in ("graph", "clock", "") else "no graph",
            "" if record.invariant or not record.op else "not batch-invariant",
        )
        if part
    )
    if record.failed:
        compared = "" if record.error is None else f"; error {record.error:.1e}"
        return f"{record.name:<24} {record.failed[:90]}{compared}"
    error = "-" if record.error is None else f"{record.error:.1e}"
    return (
        f"{record.name:<24} {record.us:>9.2f} {record.us_burst:>9.2f} {record.of_floor:>6.0%}"
        f" {error:>8}  {note}".rstrip()
    )
