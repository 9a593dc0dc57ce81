"""Sequence: the scheduler's own mutable record of one request. Pure."""

from __future__ import annotations

from deepinfer.engine.commit import TokenMatcher
from deepinfer.engine.plan import RowPlan
from deepinfer.engine.request import Completion, DraftCounts, DraftOutcome, FinishReason, Request
from deepinfer.engine.snapshot import State
from deepinfer.engine.text import TextStream

__all__ = ["Sequence"]

_NEVER = 2**31 - 1


class Sequence:
    """One live request: its tokens, how many of them are computed, and what it holds.

    order         place among the arrivals
    token_ids     prompt, then generated ids
    limit         length of `token_ids` that ends the request
    ending_ids    ids that end it
    matcher       its grammar, None when free
    num_computed  leading ids whose keys and values are in the caches, by the steps applied
    ahead_tokens  most positions that the steps in flight add to them
    ahead_draws   steps in flight that draw for it: each brings at least one token
    slot, blocks  held from admission until the end; slot 0 means none
    in_flight     launched steps that name it and are not applied yet
    stale         how many of these were launched before it was put back: their outcome is dropped
    decode_row    its row of a decode step, kept while nothing in it changes
    drafts, confidences  as last reported by the device
    outcomes      what its decode steps did and how often; empty where nobody drafts
    keys          digests of the prompt's full blocks, None until the prefix cache asks
    save_ends     lengths at which its state is worth a checkpoint
    saved         cache parts of a saved request that goes on here, None once they are loaded
    """

    __slots__ = (
        "ahead_draws",
        "ahead_tokens",
        "blocks",
        "confidences",
        "decode_row",
        "drafts",
        "ending_ids",
        "error",
        "finish_reason",
        "finish_s",
        "first_token_s",
        "in_flight",
        "keys",
        "limit",
        "logprobs",
        "matcher",
        "num_computed",
        "num_failures",
        "num_preemptions",
        "num_reported",
        "num_steps",
        "order",
        "outcomes",
        "prompt_logprobs",
        "request",
        "save_ends",
        "saved",
        "slot",
        "stale",
        "text",
        "token_ids",
        "top_logprobs",
    )

    def __init__(
        self,
        request: Request,
        text: TextStream | None = None,
        *,
        order: int = 0,
        eos_token_id: int = -1,
        max_model_len: int = _NEVER,
        matcher: TokenMatcher | None = None,
    ) -> None:
        params = request.params
        self.request = request
        self.text = text
        self.order = order
        self.token_ids: list[int] = list(request.prompt_token_ids)
        self.limit = min(len(self.token_ids) + params.max_tokens, max_model_len + 1)
        eos = () if params.ignore_eos or eos_token_id < 0 else (eos_token_id,)
        self.ending_ids = frozenset((*eos, *params.stop_ids))
        self.matcher = matcher
        self.num_computed = 0
        self.ahead_tokens = 0
        self.ahead_draws = 0
        self.num_reported = 0
        self.slot = 0
        self.blocks: tuple[int, ...] = ()
        self.in_flight = 0
        self.stale = 0
        self.decode_row: RowPlan | None = None
        self.drafts: tuple[int, ...] = ()
        self.confidences: tuple[float, ...] = ()
        self.outcomes: dict[DraftOutcome, int] = {}
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_failures = 0
        self.keys: tuple[bytes, ...] | None = None
        self.save_ends: tuple[int, ...] = ()
        self.saved: State | None = None
        self.logprobs: list[float] | None = [] if params.logprobs else None
        self.top_logprobs: list[tuple[tuple[int, float], ...]] | None = (
            [] if params.top_logprobs else None
        )
        self.prompt_logprobs: list[float] | None = [] if params.prompt_logprobs else None
        self.first_token_s: float | None = None
        self.finish_reason: FinishReason | None = None
        self.finish_s = 0.0
        self.error: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_scheduled(self) -> int:
        """Positions computed or planned to be; with drafts in flight, at most."""
        return self.num_computed + self.ahead_tokens

    @property
    def num_remaining(self) -> int:
        """Known tokens whose computing is not planned yet: the rest of the prompt, as a rule."""
        return len(self.token_ids) - self.num_computed - self.ahead_tokens

    def go_on_from(self, state: State) -> None:
        """Take over what a saved request has generated, before anything is planned."""
        self.token_ids += state.token_ids
        self.saved = state if state.num_computed else None
        if self.logprobs is not None:
            self.logprobs += state.logprobs or ()
        if self.top_logprobs is not None:
            self.top_logprobs += state.top_logprobs or ()
        if self.prompt_logprobs is not None:
            self.prompt_logprobs += state.prompt_logprobs or ()

    def is_finished(self) -> bool:
        """Whether the sequence has ended, for whatever reason."""
        return self.finish_reason is not None

    def put_back(self) -> None:
        """Forget what is computed and what is in flight; the tokens stay."""
        self.stale = self.in_flight
        self.num_computed = self.ahead_tokens = self.ahead_draws = 0
        self.decode_row = None
        self.drafts, self.confidences = (), ()
        self.saved = None

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
        counts = DraftCounts.of(self.outcomes)
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
            prompt_logprobs=None if self.prompt_logprobs is None else tuple(self.prompt_logprobs),
            num_preemptions=self.num_preemptions,
            num_steps=self.num_steps,
            num_draft_proposed=sum(counts.proposed),
            num_draft_verified=sum(counts.verified),
            num_draft_accepted=sum(counts.accepted),
            drafts=counts if self.outcomes else None,
            sample_index=self.request.sample_index,
        )
