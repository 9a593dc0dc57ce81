"""What the parts of a step take: curves and fits read from a file, as arrays over ranks (pure)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepinfer.errors import ConfigError

__all__ = ["Curve", "Experts", "Fabric", "Times", "distinct_ranks", "load_times"]

Floats = NDArray[np.floating]

FILTERED_KEYS: Final = 16384
"""Keys of the filtered scans: 2048 blocks of 8."""
FULL_SCANS: Final = 2.5
"""Keys of the full scans of a step over the context: three of every second token, one of all."""
FILTERED_SCANS: Final = 4
WINDOW_ONLY: Final = 2 / 40
"""The share of layers without compressed entries; they attend to a fifth of the keys."""
KEPT: Final = 140
"""Tokens of a prompt that the decoder half computes."""

_CURVES: Final = (
    "linears", "hyper", "small", "attend", "attend_prefill", "draft", "head", "sampler", "host",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Curve:
    """Microseconds by size: straight between points, level below the first, the last slope after.

    how  where the values are from
    """

    rows: tuple[float, ...]
    us: tuple[float, ...]
    how: str

    def __post_init__(self) -> None:
        """Check that sizes rise."""
        rising = all(a < b for a, b in zip(self.rows, self.rows[1:], strict=False))
        if len(self.rows) != len(self.us) or not self.rows or not rising or min(self.us) < 0:
            raise ValueError(f"a curve needs rising sizes and a time for each, not {self}")

    def __call__(self, rows: ArrayLike) -> Floats:
        """Return the time at each size; nothing takes no time."""
        wanted = np.asarray(rows, np.float64)
        found = np.interp(wanted, self.rows, self.us)
        if len(self.rows) > 1:
            slope = (self.us[-1] - self.us[-2]) / (self.rows[-1] - self.rows[-2])
            found = found + slope * np.maximum(wanted - self.rows[-1], 0)
        return np.where(wanted > 0, found, 0.0)


@dataclass(frozen=True, slots=True)
class Fabric:
    """Links between ranks: a start-up time each way and bytes per microsecond and direction.

    reach   ranks that the fast links join; beyond them `beyond` counts, each row once a node
    """

    reach: int
    dispatch_us: float
    combine_us: float
    bytes_us: float
    how: str
    beyond: Fabric | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """The fit of grouped experts: base + |(read x experts hit, row x rows padded to tiles)|."""

    base_us: float
    read_us: float
    row_us: float
    tile: int
    how: str


@dataclass(frozen=True)
class Times:
    """The times of one kind of device, in microseconds.

    curves          name -> curve by rows (the draft's and the host's by sequences)
    index_ps        picoseconds for a row and key while decoding, while prefilling, and to select
    expert_bytes    weights of one expert; and the bytes of a row on its way there and back
    """

    name: str
    curves: Mapping[str, Curve]
    index_ps: tuple[float, float, float]
    experts_fit: Experts
    expert_bytes: int
    dispatch_bytes: int
    combine_bytes: int
    fabrics: Mapping[str, Fabric]

    def decode_layer(self, rows: Floats, keys: Floats) -> Floats:
        """Return what ranks need outside experts and exchange, an average layer of 40.

        rows  [R] rows of a step, padding included
        keys  [R] sum over rows of the tokens before them
        """
        curve = self.curves
        dense = curve["linears"](rows) + curve["hyper"](rows) + curve["small"](rows)
        attend = curve["attend"](rows) * (1 - 0.8 * WINDOW_ONLY)
        scanned = FULL_SCANS * keys + FILTERED_SCANS * np.minimum(keys, FILTERED_KEYS * rows)
        index = scanned * (self.index_ps[0] + self.index_ps[2]) * 1e-6 / 40
        return np.asarray(dense + attend + index)

    def prefill_layer(self, rows: Floats, keys: Floats, second_half: bool) -> Floats:
        """Return the same for prefill, an average layer of either half of the model.

        The first half owns three scans of every second token, the second one of all and four
        filtered ones.
        """
        curve = self.curves
        dense = curve["linears"](rows) + curve["hyper"](rows) + curve["small"](rows)
        attend = curve["attend_prefill"](rows)
        scanned = 1.5 * keys
        if second_half:
            scanned = keys + FILTERED_SCANS * np.minimum(keys, FILTERED_KEYS * rows)
        index = scanned * (self.index_ps[1] + self.index_ps[2]) * 1e-6 / 20
        return dense + attend + index

    def experts(self, rows: Floats) -> Floats:
        """Return the time of the experts of each rank [..., N] for rows [..., slots, N]."""
        fit = self.experts_fit
        hit = (rows > 0.5).sum(axis=-2, dtype=np.float32)
        tiles = rows * np.float32(1 / fit.tile)
        padded = np.ceil(tiles, out=tiles).sum(axis=-2) * fit.tile
        spent = fit.base_us + np.hypot(fit.read_us * hit, fit.row_us * padded)
        return np.where(hit > 0, spent, 0.0)

    def exchange(
        self, fabric: Fabric, num_ranks: int, slots: int, active: int, sent: Floats, got: Floats
    ) -> Floats:
        """Return the time of dispatch and combine together for groups of ranks.

        sent  [..., N] tokens of each rank; got  [..., N] choices that its experts receive
        A row goes out once to each distinct rank (or node) that it needs, in expectation; every
        choice comes back unsummed, as in the engine.
        """
        if num_ranks == 1:
            return np.zeros(np.broadcast_shapes(sent.shape, got.shape)[:-1])
        reached, link = num_ranks, fabric
        if num_ranks > fabric.reach and fabric.beyond is not None:
            reached, link = -(-num_ranks // fabric.reach), fabric.beyond
        beyond = 1 - 1 / reached
        away = distinct_ranks(reached, slots, active) * beyond
        tokens = np.maximum(sent.max(axis=-1), got.max(axis=-1) / active)
        moved = away * self.dispatch_bytes + active * beyond * self.combine_bytes
        return np.asarray(link.dispatch_us + link.combine_us + tokens * (moved / link.bytes_us))

    @cached_property
    def row_us(self) -> float:
        """Return what one more row of an expert takes when there are many."""
        return self.experts_fit.row_us

    def with_curves(self, **curves: Curve) -> Times:
        """Return the same with some curves measured anew."""
        unknown = sorted(set(curves) - set(_CURVES))
        if unknown:
            raise ConfigError(f"no such curves: {', '.join(unknown)}; there are {_CURVES}")
        return replace(self, curves={**self.curves, **curves})


def distinct_ranks(num_ranks: int, slots: int, active: int) -> float:
    """Return the mean number of distinct ranks that hold the experts of a token, chosen evenly.

    Each rank has slots / num_ranks of them: N (1 - C(P - P/N, K) / C(P, K)).
    """
    held = slots / num_ranks
    missed = 1.0
    for i in range(active):
        missed *= max(0.0, slots - held - i) / (slots - i)
    return num_ranks * (1 - missed)


def load_times(name: str) -> Times:
    """Read a device's times: a packaged name (`h200`) or a file of the same form.

    Raises ConfigError saying what is missing or wrong.
    """
    packaged = files("deepinfer") / "data" / "sim" / f"{name}.json"
    try:
        text = (packaged if packaged.is_file() else Path(name)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"no times of a device '{name}': give h200, or a file of that form ({error})"
        ) from error
    try:
        found = json.loads(text)
        if found["format"] != 1:
            raise ValueError(f"format {found['format']}, expected 1")
        times = Times(
            name=str(found["name"]),
            curves={
                key: Curve(tuple(part["rows"]), tuple(part["us"]), str(part["how"]))
                for key, part in found["curves"].items()
            },
            index_ps=tuple(float(found["index"][f"{k}_ps"]) for k in _INDEX),  # type: ignore[arg-type]
            experts_fit=Experts(**found["experts"]),
            expert_bytes=int(found["expert_bytes"]),
            dispatch_bytes=int(found["dispatch_bytes"]),
            combine_bytes=int(found["combine_bytes"]),
            fabrics={key: _fabric(part) for key, part in found["fabrics"].items()},
        )
        missing = sorted(set(_CURVES) - set(times.curves))
        if missing:
            raise ValueError(f"curves missing: {', '.join(missing)}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"times of the device '{name}': {error!r}") from error
    if not all(math.isfinite(us) for curve in times.curves.values() for us in curve.us):
        raise ConfigError(f"times of the device '{name}': not every time is finite")
    return times


_INDEX: Final = ("decode", "prefill", "select")


def _fabric(part: Mapping[str, object]) -> Fabric:
    beyond = part.get("beyond")
    how = str(part.get("how", ""))
    number = {key: float(part[key]) for key in ("dispatch_us", "combine_us", "gb_s")}  # type: ignore[arg-type]
    return Fabric(
        reach=int(part.get("reach", 0)),  # type: ignore[call-overload]
        dispatch_us=number["dispatch_us"],
        combine_us=number["combine_us"],
        bytes_us=number["gb_s"] * 1e3,
        how=how,
        beyond=_fabric(beyond) if isinstance(beyond, Mapping) else None,
    )
