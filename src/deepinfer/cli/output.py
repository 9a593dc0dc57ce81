"""What `generate` shows: results on stdout, progress and speed on stderr (no torch)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from deepinfer.cli.common import note, tell
from deepinfer.engine.request import Completion, FinishReason, SamplingParams

if TYPE_CHECKING:
    from deepinfer.llm import Progress

__all__ = ["Meter", "print_results", "speed", "visible"]

_BAR_WIDTH: Final = 30
_LINE_EVERY_S: Final = 2.0
_LINE_SHARE: Final = 0.1  # of the time run so far: long runs get sparser lines
_BAR_EVERY_S: Final = 0.1
# What a terminal would obey instead of showing; tab and line feed stay.
_VISIBLE: Final = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)
}


def visible(text: str) -> str:
    """Return a text as stdout may show it: a terminal gets no control characters."""
    return text.translate(_VISIBLE) if sys.stdout.isatty() else text


def print_results(results: Sequence[Completion], as_json: bool, params: SamplingParams) -> None:
    """Print one object, or one text, for each result; what was interrupted ends where it was."""
    for result in results:
        if as_json:
            print(json.dumps(_as_object(result, params)))
            continue
        cut = result.finish_reason is FinishReason.ABORT
        if result.error is not None or (cut and not result.token_ids):
            continue
        text = result.text
        if text is None:
            text = ",".join(map(str, result.token_ids))
        else:
            text = visible(text)
        name = f"{result.index}.{result.sample_index}" if params.n > 1 else f"{result.index}"
        print(f"[{name}] {text}" if len(results) > 1 else text)
        if result.logprobs is not None:
            print(_logprob_lines(result))
    sys.stdout.flush()


def _as_object(result: Completion, params: SamplingParams) -> dict[str, object]:
    """Return what `--json` prints of one result."""
    found: dict[str, object] = {
        "index": result.index,
        **({"sample_index": result.sample_index} if params.n > 1 else {}),
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
    if params.prompt_logprobs:
        scores = result.prompt_logprobs
        found["prompt_logprobs"] = None if scores is None else list(scores)
    if result.drafts is not None:
        found["drafts"] = result.drafts.to_json()
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


def speed(results: Sequence[Completion], took_s: float) -> str:
    """Say how much was generated, and how fast."""
    tokens = sum(len(result.token_ids) for result in results)
    done = sum(
        result.error is None and result.finish_reason is not FinishReason.ABORT
        for result in results
    )
    text = f"{done} of {len(results)} finished, {tokens} tokens in {took_s:.2f} s"
    return f"{text}, {tokens / took_s:.1f} tokens/s" if tokens and took_s > 0 else text


class Meter:
    """Shows progress on stderr: a bar on a terminal, else now and then a line."""

    def __init__(self) -> None:
        self._is_bar = sys.stderr.isatty()
        self._start = self._last = time.perf_counter()
        self._width = 0

    def __call__(self, state: Progress) -> None:
        """Take the state after a step."""
        now = time.perf_counter()
        line_every_s = max(_LINE_EVERY_S, _LINE_SHARE * (now - self._start))
        if now - self._last < (_BAR_EVERY_S if self._is_bar else line_every_s):
            return
        self._last = now
        done, total = state.num_finished, state.num_requests
        speed = state.num_tokens / (now - self._start)
        failed = f", {state.num_failed} failed" if state.num_failed else ""
        told = f"{done}/{total} finished{failed}, {state.num_tokens} tokens, {speed:.1f} tokens/s"
        if not self._is_bar:
            note(told)
            return
        filled = _BAR_WIDTH * (done + state.num_failed) // max(total, 1)
        line = f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {told}"
        tell("\r" + line.ljust(self._width))
        self._width = len(line)

    def close(self) -> None:
        """Remove the bar."""
        if self._width:
            tell("\r" + " " * self._width + "\r")
            self._width = 0
