"""Train the backbone of the demonstration model.

`python -m demo.train --steps N` runs or resumes: the checkpoint in `--state` holds parameters, step and, unless
`--light`, the optimizer's moments. Progress goes to `log.jsonl` in `--out`. On a CPU the same code runs slowly with
`--cpu` (dense attention, nothing compiled).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demo.model import Backbone, Params, Shape, init_backbone
from demo.optim import Optimizer
from demo.rows import PAD_ID, Corpus, batches, evaluation_rows, repeats

PROBES = 128
ASKED_WEIGHT = 3.0
BALANCE = 0.05


def save_parts(state: dict[str, Tensor], folder: Path, stem: str, limit: int = 15 << 20) -> None:
    """Write a dict of tensors as numbered files of at most `limit` bytes each."""
    folder.mkdir(parents=True, exist_ok=True)
    part: dict[str, Tensor] = {}
    size = number = 0
    for name, tensor in state.items():
        tensor = tensor.detach().cpu().contiguous()
        if part and size + tensor.nbytes > limit:
            torch.save(part, folder / f"{stem}-{number}.pt")
            part, size, number = {}, 0, number + 1
        part[name] = tensor.clone()
        size += tensor.nbytes
    torch.save(part, folder / f"{stem}-{number}.pt")


def load_parts(folder: Path, stem: str) -> dict[str, Tensor]:
    """Read what `save_parts` wrote; empty when there is nothing."""
    state: dict[str, Tensor] = {}
    for path in sorted(folder.glob(f"{stem}-*.pt")):
        state |= torch.load(path, map_location="cpu", weights_only=True)
    return state


def phase(progress: float, dense: float) -> int:
    """Return the number of entries to select: 0 (all) during the share `dense`, then fewer and fewer down to 64."""
    if progress < dense:
        return 0
    rest = (progress - dense) / (1 - dense)
    return 256 if rest < 0.15 else 128 if rest < 0.3 else 64


def schedule(step: int, steps: int, since_start: int) -> float:
    """Warm up, stay, then fall linearly over the last half."""
    progress = step / steps
    factor = 1.0 if progress < 0.45 else max(0.0, (1 - progress) / 0.55)
    return min(1.0, (since_start + 1) / 100) * factor


def evaluate(
    model: Backbone,
    params: Params,
    corpus: Corpus,
    category: str,
    batch: int,
    limit: int,
    **options: Any,
) -> dict[str, Any]:
    """Return bits per byte and token accuracy on a category, expert loads, and code accuracy for needles.

    limit  rows at most, 0 for all
    On a card gradients stay enabled, so that the compiled functions of training serve here too.
    """
    with torch.set_grad_enabled(model.device.type != "cpu"):
        return _evaluate(model, params, corpus, category, batch, limit, **options)


def _evaluate(
    model: Backbone,
    params: Params,
    corpus: Corpus,
    category: str,
    batch: int,
    limit: int,
    **options: Any,
) -> dict[str, Any]:
    ids, counted, size = evaluation_rows(corpus, category, model.length)
    full = len(ids)
    keep = min(limit, full) if limit else full
    losses: list[Tensor] = []
    right: list[Tensor] = []
    loads: Tensor | float = 0.0
    for first in range(0, keep, batch):
        part = np.full((batch, model.length + 1), 2, np.int64)
        chosen = ids[first : min(first + batch, keep)]
        part[: len(chosen)] = chosen
        rows = torch.from_numpy(part).to(model.device)
        out = model(params, rows[:, :-1].contiguous(), qat=options.get("qat", True), top_k=options.get("top_k", 64),
                    random_choice=options.get("random_choice", False), counted=(rows[:, :-1, None] != 2).float())  # fmt: skip
        hidden, targets = out["hidden"].detach().flatten(0, 1), rows[:, 1:].reshape(-1)
        loss = model.loss(
            hidden.requires_grad_(hidden.is_cuda), params["head.weight"], targets
        ).detach()
        hits = (
            torch.nn.functional.linear(hidden, params["head.weight"].bfloat16()).argmax(-1)
            == targets
        ).float()
        losses.append(loss.view(batch, -1)[: len(chosen)].float().cpu())
        right.append(hits.detach().view(batch, -1)[: len(chosen)].cpu())
        loads = loads + out["loads"].detach().sum(1)
        del out
    nats, flags = torch.cat(losses).double().numpy(), torch.cat(right).numpy()
    mask = counted[:keep]
    share = mask.sum() / counted.sum()
    result: dict[str, Any] = {
        "bits_per_byte": float((nats * mask).sum() / math.log(2) / (size * share)),
        "token_accuracy": float((flags * mask).sum() / mask.sum()),
    }
    if category == "needle":
        result |= code_accuracy(ids[:keep], flags)
    if category == "copy":
        result |= copy_accuracy(ids[:keep], flags)
    assert isinstance(loads, Tensor)
    fair = loads / loads.mean(-1, keepdim=True)
    result["load_min"], result["load_max"] = float(fair.min()), float(fair.max())
    return result


DIGIT_IDS: list[int] = []
PIECE_IDS: list[list[int]] = []


def code_accuracy(ids: np.ndarray, hits: np.ndarray) -> dict[str, float]:
    """Return the share of four-digit codes of which every digit was predicted, by distance to their first mention."""
    digits = set(DIGIT_IDS)
    buckets: dict[str, list[bool]] = {}
    for row, hit in zip(ids, hits, strict=True):
        seen: dict[tuple[int, ...], int] = {}
        i = 1
        while i < len(row) - 4:
            code = tuple(int(t) for t in row[i : i + 4])
            if (
                all(t in digits for t in code)
                and int(row[i - 1]) not in digits
                and int(row[i + 4]) not in digits
            ):
                if code in seen:
                    distance = i - seen[code]
                    name = next(f"<{b}" for b in (128, 256, 512, 1024, 4096) if distance < b)
                    buckets.setdefault(name, []).append(bool(hit[i - 1 : i + 3].all()))
                else:
                    seen[code] = i
                i += 4
            else:
                i += 1
    result = {f"codes{k}": float(np.mean(v)) for k, v in sorted(buckets.items())}
    result |= {f"codes{k}_n": float(len(v)) for k, v in sorted(buckets.items())}
    return result


def copy_accuracy(ids: np.ndarray, hits: np.ndarray) -> dict[str, float]:
    """Return the share of copied tokens that were predicted, by distance to the first mention."""
    back = np.stack([np.where(row == PAD_ID, 0, repeats(row)) for row in ids])[:, 1:]
    result: dict[str, float] = {}
    for low, high in itertools.pairwise((1, 128, 256, 512, 1024, 4096)):
        chosen = hits[(back >= low) & (back < high)]
        if chosen.size:
            result |= {f"copied<{high}": float(chosen.mean()), f"copied<{high}_n": chosen.size}
    return result


def probe_positions(
    raw: np.ndarray, length: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return `PROBES` query positions of every row and their weights, [B,Q] each.

    Random positions alone hardly ever ask for a fact, and the indexers then never learn to select one. In rows with
    retrieved digits or copied tokens three eighths of the queries stand just before such a token, one eighth up to eight tokens
    earlier; where there are both, each gets its half.
    """
    probes = rng.integers(0, length, (len(raw), PROBES))
    weights = np.ones(probes.shape, np.float32)
    half, early = PROBES // 2, PROBES // 8
    for row, marks in enumerate(raw[:, 1, 1:]):
        asking = np.flatnonzero(marks % 64 > 1)
        if asking.size:
            _, kind, count = np.unique(marks[asking], return_inverse=True, return_counts=True)
            odds = 1.0 / (count.size * count[kind])
            probes[row, :half] = rng.choice(asking, half, p=odds)
            probes[row, :early] = np.maximum(0, probes[row, :early] - rng.integers(1, 9, early))
            weights[row, :half] = ASKED_WEIGHT
    return probes, weights


def forward_backward(
    model: Backbone, params: Params, top_k: int, rows: Tensor, probes: Tensor, weights: Tensor
) -> Tensor:
    """Return (loss, index loss, recall when asked, recall, imbalance, expert loads...) of one batch after the backward pass."""
    ids, marks = rows[:, 0], rows[:, 1]
    source = marks[:, :-1]
    kinds = torch.stack([(source >= 128) & (source < 192), source >= 192], -1).float()
    out = model(
        params,
        ids[:, :-1].contiguous(),
        top_k=top_k,
        qat=True,
        probes=probes,
        probe_weight=weights,
        counted=kinds,
    )
    targets = ids[:, 1:].reshape(-1)
    weight = (marks[:, 1:] % 64).reshape(-1).float()
    loss = (
        model.loss(out["hidden"].flatten(0, 1), params["head.weight"], targets) * weight
    ).sum() / weight.sum()
    (loss + out["index_loss"] + BALANCE * out["imbalance"]).backward()
    asked = (weights > 1).float()
    recall = out["recall"].mean(0)
    stats = [
        loss.detach(),
        out["index_loss"].detach(),
        (recall * asked).sum() / (asked.sum() + 1e-6),
        (recall * (1 - asked)).sum() / ((1 - asked).sum() + 1e-6),
        out["imbalance"].detach(),
    ]
    return torch.cat([torch.stack(stats), out["loads"].detach().sum(1).flatten()])


class Step:
    """Forward and backward of one batch; on a GPU it is recorded once and replayed as a graph."""

    def __init__(
        self, run: Callable[..., Tensor], params: Params, example: tuple[Tensor, ...], record: bool
    ) -> None:
        """`run(*inputs)` returns statistics after calling `backward`; `example` gives the inputs' shapes."""
        self.run, self.params = run, params
        self.graph: torch.cuda.CUDAGraph | None = None
        if not record:
            return
        try:
            self.inputs = tuple(t.clone() for t in example)
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self._clear()
                    run(*self.inputs)
            torch.cuda.current_stream().wait_stream(side)
            self._clear()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.stats = run(*self.inputs)
            self.grads = {k: p.grad for k, p in params.items()}
            self.graph = graph
        except RuntimeError as error:
            print(f"no graph: {error}", flush=True)
            torch.cuda.synchronize()
        self._clear()

    def _clear(self) -> None:
        for p in self.params.values():
            p.grad = None

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
        """Return (statistics, gradients); both are valid until the next call."""
        if self.graph is None:
            self._clear()
            stats = self.run(*inputs)
            return stats, {k: p.grad for k, p in self.params.items()}
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given, non_blocking=True)
        self.graph.replay()
        return self.stats, self.grads


def load_inputs(work: Path) -> tuple[Shape, dict[str, Tensor], Corpus, Corpus]:
    """Return (shape, Engram constants, training corpus, held-out corpus)."""
    folder = work / "tokens"
    shape = Shape(json.loads((folder / "config.json").read_text())["text_config"])
    constants = {k: torch.from_numpy(v) for k, v in np.load(folder / "constants.npz").items()}
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    DIGIT_IDS[:] = [vocabulary[str(d)] for d in range(10)]
    PIECE_IDS[:] = [
        [i for text, i in vocabulary.items() if re.fullmatch(kind, text)]
        for kind in ("[a-z]", "Ġ[a-z]", "[a-z]{2}", "Ġ[a-z]{2}")
    ]
    return shape, constants, Corpus(folder / "tokens.npz"), Corpus(folder / "eval.npz")


def main() -> None:
    """Train, evaluate, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".carry"))
    parser.add_argument(
        "--state", type=Path, default=Path(".carry/state"), help="folder to resume from"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(".carry/state"),
        help="folder for the checkpoint and the log",
    )
    parser.add_argument("--steps", type=int, default=12500, help="length of the whole schedule")
    parser.add_argument(
        "--seconds", type=float, default=0, help="choose the number of steps to end at this time"
    )
    parser.add_argument(
        "--stop-after", type=float, default=1e9, help="seconds after which to save and leave"
    )
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument(
        "--dense", type=float, default=0.3, help="share of the steps before selection starts"
    )
    parser.add_argument("--peak", type=float, default=1.0, help="factor of both learning rates")
    parser.add_argument(
        "--restart", action="store_true", help="take the parameters, begin a new schedule"
    )
    parser.add_argument(
        "--new-indexers", action="store_true", help="draw the indexers anew after loading"
    )
    parser.add_argument(
        "--favoured",
        type=float,
        default=0.65,
        help="share of needles and copies in the generated text",
    )
    parser.add_argument(
        "--answer-weight", type=int, default=8, help="loss weight of retrieved digits"
    )
    parser.add_argument(
        "--copies", type=float, default=0.28, help="share of copies in the generated text"
    )
    parser.add_argument("--copy-weight", type=int, default=3, help="loss weight of copied tokens")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--generated-share", type=float, default=0.38)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--light", action="store_true", help="save no optimizer moments")
    parser.add_argument(
        "--no-graph", action="store_true", help="launch every kernel instead of replaying a graph"
    )
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--eval-every", type=int, default=500)
    parser.add_argument("--save-every", type=int, default=1000)
    parser.add_argument("--eval-rows", type=int, default=64)
    parser.add_argument(
        "--final-rows",
        type=int,
        help="rows of each kind of the last evaluation; 0: all, as on a card, --eval-rows on a CPU",
    )
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    began = time.time()
    device = torch.device("cpu" if args.cpu else "cuda")
    torch.backends.cuda.matmul.allow_tf32 = True
    torch._dynamo.config.recompile_limit = 64
    shape, constants, corpus, held = load_inputs(args.work)
    state = load_parts(args.state, "backbone")
    step = int(state.pop("step")) if state else 0
    step = 0 if args.restart else step
    corpus.mark(set(DIGIT_IDS), args.answer_weight, args.copy_weight, PIECE_IDS)
    fresh = init_backbone(shape, args.seed)
    if args.new_indexers:
        state = {k: v for k, v in state.items() if "indexer" not in k}
    params = fresh | state
    params = {
        k: v.to(device, torch.float32).requires_grad_(not k.endswith("gate.bias"))
        for k, v in params.items()
    }
    optimizer = Optimizer(params, shape.o_groups, args.muon_lr, args.adam_lr, args.weight_decay)
    moments = load_parts(args.state, "moments")
    if moments:
        optimizer.count.fill_(step)
        for name, value in moments.items():
            kind, key = name.split("/", 1)
            getattr(optimizer, kind)[key].copy_(value)
    model = Backbone(shape, constants, args.length, device, not args.cpu, not args.cpu)
    args.out.mkdir(parents=True, exist_ok=True)
    log = (args.out / "log.jsonl").open("a")
    chooser = np.random.default_rng(args.seed + step)

    def report(**values: Any) -> None:
        line = json.dumps(
            {k: round(v, 5) if isinstance(v, float) else v for k, v in values.items()}
        )
        print(line, flush=True)
        log.write(line + "\n")
        log.flush()

    def save() -> None:
        save_parts(dict(params.items()) | {"step": torch.tensor(step)}, args.out, "backbone")
        if not args.light:
            flat = {f"momentum/{k}": v for k, v in optimizer.momentum.items()}
            flat |= {f"second/{k}": v for k, v in optimizer.second.items()}
            save_parts(flat, args.out, "moments")

    first = step
    runs: dict[int, Step] = {}
    biases = [params[f"layers.{i}.ffn.gate.bias"] for i in range(shape.num_hidden_layers)]
    ring: list[Tensor] = []
    mark = time.time()
    profiler = None
    for raw in batches(
        corpus, args.length, args.batch, args.generated_share, args.favoured, args.seed * 1000, step,
        args.copies,
    ):  # fmt: skip
        if step >= args.steps or time.time() - began > args.stop_after:
            break
        rows = (
            torch.from_numpy(raw.astype(np.int64)).pin_memory().to(device, non_blocking=True)
            if not args.cpu
            else (torch.from_numpy(raw.astype(np.int64)))
        )
        top_k = phase(step / args.steps, args.dense)
        lr = args.peak * schedule(step, args.steps, step - (0 if moments else first))
        probes, weights = (
            torch.from_numpy(a).to(device) for a in probe_positions(raw, args.length, chooser)
        )
        if top_k not in runs:
            runs.clear()
            run = functools.partial(forward_backward, model, params, top_k)
            runs[top_k] = Step(
                run, params, (rows, probes, weights), not args.cpu and not args.no_graph
            )
            ring, mark = [], time.time()
        stats, grads = runs[top_k](rows, probes, weights)
        optimizer.step(lr, grads)
        load = stats[5:].view(len(biases), -1)
        rate = max(5e-4, 4e-3 * min(1.0, 2 * lr))
        torch._foreach_add_(biases, list(torch.sign(load.mean(-1, keepdim=True) - load) * rate))
        ring.append(stats[:5].clone())
        step += 1
        if args.profile and step - first == 12:
            torch.cuda.synchronize()
            profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            profiler.start()
        if profiler is not None and step - first == 15:
            torch.cuda.synchronize()
            profiler.stop()
            print(
                profiler.key_averages().table(
                    sort_by="cuda_time_total", row_limit=45, max_name_column_width=70
                )
            )
            profiler = None
        if step % 50 == 0 or step - first == 10:
            values = torch.stack(ring).mean(0).tolist()
            seconds = time.time() - mark
            report(step=step, loss=values[0], index_loss=values[1], recall_asked=values[2], recall=values[3], imbalance=values[4], lr=lr, seconds=time.time() - began,
                   tokens_per_second=int(len(ring) * rows[:, 0, 1:].numel() / seconds))  # fmt: skip
            if (
                args.seconds
                and (step - first == 150 or (step - first) % 400 == 0)
                and step < 0.93 * args.steps
            ):
                rate = len(ring) / seconds * (1.0 if top_k else 0.93)
                args.steps = max(
                    step + 200, step + int(rate * (args.seconds - (time.time() - began)))
                )
                report(step=step, steps=args.steps)
            ring, mark = [], time.time()
        if step % args.save_every == 0:
            save()
            mark = time.time()
        if step % args.eval_every == 0:
            for category in ("natural", "needle", "copy"):
                entries = top_k if category == "natural" else shape.index_topk
                found = evaluate(
                    model, params, held, category, args.batch, args.eval_rows, top_k=entries
                )
                report(step=step, evaluated=category, top_k=entries, **found)
            mark = time.time()
    save()
    if step >= args.steps or args.profile:
        most = args.final_rows
        if most is None:
            most = args.eval_rows if args.cpu else 0
        for category in (
            "natural",
            "wordnet",
            "json",
            "json_chat",
            "tool_chat",
            "arithmetic",
            "copy",
            "needle",
            "gloss_chat",
        ):
            report(
                step=step,
                evaluated=category,
                final=True,
                **evaluate(model, params, held, category, args.batch, most),
            )
        random = evaluate(model, params, held, "needle", args.batch, most, random_choice=True)
        report(step=step, evaluated="needle", choice="random", **random)
        exact = Backbone(shape, constants, args.length, device, False, not args.cpu)
        with torch.no_grad():
            report(
                step=step,
                evaluated="natural",
                qat=False,
                **evaluate(exact, params, held, "natural", args.batch, most, qat=False),
            )
    report(step=step, done=True, seconds=time.time() - began)


if __name__ == "__main__":
    main()
