"""Train the DSpark draft blocks on the frozen backbone.

Rows i of a block after position p predicts the token at p + 2 + i; its target is what the backbone predicts there.
The Markov head sees the true previous token. The confidence head learns whether a greedy draft is the backbone's
greedy token, given that all earlier drafts were; it is trained where the text itself is the backbone's greedy choice,
because that is where it is asked. The fitted temperatures go into `temperatures.json`.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from demo import quant
from demo.model import (
    Backbone,
    Params,
    Shape,
    init_drafts,
    layer_back,
    layer_front,
    linear8,
    mix,
    rms,
    rope_tables,
    sub,
)
from demo.optim import Optimizer
from demo.rows import Corpus, batches, evaluation_rows
from demo.train import DIGIT_IDS, Step, load_inputs, load_parts, save_parts, schedule


def main_features(p: Params, taps: Tensor, qat: bool) -> Tensor:
    """Return the drafter's view of every target position, [B,T,D]."""
    return rms(
        linear8(quant.act8(taps) if qat else taps, p["main_proj.weight"], qat),
        p["main_norm.weight"],
    )


def main_keys(p: Params, main8: Tensor, cos: Tensor, sin: Tensor, qat: bool) -> Tensor:
    """Return one draft layer's keys of every target position, [B,T,d]."""
    from demo.model import rotate

    kv = rotate(rms(linear8(main8, p["attn.wkv.weight"], qat), p["attn.kv_norm.weight"]), cos, sin)
    return quant.act8(kv) if qat else kv


def block_attention(
    q: Tensor, kv: Tensor, window: Tensor, allowed: Tensor
) -> tuple[Tensor, Tensor]:
    """Attend from block rows [B,A,K,H,d] to the window [B,A,W,d] (where allowed [A,W]) and to all block rows.

    Returns (o [B,A,H,K,d], lse [B,A,H,K]) without sink.
    """
    scale = q.shape[-1] ** -0.5
    q = q.transpose(-3, -2)
    near = torch.einsum("bahkd,bawd->bahkw", q, window).float() * scale
    near = near.masked_fill(~allowed[:, None, None], -1e30)
    own = torch.einsum("bahkd,bajd->bahkj", q, kv).float() * scale
    scores = torch.cat([near, own], -1)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse[..., None]).to(q.dtype)
    return torch.einsum("bahks,basd->bahkd", weights, torch.cat([window, kv], 2)), lse


def head_logits(
    p: Params, h: Tensor, head: Tensor, previous: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (logits with the Markov bias [...,V], confidence logits [...], Markov embedding)."""
    base = F.linear(rms(h, p["norm.weight"]), head.to(torch.bfloat16)).float()
    e = F.embedding(previous, p["markov_head.embed.weight"]).to(torch.bfloat16)
    logits = base + F.linear(e, p["markov_head.head.weight"].to(torch.bfloat16)).float()
    features = torch.cat([h.detach(), e.detach()], -1).float()
    confidence = F.linear(features, p["confidence_head.proj.weight"].to(torch.bfloat16).float())[
        ..., 0
    ]
    return logits, confidence, e


def losses(
    logits: Tensor,
    confidence: Tensor,
    teacher: Tensor,
    ids: Tensor,
    hidden_logits_before: Tensor,
    decay: Tensor,
) -> Tensor:
    """Return stacked statistics; element 0 is the loss.

    logits, teacher [B,A,K,V]; ids [B,A,K]: the true tokens at p+1..p+K, `hidden_logits_before` [B,A,K] the backbone's greedy
    tokens there. Elements 3.. are, for each row, matches and trials given that the text is greedy and all earlier drafts match.
    """
    logq, logp = torch.log_softmax(logits, -1), torch.log_softmax(teacher, -1)
    kl = (logp.exp() * (logp - logq)).sum(-1)
    best = teacher.argmax(-1)
    hard = -logq.gather(-1, best[..., None])[..., 0]
    loss = ((0.5 * kl + 0.5 * hard) * decay).mean()
    match = (logits.argmax(-1) == best).float()
    greedy = (ids == hidden_logits_before).float().cumprod(-1)
    reached = torch.cat([torch.ones_like(match[..., :1]), match.cumprod(-1)[..., :-1]], -1) * greedy
    bce = F.binary_cross_entropy_with_logits(confidence, match, reduction="none")
    conf = (bce * reached).sum() / (reached.sum() + 1)
    stats = [loss + 0.3 * conf, kl.mean(), conf]
    return torch.cat([torch.stack(stats), (match * reached).sum((0, 1)), reached.sum((0, 1))])


class Drafter:
    """The draft pass for many anchors of a batch at once."""

    def __init__(self, shape: Shape, model: Backbone, compile_parts: bool) -> None:
        self.shape, self.model = shape, model
        wrap: Callable[..., Any] = torch.compile(dynamic=False) if compile_parts else (lambda f: f)
        self.front, self.back = wrap(layer_front), wrap(layer_back)
        self.features, self.keys = wrap(main_features), wrap(main_keys)
        self.attend, self.head, self.losses = wrap(block_attention), wrap(head_logits), wrap(losses)
        self.cos, self.sin = (
            t.to(model.device) for t in rope_tables(shape, torch.arange(model.length + 8), False)
        )

    def __call__(
        self, params: Params, frozen: Params, ids: Tensor, taps: Tensor, anchors: Tensor, qat: bool
    ) -> tuple[Tensor, Tensor]:
        """Return (logits [B,A,K,V], confidence logits [B,A,K]) of the blocks after positions `anchors` [A]."""
        s = self.shape
        k, blocks = s.dspark_block_size, s.num_nextn_predict_layers
        offsets = torch.arange(k, device=ids.device)
        positions = anchors[:, None] + 1 + offsets
        cos, sin = self.cos[positions], self.sin[positions]
        tokens = torch.full(
            (ids.shape[0], len(anchors), k), s.dspark_noise_token_id, device=ids.device
        )
        tokens[:, :, 0] = ids[:, anchors + 1]
        h = F.embedding(tokens, frozen["embed.weight"].detach()).to(torch.bfloat16)
        h = h[..., None, :].expand(*h.shape[:-1], s.hc_mult, h.shape[-1]).contiguous()
        pre = torch.zeros(*tokens.shape, s.hc_mult, device=ids.device)
        pre[..., 0] = 1
        main = self.features(sub(params, "mtp.0."), taps, qat)
        main8 = quant.act8(main) if qat else main
        past = anchors[:, None] - torch.arange(s.sliding_window - 1, -1, -1, device=ids.device)
        allowed = past >= 0
        counted = torch.ones(tokens.shape, device=ids.device)
        for block in range(blocks):
            p = sub(params, f"mtp.{block}.")
            keys = self.keys({n: p[n] for n in ("attn.wkv.weight", "attn.kv_norm.weight")}, main8,
                             self.cos[: ids.shape[1]], self.sin[: ids.shape[1]], qat)  # fmt: skip
            window = keys[:, past.clamp_min(0)]
            q, kv, pre_a, post, comb = self.front(
                p, h, pre, (cos, sin), None, 0, s.num_attention_heads, s.index_n_heads, False, False,
                s.hc_sinkhorn_iters, s.hc_eps, qat,
            )  # fmt: skip
            o, lse = self.attend(q, kv, window, allowed)
            h, pre, _ = self.back(
                p, h, o, lse, (cos, sin), pre_a, post, comb, counted, s.o_groups, s.dspark_num_experts_per_tok,
                s.swiglu_limit, s.routed_scaling_factor, s.hc_sinkhorn_iters, s.hc_eps, qat,
            )  # fmt: skip
        h = mix(h, pre)
        logits, confidence, _ = self.head(
            sub(params, f"mtp.{blocks - 1}."), h, frozen["head.weight"].detach(), ids[:, positions]
        )
        return logits, confidence

    def run(
        self, params: Params, frozen: Params, decay: Tensor, ids: Tensor, anchors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (statistics, confidence logits, logits match) for ids [B,T+1]."""
        with torch.no_grad():
            out = self.model(
                frozen, ids[:, :-1].contiguous(), top_k=self.shape.index_topk, qat=True
            )
        taps, hidden = out["taps"], out["hidden"]
        logits, confidence = self(params, frozen, ids[:, :-1].contiguous(), taps, anchors, True)
        positions = anchors[:, None] + torch.arange(
            self.shape.dspark_block_size + 1, device=ids.device
        )
        with torch.no_grad():
            every = F.linear(hidden[:, positions], frozen["head.weight"].bfloat16()).float()
        teacher, before = every[:, :, 1:], every[:, :, :-1].argmax(-1)
        stats = self.losses(logits, confidence, teacher, ids[:, positions[:, 1:]], before, decay)
        match = (logits.detach().argmax(-1) == teacher.argmax(-1)).float()
        greedy = (ids[:, positions[:, 1:]] == before).float().cumprod(-1)
        return stats, confidence, torch.stack([match, greedy])


def step_function(
    drafter: Drafter, params: Params, frozen: Params, decay: Tensor, ids: Tensor, anchors: Tensor
) -> Tensor:
    """Forward and backward of one batch; returns detached statistics."""
    stats, _, _ = drafter.run(params, frozen, decay, ids, anchors)
    stats[0].backward()
    return stats.detach()


def lengths(matches: np.ndarray, trials: np.ndarray) -> tuple[list[float], float]:
    """Return (conditional acceptance of each draft, mean accepted length with the bonus token)."""
    rates = (matches / np.maximum(trials, 1)).tolist()
    return rates, 1.0 + float(np.cumprod(rates).sum())


def evaluate(drafter: Drafter, params: Params, frozen: Params, held: Corpus, category: str, batch: int, limit: int,
             anchors: Tensor, decay: Tensor) -> dict[str, Any]:  # fmt: skip
    """Return acceptance and the raw (confidence logit, match) pairs of every draft position of a category."""
    ids, counted, _ = evaluation_rows(held, category, drafter.model.length)
    k = drafter.shape.dspark_block_size
    pairs: list[list[np.ndarray]] = [[] for _ in range(k)]
    for first in range(0, min(limit, len(ids)), batch):
        part = np.full((batch, drafter.model.length + 1), 2, np.int64)
        chosen = ids[first : first + batch]
        part[: len(chosen)] = chosen
        rows = torch.from_numpy(part).to(drafter.model.device)
        _stats, confidence, flags = drafter.run(params, frozen, decay, rows, anchors)
        match, greedy = flags.cpu().numpy()
        real = np.zeros((batch, len(anchors)), np.float32)
        real[: len(chosen)] = counted[first : first + batch][:, anchors.cpu().numpy() + k]
        reached = (
            np.concatenate([np.ones_like(match[..., :1]), np.cumprod(match, -1)[..., :-1]], -1)
            * greedy
            * real[..., None]
        )
        conf = confidence.detach().float().cpu().numpy()
        for i in range(k):
            keep = reached[..., i] > 0
            pairs[i].append(np.stack([conf[..., i][keep], match[..., i][keep]]))
    joined = [np.concatenate(p, 1) for p in pairs]
    rates, length = lengths(
        np.array([p[1].sum() for p in joined]), np.array([p.shape[1] for p in joined])
    )
    return {"acceptance": rates, "mean_accepted_length": length, "pairs": joined}


def calibration_error(
    logit: np.ndarray, match: np.ndarray, temperature: float, bins: int = 10
) -> float:
    """Return the expected calibration error of sigmoid(logit / temperature)."""
    probability = 1 / (1 + np.exp(-logit / temperature))
    which = np.minimum((probability * bins).astype(int), bins - 1)
    total = 0.0
    for b in range(bins):
        inside = which == b
        if inside.any():
            total += abs(probability[inside].mean() - match[inside].mean()) * inside.mean()
    return float(total)


def fit_temperatures(pairs: list[np.ndarray]) -> tuple[list[float], list[float]]:
    """Return (temperature of every position, its calibration error on the other half of the data)."""
    grid = np.exp(np.linspace(np.log(0.3), np.log(4.0), 80))
    fitted, errors = [], []
    for p in pairs:
        fit, check = p[:, ::2], p[:, 1::2]
        best = min(grid, key=lambda t: calibration_error(fit[0], fit[1], float(t)))
        fitted.append(round(float(best), 4))
        errors.append(calibration_error(check[0], check[1], float(best)))
    return fitted, errors


def main() -> None:
    """Train, evaluate, fit temperatures, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".carry"))
    parser.add_argument(
        "--state",
        type=Path,
        default=Path(".carry/state"),
        help="folder with the backbone (and drafts to resume)",
    )
    parser.add_argument("--out", type=Path, default=Path(".carry/state"))
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument(
        "--seconds", type=float, default=0, help="choose the number of steps to end at this time"
    )
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--anchors", type=int, default=192)
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    began = time.time()
    device = torch.device("cpu" if args.cpu else "cuda")
    torch.backends.cuda.matmul.allow_tf32 = True
    torch._dynamo.config.recompile_limit = 64
    shape, constants, corpus, held = load_inputs(args.work)
    corpus.mark(set(DIGIT_IDS), 1)
    state = load_parts(args.state, "backbone")
    state.pop("step")
    frozen = {
        k: v.to(device, torch.float32).requires_grad_(not k.endswith("gate.bias"))
        for k, v in state.items()
    }
    params = load_parts(args.state, "drafts") or init_drafts(shape)
    params = {
        k: v.to(device, torch.float32).requires_grad_(not k.endswith("gate.bias"))
        for k, v in params.items()
    }
    model = Backbone(shape, constants, args.length, device, not args.cpu, not args.cpu)
    drafter = Drafter(shape, model, not args.cpu)
    optimizer = Optimizer(params, shape.o_groups, muon_lr=0.01, adam_lr=1.5e-3, weight_decay=0.1)
    k = shape.dspark_block_size
    decay = torch.tensor([0.85**i for i in range(k)], device=device)
    decay = decay / decay.mean()
    generator = torch.Generator(device=device).manual_seed(5)
    args.out.mkdir(parents=True, exist_ok=True)
    log = (args.out / "drafts.jsonl").open("a")

    def report(**values: Any) -> None:
        line = json.dumps(values)
        print(line, flush=True)
        log.write(line + "\n")
        log.flush()

    step, mark = 0, time.time()
    run: Step | None = None
    ring: list[Tensor] = []
    for raw in batches(corpus, args.length, args.batch, 0.3, 0.3, 7000, 0):
        if step >= args.steps:
            break
        ids = torch.from_numpy(raw[:, 0].astype(np.int64)).to(device)
        anchors = torch.randint(
            0, args.length - k - 1, (args.anchors,), device=device, generator=generator
        )
        if run is None:
            run = Step(
                functools.partial(step_function, drafter, params, frozen, decay),
                params,
                (ids, anchors),
                not args.cpu,
            )
            mark = time.time()
        stats, grads = run(ids, anchors)
        optimizer.step(schedule(step, args.steps, step), grads)
        ring.append(stats.clone())
        step += 1
        if step % 100 == 0 or step == 20:
            v = torch.stack(ring).sum(0).cpu().numpy() / len(ring)
            seconds = time.time() - mark
            if args.seconds and step in (100, 600, 1500):
                args.steps = step + max(
                    100, int(len(ring) / seconds * (args.seconds - (time.time() - began)))
                )
            rates, length = lengths(v[3 : 3 + k], v[3 + k :])
            report(step=step, steps=args.steps, loss=float(v[0]), kl=float(v[1]), confidence_loss=float(v[2]), rates=rates,
                   mean_accepted_length=length, steps_per_second=len(ring) / seconds, seconds=time.time() - began)  # fmt: skip
            ring, mark = [], time.time()
    save_parts(params, args.out, "drafts")
    fixed = torch.randperm(args.length - k - 1, generator=torch.Generator().manual_seed(9))[
        : args.anchors
    ].to(device)
    every: list[list[np.ndarray]] = [[] for _ in range(k)]
    for category in ("natural", "wordnet", "json", "json_chat", "tool_chat", "needle"):
        found = evaluate(drafter, params, frozen, held, category, args.batch, 160, fixed, decay)
        pairs = found.pop("pairs")
        errors = [calibration_error(p[0], p[1], 1.0) if p.shape[1] else 0.0 for p in pairs]
        report(
            evaluated=category,
            trials=[int(p.shape[1]) for p in pairs],
            error_before=errors,
            **found,
        )
        if category in ("natural", "json"):
            for i, p in enumerate(pairs):
                every[i].append(p)
    rng = np.random.default_rng(0)
    joined = [np.concatenate(p, 1) for p in every]
    fitted, errors = fit_temperatures([p[:, rng.permutation(p.shape[1])] for p in joined])
    report(temperatures=fitted, error_after=errors, seconds=time.time() - began)
    (args.out / "temperatures.json").write_text(json.dumps(fitted))


if __name__ == "__main__":
    main()
