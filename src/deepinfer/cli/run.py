"""`deepinfer run`: a file of requests through a model into a file of answers, resumable.

Answers go to the output file, the summary to stdout, progress to stderr.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from deepinfer.chat.tokenizer import trained_to_think
from deepinfer.cli.common import (
    SubParsers,
    UsageError,
    add_sampling,
    add_settings,
    engine_config,
    interrupt_sets_flag,
    note,
    positive,
    serves,
    tell,
)
from deepinfer.cli.shapes import add_shape_flags, shape_of
from deepinfer.config.engine import EngineConfig
from deepinfer.config.load import DEMO_MODEL, GOLDEN_MODEL, resolve_model
from deepinfer.engine.request import SamplingParams
from deepinfer.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from deepinfer.jobs.runner import Totals

__all__ = ["add_parser", "run"]

_INTERRUPTED: Final = 130
_LEAST_WINDOW: Final = 64
_SAMPLING: Final = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids",
    "ignore_eos", "logprobs", "top_logprobs",
)  # fmt: skip
_CHANGING: Final = ("numerics", "replay", "sampling")  # groups of settings that change results
_BAR_EVERY_S: Final = 0.2
_LINE_EVERY_S: Final = 2.0
_LINE_SHARE: Final = 0.1  # of the time run so far: long runs get sparser lines


def add_parser(subparsers: SubParsers[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "run",
        help="answer a file of requests",
        description="Answer every row of a JSONL file: requests of a batch file (custom_id, url, "
        "body) or plain rows (prompt or messages, beside sampling fields). The same command goes "
        "on where an earlier one was stopped, however that happened.",
    )
    parser.add_argument("-i", "--input", required=True, metavar="FILE", help="rows, or - for stdin")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="answers, appended")
    parser.add_argument(
        "--model", default=DEMO_MODEL, help=f"checkpoint folder, or a packaged one ({DEMO_MODEL})"
    )
    parser.add_argument(
        "--max-errors", type=_count, metavar="N", help="stop when more than N rows have failed"
    )
    parser.add_argument(
        "--retry-failed", action="store_true", help="answer rows again whose record is an error"
    )
    parser.add_argument(
        "--window",
        type=positive,
        metavar="N",
        help="most requests in flight (by the engine's size)",
    )
    parser.add_argument(
        "--thinking",
        choices=("auto", "on", "off"),
        default="auto",
        help="whether plain conversations think (auto: as the model was trained, `thinks` of "
        "tokenizer_config.json, else on)",
    )
    sampling = parser.add_argument_group("sampling of plain rows that do not say")
    add_sampling(sampling)
    add_shape_flags(parser)
    engine = parser.add_argument_group("engine")
    engine.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
    add_settings(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Answer the rows and print the summary."""
    defaults = _defaults(args)
    config = engine_config(args)
    output_path = Path(args.output).expanduser()
    if output_path.exists() and args.input != "-":
        with suppress(OSError):
            if output_path.samefile(Path(args.input).expanduser()):
                raise UsageError("--input and --output are the same file")
    folder = resolve_model(args.model)  # before torch is loaded, which takes a while
    if serves(args, config):
        return 0

    from deepinfer.jobs.output import Output
    from deepinfer.jobs.rows import Context
    from deepinfer.jobs.runner import JobOptions, run_jobs
    from deepinfer.jobs.source import Source

    with Source(args.input) as source, Output(output_path) as output:
        from deepinfer.device import pick_device
        from deepinfer.llm import LLM

        try:
            pick_device(args.device)
        except ConfigError as error:
            raise UsageError(str(error)) from error
        with LLM(args.model, args.device, config) as llm:
            if args.model == GOLDEN_MODEL and not args.quiet:
                note(f"the {GOLDEN_MODEL} checkpoint has random weights: its text means nothing")
            thinking = args.thinking == "on" or (
                args.thinking == "auto" and trained_to_think(folder)
            )
            context = Context(
                tokenizer=llm.tokenizer,
                max_model_len=llm.max_model_len,
                vocab_size=llm.model_config.vocab_size,
                model=args.model,
                defaults=defaults,
                thinking=thinking,
                settings=_settings(folder, config, {**defaults, "thinking": thinking}),
            )
            replicas = config.mesh.world // config.mesh.context
            most = replicas * config.scheduling.max_num_seqs
            window = args.window or max(_LEAST_WINDOW, 2 * most)
            options = JobOptions(
                window=window, max_errors=args.max_errors, retries=args.retry_failed
            )
            meter = None if args.quiet else _Meter()
            try:
                with interrupt_sets_flag() as flag:
                    totals = run_jobs(
                        llm,
                        source,
                        output,
                        context,
                        options,
                        report=meter,
                        is_stopped=flag.is_set,
                    )
            finally:
                if meter is not None:
                    meter.close()
    print(json.dumps({"output": str(args.output)} | totals.summary()))
    if totals.unmatched and not args.quiet:
        note(f"{args.output} answers {totals.unmatched} rows that {args.input} does not have")
    if totals.stopped == "interrupted":
        note("deepinfer: interrupted; the same command goes on from here")
        return _INTERRUPTED
    if totals.stopped == "max_errors":
        note(f"deepinfer: stopped: more than {args.max_errors} rows have failed")
    return 1 if totals.failed or totals.failed_before or totals.stopped else 0


def _count(text: str) -> int:
    """Read an integer >= 0; raises argparse.ArgumentTypeError otherwise."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"found {text!r}, expected an integer >= 0")
    return int(text)


def _defaults(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields that the flags gave; raises UsageError listing every bad one."""
    given: dict[str, Any] = {name: getattr(args, name) for name in _SAMPLING}
    given["structured"] = shape_of(args)
    given = {name: value for name, value in given.items() if value is not None}
    try:
        SamplingParams(**given)
    except RequestError as error:
        raise UsageError(str(error)) from error
    return given


def _settings(folder: Path, config: EngineConfig, defaults: Mapping[str, Any]) -> str:
    """Return a digest of all that changes results: checkpoint, settings, defaults of rows."""
    from deepinfer.weights.fingerprint import weights_digest
    from deepinfer.weights.reader import Checkpoint

    groups = {name: asdict(getattr(config, name)) for name in _CHANGING}
    parts = [
        weights_digest(Checkpoint.open(folder)),
        (folder / "config.json").read_text(encoding="utf-8"),
        json.dumps(groups, sort_keys=True, default=str),
        config.grammar.backend,
        json.dumps(defaults, sort_keys=True, default=repr),
    ]
    tokenizer = folder / "tokenizer.json"
    if tokenizer.is_file():
        parts.append(hashlib.sha256(tokenizer.read_bytes()).hexdigest())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


class _Meter:
    """Shows how far a run is, on stderr: one line on a terminal, else now and then a new one."""

    def __init__(self) -> None:
        self._is_line = sys.stderr.isatty()
        self._last = time.monotonic()
        self._width = 0

    def __call__(self, totals: Totals) -> None:
        """Take the state after a step."""
        now = time.monotonic()
        every_s = max(_LINE_EVERY_S, _LINE_SHARE * totals.seconds)
        if now - self._last < (_BAR_EVERY_S if self._is_line else every_s):
            return
        self._last = now
        told = describe(totals)
        if self._is_line:
            tell("\r" + told.ljust(self._width))
            self._width = len(told)
        else:
            note(told)

    def close(self) -> None:
        """Remove the line."""
        if self._width:
            tell("\r" + " " * self._width + "\r")
            self._width = 0


def describe(totals: Totals) -> str:
    """Say how far a run is."""
    seconds = max(totals.seconds, 1e-9)
    parts = [f"{totals.done} done, {totals.failed} failed"]
    if totals.skipped:
        parts.append(f"{totals.skipped} answered before")
    parts.append(
        f"{totals.prompt_tokens / seconds:.1f} prompt and {totals.output_tokens / seconds:.1f} "
        "output tokens/s"
    )
    if totals.acceptance is not None:
        parts.append(f"{100 * totals.acceptance:.0f} % of drafts accepted")
    if totals.fraction and totals.done + totals.failed:
        left = int(seconds * (1 - totals.fraction) / totals.fraction)
        parts.append(f"about {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left")
    return ", ".join(parts)
