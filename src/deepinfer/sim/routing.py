"""Which experts tokens choose in a simulated run: shares with a chosen skew that move (pure)."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from deepinfer.parallel.placement import Placement
from deepinfer.sim.settings import Settings

__all__ = ["EXACT_CELLS", "Routing", "skewed_logits"]

Floats = NDArray[np.floating]

EXACT_CELLS = 20_000
"""Most groups x layers x slots for which `auto` draws an exact multinomial."""


def skewed_logits(experts: int, hot: float) -> NDArray[np.float64]:
    """Return logarithms of shares, ascending: log-normal quantiles, the last `hot` times the mean.

    A single expert has no skew.
    """
    normal = NormalDist()
    at = np.array([normal.inv_cdf((i + 0.5) / experts) for i in range(experts)])
    if experts == 1 or hot <= 1:
        return np.zeros(experts)
    low, high = 0.0, 8.0
    for _ in range(60):
        middle = (low + high) / 2
        if math.exp(middle * at[-1]) < hot * float(np.exp(middle * at).mean()):
            low = middle
        else:
            high = middle
    return low * at


class Routing:
    """Draws the rows of every slot, a step at a time.

    Each layer has its own order of popularity. Shares change by a factor of their own every step
    (`change`) and wander slowly (`drift`: a stationary AR(1) of that spread).
    """

    def __init__(self, settings: Settings, rng: np.random.Generator) -> None:
        self._settings = settings
        self._rng = rng
        layers, experts = settings.counted_layers, settings.experts
        base = skewed_logits(experts, settings.hot)
        self._base = np.stack([rng.permutation(base) for _ in range(layers)])
        self._keep = math.exp(-1 / settings.drift_steps) if settings.drift_steps else 0.0
        self._wander = rng.normal(0, settings.drift, self._base.shape) if settings.drift else None
        self.shares = self._normalized(self._base)

    def advance(self) -> Floats:
        """Move on by a step; returns the shares [layers, E], each layer's sum 1."""
        logits = self._base
        if self._wander is not None:
            fresh = self._rng.standard_normal(logits.shape) * self._settings.drift
            self._wander = self._keep * self._wander + math.sqrt(1 - self._keep**2) * fresh
            logits = logits + self._wander
        if self._settings.change:
            noise = self._rng.standard_normal(logits.shape, np.float32)
            logits = logits + self._settings.change * noise
        elif self._wander is None:
            return self.shares
        self.shares = self._normalized(logits)
        return self.shares

    @staticmethod
    def _normalized(logits: Floats) -> Floats:
        found = np.exp(logits)
        return np.asarray(found / found.sum(axis=1, keepdims=True))

    def rows(self, placement: Placement, tokens: NDArray[np.integer]) -> Floats:
        """Return rows [groups, layers, slots of a rank, N] for so many tokens of each group.

        A choice goes to each copy of its expert with the same chance, as keys spread them. Every
        token makes `active` choices.
        """
        layers = np.arange(self.shares.shape[0])[:, None, None]
        held = placement.by_rank.transpose(0, 2, 1)  # ranks last: sums over slots are fast
        each = (self.shares / placement.counts)[layers, held]
        choices = tokens.astype(np.int64) * self._settings.active
        draw: Literal["auto", "exact", "normal"] = self._settings.draw
        if draw == "auto":
            draw = "exact" if each.size * len(tokens) <= EXACT_CELLS else "normal"
        if draw == "exact":
            chances = each.reshape(len(each), -1)
            chances = chances / chances.sum(axis=1, keepdims=True)
            drawn = np.stack([self._rng.multinomial(n, chances) for n in choices])
            return drawn.reshape(-1, *each.shape).astype(np.float32)
        narrow = each.astype(np.float32)
        # Quantiles by 16 random bits: a fraction of the time, and 4 deviations are enough.
        places = self._rng.integers(0, 1 << 16, (len(tokens), *each.shape), np.uint16)
        found: NDArray[np.float32] = _normals()[places]
        for own, number in zip(found, choices.tolist(), strict=True):
            mean = narrow * np.float32(number)
            own *= np.sqrt(mean)
            own += mean
            # Scaled to their fixed sum, counts have the covariance of a multinomial.
            own *= number / np.maximum(own.sum(axis=(1, 2), keepdims=True), 1)
        np.rint(found, out=found)
        np.maximum(found, 0, out=found)
        return found


@lru_cache(maxsize=1)
def _normals() -> NDArray[np.float32]:
    """Return 65,536 equally likely values of a normal distribution."""
    normal = NormalDist()
    upper = [normal.inv_cdf((i + 0.5) / 65536) for i in range(32768, 65536)]
    return np.array([*[-value for value in reversed(upper)], *upper], np.float32)
