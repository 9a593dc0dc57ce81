"""Times of a simulated device from steps that `bench slice` and `bench decode` took apart.

A step of a record is split by op and by kind of layer. Its parts become the simulator's: experts
are fitted, index scans get a time for a row and key, everything else of a layer becomes a curve by
rows, drafts a curve by sequences, the rest the head. A link is fitted to what `bench.exchange` has
measured over `symm` in a CUDA graph.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deepinfer.bench.modelbench import choose_layers
from deepinfer.bench.steps import StepRecord
from deepinfer.config import ModelConfig
from deepinfer.config.load import released_config
from deepinfer.errors import ConfigError
from deepinfer.sim.times import FILTERED_KEYS, Curve, Experts, Times

__all__ = [
    "Kind", "drawn_experts", "fitted_link", "fitted_times", "is_decode", "kind_of", "scanned_keys",
]  # fmt: skip

Floats = NDArray[np.floating]
Kind = tuple[object, ...]
"""What records must share to say something of each other: kernels, settings, drafts or none."""

_INDEX: Final = ("paged_index_score", "select_topk", "select_blocks")
_SHARES: Final = {
    "linears": ("fp8_linear", "grouped_linear", "dense_linear"),
    "hyper": ("hyper_site", "hyper_mix", "hyper_expand", "hyper_collapse"),
    "attend": ("paged_attention",),
}
_DRAWS: Final = 16


def is_decode(record: StepRecord) -> bool:
    """Whether a record is a decode step, of a whole model or of a slice."""
    prompt = bool(record.replay) or (record.context == 0 and record.rows > 64)
    return record.form in ("decode", "slice") and not prompt


def kind_of(record: StepRecord) -> Kind:
    """Return what steps must share to be compared."""
    drafts = "draft" in record.kinds if record.kinds else record.rows > 1
    used = tuple(tuple(each) for each in record.used)
    return (used, tuple(sorted((k, str(v)) for k, v in record.settings.items())), drafts)


def drawn_experts(held: int, pairs: float) -> Floats:
    """Return rows of each held expert [draws, held, 1] when pairs fall evenly on them."""
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(round(pairs), np.full(held, 1 / held), _DRAWS)
    return drawn.astype(np.float32)[..., None]


def scanned_keys(config: ModelConfig, depth: int, rows: int, context: int) -> float:
    """Return the keys that the index layers of a model of `depth` layers score for all rows."""
    filtered = min(context, FILTERED_KEYS)
    each = {("full", 2): context / 2, ("full", 1): context, ("reindex", 1): filtered}
    layers = (config.layers[i] for i in choose_layers(config, depth))
    return rows * sum(each.get((layer.kind, layer.ratio), 0.0) for layer in layers)


@dataclass(frozen=True, slots=True)
class _Parts:
    """One measured step, microseconds: of all its layers, and what is beside them."""

    record: StepRecord
    layers_us: float
    experts_us: float
    index_us: float
    draft_us: float
    ends_us: float
    scanned: float

    @property
    def rows(self) -> int:
        return self.record.sequences * self.record.rows


def _parts(record: StepRecord, config: ModelConfig) -> _Parts:
    scale = record.step_us / sum(record.ops.values())  # ops ran one by one, the step in a graph
    layers = [config.layers[i] for i in choose_layers(config, record.depth)]
    of_layers = sum(record.kinds[f"{layer.kind} {layer.ratio}"] for layer in layers)
    draft = record.kinds.get("draft", 0.0) * config.num_nextn_predict_layers
    rows = record.sequences * record.rows
    return _Parts(
        record=record,
        layers_us=scale * of_layers,
        experts_us=scale * record.ops["routed_experts"],
        index_us=scale * sum(record.ops.get(op, 0.0) for op in _INDEX),
        draft_us=scale * draft,
        ends_us=record.step_us - scale * (of_layers + draft),
        scanned=scanned_keys(config, record.depth, rows, record.context),
    )


def fitted_times(
    times: Times, records: Sequence[StepRecord], kind: Kind | None = None
) -> tuple[Times, list[str]]:
    """Return times of the device that steps of one kind were measured on, and what was fitted.

    kind  None is the one that most steps with drafts are of
    Raises ConfigError when fewer than two sizes of such steps were taken apart.
    """
    config = released_config()
    split = [r for r in records if is_decode(r) and r.ops]
    if kind is None:
        drafting = [kind_of(r) for r in split if "draft" in r.kinds]
        kind = max(drafting, key=drafting.count, default=None)
    found = [r for r in split if kind_of(r) == kind]
    if len({r.sequences * r.rows for r in found}) < 2:
        raise ConfigError("times are fitted to decode steps of at least two sizes, with their ops")
    parts = sorted((_parts(r, config) for r in found), key=lambda p: p.rows)
    experts, worst = _experts(times, parts, config)
    times = replace(times, experts_fit=experts)
    slope = _slope([p.scanned for p in parts], [p.index_us for p in parts]) * 1e6
    select = min(times.index_ps[2], slope)
    if slope > 0:
        times = replace(times, index_ps=(slope - select, times.index_ps[1], select))
    told = [f"experts within {worst:.0%}", f"index {slope:.1f} ps for a row and key"]
    points: dict[str, dict[int, list[float]]] = {}

    def note(curve: str, size: int, us: float) -> None:
        points.setdefault(curve, {}).setdefault(size, []).append(max(0.0, us))

    for p in parts:
        r, depth = p.record, p.record.depth
        spent = _mean(
            times, -(-config.n_routed_experts // r.ranks), p.rows * config.num_experts_per_tok
        )
        dense = p.layers_us / depth - spent - p.scanned * slope * 1e-6 / depth
        ops = {name: sum(r.ops.get(op, 0.0) for op in ops) for name, ops in _SHARES.items()}
        other = sum(r.ops.values()) - r.ops["routed_experts"] - sum(ops.values())
        whole = other + sum(ops.values())
        for name, us in {**ops, "small": other}.items():
            share = dense * us / whole
            note(name, p.rows, share / _ATTEND if name == "attend" else share)
        drafted = r.sequences * config.dspark_block_size if p.draft_us else 0
        note("head", p.rows, p.ends_us * p.rows / (p.rows + drafted))
        if drafted:
            ends = p.ends_us * drafted / (p.rows + drafted)
            note("draft", r.sequences, p.draft_us + ends)
    how = "fitted to measured steps"
    curves = {
        name: _shaped(times.curves[name], {n: float(np.mean(us)) for n, us in sizes.items()}, how)
        for name, sizes in points.items()
    }
    curves["sampler"] = curves["host"] = Curve((1.0,), (0.0,), how)  # in the head's
    told.append(f"{len(parts)} steps of {', '.join(str(p.rows) for p in parts)} rows")
    return times.with_curves(**curves), told


def _shaped(stated: Curve, points: Mapping[int, float], how: str) -> Curve:
    """Return a curve through measured points that bends between and beyond as the stated one.

    What multiplies the stated curve goes in steps of the logarithm of the size, and is level
    outside the measured sizes.
    """
    at = np.array(sorted(points), np.float64)
    factors = np.array([points[int(size)] for size in at]) / stated(at)
    sizes = np.array(sorted({*at.tolist(), *stated.rows}))
    us = stated(sizes) * np.interp(np.log(sizes), np.log(at), factors)
    return Curve(tuple(sizes.tolist()), tuple(us.tolist()), how)


_ATTEND: Final = 1 - 0.8 * 2 / 40  # as `Times.decode_layer` takes the curve


def _mean(times: Times, held: int, pairs: float) -> float:
    return float(times.experts(drawn_experts(held, pairs)).mean())


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the slope of the best line, or of the line through zero for one point."""
    if len(set(x)) < 2:
        return y[0] / x[0]
    return float(np.polyfit(x, y, 1)[0])


def _experts(times: Times, parts: Sequence[_Parts], config: ModelConfig) -> tuple[Experts, float]:
    """Return the form of `Times.experts` that lies nearest to the steps, and how far it is off."""
    share = config.dspark_n_routed_experts / config.n_routed_experts
    stated = times.experts_fit
    forms: list[tuple[float, float, Experts]] = []
    for tile in (16, 32, 64):
        for base in (0.0, 10.0, 20.0, 40.0, 60.0):
            read, row = np.meshgrid(np.geomspace(1.5, 15, 60), np.geomspace(0.01, 0.6, 60))
            off = np.zeros_like(read)
            for p in parts:
                held = -(-config.n_routed_experts // p.record.ranks)
                terms = [(p.record.depth, held, p.rows * config.num_experts_per_tok)]
                if p.draft_us:
                    pairs = p.record.sequences * config.dspark_block_size
                    pairs *= config.dspark_num_experts_per_tok
                    count = config.num_nextn_predict_layers
                    terms.append((count, max(1, round(held * share)), pairs))
                told = np.zeros_like(read)
                for count, held, pairs in terms:
                    drawn = drawn_experts(held, pairs)[..., 0]
                    hit = (drawn > 0).sum(1)
                    padded = (np.ceil(drawn / tile) * tile).sum(1)
                    spent = np.hypot(read[..., None] * hit, row[..., None] * padded).mean(-1)
                    told += count * (base + spent)
                off = np.maximum(off, np.abs(told / p.experts_us - 1))
            strange = np.abs(np.log(read / stated.read_us)) + abs(base - stated.base_us) / 50
            strange = strange + np.abs(np.log(row / stated.row_us)) / 2
            worth = off + _STRANGE * strange
            place = np.unravel_index(int(worth.argmin()), off.shape)
            form = Experts(base, float(read[place]), float(row[place]), tile, "")
            forms.append((float(worth[place]), float(off[place]), form))
    _, off_by, best = min(forms, key=lambda each: each[0])
    return replace(best, how=f"fitted to measured steps within {off_by:.0%}"), off_by


_STRANGE: Final = 0.02
"""What a form of experts costs that reads weights unlike the stated one: few sizes fit many."""


def fitted_link(times: Times, file: Path) -> tuple[Times, str]:
    """Return times whose fabric `pair` is what `bench.exchange` has measured over `symm`.

    Raises ConfigError when the file holds no two sizes of it.
    """
    points: dict[int, float] = {}
    try:
        for line in file.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            if entry.get("what") == "symm" and "graph_us" in entry and "bytes" in entry:
                points[int(entry["bytes"])] = float(entry["graph_us"])
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file}: no lines of bench.exchange ({error})") from error
    if len(points) < 2:
        raise ConfigError(f"{file}: give at least two sizes of symm in a graph, with their bytes")
    sizes = np.array(sorted(points))
    us = np.array([points[int(size)] for size in sizes])
    slope, start = (float(each) for each in np.polyfit(sizes, us, 1, w=1 / us))
    link = replace(
        times.fabrics["pair"], dispatch_us=max(0.0, start / 2), combine_us=max(0.0, start / 2),
        bytes_us=1 / slope, how="fitted to exchanges of two GPUs",
    )  # fmt: skip
    told = f"links: {max(0.0, start):.0f} us and {1e-3 / slope:.0f} GB/s"
    return replace(times, fabrics={**times.fabrics, "pair": link}), told
