"""SlotState: what the device knows of every sequence, addressed by slot.

The next step's input tokens and positions are read from here, so that a step can be launched before
the host has seen the tokens of the one before. Touched only by work on the device's queue. Source:
runtime specification, 2.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.engine.plan import Admission
from deepinfer.kernels.turn import Slots

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
    endings      [S, E]  int64, ids that end it, -1 padded; replaced when it has to grow
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
        self.endings = zeros(num_slots, _FEW_ENDINGS) - 1

    @property
    def tensors(self) -> Slots:
        """What kernels read and write; `endings` may be replaced."""
        return Slots(
            self.length,
            self.last_token,
            self.alive,
            self.limit,
            self.drafts,
            self.num_drafts,
            self.confidences,
            self.endings,
        )

    def admit(self, admission: Admission) -> None:
        """Give a slot to a sequence."""
        slot, endings = admission.slot, sorted(set(admission.ending_ids))
        one = slice(slot, slot + 1)  # filling a slice does not wait for a device
        self.length[one].fill_(admission.length)
        self.limit[one].fill_(admission.limit)
        self.alive[one].fill_(True)
        self.num_drafts[one].fill_(0)
        missing = len(endings) - self.endings.shape[1]
        if missing > 0:
            self.endings = torch.nn.functional.pad(self.endings, (0, missing), value=-1)
        self.endings[one].fill_(-1)
        for place, token_id in enumerate(endings):
            self.endings[one, place].fill_(token_id)

    def ends(self, slots: Tensor, token_ids: Tensor) -> Tensor:
        """Return which tokens end their sequence by what they are.

        slots [N], token_ids [N] or [N, J]; returns bool of the shape of `token_ids`.
        """
        endings = self.endings[slots]
        if token_ids.dim() == 1:
            return (token_ids.unsqueeze(1) == endings).any(1)
        return (token_ids.unsqueeze(2) == endings.unsqueeze(1)).any(2)

    def advance(
        self,
        slots: Tensor,
        token_ids: Tensor,
        accepted: Tensor,
        failed: Tensor,
        live: Tensor | None = None,
    ) -> None:
        """Take new tokens per slot; forget its drafts.

        slots      [N]     int64, each once, but for slot 0
        token_ids  [N, J]  int64, of which the first accepted + 1 count
        accepted   [N]     int64, 0..J-1
        failed     [N]     bool, the sequence's logits could not be used: it ends
        live       [N]     bool, the others have slot 0, which stays dead; None = all
        """
        length = self.length[slots] + accepted + 1
        self.length[slots] = length
        self.last_token[slots] = token_ids.gather(1, accepted.unsqueeze(1)).squeeze(1)
        self.num_drafts.index_fill_(0, slots, 0)
        places = torch.arange(token_ids.shape[1], device=token_ids.device)
        ended = (self.ends(slots, token_ids) & (places <= accepted.unsqueeze(1))).any(1)
        alive = ~(ended | (length >= self.limit[slots]) | failed)
        self.alive[slots] = alive if live is None else alive & live

    def propose(self, slots: Tensor, drafts: Tensor, counts: Tensor, confidences: Tensor) -> None:
        """Keep drafts for the next step.

        slots [N] int64; drafts [N, K] int64; counts [N] int64, how many of them can be used;
        confidences [N, K] fp32
        """
        self.drafts[slots] = drafts
        self.num_drafts[slots] = counts
        self.confidences[slots] = confidences
