"""SlotState: what the device knows of every sequence, addressed by slot.

The next step's input tokens and positions are read from here, so that a step can be launched before
the host has seen the tokens of the one before. Touched only by work on the device's queue. Source:
runtime specification, 2.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.engine.plan import Admission

__all__ = ["SlotState"]

_FEW_ENDINGS = 4


class SlotState:
    """Per slot, S of them; slot 0 is padding.

    length       [S]     int64, committed tokens, prompt and output
    last_token   [S]     int64, the last of them
    alive        [S]     bool, false once the sequence has ended as far as the device can tell
    limit        [S]     int64, length that ends it
    drafts       [S, K]  int64, proposed continuation
    num_drafts   [S]     int64, how many of `drafts` are valid
    confidences  [S, K]  fp32
    """

    def __init__(self, num_slots: int, num_drafts: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.length = zeros(num_slots)
        self.last_token = zeros(num_slots)
        self.alive = zeros(num_slots, dtype=torch.bool)
        self.limit = zeros(num_slots)
        self.drafts = zeros(num_slots, num_drafts)
        self.num_drafts = zeros(num_slots)
        self.confidences = zeros(num_slots, num_drafts, dtype=torch.float32)
        self._ending = zeros(num_slots, _FEW_ENDINGS) - 1

    def admit(self, admission: Admission) -> None:
        """Give a slot to a sequence."""
        slot, endings = admission.slot, sorted(set(admission.ending_ids))
        self.length[slot] = admission.length
        self.limit[slot] = admission.limit
        self.alive[slot] = True
        self.num_drafts[slot] = 0
        missing = len(endings) - self._ending.shape[1]
        if missing > 0:
            self._ending = torch.nn.functional.pad(self._ending, (0, missing), value=-1)
        self._ending[slot] = -1
        self._ending[slot, : len(endings)] = torch.tensor(endings, dtype=torch.int64)

    def ends(self, slots: Tensor, token_ids: Tensor) -> Tensor:
        """Return which tokens end their sequence by what they are.

        slots [N], token_ids [N] or [N, J]; returns bool of the shape of `token_ids`.
        """
        endings = self._ending[slots]
        if token_ids.dim() == 1:
            return (token_ids.unsqueeze(1) == endings).any(1)
        return (token_ids.unsqueeze(2) == endings.unsqueeze(1)).any(2)

    def advance(self, slots: Tensor, token_ids: Tensor, accepted: Tensor, failed: Tensor) -> None:
        """Take new tokens per slot; forget its drafts.

        slots      [N]     int64, each once
        token_ids  [N, J]  int64, of which the first accepted + 1 count
        accepted   [N]     int64, 0..J-1
        failed     [N]     bool, the sequence's logits could not be used: it ends
        """
        length = self.length[slots] + accepted + 1
        self.length[slots] = length
        self.last_token[slots] = token_ids.gather(1, accepted.unsqueeze(1)).squeeze(1)
        self.num_drafts[slots] = 0
        places = torch.arange(token_ids.shape[1], device=token_ids.device)
        ended = (self.ends(slots, token_ids) & (places <= accepted.unsqueeze(1))).any(1)
        self.alive[slots] = ~(ended | (length >= self.limit[slots]) | failed)

    def propose(self, slots: Tensor, drafts: Tensor, counts: Tensor, confidences: Tensor) -> None:
        """Keep drafts for the next step.

        slots [N] int64; drafts [N, K] int64; counts [N] int64, how many of them can be used;
        confidences [N, K] fp32
        """
        self.drafts[slots] = drafts
        self.num_drafts[slots] = counts
        self.confidences[slots] = confidences
