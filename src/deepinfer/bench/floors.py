"""The least a step can take on a chip: what must be read and multiplied, part by part (pure).

Counted are weights, cached entries and products; activations, launches and everything that is no
product count as nothing, so no engine reaches it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from deepinfer.config import LayerConfig, ModelConfig

__all__ = ["Load", "Rates", "floor_us", "step_loads"]

_FP8: Final = 1.0 + 1 / 1024  # bytes of a weight with its block's scale
_FP4: Final = 0.5 + 1 / 32
_WINDOW_ROW, _MAIN_ROW, _INDEX_ROW = 528, 288, 68


@dataclass(frozen=True, slots=True)
class Load:
    """Bytes read once, operations, and whether these may run in FP8."""

    bytes: float
    flops: float
    fp8: bool = False

    def __add__(self, other: Load) -> Load:
        return Load(self.bytes + other.bytes, self.flops + other.flops, self.fp8 or other.fp8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a chip reads and multiplies in a second, measured."""

    read: float
    bf16: float
    fp8: float

    def us(self, load: Load) -> float:
        """Return the time of a load: reading and multiplying hide each other."""
        return max(load.bytes / self.read, load.flops / (self.fp8 if load.fp8 else self.bf16)) * 1e6


def floor_us(loads: Mapping[str, Load], rates: Rates) -> dict[str, float]:
    """Return the least time of every part; a step takes at least their sum."""
    return {name: rates.us(load) for name, load in loads.items()}


def step_loads(
    config: ModelConfig,
    *,
    sequences: int,
    rows: int,
    context: int,
    local_experts: int,
    drafts: bool,
    fp8_experts: bool = False,
    kept: int | None = None,
    head_rows: int | None = None,
    hot: float = 1.0,
) -> dict[str, Load]:
    """Return what a step of `sequences` x `rows` loads, by part.

    kept       rows of each sequence that the decoder half runs, None = all
    head_rows  rows of each sequence that get logits, None = all
    hot        this rank's (token, expert) pairs over the mean
    """
    total: dict[str, Load] = {}

    def add(name: str, load: Load) -> None:
        total[name] = total.get(name, Load(0.0, 0.0)) + load

    for layer in config.layers:
        count = rows if kept is None or not layer.is_decoder else min(rows, kept)
        for name, load in _layer(config, layer, sequences, count, context).items():
            add(name, load)
        pairs = sequences * count * config.num_experts_per_tok * hot
        add("experts", _experts(config, pairs, local_experts, fp8_experts))
    if drafts and config.num_nextn_predict_layers:
        share = config.dspark_n_routed_experts / config.n_routed_experts
        held = max(1, round(local_experts * share))
        block = config.dspark_block_size
        for _ in range(config.num_nextn_predict_layers):
            for name, load in _layer(config, None, sequences, block, context).items():
                add(name, load)
            pairs = sequences * block * config.dspark_num_experts_per_tok * hot
            add("experts", _experts(config, pairs, held, fp8_experts))
        add("head", _head(config, sequences * block))
    add("head", _head(config, sequences * (rows if head_rows is None else head_rows)))
    return total


def _layer(
    config: ModelConfig, layer: LayerConfig | None, sequences: int, rows: int, context: int
) -> dict[str, Load]:
    """Return attention and its linears of one layer; None is a layer of drafts."""
    heads, dim = config.num_attention_heads, config.head_dim
    weights = config.hidden_size * (config.q_lora_rank + dim) + config.q_lora_rank * heads * dim
    weights += heads * dim * config.o_lora_rank
    weights += config.o_groups * config.o_lora_rank * config.hidden_size
    weights += 3 * config.hidden_size * config.moe_intermediate_size * config.n_shared_experts
    count = sequences * rows
    window = min(config.sliding_window, context + rows)
    entries = window
    cached = sequences * window * _WINDOW_ROW
    found: dict[str, Load] = {}
    if layer is not None and layer.ratio:
        keys = (context + (rows + 1) // 2) // layer.ratio  # a chunk's rows see half of it
        chosen = min(config.index_topk, keys)
        entries += chosen
        cached += sequences * chosen * _MAIN_ROW  # rows of a sequence may choose the same
        if layer.owns_index:
            width = config.index_n_heads * config.index_head_dim
            weights += config.q_lora_rank * width
            if layer.filters_candidates:
                keys = min(keys, config.candidate_topk_blocks * config.candidate_block_size)
            found["index scores"] = Load(
                float(sequences * keys * _INDEX_ROW), 2.0 * count * keys * width, True
            )
    found["dense"] = Load(weights * _FP8, 2.0 * count * weights)
    found["attention"] = Load(float(cached), 4.0 * count * heads * dim * entries)
    return found


def _experts(config: ModelConfig, pairs: float, held: int, fp8: bool) -> Load:
    """Return routed experts: those that even routing is expected to hit are read."""
    weights = 3.0 * config.hidden_size * config.moe_intermediate_size
    hit = held * (1.0 - (1.0 - 1.0 / held) ** pairs)
    return Load(hit * weights * _FP4, 2.0 * pairs * weights, fp8)


def _head(config: ModelConfig, rows: int) -> Load:
    weights = config.vocab_size * config.hidden_size
    return Load(2.0 * weights, 2.0 * rows * weights)
