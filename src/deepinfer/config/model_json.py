"""Reading `config.json` into plain values: types, ranges, accepted constants, unknown keys (pure).

What the values must satisfy among each other stands in `model_rules.py`. Source: weights
specification, 1; backbone specification, 1.1 and 13.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from deepinfer.config.fields import Section

__all__ = [
    "ARCHITECTURE",
    "MODEL_TYPE",
    "QUANTIZATION",
    "TEXT_CONSTANTS",
    "VisionConfig",
    "YarnConfig",
    "check_identity",
    "read_model_json",
]

ARCHITECTURE: Final = "DeepseekV41ForCausalLM"
MODEL_TYPE: Final = "deepseek_v41"

# Keys that change no number: they pass, whatever they hold.
_NEUTRAL: Final = tuple(
    """
    initializer_range use_cache transformers_version auto_map _name_or_path _commit_hash
    architectures model_type
    """.split()
)
# Keys with exactly one accepted value.
TEXT_CONSTANTS: Final[Mapping[str, object]] = {
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "n_shared_experts": 1,
}
# The same for keys that may also be absent.
_OPTIONAL_CONSTANTS: Final[Mapping[str, object]] = {
    "attention_bias": False,
    "attention_dropout": 0,
    "tie_word_embeddings": False,
    "hc_shifted": True,
    "dspark_target_attn_input": True,
}
QUANTIZATION: Final[Mapping[str, object]] = {
    "quant_method": "fp8",
    "expert_dtype": "fp4",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
}
_SIZES: Final = tuple(
    """
    vocab_size hidden_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim
    q_lora_rank o_groups o_lora_rank max_position_embeddings sliding_window index_n_heads
    index_head_dim index_topk hc_mult hc_sinkhorn_iters n_routed_experts n_shared_experts
    num_experts_per_tok moe_intermediate_size
    """.split()
)
_POSITIVE: Final = tuple(
    """
    rms_norm_eps rope_theta compress_rope_theta hc_eps routed_scaling_factor
    """.split()
)
_ENGRAM_SIZES: Final = tuple(
    """
    engram_vocab_size engram_n_heads engram_head_dim engram_compressed_vocab_size
    """.split()
)
_DRAFT_SIZES: Final = tuple(
    """
    dspark_block_size dspark_markov_rank dspark_n_routed_experts dspark_num_experts_per_tok
    """.split()
)
_VISION_SIZES: Final = tuple(
    """
    hidden_size num_attention_heads intermediate_size patch_size downsample_ratio
    max_image_tokens min_pixels
    """.split()
)
MAX_ENGRAM_ROWS: Final = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class YarnConfig:
    """Frequency stretching of the layers with a compressed KV; the softmax scale stays as it is."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig:
    """The image tower and projector; `max_wh_ratio` None means no limit."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None


def check_identity(raw: Mapping[str, object]) -> list[str]:
    """Return the problems of the model type and architecture: whether it is our model at all."""
    problems: list[str] = []
    top = Section(raw, "", problems)
    top.expect("model_type", MODEL_TYPE)
    top.expect("architectures", [ARCHITECTURE])
    return problems


def read_model_json(raw: Mapping[str, object], problems: list[str]) -> dict[str, object]:
    """Return the good values by field name of ModelConfig; note the bad ones in `problems`."""
    values: dict[str, object] = {}
    top = Section(raw, "", problems)
    _read_top(top, values)
    text = top.section("text_config")
    if text is not None:
        _read_text(text, values)
        _check_repeats(text, top)
        text.close(_NEUTRAL)
    top.close(_NEUTRAL)
    return values


def _read_top(top: Section, values: dict[str, object]) -> None:
    """Read the keys outside `text_config`."""
    top.expect(
        "torch_dtype" if top.has("torch_dtype") and not top.has("dtype") else "dtype", "bfloat16"
    )
    top.expect("torch_dtype", "bfloat16", required=False)
    top.expect("tie_word_embeddings", False, required=False)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
        _put(values, key, top.take_int(key, low=0))
    if not top.has("tokenizer_compatibility"):
        values["tokenizer_compatibility"] = "release"
    elif top.raw("tokenizer_compatibility") in ("release", "native"):
        values["tokenizer_compatibility"] = top.raw("tokenizer_compatibility")
    else:
        top.note("tokenizer_compatibility", '"release" or "native"')
    quantization = top.section("quantization_config")
    if quantization is not None:
        for key, accepted in QUANTIZATION.items():
            quantization.expect(key, accepted)
        quantization.close()
    vision = top.section("vision_config", required=False)
    values["vision"] = _read_vision(vision) if vision is not None else None


def _put(values: dict[str, object], key: str, value: object) -> None:
    """Keep a value that was read well."""
    if value is not None:
        values[key] = value


def _read_text(text: Section, values: dict[str, object]) -> None:
    """Read `text_config`."""
    for key, accepted in TEXT_CONSTANTS.items():
        text.expect(key, accepted)
    for key, accepted in _OPTIONAL_CONSTANTS.items():
        text.expect(key, accepted, required=False)
    for key in _SIZES:
        if key not in TEXT_CONSTANTS:
            _put(values, key, text.take_int(key))
    values["n_shared_experts"] = 1
    for key in _POSITIVE:
        if key not in ("rope_theta", "compress_rope_theta"):
            _put(values, key, text.take_number(key, 0, exclusive=True))
    _put(values, "swiglu_limit", text.take_number("swiglu_limit", 0))
    for key in ("compress_ratios", "kv_source_layer_ids", "index_source_layer_ids"):
        _put(values, key, text.take_ints(key))
    if text.raw("index_k_source_layer_ids") is not None:
        _put(values, "index_k_source_layer_ids", text.take_ints("index_k_source_layer_ids"))
    elif "kv_source_layer_ids" in values:
        values["index_k_source_layer_ids"] = values["kv_source_layer_ids"]
    if text.has("use_fp4_sparse_kv"):
        _put(values, "use_fp4_sparse_kv", text.take_flag("use_fp4_sparse_kv"))
    _read_rope(text, values)
    _read_candidates(text, values)
    _read_engram(text, values)
    _read_drafts(text, values)


def _read_candidates(text: Section, values: dict[str, object]) -> None:
    """Read the candidate filter; null, negative or absent switches it off."""
    sizes = ("candidate_topk_blocks", "candidate_block_size")
    source = text.raw("candidate_source_layer_id")
    off = source is None or (isinstance(source, int) and source is not True and source < 0)
    if off:
        values |= {"candidate_source_layer_id": None, **dict.fromkeys(sizes, 0)}
        text.ignore(sizes)
        return
    _put(values, "candidate_source_layer_id", text.take_int("candidate_source_layer_id", low=0))
    for key in sizes:
        _put(values, key, text.take_int(key))


def _read_engram(text: Section, values: dict[str, object]) -> None:
    """Read the Engram keys, which are all optional when there are no Engram layers."""
    ids = text.take_ints("engram_layer_ids") if text.raw("engram_layer_ids") is not None else ()
    _put(values, "engram_layer_ids", ids)
    if ids == ():
        text.ignore((*_ENGRAM_SIZES, "engram_max_ngram_size", "engram_pad_token_id"))
        if text.has("engram_num_embeddings") and text.raw("engram_num_embeddings") not in ([], ()):
            text.note("engram_num_embeddings", "an empty list, as engram_layer_ids is empty")
        return
    _put(values, "engram_num_embeddings", text.take_ints("engram_num_embeddings", low=1))
    _put(values, "engram_max_ngram_size", text.take_int("engram_max_ngram_size", 2, 64))
    _put(values, "engram_pad_token_id", text.take_int("engram_pad_token_id", low=0))
    for key in _ENGRAM_SIZES:
        _put(values, key, text.take_int(key, high=MAX_ENGRAM_ROWS))


def _read_drafts(text: Section, values: dict[str, object]) -> None:
    """Read the draft keys, which are all optional when there are no draft layers."""
    count = text.take_int("num_nextn_predict_layers", low=0)
    _put(values, "num_nextn_predict_layers", count)
    if count == 0:
        text.ignore(
            (
                *_DRAFT_SIZES,
                "dspark_noise_token_id",
                "dspark_target_layer_ids",
                "dspark_confidence_temperatures",
            )
        )
        return
    _put(values, "dspark_noise_token_id", text.take_int("dspark_noise_token_id", low=0))
    _put(values, "dspark_target_layer_ids", text.take_ints("dspark_target_layer_ids"))
    for key in _DRAFT_SIZES:
        _put(values, key, text.take_int(key))
    given = text.raw("dspark_confidence_temperatures")
    if given is not None:
        _put(values, "dspark_confidence_temperatures", _temperatures(given))
        if "dspark_confidence_temperatures" not in values:
            text.note("dspark_confidence_temperatures", "a list of numbers > 0")


def _temperatures(given: object) -> tuple[float, ...] | None:
    """Return a list of positive finite numbers as a tuple, None when it is not one."""
    if not isinstance(given, (list, tuple)):
        return None
    good = [float(t) for t in given if isinstance(t, (int, float)) and not isinstance(t, bool)]
    if len(good) != len(given) or not all(0 < t < float("inf") for t in good):
        return None
    return tuple(good)


def _read_rope(text: Section, values: dict[str, object]) -> None:
    """Read both frequency tables: flat keys, or `main` and `compress` objects in `rope_scaling`."""
    name = "rope_scaling"
    if text.has("rope_parameters") and not text.has("rope_scaling"):
        name = "rope_parameters"
    scaling = text.section(name)
    if scaling is not None and (scaling.has("main") or scaling.has("compress")):
        main, compress = scaling.section("main"), scaling.section("compress")
        scaling.close()
        if main is not None:
            main.expect("rope_type", "default", required=False)
            main.expect("type", "default", required=False)
            _read_theta(main, text, "rope_theta", values)
            _check_rotary_share(main, values)
            main.close()
        if compress is not None:
            _read_yarn(compress, values)
            _read_theta(compress, text, "compress_rope_theta", values)
            _check_rotary_share(compress, values)
            compress.close()
        return
    if scaling is not None:
        _read_yarn(scaling, values)
        scaling.close()
    for key in ("rope_theta", "compress_rope_theta"):
        _put(values, key, text.take_number(key, 0, exclusive=True))


def _read_theta(part: Section, text: Section, flat: str, values: dict[str, object]) -> None:
    """Read a base frequency from a sub-object, the flat key, or both when they agree."""
    inner, outer = part.has("rope_theta"), text.has(flat)
    if inner:
        _put(values, flat, part.take_number("rope_theta", 0, exclusive=True))
    if outer or not inner:
        theta = text.take_number(flat, 0, exclusive=True)
        if inner and theta is not None and theta != values.get(flat, theta):
            part.note("rope_theta", f"the same value as {flat} ({theta:g})")
        _put(values, flat, theta)


def _check_rotary_share(part: Section, values: dict[str, object]) -> None:
    """Note a repeated rotary share that disagrees with the rotary dims."""
    rotary, dim = values.get("qk_rope_head_dim"), values.get("head_dim")
    if part.has("partial_rotary_factor") and isinstance(rotary, int) and isinstance(dim, int):
        part.expect("partial_rotary_factor", rotary / dim, why="qk_rope_head_dim / head_dim")


def _read_yarn(part: Section, values: dict[str, object]) -> None:
    """Read the YaRN numbers of the layers with a compressed KV."""
    kind = "type" if part.has("type") and not part.has("rope_type") else "rope_type"
    part.expect(kind, "yarn")
    part.expect("type", "yarn", required=False)
    factor = part.take_number("factor", 1)
    fast = part.take_number("beta_fast", 0, exclusive=True)
    slow = part.take_number("beta_slow", 0, exclusive=True)
    length = part.take_int("original_max_position_embeddings")
    if factor is None or fast is None or slow is None or length is None:
        return
    if fast < slow:
        part.note("beta_fast", f"a number >= beta_slow ({slow:g})")
        return
    values["rope_scaling"] = YarnConfig(
        factor=factor, beta_fast=fast, beta_slow=slow, original_max_position_embeddings=length
    )


def _read_vision(part: Section) -> VisionConfig | None:
    """Read `vision_config`; None without a tower: its keys are optional then, but still checked."""
    depth = part.take_int("num_hidden_layers", low=0)
    sizes: dict[str, int] = {}
    for key in _VISION_SIZES:
        if depth != 0 or part.has(key):
            size = part.take_int(key)
            if size is not None:
                sizes[key] = size
    theta = None
    if depth != 0 or part.has("rope_theta"):
        theta = part.take_number("rope_theta", 0, exclusive=True)
    ratio = None
    if part.raw("max_wh_ratio") is not None:
        ratio = part.take_number("max_wh_ratio", 1)
    for key in ("dtype", "torch_dtype"):
        part.expect(key, "bfloat16", required=False)
    part.close(_NEUTRAL)
    if not depth or theta is None or len(sizes) != len(_VISION_SIZES):
        return None
    heads, width = sizes["num_attention_heads"], sizes["hidden_size"]
    if width % heads or (width // heads) % 4:
        part.note("hidden_size", f"a multiple of 4 * num_attention_heads ({4 * heads})")
    return VisionConfig(num_hidden_layers=depth, rope_theta=theta, max_wh_ratio=ratio, **sizes)


def _check_repeats(text: Section, top: Section) -> None:
    """Note top-level keys that `text_config` repeats with another value."""
    for key in ("dtype", "torch_dtype"):
        text.expect(key, "bfloat16", required=False)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
        text.expect(key, top.raw(key), required=False, why="as at the top level")
