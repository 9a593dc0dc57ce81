"""Measures over plain numbers: bits, calibration, accepted runs of drafts, shares (pure)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Bin",
    "Drafting",
    "Trial",
    "bits",
    "calibration_error",
    "fits_schema",
    "reliability",
    "repeated_share",
    "shares_of_fair",
    "sigmoid",
]

NUM_BINS: Final = 10


def bits(log_probs: NDArray[np.float64]) -> float:
    """Return the bits that natural log-probabilities cost."""
    return float(-log_probs.sum() / math.log(2))


def sigmoid(logit: float, temperature: float = 1.0) -> float:
    """Return the probability that a logit stands for at a temperature."""
    return 1.0 / (1.0 + math.exp(-max(-60.0, min(60.0, logit / temperature))))


@dataclass(frozen=True, slots=True)
class Bin:
    """One range of confidence: how many predictions, their mean, how often they came true."""

    low: float
    high: float
    count: int
    confidence: float
    accuracy: float


def reliability(predictions: Sequence[tuple[float, bool]], num_bins: int = NUM_BINS) -> list[Bin]:
    """Sort (probability, came true) into ranges of equal width; empty ranges are left out."""
    found: list[list[tuple[float, bool]]] = [[] for _ in range(num_bins)]
    for probability, came_true in predictions:
        found[min(int(probability * num_bins), num_bins - 1)].append((probability, came_true))
    return [
        Bin(
            i / num_bins,
            (i + 1) / num_bins,
            len(part),
            sum(p for p, _ in part) / len(part),
            sum(t for _, t in part) / len(part),
        )
        for i, part in enumerate(found)
        if part
    ]


def calibration_error(predictions: Sequence[tuple[float, bool]], num_bins: int = NUM_BINS) -> float:
    """Return the expected calibration error: |confidence - accuracy| of each range, by its share.

    NaN without predictions. Source: Guo et al. 2017, On calibration of modern neural networks.
    """
    if not predictions:
        return math.nan
    gaps = (abs(b.confidence - b.accuracy) * b.count for b in reliability(predictions, num_bins))
    return sum(gaps) / len(predictions)


@dataclass(frozen=True, slots=True)
class Trial:
    """One draft that was compared: its place in the block, its raw confidence, whether it held."""

    place: int
    confidence: float
    matched: bool


@dataclass(slots=True)
class Drafting:
    """Follows one sequence: blocks of drafts on one side, the model's own tokens on the other.

    A block ends with its first wrong draft, or one token behind its last draft: that token is the
    bonus, and the next block is drafted behind it. Blocks that the end of the sequence cuts off
    have trials and no length.

    trials   every comparison
    lengths  accepted drafts of each finished block, bonus included
    """

    trials: list[Trial] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    _drafts: Sequence[int] = ()
    _confidences: Sequence[float] = ()
    _accepted: int = 0

    def offer(self, drafts: Sequence[int], confidences: Sequence[float]) -> None:
        """Begin a block."""
        self._drafts, self._confidences, self._accepted = drafts, confidences, 0

    def take(self, token: int) -> bool:
        """Compare with the model's next token; returns whether the block ended with it."""
        place = self._accepted
        if place < len(self._drafts):
            matched = token == self._drafts[place]
            self.trials.append(Trial(place, self._confidences[place], matched))
            if matched:
                self._accepted += 1
                return False
        self.lengths.append(place + 1)
        return True


def repeated_share(tokens: Sequence[int], order: int = 8) -> float:
    """Return the share of runs of `order` tokens that came before: how much of a text loops."""
    runs = [tuple(tokens[i : i + order]) for i in range(len(tokens) - order + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def shares_of_fair(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return loads [..., E] as multiples of an even share."""
    total = np.maximum(counts.sum(-1, keepdims=True), 1)
    return np.asarray(counts * counts.shape[-1] / total, np.float64)


def fits_schema(value: object, schema: Mapping[str, object]) -> bool:
    """Tell whether a value follows a schema of the kind that the generated chats use.

    Knows type, properties, required, items and enum; objects may hold other keys.
    """
    kinds: dict[object, type | tuple[type, ...]] = {
        "object": dict,
        "array": list,
        "string": str,
        "boolean": bool,
        "integer": int,
        "number": (int, float),
    }
    expected = kinds[schema["type"]]
    if not isinstance(value, expected) or (expected is not bool and isinstance(value, bool)):
        return False
    if "enum" in schema and json.dumps(value) not in map(json.dumps, _list(schema["enum"])):
        return False
    if isinstance(value, list):
        items = schema.get("items", {})
        return not items or all(fits_schema(item, _object(items)) for item in value)
    if isinstance(value, dict):
        if not set(_list(schema.get("required", []))) <= value.keys():
            return False
        parts = _object(schema.get("properties", {}))
        return all(fits_schema(value[k], _object(part)) for k, part in parts.items() if k in value)
    return True


def _list(value: object) -> list[object]:
    assert isinstance(value, list), value
    return value


def _object(value: object) -> dict[str, object]:
    assert isinstance(value, dict), value
    return value
