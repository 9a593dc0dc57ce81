"""What protocols share: the parameters of several samples, and failures as errors."""

from __future__ import annotations

from dataclasses import replace

from deepinfer.engine.request import Completion, FinishReason, SamplingParams
from deepinfer.errors import ProtocolError
from deepinfer.sampling.noise import derive_seed

__all__ = ["raise_failure", "sample_params"]


def sample_params(params: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of one of several samples, seeded as `LLM.generate` seeds it."""
    if index == 0 or params.seed is None:
        return params
    return replace(params, seed=derive_seed(params.seed, index))


def raise_failure(completion: Completion) -> None:
    """Raise ProtocolError for a completion that has failed."""
    if completion.error is None and completion.finish_reason is not FinishReason.ABORT:
        return
    reason = completion.finish_reason
    is_bad = reason in (FinishReason.INVALID_REQUEST, FinishReason.PROMPT_LENGTH_EXCEEDED)
    # A shape that no token was drawn for has been refused; later the engine could not keep to it.
    is_bad |= reason is FinishReason.STRUCTURED_OUTPUT_ERROR and not completion.token_ids
    message = completion.error or "the request was aborted"
    raise ProtocolError(message, status=400 if is_bad else 500)
