"""Times of a simulated device from what `deepinfer bench kernels` has measured (pure).

Where a task was measured its best implementation of ours takes the place of the stated curve; the
rest stays as it is. Experts are fitted anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from deepinfer.bench.kernels import KernelRecord, read_record
from deepinfer.bench.report import read_lines
from deepinfer.sim.times import Curve, Experts, Times

__all__ = ["measured_times", "read_kernels"]

_LINEARS: Final = (
    "dense wq_a and wkv", "dense wq_b", "dense wo_a", "dense wo_b", "dense shared gate and up",
    "dense shared down",
)  # fmt: skip
_TASKS: Final = {
    "linears": (_LINEARS, 1.0),
    "hyper": (("hyper site",), 2.0),
    "attend": (("attention decode",), 1.0),
    "attend_prefill": (("attention prefill",), 1.0),
}
"""Curve -> the tasks that it is the sum of, and how often a layer runs them."""
_EXPERTS: Final = ("experts gate and up", "experts down")
_HELD: Final = 48
"""Experts of the measured shape: a rank of eight."""


def read_kernels(file: Path) -> list[KernelRecord]:
    """Read the records of a file; raises ConfigError naming the first bad line."""
    return read_lines(file, read_record)


def measured_times(times: Times, records: Sequence[KernelRecord]) -> tuple[Times, list[str]]:
    """Return times with measured parts, and which parts these are."""
    curves: dict[str, Curve] = {}
    told = []
    for name, (tasks, often) in _TASKS.items():
        found = _sums(records, tasks)
        if found:
            rows = tuple(float(r) for r in found)
            us = tuple(often * u for u in np.maximum.accumulate(list(found.values())).tolist())
            how = f"measured: {', '.join(tasks)}"
            if len(rows) == 1:  # in proportion below and above
                rows, us = (rows[0] / 8, rows[0]), (us[0] / 8, us[0])
            curves[name] = Curve(rows, us, how)
            told.append(f"{name}: {len(found)} sizes")
    experts = _sums(records, ("experts both",)) or {}
    for size, spent in _sums(records, _EXPERTS).items():
        experts[size] = min(spent, experts.get(size, spent))
    if len(experts) >= 3:
        times = replace(times, experts_fit=_fitted(times, experts))
        told.append(f"experts: {len(experts)} sizes, {times.experts_fit.how}")
    return times.with_curves(**curves), told


def _sums(records: Sequence[KernelRecord], tasks: Sequence[str]) -> dict[int, float]:
    """Return rows -> least time of ours, summed over tasks, where all were measured."""
    best: dict[tuple[str, int], float] = {}
    for r in records:
        if r.op and not r.failed and r.us > 0:
            key = r.task, r.rows
            best[key] = min(r.us, best.get(key, r.us))
    sizes = sorted({rows for task, rows in best if task == tasks[0]})
    whole = [rows for rows in sizes if all((task, rows) in best for task in tasks)]
    return {rows: sum(best[task, rows] for task in tasks) for rows in whole}


def _fitted(times: Times, experts: dict[int, float]) -> Experts:
    """Return the form of `Times.experts` that lies nearest to measured times of 48 experts."""
    rng = np.random.default_rng(0)
    even = np.full(_HELD, 1 / _HELD)
    drawn = {n: rng.multinomial(n, even, 16).astype(np.float32)[..., None] for n in experts}
    best, least = times.experts_fit, np.inf
    factors = np.geomspace(0.5, 2.0, 15)
    start = times.experts_fit
    for read, row, base in itertools.product(factors, factors, (0.3, 1.0, 2.0)):
        fit = replace(
            start, base_us=start.base_us * base, read_us=start.read_us * read,
            row_us=start.row_us * row,
        )  # fmt: skip
        one = replace(times, experts_fit=fit)
        worst = max(abs(float(one.experts(drawn[n]).mean()) / us - 1) for n, us in experts.items())
        if worst < least:
            best, least = replace(fit, how=f"fitted to measured experts within {worst:.0%}"), worst
    return best
