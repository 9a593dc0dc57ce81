"""The simulator's time of a step beside measured ones, on one GPU and on several.

What is compared: decode steps of `bench decode` and `bench slice`, and steps of `bench.scaling`,
where ranks share the experts over `symm`. Times are the device's stated ones, or fitted
(`simfit.py`) to steps of the same kind; then a step that times were fitted to is told apart from a
predicted one. Where a shared step's kind has no fit, it is the measured slice of its run, in which
nothing travels, and the exchange of every layer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from deepinfer.bench.simfit import Kind, drawn_experts, fitted_times, is_decode, kind_of
from deepinfer.bench.steps import StepRecord, read_step
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
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            suite = entry.get("suite")
            if suite == "steps":
                record = read_step(line)
                if is_decode(record):
                    found.append(_of_record(record))
            elif suite == "scaling" and "step_us" in entry and entry["what"] in _FORMS:
                found.append(_of_scaling(entry))
            elif suite is None and "what" not in entry:
                raise ValueError("no record of a benchmark")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"{file}, line {number}: {error}") from error
    return found


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
    times: Times, steps: Sequence[Measured], fit: Sequence[StepRecord] | None = None
) -> list[Compared]:
    """Predict every measured step: depth x (dense + experts of even rows + exchange) + the ends.

    fit  steps that the times of each kind are fitted to; None takes `times` as they are
    """
    found = []
    kinds: dict[Kind, Times | None] = {}
    for step in steps:
        known: Times | None = times
        if fit is not None:
            if step.kind not in kinds:
                try:
                    kinds[step.kind] = fitted_times(times, fit, step.kind)[0]
                except ConfigError:
                    kinds[step.kind] = None
            known = kinds[step.kind]
        told = None if known is None else _told(known, step)
        slice_us = _slice_of(step, steps)
        if slice_us is not None and (known is None or fit is None):
            told = slice_us + (step.depth * _exchange(times, step) if step.ranks > 1 else 0.0)
        was_fitted = fit is not None and step.record is not None and bool(step.record.ops)
        was_fitted = was_fitted and step.record in (fit or ())
        was_fitted = (was_fitted and told is not None) or told == slice_us == step.step_us
        found.append(Compared(measured=step, told_us=told, fitted=was_fitted))
    return found


def _slice_of(step: Measured, steps: Sequence[Measured]) -> float | None:
    """Return the time of the slice that stands beside a step of `bench.scaling`."""
    if step.record is not None or step.label == "whole":
        return None
    shape = (step.depth, step.held, step.sequences, step.rows, step.context)
    for other in steps:
        if other.label == "slice" and other.record is None:
            if (other.depth, other.held, other.sequences, other.rows, other.context) == shape:
                return other.step_us
    return None


def _exchange(times: Times, step: Measured) -> float:
    """Return the time of one layer's dispatch and combine."""
    sent = np.full(step.ranks, float(step.sequences * step.rows))
    slots, link = step.held * step.ranks, times.fabrics["pair"]
    return float(times.exchange(link, step.ranks, slots, _ACTIVE, sent, sent * _ACTIVE))


def _told(times: Times, step: Measured) -> float:
    rows = step.sequences * step.rows
    drawn = drawn_experts(step.held, rows * _ACTIVE)
    layer = times.decode_layer(np.array([rows]), np.array([rows * step.context]))[0]
    layer += times.experts(drawn).mean()
    if step.ranks > 1:
        layer += _exchange(times, step)
    ends = times.curves["head"](rows) + times.curves["sampler"](rows)
    if step.kind[2]:
        ends = ends + times.curves["draft"](step.sequences)
    return float(step.depth * layer + ends)


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
