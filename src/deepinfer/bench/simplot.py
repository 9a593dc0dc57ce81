"""Curves of simulated studies as PNG; needs the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from deepinfer.bench.plot import require_matplotlib

__all__ = ["Curve", "draw_study"]

Curve = tuple[str, Sequence[float], Sequence[float], Sequence[float]]
"""Label, places, means, half the width of their confidence."""

_INK: Final = ("#2f5d8a", "#c8743a", "#7a9a4f", "#8a6aa3", "#999999", "#b0527a")


def draw_study(
    title: str, axis: str, log: bool, panels: Sequence[tuple[str, Sequence[Curve]]], file: Path
) -> None:
    """Draw curves with their confidence, a panel for each value looked at.

    panels  heading, and its curves. Raises UnsupportedError without matplotlib.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Page

    page = Page(figsize=(4.6 * len(panels), 3.9), layout="constrained")
    FigureCanvasAgg(page)
    for panel, (heading, curves) in zip(
        page.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8)
        for i, (label, places, means, halves) in enumerate(curves):
            panel.errorbar(
                places, means, yerr=halves, fmt="o-", ms=3, lw=1.2, capsize=2, label=label,
                c=_INK[i % len(_INK)],
            )  # fmt: skip
        if log:
            panel.set_xscale("log", base=2)
            places = sorted({at for _, found, _, _ in curves for at in found})
            panel.set_xticks(places, [f"{at:g}" for at in places])
        panel.set_xlabel(axis, fontsize=8)
        panel.set_title(heading, fontsize=9)
        panel.legend(fontsize=7, frameon=False)
    page.suptitle(title + " Simulated; bars are 95 % confidence.", fontsize=10)
    file.parent.mkdir(parents=True, exist_ok=True)
    page.savefig(file, dpi=110, metadata={"Software": None})
