"""The simulator's time of a step beside measured ones, on one GPU and on several.

What is compared: decode steps of `bench decode` and `bench slice`, and steps of `bench.scaling`,
where ranks share the experts over `symm`. Times are the device's stated ones, or fitted
(`simfit.py`) to steps of the same kind; then a step that times were fitted to is told apart from a
predicted one. Where a shared step's kind has no fit, it is the measured slice of its run, in which
nothing travels, and the exchange of every layer; one card with all experts is the slice and what
the experts take longer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from deepinfer.bench.report import read_lines
from deepinfer.bench.simfit import (
    Kind,
    drawn_experts,
    fitted_times,
    is_decode,
    kind_of,
    scanned_keys,
)
from deepinfer.bench.steps import StepRecord, read_step
from deepinfer.config.load import released_config
from deepinfer.config.mesh import num_slots
from deepinfer.errors import ConfigError
from deepinfer.sim.times import Times

__all__ = ["Compared", "Measured", "compare_steps", "read_measured", "read_steps", "spelled"]

_EXPERTS, _ACTIVE = 384, 6
_SHARED: Final[Kind] = ((), (), False)
"""The kind of a step of `bench.scaling`: no drafts, kernels that the engine chooses."""


_FORMS: Final = ("whole", "slice", "symm")
"""Of `bench.scaling`: links are fitted to one back end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One measured decode step.

    label  of the form, for people
    held   experts of a layer on this device
    ranks  between which rows travel, 1 = none
    """

    label: str
    depth: int
    held: int
    ranks: int
    sequences: int
    rows: int
    context: int
    step_us: float
    kind: Kind
    record: StepRecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One measured step and what the simulator says of it, without a network that was not there.

    told_us  None when too few steps of its kind were taken apart
    fitted   whether the times were fitted to this step
    """

    measured: Measured
    told_us: float | None
    fitted: bool = False

    @property
    def ratio(self) -> float:
        """Return what was told over what was measured."""
        return float("nan") if self.told_us is None else self.told_us / self.measured.step_us


def read_steps(file: Path) -> list[StepRecord]:
    """Read the steps of `bench decode` and `bench slice`, passing over lines of other suites.

    Raises ConfigError for what is no record of a benchmark.
    """
    return [m.record for m in read_measured(file) if m.record is not None]


def read_measured(file: Path) -> list[Measured]:
    """Read the decode steps of a file, of all that measure them.

    Raises ConfigError naming the first line that is no record of a benchmark.
    """
    return [found for found in read_lines(file, _measured) if found is not None]


def _measured(line: str) -> Measured | None:
    """Return the decode step of a line, None for a record of something else."""
    entry = json.loads(line)
    try:
        suite = entry.get("suite")
        if suite == "steps":
            record = read_step(line)
            return _of_record(record) if is_decode(record) else None
        if suite == "scaling" and "step_us" in entry and entry["what"] in _FORMS:
            return _of_scaling(entry)
        if suite is None and "what" not in entry:
            raise ValueError("no record of a benchmark")
    except (KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"no record of a benchmark: {error}") from error
    return None


def _of_record(record: StepRecord) -> Measured:
    products = record.settings.get("numerics.expert_products", "")
    return Measured(
        label=f"{record.form} {products}".strip(),
        depth=record.depth,
        held=num_slots(_EXPERTS, record.ranks) // record.ranks,
        ranks=1,
        sequences=record.sequences,
        rows=record.rows,
        context=record.context,
        step_us=record.step_us,
        kind=kind_of(record),
        record=record,
    )


def _of_scaling(entry: dict[str, object]) -> Measured:
    def number(key: str) -> int:
        return int(str(entry[key]))

    what, ranks = str(entry["what"]), number("ranks")
    return Measured(
        label=f"{what}, {ranks} GPUs" if what not in ("whole", "slice") else what,
        held=_EXPERTS if what == "whole" else num_slots(_EXPERTS, ranks) // ranks,
        ranks=1 if what in ("whole", "slice") else ranks,
        depth=number("depth"),
        sequences=number("sequences"),
        rows=number("rows"),
        context=number("context"),
        step_us=float(str(entry["step_us"])),
        kind=_SHARED,
    )


def compare_steps(
    times: Times,
    steps: Sequence[Measured],
    fit: Sequence[StepRecord] | None = None,
    each: bool = False,
) -> list[Compared]:
    """Predict every measured step: depth x (dense + experts of even rows + exchange) + the ends.

    fit   steps that the times of each kind are fitted to; None takes `times` as they are
    each  leave steps of a step's own shape out of what it is predicted from
    """
    found = []
    known: dict[tuple[object, ...], Times | None] = {}
    for step in steps:
        own: Times | None = times
        if fit is not None:
            key = (step.kind, _shape(step) if each else None)
            if key not in known:
                rest = [r for r in fit if not each or _shape(_of_record(r)) != _shape(step)]
                known[key] = _fitted_or_none(times, rest, step.kind)
            own = known[key]
        told = None if own is None else _told(own, step)
        beside = _slice_of(step, steps)
        if beside is not None and (own is None or fit is None):
            told = beside.step_us + step.depth * (_experts(times, step) - _experts(times, beside))
            told += step.depth * _exchange(times, step) if step.ranks > 1 else 0.0
        was_fitted = not each and fit is not None and bool(step.record and step.record.ops)
        was_fitted = was_fitted and step.record in (fit or ()) and told is not None
        found.append(Compared(measured=step, told_us=told, fitted=was_fitted or beside is step))
    return found


def _fitted_or_none(times: Times, fit: Sequence[StepRecord], kind: Kind) -> Times | None:
    try:
        return fitted_times(times, fit, kind)[0]
    except ConfigError:
        return None


def _shape(step: Measured) -> tuple[int, ...]:
    return (step.depth, step.held, step.sequences, step.rows, step.context)


def _slice_of(step: Measured, steps: Sequence[Measured]) -> Measured | None:
    """Return the slice that stands beside a step of `bench.scaling`."""
    if step.record is not None:
        return None
    load = (step.depth, step.sequences, step.rows, step.context)
    for other in steps:
        if other.label == "slice" and other.record is None:
            if (other.depth, other.sequences, other.rows, other.context) == load:
                return other
    return None


def _experts(times: Times, step: Measured) -> float:
    """Return the time of one layer's experts, rows even."""
    return float(
        times.experts(drawn_experts(step.held, step.sequences * step.rows * _ACTIVE)).mean()
    )


def _exchange(times: Times, step: Measured) -> float:
    """Return the time of one layer's dispatch and combine."""
    sent = np.full(step.ranks, float(step.sequences * step.rows))
    slots, link = step.held * step.ranks, times.fabrics["pair"]
    return float(times.exchange(link, step.ranks, slots, _ACTIVE, sent, sent * _ACTIVE))


def _told(times: Times, step: Measured) -> float:
    rows = step.sequences * step.rows
    layer = times.decode_layer(np.array([rows]), np.zeros(1))[0]
    layer += _experts(times, step)
    if step.ranks > 1:
        layer += _exchange(times, step)
    ends = times.curves["head"](rows) + times.curves["sampler"](rows)
    if step.kind[2]:
        ends = ends + times.curves["draft"](step.sequences)
    scanned = scanned_keys(released_config(), step.depth, rows, step.context)
    index = scanned * (times.index_ps[0] + times.index_ps[2]) * 1e-6
    return float(step.depth * layer + index + ends)


def spelled(found: Sequence[Compared]) -> str:
    """Lay the comparison out as a table, and say how far predictions are off."""
    lines = [
        f"{'step':<16} layers experts  sequences x rows   context   measured ms   told ms   ratio"
    ]
    for each in found:
        m = each.measured
        shape = f"{m.sequences} x {m.rows}"
        told = "-" if each.told_us is None else f"{each.told_us / 1e3:.2f}"
        ratio = "-" if each.told_us is None else f"{each.ratio:.2f}"
        how = (
            "  fitted"
            if each.fitted
            else ""
            if each.told_us
            else "  too few steps of its kind are split"
        )
        lines.append(
            f"{m.label:<16} {m.depth:6d} {m.held:7d} {shape:>17} {m.context:9,d} "
            f"{m.step_us / 1e3:13.2f} {told:>9} {ratio:>7}{how}"
        )
    for name, fitted in (("fitted", True), ("predicted", False)):
        off = [abs(e.ratio - 1) for e in found if e.fitted == fitted and e.told_us is not None]
        if off:
            lines.append(
                f"{name}: {len(off)} steps, off by {np.mean(off):.1%} on average, {max(off):.1%} "
                "at most"
            )
    return "\n".join(lines)
