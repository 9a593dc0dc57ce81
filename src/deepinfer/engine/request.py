"""What the user asks and what comes back: SamplingParams, Request, Chunk, Completion, FinishReason.

Everything here is frozen and validated when built. Pure: no torch. The live record of a request is
`engine/sequence.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral, Real

from deepinfer.errors import RequestError
from deepinfer.grammar.spec import Structured

__all__ = [
    "GREEDY_BELOW",
    "MAX_SAMPLES",
    "MAX_TOP_LOGPROBS",
    "Chunk",
    "Completion",
    "DraftCounts",
    "DraftOutcome",
    "FinishReason",
    "Request",
    "SamplingParams",
]

GREEDY_BELOW = 1e-5
MAX_SAMPLES = 1024
MAX_TOP_LOGPROBS = 1000
_MAX_COUNT = 2**31 - 1
_LOGPROBS_MODES = ("processed", "raw")


class FinishReason(StrEnum):
    """Why a request ended. The values are part of the public interface."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    PROMPT_LENGTH_EXCEEDED = "prompt_length_exceeded"
    INVALID_REQUEST = "invalid_request"
    INSUFFICIENT_SYSTEM_RESOURCE = "insufficient_system_resource"
    STRUCTURED_OUTPUT_ERROR = "structured_output_error"
    NUMERICAL = "numerical"
    TIMEOUT = "timeout"
    ENGINE_ERROR = "engine_error"


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    """Tell whether a value is a finite number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it stops.

    temperature       finite, >= 0; below 1e-5 the largest logit wins (lowest id on ties) and
                      `top_p`, `top_k` are off
    top_p             in (0, 1]; applied first, the token that crosses the threshold is kept
    top_k             -1 (off) or >= 1; applied after `top_p`, ties go to the lower id
    max_tokens        most tokens to generate; 0 means 1
    min_tokens        end-of-sequence and stop ids are masked, and stop strings ignored, before this
                      many tokens
    seed              any integer (kept modulo 2^64): the draws are a function of it, the position
                      and the token id. None gives every request a fresh random seed; one seed for
                      many prompts is kept for each
    stop              strings (one or several) that end the text and are left out of it
    stop_after        `stop` counts only behind the first occurrence of this text, such as the end
                      of thinking; "" is from the beginning on
    stop_token_ids    ids that end the request; kept in `token_ids`, left out of `text`
    ignore_eos        go on after end-of-sequence
    logprobs          True: the logprob of every generated token; an integer n also asks for
                      `top_logprobs=n`
    top_logprobs      0..1000: alternatives at every position, the largest first; implies `logprobs`
    logprobs_mode     "processed": of the distribution drawn from (masks, bias, temperature,
                      filters; greedy rows are taken at temperature 1); "raw": of the model's own
                      logits. Values below -9999 become -9999
    logit_bias        token id -> finite number added to its logit
    forced_token_ids  output i is this list's i-th id, until the list ends (stop rules still apply)
    n                 samples of the prompt, 1..1024: each is a request of its own with its own
                      Completion (`sample_index` 0..n-1, one after the other in the results). Sample
                      0 has the seed, the others seeds derived from it
    logits_processors  factories, called once per request without arguments, in order; each returns
                      a function (all token ids so far, logits [V] fp32 tensor) -> logits, which
                      runs after masks and bias and before temperature. It must be a function of its
                      arguments alone
    prompt_logprobs   report the logprob of every prompt token but the first, as `logprobs_mode`
                      says
    structured        the shape of the output: a Structured, or a mapping that makes one. Ending ids
                      are then legal exactly when the shape is complete, so `ignore_eos` and
                      `min_tokens` cannot be combined with it
    timeout_s         seconds from submission after which the request ends with reason `timeout` and
                      the tokens it has; None waits for ever

    Raises RequestError listing every bad field.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 16
    min_tokens: int = 0
    seed: int | None = None
    stop: str | Iterable[str] = ()
    stop_after: str = ""
    stop_token_ids: Iterable[int] = ()
    ignore_eos: bool = False
    logprobs: bool | int = False
    top_logprobs: int = 0
    logprobs_mode: str = "processed"
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    forced_token_ids: Iterable[int] = ()
    n: int = 1
    logits_processors: Iterable[Callable[[], object]] = ()
    prompt_logprobs: bool = False
    structured: Structured | Mapping[str, object] | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        """Check every field, then store each in one canonical form."""
        problems: list[str] = []

        def need(ok: bool, name: str, accepted: str) -> bool:
            if not ok:
                problems.append(f"{name} must be {accepted}, not {getattr(self, name)!r}")
            return ok

        def number(name: str, accepted: str, low: float, high: float) -> None:
            value = getattr(self, name)
            ok = _is_number(value) and low <= value <= high
            if need(ok, name, accepted):
                put(name, float(value))

        def count(name: str, accepted: str, low: int, high: int) -> None:
            value = getattr(self, name)
            if need(_is_integer(value) and low <= value <= high, name, accepted):
                put(name, int(value))

        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        number("temperature", "a finite number >= 0", 0.0, math.inf)
        number("top_p", "a number above 0 and at most 1", math.nextafter(0.0, 1.0), 1.0)
        if need(
            _is_integer(self.top_k) and (self.top_k == -1 or self.top_k >= 1),
            "top_k",
            "-1 (off) or >= 1",
        ):
            put("top_k", min(int(self.top_k), _MAX_COUNT))
        count("max_tokens", "an integer from 0 (taken as 1) to 2147483647", 0, _MAX_COUNT)
        count("min_tokens", "an integer from 0 to max_tokens", 0, _MAX_COUNT)
        if (
            need(self.seed is None or _is_integer(self.seed), "seed", "an integer or None")
            and self.seed is not None
        ):
            put("seed", int(self.seed) & (2**64 - 1))
        need(isinstance(self.ignore_eos, bool), "ignore_eos", "True or False")
        need(isinstance(self.prompt_logprobs, bool), "prompt_logprobs", "True or False")
        count("n", f"an integer from 1 to {MAX_SAMPLES}", 1, MAX_SAMPLES)
        if self.timeout_s is not None:
            number("timeout_s", "a finite number above 0, or None", math.nextafter(0.0, 1.0), 1e9)
        if isinstance(self.logprobs, bool):
            pass
        elif need(
            _is_integer(self.logprobs) and 0 <= self.logprobs <= MAX_TOP_LOGPROBS,
            "logprobs",
            f"True, False or an integer from 0 to {MAX_TOP_LOGPROBS}",
        ):
            if _is_integer(self.top_logprobs):
                put("top_logprobs", max(int(self.top_logprobs), int(self.logprobs)))
            put("logprobs", self.logprobs > 0)
        count("top_logprobs", f"an integer from 0 to {MAX_TOP_LOGPROBS}", 0, MAX_TOP_LOGPROBS)
        if _is_integer(self.top_logprobs) and self.top_logprobs > 0:
            put("logprobs", True)
        need(self.logprobs_mode in _LOGPROBS_MODES, "logprobs_mode", "'processed' or 'raw'")
        self._check_lists(problems)
        self._check_structured(problems)
        if not problems:
            put("max_tokens", max(1, self.max_tokens))
            if self.min_tokens > self.max_tokens:
                problems.append(
                    f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}"
                )
            if self.is_greedy:
                put("top_p", 1.0)
                put("top_k", -1)
        if problems:
            raise RequestError("SamplingParams cannot be used", problems)

    def _check_lists(self, problems: list[str]) -> None:
        given: object = (self.stop,) if isinstance(self.stop, str) else self.stop
        stop = tuple(given) if isinstance(given, Iterable) else (None,)
        if all(isinstance(text, str) and text for text in stop):
            object.__setattr__(self, "stop", tuple(dict.fromkeys(stop)))
        else:
            problems.append(
                f"stop must be one or several strings, none of them empty, not {self.stop!r}"
            )
        after: object = self.stop_after
        if not isinstance(after, str):
            problems.append(f"stop_after must be a string, not {after!r}")
        for name in ("stop_token_ids", "forced_token_ids"):
            given = getattr(self, name)
            ids = tuple(given) if isinstance(given, Iterable) else (None,)
            if all(_is_integer(i) and i >= 0 for i in ids):
                object.__setattr__(self, name, tuple(int(i) for i in ids))
            else:
                problems.append(
                    f"{name} must be token ids (integers >= 0), not {getattr(self, name)!r}"
                )
        factories = self.logits_processors
        makers = tuple(factories) if isinstance(factories, Iterable) else (None,)
        if all(callable(maker) for maker in makers):
            object.__setattr__(self, "logits_processors", makers)
        else:
            problems.append(
                "logits_processors must be factories, called without arguments, not "
                f"{self.logits_processors!r}"
            )
        bias = self.logit_bias
        if isinstance(bias, Mapping) and all(
            _is_integer(i) and i >= 0 and _is_number(b) for i, b in bias.items()
        ):
            object.__setattr__(self, "logit_bias", {int(i): float(b) for i, b in bias.items()})
        else:
            problems.append(f"logit_bias must map token ids to finite numbers, not {bias!r}")

    def _check_structured(self, problems: list[str]) -> None:
        if self.structured is None:
            return
        try:
            object.__setattr__(self, "structured", Structured.of(self.structured))
        except RequestError as error:
            problems += error.problems or (error.message,)
        for name in ("ignore_eos", "min_tokens"):
            if getattr(self, name):
                problems.append(
                    f"{name} cannot be combined with structured, which decides when the output ends"
                )

    @property
    def shape(self) -> Structured | None:
        """`structured` in its stored form."""
        assert self.structured is None or isinstance(self.structured, Structured)
        return self.structured

    @property
    def is_greedy(self) -> bool:
        """Whether the largest logit always wins."""
        return self.temperature < GREEDY_BELOW

    @property
    def processor_factories(self) -> tuple[Callable[[], object], ...]:
        """`logits_processors` in its stored form."""
        assert isinstance(self.logits_processors, tuple)
        return self.logits_processors

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` in its stored form."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids` in its stored form."""
        assert isinstance(self.stop_token_ids, tuple)
        return self.stop_token_ids

    @property
    def forced_ids(self) -> tuple[int, ...]:
        """`forced_token_ids` in its stored form."""
        assert isinstance(self.forced_token_ids, tuple)
        return self.forced_token_ids

    def ids_out_of(self, vocab_size: int) -> list[str]:
        """Return one sentence for every field that names a token id of `vocab_size` or above."""
        fields: tuple[tuple[str, Iterable[int]], ...] = (
            ("stop_token_ids", self.stop_ids),
            ("forced_token_ids", self.forced_ids),
            ("logit_bias", self.logit_bias),
        )
        problems = []
        for name, ids in fields:
            bad = [i for i in ids if i >= vocab_size]
            if bad:
                problems.append(
                    f"{name} holds {bad[0]}, outside the vocabulary 0..{vocab_size - 1}"
                )
        return problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to continue, checked and ready to be planned.

    request_id        unique within an engine
    index             place of the prompt in the call that brought it
    sample_index      which of the prompt's samples, 0..n-1
    prompt_token_ids  at least one id, all inside the vocabulary
    seed              the resolved seed, 0..2^64-1
    streams           whether every step's new tokens are reported as Chunks
    """

    request_id: int
    index: int = 0
    sample_index: int = 0
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    streams: bool = False
    arrival_s: float = 0.0


DraftOutcome = tuple[int, int, int, int]
"""What a decode step did for one sequence: drafts proposed, verified, accepted; tokens kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounts:
    """What a request's drafts were worth, over its decode steps.

    steps, tokens                 decode steps, and tokens that they brought
    proposed, verified, accepted  drafts there were, those the model ran, and those that were right
                                  and kept; by position in the draft, as far as any were proposed
    bonus                         tokens kept behind verified drafts that were all right
    """

    steps: int = 0
    tokens: int = 0
    proposed: tuple[int, ...] = ()
    verified: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    bonus: int = 0

    @classmethod
    def of(cls, outcomes: Mapping[DraftOutcome, int]) -> DraftCounts:
        """Add up outcomes and how often each happened."""

        def by_position(column: int) -> tuple[int, ...]:
            return tuple(
                sum(count for row, count in outcomes.items() if row[column] > place)
                for place in range(most)
            )

        most = max((row[0] for row in outcomes), default=0)
        return cls(
            steps=sum(outcomes.values()),
            tokens=sum(row[3] * count for row, count in outcomes.items()),
            proposed=by_position(0),
            verified=by_position(1),
            accepted=by_position(2),
            bonus=sum(
                count
                for (_, verified, accepted, tokens), count in outcomes.items()
                if 0 < verified == accepted < tokens
            ),
        )

    @property
    def wasted_rows(self) -> int:
        """Verified drafts that brought no token."""
        return sum(self.verified) - sum(self.accepted)

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens of a decode step on average, None without one."""
        return self.tokens / self.steps if self.steps else None

    def to_json(self) -> dict[str, object]:
        """Return everything under the names of `llm.stats().speculation`."""
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "proposed": list(self.proposed),
            "verified": list(self.verified),
            "accepted": list(self.accepted),
            "bonus": self.bonus,
            "wasted_rows": self.wasted_rows,
            "mean_accepted_length": self.mean_accepted_length,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What became of one input. Every input has exactly one for each of its samples, also when it
    could not run.

    index, sample_index  place of the prompt in its call, and which of its samples
    token_ids       generated ids, with the end-of-sequence or stop id that ended them, and with the
                    ids that hold a stop string
    text            the text of `token_ids` without the ending id and without the stop string and
                    what follows it; None when the model has no tokenizer
    finish_reason   `stop`, `length`, `abort`, ... (FinishReason)
    error           one explanation when the request failed, else None
    logprobs        one number per token when asked
    top_logprobs    per token, (id, logprob) pairs from the likeliest, ties to the lower id; when
                    asked
    prompt_logprobs  one number per prompt token but the first, when asked
    num_steps        steps that brought tokens, those of prefill with them
    num_draft_proposed, num_draft_verified, num_draft_accepted
                     drafts made for the request, those the model ran, those that were right
    drafts           the same by position, and what follows; None when the engine does not draft
    ttft_s, finish_s  seconds from submission to the first token, and to the end
    """

    index: int
    request_id: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...] = ()
    text: str | None = None
    finish_reason: FinishReason
    error: str | None = None
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    prompt_logprobs: tuple[float, ...] | None = None
    ttft_s: float | None = None
    finish_s: float = 0.0
    num_preemptions: int = 0
    num_steps: int = 0
    num_draft_proposed: int = 0
    num_draft_verified: int = 0
    num_draft_accepted: int = 0
    drafts: DraftCounts | None = None
    sample_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What one step added to a streamed request.

    The texts of a request's chunks add up to `Completion.text`; characters that may still turn out
    to begin a stop string, or that end inside a character, come with a later chunk. The last chunk
    carries the completion. Log-probabilities, when asked for, are those of `token_ids`.
    """

    index: int
    request_id: int
    token_ids: tuple[int, ...]
    text: str
    completion: Completion | None = None
    sample_index: int = 0
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ended, or None while it runs."""
        return self.completion.finish_reason if self.completion is not None else None
