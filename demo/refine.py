"""Refine trained draft blocks on continuations as the engine writes them, on a CPU.

`gather` continues prompts cut from the training documents greedily through the fast path and keeps what the draft blocks see; `tune`
trains on these at a small rate, every continuation seen a few times only, and fits the confidence head on a part
that it leaves out. On rows seen too often drafts learn their targets by heart: this closes part of the gap.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer.bench.evaldata import Document
from deepinfer.bench.evalmodel import EvalModel
from deepinfer.bench.evaluate import cut
from deepinfer.config.engine import EngineConfig
from demo.draft import Drafter, Trials, fit_confidence
from demo.model import Backbone
from demo.optim import Optimizer
from demo.rows import EOS_ID
from demo.tokens import CATEGORIES
from demo.train import load_inputs, load_parts, save_parts

PROMPT, CONTINUED = 257, 96
KEPT_FROM = 190  # first position whose features are kept: the window before the last of the prompt
GENERATED = ("json", "json_chat", "tool_chat")
TOGETHER = 64
LOOK_EVERY = 250


def natural_prompts(work: Path, tokenizer: Any, seed: int) -> dict[str, list[list[int]]]:
    """Return prompts of every source of natural text, shuffled."""
    rng = np.random.default_rng(seed)
    found: dict[str, list[list[int]]] = {}
    for line in (work / "train.jsonl").read_text().splitlines():
        document = Document(**json.loads(line))
        if len(found.get(document.source, ())) >= 4000:
            continue
        rows = list(cut(document, tokenizer, 2 * (PROMPT - 1)))
        wanted = [list(r.token_ids[:PROMPT]) for r in rows if len(r.token_ids) > PROMPT]
        found.setdefault(document.source, []).extend(wanted)
    return {s: [p[i] for i in rng.permutation(len(p))] for s, p in found.items()}


def generated_prompts(work: Path, seed: int) -> list[list[int]]:
    """Return the beginnings of generated documents, left as long as they are or cut."""
    rng = np.random.default_rng(seed)
    *_, corpus, _ = load_inputs(work)
    kinds = [CATEGORIES.index(c) for c in GENERATED]
    found = []
    for index in rng.permutation(np.flatnonzero(np.isin(corpus.categories, kinds)))[:4000]:
        ids = corpus.document(int(index)).astype(int).tolist()
        if len(ids) > 120:
            found.append(ids[: int(rng.integers(80, min(len(ids) - 20, 2 * PROMPT)))])
    return found


def mixed(work: Path, tokenizer: Any, seed: int) -> Iterator[list[int]]:
    """Yield prompts, one of every source in turn, until a source ends."""
    sources = natural_prompts(work, tokenizer, seed)
    sources["generated"] = generated_prompts(work, seed)
    for group in zip(*sources.values(), strict=False):
        yield from group


def gather(model: EvalModel, prompts: list[list[int]]) -> list[dict[str, Tensor]]:
    """Continue prompts greedily; returns ids, taps and hidden of the positions from the window before the continuation on.

    ids [N+1], taps [N, taps * D] bf16, hidden [N, D] bf16, start: the last position of the prompt, counted from the first kept.
    """
    fast, draft = model.model, model.model.draft
    assert draft is not None
    seen: dict[str, Tensor] = {}
    store, ops = draft.store, fast.ops

    def dense_linear(x: Tensor, weight: Any, dtype: torch.dtype) -> Tensor:
        if weight is fast.head:
            seen["hidden"] = x
        return ops.dense_linear(x, weight, dtype)

    def stored(step: Any, features: Tensor) -> None:
        seen["taps"] = features
        store(step, features)

    fast.ops = replace(ops, dense_linear=dense_linear)
    draft.store = stored  # type: ignore[method-assign]
    try:
        num = len(prompts)
        streams = model.streams(num, max(map(len, prompts)) + CONTINUED + 1)
        ids = [list(p) for p in prompts]
        parts: list[dict[str, list[Tensor]]] = [{"taps": [], "hidden": []} for _ in prompts]
        for stream, prompt in enumerate(prompts):
            ids[stream].append(int(streams.prefill(stream, prompt)[-1].argmax()))
            first = max(0, len(prompt) - (PROMPT - KEPT_FROM))
            for name in parts[stream]:
                parts[stream][name].append(seen[name][first:].bfloat16())
        for _ in range(CONTINUED - 1):
            active = [s for s in range(num) if ids[s][-1] != EOS_ID]
            if not active:
                break
            logits = streams.decode(active, [ids[s][-1] for s in active])
            for row, (stream, token) in enumerate(zip(active, logits.argmax(-1).tolist(), strict=True)):  # fmt: skip
                for name in parts[stream]:
                    parts[stream][name].append(seen[name][row : row + 1].bfloat16())
                ids[stream].append(token)
    finally:
        fast.ops = ops
        draft.store = store  # type: ignore[method-assign]
    found = []
    for prompt, all_ids, part in zip(prompts, ids, parts, strict=True):
        first = max(0, len(prompt) - (PROMPT - KEPT_FROM))
        found.append(
            {n: torch.cat(v) for n, v in part.items()}
            | {"ids": torch.tensor(all_ids[first:]), "start": torch.tensor(len(prompt) - 1 - first)}
        )
    return found


class Continuations:
    """Gathered continuations as padded rows."""

    def __init__(self, rows: list[dict[str, Tensor]], k: int) -> None:
        length = max(len(r["taps"]) for r in rows)
        self.ids = torch.full((len(rows), length + 1), EOS_ID)
        self.taps = torch.zeros(len(rows), length, rows[0]["taps"].shape[1], dtype=torch.bfloat16)
        self.hidden = torch.zeros(len(rows), length, rows[0]["hidden"].shape[1], dtype=torch.bfloat16)  # fmt: skip
        self.anchors = []
        for i, r in enumerate(rows):
            n = len(r["taps"])
            self.ids[i, : n + 1], self.taps[i, :n], self.hidden[i, :n] = r["ids"], r["taps"], r["hidden"]  # fmt: skip
            # From the last anchor a whole block lies inside the continuation.
            self.anchors.append(np.arange(int(r["start"]), n - k))
        self.start = [int(r["start"]) for r in rows]

    def batch(self, chosen: np.ndarray, anchors: int, rng: np.random.Generator) -> tuple[Tensor, ...]:  # fmt: skip
        """Return (ids, taps, hidden, anchors [B,A]) of some rows."""
        at = np.stack([rng.choice(self.anchors[i], anchors) for i in chosen])
        rows = torch.from_numpy(chosen)
        return self.ids[rows], self.taps[rows], self.hidden[rows], torch.from_numpy(at)


def main() -> None:
    """Gather, or tune."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=("gather", "tune"))
    parser.add_argument("--work", type=Path, default=Path(".carry"))
    parser.add_argument("--state", type=Path, default=Path(".carry/state"), help="with drafts")
    parser.add_argument("--rows", type=Path, default=Path(".carry/continuations"))
    parser.add_argument("--out", type=Path, default=Path(".carry/state"))
    parser.add_argument("--model", type=Path, default=Path("src/deepinfer/data/demo"))
    parser.add_argument("--prompts", type=int, default=4000)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--anchors", type=int, default=24)
    parser.add_argument("--kept-back", type=int, default=448)
    parser.add_argument("--muon-lr", type=float, default=0.002)
    parser.add_argument("--adam-lr", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    began = time.time()
    if args.stage == "gather":
        args.rows.mkdir(parents=True, exist_ok=True)
        model = EvalModel(args.model, EngineConfig())
        prompts = mixed(args.work, model.tokenizer, args.seed)
        for number in range(args.prompts // TOGETHER):
            part = [p for p, _ in zip(prompts, range(TOGETHER), strict=False)]
            target = args.rows / f"rows-{args.seed}-{number:03}.pt"
            torch.save(gather(model, part), target.with_suffix(".tmp"))
            target.with_suffix(".tmp").rename(target)
            print(f"{target.name} {time.time() - began:.0f} s", flush=True)
            if time.time() - began > args.seconds:
                break
        return
    tune(args, began)


def tune(args: argparse.Namespace, began: float) -> None:
    """Train on gathered rows for `args.seconds`, then fit the confidence head."""
    shape, constants, *_ = load_inputs(args.work)
    k, last = shape.dspark_block_size, shape.num_nextn_predict_layers - 1
    confidence = f"mtp.{last}.confidence_head.proj.weight"
    state = load_parts(args.state, "backbone")
    frozen = {n: state[n].float().requires_grad_() for n in ("embed.weight", "head.weight")}
    params = {
        n: v.float().requires_grad_(not n.endswith(("gate.bias", confidence)))
        for n, v in load_parts(args.state, "drafts").items()
    }
    drafter = Drafter(shape, Backbone(shape, constants, 512, torch.device("cpu"), False, False), False)  # fmt: skip
    decay = torch.tensor([0.8**i for i in range(k)])
    optimizer = Optimizer(params, shape.o_groups, args.muon_lr, args.adam_lr, weight_decay=0.1)
    rng = np.random.default_rng(args.seed)
    names = [n for n, p in params.items() if p.requires_grad]
    loaded: list[dict[str, Tensor]] = []
    used: set[str] = set()

    def look() -> None:
        for path in sorted(args.rows.glob("rows-*.pt")):
            if path.name not in used:
                used.add(path.name)
                rows = torch.load(path, weights_only=True)
                loaded.extend(r for r in rows if int(r["start"]) + k < len(r["taps"]))

    look()
    aside = Continuations(loaded[: args.kept_back], k)
    fresh = Continuations(loaded[args.kept_back :], k)

    def kept_back() -> Trials:
        trials = Trials(k)
        with torch.no_grad():
            for first in range(0, len(aside.ids), 32):
                part = slice(first, first + 32)
                rows = (aside.ids[part], aside.taps[part], aside.hidden[part])
                starts = [np.array([s]) for s in aside.start[part]]
                trials.add(drafter, params, frozen, rows, starts, CONTINUED, CONTINUED)
        return trials

    print(json.dumps({"rows": len(fresh.ids), "before": kept_back().summary()}), flush=True)
    step, ring, order = 0, [], np.zeros(0, np.int64)
    args.out.mkdir(parents=True, exist_ok=True)
    start = time.time()
    while (spent := (time.time() - start) / args.seconds) < 1:
        if len(order) < args.batch:
            look()
            if len(loaded) - args.kept_back > len(fresh.ids):
                fresh = Continuations(loaded[args.kept_back :], k)
            order = rng.permutation(len(fresh.ids))
        chosen, order = order[: args.batch], order[args.batch :]
        ids, taps, hidden, anchors = fresh.batch(chosen, args.anchors, rng)
        for p in params.values():
            p.grad = None
        stats = drafter.step(params, frozen, decay, ids, taps, hidden, anchors)
        if bool(stats[0].isfinite()):
            grads = {n: params[n].grad for n in names}
            optimizer.step(min(1.0, (step + 1) / 100) * (1 - spent), grads)
        ring.append(stats[: 1 + 2 * k])
        step += 1
        if step % LOOK_EVERY == 0:
            e = torch.stack(ring).mean(0)
            rates = (e[1 : 1 + k] / e[1 + k :].clamp_min(1)).tolist()
            print(json.dumps({"step": step, "rows": len(fresh.ids), "loss": float(e[0]), "rates": [round(r, 3) for r in rates],
                              "kept_back": round(kept_back().summary()["mean_accepted_length"], 4), "seconds": round(time.time() - began)}), flush=True)  # fmt: skip
            ring = []
            save_parts(params, args.out, "drafts")
    trials = kept_back()
    print(json.dumps({"step": step, "after": trials.summary()}), flush=True)
    weights = fit_confidence(*trials.joined())
    with torch.no_grad():
        params[confidence].copy_(weights[None].bfloat16().float())
    save_parts(params, args.out, "drafts")


if __name__ == "__main__":
    main()
