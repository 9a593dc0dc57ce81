"""An engine without a model: it continues ids by what they are, in a few steps, in any order."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepinfer.chat.tokenizer import Tokenizer
from deepinfer.config.load import load_model_config, resolve_model
from deepinfer.engine.request import Completion, FinishReason, SamplingParams
from deepinfer.jobs.output import Output
from deepinfer.jobs.rows import Context
from deepinfer.jobs.runner import JobOptions, Totals, run_jobs
from deepinfer.jobs.source import Source

FOLDER = resolve_model("demo")
TOKENIZER = Tokenizer.load(FOLDER, load_model_config(FOLDER))


CONTEXT = Context(
    tokenizer=TOKENIZER, max_model_len=2048, vocab_size=3072, model="toy", thinking=False
)


def continuation(ids: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return what follows ids: a function of them alone."""
    return tuple(20 + (sum(ids) + i) % 100 for i in range(count))


class ToyEngine:
    """Finishes at most `width` requests a step, picked at random."""

    def __init__(self, width: int = 4, seed: int = 0, step_s: float = 0.0) -> None:
        self.live: dict[int, tuple[tuple[int, ...], SamplingParams]] = {}
        self.cancelled: list[int] = []
        self.max_live = 0
        self.num_submitted = 0
        self._random = random.Random(seed)
        self._width, self._step_s = width, step_s

    def submit(self, prompt: list[int], sampling_params: SamplingParams) -> int:
        self.num_submitted += 1
        self.live[self.num_submitted] = (tuple(prompt), sampling_params)
        self.max_live = max(self.max_live, len(self.live))
        return self.num_submitted

    def step(self) -> list[Completion]:
        if self._step_s:
            import time

            time.sleep(self._step_s)
        chosen = self._random.sample(sorted(self.live), min(self._width, len(self.live)))
        return [self._finish(request_id) for request_id in chosen]

    def cancel(self, request_id: int) -> bool:
        self.cancelled.append(request_id)
        return self.live.pop(request_id, None) is not None

    def _finish(self, request_id: int) -> Completion:
        prompt, params = self.live.pop(request_id)
        is_long = len(prompt) > 100
        ids = () if is_long else continuation(prompt, params.max_tokens)
        return Completion(
            index=0,
            request_id=request_id,
            prompt_token_ids=prompt,
            token_ids=ids,
            text=TOKENIZER.decode(ids),
            finish_reason=FinishReason.PROMPT_LENGTH_EXCEEDED if is_long else FinishReason.LENGTH,
            error="the prompt is too long" if is_long else None,
            num_draft_verified=4,
            num_draft_accepted=3,
        )


def run(
    source: Path | str,
    output: Path,
    engine: ToyEngine | None = None,
    *,
    settings: str = "s",
    defaults: dict[str, Any] | None = None,
    window: int = 8,
    max_errors: int | None = None,
    retries: bool = False,
    **more: Any,
) -> Totals:
    """Run a job over files."""
    context = replace(CONTEXT, defaults=defaults or {}, settings=settings)
    options = JobOptions(window=window, max_errors=max_errors, retries=retries)
    with Source(str(source)) as opened, Output(output) as file:
        return run_jobs(engine or ToyEngine(), opened, file, context, options, **more)
