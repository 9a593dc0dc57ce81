"""The constants of Engram's hash: bucket primes, row offsets and multipliers (pure: numpy only).

They follow from the config alone and are part of the checkpoint format: another prime or another
random stream would read other rows of the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from deepinfer.config.model import ModelConfig

__all__ = ["EngramTables", "engram_multipliers", "engram_primes", "engram_tables", "is_prime"]

# These bases decide primality without error for every n below 3.3e24.
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)
_SEED_STEP = 10007


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EngramTables:
    """The hash constants of all Engram layers, in the order of `engram_layer_ids`.

    primes       [L, G-1, H]    int64, buckets of n-gram order 2..G (axis 1) and head (axis 2)
    offsets      [L, (G-1)*H]   int64, first row of each column's buckets, order-major
    multipliers  [L, G]         int64, odd; index 0 belongs to the token itself, r to the token
                                r positions before
    """

    primes: NDArray[np.int64]
    offsets: NDArray[np.int64]
    multipliers: NDArray[np.int64]


def is_prime(n: int) -> bool:
    """Tell whether `n` is prime; exact for every n below 3.3e24 (Miller-Rabin with fixed bases)."""
    if n < 2:
        return False
    for p in _WITNESSES:
        if n % p == 0:
            return n == p
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(_passes(n, base, odd, twos) for base in _WITNESSES)


def _passes(n: int, base: int, odd: int, twos: int) -> bool:
    """Tell whether `n` looks prime to one base, where n - 1 = odd * 2**twos."""
    x = pow(base, odd, n)
    if x in (1, n - 1):
        return True
    for _ in range(twos - 1):
        x = x * x % n
        if x == n - 1:
            return True
    return False


@lru_cache(maxsize=16)
def engram_primes(
    num_layers: int, start: int, max_ngram_size: int, num_heads: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return the bucket primes, indexed [layer][order - 2][head].

    Each (layer, order) takes the first `num_heads` primes from `start` on that no earlier (layer,
    order) took. Source: weights specification, 5.2.
    """
    per_group = num_heads
    found: list[int] = []
    candidate = start
    # The search restarts at `start` for every group and skips what is used: one ascending run, cut
    # into groups.
    while len(found) < num_layers * (max_ngram_size - 1) * per_group:
        if is_prime(candidate):
            found.append(candidate)
        candidate += 1
    groups = [tuple(found[i : i + per_group]) for i in range(0, len(found), per_group)]
    orders = max_ngram_size - 1
    return tuple(tuple(groups[i * orders : (i + 1) * orders]) for i in range(num_layers))


def engram_multipliers(
    layer_ids: Sequence[int], compressed_vocab_size: int, max_ngram_size: int
) -> NDArray[np.int64]:
    """Return the odd hash multipliers, [L, G] int64, drawn from numpy's PCG64 stream of each layer.

    No product of a compressed id and a multiplier overflows int64. Source: weights specification,
    5.3.
    """
    bound = max(1, (2**63 - 1) // compressed_vocab_size // 2)
    result = np.empty((len(layer_ids), max_ngram_size), dtype=np.int64)
    for row, layer_id in enumerate(layer_ids):
        generator = np.random.default_rng(_SEED_STEP * layer_id)
        result[row] = generator.integers(0, bound, size=max_ngram_size, dtype=np.int64) * 2 + 1
    return result


def engram_tables(config: ModelConfig) -> EngramTables:
    """Return all hash constants of a config; without Engram layers every array has L = 0 rows."""
    layers = len(config.engram_layer_ids)
    orders = max(config.engram_max_ngram_size - 1, 0)
    heads = config.engram_n_heads
    if layers == 0:
        return EngramTables(
            primes=np.zeros((0, orders, heads), dtype=np.int64),
            offsets=np.zeros((0, orders * heads), dtype=np.int64),
            multipliers=np.zeros((0, config.engram_max_ngram_size), dtype=np.int64),
        )
    primes = np.array(
        engram_primes(layers, config.engram_vocab_size, config.engram_max_ngram_size, heads),
        dtype=np.int64,
    )
    flat = primes.reshape(layers, orders * heads)
    return EngramTables(
        primes=primes,
        offsets=np.cumsum(flat, axis=1) - flat,
        multipliers=engram_multipliers(
            config.engram_layer_ids,
            config.engram_compressed_vocab_size,
            config.engram_max_ngram_size,
        ),
    )
