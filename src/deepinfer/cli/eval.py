"""`deepinfer eval`: what a checkpoint is worth on held-out text."""

from __future__ import annotations

import argparse
import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from deepinfer.bench.evalreport import MARKS, EvalRecord, between_marks, last_run, summary
from deepinfer.bench.report import append
from deepinfer.cli.common import SubParsers, UsageError, add_settings, engine_config, note, positive
from deepinfer.config.load import DEMO_MODEL, PACKAGED_MODELS, resolve_model

if TYPE_CHECKING:
    from deepinfer.config.engine import EngineConfig

__all__ = ["add_parser", "run"]

TASK_NAMES: Final = ("bpb", "experts", "retrieval", "drafts", "calibration", "json", "replay")
_DIGESTED_BYTES: Final = 1 << 28


def add_parser(subparsers: SubParsers[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "eval",
        help="measure what a checkpoint is worth",
        description="Measure a checkpoint on the packaged held-out text and on generated tasks, "
        "on the CPU, and print tables in Markdown. All tasks take some minutes.",
    )
    parser.add_argument(
        "--model", default=DEMO_MODEL, help=f"checkpoint folder, or a packaged one ({DEMO_MODEL})"
    )
    parser.add_argument("names", nargs="*", metavar="TASK", help="the same as --task TASK")
    parser.add_argument(
        "--task",
        action="append",
        choices=(*TASK_NAMES, "all"),
        help="what to measure; repeatable (all)",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="a small part of everything: --limit 1")
    size.add_argument(
        "--limit", type=positive, metavar="N", help="at most N rows or cases of each kind"
    )
    parser.add_argument("--out", metavar="FILE", help="add the results to this file, as JSONL")
    parser.add_argument("--plot", metavar="FILE", help="draw them as a PNG page")
    parser.add_argument(
        "--page",
        metavar="FILE",
        help=f"put the tables into this Markdown file, between the lines {MARKS[0]} and {MARKS[1]}",
    )
    parser.add_argument(
        "--read", metavar="FILE", help="measure nothing: print and draw the last run in this file"
    )
    add_settings(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Measure, or read; print, keep and draw."""
    unknown = [name for name in args.names if name not in (*TASK_NAMES, "all")]
    if unknown:
        raise UsageError(f"no task {unknown[0]!r}; the tasks are {', '.join(TASK_NAMES)} and all")
    args.task = [*(args.task or ()), *args.names]
    if args.read is not None and (args.out is not None or args.task or args.limit or args.quick):
        raise UsageError("--read measures nothing: leave --task, --quick, --limit and --out away")
    if args.plot is not None:
        from deepinfer.bench.plot import require_matplotlib

        require_matplotlib()
    page = None if args.page is None else Path(args.page).expanduser()
    if page is not None:
        between_marks(page.read_text("utf-8"), "")  # measuring takes long: fail now if it must be
    if args.read is not None:
        records = last_run(Path(args.read).expanduser())
    else:
        config = engine_config(args)
        folder = resolve_model(args.model)
        out = None if args.out is None else Path(args.out).expanduser()
        if out is not None:
            append(out, [])  # measuring takes long: find out first whether writing works
        records = _measure(args, folder, config)
        if out is not None:
            append(out, records)
            note(f"{out}: {len(records)} records added")
    tables = summary(records)
    print(tables)
    if page is not None:
        page.write_text(between_marks(page.read_text("utf-8"), tables), "utf-8")
    if args.plot is not None:
        from deepinfer.bench.plot import draw_evaluation

        draw_evaluation(records, Path(args.plot).expanduser())
    return 0


def _measure(args: argparse.Namespace, folder: Path, config: EngineConfig) -> list[EvalRecord]:
    from deepinfer.bench.evaldata import data_sha256
    from deepinfer.bench.evaluate import QUICK_LIMIT, Evaluation, run_tasks
    from deepinfer.bench.machine import describe_versions

    limit = QUICK_LIMIT if args.quick else args.limit
    when = datetime.now(UTC).isoformat(timespec="seconds")
    names = TASK_NAMES if not args.task or "all" in args.task else args.task
    figures = run_tasks(Evaluation(folder, config, limit, note), names)
    versions, checkpoint, data = describe_versions(), _digest(folder), data_sha256()
    return [
        EvalRecord(
            figure=figure,
            model=args.model if args.model in PACKAGED_MODELS else folder.resolve().name,
            checkpoint=checkpoint,
            data=data,
            limit=limit,
            when=when,
            versions=versions,
        )
        for figure in figures
    ]


def _digest(folder: Path) -> str:
    """Return a digest of config and weights, "" when these are too large to read for that."""
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    if sum(file.stat().st_size for file in files) > _DIGESTED_BYTES:
        return ""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
