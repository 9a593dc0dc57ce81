"""How many drafts to verify, and whether to draft at all: arithmetic over confidences and cost.

A draft is worth verifying while the chance that it brings a token outweighs the time its row adds
to everybody's step. `CostCurve` says what a step of so many rows takes; `choose_rows` finds the row
count with the most expected tokens per second; `DraftPlanner` asks it once a step, follows measured
times, and switches drafting off while it does not pay. Pure. Source: runtime specification, 8.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepinfer.config.engine import SpeculationConfig
from deepinfer.config.model import ModelConfig
from deepinfer.engine.costs import CostCurve
from deepinfer.engine.request import DraftOutcome
from deepinfer.errors import ConfigError

__all__ = [
    "Choice",
    "DraftPlanner",
    "SpeculationStats",
    "check_speculation",
    "choose_rows",
]

Floats = NDArray[np.float64]

_BINS: Final = 10  # of confidences, for their calibration
_ENOUGH: Final = 8  # steps of a kind whose times are believed
_SURE: Final = 2.5  # gain by the curve from which plain steps need not be tried
_PENDING: Final = 4096  # parts of steps that are counted in one go


def check_speculation(config: SpeculationConfig, model: ModelConfig) -> None:
    """Raise ConfigError, naming the setting, for what this checkpoint cannot do."""
    problems = []
    most = model.dspark_block_size if model.num_nextn_predict_layers else 0
    if config.num_drafts > 0 and most == 0:
        problems.append(
            f"speculation.num_drafts: found {config.num_drafts}, but the checkpoint has no draft "
            "blocks; only 0 works"
        )
    elif config.num_drafts > most:
        problems.append(
            f"speculation.num_drafts: found {config.num_drafts}, but the checkpoint's draft block "
            f"has {most} rows (dspark_block_size): use 0..{most}"
        )
    given = len(model.dspark_confidence_temperatures)
    if given not in (0, 1, model.dspark_block_size):
        problems.append(
            f"dspark_confidence_temperatures of the checkpoint: found {given} values, expected "
            f"none, one or dspark_block_size ({model.dspark_block_size})"
        )
    if problems:
        raise ConfigError("speculation does not fit the checkpoint", problems)


def choose_rows(
    reach: Sequence[Sequence[float]] | Floats,
    curve: CostCurve,
    *,
    max_rows: int | None = None,
    extra_s: float = 0.0,
    slope: float = 0.0,
) -> tuple[list[int], float, float]:
    """Choose how many drafts each sequence verifies, for the most expected tokens per second.

    reach     for each sequence, the chance that each of its drafts is reached and accepted, never
              rising
    max_rows  most rows of a step, at least one a sequence; None = no limit
    extra_s   what a step takes besides its rows: drafting, sampling
    slope     seconds more for each row than the curve says
    returns   drafts per sequence; expected tokens; seconds
    For every number of rows the likeliest drafts are the best choice, so it is enough to take them
    one by one and keep the best point of the whole path. On ties the fewest rows win.
    """
    num = len(reach)
    if isinstance(reach, np.ndarray):
        values, lengths = reach.ravel(), np.full(num, reach.shape[1])
    else:
        values = np.asarray([value for drafts in reach for value in drafts], np.float64)
        lengths = np.asarray([len(drafts) for drafts in reach], np.int64)
    owner = np.repeat(np.arange(num), lengths)
    order = np.argsort(-values, kind="stable")
    if max_rows is not None:
        order = order[: max(0, max_rows - num)]
    expected = num + np.concatenate([[0.0], np.cumsum(values[order])])
    seconds = curve.step_s(num + np.arange(len(order) + 1), slope) + extra_s
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = np.where(np.isfinite(seconds), expected / seconds, -1.0)
    best = int(np.nanargmax(rates)) if num else 0
    counts = np.bincount(owner[order[:best]], minlength=num) if num else np.zeros(0, np.int64)
    return counts.tolist(), float(expected[best]), float(seconds[best])


class Choice(NamedTuple):
    """What a decode step does about drafts.

    num_drafts  most drafts that one sequence verifies
    budget      drafts verified over all sequences, split by their confidences; None = all that
                there are
    propose     make drafts for the next step
    """

    num_drafts: int
    budget: int | None
    propose: bool


class SpeculationStats:
    """Counts over the life of an engine, by draft position where a list.

    A row is wasted when it was verified and brought no token: refused, behind a refused one, or
    behind the end of its sequence. A bonus token is the one behind drafts that were all right.
    """

    def __init__(self, num_drafts: int) -> None:
        self.draft_passes = 0
        self._steps = self._tokens = self._rows = self._bonus = 0
        self._proposed = np.zeros(num_drafts, np.int64)
        self._verified = np.zeros(num_drafts, np.int64)
        self._accepted = np.zeros(num_drafts, np.int64)
        self._bins = np.zeros((_BINS, 3))  # tried, summed confidence, accepted
        self._pending: list[tuple[DraftOutcome, tuple[float, ...]]] = []

    def add(self, rows: Sequence[tuple[DraftOutcome, tuple[float, ...]]]) -> None:
        """Count parts of steps, each with the confidences of the drafts that were proposed."""
        self._pending.extend(rows)
        if len(self._pending) >= _PENDING:
            self._flush()

    def _flush(self) -> None:
        """Add up what was noted: cheaper in one go than row by row."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        counts = np.asarray([outcome for outcome, _ in pending], np.int64)
        proposed, verified, accepted, tokens = counts.T
        self._steps += len(pending)
        self._tokens += int(tokens.sum())
        self._rows += len(pending) + int(verified.sum())
        self._bonus += int(((verified > 0) & (accepted == verified) & (tokens > accepted)).sum())
        places = np.arange(len(self._proposed))
        for total, part in (
            (self._proposed, proposed),
            (self._verified, verified),
            (self._accepted, accepted),
        ):
            total += (places < part[:, None]).sum(axis=0)
        # A confidence speaks of the case that all drafts before were accepted.
        most = len(self._proposed)
        values, lengths = _padded([confidences for _, confidences in pending], most)
        last = np.minimum(np.minimum(verified, accepted + 1), lengths)
        tried = places < last[:, None]
        values, hits = values[tried], (places < accepted[:, None])[tried]
        bins = np.minimum((values * _BINS).astype(np.int64), _BINS - 1)
        for column, weights in enumerate((None, values, hits)):
            self._bins[:, column] += np.bincount(bins, weights, minlength=_BINS)

    def summary(self) -> dict[str, object]:
        """Return the counts and what follows from them, ready for JSON."""
        self._flush()
        steps = self._steps
        verified, accepted = int(self._verified.sum()), int(self._accepted.sum())
        tried = float(self._bins[:, 0].sum())
        error = float(np.abs(self._bins[:, 1] - self._bins[:, 2]).sum())
        return {
            "steps": steps,
            "draft_passes": self.draft_passes,
            "tokens": self._tokens,
            "rows": self._rows,
            "proposed": self._proposed.tolist(),
            "verified": self._verified.tolist(),
            "accepted": self._accepted.tolist(),
            "bonus": self._bonus,
            "wasted_rows": verified - accepted,
            "acceptance": accepted / verified if verified else None,
            "mean_verified_length": 1 + verified / steps if steps else None,
            "mean_accepted_length": self._tokens / steps if steps else None,
            "calibration_error": error / tried if tried else None,
            "calibration": [
                {"confidence": total / count, "accepted": hits / count, "count": int(count)}
                for count, total, hits in self._bins.tolist()
                if count
            ],
        }


class _Times:
    """Times of steps of about as many sequences by what the curve says, with drafts and without."""

    def __init__(self) -> None:
        self.plain: deque[float] = deque(maxlen=4 * _ENOUGH)
        self.drafted: deque[float] = deque(maxlen=4 * _ENOUGH)

    def corrected(self, gain: float) -> float | None:
        """Return what the gain by the curve really is; None before both kinds are known."""
        if min(len(self.plain), len(self.drafted)) < _ENOUGH:
            return None
        return gain * statistics.median(self.plain) / statistics.median(self.drafted)


class DraftPlanner:
    """Asked once per decode step what to verify and whether to draft.

    num_drafts    K
    variable      choose row counts by cost; otherwise every draft is verified and drafting is
                  always on
    curve         what steps take; without one every draft is verified
    max_rows      most rows of a step
    lag           decide from the confidences of the call before (standard rejection sampling
                  demands that no draft's own confidence decides about it)
    patience      steps in a row in which drafting must not pay before it is switched off
    probe_steps   steps after which it is tried again

    While drafting is off its worth is estimated from the mean survival seen so far at the present
    number of sequences, so it comes back as soon as the load allows.

    A curve says what steps should take. Where steps with drafts were measured and should be less
    than _SURE times as fast as plain ones, some plain ones are run, and from then on what both take
    by the curve corrects the gain for so many sequences. After `probe_steps` drafts are measured
    again.
    """

    def __init__(
        self,
        num_drafts: int,
        *,
        variable: bool = False,
        curve: CostCurve | None = None,
        max_rows: int | None = None,
        lag: bool = False,
        patience: int = 8,
        probe_steps: int = 512,
    ) -> None:
        self.num_drafts = num_drafts
        self.variable = variable
        self.curve = curve
        self.is_drafting = num_drafts > 0
        self.times_switched_off = 0
        self._max_rows = max_rows
        self._lag = lag
        self._patience = patience
        self._probe_steps = probe_steps
        self._before: Floats = np.zeros((0, num_drafts))
        self._losing = 0
        self._idle = 0
        self._mean: Floats = np.ones(num_drafts)
        self._has_mean = False
        self._residuals: dict[int, deque[tuple[float, int]]] = {}
        self._times: defaultdict[int, _Times] = defaultdict(_Times)
        self._trying = False
        self.slope = self.offset_s = 0.0
        self.stats = SpeculationStats(num_drafts)
        self.note: str | None = None
        self._observed = 0
        self._sizes: Counter[int] = Counter()
        self._predicted_s = self._measured_s = 0.0

    def choose(self, confidences: Sequence[Sequence[float]]) -> Choice:
        """Decide for a step over these sequences, by the confidences last reported for each.

        A sequence whose drafts are not reported yet has none and counts with the mean seen so far.
        """
        if self.num_drafts == 0:
            return Choice(0, 0, False)
        if not self.variable or self.curve is None or not confidences:
            return Choice(self.num_drafts, None, True)
        num = len(confidences)
        reach = self._reach(confidences)
        if not self.is_drafting:
            return self._while_off(num)
        if self._lag:
            reach, self._before = self._before, reach
            missing = np.tile(self._mean, (max(0, num - len(reach)), 1))
            reach = np.concatenate([reach[:num], missing])
        counts, expected, seconds = choose_rows(
            reach,
            self.curve,
            max_rows=self._max_rows,
            extra_s=self.curve.draft_s(num) + self.offset_s,
            slope=self.slope,
        )
        plain = float(self.curve.step_s(num, self.slope)) + self.offset_s
        gain = expected * plain / (num * seconds)
        times = self._times[num.bit_length()]
        measured = times.corrected(self._gain(num, sum(counts), expected))
        self._losing = 0 if (measured or gain) > 1 else self._losing + 1
        if self._losing >= self._patience:
            self._switch_off(num, measured or gain)
        elif measured is None and gain < _SURE and len(times.drafted) >= 2 * _ENOUGH:
            self.is_drafting, self._trying, self._idle = False, True, 0
        return Choice(self.num_drafts, sum(counts), self.is_drafting)

    def _gain(self, num: int, drafts: int, expected: float) -> float:
        """Return how many times as fast drafting is by the curve alone."""
        assert self.curve is not None
        plain, drafted = float(self.curve.step_s(num)), float(self.curve.step_s(num + drafts))
        return expected * plain / (num * (drafted + self.curve.draft_s(num)))

    def _switch_off(self, num: int, gain: float) -> None:
        self.is_drafting = False
        self.times_switched_off += 1
        self.note = (
            f"drafting is off: with {num} sequences it would bring {gain:.3g} times the tokens of "
            "steps without drafts"
        )
        self._losing = self._idle = 0

    def count(self, rows: Sequence[tuple[DraftOutcome, tuple[float, ...]]]) -> None:
        """Count the outcomes of a step's rows, with the confidences of their drafts."""
        self.stats.add(rows)

    def observe(self, rows: int, sequences: int, proposed: bool, seconds: float) -> None:
        """Take the measured time of a step: the machine may be slower than when it was measured."""
        self.stats.draft_passes += proposed
        if self.curve is None or rows < 1 or seconds <= 0:
            return
        told = float(self.curve.step_s(rows))
        told += self.curve.draft_s(sequences) if proposed else 0.0
        if not math.isfinite(told):
            return
        if told > 0 and proposed == (rows > sequences):
            times = self._times[sequences.bit_length()]
            (times.drafted if proposed else times.plain).append(seconds / told)
        key = rows.bit_length()  # sizes of a kind
        self._sizes[key] += 1
        self._predicted_s += told + self.offset_s + self.slope * rows
        self._measured_s += seconds
        self._residuals.setdefault(key, deque(maxlen=256)).append((seconds - told, rows))
        self._observed += 1
        if self._observed % 32 == 0:
            self._fit()

    def _fit(self) -> None:
        """Explain what steps take beyond the curve: so much a step, and so much a row.

        A line through the medians of the sizes seen, by the median of its slopes; one size alone
        has all of it for its rows.
        """
        points = [
            (statistics.median(n for _, n in found), statistics.median(s for s, _ in found))
            for found in self._residuals.values()
            if len(found) >= 10
        ]
        if len(points) < 2:
            self.slope = max([0.0, *(beyond / rows for rows, beyond in points)])
            self.offset_s = 0.0
            return
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(points, 2)]
        self.slope = max(0.0, statistics.median(slopes))
        self.offset_s = max(0.0, statistics.median(s - self.slope * n for n, s in points))

    def summary(self) -> dict[str, object]:
        """Return the present state, ready for JSON."""
        return {
            "num_drafts": self.num_drafts,
            "variable": self.variable,
            "drafting": self.is_drafting,
            "times_switched_off": self.times_switched_off,
            "note": self.note,
            **self.stats.summary(),
            "mean_survival": self._mean.tolist() if self._has_mean else None,
            "extra_seconds_per_row": self.slope,
            "extra_seconds_per_step": self.offset_s,
            "steps_by_rows": {
                f"{1 << size - 1}-{(1 << size) - 1}": count
                for size, count in sorted(self._sizes.items())
            },
            "predicted_step_s": self._predicted_s / self._observed if self._observed else None,
            "measured_step_s": self._measured_s / self._observed if self._observed else None,
            "cost_curve": None
            if self.curve is None
            else {
                "rows": list(self.curve.rows),
                "seconds": list(self.curve.seconds),
                "draft_sequences": list(self.curve.draft_sequences),
                "draft_seconds": list(self.curve.draft_seconds),
            },
        }

    def _reach(self, confidences: Sequence[Sequence[float]]) -> Floats:
        """Return the survival of every draft [N, K], and follow its mean."""
        told, lengths = _padded(confidences, self.num_drafts)
        known = lengths == self.num_drafts
        reach = np.asarray(np.cumprod(told, axis=1), np.float64)
        num_known = int(known.sum())
        if num_known:
            now = reach[known].mean(axis=0)
            share = min(0.5, num_known / 256) if self._has_mean else 1.0
            self._mean = (1 - share) * self._mean + share * now
            self._has_mean = True
        reach[lengths == 0] = self._mean
        return reach

    def _while_off(self, num: int) -> Choice:
        """Stay off, unless the mean survival pays at this load or it is time to look again."""
        assert self.curve is not None
        self._idle += 1
        times = self._times[num.bit_length()]
        if self._trying and len(times.plain) < _ENOUGH and self._idle < 4 * _ENOUGH:
            return Choice(0, 0, False)
        tried, self._trying = self._trying, False
        counts, expected, seconds = choose_rows(
            np.tile(self._mean, (num, 1)),
            self.curve,
            max_rows=self._max_rows,
            extra_s=self.curve.draft_s(num) + self.offset_s,
            slope=self.slope,
        )
        plain = float(self.curve.step_s(num, self.slope)) + self.offset_s
        measured = times.corrected(self._gain(num, sum(counts), expected))
        gain = measured or expected * plain / (num * seconds)
        if tried and gain <= 1:
            self._switch_off(num, gain)
            return Choice(0, 0, False)
        looks_again = self._idle >= self._probe_steps
        if looks_again:
            times.drafted.clear()
        # 2 % better, so that it does not flicker.
        if tried or looks_again or gain > 1.02:
            self.is_drafting = True
            self.note = None
            self._idle = self._losing = 0
            self._before = np.zeros((0, self.num_drafts))
            # There are no drafts yet: this step only makes them.
            return Choice(self.num_drafts, 0, True)
        return Choice(0, 0, False)


def _padded(confidences: Sequence[Sequence[float]], most: int) -> tuple[Floats, NDArray[np.int64]]:
    """Return confidences [N, most] in 0..1, with 0 where there are fewer (near its limit a sequence
    has fewer drafts) or what is no number; and how many each row has.
    """
    lengths = np.fromiter(map(len, confidences), np.int64, len(confidences))
    values: Floats
    if (lengths == most).all():
        values = np.asarray(confidences, np.float64).reshape(len(lengths), most)
    else:
        values = np.zeros((len(lengths), most))
        flat = itertools.chain.from_iterable(confidences)
        values[np.arange(most) < lengths[:, None]] = np.fromiter(flat, np.float64)
    return np.fmax(np.minimum(values, 1.0), 0.0), lengths  # of NaN and 0, fmax takes 0
