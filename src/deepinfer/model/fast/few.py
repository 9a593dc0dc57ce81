"""The blocks of a decode step of few rows on a CPU, each as one run of calls on kept buffers.

Such a step is call overhead: every tensor made, sliced or converted costs more than its numbers.
Here each value has a place, as fp32 and as bf16, and each weight a view in the shape it is used in.
Bits are those of the single ops. Products take the same 16-row blocks, and what lies in the rows
beyond those that count touches no other; sums over a last dimension, exponentials and roots of the
router are torch's; every other call is one correctly rounded operation per number; and each value
is rounded to bf16 where its op returns one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.config import LayerConfig, ModelConfig
from deepinfer.kernels.attention import cpu as attention_cpu
from deepinfer.kernels.attention.reference import SLOT_BLOCK
from deepinfer.kernels.cache_io import PagedCache
from deepinfer.kernels.expert_linear import Fp4Weight
from deepinfer.kernels.hyper.cpu import MAX_STREAMS, Sinkhorn
from deepinfer.kernels.linear import DenseWeight, Fp8Weight
from deepinfer.kernels.quantize.cpu import Act8, round_into
from deepinfer.kernels.router.reference import EPS
from deepinfer.kernels.rows import ROW_BLOCK
from deepinfer.kernels.workspace import FloatArray, Pair, largest, shared, total
from deepinfer.model.fast.compressor import compress_step
from deepinfer.model.fast.indexer import choose, gather_selected, select_all
from deepinfer.model.fast.step import Step
from deepinfer.model.fast.weights import BlockWeights, HyperWeights

__all__ = ["FewBlock", "FewRows", "fits"]

_OPS: Final = (
    "fp8_linear", "grouped_linear", "expert_linear", "route", "hyper_mix", "hyper_collapse",
    "round_trip", "sparse_attention", "cache_store",
)  # fmt: skip
_MAX_WIDTH: Final = 1024  # wider models compute more than they call
_ONE: Final = np.array(1.0, dtype=np.float32)
_TWO: Final = np.array(2.0, dtype=np.float32)
_SOFTPLUS_LIMIT: Final = np.array(20.0, dtype=np.float32)

Turn = tuple[FloatArray, FloatArray, FloatArray]
"""A rotation: cosines [T, 1, R] in pairs, sines [T, 1, R/2], and these negated."""

divide, multiply, add, subtract = np.divide, np.multiply, np.add, np.subtract


@dataclass(frozen=True, slots=True)
class _Hyper:
    """Coefficients of a sublayer: fn [M*C, W]; gain and base [W], negated for pre and post."""

    fn: Tensor
    gain: FloatArray
    base: FloatArray

    @classmethod
    def of(cls, weights: HyperWeights, num_streams: int) -> _Hyper:
        n = num_streams
        gain = weights.scale.numpy().repeat((n, n, n * n))
        base = weights.base.numpy().copy()
        gain[: 2 * n] *= -1
        base[: 2 * n] *= -1
        return cls(_transposed(weights.fn), gain, base)


@dataclass(frozen=True, slots=True)
class FewBlock:
    """A block's weights as products and numpy take them: matrices [K, N], experts one by one.

    w1_w3 and w2 hold the shared expert behind the routed ones.
    """

    hc_attn: _Hyper
    hc_ffn: _Hyper
    attn_norm: FloatArray
    ffn_norm: FloatArray
    wq_a_wkv: Tensor
    q_norm: FloatArray
    kv_norm: FloatArray
    wq_b: Tensor
    wo_a: tuple[Tensor, ...]
    wo_b: Tensor
    gate: Tensor
    bias: FloatArray
    w1_w3: tuple[Tensor, ...]
    w2: tuple[Tensor, ...]
    index_wq_b: Tensor | None
    index_weights: Tensor | None

    @classmethod
    def of(cls, block: BlockWeights, config: ModelConfig) -> FewBlock:
        attention, moe, indexer = block.attention, block.moe, block.indexer
        return cls(
            hc_attn=_Hyper.of(block.hc_attn, config.hc_mult),
            hc_ffn=_Hyper.of(block.hc_ffn, config.hc_mult),
            attn_norm=block.attn_norm.numpy(),
            ffn_norm=block.ffn_norm.numpy(),
            wq_a_wkv=_transposed(attention.wq_a_wkv),
            q_norm=attention.q_norm.numpy(),
            kv_norm=attention.kv_norm.numpy(),
            wq_b=_transposed(attention.wq_b),
            wo_a=_transposed(attention.wo_a).chunk(config.o_groups, dim=1),
            wo_b=_transposed(attention.wo_b),
            gate=_transposed(moe.gate),
            bias=moe.bias.numpy(),
            w1_w3=_experts(moe.w1_w3, moe.shared_w1_w3),
            w2=_experts(moe.w2, moe.shared_w2),
            index_wq_b=None if indexer is None else _transposed(indexer.wq_b),
            index_weights=None if indexer is None else _transposed(indexer.weights_proj),
        )


def _transposed(weight: Fp8Weight | DenseWeight) -> Tensor:
    assert weight.dense is not None
    return weight.dense.T


def _experts(routed: Fp4Weight, shared_expert: Fp8Weight) -> tuple[Tensor, ...]:
    assert routed.dense is not None
    return (*routed.dense.transpose(1, 2).unbind(), _transposed(shared_expert))


def fits(step: Step, blocks: Sequence[BlockWeights]) -> bool:
    """Whether this module knows how to run a step: official arithmetic, decode, up to 16 rows,
    decoded weights and rings at hand, nothing traced, and the CPU's form of every op it replaces.
    """
    config, inputs, numerics = step.config, step.inputs, step.numerics
    if not inputs.decode or inputs.num_rows > ROW_BLOCK or inputs.window_runs is None:
        return False
    moe, windows = blocks[0].moe, step.caches.windows
    return (
        numerics.quantize
        and moe.ranks is None
        and not numerics.fp8_output
        and step.trace is None
        and inputs.replay is None
        and config.hidden_size <= _MAX_WIDTH
        and config.hc_mult <= MAX_STREAMS
        and config.num_experts_per_tok < 8
        and config.num_attention_heads % 4 == 0
        and config.sliding_window % SLOT_BLOCK == 0
        and moe.w2.dense is not None
        and moe.w2.dense.shape[1:] == moe.shared_w2.codes.shape
        and all(windows[i].twice is not None for i in range(len(blocks)))
        and all(step.ops.choices[op].name == "cpu" for op in _OPS)
    )


class _Mix:
    """A sublayer's coefficients: pre, post [T, M], comb [T, M, M]; one column per coefficient."""

    def __init__(self, num_rows: int, n: int, iters: int, eps: float) -> None:
        width = (2 + n) * n
        self.block, self.tensor, self.mixes = shared(num_rows, width)
        _, self.exps_tensor, exps = shared(num_rows, width)
        self.raw = self.mixes[:, 2 * n :].reshape(num_rows, n, n)
        self.peak = np.empty((num_rows, n, 1), dtype=np.float32)
        self.sides, self.pre, self.post = exps[:, : 2 * n], exps[:, :n], exps[:, n : 2 * n]
        self.exps = exps[:, 2 * n :].reshape(num_rows, n, n)
        self.sinkhorn = Sinkhorn(num_rows, n, iters, eps)
        self.comb = self.sinkhorn.result


class _Turned:
    """The rotated dimensions of heads [T, H, D] that lie in a pair, and room to rotate them in."""

    def __init__(self, pair: Pair, num_heads: int, dims: int) -> None:
        num_rows = pair.array.shape[0]
        heads = pair.array.reshape(num_rows, num_heads, -1)
        self.values = heads[:, :, -dims:]
        self.even, self.odd = self.values[..., 0::2], self.values[..., 1::2]
        self.crossed = np.empty((num_rows, num_heads, dims), dtype=np.float32)
        self.to_even, self.to_odd = self.crossed[..., 0::2], self.crossed[..., 1::2]
        self.tensor = pair.tensor.view(num_rows, num_heads, -1)[:, :, -dims:]
        self.half = pair.half.view(num_rows, num_heads, -1)[:, :, -dims:]

    def rotate(self, cos: FloatArray, sin: FloatArray, minus_sin: FloatArray) -> None:
        """(even cos - odd sin, odd cos + even sin), rounded; swap the sines to turn back."""
        multiply(self.odd, minus_sin, self.to_even)
        multiply(self.even, sin, self.to_odd)
        multiply(self.values, cos, self.values)
        add(self.values, self.crossed, self.values)
        self.half.copy_(self.tensor)
        self.tensor.copy_(self.half)


class FewRows:
    """All buffers of T rows, and the blocks that run on them. One thread, one step at a time.

    stream  [T, M*C], the streams between blocks
    pre     [T, M] fp32, the mix that the next sublayer reads them through
    """

    def __init__(self, config: ModelConfig, num_rows: int) -> None:
        self.config, self.num_rows = config, num_rows
        rows, n, width = num_rows, config.hc_mult, config.hidden_size
        heads, dim, rank = config.num_attention_heads, config.head_dim, config.q_lora_rank
        self.stream = Pair(rows, n * width)
        self._streams = self.stream.array.reshape(rows, n, width)
        self._square_of: dict[int, tuple[Tensor, FloatArray]] = {}
        self._sum_tensor, self._sum = shared(rows, 1)[1:]
        self._terms = np.empty((rows, n, n, width), dtype=np.float32)
        self._mixed = np.empty((rows, n, width), dtype=np.float32)
        self._attn, self._ffn = (
            _Mix(rows, n, config.hc_sinkhorn_iters, config.hc_eps) for _ in range(2)
        )
        self.pre: FloatArray = np.empty((rows, n), dtype=np.float32)
        self._input, self._x, self._y = Pair(rows, width), Pair(rows, width), Pair(rows, width)
        self._x8 = Act8(self._x)
        self._both = Pair(rows, rank + dim)
        self._latent = Pair(rows, rank)
        self._latent8 = Act8(self._latent)
        self._qkv = Pair(rows, (heads + 1) * dim)
        self._q_block = self._qkv.block[:, : heads * dim]
        self._q = self._qkv.tensor.view(rows, heads + 1, dim)[:, :heads]
        self._kv = self._qkv.array[:, heads * dim :]
        self._kv8 = Act8(self._qkv, slice(heads * dim, None))
        self._rotated = _Turned(self._qkv, heads + 1, config.qk_rope_head_dim)
        self._out = Pair(rows, heads * dim)
        self._heads = self._out.array.reshape(rows, heads, dim)
        self._back = _Turned(self._out, heads, config.qk_rope_head_dim)
        self._groups = self._out.block.chunk(config.o_groups, dim=1)
        self._low = Pair(rows, config.o_groups * config.o_lora_rank)
        self._low_groups = self._low.block.chunk(config.o_groups, dim=1)
        self._low8 = Act8(self._low)
        self._index_q = Pair(rows, config.index_n_heads * config.index_head_dim)
        self._index_rotated = _Turned(self._index_q, config.index_n_heads, config.qk_rope_head_dim)
        self._index_weights = Pair(rows, config.index_n_heads)
        factor = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
        self._index_factor = np.array(factor, dtype=np.float32)
        self._router = shared(rows, config.n_routed_experts)
        self._soft = shared(rows, config.n_routed_experts)
        self._experts = _Experts(config, rows)
        self._norm_eps = np.array(config.rms_norm_eps, dtype=np.float32)
        self._route_eps = np.array(EPS, dtype=np.float32)
        self._route_scale = np.array(config.routed_scaling_factor, dtype=np.float32)
        self._hc_eps = np.array(config.hc_eps, dtype=np.float32)

    def start(self, step: Step, stream: Tensor, pre: Tensor) -> None:
        """Take what the first block takes: streams [T, M, C] bf16 and the mix [T, M]."""
        self.put(stream)
        self.pre = pre.numpy()
        inputs = step.inputs
        assert inputs.window_runs is not None
        self._turn: dict[bool, Turn] = {}
        for kind, (cos, sin) in step.rotation.items():
            sines = sin.numpy()[:, None]
            self._turn[kind] = cos.numpy().repeat(2, axis=1)[:, None], sines, -sines
        store, ring = inputs.window_store.numpy(), step.caches.windows[0].codes.shape[1]
        self._slot, self._place = np.divmod(store, ring)
        first = 2 * ring * self._slot + self._place
        self._twice = np.stack([first, first + ring], axis=1)

    def put(self, stream: Tensor) -> None:
        """Replace the streams by [T, M, C] bf16."""
        flat = stream.view(self.stream.half.shape)
        self.stream.half.copy_(flat)
        self.stream.tensor.copy_(flat)

    def streams(self) -> Tensor:
        """Return the streams [T, M, C] bf16; they hold until the next block runs."""
        return self.stream.half.view(self._streams.shape)

    def run(self, step: Step, layer: LayerConfig, block: BlockWeights, few: FewBlock) -> None:
        """Run a block: `block.run_block`."""
        self._mix(few.hc_attn, self._attn)
        self._collapse(self.pre)
        self._norm(self._input, few.attn_norm, self._x)
        self._attend(step, layer, block, few)
        self._expand(self._attn)
        self._mix(few.hc_ffn, self._ffn)
        self._collapse(self._attn.pre)
        self._norm(self._input, few.ffn_norm, self._x)
        self._run_experts(few)
        self._expand(self._ffn)
        self.pre = self._ffn.pre

    def _inverse_rms(self, x: FloatArray) -> FloatArray:
        """Return 1 / sqrt(mean of squares + eps) of each row, [T, 1]; holds until the next call."""
        width = x.shape[1]
        found = self._square_of.get(width)
        if found is None:
            found = self._square_of[width] = shared(self.num_rows, width)[1:]
        tensor, square = found
        multiply(x, x, square)
        torch.sum(tensor, 1, True, out=self._sum_tensor)
        value = self._sum
        divide(value, np.float32(width), value)
        add(value, self._norm_eps, value)
        np.sqrt(value, value)
        divide(_ONE, value, value)
        return value

    def _norm(self, x: Pair, weight: FloatArray, out: Pair) -> None:
        multiply(x.array, self._inverse_rms(x.array), out.array)
        multiply(weight, out.array, out.array)
        out.round()

    def _mix(self, weights: _Hyper, mix: _Mix) -> None:
        torch.mm(self.stream.block, weights.fn, out=mix.block)
        mixes, sides, raw = mix.mixes, mix.sides, mix.raw
        multiply(mixes, self._inverse_rms(self.stream.array), mixes)
        multiply(mixes, weights.gain, mixes)
        add(mixes, weights.base, mixes)
        largest(raw, -1, None, mix.peak, True)
        subtract(raw, mix.peak, raw)
        torch.exp(mix.tensor, out=mix.exps_tensor)
        add(sides, _ONE, sides)
        divide(_ONE, sides, sides)
        add(mix.pre, self._hc_eps, mix.pre)
        multiply(mix.post, _TWO, mix.post)
        mix.sinkhorn.run(mix.exps)

    def _collapse(self, pre: FloatArray) -> None:
        multiply(pre[:, :, None], self._streams, self._mixed)
        total(self._mixed, 1, None, self._input.array)
        self._input.round()

    def _expand(self, mix: _Mix) -> None:
        multiply(mix.comb[..., None], self._streams[:, :, None], self._terms)
        total(self._terms, 1, None, self._mixed)
        multiply(mix.post[:, :, None], self._y.array[:, None], self._streams)
        add(self._streams, self._mixed, self._streams)
        self.stream.round()

    def _attend(self, step: Step, layer: LayerConfig, block: BlockWeights, few: FewBlock) -> None:
        """`attention.attention` of self._x into self._y."""
        rank = self.config.q_lora_rank
        cos, sin, minus_sin = self._turn[layer.ratio > 0]
        torch.mm(self._x8.run(), few.wq_a_wkv, out=self._both.block)
        self._both.round()
        latent, kv = self._both.array[:, :rank], self._both.array[:, rank:]
        multiply(latent, self._inverse_rms(latent), self._latent.array)
        multiply(few.q_norm, self._latent.array, self._latent.array)
        self._latent.round()
        torch.mm(self._latent8.run(), few.wq_b, out=self._q_block)
        multiply(kv, self._inverse_rms(kv), self._kv)
        multiply(few.kv_norm, self._kv, self._kv)
        self._qkv.round()
        self._rotated.rotate(cos, sin, minus_sin)
        cache = step.caches.windows[layer.layer_id]
        self._store(cache)
        main_kv = main_idx = None
        if layer.kv_source is not None and layer.index_source is not None:
            x = self._x.half
            if block.compressor is not None:
                compress_step(step, layer, block.compressor, x)
            if block.indexer is not None and not select_all(step, layer):
                self._select(step, layer, few)
            main_kv, main_idx = gather_selected(step, layer.kv_source, layer.index_source)
        assert cache.twice is not None and step.inputs.window_runs is not None
        self._heads[...] = attention_cpu.attend(
            self._q,
            cache.twice.view(-1, cache.dim),
            step.inputs.window_runs,
            main_kv,
            main_idx,
            block.attention.attn_sink,
            self.config.head_dim**-0.5,
            True,
        )
        self._out.round()
        self._back.rotate(cos, minus_sin, sin)
        for group, matrix, low in zip(self._groups, few.wo_a, self._low_groups, strict=True):
            torch.mm(group, matrix, out=low)
        self._low.round()
        torch.mm(self._low8.run(), few.wo_b, out=self._y.block)
        self._y.round()

    def _select(self, step: Step, layer: LayerConfig, few: FewBlock) -> None:
        """`indexer.select` of self._latent, quantized for attention already, and self._x."""
        assert few.index_wq_b is not None and few.index_weights is not None
        torch.mm(self._latent8.block, few.index_wq_b, out=self._index_q.block)
        self._index_q.round()
        self._index_rotated.rotate(*self._turn[True])
        round_into(self._index_q.half, "act4_e8", self._index_q.array)
        weights = self._index_weights
        torch.mm(self._x.block, few.index_weights, out=weights.block)
        weights.round()
        multiply(weights.array, self._index_factor, weights.array)
        weights.round()
        q = self._index_q.tensor.view(self.num_rows, self.config.index_n_heads, -1)
        choose(step, layer, q, weights.tensor)

    def _store(self, cache: PagedCache) -> None:
        codes, scales, values = self._kv8.encode()
        assert cache.scales is not None and cache.twice is not None
        cache.codes.numpy()[self._slot, self._place] = codes
        cache.scales.numpy()[self._slot, self._place] = scales
        cache.twice.numpy().reshape(-1, cache.dim)[self._twice] = values[:, None]

    def _run_experts(self, few: FewBlock) -> None:
        """`moe.moe` of self._x into self._y."""
        chosen, weights = self._route(few)
        self._experts.run(few, self._x8, chosen, weights, self._y.array)
        self._y.round()

    def _route(self, few: FewBlock) -> tuple[NDArray[np.int64], FloatArray]:
        """Return a token's experts [T, k] in ascending order and their weights."""
        block, logits_tensor, logits = self._router
        _, soft_tensor, soft = self._soft
        torch.mm(self._x.block, few.gate, out=block)
        torch.exp(logits_tensor, out=soft_tensor)
        torch.log1p(soft_tensor, out=soft_tensor)
        np.copyto(soft, logits, where=logits > _SOFTPLUS_LIMIT)
        scores = torch.sqrt(soft_tensor, out=soft_tensor).numpy()
        order = np.negative(scores + few.bias).argsort(axis=-1, kind="stable")
        chosen = order[:, : self.config.num_experts_per_tok]
        rows = np.arange(self.num_rows)[:, None]
        weights = scores[rows, chosen]
        divide(weights, total(weights, -1, None, None, True) + self._route_eps, weights)
        multiply(weights, self._route_scale, weights)
        ascending = chosen.argsort(axis=1)
        return chosen[rows, ascending], weights[rows, ascending]


class _Experts:
    """Buffers of the experts: for each one a 16-row block, in which a token keeps its row."""

    def __init__(self, config: ModelConfig, num_rows: int) -> None:
        count, width = config.n_routed_experts + 1, config.hidden_size
        inner, active = config.moe_intermediate_size, config.num_experts_per_tok
        self.limit = np.array(config.swiglu_limit, dtype=np.float32)
        self.minus_limit = np.negative(self.limit)
        with torch.inference_mode(False):
            self.up, self.down, self.out = (
                torch.zeros(count, ROW_BLOCK, size) for size in (2 * inner, inner, width)
            )
        self.up_blocks, self.down_blocks, self.out_blocks = (
            part.unbind() for part in (self.up, self.down, self.out)
        )
        self.up_rows, self.down_rows, self.out_rows = (
            part.numpy().reshape(count * ROW_BLOCK, -1) for part in (self.up, self.down, self.out)
        )
        self.shared = count - 1
        self.rows = np.arange(num_rows)[:, None]
        self.places = np.empty((num_rows, active + 1), dtype=np.int64)
        self.places[:, -1:] = self.shared * ROW_BLOCK + self.rows
        self.gate_up = Pair(num_rows * (active + 1), 2 * inner, padded=False)
        self.hidden = Pair(num_rows * (active + 1), inner, padded=False)
        self.hidden8 = Act8(self.hidden)
        self.terms = Pair(num_rows * (active + 1), width, padded=False)
        self.routed = self.hidden.array.reshape(num_rows, active + 1, inner)[:, :active]

    def run(
        self,
        few: FewBlock,
        x8: Act8,
        chosen: NDArray[np.int64],
        weights: FloatArray,
        out: FloatArray,
    ) -> None:
        """Add up the terms of chosen [T, k] experts, ascending, and of the shared one, last.

        An expert multiplies all rows, as its 16-row block would cost the same with fewer.
        """
        used = [*set(chosen.ravel().tolist()), self.shared]
        add(chosen * ROW_BLOCK, self.rows, self.places[:, :-1])
        flat = self.places.ravel()
        block = x8.run()
        for expert in used:
            torch.mm(block, few.w1_w3[expert], out=self.up_blocks[expert])
        self.up_rows.take(flat, 0, self.gate_up.array)
        self.gate_up.round()
        exps = self.hidden.array
        gate, up = self.gate_up.array[:, : exps.shape[1]], self.gate_up.array[:, exps.shape[1] :]
        if self.limit > 0:
            np.minimum(gate, self.limit, out=gate)
            np.minimum(np.maximum(up, self.minus_limit, out=up), self.limit, out=up)
        np.negative(gate, exps)
        torch.exp(self.hidden.tensor, out=self.hidden.tensor)
        add(exps, _ONE, exps)
        divide(gate, exps, exps)
        multiply(exps, up, exps)
        multiply(weights[..., None], self.routed, self.routed)
        self.hidden.round()
        self.hidden8.run()
        self.down_rows[flat] = self.hidden8.values
        for expert in used:
            torch.mm(self.down_blocks[expert], few.w2[expert], out=self.out_blocks[expert])
        self.out_rows.take(flat, 0, self.terms.array)
        self.terms.round()
        total(self.terms.array.reshape(*self.places.shape, -1), 1, None, out)
