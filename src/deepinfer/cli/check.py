"""`deepinfer check`: prove a promise of the engine on a checkpoint of yours."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from deepinfer.cli.common import SubParsers, add_settings, engine_config, note
from deepinfer.config.load import DEMO_MODEL

if TYPE_CHECKING:
    from deepinfer.bench.determinism import Verdict

__all__ = ["add_parser", "run"]


def add_parser(subparsers: SubParsers[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "check",
        help="prove a promise of the engine on a checkpoint",
        description="Run a checkpoint in many ways and compare.",
    )
    checks = parser.add_subparsers(title="checks", metavar="CHECK", dest="check", required=True)
    one = checks.add_parser(
        "determinism",
        help="an output depends on its own request only",
        description="Run the same requests in many ways - batch sizes 1 to 64, orders of arrival, "
        "chunk sizes, overlap, prefix cache, forced preemption, neighbours with other seeds, "
        "threads, processes, drafts and their verification - and compare tokens and "
        "log-probabilities bit for bit. Exit code 1 on any difference.",
    )
    one.add_argument("--model", required=True, help=f"checkpoint folder, or '{DEMO_MODEL}'")
    one.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    one.add_argument("--quick", action="store_true", help="few requests, under a minute")
    one.add_argument("--json", action="store_true", help="one JSON object for each way")
    add_settings(one)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run the check; returns the exit code."""
    config = engine_config(args)
    from deepinfer.bench.determinism import check
    from deepinfer.config.engine import EngineConfig

    plain = EngineConfig().to_dotted()
    settings = {key: value for key, value in config.to_dotted().items() if value != plain[key]}

    def tell(verdict: Verdict) -> None:
        if args.json:
            print(json.dumps(asdict(verdict)))
        else:
            word = "equal " if verdict.difference is None else "DIFFERS"
            line = f"{word:8} {verdict.seconds:6.1f} s  {verdict.name}"
            line += f" ({verdict.note})" if verdict.note else ""
            line += f": {verdict.difference}" if verdict.difference else ""
            print(line)
        sys.stdout.flush()

    verdicts = check(args.model, args.device, settings, args.quick, tell)
    bad = sum(verdict.difference is not None for verdict in verdicts)
    took_s = sum(verdict.seconds for verdict in verdicts)
    told = f"{len(verdicts)} ways in {took_s:.0f} s"
    note(f"{told}: all equal, bit for bit" if not bad else f"{told}: {bad} DIFFER")
    return 1 if bad else 0
