"""Sequence: the scheduler's own mutable record of one request. Pure."""

from __future__ import annotations

from deepinfer.engine.plan import RowResult
from deepinfer.engine.request import Completion, FinishReason, Request
from deepinfer.engine.text import TextStream

__all__ = ["Sequence"]


class Sequence:
    """One live request: its tokens, how many of them are computed, and what it holds.

    token_ids     prompt, then generated ids
    num_computed  leading ids whose keys and values are in the caches
    slot, blocks  held from admission until retirement; slot 0 means none
    in_flight     launched steps that name it and are not applied yet
    """

    __slots__ = (
        "blocks",
        "error",
        "finish_reason",
        "finish_s",
        "first_token_s",
        "in_flight",
        "logprobs",
        "num_computed",
        "num_reported",
        "request",
        "slot",
        "text",
        "token_ids",
        "top_logprobs",
    )

    def __init__(self, request: Request, text: TextStream | None = None) -> None:
        self.request = request
        self.text = text
        self.token_ids: list[int] = list(request.prompt_token_ids)
        self.num_computed = 0
        self.num_reported = 0
        self.slot = 0
        self.blocks: tuple[int, ...] = ()
        self.in_flight = 0
        self.logprobs: list[float] | None = [] if request.params.logprobs else None
        self.top_logprobs: list[tuple[tuple[int, float], ...]] | None = (
            [] if request.params.top_logprobs else None
        )
        self.first_token_s: float | None = None
        self.finish_reason: FinishReason | None = None
        self.finish_s = 0.0
        self.error: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining(self) -> int:
        """Known tokens that are not computed yet: the rest of the prompt, or 1 while generating."""
        return len(self.token_ids) - self.num_computed

    def extend(self, row: RowResult, eos_token_id: int, max_model_len: int, now_s: float) -> None:
        """Append a step's tokens one by one until a stop rule holds; what follows is dropped.

        Rules in order: end-of-sequence, stop id, stop string, length of the model, `max_tokens`.
        """
        params = self.request.params
        if self.first_token_s is None:
            self.first_token_s = now_s
        for idx, token_id in enumerate(row.token_ids):
            self.token_ids.append(token_id)
            if self.logprobs is not None and row.logprobs is not None:
                self.logprobs.append(row.logprobs[idx])
            if self.top_logprobs is not None and row.top_logprobs is not None:
                self.top_logprobs.append(row.top_logprobs[idx])
            is_eos = token_id == eos_token_id and not params.ignore_eos
            ends = is_eos or token_id in params.stop_ids
            if ends or (self.text is not None and self.text.push(token_id)):
                self.finish(FinishReason.STOP, now_s)
            elif len(self.token_ids) > max_model_len or self.num_output_tokens >= params.max_tokens:
                self.finish(FinishReason.LENGTH, now_s)
            if self.finish_reason is not None:
                return

    def is_finished(self) -> bool:
        """Whether the sequence has ended, for whatever reason."""
        return self.finish_reason is not None

    def finish(self, reason: FinishReason, now_s: float, error: str | None = None) -> None:
        """Record why and when the request ended."""
        assert self.finish_reason is None, (self.request.request_id, self.finish_reason, reason)
        self.finish_reason = reason
        self.finish_s = now_s
        self.error = error

    def completion(self) -> Completion:
        """Build the result of a finished request; its text is set when it kept a TextStream."""
        assert self.finish_reason is not None, self.request.request_id
        reason, text = self.finish_reason, None
        if self.text is not None:
            text = self.text.finish()
            if self.text.stopped and reason is FinishReason.LENGTH:
                reason = FinishReason.STOP  # the last held-back bytes completed a stop string
        start_s = self.request.arrival_s
        return Completion(
            index=self.request.index,
            request_id=self.request.request_id,
            prompt_token_ids=self.request.prompt_token_ids,
            token_ids=tuple(self.token_ids[self.num_prompt_tokens :]),
            text=text,
            finish_reason=reason,
            error=self.error,
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            top_logprobs=None if self.top_logprobs is None else tuple(self.top_logprobs),
            ttft_s=None if self.first_token_s is None else self.first_token_s - start_s,
            finish_s=self.finish_s - start_s,
        )
