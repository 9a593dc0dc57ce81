"""Random draws as a pure function of (seed, absolute position, token id, purpose).

Counter based (Philox4x32-10), so a draw does not depend on the batch, on the step a position is
computed in, or on what was drawn before. Source: runtime specification, 5.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["MAX_LOG_NOISE", "MIN_LOG_NOISE", "STREAM_TARGET", "exponential", "philox"]

STREAM_TARGET = 0
"""The purpose number of target tokens; drafts share it, so that they draw the same noise."""

MAX_LOG_NOISE = 22.88
MIN_LOG_NOISE = -2.82
"""Bounds of -log(exponential(...)), which `exponential` keeps by clamping."""

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Return the four words of Philox4x32-10 for each counter.

    counter  [4, N]  int64, words 0..2^32-1
    key      [2, N]  int64, words 0..2^32-1
    returns  [4, N]  int64, words 0..2^32-1
    Integer products wrap modulo 2^64, which leaves both 32-bit halves right.
    """
    multiplier = torch.tensor(_MULTIPLIERS, dtype=torch.int64, device=counter.device).unsqueeze(1)
    step = torch.tensor(_KEY_STEPS, dtype=torch.int64, device=counter.device).unsqueeze(1)
    even, odd = counter[0::2], counter[1::2]
    for _ in range(_ROUNDS):
        product = even * multiplier
        high = (product >> 32) & _MASK
        low = product & _MASK
        even, odd = high.flip(0) ^ odd ^ key, low.flip(0)
        key = (key + step) & _MASK
    return torch.stack((even[0], odd[0], even[1], odd[1]))


def exponential(
    seeds: Tensor, positions: Tensor, groups: Tensor, stream: int = STREAM_TARGET
) -> Tensor:
    """Return the unit exponentials E(seed, position, token id) of four token ids each.

    seeds      [N]     int64, the 64 bits of the seed
    positions  [N]     int64, absolute position of the token being drawn
    groups     [N]     int64, group g stands for the token ids 4g..4g+3
    returns    [N, 4]  float64, in [2^-33, 16.7]: the uniform behind it is clamped to 1 - 2^-24
    """
    counter = torch.stack(
        (positions & _MASK, groups, torch.full_like(groups, stream), torch.zeros_like(groups))
    )
    key = torch.stack((seeds & _MASK, (seeds >> 32) & _MASK))
    uniform = (philox(counter, key).T.double() + 0.5) * 2.0**-32
    return -torch.log1p(-uniform.clamp_(max=1.0 - 2.0**-24))
