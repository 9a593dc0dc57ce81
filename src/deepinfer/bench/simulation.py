"""Questions put to the simulator: a setting swept, several seeds, means with their confidence."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from deepinfer.bench.machine import describe_machine, describe_versions
from deepinfer.bench.report import Figure, Record
from deepinfer.errors import ConfigError
from deepinfer.sim.cluster import simulate
from deepinfer.sim.prefill import simulate_prefill
from deepinfer.sim.settings import Settings
from deepinfer.sim.times import load_times

__all__ = [
    "STUDIES",
    "Line",
    "Point",
    "Study",
    "interval",
    "panels_of",
    "records_of",
    "run_study",
    "spelled",
]

_T975: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip

_UNITS: Final = {
    "tokens_per_s": ("tokens/s of a GPU", "higher"),
    "user_tokens_per_s": ("tokens/s of a request", "higher"),
    "step_ms": ("ms", "lower"),
    "balance": ("mean/max", "higher"),
    "wait": ("share of the time", "lower"),
    "wasted": ("share of the rows", "lower"),
    "verified_length": ("rows of a sequence", "higher"),
    "exchange_share": ("share of a step", "lower"),
    "prompt_tokens_per_s": ("prompt tokens/s of a GPU", "higher"),
    "first_token_ms": ("ms", "lower"),
}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % confidence interval (Student's t)."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.inf
    t = _T975[min(len(values) - 2, len(_T975) - 1)]
    return mean, t * statistics.stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True, slots=True)
class Point:
    """One setting of a line: its place on the axis and the values of each seed by name."""

    at: float
    values: dict[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Line:
    """One way of doing it along the axis."""

    label: str
    points: tuple[Point, ...]


Run = Callable[[int], dict[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One question.

    axis, log   what is swept, and whether the axis is logarithmic
    shown       values that are drawn and kept
    lines       label, and for each place on the axis what to run from a seed
    base        settings of every point
    """

    question: str
    axis: str
    log: bool
    shown: tuple[str, ...]
    lines: Callable[[Settings], Iterator[tuple[str, Sequence[tuple[float, Run]]]]]
    base: dict[str, object]


def _runner(settings: Settings) -> Run:
    times = load_times(settings.device)
    return lambda seed: simulate(settings, seed, times).values()


def _prefill_runner(settings: Settings, context: int, chunk: int) -> Run:
    times = load_times(settings.device)
    return lambda seed: simulate_prefill(settings, context, chunk, seed, times)


def _width(base: Settings) -> Iterator[tuple[str, Sequence[tuple[float, Run]]]]:
    for label, fabric, overlap in (
        ("node links, network beyond", "node", 0.0),
        ("the same, behind shared experts", "node", 1.0),
        ("one domain", "domain", 0.0),
    ):
        yield label, [
            (width, _runner(base.but(
                gpus=max(width, base.gpus), expert=width, copies=copies, fabric=fabric,
                overlap=overlap)))
            for width, copies in ((8, 16), (16, 16), (32, 32), (64, 64), (128, 128), (256, 128))
        ]  # fmt: skip


def _redundancy(base: Settings) -> Iterator[tuple[str, Sequence[tuple[float, Run]]]]:
    for hot in (4.0, 12.0):
        for policy in ("none", "steps"):
            name = "no plan" if policy == "none" else "planned"
            yield f"hottest {hot:g}x, {name}", [
                (copies, _runner(base.but(copies=copies, hot=hot, policy=policy,
                                          change=0.05 if hot < 8 else 0.25)))
                for copies in (0, 64, 128, 192, 256)
            ]  # fmt: skip


def _skew(base: Settings) -> Iterator[tuple[str, Sequence[tuple[float, Run]]]]:
    for policy, name in (("none", "no plan"), ("totals", "by totals"), ("steps", "by steps")):
        yield (
            name,
            [
                (hot, _runner(base.but(hot=hot, policy=policy)))
                for hot in (1.0, 2.0, 4.0, 8.0, 16.0)
            ],
        )


def _verification(base: Settings) -> Iterator[tuple[str, Sequence[tuple[float, Run]]]]:
    for label, verify, lag in (
        ("no drafts", "none", 0),
        ("V0 all drafts", "fixed", 0),
        ("V1 each rank", "rank", 0),
        ("V2 the group", "group", 0),
        ("V3 the group, 2 steps late", "group", 2),
    ):
        yield (
            label,
            [
                (seqs, _runner(base.but(seqs=seqs, verify=verify, lag=lag)))
                for seqs in (8, 32, 96, 192)
            ],
        )


def _context(base: Settings) -> Iterator[tuple[str, Sequence[tuple[float, Run]]]]:
    for label, context, chunk in (
        ("chunks of 2048", 1, 2048),
        ("chunks of 8192", 1, 8192),
        ("2 ranks share a prompt", 2, 8192),
        ("4 ranks share a prompt", 4, 8192),
        ("8 ranks share a prompt", 8, 8192),
    ):
        yield (
            label,
            [
                (length, _prefill_runner(base.but(prompt=float(length)), context, chunk))
                for length in (1024, 4096, 16384, 65536, 131072)
            ],
        )


_DOMAIN: Final[dict[str, object]] = {
    "gpus": 64, "expert": 64, "fabric": "domain", "counted_layers": 8,
}  # fmt: skip
"""64 ranks that fast links join."""
_SETTLED: Final[dict[str, object]] = {**_DOMAIN, "window": 96, "steps": 200, "warmup": 140}
"""The same, counted once the first plan is in place."""

STUDIES: Final[dict[str, Study]] = {
    "ep-width": Study(
        question="How many ranks should share the experts?",
        axis="ranks of an expert group",
        log=True,
        shown=("tokens_per_s", "exchange_share", "balance"),
        lines=_width,
        base={"gpus": 8, "expert": 8, "copies": 16, "counted_layers": 8, "policy": "steps",
              "window": 32, "steps": 120,
              "warmup": 60, "prompt": 32768.0},
    ),
    "redundancy": Study(
        question="How many copies of experts are worth their memory (64 ranks, one domain)?",
        axis="redundant experts of a layer",
        log=False,
        shown=("tokens_per_s", "balance", "wait"),
        lines=_redundancy,
        base=_SETTLED,
    ),
    "skew": Study(
        question="What does a hot expert cost, and what does placing bring (64 + 64, one domain)?",
        axis="hottest expert over the mean",
        log=True,
        shown=("tokens_per_s", "balance", "wait"),
        lines=_skew,
        base=_SETTLED,
    ),
    "verification": Study(
        question="Who should choose how many drafts are verified (64 ranks, one domain)?",
        axis="sequences of a rank",
        log=True,
        shown=("tokens_per_s", "user_tokens_per_s", "wasted"),
        lines=_verification,
        base={**_DOMAIN, "window": 16, "steps": 90, "warmup": 40, "difficulty": 1.0, "doubt": 1.0,
              "output": 128.0, "output_spread": 0.6, "prompt": 16384.0, "prompt_spread": 0.5},
    ),
    "context": Study(
        question="Should ranks share a prompt, or each take its own in chunks (8 GPUs, EP8)?",
        axis="median length of prompts",
        log=True,
        shown=("prompt_tokens_per_s", "first_token_ms"),
        lines=_context,
        base={"gpus": 8, "expert": 8, "copies": 16, "counted_layers": 8, "prompt_spread": 0.5,
              "requests": 96, "hot": 2.0, "policy": "none"},
    ),
}  # fmt: skip


def run_study(
    name: str,
    seeds: int,
    tell: Callable[[str], None] = lambda text: None,
    changed: dict[str, object] | None = None,
) -> list[Line]:
    """Run a study, every point from so many seeds; raises ConfigError for an unknown one.

    changed  settings of the study to replace
    """
    if name not in STUDIES:
        raise ConfigError(f"no study '{name}'; there are {', '.join(STUDIES)}")
    study = STUDIES[name]
    base = Settings(**{**study.base, **(changed or {})})  # type: ignore[arg-type]
    lines = []
    for label, runs in study.lines(base):
        points = []
        for at, run in runs:
            tell(f"{name}: {label}, {at:g}")
            found = [run(seed) for seed in range(seeds)]
            points.append(Point(at, {k: tuple(each[k] for each in found) for k in study.shown}))
        lines.append(Line(label, tuple(points)))
    return lines


def records_of(name: str, lines: Sequence[Line]) -> list[Record]:
    """Return every value of a study as records, one value a seed."""
    when = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    study = STUDIES[name]
    records = []
    for line in lines:
        for point in line.points:
            for key, values in point.values.items():
                unit, better = _UNITS[key]
                figure = Figure(
                    name=f"{name}: {line.label}, {point.at:g}: {key}",
                    unit=unit,
                    better="higher" if better == "higher" else "lower",
                    values=values,
                    warmup=0,
                    how=f"simulated, one value a seed; {study.axis} = {point.at:g}",
                )
                records.append(
                    Record(
                        suite=f"sim {name}",
                        figure=figure,
                        model="simulated",
                        when=when,
                        threads=1,
                        machine=describe_machine(),
                        versions=describe_versions(),
                    )
                )
    return records


def spelled(name: str, lines: Sequence[Line]) -> str:
    """Lay a study out as a table: a line for each way and value, mean and confidence."""
    study = STUDIES[name]
    out = [study.question]
    for key in study.shown:
        unit, better = _UNITS[key]
        places = [point.at for point in lines[0].points]
        out.append(f"\n{key}: {unit}, {better} is better; by {study.axis}")
        out.append("  " + " " * 28 + "".join(f"{at:>18g}" for at in places))
        for line in lines:
            cells = []
            for point in line.points:
                mean, half = interval(point.values[key])
                width = "?"
                if math.isfinite(half):
                    width = f"{half:,.0f}" if half >= 10 else f"{half:.2g}"
                cells.append(f"{_number(mean)} ± {width}".rjust(18))
            out.append(f"  {line.label:<28}" + "".join(cells))
    return "\n".join(out)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def panels_of(
    name: str, lines: Sequence[Line]
) -> list[tuple[str, list[tuple[str, list[float], list[float], list[float]]]]]:
    """Return what is drawn: heading, and for each line its places, means and confidence."""
    panels = []
    for key in STUDIES[name].shown:
        curves = []
        for line in lines:
            found = [interval(point.values[key]) for point in line.points]
            halves = [half if math.isfinite(half) else 0.0 for _, half in found]
            places = [point.at for point in line.points]
            curves.append((line.label, places, [mean for mean, _ in found], halves))
        panels.append((f"{key}: {_UNITS[key][0]}", curves))
    return panels
