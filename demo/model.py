"""The trainable model of the true architecture, batched for a GPU.

Parameters live in a flat dict under their official names; only the routed experts are stacked
(`...ffn.experts.w1` [E, I, D]). Layers are pure functions of tensors, so that one compiled function serves
every layer of its kind. Arithmetic follows the specification; with `qat` every rounding of inference is applied
and the gradient passes straight through.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from demo import quant
from demo.sinkhorn import sinkhorn

Params = dict[str, Tensor]
_EPS = 1e-20


@dataclass(frozen=True)
class Shape:
    """The sizes of the model, read from `text_config`."""

    raw: dict[str, Any] = field(repr=False)

    def __getattr__(self, name: str) -> Any:
        return self.raw[name]

    @property
    def ratios(self) -> list[int]:
        """Compression ratio of every backbone layer."""
        return list(self.raw["compress_ratios"][: self.raw["num_hidden_layers"]])

    def source(self, key: str, layer: int) -> int:
        """The nearest source layer at or before `layer`."""
        return max(int(i) for i in self.raw[key] if i <= layer)


# ---------------------------------------------------------------------------------------------- building blocks


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm in fp32, one rounding to the dtype of `x`."""
    v = x.float()
    return (
        weight.to(torch.bfloat16).float()
        * (v * torch.rsqrt(v.square().mean(-1, keepdim=True) + _EPS))
    ).to(x.dtype)


def rope_tables(shape: Shape, positions: Tensor, yarn: bool) -> tuple[Tensor, Tensor]:
    """Return (cos, sin), fp32 [len(positions), qk_rope_head_dim / 2]."""
    dim = shape.qk_rope_head_dim
    theta = float(shape.compress_rope_theta if yarn else shape.rope_theta)
    inv = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if yarn:
        scaling = shape.rope_scaling
        original = scaling["original_max_position_embeddings"]

        def bound(rotations: float) -> float:
            return int(dim) * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low, high = (
            max(math.floor(bound(scaling["beta_fast"])), 0),
            min(math.ceil(bound(scaling["beta_slow"])), dim - 1),
        )
        ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(
            0, 1
        )
        inv = inv / scaling["factor"] * ramp + inv * (1 - ramp)
    angle = positions.float()[:, None] * inv.to(positions.device)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate interleaved pairs of the last dims; `cos` broadcasts against x[..., pair]."""
    dim = 2 * cos.shape[-1]
    head, tail = x[..., :-dim], torch.unflatten(x[..., -dim:].float(), -1, (-1, 2))
    even, odd = tail[..., 0], tail[..., 1]
    if inverse:
        sin = -sin
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    return torch.cat([head, turned.to(x.dtype)], -1)


def coefficients(
    h: Tensor, fn: Tensor, scale: Tensor, base: Tensor, steps: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return hyper-connection (pre [..., 4], post [..., 4], comb [..., 4, 4]) of a trunk [..., 4, D]."""
    n = h.shape[-2]
    u = h.flatten(-2).float()
    m = F.linear(u, fn) * torch.rsqrt(u.square().mean(-1, keepdim=True) + _EPS)
    pre = torch.sigmoid(m[..., :n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(m[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    raw = m[..., 2 * n :] * scale[2] + base[2 * n :]
    comb = sinkhorn(raw.reshape(-1, n, n), steps, eps).view(*m.shape[:-1], n, n)
    return pre, post, comb


def mix(h: Tensor, pre: Tensor) -> Tensor:
    """Collapse the streams with `pre`."""
    return (pre[..., None] * h.float()).sum(-2).to(h.dtype)


def expand(h: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Return the new trunk: post * y plus the recombined streams."""
    v = h.float()
    n = v.shape[-2]
    moved = sum(comb[..., i, :, None] * v[..., i, None, :] for i in range(n))
    return (post[..., None] * y.float()[..., None, :] + moved).to(h.dtype)


def linear8(x: Tensor, w: Tensor, qat: bool) -> Tensor:
    """FP8 linear; `x` is already rounded."""
    return F.linear(x, quant.weight8(w) if qat else w.to(torch.bfloat16))


def router_pressure(load: Tensor, share: Tensor) -> Tensor:
    """Return a scalar whose gradient moves router scores away from experts far outside their fair share.

    load [C,E]: choices of every kind of token; share [C,E]: the sum of the normalized scores. Experts between 0.5x and
    2x of the fair share exert no pressure.
    """
    experts = load.shape[-1]
    fair = load.detach() * experts / (load.detach().sum(-1, keepdim=True) + 1e-6)
    excess = fair - fair.clamp(0.5, 2.0)
    seen = (load.sum(-1, keepdim=True) > 64 * experts).to(share.dtype)
    return (seen * excess * share / (share.detach().sum(-1, keepdim=True) + 1e-6)).sum()


def moe(
    p: Params, x: Tensor, counted: Tensor, top_k: int, limit: float, scaling: float, qat: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (output, tokens per kind and expert [C,E], imbalance, a scalar).

    `counted` [...,C] tells of which kind a token is. All experts are computed as one wide product, unchosen ones masked.
    """
    x8 = quant.act8(x) if qat else x
    w1, w3, w2 = (
        p["ffn.experts.w1"],
        p["ffn.experts.w3"],
        p["ffn.experts.w2"],
    )  # [E,I,D], [E,I,D], [E,D,I]
    experts, inner, _ = w1.shape
    routing = F.linear(x.float(), p["ffn.gate.weight"].to(torch.bfloat16).float())
    score = torch.sqrt(F.softplus(routing) + 1e-12)  # the root of zero has no gradient
    ranked = (score + p["ffn.gate.bias"]).detach()
    better = ranked[..., None, :] > ranked[..., :, None]
    chosen = better.sum(-1) < top_k
    weight = torch.where(chosen, score, torch.zeros_like(score))
    weight = weight / (weight.sum(-1, keepdim=True) + _EPS) * scaling
    kinds = counted.flatten(0, -2).transpose(0, 1)
    load = kinds @ chosen.flatten(0, -2).to(kinds.dtype)
    imbalance = router_pressure(
        load, kinds @ (score / (score.sum(-1, keepdim=True) + _EPS)).flatten(0, -2)
    )
    imbalance = imbalance + 0.1 * torch.relu(routing.abs() - 10).square().mean()
    if qat:
        w1, w3, w2 = quant.weight4(w1), quant.weight4(w3), quant.weight4(w2)
    w1, w3, w2 = w1.to(torch.bfloat16), w3.to(torch.bfloat16), w2.to(torch.bfloat16)

    def act(gate: Tensor, up: Tensor) -> Tensor:
        g = gate.float()
        u = up.float()
        if limit > 0:
            g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        return F.silu(g) * u

    h = act(F.linear(x8, w1.flatten(0, 1)), F.linear(x8, w3.flatten(0, 1)))
    h = (torch.unflatten(h, -1, (experts, inner)) * weight[..., None]).flatten(-2).to(x.dtype)
    h = quant.act8(h) if qat else h
    routed = F.linear(h, w2.permute(1, 0, 2).flatten(1))
    s = act(
        linear8(x8, p["ffn.shared_experts.w1.weight"], qat),
        linear8(x8, p["ffn.shared_experts.w3.weight"], qat),
    ).to(x.dtype)
    s = quant.act8(s) if qat else s
    shared = linear8(s, p["ffn.shared_experts.w2.weight"], qat)
    return routed + shared, load, imbalance


# ---------------------------------------------------------------------------------------------- compiled parts


def layer_front(
    p: Params, h: Tensor, pre: Tensor, tables: tuple[Tensor, Tensor], entries: tuple[Tensor, Tensor] | None, ratio: int,
    heads: int, index_heads: int, owns_kv: bool, owns_index: bool, steps: int, eps: float, qat: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Everything of the attention sublayer before the scores.

    Returns (q [B,T,H,d], kv [B,T,d], pre, post, comb) and, where owned, (ckv [B,N,d], ikey [B,N,di]) and
    (iq [B,T,Hi,di], iw [B,T,Hi]).
    """
    cos, sin = tables
    pre_a, post, comb = coefficients(
        h, p["hc_attn_fn"], p["hc_attn_scale"], p["hc_attn_base"], steps, eps
    )
    x = rms(mix(h, pre), p["attn_norm.weight"])
    x8 = quant.act8(x) if qat else x
    qr = rms(linear8(x8, p["attn.wq_a.weight"], qat), p["attn.q_norm.weight"])
    qr8 = quant.act8(qr) if qat else qr
    q = torch.unflatten(linear8(qr8, p["attn.wq_b.weight"], qat), -1, (heads, -1))
    q = rotate(q, cos[..., None, :], sin[..., None, :])
    kv = rotate(rms(linear8(x8, p["attn.wkv.weight"], qat), p["attn.kv_norm.weight"]), cos, sin)
    kv = quant.act8(kv) if qat else kv
    out: tuple[Tensor, ...] = (q, kv, pre_a, post, comb)
    if owns_kv:
        assert entries is not None
        if ratio == 2:
            names = ("attn.compressor.wkv.weight", "attn.compressor.wgate.weight")
            a, g = (
                torch.unflatten(F.linear(x, p[name].to(torch.bfloat16)).float(), 1, (-1, 2))
                for name in names
            )
            c = (torch.softmax(g, 2) * a).sum(2).to(x.dtype)
        else:
            c = F.linear(x, p["attn.compressor.wkv.weight"].to(torch.bfloat16))
        latent = rms(c, p["attn.compressor.norm.weight"])
        ckv = rotate(latent, *entries)
        ikey = rms(
            F.linear(latent.detach(), p["attn.indexer.wk.weight"].to(torch.bfloat16)),
            p["attn.indexer.k_norm.weight"],
        )
        ikey = rotate(ikey, *entries)
        if qat:
            ckv, ikey = quant.act4_e4(ckv), quant.act4_e8(ikey)
        out += (ckv, ikey)
    if owns_index:
        iq = torch.unflatten(
            linear8(qr8.detach(), p["attn.indexer.wq_b.weight"], qat), -1, (index_heads, -1)
        )
        iq = rotate(iq, cos[..., None, :], sin[..., None, :])
        iq = quant.act4_e8(iq) if qat else iq
        iw = F.linear(x.detach(), p["attn.indexer.weights_proj.weight"].to(torch.bfloat16)).float()
        out += (iq, iw * (iq.shape[-1] ** -0.5 * index_heads**-0.5))
    return out


def layer_back(
    p: Params, h: Tensor, o: Tensor, lse: Tensor, tables: tuple[Tensor, Tensor], pre: Tensor, post: Tensor, comb: Tensor,
    counted: Tensor, groups: int, top_k: int, limit: float, scaling: float, steps: int, eps: float, qat: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """From the attention output without sink (o [B,H,T,d], lse [B,H,T]) to the trunk after the FFN.

    Returns (trunk, pre of the next layer, tokens per kind and expert, imbalance).
    """
    cos, sin = tables
    o = o * torch.sigmoid(lse.float() - p["attn.attn_sink"][:, None])[..., None]
    o = rotate(o.to(h.dtype).transpose(-3, -2), cos[..., None, :], sin[..., None, :], inverse=True)
    wo_a = p["attn.wo_a.weight"]
    wo_a = quant.weight8(wo_a) if qat else wo_a.to(torch.bfloat16)
    z = torch.einsum(
        "...gi,goi->...go",
        torch.unflatten(o.flatten(-2), -1, (groups, -1)),
        torch.unflatten(wo_a, 0, (groups, -1)),
    ).flatten(-2)
    y = linear8(quant.act8(z) if qat else z, p["attn.wo_b.weight"], qat)
    h = expand(h, y, post, comb)
    pre_f, post_f, comb_f = coefficients(
        h, p["hc_ffn_fn"], p["hc_ffn_scale"], p["hc_ffn_base"], steps, eps
    )
    x = rms(mix(h, pre), p["ffn_norm.weight"])
    y, load, imbalance = moe(p, x, counted, top_k, limit, scaling, qat)
    return expand(h, y, post_f, comb_f), pre_f, load, imbalance


def engram(p: Params, h: Tensor, rows: Tensor, qat: bool) -> Tensor:
    """Add the gated n-gram memory to every stream; rows [B,T,columns]."""
    streams, dim = h.shape[-2:]
    e = F.embedding(rows, p["engram.embed.weight"])
    e = (quant.rows8(e) if qat else e.to(torch.bfloat16)).flatten(-2)
    e = quant.act8(e) if qat else e
    kv = linear8(e, p["engram.wkv.weight"], qat)
    key = torch.unflatten(kv[..., : streams * dim], -1, (streams, dim)).float()
    value = kv[..., None, streams * dim :].float()
    w = (
        p["engram.q_weight"].to(torch.bfloat16).float()
        * p["engram.k_weight"].to(torch.bfloat16).float()
    )
    v = h.float()
    rx = torch.rsqrt(v.square().mean(-1) + _EPS)
    rk = torch.rsqrt(key.square().mean(-1) + _EPS)
    d = (v * w * key).sum(-1) * rx * rk / math.sqrt(dim)
    gate = torch.sigmoid(torch.copysign(torch.sqrt(d.abs().clamp_min(1e-6)), d))
    return (v + gate[..., None] * value).to(h.dtype)


def index_scores(iq: Tensor, iw: Tensor, ikey: Tensor) -> Tensor:
    """Return sum over heads of w * relu(q . k), [B,T,N] fp32."""
    total = None
    for head in range(iq.shape[2]):
        dots = torch.matmul(iq[:, :, head], ikey.transpose(1, 2))
        term = iw[:, :, head, None] * torch.relu(dots.float())
        total = term if total is None else total + term
    assert total is not None
    return total


def choose(
    scores: Tensor,
    visible: Tensor,
    allowed: Tensor | None,
    top_k: int,
    block: int,
    blocks: int,
    pick_blocks: bool,
) -> tuple[Tensor, Tensor]:
    """Return (selected [B,T,N] bool, candidates [B,T,N] bool) of the index scores.

    Entries outside `visible` [T,N] and outside `allowed` never count; the newest candidate block always stays.
    """
    floor = float("-inf")
    scores = torch.where(visible, scores, floor)
    candidates = visible
    if pick_blocks:
        best = torch.unflatten(scores, -1, (-1, block)).amax(-1)
        newest = (visible.sum(-1) - 1) // block
        ids = torch.arange(best.shape[-1], device=best.device)
        best = torch.where(ids == newest[:, None], -floor, best)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(-1, best.topk(min(blocks, best.shape[-1]), -1, sorted=False).indices, True)
        candidates = kept.repeat_interleave(block, -1) & visible
    if allowed is not None:
        scores = torch.where(allowed, scores, floor)
    chosen = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    chosen.scatter_(-1, scores.topk(min(top_k, scores.shape[-1]), -1, sorted=False).indices, True)
    chosen &= scores > floor
    return chosen, candidates


def head_loss(z: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of every token in nats, [N] fp32."""
    logits = F.linear(z, weight.to(torch.bfloat16)).float()
    picked = logits.gather(-1, targets.clamp_min(0)[:, None])[:, 0]
    return torch.logsumexp(logits, -1) - picked


def index_loss(
    mass: Tensor, iq: Tensor, iw: Tensor, ikey: Tensor, visible: Tensor, weight: Tensor
) -> Tensor:
    """Return the divergence of the indexer's softmax from the attention mass on compressed entries.

    mass [B,Q,N] sums to the share of attention that the consumers spend on compressed entries; visible [B,Q,N];
    weight [B,Q] of the queries.
    """
    scores = torch.where(visible, index_scores(iq, iw, ikey), -1e30)
    target = mass / (mass.sum(-1, keepdim=True) + 1e-9)
    logq = torch.log_softmax(scores, -1)
    kl = torch.where(
        target > 0, target * (torch.log(target + 1e-9) - logq), torch.zeros_like(target)
    ).sum(-1)
    seen = visible.any(-1) * weight
    return (kl * seen).sum() / (seen.sum() + 1e-9)


def attention_mass(
    q: Tensor, kv: Tensor, ckv: Tensor, sink: Tensor, window: Tensor, visible: Tensor
) -> Tensor:
    """Return the attention probabilities on all visible compressed entries, summed over heads, [B,Q,N].

    q [B,Q,H,d]; window [B,Q,T] and visible [B,Q,N] tell what a query may see.
    """
    scale = q.shape[-1] ** -0.5
    far = torch.einsum("bqhd,bnd->bqhn", q, ckv).float() * scale
    near = torch.einsum("bqhd,bnd->bqhn", q, kv).float() * scale
    far = torch.where(visible[:, :, None], far, -1e30)
    near = torch.where(window[:, :, None], near, -1e30)
    sinks = sink[:, None].expand(*far.shape[:-1], 1)
    joint = torch.softmax(torch.cat([sinks, near, far], -1), -1)
    return joint[..., 1 + near.shape[-1] :].sum(2)


def dense_attention(q: Tensor, keys: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Plain attention: q [B,H,T,d], keys [B,S,d], mask [B or 1,T,S]; returns (o, lse)."""
    scores = torch.einsum("bhtd,bsd->bhts", q.float(), keys.float()) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask[:, None], float("-inf"))
    lse = torch.logsumexp(scores, -1)
    p = torch.exp(scores - lse[..., None])
    return torch.einsum("bhts,bsd->bhtd", p, keys.float()).to(q.dtype), lse


# ---------------------------------------------------------------------------------------------- parameters


def init_layer(shape: Shape, prefix: str, experts: int, g: torch.Generator) -> Params:
    """Return the parameters every layer has, draft blocks included."""
    d, i, heads, dh = (
        shape.hidden_size,
        shape.moe_intermediate_size,
        shape.num_attention_heads,
        shape.head_dim,
    )
    n = shape.hc_mult

    def dense(out: int, inner: int, gain: float = 1.0) -> Tensor:
        return torch.randn(out, inner, generator=g) * (gain / math.sqrt(inner))

    p: Params = {
        "attn.wq_a.weight": dense(shape.q_lora_rank, d),
        "attn.q_norm.weight": torch.ones(shape.q_lora_rank),
        "attn.wq_b.weight": dense(heads * dh, shape.q_lora_rank),
        "attn.wkv.weight": dense(dh, d),
        "attn.kv_norm.weight": torch.ones(dh),
        "attn.wo_a.weight": dense(shape.o_groups * shape.o_lora_rank, heads * dh // shape.o_groups),
        "attn.wo_b.weight": dense(d, shape.o_groups * shape.o_lora_rank, 0.3),
        "attn.attn_sink": torch.zeros(heads),
        "attn_norm.weight": torch.ones(d),
        "ffn_norm.weight": torch.ones(d),
        "ffn.gate.weight": dense(experts, d, 0.5),
        "ffn.gate.bias": torch.zeros(experts),
        "ffn.shared_experts.w1.weight": dense(i, d),
        "ffn.shared_experts.w3.weight": dense(i, d),
        "ffn.shared_experts.w2.weight": dense(d, i, 0.3),
        "ffn.experts.w1": torch.randn(experts, i, d, generator=g) / math.sqrt(d),
        "ffn.experts.w3": torch.randn(experts, i, d, generator=g) / math.sqrt(d),
        "ffn.experts.w2": torch.randn(experts, d, i, generator=g) * (0.3 / math.sqrt(i)),
    }
    for sub in ("attn", "ffn"):
        base = torch.zeros((2 + n) * n)
        base[:n] = -1.1 + 0.4 * torch.randn(n, generator=g)
        base[n : 2 * n] = 0.4 * torch.randn(n, generator=g)
        base[2 * n :] = (3.0 * torch.eye(n)).flatten() + 0.1 * torch.randn(n * n, generator=g)
        p[f"hc_{sub}_fn"] = torch.randn((2 + n) * n, n * d, generator=g) * (0.3 / math.sqrt(n * d))
        p[f"hc_{sub}_base"] = base
        p[f"hc_{sub}_scale"] = torch.full((3,), 0.2)
    return {prefix + k: v for k, v in p.items()}


def init_backbone(shape: Shape, seed: int = 0) -> Params:
    """Return freshly drawn backbone parameters, fp32."""
    g = torch.Generator().manual_seed(seed)
    d, dh, v = shape.hidden_size, shape.head_dim, shape.vocab_size

    def dense(out: int, inner: int, gain: float = 1.0) -> Tensor:
        return torch.randn(out, inner, generator=g) * (gain / math.sqrt(inner))

    p: Params = {
        "embed.weight": torch.randn(v, d, generator=g) * 0.5,
        "norm.weight": torch.ones(d),
        "head.weight": dense(v, d, 0.2),
    }
    for layer, ratio in enumerate(shape.ratios):
        at = f"layers.{layer}."
        p |= init_layer(shape, at, shape.n_routed_experts, g)
        if layer in shape.kv_source_layer_ids:
            p[at + "attn.compressor.wkv.weight"] = dense(dh, d)
            if ratio > 1:
                p[at + "attn.compressor.wgate.weight"] = dense(dh, d, 0.1)
            p[at + "attn.compressor.norm.weight"] = torch.ones(dh)
            p[at + "attn.indexer.wk.weight"] = dense(shape.index_head_dim, dh)
            p[at + "attn.indexer.k_norm.weight"] = torch.ones(shape.index_head_dim)
        if layer in shape.index_source_layer_ids:
            p[at + "attn.indexer.wq_b.weight"] = dense(
                shape.index_n_heads * shape.index_head_dim, shape.q_lora_rank
            )
            p[at + "attn.indexer.weights_proj.weight"] = dense(shape.index_n_heads, d)
        if layer in shape.engram_layer_ids:
            rows = shape.engram_num_embeddings[shape.engram_layer_ids.index(layer)]
            inner = (shape.engram_max_ngram_size - 1) * shape.engram_n_heads * shape.engram_head_dim
            n = shape.hc_mult
            p[at + "engram.embed.weight"] = (
                torch.randn(rows, shape.engram_head_dim, generator=g) * 0.3
            )
            p[at + "engram.wkv.weight"] = dense((n + 1) * d, inner, 0.5)
            p[at + "engram.q_weight"] = torch.ones(n, d)
            p[at + "engram.k_weight"] = torch.ones(n, d)
    return p


def init_drafts(shape: Shape, seed: int = 1) -> Params:
    """Return freshly drawn parameters of the draft blocks and their heads, fp32."""
    g = torch.Generator().manual_seed(seed)
    d, v, rank, last = (
        shape.hidden_size,
        shape.vocab_size,
        shape.dspark_markov_rank,
        shape.num_nextn_predict_layers - 1,
    )
    p: Params = {}
    for block in range(last + 1):
        p |= init_layer(shape, f"mtp.{block}.", shape.dspark_n_routed_experts, g)
    taps = len(shape.dspark_target_layer_ids) * d
    p["mtp.0.main_proj.weight"] = torch.randn(d, taps, generator=g) / math.sqrt(taps)
    p["mtp.0.main_norm.weight"] = torch.ones(d)
    p[f"mtp.{last}.norm.weight"] = torch.ones(d)
    p[f"mtp.{last}.markov_head.embed.weight"] = torch.randn(v, rank, generator=g) * 0.3
    p[f"mtp.{last}.markov_head.head.weight"] = torch.zeros(v, rank)
    p[f"mtp.{last}.confidence_head.proj.weight"] = torch.zeros(1, d + rank)
    return p


def drafts_from(shape: Shape, backbone: Params, seed: int = 1) -> Params:
    """Return parameters of the draft blocks that start from layers of a trained backbone.

    The first block starts from the first layer, because its input are embeddings; its keys, and the other blocks, start from
    the last layers, because their keys come from the trunk there and the backbone's head reads what they write.
    """
    p = init_drafts(shape, seed)
    blocks, layers = shape.num_nextn_predict_layers, shape.num_hidden_layers
    for name in list(p):
        block, rest = name.removeprefix("mtp.").split(".", 1)
        late = layers - blocks + int(block)
        at_keys = rest in ("attn.wkv.weight", "attn.kv_norm.weight")
        layer = 0 if block == "0" and not at_keys else late
        source = backbone.get(f"layers.{layer}.{rest}")
        if source is not None:
            p[name] = source[: p[name].shape[0]].detach().float().clone()
    d, taps = shape.hidden_size, len(shape.dspark_target_layer_ids)
    p["mtp.0.main_proj.weight"] = (
        torch.eye(d).repeat(1, taps) / taps + 0.1 * p["mtp.0.main_proj.weight"]
    )
    p[f"mtp.{blocks - 1}.norm.weight"] = backbone["norm.weight"].detach().float().clone()
    return p


def sub(params: Params, prefix: str) -> Params:
    """Return the parameters below `prefix`, with the prefix removed."""
    return {k[len(prefix) :]: v for k, v in params.items() if k.startswith(prefix)}


# ---------------------------------------------------------------------------------------------- the backbone


class Backbone:
    """The forward pass over whole rows of `length` tokens, masks and tables prepared once."""

    def __init__(
        self,
        shape: Shape,
        constants: dict[str, Tensor],
        length: int,
        device: torch.device,
        compile_parts: bool,
        flex: bool,
    ) -> None:
        self.shape, self.length, self.device = shape, length, device
        self.constants = {k: v.to(device) for k, v in constants.items()}
        positions = torch.arange(length, device=device)
        self.tables = {yarn: rope_tables(shape, positions, yarn) for yarn in (False, True)}
        self.entries = {r: tuple(t[::r] for t in self.tables[True]) for r in (1, 2)}
        q, k = positions[:, None], positions[None]
        self.window = (k <= q) & (k > q - shape.sliding_window)
        self.visible = {r: positions[None, : length // r] < (q + 1) // r for r in (1, 2)}
        wrap: Callable[..., Any] = torch.compile(dynamic=False) if compile_parts else (lambda f: f)
        self.front, self.back, self.engram = wrap(layer_front), wrap(layer_back), wrap(engram)
        self.scores, self.loss, self.index_loss = (
            wrap(index_scores),
            wrap(head_loss),
            wrap(index_loss),
        )
        self.final, self.hash, self.mass = wrap(self._final), wrap(self._hash), wrap(attention_mass)
        self.embed = wrap(self._embed)
        self.flex: Callable[..., Any] | None = None
        if flex:
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention

            self.flex = torch.compile(flex_attention, dynamic=False)
            span = shape.sliding_window
            self.block_masks = {}
            for r in (0, 1, 2):

                def keep(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, r: int = r) -> Tensor:
                    near: Tensor = (kv_idx <= q_idx) & (kv_idx > q_idx - span)
                    if r == 0:
                        return near
                    far = (kv_idx - length) < (q_idx + 1) // r
                    return torch.where(kv_idx < length, near, far)

                total = length + (length // r if r else 0)
                self.block_masks[r] = create_block_mask(
                    keep, None, None, length, total, device=device
                )

    @staticmethod
    def _embed(ids: Tensor, weight: Tensor, streams: int) -> Tensor:
        h = F.embedding(ids, weight).to(torch.bfloat16)
        return h[:, :, None].expand(-1, -1, streams, -1).contiguous()

    @staticmethod
    def _final(h: Tensor, pre: Tensor, weight: Tensor) -> Tensor:
        return rms(mix(h, pre), weight)

    @staticmethod
    def _hash(
        ids: Tensor,
        compressed: Tensor,
        primes: Tensor,
        offsets: Tensor,
        multipliers: Tensor,
        pad: Tensor,
    ) -> Tensor:
        """Return Engram rows [layers, B, T, columns]. Source: weights specification, 5.4."""
        c = compressed[ids]
        orders = multipliers.shape[1]
        columns = primes.shape[1] // (orders - 1)
        past = [c] + [F.pad(c, (r, 0))[:, : c.shape[1]] for r in range(1, orders)]
        at = torch.arange(c.shape[1], device=c.device)
        past = [k if r == 0 else torch.where(at >= r, k, pad) for r, k in enumerate(past)]
        out = []
        for layer in range(primes.shape[0]):
            acc = past[0] * multipliers[layer, 0]
            for n in range(1, orders):
                acc = acc ^ (past[n] * multipliers[layer, n])
                for head in range(columns):
                    col = (n - 1) * columns + head
                    out.append(acc % primes[layer, col] + offsets[layer, col])
        return torch.unflatten(torch.stack(out, -1), -1, (primes.shape[0], -1)).movedim(-2, 0)

    def attend(
        self, q: Tensor, kv: Tensor, ckv: Tensor | None, selected: Tensor | None, ratio: int
    ) -> tuple[Tensor, Tensor]:
        """Return (o [B,H,T,d], lse [B,H,T]) without the sink."""
        keys = kv if ckv is None else torch.cat([kv, ckv], 1)
        if self.flex is None:
            mask = self.window[None]
            if selected is not None:
                mask = torch.cat([mask.expand(q.shape[0], -1, -1), selected], -1)
            return dense_attention(q.transpose(1, 2), keys, mask)
        length = self.length
        modify = None
        if selected is not None:

            def modify(
                score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
            ) -> Tensor:
                entry = torch.where(kv_idx < length, 0, kv_idx - length)
                return torch.where(
                    (kv_idx < length) | selected[b, q_idx, entry], score, -float("inf")
                )

        keys = keys[:, None].contiguous()
        o, lse = self.flex(
            q.transpose(1, 2).contiguous(), keys, keys, score_mod=modify, block_mask=self.block_masks[ratio],
            enable_gqa=True, return_lse=True,
        )  # fmt: skip
        return o, lse

    def __call__(
        self,
        params: Params,
        ids: Tensor,
        *,
        top_k: int,
        qat: bool,
        probes: Tensor | None = None,
        probe_weight: Tensor | None = None,
        random_choice: bool = False,
        counted: Tensor | None = None,
    ) -> dict[str, Any]:
        """Run rows of ids [B,T].

        Returns hidden (after the final norm, [B,T,D]), loads [L,C,E], imbalance (scalar), taps [B,T,n*D], index_loss (scalar,
        with `probes` [B,Q]: the query positions whose attention teaches the indexers, weighted by `probe_weight`) and recall [groups,B,Q] (selected
        share of the mass). `top_k` 0 attends to every visible entry; `random_choice` replaces the indexers' scores by
        noise; `counted` [B,T,C] tells which tokens count in the loads of which kind.
        """
        s = self.shape
        sparse = top_k > 0
        blocks_kept = max(s.candidate_topk_blocks, top_k // 2)
        if counted is None:
            counted = torch.ones(*ids.shape, 1, device=ids.device)
        weight = torch.ones_like(probes, dtype=torch.float32) if probes is not None else None
        weight = weight if probe_weight is None else probe_weight
        at = (
            None
            if probes is None
            else (torch.arange(ids.shape[0], device=ids.device)[:, None], probes)
        )
        steps, eps = s.hc_sinkhorn_iters, s.hc_eps
        h = self.embed(ids, params["embed.weight"], s.hc_mult)
        pre = torch.zeros(*ids.shape, s.hc_mult, device=ids.device)
        pre[..., 0] = 1
        rows = self.hash(
            ids,
            *(self.constants[k] for k in ("compressed", "primes", "offsets", "multipliers", "pad")),
        )
        ckv: dict[int, Tensor] = {}
        ikey: dict[int, Tensor] = {}
        selected: Tensor | None = None
        candidates: Tensor | None = None
        loads, taps, losses, recalls, pressures = [], [], [], [], []
        probe: tuple[Tensor, ...] | None = None
        mass: Tensor | None = None

        groups: list[tuple[tuple[Tensor, ...], Tensor]] = []

        def close_group() -> None:
            nonlocal probe, mass
            if probe is not None and mass is not None:
                groups.append((probe, mass))
                if sparse:
                    recalls.append((mass * probe[4]).sum(-1) / (mass.sum(-1) + 1e-9))
            probe, mass = None, None

        for layer, ratio in enumerate(s.ratios):
            p = sub(params, f"layers.{layer}.")
            if layer in s.engram_layer_ids:
                h = self.engram(
                    {k: v for k, v in p.items() if k.startswith("engram")},
                    h,
                    rows[s.engram_layer_ids.index(layer)],
                    qat,
                )
            if layer in s.dspark_target_layer_ids:
                taps.append(h.float().mean(-2).to(torch.bfloat16))
            owns_kv, owns_index = layer in s.kv_source_layer_ids, layer in s.index_source_layer_ids
            front = {
                k: v
                for k, v in p.items()
                if k.startswith(("attn", "hc_attn")) and "wo_" not in k and "sink" not in k
            }
            tables = self.tables[ratio > 0]
            q, kv, pre_a, post, comb, *rest = self.front(
                front, h, pre, tables, self.entries[ratio] if ratio else None, ratio, s.num_attention_heads,
                s.index_n_heads, owns_kv, owns_index, steps, eps, qat,
            )  # fmt: skip
            source = s.source("kv_source_layer_ids", layer) if ratio else -1
            if owns_kv:
                ckv[layer], ikey[layer], *rest = rest
            if owns_index:
                close_group()
                iq, iw = rest
                visible = self.visible[ratio]
                if sparse:
                    with torch.no_grad():
                        scores = self.scores(iq.detach(), iw.detach(), ikey[source].detach())
                        if random_choice:
                            scores = torch.rand_like(scores)
                        first = layer == s.candidate_source_layer_id
                        filters = layer > s.candidate_source_layer_id
                        selected, blocks = choose(
                            scores, visible, candidates if filters else None, top_k, s.candidate_block_size,
                            blocks_kept, first,
                        )  # fmt: skip
                        candidates = blocks if first else candidates
                else:
                    selected = visible.expand(ids.shape[0], -1, -1).contiguous()
                if at is not None:
                    probe = (iq[at], iw[at], ikey[source], visible[probes], selected[at])
            if ratio and at is not None:
                with torch.no_grad():
                    part = self.mass(
                        q.detach()[at], kv.detach(), ckv[source].detach(), p["attn.attn_sink"].detach(),
                        self.window[probes], self.visible[ratio][probes],
                    )  # fmt: skip
                    mass = part if mass is None else mass + part
            o, lse = self.attend(
                q, kv, ckv[source] if ratio else None, selected if ratio else None, ratio
            )
            back = {
                k: v
                for k, v in p.items()
                if k.startswith(("ffn", "hc_ffn")) or "wo_" in k or "sink" in k
            }
            h, pre, load, pressure = self.back(
                back, h, o, lse, tables, pre_a, post, comb, counted, s.o_groups, s.num_experts_per_tok, s.swiglu_limit,
                s.routed_scaling_factor, steps, eps, qat,
            )  # fmt: skip
            loads.append(load)
            pressures.append(pressure)
        close_group()
        first_filtered = [i > s.candidate_source_layer_id for i in s.index_source_layer_ids].index(
            True
        )
        for number, (given, spent) in enumerate(groups):
            # What the candidate source leaves out is lost to the later indexers: it learns for them, too.
            if number == first_filtered - 1:
                spent = spent + 0.5 * sum(m for _, m in groups[first_filtered:])
            losses.append(self.index_loss(spent, *given[:4], weight))
        zero = torch.zeros((), device=ids.device)
        return {
            "hidden": self.final(h, pre, params["norm.weight"]),
            "loads": torch.stack(loads),
            "imbalance": torch.stack(pressures).sum(),
            "taps": torch.cat(taps, -1),
            "index_loss": torch.stack(losses).sum() if losses else zero,
            "recall": torch.stack(recalls) if recalls else zero.view(1, 1, 1),
        }
