"""What placing experts by their load is worth: on made-up loads, and on a checkpoint's own routing.

The figure is the load of the busiest rank over the mean, both summed over layers and steps that the
plan has not seen: 1 is perfect, and it is the factor by which experts take longer than they need.
No rank runs here, loads are counted.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import NormalDist
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.bench.evaldata import Document, generated_documents, held_out_documents, pick
from deepinfer.bench.evalmodel import EvalModel
from deepinfer.bench.evaluate import Row, cut
from deepinfer.bench.machine import describe_machine, describe_versions
from deepinfer.bench.report import Figure, Record
from deepinfer.config.engine import EngineConfig
from deepinfer.config.mesh import num_slots
from deepinfer.parallel.balance import plan_by_steps, plan_by_totals
from deepinfer.parallel.placement import (
    Placement,
    balancedness,
    choose_slots,
    initial_placement,
    token_keys,
)

__all__ = [
    "SIZES",
    "Routing",
    "collect_routing",
    "measure_balance",
    "steps_of",
    "synthetic_loads",
]

Ints = NDArray[np.int64]

SIZES: Final = ((8, 16), (16, 16), (32, 32), (64, 0), (64, 64), (128, 128))
"""Ranks and redundant copies of the table."""
_HOT: Final = {"mild": (4.0, 0.05), "strong": (12.0, 0.25)}
"""The hottest expert over the mean, and how much every expert's share changes from step to step."""

_EXPERTS: Final = 384
_ROWS: Final = 4096 * 6
_SEEN, _UNSEEN = 16, 8
_SOURCES: Final = {"natural": (256, 64), "generated": (128, 32)}
"""Tokens of a text, and how many texts go along together."""
_TOKENS: Final = (1, 4, 8, 16, 32)
_HOW: Final = "busiest rank over mean, summed over layers and unseen steps"


def synthetic_loads(skew: Literal["mild", "strong"], seed: int, steps: int) -> Ints:
    """Return loads [S, 1, 384] of 4,096 tokens with 6 experts each.

    Shares are log-normal, the largest 4 or 12 times the mean; each step they change by a log-normal
    factor of their own, and rows are drawn from them.
    """
    hot, change = _HOT[skew]
    rng = np.random.default_rng(seed)
    base = rng.permutation(_quantiles()) * _spread(hot)
    found = np.empty((steps, 1, _EXPERTS), np.int64)
    for step in range(steps):
        share = np.exp(base + rng.normal(0, change, _EXPERTS))
        found[step, 0] = rng.multinomial(_ROWS, share / share.sum())
    return found


def _quantiles() -> NDArray[np.float64]:
    normal = NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / _EXPERTS) for i in range(_EXPERTS)])


def _spread(hot: float) -> float:
    """Return the spread of logarithms with which the largest share is `hot` times the mean."""
    low, high, at = 0.0, 3.0, _quantiles()
    for _ in range(50):
        middle = (low + high) / 2
        if math.exp(middle * at[-1]) < hot * float(np.exp(middle * at).mean()):
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True)
class Routing:
    """What a checkpoint chose for texts of one length: chosen [texts, layers, T, K]."""

    chosen: NDArray[np.int16]
    num_experts: int


def steps_of(routing: Routing, sequences: int, tokens: int) -> Iterator[tuple[Ints, Ints]]:
    """Yield steps as experts chosen [layers, rows, K] and the rows' (text, position) [rows, 2].

    So many texts go along together and give so many tokens each a step; when they end the next
    ones follow.
    """
    texts, _, length, _ = routing.chosen.shape
    for first in range(0, texts - sequences + 1, sequences):
        group = routing.chosen[first : first + sequences]
        for start in range(0, length - tokens + 1, tokens):
            part = group[:, :, start : start + tokens].astype(np.int64)
            rows = part.transpose(1, 0, 2, 3).reshape(part.shape[1], -1, part.shape[3])
            text, at = np.divmod(np.arange(sequences * tokens), tokens)
            yield rows, np.stack([text + first, at + start], axis=1)


def collect_routing(folder: Path, engine: EngineConfig, texts: int, source: str) -> Routing:
    """Run the checkpoint over packaged texts and keep what its routers chose.

    source  `natural` for held-out text, `generated` for JSON and chats about JSON
    """
    model = EvalModel(folder, engine)
    length, _ = _SOURCES[source]
    documents: Sequence[Document] = held_out_documents()
    if source == "generated":
        documents = [*generated_documents("json"), *generated_documents("json_chat")]
    rows = [
        row
        for document in documents
        for row in cut(document, model.tokenizer, length - 1)
        if len(row.token_ids) == length
    ]
    kept = sorted(pick(rows, texts, _name), key=_order)
    found = []
    for row in kept:
        trace: dict[str, torch.Tensor] = {}
        model.streams(1, length).prefill(0, row.token_ids, trace)
        found.append(trace["route_idx"].numpy().astype(np.int16))
    return Routing(np.stack(found), model.config.n_routed_experts)


def _name(row: Row) -> str:
    return f"{row.source}/{row.name}"


def _order(row: Row) -> bytes:
    """Return a key that mixes texts of all sources, the same everywhere."""
    return hashlib.sha256(b"order " + _name(row).encode()).digest()


def measure_balance(
    model: str,
    folder: Path,
    engine: EngineConfig,
    texts: int,
    seeds: int,
    tell: Callable[[str], None],
) -> list[Record]:
    """Return the figures of both parts as records; one value a seed or, for real routing, one."""
    figures = list(_synthetic(seeds, tell))
    for source, (length, sequences) in _SOURCES.items():
        tell(f"routing of {source} text, at most {texts} texts of {length} tokens")
        routing = collect_routing(folder, engine, texts, source)
        figures += _real(source, routing, sequences)
    when = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return [
        Record(
            suite="balance",
            figure=figure,
            model=model if " real " in figure.name else "synthetic",
            when=when,
            threads=1,
            machine=describe_machine(),
            versions=describe_versions(),
        )
        for figure in figures
    ]


def _figure(name: str, values: Sequence[float], how: str) -> Figure:
    return Figure(
        name=name, unit="max/mean", better="lower", values=tuple(values), warmup=0, how=how
    )


def _synthetic(seeds: int, tell: Callable[[str], None]) -> Iterator[Figure]:
    skews: tuple[Literal["mild", "strong"], ...] = ("mild", "strong")
    for skew in skews:
        loads = [synthetic_loads(skew, seed, _SEEN + _UNSEEN) for seed in range(seeds)]
        for ranks, copies in SIZES:
            tell(f"{skew} skew, EP{ranks} + {copies} copies")
            slots = _EXPERTS + copies
            found: dict[str, list[float]] = {}
            for each in loads:
                seen, unseen = each[:_SEEN], each[_SEEN:]
                plans = {
                    "none": initial_placement(1, _EXPERTS, ranks, copies),
                    "totals": plan_by_totals(seen, ranks, slots),
                    "steps": plan_by_steps(seen, ranks, slots),
                }
                for name, plan in plans.items():
                    found.setdefault(name, []).append(1 / balancedness(plan, unseen))
                found.setdefault("steps, seen", []).append(1 / balancedness(plans["steps"], seen))
            for name, values in found.items():
                yield _figure(
                    f"{skew} EP{ranks}+{copies} {name}",
                    values,
                    f"{_HOW}; {_SEEN} steps seen, {_UNSEEN} unseen, one value a seed",
                )


def _real(source: str, routing: Routing, sequences: int) -> Iterator[Figure]:
    for ranks in (4, 8):
        slots = num_slots(routing.num_experts, ranks, routing.num_experts // 4)
        for tokens in _TOKENS:
            steps = list(steps_of(routing, sequences, tokens))
            loads = np.stack([_counts(rows, routing.num_experts) for rows, _ in steps])
            cut = len(loads) - len(loads) // 4
            layers = loads.shape[1]
            start = initial_placement(layers, routing.num_experts, ranks)
            plan = plan_by_steps(loads[:cut], ranks, slots)
            spread = {
                "none": 1 / balancedness(start, loads[cut:]),
                "totals": 1 / balancedness(plan_by_totals(loads[:cut], ranks, slots), loads[cut:]),
                "steps": 1 / balancedness(plan, loads[cut:]),
                "steps, copies drawn": _drawn(plan, steps[cut:]),
            }
            for name, value in spread.items():
                yield _figure(
                    f"{source} real EP{ranks} {sequences * tokens} tokens {name}",
                    [value],
                    f"{_HOW}; {routing.num_experts} experts in {slots} slots "
                    f"({routing.num_experts} without a plan), {cut} steps seen, "
                    f"{len(loads) - cut} unseen after them",
                )


def _counts(rows: Ints, num_experts: int) -> Ints:
    return np.stack([np.bincount(layer.ravel(), minlength=num_experts) for layer in rows])


def _drawn(plan: Placement, steps: Sequence[tuple[Ints, Ints]]) -> float:
    """Return the figure with every token sent to the copy that its key chooses."""
    peak = total = 0
    for rows, where in steps:
        keys = np.concatenate([token_keys(int(text), at[None]) for text, at in where])
        for layer, chosen in enumerate(rows):
            ranks = choose_slots(plan, layer, chosen, keys) // plan.slots_per_rank
            loads = np.bincount(ranks.ravel(), minlength=plan.num_ranks)
            peak += int(loads.max())
            total += int(loads.sum())
    return peak * plan.num_ranks / total
