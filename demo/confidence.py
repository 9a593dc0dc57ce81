"""Fit the confidence head and its temperatures on continuations as the engine writes them, on a CPU.

`gather` continues prompts cut from the training documents greedily through the fast path and keeps what the draft blocks see; `fit`
drafts after every token of these, solves the logistic regression of the head on one half of the prompts and chooses a
temperature for every draft on the other. Held-out text takes no part.
"""

from __future__ import annotations

import argparse
import json
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
from demo.draft import Drafter, Trials, calibration_error, fit_confidence, fit_temperatures
from demo.model import Backbone
from demo.rows import EOS_ID
from demo.tokens import CATEGORIES
from demo.train import load_inputs, load_parts, save_parts

PROMPT, CONTINUED = 257, 96
KEPT_FROM = 190  # first position whose features are kept: the window before the last of the prompt
GENERATED = ("json", "json_chat", "tool_chat")
TOGETHER = 64


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
        for i, r in enumerate(rows):
            n = len(r["taps"])
            self.ids[i, : n + 1], self.taps[i, :n], self.hidden[i, :n] = r["ids"], r["taps"], r["hidden"]  # fmt: skip
        self.start = [int(r["start"]) for r in rows]


def main() -> None:
    """Gather, or fit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=("gather", "fit"))
    parser.add_argument("--work", type=Path, default=Path(".carry"))
    parser.add_argument("--state", type=Path, default=Path(".carry/state"), help="with drafts")
    parser.add_argument("--rows", type=Path, default=Path(".carry/continuations"))
    parser.add_argument("--model", type=Path, default=Path("src/deepinfer/data/demo"))
    parser.add_argument("--prompts", type=int, default=832)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.stage == "fit":
        fit(args.work, args.state, args.rows)
        return
    args.rows.mkdir(parents=True, exist_ok=True)
    model = EvalModel(args.model, EngineConfig())
    prompts = mixed(args.work, model.tokenizer, args.seed)
    for number in range(args.prompts // TOGETHER):
        part = [p for p, _ in zip(prompts, range(TOGETHER), strict=False)]
        torch.save(gather(model, part), args.rows / f"rows-{args.seed}-{number:03}.pt")


def fit(work: Path, state: Path, rows: Path) -> None:
    """Write the confidence head into the drafts of `state`, and `temperatures.json` beside them."""
    shape, constants, *_ = load_inputs(work)
    k, last = shape.dspark_block_size, shape.num_nextn_predict_layers - 1
    backbone, params = load_parts(state, "backbone"), load_parts(state, "drafts")
    frozen = {n: backbone[n].float() for n in ("embed.weight", "head.weight")}
    params = {n: v.float() for n, v in params.items()}
    model = Backbone(shape, constants, 512, torch.device("cpu"), False, False)
    drafter = Drafter(shape, model, False)
    halves = (Trials(k), Trials(k))
    for number, path in enumerate(sorted(rows.glob("rows-*.pt"))):
        loaded = torch.load(path, weights_only=True)
        part = Continuations([r for r in loaded if int(r["start"]) + k < len(r["taps"])], k)
        starts = [np.array([s]) for s in part.start]
        with torch.no_grad():
            inputs = (part.ids, part.taps, part.hidden)
            halves[number % 2].add(drafter, params, frozen, inputs, starts, CONTINUED, CONTINUED)
    weights = fit_confidence(*halves[0].joined()).bfloat16().float()
    params[f"mtp.{last}.confidence_head.proj.weight"] = weights[None]
    pairs = []
    features, match, reached = halves[1].joined()
    logit = features @ weights
    for i in range(k):
        kept = reached[:, i] > 0
        pairs.append(np.stack([t[kept].numpy() for t in (logit[:, i], match[:, i])]))
    before = [round(calibration_error(p[0], p[1], 1.0), 4) for p in pairs]
    fitted, errors = fit_temperatures(pairs)
    print(json.dumps({"trials": halves[1].summary(), "error_before": before, "temperatures": fitted, "error_after": errors}))  # fmt: skip
    save_parts(params, state, "drafts")
    (state / "temperatures.json").write_text(json.dumps(fitted))


if __name__ == "__main__":
    main()
