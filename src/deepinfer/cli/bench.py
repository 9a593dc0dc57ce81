"""`deepinfer bench`: measure speed, keep the figures as JSONL, print them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from deepinfer.bench.report import append, read, table
from deepinfer.cli.common import SubParsers, add_settings, engine_config, note, positive
from deepinfer.config.load import DEMO_MODEL, GOLDEN_MODEL, resolve_model

__all__ = ["add_parser", "run"]

_FILE: Final = "benchmarks/cpu.jsonl"
_REPEAT: Final = 5


def add_parser(subparsers: SubParsers[argparse.ArgumentParser]) -> None:
    """Register the command and its two forms."""
    parser = subparsers.add_parser(
        "bench", help="measure speed", description="Measure speed, or print kept figures."
    )
    forms = parser.add_subparsers(title="forms", metavar="FORM", dest="form", required=True)
    cpu = forms.add_parser(
        "cpu",
        help="measure the CPU path",
        description="Measure decoding of 1 and 16 streams, prefill of 300 tokens, Python's share "
        "of a step, loading and memory, and print a table. A busy machine gives worse figures.",
    )
    cpu.add_argument(
        "--model",
        default=GOLDEN_MODEL,
        help=f"checkpoint folder, '{DEMO_MODEL}' or '{GOLDEN_MODEL}' ({GOLDEN_MODEL})",
    )
    cpu.add_argument("--out", metavar="FILE", help="add the records to this file, as JSONL")
    cpu.add_argument(
        "--repeat", type=positive, default=_REPEAT, metavar="N", help=f"repeats ({_REPEAT})"
    )
    add_settings(cpu)
    cpu.set_defaults(func=run)
    show = forms.add_parser("show", help="print kept figures", description="Print kept figures.")
    show.add_argument("file", nargs="?", default=_FILE, metavar="FILE", help=f"records ({_FILE})")
    show.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print, or print what a file holds."""
    if args.form == "show":
        print(table(read(Path(args.file).expanduser())))
        return 0
    from deepinfer.bench.cpu import measure_cpu

    config = engine_config(args)
    resolve_model(args.model)
    out = None if args.out is None else Path(args.out).expanduser()
    if out is not None:
        append(out, [])  # measuring takes long: find out first whether writing works
    records = measure_cpu(args.model, config, args.repeat, tell=note)
    print(table(records))
    if out is not None:
        append(out, records)
        note(f"{out}: {len(records)} records added")
    return 0
