"""Random words and noise on numpy arrays, and the seeds of samples (pure: no torch).

`sampling/rng.py` draws the same words on tensors. Source: runtime specification, 5.3.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "KEY_STEPS",
    "LARGEST_UNIFORM",
    "MASK",
    "MAX_LOG_NOISE",
    "MIN_LOG_NOISE",
    "MULTIPLIERS",
    "NUM_ROUNDS",
    "STREAM_ACCEPT",
    "STREAM_DRAFT",
    "STREAM_RESIDUAL",
    "STREAM_TARGET",
    "derive_seed",
    "exponentials",
    "host_words",
    "uniforms",
]

STREAM_TARGET = 0
"""The purpose number of target tokens; coupled drafts share it, so that they draw the same
noise."""

STREAM_DRAFT = 1
"""Drafts under standard rejection sampling, which must not know the target's noise."""

STREAM_RESIDUAL = 2
"""What replaces a rejected draft under standard rejection sampling."""

STREAM_ACCEPT = 3
"""The test of a draft under standard rejection sampling."""

MAX_LOG_NOISE = 22.88
MIN_LOG_NOISE = -2.82
"""Bounds of -log(exponential(...)), which `exponential` keeps by clamping."""

MASK = 0xFFFFFFFF
NUM_ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
LARGEST_UNIFORM = 1.0 - 2.0**-24
_CHUNK = 8192  # counters at a time, so that the words stay in the core's cache

_Words = NDArray[np.uint64]


def host_words(
    seeds: _Words | np.uint64,
    positions: NDArray[np.int64] | np.int64,
    groups: NDArray[np.int64],
    stream: int = STREAM_TARGET,
) -> NDArray[np.uint32]:
    """Return the random words of four token ids each, as `exponential` uses them.

    seeds      [N] or one uint64
    positions  [N] or one int64
    groups     [N]     int64
    returns    [N, 4]  uint32
    """
    words = np.empty((len(groups), 4), np.uint32)
    for begin in range(0, len(groups), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        seed = seeds[part] if isinstance(seeds, np.ndarray) else seeds
        position = positions[part] if isinstance(positions, np.ndarray) else positions
        _host_philox(
            words[part], position.astype(np.uint64), groups[part].astype(np.uint64), stream, seed
        )
    return words


def _host_philox(
    out: NDArray[np.uint32],
    position: _Words | np.uint64,
    group: _Words,
    stream: int,
    seed: _Words | np.uint64,
) -> None:
    """Fill `out` [N, 4] for counters (position, group, stream, 0); scalars stay scalars."""
    mask, half = np.uint64(MASK), np.uint64(32)
    first, second = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
    low_step, high_step = np.uint64(KEY_STEPS[0]), np.uint64(KEY_STEPS[1])
    low_key: _Words | np.uint64 = seed & mask
    high_key: _Words | np.uint64 = seed >> half
    word0: _Words | np.uint64 = position & mask
    word1: _Words | np.uint64 = group
    word2: _Words | np.uint64 = np.uint64(stream)
    word3: _Words | np.uint64 = np.uint64(0)
    for _ in range(NUM_ROUNDS):
        product0, product1 = word0 * first, word2 * second
        word0 = (product1 >> half) ^ (word1 ^ low_key)
        word2 = (product0 >> half) ^ (word3 ^ high_key)
        word1, word3 = product1 & mask, product0 & mask
        low_key = (low_key + low_step) & mask
        high_key = (high_key + high_step) & mask
    for lane, word in enumerate((word0, word1, word2, word3)):
        out[:, lane] = word


def uniforms(words: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Return uniform numbers in (0, 1) from random words of any shape."""
    uniform: NDArray[np.float64] = np.minimum((words + 0.5) * 2.0**-32, LARGEST_UNIFORM)
    return uniform


def exponentials(words: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Return unit exponentials from random words of any shape."""
    return -np.log1p(-uniforms(words))


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of the `index`-th sample of a request; sample 0 keeps the request's own."""
    if index == 0:
        return seed
    key = np.uint64(seed & (2**64 - 1))
    position = np.array([index & MASK], np.int64)
    words = host_words(key, position, np.array([MASK], np.int64), stream=MASK)[0]
    return int(words[0]) | int(words[1]) << 32
