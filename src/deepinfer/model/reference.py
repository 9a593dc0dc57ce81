"""The whole text model in one file, in the paper's order: it defines what faster paths compute.

Whole sequences, no caches, fp32 arithmetic with explicit rounding. Two arithmetics: `official`
rounds where the published code rounds (bf16 between operations, FP8 and FP4 where the released
model quantizes); `noq` computes the same graph with the stored weights dequantized exactly and
rounds nothing. Imports the config only, so that it shares no bug with what it judges; files,
caches, batches and devices are the business of others.

The bits of a row depend neither on the number of rows nor on later rows: matrix products run in
blocks of 16 rows, attention in blocks of 64 slots, short sums in a written order, and no
`sigmoid`, `silu` or `softplus` of the library is used.

Letters: T tokens, S slots, H heads, D head size, C hidden, M hyper streams, K selected,
N compressed entries, L Engram layers, V vocabulary. Numbers in brackets name sections:
A = backbone specification, B = weights specification.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from deepinfer.config import LayerConfig, ModelConfig, YarnConfig
from deepinfer.config.engram import engram_tables
from deepinfer.errors import TokenizerError

__all__ = [
    "IndexRounding", "LayerState", "Numerics", "OutputProjection", "ReferenceModel", "WindowSlots",
    "dequantize", "engram_rows", "fp4_e4m3_codes", "fp4_ue8m0_codes", "fp8_codes", "matmul",
    "mix_coefficients", "rms_norm", "rope_frequencies", "sinkhorn", "sparse_attention", "top_k",
]  # fmt: skip

Numerics = Literal["official", "noq"]
OutputProjection = Literal["bf16", "fp8"]
IndexRounding = Literal["reference", "final"]
WindowSlots = Literal["recorded", "full"]

ROW_BLOCK: Final = 16  # rows of one matrix product
SLOT_BLOCK: Final = 64  # slots between two updates of the running softmax
_ROW_TILE: Final = 64  # rows whose keys are gathered together; changes no bit
_ROUTER_EPS: Final = 1e-20  # of the routing weights' sum; equals rms_norm_eps by accident
_FP4_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


# --- products, norms and short sums -----------------------------------------------------------


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [..., K] by weight [N, K] transposed, in zero-padded blocks of exactly 16 rows.

    Returns [..., N] fp32. A row's bits do not depend on the other rows.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = rows.new_empty(rows.shape[0], weight.shape[0])
    for start in range(0, rows.shape[0], ROW_BLOCK):
        block = rows[start : start + ROW_BLOCK]
        padded = F.pad(block, (0, 0, 0, ROW_BLOCK - block.shape[0]))
        out[start : start + ROW_BLOCK] = (padded @ weight.T)[: block.shape[0]]
    return out.reshape(*x.shape[:-1], weight.shape[0])


def _bmm(x: Tensor, y: Tensor) -> Tensor:
    """Multiply row by row; a lone row as one of two, or several threads would change its bits."""
    if x.shape[0] == 1:
        return torch.bmm(x.expand(2, -1, -1), y.expand(2, -1, -1))[:1]
    return torch.bmm(x, y)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide x by its root mean square over the last dimension, times weight; unrounded [A 9]."""
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def _sum_in_order(x: Tensor, dim: int) -> Tensor:
    """Sum over a short dimension from left to right, whatever the shape around it."""
    parts = x.unbind(dim)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _sigmoid(x: Tensor) -> Tensor:
    return 1.0 / (1.0 + torch.exp(-x))


def _silu(x: Tensor) -> Tensor:
    return x / (1.0 + torch.exp(-x))


def _softplus(x: Tensor) -> Tensor:
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(x)))


# --- stored weights and activation quantizers -------------------------------------------------


def dequantize(weight: Tensor, scale: Tensor | None) -> Tensor:
    """Return a stored matrix as fp32, exactly [B 2.8, 3.1].

    weight  bf16 or fp32 without scale; float8_e4m3fn [N, K]; int8 or uint8 [N, K/2] with two e2m1
            values a byte, the even element in the low nibble
    scale   ue8m0 bytes: one per 32x32 tile for e4m3, one per row and 32 inputs for e2m1
    """
    if scale is None:
        return weight.float()
    factor = _ue8m0(scale).repeat_interleave(32, dim=1)
    if weight.dtype in (torch.int8, torch.uint8):
        byte = weight.view(torch.uint8).int()
        codes = torch.stack([byte & 15, byte >> 4], dim=-1).flatten(-2)
        values = torch.tensor(_FP4_VALUES)
        values = torch.cat([values, -values])[codes]
    else:
        values = weight.float()
        factor = factor.repeat_interleave(32, dim=0)
    return values * factor[: values.shape[0], : values.shape[1]]


def _ue8m0(scale: Tensor) -> Tensor:
    """Decode power-of-two scales, stored as bytes or as float8_e8m0fnu."""
    return scale.view(torch.uint8).view(torch.float8_e8m0fnu).float()


def _pow2_ceil(x: Tensor) -> Tensor:
    """Return the smallest power of two at or above each positive value, by its bits [B 3.2]."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x007FFFFF) & 0x7F800000).view(torch.float32)


def _groups(x: Tensor, size: int, floor: float) -> tuple[Tensor, Tensor]:
    """Cut the last dimension into groups; return them and their floored largest magnitudes."""
    grouped = torch.unflatten(x, -1, (-1, size))
    return grouped, grouped.abs().amax(-1, keepdim=True).clamp(min=floor)


def fp8_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to e4m3 in groups of 32 with power-of-two scales: ACT8 [A 6.2, B 3.3].

    Returns values on the e4m3 grid [..., K/32, 32] and scales [..., K/32, 1], both fp32.
    """
    grouped, amax = _groups(x, 32, 1e-4)
    scale = _pow2_ceil(amax / 448.0)
    return (grouped / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float(), scale


def fp4_e4m3_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to e2m1 in groups of 16 with e4m3 scales: the main compressed KV [A 6.3].

    Shapes as `fp8_codes`. A true division: the reciprocal of such a scale would break ties.
    """
    grouped, amax = _groups(x, 16, 6.0 * 2.0**-9)
    scale = (amax / 6.0).clamp(max=448.0).to(torch.float8_e4m3fn).float()
    return _round_e2m1(grouped / scale), scale


def fp4_ue8m0_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to e2m1 in groups of 32 with power-of-two scales: index queries and keys [A 6.3]."""
    grouped, amax = _groups(x, 32, 6.0 * 2.0**-126)
    scale = _pow2_ceil(amax / 6.0)
    return _round_e2m1(grouped / scale), scale


def _round_e2m1(x: Tensor) -> Tensor:
    """Round to the nearest e2m1 value, ties to the even code, saturating, keeping -0 [A 6.1]."""
    size = x.abs().clamp(max=6.0)
    step = torch.where(size < 2.0, 0.5, torch.where(size < 4.0, 1.0, 2.0))
    return torch.copysign(torch.round(size / step) * step, x)


# --- rotary positions -------------------------------------------------------------------------


def rope_frequencies(dims: int, theta: float, yarn: YarnConfig | None) -> Tensor:
    """Return the angular frequency of each pair, [dims/2]; fp32 in exactly this order [A 3.3]."""
    inv = 1.0 / (theta ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims))
    if yarn is None:
        return inv

    def pair_of(rotations: float) -> float:
        length = yarn.original_max_position_embeddings / (rotations * 2.0 * math.pi)
        return dims * math.log(length) / (2.0 * math.log(theta))

    low = max(math.floor(pair_of(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_of(yarn.beta_slow)), dims - 1)
    pairs = torch.arange(dims // 2, dtype=torch.float32)
    ramp = ((pairs - low) / max(high - low, 1e-3)).clamp(0.0, 1.0)
    return inv / yarn.factor * ramp + inv * (1.0 - ramp)


# --- hyper-connections ------------------------------------------------------------------------


def sinkhorn(raw: Tensor, iters: int, eps: float) -> Tensor:
    """Make mixing logits [..., M, M] doubly stochastic: row = input, column = output [A 2.2]."""
    exps = torch.exp(raw - raw.amax(-1, keepdim=True))
    comb = exps / _sum_in_order(exps, -1).unsqueeze(-1) + eps
    comb = comb / (_sum_in_order(comb, -2).unsqueeze(-2) + eps)
    for _ in range(iters - 1):
        comb = comb / (_sum_in_order(comb, -1).unsqueeze(-1) + eps)
        comb = comb / (_sum_in_order(comb, -2).unsqueeze(-2) + eps)
    return comb


def mix_coefficients(
    mixes: Tensor, scale: Tensor, base: Tensor, config: ModelConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn projections [T, (2+M)M] into pre [T, M], post [T, M] and comb [T, M, M] [A 2.1]."""
    n, eps = config.hc_mult, config.hc_eps
    gains = scale.repeat_interleave(torch.tensor([n, n, n * n]))
    pre, post, raw = (mixes * gains + base).split_with_sizes([n, n, n * n], dim=-1)
    comb = sinkhorn(torch.unflatten(raw, -1, (n, n)), config.hc_sinkhorn_iters, eps)
    return _sigmoid(pre) + eps, 2.0 * _sigmoid(post), comb


# --- attention over chosen slots --------------------------------------------------------------


def sparse_attention(
    q: Tensor, entries: Tensor, slots: Tensor, sink: Tensor, scale: float, round_weights: bool
) -> Tensor:
    """Attend each row to its own list of entries, keys and values at once, with a sink [A 3.5].

    q        [T, H, D]  fp32
    entries  [E, D]     fp32
    slots    [T, S]     int64 indices into entries, -1 = absent; absent slots keep their place
    sink     [H]        fp32 logits that only enter the denominator, unscaled
    returns  [T, H, D]  fp32; 0 for a row without entries

    Walks the slots in blocks of 64 with a running maximum. With `round_weights` the weighted sum
    takes exp(score - maximum so far) rounded to bf16; the denominator takes it unrounded.
    """
    slots = F.pad(slots, (0, -slots.shape[1] % SLOT_BLOCK), value=-1)
    out = torch.empty_like(q)
    for row in range(0, q.shape[0], _ROW_TILE):
        rows = slice(row, row + _ROW_TILE)
        queries = q[rows]
        peak = queries.new_full((*queries.shape[:2], 1), -1e30)
        total = torch.zeros_like(peak)
        acc = torch.zeros_like(queries)
        for block in torch.split(slots[rows], SLOT_BLOCK, dim=1):
            keys = entries[block.clamp(min=0)]
            scores = _bmm(queries, keys.transpose(1, 2)) * scale
            scores = scores.masked_fill((block < 0).unsqueeze(1), -math.inf)
            new_peak = torch.maximum(peak, scores.amax(-1, keepdim=True))
            weights = torch.exp(scores - new_peak)
            decay = torch.exp(peak - new_peak)
            total = total * decay + weights.sum(-1, keepdim=True)
            rounded = weights.bfloat16().float() if round_weights else weights
            acc = acc * decay + _bmm(rounded, keys)
            peak = new_peak
        out[rows] = acc / (total + torch.exp(sink[:, None] - peak))
    return out


def _window_slots(positions: Tensor, window: int, widths: Tensor) -> Tensor:
    """List each row's window: slot i holds position max(0, p-W+1)+i, -1 where absent."""
    slot = torch.arange(int(widths.max()))
    held = (positions - window + 1).clamp(min=0)[:, None] + slot
    return held.masked_fill((held > positions[:, None]) | (slot >= widths[:, None]), -1)


def _join_slots(first: Tensor, second: Tensor, widths: Tensor) -> Tensor:
    """Put each row's second list behind the first `widths[row]` slots of its first list."""
    out = first.new_full((first.shape[0], first.shape[1] + second.shape[1]), -1)
    out[:, : first.shape[1]] = first
    return out.scatter(1, widths[:, None] + torch.arange(second.shape[1]), second)


# --- selection --------------------------------------------------------------------------------


def top_k(scores: Tensor, count: int) -> Tensor:
    """Pick the best entries of each row: ascending indices [T, count], -1 padded [A 5.3].

    Ties go to the smaller index; entries with score -inf are never picked.
    """
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    absent = scores.shape[1]
    order = order.masked_fill(scores.gather(1, order) == -math.inf, absent).sort(dim=-1).values
    order = order.masked_fill(order == absent, -1)
    return F.pad(order, (0, count - order.shape[1]), value=-1)


def _boundary(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return each row's last selected score and its gap to the first rejected, inf if none is."""
    width = max(count + 1 - scores.shape[1], 0)
    best = F.pad(scores, (0, width), value=-math.inf).sort(dim=-1, descending=True).values
    present = (best[:, :count] > -math.inf).sum(-1)
    last = best.gather(1, (present - 1).clamp(min=0)[:, None])[:, 0]
    rejected = best[:, count] > -math.inf
    return last, torch.where(rejected, last - best[:, count], math.inf)


# --- Engram's hash ----------------------------------------------------------------------------


def engram_rows(config: ModelConfig, token_ids: Tensor, token_map: Tensor) -> Tensor:
    """Return the table rows that each token looks up, [T, L, columns] int64 [B 5.2 to 5.4].

    Columns are order-major, head-minor. Before the sequence stands the compressed padding id.
    """
    tables = engram_tables(config)
    layers, orders, heads = tables.primes.shape
    primes, multipliers = torch.from_numpy(tables.primes), torch.from_numpy(tables.multipliers)
    ids = token_map[token_ids]
    pad = int(token_map[config.engram_pad_token_id])
    history = F.pad(ids, (orders, 0), value=pad).unfold(0, orders + 1, 1).flip(-1)  # newest first
    rows = torch.empty(ids.shape[0], layers, orders, heads, dtype=torch.int64)
    for layer in range(layers):
        acc = history[:, 0] * multipliers[layer, 0]
        for order in range(orders):
            acc = acc ^ (history[:, order + 1] * multipliers[layer, order + 1])
            rows[:, layer, order] = acc[:, None] % primes[layer, order]
    return rows.flatten(2) + torch.from_numpy(tables.offsets)


# --- the model --------------------------------------------------------------------------------


@dataclass(slots=True)
class LayerState:
    """What the layers of one forward pass share.

    positions     [T] int64, 0..T-1
    window_slots  [T] slots that each row's softmax gives to its window; changes roundings only
    selections    layer -> choices that replace the first rows of its own
    replay_start  in the decoder half, windows hold no position below this one
    latents       layer -> compressed entries [N, D]
    keys          layer -> index keys [N, index D]
    selected      layer -> chosen entries [T, K]
    candidates    blocks kept by the candidate source [T, blocks] bool
    trace         name -> one value per layer that produces it
    """

    positions: Tensor
    window_slots: Tensor
    index_rounding: IndexRounding = "reference"
    selections: Mapping[int, Tensor] = field(default_factory=dict)
    replay_start: int = 0
    latents: dict[int, Tensor] = field(default_factory=dict)
    keys: dict[int, Tensor] = field(default_factory=dict)
    selected: dict[int, Tensor] = field(default_factory=dict)
    candidates: Tensor | None = None
    trace: dict[str, list[Tensor]] = field(default_factory=dict)

    def note(self, name: str, value: Tensor) -> None:
        """Add one layer's value to the trace."""
        self.trace.setdefault(name, []).append(value)


class ReferenceModel:
    """The text model with its Engram layers and draft blocks, on whole sequences.

    weights            stored tensors by official name, as the checkpoint holds them (scales as
                       uint8 or float8_e8m0fnu); dequantized when first used
    token_map          [vocab] compressed id of every token; needed by Engram layers only
    numerics           "official" or "noq"
    output_projection  of `wo_a` under "official": "bf16" = unquantized activations, as the
                       published code; "fp8" = the serving form
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        token_map: NDArray[np.integer] | Tensor | None = None,
        numerics: Numerics = "official",
        output_projection: OutputProjection = "bf16",
    ) -> None:
        self.config = config
        self.numerics = numerics
        self.output_projection = output_projection
        self._stored = weights
        self._dense: dict[str, Tensor] = {}
        self._token_map: Tensor | None = None
        if token_map is not None:
            self._token_map = torch.as_tensor(token_map).to(torch.int64)
        dims, stretch = config.qk_rope_head_dim, config.rope_scaling
        self._window_rope = rope_frequencies(dims, config.rope_theta, None)
        self._compressed_rope = rope_frequencies(dims, config.compress_rope_theta, stretch)

    @torch.no_grad()
    def forward(
        self,
        token_ids: Sequence[int] | Tensor,
        trace: MutableMapping[str, Tensor] | None = None,
        window_slots: WindowSlots | Tensor = "recorded",
        index_rounding: IndexRounding = "reference",
        selections: Mapping[int, Tensor] | None = None,
        replay_start: int = 0,
    ) -> Tensor:
        """Return the logits after every token of a sequence, [T, V] fp32 [A 1.3].

        token_ids       [T], T >= 1
        trace           filled with the values of all layers and positions under the names of
                        `deepinfer trace`, bf16 where the model holds bf16; also `idx_kth_score` and
                        `idx_margin` [sources, T], `cand_margin` [T], `route_margin` [layers, T]:
                        the last selected score and its gap to the first rejected
        window_slots    softmax slots of the window: "recorded" = min(T, W), as in one prefill;
                        "full" = always W, as in decoding; or a number per row [T]. Changes only
                        the last bits, and only under "official"
        index_rounding  index scores as the published code rounds them, or rounded once
        selections      index source -> [R, K] entries, -1 padded, taken instead of the own choice
                        for the first R rows: ties are free, so a comparison may fix them
        replay_start    bounded replay: the windows of the decoder half hold no position below it;
                        its rows from there on are what a prefill that keeps T - replay_start tokens
                        computes [A 7.3]
        """
        ids = torch.as_tensor(token_ids, dtype=torch.int64)
        state = self.state(ids.shape[0], window_slots, index_rounding, selections)
        state.replay_start = replay_start
        stream, pre = self.start(ids)
        taps: list[Tensor] = []
        rows = self._hash(ids)
        for layer in self.config.layers:
            if layer.engram_idx is not None:
                stream = self.engram(layer.layer_id, stream, rows[:, layer.engram_idx])
                state.note("engram_out", self._held(stream))
            if layer.layer_id in self.config.dspark_target_layer_ids:
                taps.append(self._tap(stream))
            stream, pre = self.block(layer, stream, pre, state)
        hidden = self._norm(self._collapse(stream, pre), "norm.weight")
        logits = matmul(hidden, self._weight("head.weight"))
        if trace is not None:
            for name, values in state.trace.items():
                trace[name] = values[0] if name.startswith("cand_") else torch.stack(values)
            if taps:
                trace["main_hidden"] = self._held(torch.cat(taps, dim=1))
            if self.config.engram_layer_ids:
                trace["engram_hash"] = rows.int()
            trace["tokens"], trace["logits"] = ids.int(), logits
        return logits

    def decode(
        self,
        prompt_ids: Sequence[int] | Tensor,
        decode_ids: Sequence[int] | Tensor,
        trace: MutableMapping[str, Tensor] | None = None,
        index_rounding: IndexRounding = "reference",
        selections: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        """Return the logits after each of M tokens fed to one-token decoding, [M, V] fp32.

        One pass over prompt and fed tokens: no row depends on later ones, and each lays its window
        out as the prefill or the decode step that would have computed it. The trace has all rows.
        """
        prompt = torch.as_tensor(prompt_ids, dtype=torch.int64)
        fed = torch.as_tensor(decode_ids, dtype=torch.int64)
        window = self.config.sliding_window
        slots = torch.full((prompt.shape[0] + fed.shape[0],), window)
        slots[: prompt.shape[0]] = min(prompt.shape[0], window)
        ids = torch.cat([prompt, fed])
        return self.forward(ids, trace, slots, index_rounding, selections)[prompt.shape[0] :]

    def greedy(
        self,
        prompt_ids: Sequence[int],
        num_tokens: int,
        index_rounding: IndexRounding = "reference",
    ) -> list[int]:
        """Return the greedy continuation of a prompt; ties go to the smaller id."""
        logits = self.forward(prompt_ids, index_rounding=index_rounding)
        found = [int(logits[-1].argmax())]
        while len(found) < num_tokens:
            logits = self.decode(prompt_ids, found, index_rounding=index_rounding)
            found.append(int(logits[-1].argmax()))
        return found[:num_tokens]

    def state(
        self,
        num_tokens: int,
        window_slots: WindowSlots | Tensor = "recorded",
        index_rounding: IndexRounding = "reference",
        selections: Mapping[int, Tensor] | None = None,
    ) -> LayerState:
        """Return the empty state of one pass over `num_tokens` rows; arguments as in `forward`."""
        if not isinstance(window_slots, Tensor):
            window = self.config.sliding_window
            width = min(num_tokens, window) if window_slots == "recorded" else window
            window_slots = torch.full((num_tokens,), width)
        rows = torch.arange(num_tokens)
        return LayerState(rows, window_slots, index_rounding, selections or {})

    @torch.no_grad()
    def start(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the embedding copied to all streams [T, M, C], and the first mix (1, 0, ..)."""
        embedded = self._stored["embed.weight"][token_ids].float()
        stream = embedded.unsqueeze(1).expand(-1, self.config.hc_mult, -1)
        pre = F.one_hot(torch.zeros_like(token_ids), self.config.hc_mult).float()
        return stream, pre

    # One block

    @torch.no_grad()
    def block(
        self, layer: LayerConfig, stream: Tensor, pre: Tensor, state: LayerState
    ) -> tuple[Tensor, Tensor]:
        """Run one backbone block; returns the streams and the mix for what follows [A 2.3].

        stream [T, M, C] and pre [T, M] are fp32. The layers whose entries or selection this one
        reads must have run on the same `state`.
        """
        experts = (self.config.n_routed_experts, self.config.num_experts_per_tok)
        name, attention = f"layers.{layer.layer_id}", lambda x: self._attention(layer, x, state)
        return self._block(name, stream, pre, attention, experts, state)

    def _block(
        self,
        name: str,
        stream: Tensor,
        pre: Tensor,
        attention: Callable[[Tensor], Tensor],
        experts: tuple[int, int],
        state: LayerState,
    ) -> tuple[Tensor, Tensor]:
        """Attention, then experts; each collapses the streams with the mix of the one before."""
        attn_pre, post, comb = self._mixes(f"{name}.hc_attn", stream)
        x = self._norm(self._collapse(stream, pre), f"{name}.attn_norm.weight")
        out = attention(x)
        state.note("attn_out", self._held(out))
        stream = self._expand(stream, out, post, comb)
        ffn_pre, post, comb = self._mixes(f"{name}.hc_ffn", stream)
        x = self._norm(self._collapse(stream, attn_pre), f"{name}.ffn_norm.weight")
        out = self._experts(f"{name}.ffn", x, experts, state)
        state.note("ffn_out", self._held(out))
        stream = self._expand(stream, out, post, comb)
        state.note("stream_out", self._held(stream))
        state.note("pre_mix", ffn_pre)
        return stream, ffn_pre

    # Hyper-connections

    def _mixes(self, name: str, stream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project the flattened streams to a sublayer's coefficients [A 2.1]."""
        flat = stream.flatten(1)
        norm = torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        mixes = matmul(flat, self._weight(f"{name}_fn")) * norm
        scale, base = self._weight(f"{name}_scale"), self._weight(f"{name}_base")
        return mix_coefficients(mixes, scale, base, self.config)

    def _collapse(self, stream: Tensor, pre: Tensor) -> Tensor:
        """Mix the streams into one sublayer input, sum_i pre_i h_i."""
        return self._round(_sum_in_order(pre.unsqueeze(-1) * stream, 1))

    def _expand(self, stream: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """Write a sublayer output into the streams, h_j = post_j y + sum_i comb_ij h_i."""
        mixed = _sum_in_order(comb.unsqueeze(-1) * stream.unsqueeze(2), 1)
        return self._round(post.unsqueeze(-1) * out.unsqueeze(1) + mixed)

    # Attention

    def _attention(self, layer: LayerConfig, x: Tensor, state: LayerState) -> Tensor:
        """Attend to the window and to selected compressed entries of the source [A 3.2]."""
        config = self.config
        name = f"layers.{layer.layer_id}.attn"
        rope = self._compressed_rope if layer.ratio else self._window_rope
        latent, q = self._queries(name, x, rope, state.positions)
        entries = self._window_entries(name, x, rope, state.positions)
        widths = state.window_slots
        slots = _window_slots(state.positions, config.sliding_window, widths)
        if layer.is_decoder:
            slots = slots.masked_fill(slots < state.replay_start, -1)
        if layer.kv_source is not None and layer.index_source is not None:
            if layer.owns_kv:
                self._compress(layer, x, state)
            if layer.owns_index:
                self._select(layer, latent, x, state)
            num_window = entries.shape[0]
            entries = torch.cat([entries, state.latents[layer.kv_source]])
            selected = state.selected[layer.index_source]
            selected = torch.where(selected < 0, selected, selected + num_window)
            slots = _join_slots(slots, selected, widths)
        return self._attend(name, q, entries, slots, rope, state.positions)

    def _queries(
        self, name: str, x: Tensor, rope: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the query latent [T, rank], which the indexer shares, and queries [T, H, D]."""
        latent = self._norm(self._linear8(x, f"{name}.wq_a"), f"{name}.q_norm.weight")
        q = self._linear8(latent, f"{name}.wq_b")
        q = torch.unflatten(q, -1, (self.config.num_attention_heads, self.config.head_dim))
        return latent, self._rotate(q, rope, positions)

    def _window_entries(self, name: str, x: Tensor, rope: Tensor, positions: Tensor) -> Tensor:
        """Return one window entry per row as the FP8 cache returns it, [T, D]."""
        kv = self._norm(self._linear8(x, f"{name}.wkv"), f"{name}.kv_norm.weight")
        return self._round_trip(self._rotate(kv, rope, positions), fp8_codes)

    def _attend(
        self, name: str, q: Tensor, entries: Tensor, slots: Tensor, rope: Tensor, positions: Tensor
    ) -> Tensor:
        """Attend, rotate the outputs back by the query positions, project [A 3.5 to 3.7]."""
        config = self.config
        sink, scale = self._weight(f"{name}.attn_sink"), config.head_dim**-0.5
        out = sparse_attention(q, entries, slots, sink, scale, self.numerics == "official")
        out = self._rotate(self._round(out), rope, positions, inverse=True)
        grouped = torch.unflatten(out.flatten(1), 1, (config.o_groups, -1))
        if self.output_projection == "fp8":
            grouped = self._round_trip(grouped, fp8_codes)
        wo_a = self._weight(f"{name}.wo_a.weight").chunk(config.o_groups)
        parts = [matmul(grouped[:, g], wo_a[g]) for g in range(config.o_groups)]
        return self._linear8(self._round(torch.cat(parts, dim=1)), f"{name}.wo_b")

    def _rotate(
        self, x: Tensor, frequencies: Tensor, positions: Tensor, inverse: bool = False
    ) -> Tensor:
        """Rotate adjacent pairs of the last dimensions; x [T, D] or [T, H, D] [A 3.3]."""
        dims = self.config.qk_rope_head_dim
        angle = positions.float()[:, None] * frequencies
        cos, sin = torch.cos(angle), torch.sin(angle)
        if inverse:
            sin = -sin
        if x.ndim == 3:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        even, odd = x[..., -dims::2], x[..., 1 - dims :: 2]
        turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
        return torch.cat([x[..., :-dims], self._round(turned)], dim=-1)

    # Compressed entries and their index

    def _compress(self, layer: LayerConfig, x: Tensor, state: LayerState) -> None:
        """Pool each run of `ratio` tokens into one entry and its index key [A 4.1, 5.2]."""
        config, ratio = self.config, layer.ratio
        name = f"layers.{layer.layer_id}.attn"
        num_entries = x.shape[0] // ratio
        x = x[: num_entries * ratio]
        values = matmul(x, self._weight(f"{name}.compressor.wkv.weight"))
        if ratio > 1:
            gates = matmul(x, self._weight(f"{name}.compressor.wgate.weight"))
            gates, values = (torch.unflatten(t, 0, (num_entries, ratio)) for t in (gates, values))
            exps = torch.exp(gates - gates.amax(1, keepdim=True))
            weights = exps / _sum_in_order(exps, 1).unsqueeze(1)
            values = _sum_in_order(weights * values, 1)
        latent = self._norm(self._round(values), f"{name}.compressor.norm.weight")
        positions = torch.arange(num_entries) * ratio  # of the first token of each group
        if layer.layer_id in config.index_k_source_layer_ids:
            key = self._round(matmul(latent, self._weight(f"{name}.indexer.wk.weight")))
            key = self._norm(key, f"{name}.indexer.k_norm.weight")
            key = self._rotate(key, self._compressed_rope, positions)
            state.keys[layer.layer_id] = self._round_trip(key, fp4_ue8m0_codes)
        entry = self._rotate(latent, self._compressed_rope, positions)
        codes = fp4_e4m3_codes if config.use_fp4_sparse_kv else fp8_codes
        state.latents[layer.layer_id] = self._round_trip(entry, codes)

    def _select(self, layer: LayerConfig, latent: Tensor, x: Tensor, state: LayerState) -> None:
        """Score the visible (past the candidate source: candidate) entries, keep the best [A 5]."""
        config = self.config
        source = max(i for i in config.index_k_source_layer_ids if i <= layer.layer_id)
        scores = self._index_scores(layer, latent, x, state.keys[source], state)
        visible = (state.positions + 1) // layer.ratio
        entry = torch.arange(scores.shape[1])
        scores = scores.masked_fill(entry >= visible[:, None], -math.inf)
        if layer.is_candidate_source:
            state.candidates = self._candidate_blocks(scores, visible, state)
        elif layer.filters_candidates:
            assert state.candidates is not None, "the candidate source runs first"
            kept = state.candidates.repeat_interleave(config.candidate_block_size, dim=1)
            scores = scores.masked_fill(~kept[:, : scores.shape[1]], -math.inf)
        selected = top_k(scores, config.index_topk)
        last, margin = _boundary(scores, config.index_topk)
        state.note("idx_topk", selected.int())
        state.note("idx_kth_score", last)
        state.note("idx_margin", margin)
        recorded = state.selections.get(layer.layer_id)
        if recorded is not None:
            selected = torch.cat([recorded.to(torch.int64), selected[recorded.shape[0] :]])
        state.selected[layer.layer_id] = selected

    def _index_scores(
        self, layer: LayerConfig, latent: Tensor, x: Tensor, keys: Tensor, state: LayerState
    ) -> Tensor:
        """Return sum_h w_h relu(q_h . k) for every entry, [T, N] [A 5.2]."""
        config = self.config
        name = f"layers.{layer.layer_id}.attn.indexer"
        heads, dim = config.index_n_heads, config.index_head_dim
        q = torch.unflatten(self._linear8(latent, f"{name}.wq_b"), -1, (heads, dim))
        q = self._rotate(q, self._compressed_rope, state.positions)
        q = self._round_trip(q, fp4_ue8m0_codes)
        weights = self._round(matmul(x, self._weight(f"{name}.weights_proj.weight")))
        weights = self._round(weights * (dim**-0.5 * heads**-0.5))
        inner = self._round if state.index_rounding == "reference" else lambda x: x
        columns = []
        for start in range(0, keys.shape[0], SLOT_BLOCK):
            block = keys[start : start + SLOT_BLOCK]
            block = F.pad(block, (0, 0, 0, SLOT_BLOCK - block.shape[0]))
            dots = _bmm(q, block.T.expand(q.shape[0], -1, -1))  # [T, H, 64]
            dots = inner(dots).clamp(min=0.0)
            columns.append(_sum_in_order(inner(dots * weights.unsqueeze(-1)), 1))
        scores = torch.cat(columns, dim=1) if columns else x.new_empty(x.shape[0], 0)
        return self._round(scores[:, : keys.shape[0]])

    def _candidate_blocks(self, scores: Tensor, visible: Tensor, state: LayerState) -> Tensor:
        """Keep the blocks of the best entries and the newest block, [T, blocks] bool [A 5.4]."""
        config = self.config
        size = config.candidate_block_size
        padded = F.pad(scores, (0, -scores.shape[1] % size), value=-math.inf)
        best = torch.unflatten(padded, 1, (-1, size)).amax(-1)
        newest = (visible - 1) // size
        block = torch.arange(best.shape[1])
        best = best.masked_fill(block == newest[:, None], math.inf)
        chosen = top_k(best, config.candidate_topk_blocks)
        kept = (chosen.unsqueeze(-1) == block).any(1)
        state.note("cand_blocks", kept.to(torch.uint8))
        state.note("cand_margin", _boundary(best, config.candidate_topk_blocks)[1])
        return kept

    # Experts

    def _experts(self, name: str, x: Tensor, experts: tuple[int, int], state: LayerState) -> Tensor:
        """Add the chosen experts in ascending order, then the shared one, in fp32 [B 4]."""
        num_experts, num_active = experts
        logits = matmul(x, self._weight(f"{name}.gate.weight"))
        scores = torch.sqrt(_softplus(logits))
        biased = scores + self._weight(f"{name}.gate.bias")  # steers the choice, not the weights
        chosen = biased.sort(dim=-1, descending=True, stable=True).indices[:, :num_active]
        weights = scores.gather(1, chosen)
        weights = weights / (_sum_in_order(weights, 1).unsqueeze(1) + _ROUTER_EPS)
        weights = weights * self.config.routed_scaling_factor
        state.note("route_idx", chosen.int())
        state.note("route_weight", weights)
        state.note("route_margin", _boundary(biased, num_active)[1])
        total = torch.zeros_like(x)
        for expert in range(num_experts):
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            if rows.shape[0]:
                weight = weights[rows, place].unsqueeze(1)
                total[rows] += self._expert(f"{name}.experts.{expert}", x[rows], weight)
        total = total + self._expert(f"{name}.shared_experts", x, None)
        return self._round(total)

    def _expert(self, name: str, x: Tensor, weight: Tensor | None) -> Tensor:
        """Clamped SwiGLU; the routing weight multiplies before the down projection [B 4.2]."""
        limit = self.config.swiglu_limit
        gate, up = self._linear8(x, f"{name}.w1"), self._linear8(x, f"{name}.w3")
        if limit > 0:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        hidden = _silu(gate) * up
        if weight is not None:
            hidden = weight * hidden
        return self._linear8(self._round(hidden), f"{name}.w2")

    # Engram

    @torch.no_grad()
    def engram(self, layer_id: int, stream: Tensor, rows: Tensor) -> Tensor:
        """Add the looked-up value to every stream through a gate of its own [B 5.5, 5.6].

        stream [T, M, C] fp32, rows [T, columns] int64 table rows; returns [T, M, C] fp32.
        """
        config = self.config
        name = f"layers.{layer_id}.engram"
        codes = self._stored[f"{name}.embed.weight"].view(torch.uint8)[rows]
        scales = self._stored[f"{name}.embed.scale"].view(torch.uint8)[rows]
        values = torch.unflatten(codes.view(torch.float8_e4m3fn).float(), -1, (-1, 32))
        values = (values * _ue8m0(scales).unsqueeze(-1)).flatten(1)
        kv = torch.unflatten(self._linear8(values, f"{name}.wkv"), -1, (-1, config.hidden_size))
        key, value = kv[:, :-1], kv[:, -1:]
        weight = self._weight(f"{name}.q_weight") * self._weight(f"{name}.k_weight")
        norm_x = torch.rsqrt(stream.square().mean(-1) + config.rms_norm_eps)
        norm_key = torch.rsqrt(key.square().mean(-1) + config.rms_norm_eps)
        dot = (stream * weight * key).sum(-1) * norm_x * norm_key / math.sqrt(config.hidden_size)
        gate = _sigmoid(torch.copysign(torch.sqrt(dot.abs().clamp(min=1e-6)), dot))
        return self._round(stream + gate.unsqueeze(-1) * value)

    def _hash(self, token_ids: Tensor) -> Tensor:
        """Return the Engram rows of a sequence, [T, L, columns]."""
        if not self.config.engram_layer_ids:
            return token_ids.new_empty(token_ids.shape[0], 0, 0)
        if self._token_map is None:
            raise TokenizerError("Engram layers need the token_map of the model's tokenizer")
        return engram_rows(self.config, token_ids, self._token_map)

    # Drafts

    def _tap(self, stream: Tensor) -> Tensor:
        """Return the mean over the streams, one part of the drafter's features [B 6.1]."""
        return self._round(_sum_in_order(stream, 1) / self.config.hc_mult)

    @torch.no_grad()
    def draft(
        self, features: Tensor, position: int, first_token: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draft greedily behind `first_token`, the token chosen for `position` + 1 [B 6.2 to 6.4].

        features  [P, taps * C], `main_hidden` of positions 0..P-1, P > position
        returns   tokens [B+1] int64, the first is `first_token`; confidences [B] fp32, raw, before
                  any sigmoid or temperature; logits [B, V] fp32, with the Markov bias
        """
        config = self.config
        size, window = config.dspark_block_size, config.sliding_window
        first = max(0, position - window + 1)
        held = torch.arange(first, position + 1)
        main_positions = held[(held % window).argsort()]  # in the order of the ring
        main = self._linear8(features[main_positions].float(), "mtp.0.main_proj")
        main = self._norm(main, "mtp.0.main_norm.weight")
        positions = position + 1 + torch.arange(size)
        ids = torch.full((size,), config.dspark_noise_token_id)
        ids[0] = first_token
        stream, pre = self.start(ids)
        slots = torch.arange(main.shape[0] + size).expand(size, -1)  # all rows see the block
        ignored = LayerState(positions, positions)
        experts = (config.dspark_n_routed_experts, config.dspark_num_experts_per_tok)
        for stage in range(config.num_nextn_predict_layers):
            name = f"mtp.{stage}"

            def attention(x: Tensor, name: str = f"{name}.attn") -> Tensor:
                rope = self._window_rope
                q = self._queries(name, x, rope, positions)[1]
                context = self._window_entries(name, main, rope, main_positions)
                entries = torch.cat([context, self._window_entries(name, x, rope, positions)])
                return self._attend(name, q, entries, slots, rope, positions)

            stream, pre = self._block(name, stream, pre, attention, experts, ignored)
        last = f"mtp.{config.num_nextn_predict_layers - 1}"
        return self._propose(last, self._collapse(stream, pre), first_token)

    def _propose(
        self, name: str, hidden: Tensor, first_token: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Choose the drafts in order: base logits plus the bias of the token before [B 6.4]."""
        base = matmul(self._norm(hidden, f"{name}.norm.weight"), self._weight("head.weight"))
        tokens, confidences, logits = [first_token], [], []
        for row in range(hidden.shape[0]):
            markov = self._stored[f"{name}.markov_head.embed.weight"][tokens[-1]].float()[None]
            biased = base[row] + matmul(markov, self._weight(f"{name}.markov_head.head.weight"))[0]
            joint = torch.cat([hidden[row : row + 1], markov], dim=1)
            proj = self._weight(f"{name}.confidence_head.proj.weight")
            confidences.append(matmul(joint, proj)[0, 0])
            logits.append(biased)
            tokens.append(int(biased.argmax()))
        return torch.tensor(tokens), torch.stack(confidences), torch.stack(logits)

    # Arithmetic

    def _round(self, x: Tensor) -> Tensor:
        """Round to bf16 under "official"."""
        return x.bfloat16().float() if self.numerics == "official" else x

    def _held(self, x: Tensor) -> Tensor:
        """Return a value in the type that the model holds it in: bf16 under "official"."""
        return x.bfloat16() if self.numerics == "official" else x.clone()

    def _round_trip(self, x: Tensor, codes: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        """Quantize and dequantize under "official"."""
        if self.numerics == "noq":
            return x
        values, scale = codes(x)
        return (values * scale).flatten(-2)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return self._round(rms_norm(x, self._weight(name), self.config.rms_norm_eps))

    def _linear8(self, x: Tensor, name: str) -> Tensor:
        """Multiply by an FP8 or FP4 weight: quantized input, rounded output [B 3.4]."""
        return self._round(matmul(self._round_trip(x, fp8_codes), self._weight(f"{name}.weight")))

    def _weight(self, name: str) -> Tensor:
        """Return a weight in fp32, dequantized exactly and kept."""
        if name not in self._dense:
            scale = self._stored.get(f"{name.removesuffix('.weight')}.scale")
            self._dense[name] = dequantize(self._stored[name], scale).contiguous()
        return self._dense[name]
