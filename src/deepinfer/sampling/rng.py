"""Random draws as a pure function of (seed, absolute position, token id, purpose).

Counter based (Philox4x32-10), so a draw does not depend on the batch, on the step a position is
computed in, or on what was drawn before. Here on tensors for any device; `sampling/noise.py` is the
same on numpy arrays. Source: runtime specification, 5.3.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from deepinfer.sampling.noise import (
    KEY_STEPS,
    LARGEST_UNIFORM,
    MASK,
    MULTIPLIERS,
    NUM_ROUNDS,
    STREAM_TARGET,
)

__all__ = ["exponential", "philox"]


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Return the four words of Philox4x32-10 for each counter.

    counter  [4, N]  int64, words 0..2^32-1
    key      [2, N]  int64, words 0..2^32-1
    returns  [4, N]  int64, words 0..2^32-1
    Integer products wrap modulo 2^64, which leaves both 32-bit halves right.
    """
    multiplier, step = _constants(counter.device)
    even, odd = counter[0::2], counter[1::2]
    for _ in range(NUM_ROUNDS):
        product = even * multiplier
        high = (product >> 32) & MASK
        low = product & MASK
        even, odd = high.flip(0) ^ odd ^ key, low.flip(0)
        key = (key + step) & MASK
    return torch.stack((even[0], odd[0], even[1], odd[1]))


@lru_cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return multipliers and key steps [2, 1], brought to a device once."""
    multiplier, step = (
        torch.tensor(values, dtype=torch.int64, device=device).unsqueeze(1)
        for values in (MULTIPLIERS, KEY_STEPS)
    )
    return multiplier, step


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
        (positions & MASK, groups, torch.full_like(groups, stream), torch.zeros_like(groups))
    )
    key = torch.stack((seeds & MASK, (seeds >> 32) & MASK))
    uniform = (philox(counter, key).T.double() + 0.5) * 2.0**-32
    return -torch.log1p(-uniform.clamp_(max=LARGEST_UNIFORM))
