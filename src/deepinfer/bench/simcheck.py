"""The simulator's time of a step beside measured ones, for a single rank (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deepinfer.bench.report import read_lines
from deepinfer.bench.steps import StepRecord, read_step
from deepinfer.config.mesh import num_slots
from deepinfer.sim.times import Times

__all__ = ["Compared", "compare_steps", "read_steps", "spelled"]

_EXPERTS, _ACTIVE = 384, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One measured decode step and what the simulator says of it, both without a network."""

    record: StepRecord
    told_us: float

    @property
    def ratio(self) -> float:
        """Return what was told over what was measured."""
        return self.told_us / self.record.step_us


def read_steps(file: Path) -> list[StepRecord]:
    """Read the records of `bench decode` and `bench slice`; raises ConfigError for others."""
    return read_lines(file, read_step)


def compare_steps(times: Times, records: Sequence[StepRecord]) -> list[Compared]:
    """Predict every measured decode step: depth x (dense + experts of even rows) + the ends."""
    found = []
    for record in records:
        if record.form not in ("decode", "slice") or record.slice_mode == "prefill":
            continue
        rows = record.sequences * record.rows
        slots = num_slots(_EXPERTS, record.ranks) // record.ranks
        each = np.full((slots, 1), rows * _ACTIVE / slots)
        layer = times.decode_layer(np.array([rows]), np.array([rows * record.context]))[0]
        layer += times.experts(each)[0]
        ends = times.curves["head"](rows) + times.curves["sampler"](rows)
        if record.rows > 1:
            ends = ends + times.curves["draft"](record.sequences)
        found.append(Compared(record=record, told_us=float(record.depth * layer + ends)))
    return found


def spelled(found: Sequence[Compared]) -> str:
    """Lay the comparison out as a table."""
    lines = ["layers  ranks  sequences x rows   context   measured ms   predicted ms   ratio"]
    for each in found:
        r = each.record
        shape = f"{r.sequences} x {r.rows}"
        lines.append(
            f"{r.depth:6d} {r.ranks:6d} {shape:>18} {r.context:9,d} {r.step_us / 1e3:13.2f} "
            f"{each.told_us / 1e3:14.2f} {each.ratio:7.2f}"
        )
    return "\n".join(lines)
