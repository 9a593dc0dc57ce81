"""One sequence on the fast path by hand: for traces, comparisons and tests."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.cache.layout import CacheLayout
from deepinfer.cache.tensors import Caches
from deepinfer.model.fast.inputs import SequenceRows, build_inputs
from deepinfer.model.fast.model import FastModel

__all__ = ["Session"]

_SLOT = 1
_ROWS_FIRST = ("logits", "main_hidden", "engram_hash", "cand_blocks")


class Session:
    """Feeds one sequence to a model, in caches of its own.

    max_tokens  positions that the caches hold
    """

    def __init__(self, model: FastModel, max_tokens: int, tokens_per_block: int = 128) -> None:
        self.model = model
        self.layout = CacheLayout.build(
            model.config, "official" if model.numerics.quantize else "noq", tokens_per_block
        )
        num_blocks = -(-max_tokens // tokens_per_block)
        # Tables out of order: an engine's blocks are not contiguous either.
        self.blocks = list(range(num_blocks, 0, -1))
        self.caches = Caches.allocate(self.layout, num_blocks + 1, _SLOT + 1, model.device)
        self.length = 0

    def prefill(
        self,
        token_ids: Sequence[int],
        chunk: int | None = None,
        trace: MutableMapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Feed tokens in chunks (None = all at once); returns the logits of every row [T, V].

        trace is filled with the values of all rows, as by the reference model.
        """
        chunk = chunk or len(token_ids)
        logits: list[Tensor] = []
        traces: list[dict[str, Tensor]] = []
        for start in range(0, len(token_ids), chunk):
            part: dict[str, Tensor] | None = None if trace is None else {}
            logits.append(self._feed(token_ids[start : start + chunk], False, part))
            if part is not None:
                traces.append(part)
        result = torch.cat(logits)
        if trace is not None:
            trace.update(_join(traces))
            trace["tokens"] = torch.tensor(list(token_ids), dtype=torch.int32)
            trace["logits"] = result
        return result

    def decode(self, token_id: int, trace: MutableMapping[str, Tensor] | None = None) -> Tensor:
        """Feed one token through the decode path; returns its logits [V]."""
        return self._feed([token_id], True, trace)[0]

    def verify(self, token_ids: Sequence[int]) -> Tensor:
        """Feed up to 1 + `max_rollback` tokens through one decode step; returns logits [n, V].

        Each row has the bits of one-token decoding. `rewind` takes rejected rows back.
        """
        return self._feed(token_ids, True, None)

    def draft(self, first_token: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draft behind `first_token`; returns tokens [B+1], raw confidences [B], logits [B, V]."""
        assert self.model.draft is not None, "load the model with_drafts"
        with torch.inference_mode():
            tokens, confidences, logits = self.model.draft.propose(
                self.caches, [_SLOT], [self.length - 1], [first_token]
            )
        return tokens[0], confidences[0], logits[0]

    def rewind(self, length: int) -> None:
        """Step back to `length` tokens, at most as far as the rings allow."""
        assert 0 <= self.length - length <= self.layout.max_rollback, (self.length, length)
        self.length = length

    @torch.inference_mode()
    def _feed(
        self,
        token_ids: Sequence[int],
        decode: bool,
        trace: MutableMapping[str, Tensor] | None,
    ) -> Tensor:
        rows = SequenceRows(_SLOT, self.length, token_ids, self.blocks)
        inputs = build_inputs([rows], decode, self.layout, self.model.device)
        every = torch.arange(len(token_ids), device=self.model.device)
        logits = self.model.forward(inputs, self.caches, every, trace)
        self.length += len(token_ids)
        return logits


def _join(traces: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join the traces of chunks along their rows."""
    joined: dict[str, Tensor] = {}
    for name in traces[0]:
        parts = [trace[name] for trace in traces]
        if name == "cand_blocks":
            width = max(part.shape[1] for part in parts)
            parts = [F.pad(part, (0, width - part.shape[1])) for part in parts]
        joined[name] = torch.cat(parts, dim=0 if name in _ROWS_FIRST else 1)
    return joined
