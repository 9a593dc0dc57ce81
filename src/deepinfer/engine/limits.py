"""Limits: the numbers that scheduling keeps to. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The numbers a Scheduler keeps to.

    max_num_seqs            running sequences at once
    max_num_batched_tokens  tokens of one prefill step
    max_model_len           most positions of a sequence; the last token drawn needs none, so a
                            prompt of exactly this length still yields one token
    chunk_tokens            tokens of one prompt chunk. With `fixed_chunks` boundaries are multiples
                            of it from position 0, whatever else runs; otherwise a chunk also
                            shrinks to the budget that is left
    reserve                 a sequence gets all blocks it can ever need when it is admitted, so that
                            none is put back; otherwise blocks are added as it grows
    prefill_gain            prefill once new sequences would enlarge the running batch by this share
    max_prefill_wait_steps  most decode steps that admissible waiting work sits through
    max_decode_wait_steps   most prefill steps in a row while something is ready to decode
    vocab_size              ids of a grammar mask
    keep_tokens             last tokens of a prompt that the decoder half computes, None = all
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    chunk_tokens: int
    eos_token_id: int
    fixed_chunks: bool = True
    reserve: bool = True
    prefill_gain: float = 0.1
    max_prefill_wait_steps: int = 100
    max_decode_wait_steps: int = 8
    vocab_size: int = 0
    keep_tokens: int | None = None

    def __post_init__(self) -> None:
        """Check what every caller relies on."""
        assert 1 <= self.chunk_tokens <= self.max_num_batched_tokens, self
        assert self.max_num_seqs >= 1 and self.max_model_len >= 1, self
        assert self.max_prefill_wait_steps >= 1 and self.max_decode_wait_steps >= 1, self
