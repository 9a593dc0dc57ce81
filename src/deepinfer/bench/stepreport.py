"""What `deepinfer bench` prints of steps: a line for each, then its parts (pure).

Goals are marks for one H200 that runs rank 0 of EP8 at full depth; figures of a slice never go
without the statement of what they rest on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from deepinfer.bench.steps import StepRecord
from deepinfer.kernels.table import W4A8

__all__ = ["OVERLAPPED", "SERIAL", "STEP_GOALS", "StepGoal", "goal_of", "is_fp8", "step_table"]

SERIAL: Final = "N1, serial"
OVERLAPPED: Final = "N2, behind the shared expert"
"""The network of the goals: hidden behind work that the same batch has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGoal:
    """Output tokens a second of one GPU that a slice should reach."""

    sequences: int
    rows: int
    context: int
    fp8: bool | None
    tokens_per_s: float

    def fits(self, record: StepRecord) -> bool:
        """Whether a record is the slice that the goal speaks of."""
        return (
            record.form == "slice"
            and record.ranks == 8
            and record.depth == record.of_depth == 40
            and (record.sequences, record.rows) == (self.sequences, self.rows)
            and record.context == self.context
            and self.fp8 in (None, is_fp8(record))
        )


STEP_GOALS: Final = (
    StepGoal(sequences=32, rows=6, context=131072, fp8=True, tokens_per_s=5000),
    StepGoal(sequences=64, rows=6, context=131072, fp8=True, tokens_per_s=6500),
    StepGoal(sequences=1, rows=6, context=131072, fp8=True, tokens_per_s=3.29 / (1.6 * 6.4e-3)),
    StepGoal(sequences=32, rows=6, context=131072, fp8=False, tokens_per_s=4200),
    StepGoal(sequences=64, rows=6, context=131072, fp8=False, tokens_per_s=5900),
    StepGoal(sequences=1, rows=4096, context=0, fp8=None, tokens_per_s=26000),
)


def goal_of(record: StepRecord) -> StepGoal | None:
    """Return the goal of a record, None where none was set."""
    return next((goal for goal in STEP_GOALS if goal.fits(record)), None)


def is_fp8(record: StepRecord) -> bool:
    """Whether routed experts multiplied in e4m3."""
    return record.choices.get("routed_experts") == W4A8


def step_table(records: Sequence[StepRecord], brief: bool = False) -> str:
    """Lay records out as text.

    brief  a line for each and the statements, without the parts of each step
    """
    lines = _summary(records)
    if brief:
        texts = dict.fromkeys(
            record.statement.replace(f"a factor of {record.sync:.3f}", "the factor under `wait`")
            for record in records
            if record.statement
        )
        return "\n".join([*lines, *(f"\n{text}" for text in texts)])
    return "\n\n".join(["\n".join(lines), *("\n".join(_lines(record)) for record in records)])


_COLUMNS: Final = (
    ("step", 42), ("experts", 8), ("us", 9), ("tokens/s", 9), ("overlapped", 11), ("serial", 8),
    ("goal", 7), ("of goal", 8), ("x floor", 8), ("wait", 7), ("idle", 6), ("kernels/layer", 14),
)  # fmt: skip


def _summary(records: Sequence[StepRecord]) -> list[str]:
    """A line for each record; tokens a second with the network only for slices."""
    head = "".join(
        f"{name:<{width}}" if name == "step" else f"{name:>{width}}" for name, width in _COLUMNS
    )
    return [head, *(_line(record) for record in records)]


def _line(record: StepRecord) -> str:
    what: str = record.form
    if record.form == "slice":
        what = f"EP{record.ranks}"
    elif record.ranks > 1:
        what += f" 1/{record.ranks}"
    if record.depth < record.of_depth:
        what += f", {record.depth} layers"
    what += f", {record.sequences} x {record.rows:,} at {record.context:,}"
    goal, floor = goal_of(record), sum(record.floors.values())
    over, serial = (record.variants.get(name) for name in (OVERLAPPED, SERIAL))
    cells = [
        "W4A8" if is_fp8(record) else "exact",
        f"{record.step_us:,.0f}",
        f"{record.tokens_per_s:,.0f}",
        f"{over['tokens_per_s']:,.0f}" if over else "-",
        f"{serial['tokens_per_s']:,.0f}" if serial else "-",
        f"{goal.tokens_per_s:,.0f}" if goal else "-",
        f"{over['tokens_per_s'] / goal.tokens_per_s:.2f}" if goal and over else "-",
        f"{record.step_us / floor:.2f}" if floor else "-",
        f"{record.sync:.3f}" if record.sync else "-",
        "-" if record.idle is None else f"{record.idle:.1%}",
        f"{record.launches_per_layer:.1f}" if record.launches else "-",
    ]
    widths = [width for _, width in _COLUMNS[1:]]
    return f"{what:<42}" + "".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True))


def _lines(record: StepRecord) -> list[str]:
    where = record.machine.get("card") or record.machine.get("cpu", "?")
    what: str = record.form
    if record.form == "slice":
        what = f"slice of EP{record.ranks} ({record.slice_mode})"
    elif record.ranks > 1:
        what += f", experts of one rank of {record.ranks}"
    lines = [
        f"{what}, {where}, {record.when}",
        f"  {record.depth} of {record.of_depth} layers, {record.sequences} sequences x "
        f"{record.rows} rows, context {record.context:,}; {record.pairs:,.0f} (token, expert) "
        "pairs a layer" + (f"; replay {record.replay}" if record.replay else ""),
        f"  step {record.step_us:,.0f} us loaded, {record.burst_us:,.0f} us cool ({record.mode}); "
        f"{record.tokens_per_s:,.0f} tokens/s",
    ]
    if record.wall_us is not None and record.idle is not None:
        lines.append(f"  from step to step {record.wall_us:,.0f} us, device idle {record.idle:.1%}")
    lines += _marks(record)
    if record.settings:
        lines.append("  settings: " + ", ".join(f"{k}={v}" for k, v in record.settings.items()))
    if record.used:
        lines.append("  instead of the first: " + ", ".join(f"{o}={n}" for o, n in record.used))
    if record.launches:
        lines.append(
            f"  {record.launches} kernels, {record.launches_per_layer:.1f} a layer of the backbone"
        )
    if record.peak_bytes:
        lines.append(
            f"  memory: weights {record.weight_bytes / 1e9:.1f} GB, caches "
            f"{record.cache_bytes / 1e9:.1f} GB, peak {record.peak_bytes / 1e9:.1f} GB"
        )
    if record.kinds:
        parts = ", ".join(f"{name} {us:,.0f}" for name, us in record.kinds.items())
        lines.append(f"  a layer by kind, us: {parts}")
    if record.ops:
        total = sum(record.ops.values())
        lines.append(
            f"  by op, us (sum {total:,.0f}, run without a graph, {total / record.step_us:.0%} of "
            "the step):"
        )
        lines += [
            f"    {op:<20} {us:>10,.0f} {us / total:>6.1%}  {record.choices.get(op, '')}"
            for op, us in record.ops.items()
            if us >= 0.002 * total
        ]
    for title, found in (("network", record.variants), ("other fabrics", record.sensitivity)):
        if found:
            lines.append(f"  {title}:")
            lines += [
                f"    {name:<36} {v['step_us']:>10,.0f} us {v['tokens_per_s']:>9,.0f} tokens/s/GPU"
                for name, v in found.items()
            ]
    if record.statement:
        lines.append(f"  {record.statement}")
    return lines


def _marks(record: StepRecord) -> list[str]:
    """Say how far a step is from its goal and from what the chip allows."""
    lines = []
    goal = goal_of(record)
    if goal is not None and record.variants:
        over, serial = (record.variants[name]["tokens_per_s"] for name in (OVERLAPPED, SERIAL))
        lines.append(
            f"  goal {goal.tokens_per_s:,.0f} tokens/s/GPU with the network behind the shared "
            f"expert: {over:,.0f}, {over / goal.tokens_per_s:.2f} of it; serial network beside: "
            f"{serial:,.0f}"
        )
    if record.floors:
        floor = sum(record.floors.values())
        parts = ", ".join(f"{name} {us:,.0f}" for name, us in record.floors.items())
        lines.append(
            f"  floor {floor:,.0f} us ({parts}); the step takes {record.step_us / floor:.2f} times "
            "that"
        )
    return lines
