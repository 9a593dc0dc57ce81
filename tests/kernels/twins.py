"""What every op should compute: fp64 or plain Python, one value after the other.

Nothing here calls the code under test; formats are decoded from their bit patterns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e4m3(code: int) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


E4M3 = [e4m3(code) for code in range(127)]
E4M3_BYTES = torch.tensor([e4m3(code) for code in range(256)], dtype=torch.float64)


def nearest(value: float, grid: list[float]) -> float:
    """The nearest of an ascending grid, ties to the even position, beyond its end the last."""
    size = min(abs(value), grid[-1])
    at = min(range(len(grid)), key=lambda i: (abs(grid[i] - size), i % 2))
    return math.copysign(grid[at], value)


def pow2_ceil(value: float) -> float:
    mantissa, exponent = math.frexp(value)
    return 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)


def group_scale(group: list[float], fmt: str) -> float:
    largest = max(abs(v) for v in group)
    f32 = np.float32
    if fmt == "act8":
        return pow2_ceil(float(f32(max(largest, float(f32(1e-4)))) / f32(448.0)))
    if fmt == "act4_e8":
        return pow2_ceil(float(f32(max(largest, 6 * 2.0**-126)) / f32(6.0)))
    ratio = float(f32(max(largest, 6 * 2.0**-9)) / f32(6.0))
    return nearest(min(ratio, 448.0), E4M3)


def quantized(group: list[float], fmt: str) -> list[float]:
    scale = group_scale(group, fmt)
    grid = E4M3 if fmt == "act8" else E2M1
    return [nearest(v / scale, grid) * scale for v in group]


def round_trip(x: Tensor, fmt: str) -> Tensor:
    size = 16 if fmt == "act4_e4" else 32
    groups = x.double().reshape(-1, size).tolist()
    values = torch.tensor([quantized(g, fmt) for g in groups], dtype=torch.float64)
    return values.reshape(x.shape)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return weight.double() * x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)


def cos_sin(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    angle = (positions.numpy().astype(np.float32)[:, None] * inv_freq.numpy()).astype(np.float64)
    return torch.from_numpy(np.cos(angle)), torch.from_numpy(np.sin(angle))


def rotate_tail(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    dims = 2 * cos.shape[1]
    turn = torch.complex(cos.double(), -sin.double() if inverse else sin.double())
    pairs = torch.view_as_complex(x[..., -dims:].double().unflatten(-1, (-1, 2)).contiguous())
    turned = pairs * turn.view(len(x), *(1,) * (x.ndim - 2), -1)
    return torch.cat([x[..., :-dims].double(), torch.view_as_real(turned).flatten(-2)], -1)


def fp8_matrix(weight: Any) -> Tensor:
    codes = E4M3_BYTES[weight.codes.view(torch.uint8).long()]
    rows, columns = torch.arange(codes.shape[0]) // 32, torch.arange(codes.shape[1]) // 32
    return codes * 2.0 ** (weight.scale.double()[rows][:, columns] - 127)


def fp4_matrix(weight: Any, expert: int) -> Tensor:
    codes = weight.codes[expert].long()
    table = torch.tensor(E2M1 + [-v for v in E2M1], dtype=torch.float64)
    values = torch.stack([table[codes & 15], table[codes >> 4]], -1).flatten(1)
    columns = torch.arange(values.shape[1]) // 32
    return values * 2.0 ** (weight.scale[expert].double()[:, columns] - 127)


def latent_entry(
    both: Tensor, q_norm: Tensor, kv_norm: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    rank = q_norm.shape[0]
    entry = rms_norm(both[:, rank:], kv_norm, eps).to(both.dtype)
    return rms_norm(both[:, :rank], q_norm, eps), rotate_tail(entry, cos, sin, False)


def latent_store(
    both: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    quantize: bool,
    cache: Any,
    idx: Tensor,
) -> Tensor:
    return latent_entry(both, q_norm, kv_norm, cos, sin, eps)[0]


def fp8_linear(x: Tensor, weight: Any, quantize: bool) -> Tensor:
    return (round_trip(x, "act8") if quantize else x.double()) @ fp8_matrix(weight).T


def dense_linear(x: Tensor, weight: Any, out: torch.dtype) -> Tensor:
    return x.double() @ weight.stored.double().T


def grouped_linear(x: Tensor, weight: Any, quantize: bool, rounds: bool = False) -> Tensor:
    x = round_trip(x, "act8") if quantize else x.double()
    blocks = fp8_matrix(weight).view(x.shape[1], -1, x.shape[2])
    out = torch.einsum("tgk,gnk->tgn", x, blocks).flatten(1)
    return round_trip(out, "act8") if rounds else out


def expert_linear(x: Tensor, weight: Any, offsets: list[int], quantize: bool) -> Tensor:
    x = round_trip(x, "act8") if quantize else x.double()
    parts = [
        x[begin:end] @ fp4_matrix(weight, expert).T
        for expert, (begin, end) in enumerate(itertools.pairwise(offsets))
    ]
    return torch.cat(parts)


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x.double()))


def swiglu(gate: Tensor, up: Tensor, limit: float, weight: Tensor | None) -> Tensor:
    g, u = gate.double(), up.double()
    if limit:
        g, u = torch.minimum(g, torch.tensor(limit)), u.clamp(-limit, limit)
    hidden = g * sigmoid(g) * u
    return hidden if weight is None else hidden * weight.double()[:, None]


def routed_experts(
    x: Tensor,
    rows: Tensor,
    weights: Tensor,
    offsets: Tensor,
    w1_w3: Any,
    w2: Any,
    limit: float,
    quantize: bool,
) -> Tensor:
    bounds = offsets.tolist()
    both = expert_linear(x[rows], w1_w3, bounds, False).to(x.dtype)
    inner = both.shape[1] // 2
    hidden = swiglu(both[:, :inner], both[:, inner:], limit, weights).to(x.dtype)
    return expert_linear(hidden, w2, bounds, quantize)


def route(x: Tensor, gate: Any, bias: Tensor, k: int, scaling: float) -> tuple[Tensor, Tensor]:
    logits = x.double() @ gate.stored.double().T
    scores = torch.sqrt(torch.nn.functional.softplus(logits))
    chosen, weights = [], []
    for row in scores.tolist():
        # Equal experts have equal bits in fp32 and in fp64; others are far apart in the cases.
        best = sorted(range(len(row)), key=lambda e: (-(row[e] + float(bias[e])), e))[:k]
        total = sum(row[e] for e in best) + 1e-20
        chosen.append(best)
        weights.append([row[e] / total * scaling for e in best])
    return torch.tensor(chosen), torch.tensor(weights, dtype=torch.float64)


def route_rounded(
    x: Tensor, gate: Any, bias: Tensor, k: int, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    return *route(x, gate, bias, k, scaling), round_trip(x, "act8")


def sinkhorn(raw: Tensor, iters: int, eps: float) -> Tensor:
    comb = torch.softmax(raw.double(), -1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def hyper_mix(
    h: Tensor, fn: Any, scale: Tensor, base: Tensor, norm_eps: float, hc_eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    n = h.shape[1]
    flat = h.double().flatten(1)
    mixes = (
        flat @ fn.stored.double().T / torch.sqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    )
    gain, shift = scale.double(), base.double()
    pre = sigmoid(mixes[:, :n] * gain[0] + shift[:n]) + hc_eps
    post = 2 * sigmoid(mixes[:, n : 2 * n] * gain[1] + shift[n : 2 * n])
    raw = (mixes[:, 2 * n :] * gain[2] + shift[2 * n :]).view(-1, n, n)
    return pre, post, sinkhorn(raw, iters, hc_eps)


def hyper_collapse(h: Tensor, pre: Tensor) -> Tensor:
    return torch.einsum("tm,tmc->tc", pre.double(), h.double())


def hyper_expand(h: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    mixed = torch.einsum("tij,tic->tjc", comb.double(), h.double())
    return post.double()[:, :, None] * y.double()[:, None] + mixed


def hyper_site(
    h: Tensor,
    y: Tensor,
    post: Tensor,
    comb: Tensor,
    pre: Tensor,
    weights: Any,
    norm_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, ...]:
    streams = hyper_expand(h, y, post, comb).to(h.dtype)
    collapsed = hyper_collapse(streams, pre).to(h.dtype)
    mix = hyper_mix(streams, weights.fn, weights.scale, weights.base, norm_eps, hc_eps, iters)
    return streams.double(), rms_norm(collapsed, weights.norm, norm_eps), *mix


def hyper_site_rounded(*given: Any) -> tuple[Tensor, ...]:
    site = hyper_site(*given)
    return *site, round_trip(site[1].to(given[0].dtype), "act8")


def compress(kv: Tensor, gate: Tensor, ratio: int) -> Tensor:
    weights = torch.softmax(gate.double().unflatten(0, (-1, ratio)), 1)
    return (weights * kv.double().unflatten(0, (-1, ratio))).sum(1)


def index_score(q: Tensor, weight: Tensor, keys: Tensor, rounding: str) -> Tensor:
    keys = keys.double().expand(len(q), -1, -1)
    dots = torch.einsum("thd,tsd->ths", q.double(), keys).clamp(min=0)
    scores = torch.einsum("ths,th->ts", dots, weight.double())
    return scores if rounding != "final" else scores.float().bfloat16().double()


def paged_index_score(
    q: Tensor,
    weight: Tensor,
    cache: Any,
    table: Tensor,
    rows: Tensor,
    visible: Tensor,
    blocks: Tensor | None,
    size: int,
    num_entries: int,
    rounding: str,
) -> Tensor:
    columns = num_entries if blocks is None else blocks.shape[1] * size
    out = torch.full((len(q), columns), -math.inf, dtype=torch.float64)
    per_block = cache.codes.shape[1]
    for t in range(len(q)):
        for column in range(columns):
            entry = column
            if blocks is not None:
                block = int(blocks[t, column // size])
                entry = -1 if block < 0 else block * size + column % size
            if not 0 <= entry < int(visible[t]):
                continue
            page = int(table[rows[t], entry // per_block])
            key = cache_load(cache, torch.tensor([page * per_block + entry % per_block]))
            out[t, column] = index_score(q[t : t + 1], weight[t : t + 1], key, rounding)[0, 0]
    return out


def pick(scores: list[float], count: int) -> list[int]:
    """The best entries that are not -inf, ascending, -1 padded; ties to the smaller index."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    best = sorted(i for i in order[:count] if scores[i] > -math.inf)
    return best + [-1] * (count - len(best))


def select_topk(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    return torch.tensor(
        [pick(s[:v], count) for s, v in zip(scores.tolist(), visible.tolist(), strict=True)]
    )


def select_blocks(scores: Tensor, visible: Tensor, count: int, size: int) -> Tensor:
    rows = []
    for row, seen in zip(scores.tolist(), visible.tolist(), strict=True):
        best = [max(row[b : min(b + size, seen)]) for b in range(0, seen, size)]
        rows.append(pick([*best[:-1], math.inf] if best else [], count))
    return torch.tensor(rows)


def block_mask(blocks: Tensor, num_entries: int, size: int) -> Tensor:
    return torch.tensor([[e // size in row for e in range(num_entries)] for row in blocks.tolist()])


def sparse_attention(
    q: Tensor,
    window_kv: Tensor,
    window_idx: Tensor,
    main_kv: Tensor | None,
    main_idx: Tensor | None,
    sink: Tensor,
    scale: float,
    round_weights: bool,
) -> Tensor:
    out = torch.zeros(q.shape, dtype=torch.float64)
    for t in range(len(q)):
        held = []
        for kv, idx in ((window_kv, window_idx), (main_kv, main_idx)):
            if kv is None or idx is None:
                continue
            for slot, entry in enumerate(idx[t].tolist()):
                if entry >= 0:
                    held.append(kv[t, slot] if kv.ndim == 3 else kv[entry])
        if not held:
            continue
        keys = torch.stack(held).double()
        scores = q[t].double() @ keys.T * scale
        joined = torch.softmax(torch.cat([scores, sink.double()[:, None]], 1), 1)
        out[t] = joined[:, :-1] @ keys
    return out


def cache_load(cache: Any, idx: Tensor) -> Tensor:
    out = torch.zeros(len(idx), cache.dim, dtype=torch.float64)
    table = torch.tensor(E2M1 + [-v for v in E2M1], dtype=torch.float64)
    for row, flat in enumerate(idx.tolist()):
        if flat < 0:
            continue
        block, entry = divmod(flat, cache.codes.shape[1])
        codes = cache.codes[block, entry]
        if cache.format == "fp32":
            out[row] = codes.double()
            continue
        scales = cache.scales[block, entry].long()
        if cache.format == "window_fp8":
            values = E4M3_BYTES[codes.long()]
        else:
            low, high = codes.long() & 15, codes.long() >> 4
            values = torch.stack([table[low], table[high]], 1).flatten()
        factor = E4M3_BYTES[scales] if cache.format == "main_fp4" else 2.0 ** (scales - 127.0)
        group = cache.dim // len(scales)
        out[row] = values * factor.double().repeat_interleave(group)
    return out


def paged_attention(
    q: Tensor,
    window: Any,
    window_idx: Tensor,
    main: Any,
    main_idx: Tensor | None,
    sink: Tensor,
    scale: float,
    round_weights: bool,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    quantize: None = None,
) -> Tensor:
    assert quantize is None  # no case of it rounds behind: `round_trip` has its own twin
    if cos is not None and sin is not None:
        turned = rotate_tail(q, cos, sin, False).to(q.dtype)  # as it is handed on
        out = paged_attention(
            turned, window, window_idx, main, main_idx, sink, scale, round_weights
        )
        return rotate_tail(out, cos, sin, True)
    loaded = [
        None if idx is None else cache_load(cache, idx.flatten()).view(*idx.shape, cache.dim)
        for cache, idx in ((window, window_idx), (main, main_idx))
    ]
    return sparse_attention(
        q, loaded[0], window_idx, loaded[1], main_idx, sink, scale, round_weights
    )


def engram_hash(ngrams: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    rows = []
    for ids in ngrams.tolist():
        acc, row = ids[0] * int(multipliers[0]), []
        for order, heads in enumerate(primes.tolist(), start=1):
            acc ^= ids[order] * int(multipliers[order])
            row += [acc % prime for prime in heads]
        rows.append([r + int(o) for r, o in zip(row, offsets, strict=True)])
    return torch.tensor(rows)


def engram_lookup(codes: Tensor, scale: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    values = E4M3_BYTES[codes.view(torch.uint8).long()]
    columns = torch.arange(values.shape[1]) // 32
    table = values * 2.0 ** (scale.double()[:, columns] - 127)
    return table[rows].flatten(1)


def engram_gate(x: Tensor, kv: Tensor, qk_weight: Tensor, eps: float) -> Tensor:
    x, parts = x.double(), kv.double().unflatten(1, (-1, x.shape[2]))
    key, value = parts[:, :-1], parts[:, -1:]
    norm = torch.sqrt((x.square().mean(-1) + eps) * (key.square().mean(-1) + eps))
    dot = (x * qk_weight.double() * key).sum(-1) / norm / math.sqrt(x.shape[2])
    gate = sigmoid(torch.copysign(torch.sqrt(dot.abs().clamp(min=1e-6)), dot))
    return x + gate[..., None] * value


TWINS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        rms_norm, cos_sin, rotate_tail, latent_entry, latent_store, round_trip, fp8_linear,
        dense_linear, grouped_linear, expert_linear, swiglu, routed_experts, route, route_rounded,
        hyper_mix, hyper_collapse, hyper_expand, hyper_site, hyper_site_rounded, compress,
        index_score, paged_index_score, select_topk, select_blocks, block_mask, sparse_attention,
        paged_attention, cache_load, engram_hash, engram_lookup, engram_gate,
    )
}  # fmt: skip
