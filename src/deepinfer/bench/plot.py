"""Pages of figures as PNG. The only module that draws; needs the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from deepinfer.bench.evalreport import EvalRecord, Figure
from deepinfer.bench.kernelreport import GOALS
from deepinfer.bench.kernels import KernelRecord
from deepinfer.bench.speculation import Outcome
from deepinfer.errors import UnsupportedError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_evaluation", "draw_kernels", "draw_speculation", "require_matplotlib"]

_INK: Final = (
    "#2f5d8a", "#c8743a", "#7a9a4f", "#8a6aa3", "#999999", "#b0527a", "#4f9a94", "#b39b3c",
)  # fmt: skip


def require_matplotlib() -> None:
    """Raise UnsupportedError naming the extra when there is nothing to draw with."""
    if find_spec("matplotlib") is None:
        raise UnsupportedError.missing_extra("matplotlib", "plot", "drawing")


def draw_evaluation(records: Sequence[EvalRecord], file: Path) -> None:
    """Draw a run of `deepinfer eval` as one page; raises UnsupportedError without matplotlib."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Page

    figures = [record.figure for record in records]
    page = Page(figsize=(13, 8), layout="constrained")
    FigureCanvasAgg(page)
    panels = page.subplots(2, 3).ravel()
    drawers = (_bits, _retrieval, _acceptance, _reliability, _experts, _json)
    for panel, draw in zip(panels, drawers, strict=True):
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8)
        draw(panel, figures)
    first = records[0]
    page.suptitle(
        f"deepinfer eval, model {first.model}, checkpoint {first.checkpoint or '?'}, "
        f"data {first.data}, {first.when[:10]}"
        + ("" if first.limit is None else f", limit {first.limit}"),
        fontsize=10,
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    page.savefig(file, dpi=110, metadata={"Software": None})


def draw_speculation(outcomes: Sequence[Outcome], file: Path) -> None:
    """Draw simulated throughput by load, a panel for each acceptance.

    Raises UnsupportedError without matplotlib.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Page

    rates = sorted({o.acceptance for o in outcomes})
    page = Page(figsize=(4.4 * len(rates), 4), layout="constrained")
    FigureCanvasAgg(page)
    panels = page.subplots(1, len(rates), squeeze=False)[0]
    for panel, rate in zip(panels, rates, strict=True):
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8)
        panel.set_title(f"{rate:.0%} of the drafts right", fontsize=9)
        for i, policy in enumerate(("off", "fixed", "variable")):
            part = [o for o in outcomes if o.acceptance == rate and o.policy == policy]
            loads = [o.sequences for o in part]
            panel.plot(loads, [o.tokens_per_s for o in part], "o-", ms=3, label=policy, c=_INK[i])
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlabel("sequences", fontsize=8)
        panel.set_ylabel("tokens per second of one device (simulated)", fontsize=8)
        _legend(panel)
    file.parent.mkdir(parents=True, exist_ok=True)
    page.savefig(file, dpi=110, metadata={"Software": None})


def draw_kernels(records: Sequence[KernelRecord], file: Path) -> None:
    """Draw microseconds by rows, a panel for each task that has any; both axes logarithmic.

    Members timed alone are drawn where nothing else is there.
    Raises UnsupportedError without matplotlib.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Page
    from matplotlib.ticker import LogLocator, NullFormatter

    done = [record for record in records if not record.failed]
    done = [record for record in done if not record.rest_s] or done
    tasks = sorted({record.task for record in done}) or ["nothing measured"]
    columns = min(4, len(tasks))
    lines = -(-len(tasks) // columns)
    page = Page(figsize=(4.2 * columns, 3.0 * lines), layout="constrained")
    FigureCanvasAgg(page)
    panels = page.subplots(lines, columns, squeeze=False).ravel()
    for panel in panels[len(tasks) :]:
        panel.set_axis_off()
    for panel, task in zip(panels, tasks, strict=False):
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=7)
        panel.set_title(task, fontsize=9)
        part = [record for record in done if record.task == task]
        for i, name in enumerate(dict.fromkeys(record.name for record in part)):
            found = sorted((r.rows, r.us, r.floor_us) for r in part if r.name == name)
            style = "o-" if any(r.op and r.name == name for r in part) else "s--"
            ink = _INK[i % len(_INK)]
            rows, times = [f[0] for f in found], [f[1] for f in found]
            panel.plot(rows, times, style, ms=3, lw=1, label=name, c=ink)
        floors: dict[int, float] = {}
        for r in part:
            if r.op and r.floor_us > 0:
                floors[r.rows] = min(r.floor_us, floors.get(r.rows, r.floor_us))
        if floors:
            panel.plot(*zip(*sorted(floors.items()), strict=True), ":", c="#bbbbbb", label="floor")
        marks = [goal for goal in GOALS if goal.tasks == (task,)]
        if marks:
            panel.plot([g.rows for g in marks], [g.us for g in marks], "k*", ms=6, label="goal")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(sorted({r.rows for r in part}))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter(NullFormatter())
        _legend(panel)
    if records:
        machine = records[0].machine or {}
        where = machine.get("card") or machine.get("cpu", "?")
        page.suptitle(
            f"microseconds by rows, {where}, {records[0].when[:10]}; steady load, cold caches",
            fontsize=10,
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    page.savefig(file, dpi=110, metadata={"Software": None})


def _of(figures: Sequence[Figure], task: str, *names: str) -> list[Figure]:
    return [f for f in figures if f.task == task and (not names or f.name in names)]


def _legend(panel: Axes) -> None:
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize=7, frameon=False)


def _bits(panel: Axes, figures: Sequence[Figure]) -> None:
    panel.set_title("bits per byte of held-out text", fontsize=9)
    part = _of(figures, "bpb")
    sources = list(dict.fromkeys(str(f.labels["source"]) for f in part))
    for i, name in enumerate(("model", "xz -9", "PPMd")):
        found = {str(f.labels["source"]): f.value for f in part if f.name == name}
        places = [sources.index(source) + 0.27 * (i - 1) for source in found]
        if found:
            panel.barh(places, list(found.values()), 0.25, label=name, color=_INK[i])
    panel.set_yticks(range(len(sources)), sources)
    panel.invert_yaxis()
    _legend(panel)


def _retrieval(panel: Axes, figures: Sequence[Figure]) -> None:
    panel.set_title("found again, by distance in tokens", fontsize=9)
    part = _of(figures, "retrieval")
    ticks = sorted({int(f.labels["distance"]) for f in part})
    for i, selection in enumerate(("indexer", "random", "all")):
        for name, style in (("needle", "-o"), ("copy", "--s")):
            found = {
                int(f.labels["distance"]): f.value
                for f in part
                if f.name == name and f.labels["selection"] == selection
            }
            if found:
                places = [ticks.index(distance) for distance in found]
                label = f"{name}, {selection}"
                panel.plot(places, list(found.values()), style, ms=4, label=label, color=_INK[i])
    panel.set_xticks(range(len(ticks)), [f"{tick}+" for tick in ticks])
    panel.set_ylim(-0.03, 1.03)
    _legend(panel)


def _acceptance(panel: Axes, figures: Sequence[Figure]) -> None:
    panel.set_title("drafts accepted, given all before were", fontsize=9)
    part = _of(figures, "drafts", "acceptance")
    lengths = _of(figures, "drafts", "mean accepted length")
    for i, source in enumerate(("natural", "json")):
        found = {int(f.labels["place"]): f.value for f in part if f.labels["source"] == source}
        length = [f.value for f in lengths if f.labels["source"] == source]
        if found:
            label = f"{source}, mean accepted length {length[0]:.2f}"
            panel.plot(list(found), list(found.values()), "-o", ms=4, label=label, color=_INK[i])
    panel.set_xlabel("draft", fontsize=8)
    panel.set_xticks(sorted({int(f.labels["place"]) for f in part}))
    panel.set_ylim(0, 1.03)
    _legend(panel)


def _reliability(panel: Axes, figures: Sequence[Figure]) -> None:
    panel.set_title("confidence against what came true", fontsize=9)
    panel.plot([0, 1], [0, 1], color="#bbbbbb", lw=0.8)
    errors = _of(figures, "calibration", "expected calibration error")
    for i, source in enumerate(("all", "natural", "json")):
        labels = {"source": source, "place": "all"}
        found = [
            (float(f.labels["confidence"]), f.value)
            for f in _of(figures, "calibration", "accuracy")
            if labels.items() <= f.labels.items()
        ]
        error = [f.value for f in errors if labels.items() <= f.labels.items()]
        if found:
            label = f"{source}, error {error[0]:.3f}"
            panel.plot(*zip(*found, strict=True), "-o", ms=3, label=label, color=_INK[i])
    panel.set_xlabel("confidence", fontsize=8)
    _legend(panel)


def _experts(panel: Axes, figures: Sequence[Figure]) -> None:
    panel.set_title("least and most loaded expert of each layer", fontsize=9)
    part = [f for f in _of(figures, "experts") if f.labels["layer"] != "all"]
    sources = list(dict.fromkeys(str(f.labels["source"]) for f in part))
    for i, source in enumerate(sources):
        for name in ("least load", "most load"):
            found = {
                int(f.labels["layer"]): f.value
                for f in part
                if f.name == name and f.labels["source"] == source
            }
            label = source if name == "least load" else None
            width = 2 if source == "natural" else 0.8
            panel.plot(
                list(found), list(found.values()), color=_INK[i % len(_INK)], lw=width, label=label
            )
    for bound in (0.2, 4):
        panel.axhline(bound, color="#bbbbbb", lw=0.8)
    panel.set_yscale("log")
    panel.set_xlabel("layer", fontsize=8)
    panel.set_ylabel("multiple of a fair share", fontsize=8)
    _legend(panel)


def _json(panel: Axes, figures: Sequence[Figure]) -> None:
    panel.set_title("JSON answers without a grammar", fontsize=9)
    part = _of(figures, "json")
    panel.bar([f.name for f in part], [f.value for f in part], 0.5, color=_INK[0])
    for i, figure in enumerate(part):
        panel.text(i, figure.value, f"{figure.value:.2f}", ha="center", va="bottom", fontsize=8)
    panel.set_ylim(0, 1.1)
