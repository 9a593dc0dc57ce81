"""What choosing verified rows by confidence is worth: a simulated device with a given cost curve.

Tokens are not computed: a draft is accepted with the probability that its confidence says, so the
confidences are calibrated by construction. The planner is the engine's own. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from deepinfer.engine.costs import CostCurve
from deepinfer.engine.speculation import DraftPlanner
from deepinfer.sampling.noise import derive_seed

__all__ = ["NODE_CURVE", "Outcome", "Policy", "simulate", "spelled", "sweep"]

Policy = Literal["off", "fixed", "variable"]

# Whole steps of one GPU of a node of eight H200, FP8 linears and experts at the limits of memory
# and tensor cores, context 131072: rows -> milliseconds without the draft network, communication
# included; and the draft network for so many sequences.
_ROWS_MS: Final = {1: 6.0, 6: 6.16, 48: 10.81, 192: 13.61, 384: 18.65, 768: 28.84, 1536: 56.18}
_DRAFT_MS: Final = {1: 0.28, 8: 0.39, 32: 0.59, 64: 0.95, 128: 1.76, 256: 3.52}

NODE_CURVE: Final = CostCurve(
    rows=tuple(_ROWS_MS),
    seconds=tuple(ms / 1e3 for ms in _ROWS_MS.values()),
    draft_sequences=tuple(_DRAFT_MS),
    draft_seconds=tuple(ms / 1e3 for ms in _DRAFT_MS.values()),
)
"""Saturated from about 400 rows: twice the rows take twice the time."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One simulated run. Lengths are per sequence and step."""

    policy: Policy
    sequences: int
    acceptance: float
    tokens_per_s: float
    verified_length: float
    accepted_length: float
    draft_share: float


def simulate(
    policy: Policy,
    sequences: int,
    acceptance: float,
    *,
    curve: CostCurve = NODE_CURVE,
    num_drafts: int = 5,
    spread: float = 2.0,
    steps: int = 400,
    seed: int = 0,
) -> Outcome:
    """Run so many sequences for a number of steps on a device with a cost curve.

    acceptance  mean probability that a draft is accepted when those before it are
    spread      sum of the parameters of the beta distribution that confidences follow: small means
                that easy and hard drafts differ much, large that all are alike
    """
    rng = np.random.Generator(np.random.Philox(derive_seed(seed, 1)))
    planner = DraftPlanner(
        0 if policy == "off" else num_drafts,
        variable=policy == "variable",
        curve=curve if policy == "variable" else None,
    )
    drafts = np.zeros((sequences, 0))
    shape = (acceptance * spread, (1 - acceptance) * spread)
    total_s = tokens = verified = passes = 0.0
    for _ in range(steps):
        choice = planner.choose([tuple(row) for row in drafts.tolist()])
        reach = np.cumprod(drafts, axis=1)
        runs: NDArray[np.bool_] = np.zeros(drafts.shape, np.bool_)
        if drafts.shape[1] and choice.num_drafts:
            if choice.budget is None:
                runs[:] = True
            else:
                rank = np.argsort(np.argsort(-reach.ravel(), kind="stable"), kind="stable")
                runs = np.less(rank, choice.budget).reshape(reach.shape)
        hits = (rng.random(drafts.shape) < drafts) & runs
        accepted = np.cumprod(hits, axis=1).sum()
        total_s += float(curve.step_s(sequences + int(runs.sum())))
        total_s += curve.draft_s(sequences) if choice.propose else 0.0
        tokens += sequences + int(accepted)
        verified += int(runs.sum())
        passes += choice.propose
        width = num_drafts if choice.propose else 0
        drafts = rng.beta(*shape, size=(sequences, width)) if width else np.zeros((sequences, 0))
    return Outcome(
        policy,
        sequences,
        acceptance,
        tokens / total_s,
        1 + verified / (steps * sequences),
        tokens / (steps * sequences),
        passes / steps,
    )


def sweep(
    sequences: tuple[int, ...] = (1, 4, 16, 32, 64, 128, 256),
    acceptances: tuple[float, ...] = (0.75,),
    steps: int = 200,
) -> list[Outcome]:
    """Run every policy at every load."""
    policies: tuple[Policy, ...] = ("off", "fixed", "variable")
    return [
        simulate(policy, num, acceptance, steps=steps)
        for acceptance in acceptances
        for num in sequences
        for policy in policies
    ]


def spelled(outcomes: list[Outcome]) -> str:
    """Lay outcomes out as a table: a line for each load, tokens per second of each policy."""
    found = {(o.acceptance, o.sequences, o.policy): o for o in outcomes}
    lines = [
        "acceptance  sequences       off     fixed  variable  against fixed  against best  rows",
    ]
    for acceptance, num in dict.fromkeys((o.acceptance, o.sequences) for o in outcomes):
        off, fixed, chosen = (found[acceptance, num, p] for p in ("off", "fixed", "variable"))
        gain = chosen.tokens_per_s / fixed.tokens_per_s - 1
        best = chosen.tokens_per_s / max(fixed.tokens_per_s, off.tokens_per_s) - 1
        lines.append(
            f"{acceptance:10.2f} {num:10d} {off.tokens_per_s:9.0f} {fixed.tokens_per_s:9.0f} "
            f"{chosen.tokens_per_s:9.0f} {gain:+14.1%} {best:+13.1%} {chosen.verified_length:5.2f}"
        )
    return "\n".join(lines)
