"""`deepinfer generate`: continue prompts.

Results go to stdout, in the order of the prompts; progress, speed and errors go to stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from deepinfer.cli.common import (
    SubParsers,
    UsageError,
    add_settings,
    engine_config,
    note,
    parse_ids,
)
from deepinfer.config.load import DEMO_MODEL
from deepinfer.engine.request import Completion, FinishReason, SamplingParams
from deepinfer.errors import RequestError

if TYPE_CHECKING:
    from deepinfer.llm import Progress

__all__ = ["add_parser", "run"]

_INTERRUPTED: Final = 130
_BAR_WIDTH: Final = 30
_LINE_EVERY_S: Final = 2.0
_BAR_EVERY_S: Final = 0.1
# What a terminal would obey instead of showing; tab and line feed stay.
_VISIBLE: Final = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)
}


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
    sampling.add_argument("--max-tokens", type=int, help="most tokens to generate (16)")
    sampling.add_argument("--min-tokens", type=int, help="fewest tokens to generate (0)")
    sampling.add_argument("--temperature", type=float, help="0 takes the likeliest token (1)")
    sampling.add_argument("--top-p", type=float, help="in (0, 1] (1)")
    sampling.add_argument("--top-k", type=int, help="-1 is off (-1)")
    sampling.add_argument("--seed", type=int, help="makes the draws repeatable (random)")
    sampling.add_argument(
        "--stop", action="append", metavar="TEXT", help="a text that ends the output; repeatable"
    )
    sampling.add_argument("--stop-token-ids", type=parse_ids, metavar="IDS", help="ids that end it")
    sampling.add_argument(
        "--ignore-eos", action="store_true", default=None, help="go on after end-of-sequence"
    )
    sampling.add_argument(
        "--logprobs", action="store_true", default=None, help="log-probability of each token"
    )
    sampling.add_argument("--top-logprobs", type=int, metavar="N", help="and of N alternatives")
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

    from deepinfer.llm import DEMO_WEIGHTS_ARE_RANDOM, LLM, Interrupted

    with LLM(args.model, args.device, config) as llm:
        if args.model == DEMO_MODEL and DEMO_WEIGHTS_ARE_RANDOM and not args.quiet:
            note("the demo checkpoint has random weights: its text means nothing")
        meter = None if args.quiet else _Meter()
        start = time.perf_counter()
        interrupted = False
        try:
            results = llm.generate(prompts, params, progress=meter)
        except Interrupted as stop:
            results, interrupted = stop.completions, True
        took = time.perf_counter() - start
    if meter is not None:
        meter.close()
    _print_results(results, args.json, params)
    for result in results:
        if result.error is not None:
            note(f"deepinfer: prompt {result.index}: {result.error}")
    if not args.quiet:
        note(_speed(results, took))
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
    return [_read_prompt(value) if flag == "--prompt-file" else value for flag, value in given]


def _read_prompt(name: str) -> str:
    """Read a prompt file; raises RequestError when that fails."""
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).expanduser().read_bytes()
        text = data.decode("utf-8")
    except OSError as error:
        raise RequestError(f"cannot read --prompt-file {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"--prompt-file {name} is not UTF-8: {error}") from error
    return text.removesuffix("\n").removesuffix("\r")


def _print_results(results: Sequence[Completion], as_json: bool, params: SamplingParams) -> None:
    """Print one object, or one text, for each result; unfinished ones have no text to show."""
    for result in results:
        if as_json:
            print(json.dumps(_as_object(result, params)))
            continue
        if result.error is not None or result.finish_reason is FinishReason.ABORT:
            continue
        text = result.text
        if text is None:
            text = ",".join(map(str, result.token_ids))
        elif sys.stdout.isatty():
            text = text.translate(_VISIBLE)
        print(f"[{result.index}] {text}" if len(results) > 1 else text)
        if result.logprobs is not None:
            print(_logprob_lines(result))
    sys.stdout.flush()


def _as_object(result: Completion, params: SamplingParams) -> dict[str, object]:
    """Return what `--json` prints of one result."""
    found: dict[str, object] = {
        "index": result.index,
        "prompt_token_ids": list(result.prompt_token_ids),
        "token_ids": list(result.token_ids),
        "text": result.text,
        "finish_reason": str(result.finish_reason),
        "error": result.error,
    }
    if params.logprobs:
        found["logprobs"] = None if result.logprobs is None else list(result.logprobs)
    if params.top_logprobs:
        top = result.top_logprobs
        found["top_logprobs"] = None if top is None else [[list(p) for p in step] for step in top]
    found["timings"] = {
        "ttft_s": result.ttft_s,
        "finish_s": result.finish_s,
        "decode_tokens_per_s": _decode_speed(result),
    }
    return found


def _logprob_lines(result: Completion) -> str:
    """Lay log-probabilities out, a line for each token."""
    lines = []
    for place, (token_id, logprob) in enumerate(
        zip(result.token_ids, result.logprobs or (), strict=True)
    ):
        line = f"  {token_id:>7} {logprob:9.4f}"
        if result.top_logprobs is not None:
            others = (f"{i}: {lp:.4f}" for i, lp in result.top_logprobs[place])
            line += "   of " + ", ".join(others)
        lines.append(line)
    return "\n".join(lines)


def _decode_speed(result: Completion) -> float | None:
    """Return the tokens per second after the first token, None where there was no second."""
    if result.ttft_s is None or len(result.token_ids) < 2 or result.finish_s <= result.ttft_s:
        return None
    return (len(result.token_ids) - 1) / (result.finish_s - result.ttft_s)


def _speed(results: Sequence[Completion], took_s: float) -> str:
    """Say how much was generated, and how fast."""
    tokens = sum(len(result.token_ids) for result in results)
    done = sum(
        result.error is None and result.finish_reason is not FinishReason.ABORT
        for result in results
    )
    text = f"{done} of {len(results)} finished, {tokens} tokens in {took_s:.2f} s"
    return f"{text}, {tokens / took_s:.1f} tokens/s" if tokens and took_s > 0 else text


class _Meter:
    """Shows progress on stderr: a bar on a terminal, else now and then a line."""

    def __init__(self) -> None:
        self._is_bar = sys.stderr.isatty()
        self._start = self._last = time.perf_counter()
        self._width = 0

    def __call__(self, state: Progress) -> None:
        """Take the state after a step."""
        now = time.perf_counter()
        if now - self._last < (_BAR_EVERY_S if self._is_bar else _LINE_EVERY_S):
            return
        self._last = now
        done, total = state.num_finished, state.num_requests
        speed = state.num_tokens / (now - self._start)
        told = f"{done}/{total} finished, {state.num_tokens} tokens, {speed:.1f} tokens/s"
        if not self._is_bar:
            note(told)
            return
        filled = _BAR_WIDTH * done // max(total, 1)
        line = f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {told}"
        print("\r" + line.ljust(self._width), end="", file=sys.stderr, flush=True)
        self._width = len(line)

    def close(self) -> None:
        """Remove the bar."""
        if self._width:
            print("\r" + " " * self._width + "\r", end="", file=sys.stderr, flush=True)
            self._width = 0
