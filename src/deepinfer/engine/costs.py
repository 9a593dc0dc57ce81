"""What a decode step takes by its number of rows: a curve, measured, kept and read back (pure).

Measuring calls what it is given; what the figures are used for is the matter of `speculation.py`.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["CostCurve", "load_curve", "measure_curve", "save_curve"]

Floats = NDArray[np.float64]

_FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds of a decode step as a function of its rows, and of drafting for its sequences.

    rows, seconds    measured row counts, ascending, and the time of each
    draft_sequences, draft_seconds  the same for one draft pass over so many sequences
    padded           a step runs at the next larger measured size (captured graphs); otherwise times
                     between sizes are interpolated
    Times never fall with size: a dip of the measurement is lifted to the largest time before it.
    Beyond the largest size the last slope goes on, and a padded step is impossible (infinite time).
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    draft_sequences: tuple[int, ...] = (1,)
    draft_seconds: tuple[float, ...] = (0.0,)
    padded: bool = False

    def __post_init__(self) -> None:
        """Check the form; lift dips."""
        for sizes, times in ((self.rows, self.seconds), (self.draft_sequences, self.draft_seconds)):
            if not sizes or len(sizes) != len(times) or sizes[0] < 1:
                raise ValueError(f"a cost curve needs a time for each size, not {sizes}, {times}")
            if any(b <= a for a, b in itertools.pairwise(sizes)):
                raise ValueError(f"sizes of a cost curve must rise, not {sizes}")
            if not all(math.isfinite(t) and t >= 0 for t in times):
                raise ValueError(f"times of a cost curve must be finite and >= 0, not {times}")
        object.__setattr__(self, "seconds", _lifted(self.seconds))
        object.__setattr__(self, "draft_seconds", _lifted(self.draft_seconds))

    def step_s(self, rows: ArrayLike, slope: float = 0.0) -> Floats:
        """Return the seconds of steps of so many rows, with `slope` more for each row run."""
        wanted = np.asarray(rows, np.float64)
        sizes = np.asarray(self.rows, np.float64)
        if not self.padded:
            return _along(wanted, sizes, np.asarray(self.seconds)) + slope * wanted
        place = np.searchsorted(sizes, wanted)
        inside = np.minimum(place, len(sizes) - 1)
        times = np.asarray(self.seconds)[inside] + slope * sizes[inside]
        return np.where(place < len(sizes), times, np.inf)

    def draft_s(self, sequences: int) -> float:
        """Return the seconds of a draft pass over so many sequences."""
        sizes = np.asarray(self.draft_sequences, np.float64)
        return float(_along(np.asarray(sequences, float), sizes, np.asarray(self.draft_seconds)))

    def __str__(self) -> str:
        """Return the curve as a small table."""
        lines = ["rows       ms  | sequences  draft ms"]
        for idx in range(max(len(self.rows), len(self.draft_sequences))):
            left = right = ""
            if idx < len(self.rows):
                left = f"{self.rows[idx]:<6d} {self.seconds[idx] * 1e3:8.3f}"
            if idx < len(self.draft_sequences):
                right = f"{self.draft_sequences[idx]:<9d} {self.draft_seconds[idx] * 1e3:9.3f}"
            lines.append(f"{left:15} | {right}".rstrip())
        return "\n".join(lines)


def _lifted(times: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(t) for t in np.maximum.accumulate(np.asarray(times, np.float64)))


def _along(wanted: Floats, sizes: Floats, times: Floats) -> Floats:
    """Interpolate; below the first size its time holds, beyond the last the slope goes on."""
    result = np.interp(wanted, sizes, times)
    if len(sizes) > 1:
        slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
        result = result + slope * np.maximum(wanted - sizes[-1], 0.0)
    return np.asarray(result, np.float64)


def measure_curve(
    run_rows: Callable[[int], None],
    run_drafts: Callable[[int], None],
    sizes: Sequence[int],
    draft_sizes: Sequence[int],
    *,
    padded: bool = False,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> CostCurve:
    """Measure a curve: one run to warm up, then `repeats`, the fastest and slowest left out.

    run_rows, run_drafts  run a step of so many rows, a draft pass over so many sequences, and wait
    """

    def measured(run: Callable[[int], None], size: int) -> float:
        run(size)
        times = []
        for _ in range(repeats):
            begin = clock()
            run(size)
            times.append(clock() - begin)
        kept = sorted(times)[1:-1] if repeats > 2 else times
        return max(0.0, statistics.fmean(kept))

    return CostCurve(
        tuple(sizes),
        tuple(measured(run_rows, size) for size in sizes),
        tuple(draft_sizes),
        tuple(measured(run_drafts, size) for size in draft_sizes),
        padded,
    )


def save_curve(path: Path, curve: CostCurve, fingerprint: Mapping[str, object]) -> None:
    """Write a curve and what it was measured on; the file appears whole or not at all."""
    text = json.dumps(
        {
            "format": _FORMAT,
            "fingerprint": dict(fingerprint),
            "measured_at": time.time(),
            "rows": curve.rows,
            "seconds": curve.seconds,
            "draft_sequences": curve.draft_sequences,
            "draft_seconds": curve.draft_seconds,
            "padded": curve.padded,
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load_curve(
    path: Path, fingerprint: Mapping[str, object], max_age_s: float, now_s: float | None = None
) -> CostCurve | None:
    """Read a curve back; None when the file is missing, damaged, too old or of something else."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        age = (time.time() if now_s is None else now_s) - told["measured_at"]
        same = told["format"] == _FORMAT and told["fingerprint"] == json.loads(
            json.dumps(dict(fingerprint))
        )
        if not same or not 0 <= age <= max_age_s:
            return None
        curve = CostCurve(
            tuple(int(n) for n in told["rows"]),
            tuple(float(t) for t in told["seconds"]),
            tuple(int(n) for n in told["draft_sequences"]),
            tuple(float(t) for t in told["draft_seconds"]),
            bool(told["padded"]),
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return curve if curve.seconds[0] > 0 else None  # no step takes no time
