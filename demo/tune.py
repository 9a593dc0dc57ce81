"""Tune trained draft blocks on continuations as the engine writes them, on a CPU.

Training rows go back to true text every 64 or 128 tokens; an engine continues one prompt. These steps take blocks from
continuations of `demo.confidence gather`, three in four where an engine's blocks would begin (behind a draft that was refused, so
at the hard tokens), and a draft weighs more the likelier it is to be reached. The kept weights are a moving average, and those of
the test whose accepted length on kept-back continuations is largest.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from demo.confidence import CONTINUED, Continuations
from demo.draft import BALANCE, Drafter, stretch_anchors
from demo.model import Backbone, Params
from demo.optim import Optimizer
from demo.train import load_inputs, load_parts, save_parts

ROWS, ANCHORS, AT_ONCE = 12, 32, 48
MUON_LR, ADAM_LR, WARMUP = 3e-4, 6e-5, 20
DECAY, KEPT, EVERY = 0.85, 0.98, 50
BEGUN = 0.75  # share of the blocks that begin where an engine's would


def visits(accepted: np.ndarray, k: int) -> np.ndarray:
    """Return how often an engine's blocks begin at every position, from any of the first k + 1 alike.

    accepted [N]: the tokens that a block adds there, 1 to k + 1.
    """
    found = np.zeros(len(accepted) + k + 1)
    found[: k + 1] = 1 / (k + 1)
    for position, count in enumerate(accepted):
        found[position + count] += found[position]
    return found[: len(accepted)]


def accepted_length(accepted: list[np.ndarray], k: int) -> float:
    """Return the mean of the accepted lengths, bonus included, over the blocks of an engine."""
    weights = [visits(a, k) for a in accepted]
    total = sum(float(w @ a) for w, a in zip(weights, accepted, strict=True))
    return total / max(1e-9, sum(float(w.sum()) for w in weights))


@dataclass
class Part:
    """Continuations, the positions in each that blocks may follow, and how likely each is drawn."""

    rows: Continuations
    anchors: list[np.ndarray]
    chances: list[np.ndarray]


def read_part(path: Path, k: int, seen: set[tuple[int, ...]]) -> Part | None:
    """Read the continuations of a file that are long enough and not among `seen`, which grows by them."""
    kept = []
    for row in torch.load(path, weights_only=True):
        name = tuple(row["ids"][:40].tolist())
        if int(row["start"]) + k + 2 < len(row["taps"]) and name not in seen:
            seen.add(name)
            kept.append(row)
    if not kept:
        return None
    rows = Continuations(kept, k)
    starts = [np.array([s]) for s in rows.start]
    return Part(rows, stretch_anchors(rows.ids.numpy(), starts, CONTINUED, k), [])


@torch.no_grad()
def accepted(drafter: Drafter, params: Params, frozen: Params, part: Part) -> list[np.ndarray]:
    """Return the tokens that a block after every anchor of every row would add."""
    width = max(map(len, part.anchors))
    padded = np.zeros((len(part.anchors), width), np.int64)
    for row, anchors in enumerate(part.anchors):
        padded[row, : len(anchors)] = anchors
    rows, found = part.rows, []
    for first in range(0, width, AT_ONCE):
        at = torch.from_numpy(padded[:, first : first + AT_ONCE])
        logits, *_ = drafter(params, frozen, rows.ids, rows.taps, at, True)
        best, *_ = drafter.teacher(frozen, rows.ids, rows.hidden, at)
        match = (logits.argmax(-1) == best.argmax(-1)).long()
        found.append(match.cumprod(-1).sum(-1) + 1)
    every = torch.cat(found, 1).numpy()
    return [every[row, : len(anchors)] for row, anchors in enumerate(part.anchors)]


def reached_loss(logits: Tensor, teacher: Tensor) -> Tensor:
    """Return the loss of blocks [B,A,K,V] whose rows weigh by their place and by the chance that they are reached."""
    logq, logp = torch.log_softmax(logits, -1), torch.log_softmax(teacher, -1)
    hard = -logq.gather(-1, teacher.argmax(-1, keepdim=True))[..., 0]
    kl = (logp.exp() * (logp - logq)).sum(-1)
    chance = (-hard.detach()).exp().cumprod(-1)
    reached = torch.cat([torch.ones_like(chance[..., :1]), chance[..., :-1]], -1)
    weight = DECAY ** torch.arange(logits.shape[-2]) * (0.3 + 0.7 * reached)
    return ((0.7 * hard + 0.3 * kl) * weight).sum() / weight.sum()


def main() -> None:
    """Read continuations, tune, keep the best average."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".carry"))
    parser.add_argument("--state", type=Path, default=Path(".carry/state"), help="with drafts")
    parser.add_argument("--rows", type=Path, nargs="+", required=True, help="files to tune on")
    parser.add_argument("--kept-back", type=Path, nargs="+", required=True, help="files to choose by")  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, help="folder for the tuned drafts")
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()
    shape, constants, *_ = load_inputs(args.work)
    k, blocks = shape.dspark_block_size, shape.num_nextn_predict_layers
    state = load_parts(args.state, "backbone")
    frozen = {n: state[n].float() for n in ("embed.weight", "head.weight")}
    fixed = ("gate.bias", f"mtp.{blocks - 1}.confidence_head.proj.weight")
    loaded = {n: v.float() for n, v in load_parts(args.state, "drafts").items()}
    params = {n: v.requires_grad_(not n.endswith(fixed)) for n, v in loaded.items()}
    drafter = Drafter(shape, Backbone(shape, constants, 512, torch.device("cpu"), False, False), False)  # fmt: skip
    seen: set[tuple[int, ...]] = set()
    tests = [t for path in args.kept_back if (t := read_part(path, k, seen))]
    parts = [t for path in args.rows if (t := read_part(path, k, seen))]
    for part in parts:
        for found in accepted(drafter, params, frozen, part):
            often = visits(found, k)
            part.chances.append(BEGUN * often / often.sum() + (1 - BEGUN) / len(found))

    def tested(weights: Params) -> float:
        return accepted_length([a for p in tests for a in accepted(drafter, weights, frozen, p)], k)

    best = tested(params)
    count = sum(len(part.anchors) for part in parts)
    print(json.dumps({"continuations": count, "kept_back": round(best, 4)}), flush=True)
    optimizer = Optimizer(params, shape.o_groups, MUON_LR, ADAM_LR, weight_decay=0.0)
    average = {n: v.detach().clone() for n, v in params.items()}
    rng = np.random.default_rng(5)
    sizes = np.array([len(p.anchors) for p in parts], float)
    for step in range(args.steps):
        part = parts[rng.choice(len(parts), p=sizes / sizes.sum())]
        lengths = np.array([len(a) for a in part.anchors], float)
        chosen = rng.choice(len(lengths), ROWS, p=lengths / lengths.sum())
        at = torch.from_numpy(
            np.stack([rng.choice(part.anchors[i], ANCHORS, p=part.chances[i]) for i in chosen])
        )
        ids, taps, hidden = (t[chosen] for t in (part.rows.ids, part.rows.taps, part.rows.hidden))
        logits, _, imbalance, _ = drafter(params, frozen, ids, taps, at, True)
        teacher, *_ = drafter.teacher(frozen, ids, hidden, at)
        torch.autograd.backward(reached_loss(logits, teacher) + BALANCE * imbalance)
        tuned = {n: p for n, p in params.items() if p.requires_grad}
        torch.nn.utils.clip_grad_norm_(tuned.values(), 2.0)
        rate = min(1.0, (step + 1) / WARMUP) * (1 + math.cos(math.pi * step / (2 * args.steps))) / 2
        optimizer.step(rate, {n: p.grad for n, p in tuned.items()})
        with torch.no_grad():
            for name, p in params.items():
                p.grad = None
                average[name].lerp_(p, 1 - min(KEPT, (step + 1) / (step + 9)))
        if (step + 1) % EVERY == 0 or step + 1 == args.steps:
            length = tested(average)
            print(json.dumps({"step": step + 1, "kept_back": round(length, 4)}), flush=True)
            if length > best:
                best = length
                save_parts(average, args.out, "drafts")


if __name__ == "__main__":
    main()
