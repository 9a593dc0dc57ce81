"""Train the DSpark draft blocks on the frozen, quantized backbone.

Row i of a block after position p predicts the token at p + 2 + i; its target is what the backbone predicts there. Half of
the batches are rows in which stretches of text are replaced by the backbone's own greedy continuation, because that is
what drafts are compared with when an engine runs. The confidence head is not trained by gradient steps: it is a
logistic regression on the finished blocks over greedy rows that the blocks were not trained on, solved by Newton steps. Its
temperatures, one for every draft, are fitted on one half of greedy continuations of held-out text and checked on the other; they
go into `temperatures.json`.

A step whose loss or gradient is not finite changes nothing and is counted; the gradient's norm is clipped. On a GPU forward,
backward and update are one recorded graph.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
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
    drafts_from,
    layer_back,
    layer_front,
    linear8,
    mix,
    rms,
    rope_tables,
    rotate,
    sub,
)
from demo.optim import Optimizer
from demo.rows import EOS_ID, Corpus, batches, evaluation_rows
from demo.train import DIGIT_IDS, Step, load_inputs, load_parts, save_parts

STRETCHES = (
    (16, 48),
    (32, 96),
)  # tokens of text, then of the backbone's own continuation, in turns
REAL, TESTED = 32, 80  # the same in held-out rows
BALANCE = 0.05
KEPT_BACK = 4  # greedy batches that only the confidence head learns from
CLIP = 3.0  # largest norm of the gradient, in usual norms
CATEGORIES = ("natural", "json", "wordnet", "json_chat", "tool_chat", "needle")


def main_features(p: Params, taps: Tensor, qat: bool) -> Tensor:
    """Return the drafter's view of every target position, [B,T,D]."""
    return rms(
        linear8(quant.act8(taps) if qat else taps, p["main_proj.weight"], qat),
        p["main_norm.weight"],
    )


def main_keys(p: Params, main8: Tensor, cos: Tensor, sin: Tensor, qat: bool) -> Tensor:
    """Return one draft layer's keys of every target position, [B,T,d]."""
    kv = rotate(rms(linear8(main8, p["attn.wkv.weight"], qat), p["attn.kv_norm.weight"]), cos, sin)
    return quant.act8(kv) if qat else kv


def block_attention(
    q: Tensor, kv: Tensor, window: Tensor, allowed: Tensor
) -> tuple[Tensor, Tensor]:
    """Attend from block rows [B,A,K,H,d] to the window [B,A,W,d] (where allowed [B,A,W]) and to all block rows.

    Returns (o [B,A,H,K,d], lse [B,A,H,K]) without sink.
    """
    scale = q.shape[-1] ** -0.5
    q = q.transpose(-3, -2)
    near = torch.einsum("bahkd,bawd->bahkw", q, window).float() * scale
    near = near.masked_fill(~allowed[:, :, None, None], -1e30)
    own = torch.einsum("bahkd,bajd->bahkj", q, kv).float() * scale
    lse = torch.logaddexp(torch.logsumexp(near, -1), torch.logsumexp(own, -1))
    o = torch.einsum("bahkw,bawd->bahkd", torch.exp(near - lse[..., None]).to(q.dtype), window)
    o = o + torch.einsum("bahkj,bajd->bahkd", torch.exp(own - lse[..., None]).to(q.dtype), kv)
    return o, lse


def head_logits(p: Params, h: Tensor, head: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
    """Return (logits with the Markov bias [...,V] fp32, features of the confidence head [...,D + rank] fp32)."""
    base = F.linear(rms(h, p["norm.weight"]), head.to(torch.bfloat16)).float()
    e = F.embedding(previous, p["markov_head.embed.weight"]).to(torch.bfloat16)
    logits = base + F.linear(e, p["markov_head.head.weight"].to(torch.bfloat16)).float()
    return logits, torch.cat([h.detach(), e.detach()], -1).float()


def losses(logits: Tensor, teacher: Tensor, ids: Tensor, before: Tensor, decay: Tensor) -> Tensor:
    """Return the loss, then matches [K] and trials [K] of every draft row.

    logits, teacher [B,A,K,V]; ids [B,A,K]: the tokens at p+1..p+K; before [B,A,K]: the backbone's greedy tokens there. A row
    counts as a trial when the text up to it is greedy and all earlier drafts match; rows after a token that is
    not greedy teach less.
    """
    logq, logp = torch.log_softmax(logits, -1), torch.log_softmax(teacher, -1)
    kl = (logp.exp() * (logp - logq)).sum(-1)
    best = teacher.argmax(-1)
    hard = -logq.gather(-1, best[..., None])[..., 0]
    greedy = (ids == before).float().cumprod(-1)
    weight = decay * (0.3 + 0.7 * greedy)
    loss = ((0.3 * kl + 0.7 * hard) * weight).sum() / weight.sum()
    match = (logits.argmax(-1) == best).float()
    reached = torch.cat([torch.ones_like(match[..., :1]), match.cumprod(-1)[..., :-1]], -1) * greedy
    return torch.cat([loss[None], (match * reached).sum((0, 1)), reached.sum((0, 1))])


class Drafter:
    """The draft pass for many anchors of a batch at once."""

    def __init__(self, shape: Shape, model: Backbone, compile_parts: bool) -> None:
        self.shape, self.model = shape, model
        wrap: Callable[..., Any] = torch.compile(dynamic=False) if compile_parts else (lambda f: f)
        self.front, self.back = wrap(layer_front), wrap(layer_back)
        self.features, self.keys = wrap(main_features), wrap(main_keys)
        # The attention runs uncompiled: with it compiled, recorded steps gave NaN after some hundred replays on an H200.
        self.attend = block_attention
        self.head, self.losses = wrap(head_logits), wrap(losses)
        self.cos, self.sin = (
            t.to(model.device) for t in rope_tables(shape, torch.arange(model.length + 8), False)
        )

    def __call__(
        self, params: Params, frozen: Params, ids: Tensor, taps: Tensor, anchors: Tensor, qat: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (logits [B,A,K,V], confidence features [B,A,K,F], imbalance, loads [blocks,E]) of the blocks after `anchors` [B,A]."""
        s = self.shape
        k, blocks = s.dspark_block_size, s.num_nextn_predict_layers
        line = torch.arange(ids.shape[0], device=ids.device)[:, None]
        positions = anchors[..., None] + 1 + torch.arange(k, device=ids.device)
        cos, sin = self.cos[positions], self.sin[positions]
        tokens = torch.full((*anchors.shape, k), s.dspark_noise_token_id, device=ids.device)
        tokens[..., 0] = ids[line, anchors + 1]
        h = F.embedding(tokens, frozen["embed.weight"].detach()).to(torch.bfloat16)
        h = h[..., None, :].expand(*h.shape[:-1], s.hc_mult, h.shape[-1]).contiguous()
        pre = torch.zeros(*tokens.shape, s.hc_mult, device=ids.device)
        pre[..., 0] = 1
        main = self.features(
            {n: params[f"mtp.0.{n}"] for n in ("main_proj.weight", "main_norm.weight")}, taps, qat
        )
        main8 = quant.act8(main) if qat else main
        past = anchors[..., None] - torch.arange(s.sliding_window - 1, -1, -1, device=ids.device)
        allowed = past >= 0
        counted = torch.ones(*tokens.shape, 1, device=ids.device)
        imbalance = torch.zeros((), device=ids.device)
        loads = []
        for block in range(blocks):
            p = sub(params, f"mtp.{block}.")
            keys = self.keys({n: p[n] for n in ("attn.wkv.weight", "attn.kv_norm.weight")}, main8,
                             self.cos[: taps.shape[1]], self.sin[: taps.shape[1]], qat)  # fmt: skip
            window = keys[line[..., None], past.clamp_min(0)]
            q, kv, pre_a, post, comb = self.front(
                p, h, pre, (cos, sin), None, 0, s.num_attention_heads, s.index_n_heads, False, False,
                s.hc_sinkhorn_iters, s.hc_eps, qat,
            )  # fmt: skip
            o, lse = self.attend(q, kv, window, allowed)
            h, pre, load, pressure = self.back(
                p, h, o, lse, (cos, sin), pre_a, post, comb, counted, s.o_groups, s.dspark_num_experts_per_tok,
                s.swiglu_limit, s.routed_scaling_factor, s.hc_sinkhorn_iters, s.hc_eps, qat,
            )  # fmt: skip
            imbalance = imbalance + pressure
            loads.append(load[0].detach())
        h = mix(h, pre)
        logits, features = self.head(
            sub(params, f"mtp.{blocks - 1}."), h, frozen["head.weight"].detach(), ids[line[..., None], positions]
        )  # fmt: skip
        return logits, features, imbalance, torch.stack(loads)

    def teacher(
        self, frozen: Params, ids: Tensor, hidden: Tensor, anchors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (the backbone's logits [B,A,K,V], the tokens at p+1..p+K, the backbone's greedy tokens there)."""
        line = torch.arange(ids.shape[0], device=ids.device)[:, None, None]
        positions = anchors[..., None] + torch.arange(
            self.shape.dspark_block_size + 1, device=ids.device
        )
        with torch.no_grad():
            every = F.linear(hidden[line, positions], frozen["head.weight"].bfloat16()).float()
        return every[:, :, 1:], ids[line, positions[..., 1:]], every[:, :, :-1].argmax(-1)

    def step(
        self, params: Params, frozen: Params, decay: Tensor, ids: Tensor, taps: Tensor, hidden: Tensor, anchors: Tensor
    ) -> Tensor:  # fmt: skip
        """Forward and backward of one batch; returns detached statistics, the loads of the experts last."""
        logits, _, imbalance, loads = self(params, frozen, ids, taps, anchors, True)
        stats = self.losses(logits, *self.teacher(frozen, ids, hidden, anchors), decay)
        (stats[0] + BALANCE * imbalance).backward()
        return torch.cat([stats.detach(), loads.flatten()])


class Trainer:
    """One guarded step: forward, backward, update. Everything stays on the device, so that it can be recorded.

    lr      the factor of both learning rates, to be filled before each step
    skipped how many steps changed nothing because their loss or gradient was not finite
    blamed  in how many of these each parameter's gradient was not finite
    """

    def __init__(
        self, drafter: Drafter, params: Params, frozen: Params, optimizer: Optimizer
    ) -> None:
        self.drafter, self.params, self.frozen, self.optimizer = drafter, params, frozen, optimizer
        device, shape = drafter.model.device, drafter.shape
        self.names = [n for n, p in params.items() if p.requires_grad]
        self.biases = [p for n, p in params.items() if n.endswith("gate.bias")]
        self.decay = torch.tensor([0.8**i for i in range(shape.dspark_block_size)], device=device)
        self.lr, self.usual, self.skipped = (torch.zeros((), device=device) for _ in range(3))
        self.blamed = torch.zeros(len(self.names), device=device)
        self.result = torch.zeros(0)

    def forget(self) -> None:
        """Forget all moments and the usual norm."""
        self.optimizer.reset()
        self.usual.zero_()

    def __call__(self, *batch: Tensor) -> Tensor:
        """Return (loss, matches [K], trials [K], norm of the gradient)."""
        stats = self.drafter.step(self.params, self.frozen, self.decay, *batch)
        self._update(stats)
        return self.result

    @torch.no_grad()
    def _update(self, stats: Tensor) -> None:
        k = self.drafter.shape.dspark_block_size
        grads: dict[str, Tensor | None] = {n: self.params[n].grad for n in self.names}
        found = [g for g in grads.values() if g is not None]
        assert len(found) == len(self.names), "every parameter takes part"
        norms = torch.stack(torch._foreach_norm(found))
        norm = norms.square().sum().sqrt()
        fine = torch.isfinite(stats[0]) & torch.isfinite(norm)
        live = fine.float()
        self.blamed.add_((~torch.isfinite(norms)).float())
        self.skipped.add_(1 - live)
        usual = torch.where(self.usual > 0, self.usual, norm)
        limit = CLIP * usual
        kept = torch.where(fine, torch.minimum(norm, limit), usual)
        self.usual.copy_(
            torch.where(fine | (self.usual > 0), usual + 0.02 * (kept - usual), self.usual)
        )
        factor = torch.where(fine, (limit / (norm + 1e-12)).clamp(max=1.0), torch.zeros_like(norm))
        for g in found:
            torch.nan_to_num_(g, nan=0.0, posinf=0.0, neginf=0.0)
        torch._foreach_mul_(found, factor)
        self.optimizer.step(self.lr * live, grads)
        load = torch.nan_to_num(stats[1 + 2 * k :]).view(len(self.biases), -1)
        rate = (2e-3 * self.lr + 1e-4) * live
        torch._foreach_add_(
            self.biases, list(torch.sign(load.mean(-1, keepdim=True) - load) * rate)
        )
        self.result = torch.cat([stats[: 1 + 2 * k], norm[None]])


class Writer:
    """The frozen backbone: features of rows, and rows continued greedily."""

    def __init__(self, model: Backbone, frozen: Params, record: bool) -> None:
        self.model, self.frozen, self.record = model, frozen, record
        self.graph: torch.cuda.CUDAGraph | None = None

    def _forward(self) -> None:
        out = self.model(self.frozen, self.ids, top_k=self.model.shape.index_topk, qat=True)
        self.taps, self.hidden = out["taps"].detach(), out["hidden"].detach()
        line = torch.arange(len(self.ids), device=self.ids.device)[:, None]
        logits = F.linear(
            self.hidden[line, self.cols], self.frozen["head.weight"].detach().bfloat16()
        )
        self.best = logits.argmax(-1)

    def prepare(self, rows: int, length: int, columns: int) -> None:
        """Record the pass for `rows` x `length` ids and at most `columns` columns."""
        if not self.record:
            return
        device = self.model.device
        self.ids = torch.zeros(rows, length, dtype=torch.long, device=device)
        self.cols = torch.zeros(rows, columns, dtype=torch.long, device=device)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._forward()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self._forward()

    def __call__(self, ids: Tensor, cols: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (taps, hidden, greedy tokens after `cols` [B,S]) of rows [B,T]; valid until the next call."""
        if self.graph is None:
            self.ids, self.cols = ids, cols
            self._forward()
            return self.taps, self.hidden, self.best
        self.ids.copy_(ids)
        self.cols[:, : cols.shape[1]] = cols
        self.graph.replay()
        return self.taps, self.hidden, self.best[:, : cols.shape[1]]

    def continue_rows(self, ids: Tensor, starts: Tensor, count: int) -> None:
        """Replace `count` tokens after every column of `starts` [B,S] by the greedy continuation, in place."""
        line = torch.arange(len(ids), device=ids.device)[:, None]
        for step in range(count):
            cols = starts + step
            *_, best = self(ids[:, :-1].contiguous(), cols)
            ids[line, cols + 1] = best


def regular_starts(rows: int, length: int, real: int, greedy: int, device: torch.device) -> Tensor:
    """Return the last text column before every greedy stretch, [rows, S]."""
    starts = torch.arange(real - 1, length - greedy - 8, real + greedy, device=device)
    return starts.expand(rows, -1).contiguous()


def stretch_anchors(
    ids: np.ndarray, starts: Sequence[np.ndarray], count: int, k: int
) -> list[np.ndarray]:
    """Return the positions of every row from which a whole block lies inside a greedy stretch, before its EOS."""
    out = []
    for row, columns in zip(ids, starts, strict=True):
        parts = [np.zeros(0, np.int64)]
        for start in columns:
            text = row[start + 1 : start + 1 + count]
            ends = np.flatnonzero(text == EOS_ID)
            usable = int(ends[0]) + 1 if ends.size else count
            parts.append(np.arange(start, start + usable - k))
        out.append(np.concatenate(parts))
    return out


class Pool:
    """Rows with the backbone's features, kept on the device, and the anchors that blocks may start from."""

    def __init__(self, seed: int) -> None:
        self.rows: list[tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]] = []
        self.rng = np.random.default_rng(seed)

    def add(self, writer: Writer, ids: Tensor, allowed: list[np.ndarray]) -> None:
        """Compute the features of rows [B,T+1] and keep them; rows with features that are not finite are not drawn from."""
        taps, hidden, _ = writer(ids[:, :-1].contiguous(), torch.zeros_like(ids[:, :1]))
        sound = taps.isfinite().flatten(1).all(1) & hidden.isfinite().flatten(1).all(1)
        table = np.zeros((len(allowed), max(1, *(a.size for a in allowed))), np.int64)
        for row, a in enumerate(allowed):
            table[row, : a.size] = a
        counts = torch.tensor([a.size for a in allowed], device=ids.device) * sound
        kept = (ids.clone(), taps.clone(), hidden.clone())
        if not bool(sound.all()):
            kept[1].nan_to_num_(0.0, 0.0, 0.0), kept[2].nan_to_num_(0.0, 0.0, 0.0)
            print(f"rows with features that are not finite: {int((~sound).sum())}", flush=True)
        self.rows.append((kept, torch.from_numpy(table).to(ids.device), counts.float()))

    def draw(self, anchors: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (ids, taps, hidden, anchors [B,A]) of a random batch."""
        kept, table, counts = self.rows[int(self.rng.integers(len(self.rows)))]
        number = torch.rand(len(table), anchors, device=table.device) * counts[:, None]
        return *kept, table.gather(1, number.long().clamp_max(table.shape[1] - 1))


class Trials:
    """Blocks drafted after every position of greedy stretches."""

    def __init__(self, k: int) -> None:
        self.features: list[Tensor] = []
        self.match: list[Tensor] = []
        self.reached: list[Tensor] = []
        self.lengths: list[int] = []
        self.k = k

    def add(self, drafter: Drafter, params: Params, frozen: Params, rows: tuple[Tensor, Tensor, Tensor],
            starts: Sequence[np.ndarray], count: int, anchors: int) -> None:  # fmt: skip
        """Draft after the positions of every stretch and walk through it as an engine would."""
        ids, taps, hidden = rows
        allowed = stretch_anchors(ids.cpu().numpy(), starts, count, self.k)
        width = -(-max(len(a) for a in allowed) // anchors) * anchors
        padded = np.zeros((len(allowed), width), np.int64)
        for row, a in enumerate(allowed):
            padded[row, : len(a)] = a
        parts = []
        for first in range(0, width, anchors):
            at = torch.from_numpy(padded[:, first : first + anchors]).to(ids.device)
            logits, features, *_ = drafter(params, frozen, ids, taps, at, True)
            best, text, before = drafter.teacher(frozen, ids, hidden, at)
            match = (logits.detach().argmax(-1) == best.argmax(-1)).float()
            parts.append((features.detach(), match, (text == before).float().cumprod(-1)))
        feats, match, greedy = (torch.cat(p, 1) for p in zip(*parts, strict=True))
        reached = greedy * torch.cat([torch.ones_like(match[..., :1]), match.cumprod(-1)[..., :-1]], -1)  # fmt: skip
        flags = match.cpu().numpy()
        for row, a in enumerate(allowed):
            n = len(a)
            self.features.append(feats[row, :n])
            self.match.append(match[row, :n])
            self.reached.append(reached[row, :n])
            where = {int(p): i for i, p in enumerate(a)}
            for start in starts[row]:
                p = int(start)
                while p in where:
                    hit = flags[row, where[p]]
                    accepted = int(np.cumprod(hit).sum())
                    self.lengths.append(accepted + 1)
                    p += accepted + 1

    def joined(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (features [N,K,F], match [N,K], reached [N,K])."""
        return torch.cat(self.features), torch.cat(self.match), torch.cat(self.reached)

    def summary(self) -> dict[str, Any]:
        """Return rates of acceptance given that all earlier drafts match, and the mean accepted length with the bonus."""
        _, match, reached = self.joined()
        trials = reached.sum(0)
        return {
            "acceptance": ((match * reached).sum(0) / trials.clamp_min(1)).tolist(),
            "trials": [int(t) for t in trials],
            "mean_accepted_length": float(np.mean(self.lengths)) if self.lengths else 0.0,
            "steps": len(self.lengths),
        }


def fit_confidence(features: Tensor, match: Tensor, reached: Tensor, ridge: float = 1e-3) -> Tensor:
    """Return the weights [F] of the logistic regression of match on features over the reached rows, without a constant."""
    keep = reached.flatten() > 0
    x, y = features.flatten(0, 1)[keep].double(), match.flatten()[keep].double()
    scale = x.square().mean(0).sqrt() + 1e-9
    x = x / scale
    w = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
    eye = torch.eye(len(w), dtype=torch.float64, device=x.device) * ridge * len(x)
    for _ in range(25):
        p = torch.sigmoid(x @ w)
        gradient = x.T @ (p - y) + eye @ w
        hessian = (x * (p * (1 - p))[:, None]).T @ x + eye
        w = w - torch.linalg.solve(hessian, gradient)
    return (w / scale).float()


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
    """Return (temperature of every draft, its calibration error on the other half of the data)."""
    grid = np.exp(np.linspace(np.log(0.3), np.log(4.0), 80))
    fitted, errors = [], []
    for p in pairs:
        fit, check = p[:, ::2], p[:, 1::2]
        best = min(grid, key=lambda t: calibration_error(fit[0], fit[1], float(t)))
        fitted.append(round(float(best), 4))
        errors.append(calibration_error(check[0], check[1], float(best)))
    return fitted, errors


def held_out_rows(
    held: Corpus, category: str, length: int, batch: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids [batch, length + 1], starts [batch, S]): where greedy stretches begin, well inside the documents."""
    ids, _, _ = evaluation_rows(held, category, length)
    sizes = (ids != 2).sum(1)
    order = np.argsort(-sizes, kind="stable") if category == "natural" else np.arange(len(ids))
    chosen = ids[order[:batch]]
    part = np.full((batch, length + 1), 2, np.int64)
    part[: len(chosen)] = chosen
    starts = np.zeros((batch, (length - TESTED - 8) // (REAL + TESTED) + 1), np.int64)
    for row in range(batch):
        size = int((part[row] != 2).sum())
        usable = np.arange(REAL - 1, max(REAL, min(size - 8, length - TESTED - 8)), REAL + TESTED)
        starts[row] = np.resize(usable, starts.shape[1])
    return part, starts


def main() -> None:
    """Write greedy rows, train, fit the confidence, evaluate, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".carry"))
    parser.add_argument(
        "--state",
        type=Path,
        default=Path(".carry/state"),
        help="folder with the backbone (and drafts to go on with)",
    )
    parser.add_argument("--out", type=Path, default=Path(".carry/state"))
    parser.add_argument("--steps", type=int, default=15000)
    parser.add_argument("--limit", type=int, default=60000, help="most steps, with --seconds")
    parser.add_argument(
        "--seconds", type=float, default=0, help="choose the number of steps to end at this time"
    )
    parser.add_argument("--greedy-batches", type=int, default=45)
    parser.add_argument("--text-batches", type=int, default=60)
    parser.add_argument("--seed", type=int, default=7000, help="of the choice of rows")
    parser.add_argument(
        "--greedy-share", type=float, default=0.6, help="share of the steps on greedy rows"
    )
    parser.add_argument(
        "--gather", type=float, default=0.36, help="share of --seconds after which no more greedy rows are written"
    )  # fmt: skip
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--anchors", type=int, default=256)
    parser.add_argument("--muon-lr", type=float, default=0.015)
    parser.add_argument("--adam-lr", type=float, default=1.5e-3)
    parser.add_argument("--categories", default=",".join(CATEGORIES), help="to evaluate on")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    began = time.time()
    device = torch.device("cpu" if args.cpu else "cuda")
    torch.backends.cuda.matmul.allow_tf32 = True
    torch._dynamo.config.recompile_limit = 64
    shape, constants, corpus, held = load_inputs(args.work)
    corpus.mark(set(DIGIT_IDS), 1)
    k, last = shape.dspark_block_size, shape.num_nextn_predict_layers - 1
    confidence = f"mtp.{last}.confidence_head.proj.weight"
    state = load_parts(args.state, "backbone")
    state.pop("step")
    frozen = {
        n: v.to(device, torch.float32).requires_grad_(not n.endswith("gate.bias"))
        for n, v in state.items()
    }
    params = {
        n: v.to(device, torch.float32).requires_grad_(not n.endswith(("gate.bias", confidence)))
        for n, v in (drafts_from(shape, state) | load_parts(args.state, "drafts")).items()
    }
    model = Backbone(shape, constants, args.length, device, not args.cpu, not args.cpu)
    drafter = Drafter(shape, model, not args.cpu)
    writer = Writer(model, frozen, not args.cpu)
    args.out.mkdir(parents=True, exist_ok=True)
    log = (args.out / "drafts.jsonl").open("a")

    def report(**values: Any) -> None:
        line = json.dumps(
            {n: round(v, 5) if isinstance(v, float) else v for n, v in values.items()}
            | {"seconds": round(time.time() - began, 1)}
        )
        print(line, flush=True)
        log.write(line + "\n")
        log.flush()

    torch.manual_seed(0)
    greedy, text = Pool(1), Pool(2)
    aside: list[tuple[tuple[Tensor, Tensor, Tensor], list[np.ndarray], int]] = []
    source = batches(corpus, args.length, args.batch, 0.4, 0.15, args.seed, 0)
    plans = [
        (regular_starts(args.batch, args.length, *plan, device), plan[1]) for plan in STRETCHES
    ]
    writer.prepare(args.batch, args.length, max(starts.shape[1] for starts, _ in plans))
    with torch.no_grad() if args.cpu else torch.enable_grad():
        for number in range(args.greedy_batches):
            starts, count = plans[number % len(plans)]
            ids = torch.from_numpy(next(source)[:, 0].astype(np.int64)).to(device)
            writer.continue_rows(ids, starts, count)
            columns = list(starts.cpu().numpy())
            if number < KEPT_BACK:
                taps, hidden, _ = writer(ids[:, :-1].contiguous(), starts)
                aside.append(((ids, taps.clone(), hidden.clone()), columns, count))
            else:
                greedy.add(writer, ids, stretch_anchors(ids.cpu().numpy(), columns, count, k))
            if number in (0, 1, KEPT_BACK, args.greedy_batches - 1):
                report(greedy_batches=number + 1)
            if args.seconds and greedy.rows and time.time() - began > args.gather * args.seconds:
                report(greedy_batches=number + 1, stopped=True)
                break
        everywhere = [np.arange(args.length - k - 1)] * args.batch
        for _ in range(args.text_batches):
            ids = torch.from_numpy(next(source)[:, 0].astype(np.int64)).to(device)
            text.add(writer, ids, everywhere)
        report(text_batches=args.text_batches)
        tests = {}
        categories = args.categories.split(",")
        for category in categories:
            part, at = held_out_rows(held, category, args.length, args.batch)
            ids, first = torch.from_numpy(part).to(device), torch.from_numpy(at).to(device)
            writer.continue_rows(ids, first, TESTED)
            taps, hidden, _ = writer(ids[:, :-1].contiguous(), first)
            tests[category] = (ids, taps.clone(), hidden.clone()), [np.unique(a) for a in at]
        report(held_out=len(tests))

    def tested(category: str) -> Trials:
        rows, at = tests[category]
        trials = Trials(k)
        trials.add(drafter, params, frozen, rows, at, TESTED, args.anchors)
        return trials

    optimizer = Optimizer(params, shape.o_groups, args.muon_lr, args.adam_lr, weight_decay=0.1)
    trainer = Trainer(drafter, params, frozen, optimizer)
    run: Step | None = None
    ring: list[Tensor] = []
    on_policy: list[Tensor] = []
    good = {n: v.detach().clone() for n, v in params.items()}
    step, factor, captures, skipped, mark = 0, 1.0, 0, 0, time.time()
    while step < args.steps:
        from_greedy = int((step + 1) * args.greedy_share) > int(step * args.greedy_share)
        batch = (greedy if from_greedy else text).draw(args.anchors)
        if run is None:
            trainer.lr.zero_()
            captures += 1
            run = Step(trainer, params, batch, not args.cpu and captures < 4)
            trainer.forget()
            trainer.skipped.zero_()
            skipped, mark = 0, time.time()
            report(step=step, captures=captures, recorded=run.graph is not None)
        progress = step / args.steps
        trainer.lr.fill_(factor * min(1.0, (step + 1) / 200) * min(1.0, (1 - progress) / 0.7))
        stats, _ = run(*batch)
        ring.append(stats.clone())
        if from_greedy:
            on_policy.append(ring[-1])
        step += 1
        if step % 100 and step not in (20, args.steps):
            continue
        lost = int(trainer.skipped)
        sound = all(bool(p.isfinite().all()) for p in params.values())
        if not sound or lost - skipped > 25:
            blamed = {n: int(c) for n, c in zip(trainer.names, trainer.blamed.tolist(), strict=True) if c}  # fmt: skip
            report(step=step, skipped=lost, sound=sound, factor=factor, blamed=blamed)
            with torch.no_grad():
                for n, p in params.items():
                    p.copy_(good[n])
            if captures > 8:
                break
            factor *= 0.8
            trainer.blamed.zero_()
            run, ring, on_policy = None, [], []
            continue
        if lost > skipped:
            report(step=step, skipped=lost)
        skipped = lost
        seconds = time.time() - mark
        if args.seconds and (step in (100, 500) or step % 1000 == 0):
            left = args.seconds - (time.time() - began)
            args.steps = max(step, min(args.limit, step + int(len(ring) / seconds * left)))
        if step % 500 == 0 or step in (20, 100, args.steps):
            good = {n: p.detach().clone() for n, p in params.items()}
            both, e = torch.stack(ring).nanmean(0), torch.stack(on_policy).nanmean(0).cpu().numpy()
            rates = e[1 : 1 + k] / np.maximum(e[1 + k : 1 + 2 * k], 1)
            report(step=step, steps=args.steps, loss=float(both[0]), norm=float(both[-1]), greedy_rates=rates.round(3).tolist(),
                   greedy_length=float(1 + np.cumprod(rates).sum()), steps_per_second=len(ring) / seconds)  # fmt: skip
            if step >= 100:
                ring, on_policy = [], []
        if step in (1000, 5000) or step % 10000 == 0:
            save_parts(params, args.out, "drafts")
            report(step=step, **{c: tested(c).summary()["mean_accepted_length"] for c in categories})  # fmt: skip
        if not ring:
            mark = time.time()
    save_parts(params, args.out, "drafts")
    seen = Trials(k)
    for rows, columns, count in aside:
        seen.add(drafter, params, frozen, rows, columns, count, args.anchors)
    report(kept_back=len(aside), **seen.summary())
    weights = fit_confidence(*seen.joined())
    with torch.no_grad():
        params[confidence].copy_(weights[None].bfloat16().float())
    save_parts(params, args.out, "drafts")
    pairs: list[list[np.ndarray]] = [[] for _ in range(k)]
    for category in categories:
        trials = tested(category)
        features, match, reached = trials.joined()
        logit = features @ weights.bfloat16().float()
        flat = [
            np.stack([a[reached[:, i] > 0].cpu().numpy() for a in (logit[:, i], match[:, i])])
            for i in range(k)
        ]
        report(evaluated=category, error_before=[round(calibration_error(p[0], p[1], 1.0), 4) if p.shape[1] else 0.0 for p in flat],
               **trials.summary())  # fmt: skip
        if category in ("natural", "json"):
            for i, part in enumerate(flat):
                pairs[i].append(part)
    rng = np.random.default_rng(0)
    whole = [np.concatenate(p, 1) for p in pairs]
    fitted, errors = fit_temperatures([p[:, rng.permutation(p.shape[1])] for p in whole])
    report(temperatures=fitted, error_after=errors)
    (args.out / "temperatures.json").write_text(json.dumps(fitted))


if __name__ == "__main__":
    main()
