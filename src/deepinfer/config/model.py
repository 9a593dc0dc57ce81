"""The shape of one checkpoint: `config.json` checked once, then trusted (pure).

`ModelConfig` keeps the official key names, flat. Whatever this engine does not compute is refused
by name, with the value found and the value accepted; all problems of a file come in one
ConfigError. `model_json.py` reads the file and `model_rules.py` checks what the values must satisfy
among each other. Source: weights specification, 1; backbone specification, 1.1 and 3.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Final, Literal

from deepinfer.config.fields import Values, run_rules
from deepinfer.config.model_json import (
    ARCHITECTURE,
    MODEL_TYPE,
    QUANTIZATION,
    TEXT_CONSTANTS,
    VisionConfig,
    YarnConfig,
    check_identity,
    read_model_json,
)
from deepinfer.config.model_rules import RULES, nearest_source
from deepinfer.errors import ConfigError

__all__ = ["LayerConfig", "LayerKind", "ModelConfig", "VisionConfig", "YarnConfig"]

LayerKind = Literal["window", "full", "reindex", "reuse"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerConfig:
    """The role of one backbone layer.

    ratio               tokens per compressed entry that the layer reads; 0 = sliding window only
    kind                window: no compressed KV; full: compresses and selects; reindex: selects
                        among its source's entries; reuse: takes its index source's selection
    kv_source           the layer whose compressed KV this one reads (itself when it owns one), None
                        for window
    index_source        the layer whose selection this one uses, None for window
    owns_kv, owns_index it has a compressor and index keys; it has an indexer
    is_candidate_source it picks the candidate blocks
    filters_candidates  it selects only inside the candidate blocks
    engram_idx          its position in `engram_layer_ids`, None without Engram
    is_decoder          it belongs to the decoder half
    """

    layer_id: int
    ratio: int
    kind: LayerKind
    kv_source: int | None
    index_source: int | None
    owns_kv: bool
    owns_index: bool
    is_candidate_source: bool
    filters_candidates: bool
    engram_idx: int | None
    is_decoder: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Everything the engine knows about a model; keys as in `text_config`, lists as tuples.

    Absent parts: `vision` None = text only; `candidate_source_layer_id` None = no candidate filter
    (its sizes 0); `engram_layer_ids` () and `num_nextn_predict_layers` 0 = none (their sizes 0).
    `layers` describes the backbone only. `dspark_confidence_temperatures` is ours: () = 1.0, else
    one value or one per draft position.
    Raises ConfigError, listing every problem, when the values do not fit together.
    """

    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    tokenizer_compatibility: Literal["release", "native"] = "release"
    vision: VisionConfig | None = None

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    rms_norm_eps: float

    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    rope_theta: float
    rope_scaling: YarnConfig
    compress_rope_theta: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_k_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int | None
    candidate_topk_blocks: int
    candidate_block_size: int
    use_fp4_sparse_kv: bool = True

    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float

    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float

    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 0
    engram_vocab_size: int = 0
    engram_n_heads: int = 0
    engram_head_dim: int = 0
    engram_pad_token_id: int = 0
    engram_compressed_vocab_size: int = 0

    num_nextn_predict_layers: int = 0
    dspark_block_size: int = 0
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 0
    dspark_n_routed_experts: int = 0
    dspark_num_experts_per_tok: int = 0
    dspark_confidence_temperatures: tuple[float, ...] = ()

    layers: tuple[LayerConfig, ...] = field(init=False, repr=False, compare=False)
    first_decoder_layer: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check that the values fit together and derive the layer roles."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        problems = run_rules(RULES, Values(values))
        if problems:
            raise ConfigError("the model config is not consistent", problems)
        backbone = self.compress_ratios[: self.num_hidden_layers]
        first = backbone.index(1) if 1 in backbone else self.num_hidden_layers
        object.__setattr__(self, "first_decoder_layer", first)
        layers = tuple(self._layer(layer_id) for layer_id in range(self.num_hidden_layers))
        object.__setattr__(self, "layers", layers)

    @classmethod
    def from_dict(cls, raw: Mapping[str, object]) -> ModelConfig:
        """Build a config from the parsed `config.json`.

        Raises ConfigError with one line for each unsupported, missing, unknown or inconsistent
        value.
        """
        problems = check_identity(raw)
        if problems and raw.get("model_type") != MODEL_TYPE:
            raise ConfigError(
                "not a DeepSeek-V4.1-Flash config; no other model runs here", problems
            )
        values = read_model_json(raw, problems)
        problems += run_rules(RULES, Values(values))
        if problems:
            raise ConfigError("config.json holds values that are not supported", problems)
        return cls(**values)  # type: ignore[arg-type]  # every value was read by its type

    def to_dict(self) -> dict[str, object]:
        """Return the config as `config.json` spells it; `from_dict` of it gives an equal config."""
        text: dict[str, object] = {"model_type": f"{MODEL_TYPE}_text"}
        text |= {**TEXT_CONSTANTS, "attention_bias": False, "attention_dropout": 0.0}
        for f in fields(self):
            if f.init and f.name not in _TOP_FIELDS:
                value = getattr(self, f.name)
                text[f.name] = list(value) if isinstance(value, tuple) else value
        text["rope_scaling"] = {"rope_type": "yarn", **_plain(self.rope_scaling)}
        if not self.dspark_confidence_temperatures:
            del text["dspark_confidence_temperatures"]
        top: dict[str, object] = {
            "architectures": [ARCHITECTURE],
            "model_type": MODEL_TYPE,
            "dtype": "bfloat16",
            **{name: getattr(self, name) for name in _TOP_FIELDS if name != "vision"},
            "tie_word_embeddings": False,
            "quantization_config": dict(QUANTIZATION),
            "text_config": text,
        }
        if self.vision is not None:
            top["vision_config"] = {"model_type": f"{MODEL_TYPE}_vision", **_plain(self.vision)}
        return top

    def _layer(self, layer_id: int) -> LayerConfig:
        """Derive the role of one backbone layer."""
        ratio = self.compress_ratios[layer_id]
        owns_kv = layer_id in self.kv_source_layer_ids
        owns_index = layer_id in self.index_source_layer_ids
        kind: LayerKind = "reuse"
        if ratio == 0:
            kind = "window"
        elif owns_kv:
            kind = "full"
        elif owns_index:
            kind = "reindex"
        candidates = self.candidate_source_layer_id
        engram = self.engram_layer_ids
        return LayerConfig(
            layer_id=layer_id,
            ratio=ratio,
            kind=kind,
            kv_source=nearest_source(self.kv_source_layer_ids, layer_id) if ratio else None,
            index_source=nearest_source(self.index_source_layer_ids, layer_id) if ratio else None,
            owns_kv=owns_kv,
            owns_index=owns_index,
            is_candidate_source=layer_id == candidates,
            filters_candidates=owns_index and candidates is not None and layer_id > candidates,
            engram_idx=engram.index(layer_id) if layer_id in engram else None,
            is_decoder=layer_id >= self.first_decoder_layer,
        )


_TOP_FIELDS: Final = tuple(
    """
    bos_token_id eos_token_id pad_token_id image_token_id tokenizer_compatibility vision
    """.split()
)


def _plain(part: YarnConfig | VisionConfig) -> dict[str, object]:
    """Return the fields of a small dataclass as a dict."""
    return {f.name: getattr(part, f.name) for f in fields(part)}
