"""`deepinfer generate`: continue prompts.

Results go to stdout, in the order of the prompts; progress, speed and errors go to stderr.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from deepinfer.cli.common import (
    SubParsers,
    UsageError,
    add_sampling,
    add_settings,
    engine_config,
    note,
    parse_ids,
    serves,
)
from deepinfer.cli.output import Meter, print_results, speed
from deepinfer.cli.shapes import add_shape_flags, approximations, shape_of
from deepinfer.config.load import DEMO_MODEL, GOLDEN_MODEL, resolve_model
from deepinfer.engine.request import FinishReason, SamplingParams
from deepinfer.errors import ConfigError, RequestError, json_problem

__all__ = ["add_parser", "run"]

_INTERRUPTED: Final = 130


class _AddPrompt(argparse.Action):
    """Collects prompts of all kinds in one list, in the order given, as (flag, value)."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """Append one prompt."""
        prompts: list[tuple[str, object]] = getattr(namespace, self.dest) or []
        setattr(namespace, self.dest, [*prompts, (self.option_strings[0], values)])


def add_parser(subparsers: SubParsers[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "generate",
        help="continue prompts",
        description="Continue one or many prompts, all in one batch. Prompts are either texts "
        "(--prompt, --prompt-file) or token ids (--token-ids). A value that begins with a dash "
        "needs the form --prompt=VALUE.",
    )
    parser.add_argument("--model", required=True, help=f"checkpoint folder, or '{DEMO_MODEL}'")
    prompts = parser.add_argument_group("prompts, repeatable, answered in the order given")
    shared: dict[str, Any] = {"action": _AddPrompt, "dest": "prompts"}
    prompts.add_argument("--prompt", metavar="TEXT", help="a text", **shared)
    prompts.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="a text in a file, or - for stdin; one line break at its end is left out",
        **shared,
    )
    prompts.add_argument(
        "--token-ids", metavar="IDS", type=parse_ids, help="ids, as in 1,2,3", **shared
    )
    sampling = parser.add_argument_group("sampling, the same for every prompt")
    add_sampling(sampling)
    add_shape_flags(parser)
    engine = parser.add_argument_group("engine")
    engine.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
    add_settings(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object for each result")
    parser.add_argument("--quiet", action="store_true", help="no progress, no speed")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Generate and print."""
    params = _sampling_params(args)
    config = engine_config(args)
    prompts = _prompts(args.prompts or [])
    resolve_model(args.model)  # before torch is loaded, which takes a while
    if serves(args, config):
        return 0

    from deepinfer.device import pick_device
    from deepinfer.llm import LLM, Interrupted

    try:
        pick_device(args.device)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    with LLM(args.model, args.device, config) as llm:
        if args.model == GOLDEN_MODEL and not args.quiet:
            note(f"the {GOLDEN_MODEL} checkpoint has random weights: its text means nothing")
        if params.shape is not None and not args.quiet:
            for line in approximations(llm.structured_report(params.shape)):
                note(line)
        meter = None if args.quiet else Meter()
        start = time.perf_counter()
        interrupted = False
        try:
            results = llm.generate(prompts, params, progress=meter)
        except Interrupted as stop:
            results, interrupted = stop.completions, True
        finally:
            if meter is not None:
                meter.close()
        took = time.perf_counter() - start
    print_results(results, args.json, params)
    for result in results:
        if result.error is not None:
            note(f"deepinfer: prompt {result.index}: {result.error}")
        elif result.finish_reason is FinishReason.ABORT and result.token_ids:
            note(f"deepinfer: prompt {result.index}: interrupted, its text is cut")
    if not args.quiet:
        note(speed(results, took))
    if interrupted:
        note("deepinfer: interrupted")
        return _INTERRUPTED
    return 1 if any(result.error is not None for result in results) else 0


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Return the parameters that the flags gave; raises UsageError listing every bad one."""
    names = (
        "max_tokens min_tokens temperature top_p top_k seed stop stop_token_ids ignore_eos "
        "logprobs top_logprobs"
    )
    given = {name: getattr(args, name) for name in names.split()}
    given["structured"] = shape_of(args)
    try:
        return SamplingParams(**{k: v for k, v in given.items() if v is not None})
    except RequestError as error:
        raise UsageError(str(error)) from error


def _prompts(given: Sequence[tuple[str, Any]]) -> list[str | list[int]]:
    """Turn the prompt flags into prompts; raises UsageError for none, or texts beside ids."""
    if not given:
        raise UsageError("nothing to continue: give --prompt, --prompt-file or --token-ids")
    flags = {flag for flag, _ in given}
    if "--token-ids" in flags and len(flags) > 1:
        raise UsageError(
            f"--token-ids and {min(flags - {'--token-ids'})} are both given: prompts of one call "
            "are either texts or token ids"
        )
    if [value for flag, value in given if flag == "--prompt-file"].count("-") > 1:
        raise UsageError("--prompt-file - is given twice, but stdin can be read once")
    prompts: list[str | list[int]] = []
    problems: list[str] = []
    for flag, value in given:
        try:
            prompts.append(_read_prompt(value) if flag == "--prompt-file" else value)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            problems.append(f"cannot read --prompt-file {value}: {reason}")
    if problems:
        raise RequestError("nothing was generated", problems)
    return prompts


def _read_prompt(name: str) -> str:
    """Read a prompt file; raises OSError or ValueError when that fails."""
    if name == "-" and sys.stdin is None:
        raise ValueError("stdin is closed")
    data = sys.stdin.buffer.read() if name == "-" else Path(name).expanduser().read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(json_problem(error)) from error
    return text.removesuffix("\n").removesuffix("\r")
