"""What a block of drafts reads and writes, and the step from one draft to the next, on a card.

No op of the dispatch table: places are integers, and the confidence is one sum per sequence. The
plain forms define the others; `model/dspark.py` says what the numbers mean.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["BlockRows", "lay_out_block", "markov_step"]


class BlockRows(NamedTuple):
    """The S * B rows of S draft blocks; those of slot 0 are padding and store nothing.

    token_ids  [S*B]       a block's first token, then noise
    positions  [S*B]
    own        [S*B]       ring entry of the row, -1 = none
    seen       [S*B, W+B]  ring entries that the row sees: those held, in the order of a ring of W,
                           then its block's; -1 = absent
    live       [S*B] bool
    """

    token_ids: Tensor
    positions: Tensor
    own: Tensor
    seen: Tensor
    live: Tensor


def lay_out_block(
    slots: Tensor, last: Tensor, first: Tensor, size: int, window: int, ring: int, noise: int
) -> BlockRows:
    """Lay out blocks of `size` rows behind positions `last`; all of [S] int64.

    first  the token at `last` + 1; noise: the token of the rows behind it
    ring   positions that a slot's ring holds, at least window + size: the block's entries lie
           behind the last position, where the next step stores others
    """
    if slots.device.type == "cuda" and find_spec("triton"):
        from deepinfer.kernels.draft_block import triton

        return triton.lay_out_block(slots, last, first, size, window, ring, noise)
    device = slots.device
    live = (slots > 0).repeat_interleave(size)
    ahead = last[:, None] + 1 + torch.arange(size, device=device)
    ids = torch.full_like(ahead, noise)
    ids[:, 0] = first
    own = slots[:, None] * ring + ahead % ring
    column = torch.arange(window + size, device=device)
    # The youngest position that has a place in a ring of W.
    found = last[:, None] - (last[:, None] - column) % window
    held = (last + 1).clamp(max=window)[:, None]
    entry = torch.where(found >= 0, slots[:, None] * ring + found % ring, -1)
    behind = own.gather(1, (column - held).clamp(0, size - 1))
    seen = torch.where(column < held, entry, torch.where(column < held + size, behind, -1))
    return BlockRows(
        ids.flatten(),
        ahead.flatten(),
        torch.where(live, own.flatten(), -1),
        seen.repeat_interleave(size, 0),
        live,
    )


def markov_step(
    embed: Tensor, tokens: Tensor, hidden: Tensor, weight: Tensor, confidence: Tensor
) -> Tensor:
    """Return the rows [S, R] of embed [V, R] that tokens [S] name, and write the confidences.

    hidden      [S, C] of the draft that follows, weight [1, C + R]
    confidence  [S] fp32, whose places may lie apart: the product of [hidden, row] with the weight
    """
    if tokens.device.type == "cuda" and find_spec("triton"):
        from deepinfer.kernels.draft_block import triton

        return triton.markov_step(embed, tokens, hidden, weight, confidence)
    rows = embed[tokens]
    joint = torch.cat([hidden.float(), rows.float()], dim=1)
    confidence.copy_((joint * weight.float()).sum(1))
    return rows
