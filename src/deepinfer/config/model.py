"""The shape of one checkpoint: `config.json` checked once, then trusted (pure).

`ModelConfig` keeps the official key names, flat. Whatever this engine does not compute is refused by name, with the value
found and the value accepted; all problems of a file come in one ConfigError. Limits of particular kernels are not checked
here: they belong to the contract of the kernel that has them. Source: weights specification, 1; backbone
specification, 1.1, 3.1, 5.4 and 13.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Final, Literal

from deepinfer.config.engram import engram_primes
from deepinfer.config.fields import Section, Values, run_rules, show
from deepinfer.errors import ConfigError

__all__ = ["LayerConfig", "LayerKind", "ModelConfig", "VisionConfig", "YarnConfig"]

LayerKind = Literal["window", "full", "reindex", "reuse"]

ARCHITECTURE: Final = "DeepseekV41ForCausalLM"
MODEL_TYPE: Final = "deepseek_v41"

# Keys that change no number: they pass, whatever they hold.
_NEUTRAL: Final = ("initializer_range", "use_cache", "transformers_version", "auto_map",
                   "_name_or_path", "_commit_hash", "architectures", "model_type")  # fmt: skip
# Keys with exactly one accepted value.
_TEXT_CONSTANTS: Final[Mapping[str, object]] = {
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
_QUANTIZATION: Final[Mapping[str, object]] = {
    "quant_method": "fp8",
    "expert_dtype": "fp4",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
}
_SIZES: Final = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim",
    "qk_rope_head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "max_position_embeddings",
    "sliding_window", "index_n_heads", "index_head_dim", "index_topk", "hc_mult",
    "hc_sinkhorn_iters", "n_routed_experts", "n_shared_experts", "num_experts_per_tok",
    "moe_intermediate_size",
)  # fmt: skip
_POSITIVE: Final = ("rms_norm_eps", "rope_theta", "compress_rope_theta", "hc_eps",
                    "routed_scaling_factor")  # fmt: skip
_ENGRAM_SIZES: Final = ("engram_vocab_size", "engram_n_heads", "engram_head_dim",
                        "engram_compressed_vocab_size")  # fmt: skip
_DRAFT_SIZES: Final = ("dspark_block_size", "dspark_markov_rank", "dspark_n_routed_experts",
                       "dspark_num_experts_per_tok")  # fmt: skip
_VISION_SIZES: Final = ("hidden_size", "num_attention_heads", "intermediate_size", "patch_size",
                        "downsample_ratio", "max_image_tokens", "min_pixels")  # fmt: skip
_MAX_ENGRAM_ROWS: Final = 2**31 - 1
_MAX_ENGRAM_COLUMNS: Final = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class YarnConfig:
    """Frequency stretching of the layers with a compressed KV; there is no attention-temperature factor."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerConfig:
    """The role of one backbone layer.

    ratio               tokens per compressed entry that the layer reads; 0 = sliding window only
    kind                window: no compressed KV; full: compresses and selects; reindex: selects among its source's
                        entries; reuse: takes its index source's selection verbatim
    kv_source           the layer whose compressed KV this one reads (itself when it owns one), None for window
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

    Absent parts: `vision` None = text only; `candidate_source_layer_id` None = no candidate filter (its sizes 0);
    `engram_layer_ids` () and `num_nextn_predict_layers` 0 = none (their sizes 0). `layers` describes the backbone only.
    `dspark_confidence_temperatures` is ours: () = 1.0, else one value or one per draft position.
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
        problems = run_rules(_RULES, Values(values))
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

        Raises ConfigError with one line for each unsupported, missing, unknown or inconsistent value.
        """
        problems: list[str] = []
        top = Section(raw, "", problems)
        _check_identity(top)
        if problems and raw.get("model_type") != MODEL_TYPE:
            raise ConfigError("not a DeepSeek-V4.1-Flash config; no other model runs here", problems)
        values: dict[str, object] = {}
        _read_top(top, values)
        text = top.section("text_config")
        if text is not None:
            _read_text(text, values)
            _check_repeats(text, top)
            text.close(_NEUTRAL)
        top.close(_NEUTRAL)
        problems += run_rules(_RULES, Values(values))
        if problems:
            raise ConfigError("config.json holds values that are not supported", problems)
        return cls(**values)  # type: ignore[arg-type]  # every value was read by its type

    def to_dict(self) -> dict[str, object]:
        """Return the config as `config.json` spells it; `from_dict` of the result gives an equal config."""
        text: dict[str, object] = {"model_type": f"{MODEL_TYPE}_text"}
        text |= {**_TEXT_CONSTANTS, "attention_bias": False, "attention_dropout": 0.0}
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
            "quantization_config": dict(_QUANTIZATION),
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
            kv_source=_nearest(self.kv_source_layer_ids, layer_id) if ratio else None,
            index_source=_nearest(self.index_source_layer_ids, layer_id) if ratio else None,
            owns_kv=owns_kv,
            owns_index=owns_index,
            is_candidate_source=layer_id == candidates,
            filters_candidates=owns_index and candidates is not None and layer_id > candidates,
            engram_idx=engram.index(layer_id) if layer_id in engram else None,
            is_decoder=layer_id >= self.first_decoder_layer,
        )


_TOP_FIELDS: Final = (
    "bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", "tokenizer_compatibility",
    "vision",
)  # fmt: skip


def _plain(part: YarnConfig | VisionConfig) -> dict[str, object]:
    """Return the fields of a small dataclass as a dict."""
    return {f.name: getattr(part, f.name) for f in fields(part)}


def _nearest(sources: tuple[int, ...], layer_id: int) -> int | None:
    """Return the largest source at or below a layer, None when there is none."""
    return max((s for s in sources if s <= layer_id), default=None)


# --- reading ---------------------------------------------------------------------------------


def _check_identity(top: Section) -> None:
    """Note a model type or architecture that is not this model's."""
    top.expect("model_type", MODEL_TYPE)
    top.expect("architectures", [ARCHITECTURE])


def _read_top(top: Section, values: dict[str, object]) -> None:
    """Read the keys outside `text_config`."""
    top.expect("torch_dtype" if top.has("torch_dtype") and not top.has("dtype") else "dtype",
               "bfloat16")  # fmt: skip
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
        for key, accepted in _QUANTIZATION.items():
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
    for key, accepted in _TEXT_CONSTANTS.items():
        text.expect(key, accepted)
    for key, accepted in _OPTIONAL_CONSTANTS.items():
        text.expect(key, accepted, required=False)
    for key in _SIZES:
        if key not in _TEXT_CONSTANTS:
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
        _put(values, key, text.take_int(key, high=_MAX_ENGRAM_ROWS))


def _read_drafts(text: Section, values: dict[str, object]) -> None:
    """Read the draft keys, which are all optional when there are no draft layers."""
    count = text.take_int("num_nextn_predict_layers", low=0)
    _put(values, "num_nextn_predict_layers", count)
    if count == 0:
        text.ignore((*_DRAFT_SIZES, "dspark_noise_token_id", "dspark_target_layer_ids",
                     "dspark_confidence_temperatures"))  # fmt: skip
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
    """Read both frequency tables: flat keys, or `rope_scaling` with `main` and `compress` objects inside."""
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
    """Read `vision_config`; None when it has no tower. Its keys are optional then, yet checked where present."""
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


# --- cross-field rules -----------------------------------------------------------------------


def _wrong(key: str, found: object, expected: str) -> str:
    """Spell a problem of a `text_config` key."""
    return f"text_config.{key}: found {show(found)}, expected {expected}"


def _rule_token_ids(v: Values) -> Iterator[str]:
    """Every special id lies inside the vocabulary."""
    vocab = v.one("vocab_size")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
        if key in v.items and v.one(key) >= vocab:
            yield f"{key}: found {v.one(key)}, expected an id below vocab_size ({vocab})"


def _rule_multiples(v: Values) -> Iterator[str]:
    """Quantization groups run along whole dimensions."""
    for key in ("hidden_size", "moe_intermediate_size", "q_lora_rank", "o_lora_rank", "head_dim",
                "index_head_dim"):  # fmt: skip
        if key in v.items and v.one(key) % 32:
            yield _wrong(key, v.one(key), "a multiple of 32 (quantization groups)")


def _rule_rotary(v: Values) -> Iterator[str]:
    """The rotary dims are pairs at the end of a head and of an index head."""
    rotary = v.one("qk_rope_head_dim")
    if rotary % 2:
        yield _wrong("qk_rope_head_dim", rotary, "an even number")
    for key in ("head_dim", "index_head_dim"):
        if key in v.items and rotary > v.one(key):
            yield _wrong("qk_rope_head_dim", rotary, f"at most {key} ({v.one(key)})")


def _rule_groups(v: Values) -> Iterator[str]:
    """Output groups hold whole heads."""
    groups, heads = v.one("o_groups"), v.one("num_attention_heads")
    if heads % groups:
        yield _wrong("o_groups", groups, f"a divisor of num_attention_heads ({heads})")


def _rule_experts(v: Values) -> Iterator[str]:
    """No token asks for more experts than there are."""
    active, total = v.one("num_experts_per_tok"), v.one("n_routed_experts")
    if active > total:
        yield _wrong("num_experts_per_tok", active, f"at most n_routed_experts ({total})")


def _rule_ratios(v: Values) -> Iterator[str]:
    """One ratio a layer, 0, 1 or 2; draft layers have a window only."""
    ratios = v.many("compress_ratios")
    if any(r not in (0, 1, 2) for r in ratios):
        yield _wrong("compress_ratios", ratios, "values out of 0, 1, 2")
    depth, drafts = v.one("num_hidden_layers"), v.one("num_nextn_predict_layers")
    if len(ratios) != depth + drafts:
        yield _wrong("compress_ratios", ratios,
                     f"{depth + drafts} values (num_hidden_layers {depth} + "
                     f"num_nextn_predict_layers {drafts}), not {len(ratios)}")  # fmt: skip
    elif any(ratios[depth:]):
        yield _wrong("compress_ratios", ratios, f"ratio 0 for the last {drafts} (draft) layers")


def _rule_sources(v: Values) -> Iterator[str]:
    """Sources are sorted backbone layers with a compressed KV, and every such layer has one of its own ratio."""
    ratios = v.many("compress_ratios")[: v.one("num_hidden_layers")]
    kv, index = v.many("kv_source_layer_ids"), v.many("index_source_layer_ids")
    sound = True
    for key, ids in (("kv_source_layer_ids", kv), ("index_source_layer_ids", index)):
        if list(ids) != sorted(set(ids)):
            yield _wrong(key, ids, "ascending layer ids without repeats")
            sound = False
        outside = [i for i in ids if i >= len(ratios) or ratios[i] == 0]
        if outside:
            yield _wrong(key, ids, f"backbone layers with compress_ratio > 0 only, not {outside}")
            sound = False
    if not set(kv) <= set(index):
        yield _wrong("kv_source_layer_ids", kv, f"a subset of index_source_layer_ids {show(index)}")
        sound = False
    if not sound:
        return
    first = ratios.index(1) if 1 in ratios else len(ratios)
    for layer_id, ratio in enumerate(ratios):
        source = _nearest(kv, layer_id)
        if ratio == 0:
            continue
        if source is None:
            yield _wrong("kv_source_layer_ids", kv, f"a source at or below layer {layer_id}")
        elif ratios[source] != ratio:
            yield _wrong("kv_source_layer_ids", kv,
                         f"a source of ratio {ratio} for layer {layer_id}; its nearest, layer "
                         f"{source}, has ratio {ratios[source]}")  # fmt: skip
        elif source < first <= layer_id:
            yield _wrong("kv_source_layer_ids", kv,
                         f"layer {layer_id} of the decoder half to have a source at or above its "
                         f"first layer {first}, not {source}")  # fmt: skip


def _rule_index_keys(v: Values) -> Iterator[str]:
    """Index keys are made where the compressed KV is made."""
    keys, kv = v.many("index_k_source_layer_ids"), v.many("kv_source_layer_ids")
    if keys != kv:
        yield _wrong("index_k_source_layer_ids", keys, f"kv_source_layer_ids {show(kv)}")


def _rule_candidates(v: Values) -> Iterator[str]:
    """The candidate source is an indexer whose blocks mean the same to every later indexer."""
    source = v.optional("candidate_source_layer_id")
    if source is None:
        return
    ratios, index = v.many("compress_ratios"), v.many("index_source_layer_ids")
    if source not in index:
        yield _wrong("candidate_source_layer_id", source,
                     f"one of index_source_layer_ids {show(index)}")  # fmt: skip
    else:
        later = [i for i in index if i > source and i < len(ratios) and source < len(ratios)]
        other = [i for i in later if ratios[i] != ratios[source]]
        if other:
            yield _wrong("candidate_source_layer_id", source,
                         f"a layer with the compress_ratio of the later index sources {other}")  # fmt: skip
    block, blocks = v.one("candidate_block_size"), v.one("candidate_topk_blocks")
    least = v.one("index_topk") + block - 1
    if block * blocks < least:
        yield _wrong("candidate_topk_blocks", blocks,
                     f"candidate_topk_blocks * candidate_block_size >= index_topk + "
                     f"candidate_block_size - 1 ({least}), not {block * blocks}")  # fmt: skip


def _rule_engram_layers(v: Values) -> Iterator[str]:
    """Engram layers are sorted and lie in the encoder half."""
    ids, depth = v.many("engram_layer_ids"), v.one("num_hidden_layers")
    if list(ids) != sorted(set(ids)):
        yield _wrong("engram_layer_ids", ids, "ascending layer ids without repeats")
    ratios = v.many("compress_ratios")[:depth]
    first = ratios.index(1) if 1 in ratios else depth
    if any(i >= first for i in ids):
        yield _wrong("engram_layer_ids", ids, f"layers below the first of ratio 1 ({first})")


def _rule_engram_sizes(v: Values) -> Iterator[str]:
    """Engram's ids and dims fit the vocabulary and the quantization groups."""
    if not v.many("engram_layer_ids"):
        return
    if "engram_head_dim" in v.items and v.one("engram_head_dim") % 32:
        yield _wrong("engram_head_dim", v.one("engram_head_dim"),
                     "a multiple of 32 (quantization groups)")  # fmt: skip
    vocab = v.one("vocab_size")
    if "engram_pad_token_id" in v.items and v.one("engram_pad_token_id") >= vocab:
        yield _wrong("engram_pad_token_id", v.one("engram_pad_token_id"),
                     f"an id below vocab_size ({vocab})")  # fmt: skip
    compressed = v.one("engram_compressed_vocab_size")
    if compressed > vocab:
        yield _wrong("engram_compressed_vocab_size", compressed, f"at most vocab_size ({vocab})")


def _rule_engram_rows(v: Values) -> Iterator[str]:
    """The table sizes are the sums of the bucket primes."""
    ids = v.many("engram_layer_ids")
    if not ids:
        return
    order, heads = v.one("engram_max_ngram_size"), v.one("engram_n_heads")
    columns = len(ids) * (order - 1) * heads
    if columns > _MAX_ENGRAM_COLUMNS:
        yield _wrong("engram_n_heads", heads,
                     f"at most {_MAX_ENGRAM_COLUMNS} hash columns in all layers, not {columns}")  # fmt: skip
        return
    primes = engram_primes(len(ids), v.one("engram_vocab_size"), order, heads)
    rows = tuple(sum(sum(group) for group in layer) for layer in primes)
    if max(rows) > _MAX_ENGRAM_ROWS:
        yield _wrong("engram_vocab_size", v.one("engram_vocab_size"), "tables below 2**31 rows")
    found = v.many("engram_num_embeddings")
    if found != rows:
        yield _wrong("engram_num_embeddings", found, f"{show(rows)} (the sums of the bucket primes)")


def _rule_drafts(v: Values) -> Iterator[str]:
    """Draft taps are sorted backbone layers; draft sizes fit together."""
    if v.one("num_nextn_predict_layers") == 0:
        return
    vocab, depth = v.one("vocab_size"), v.one("num_hidden_layers")
    if "dspark_noise_token_id" in v.items and v.one("dspark_noise_token_id") >= vocab:
        yield _wrong("dspark_noise_token_id", v.one("dspark_noise_token_id"),
                     f"an id below vocab_size ({vocab})")  # fmt: skip
    if "dspark_target_layer_ids" in v.items:
        taps = v.many("dspark_target_layer_ids")
        if not taps or list(taps) != sorted(set(taps)) or taps[-1] >= depth:
            yield _wrong("dspark_target_layer_ids", taps,
                         f"one or more ascending layer ids below num_hidden_layers ({depth})")  # fmt: skip
    if "dspark_confidence_temperatures" in v.items:
        given = len(v.many("dspark_confidence_temperatures"))
        block = v.one("dspark_block_size")
        if given not in (0, 1, block):
            yield _wrong("dspark_confidence_temperatures",
                         v.items["dspark_confidence_temperatures"],
                         f"none, one or dspark_block_size ({block}) values")  # fmt: skip
    active, total = v.one("dspark_num_experts_per_tok"), v.one("dspark_n_routed_experts")
    if active > total:
        yield _wrong("dspark_num_experts_per_tok", active,
                     f"at most dspark_n_routed_experts ({total})")  # fmt: skip


_RULES: Final = (
    _rule_token_ids,
    _rule_multiples,
    _rule_rotary,
    _rule_groups,
    _rule_experts,
    _rule_ratios,
    _rule_sources,
    _rule_index_keys,
    _rule_candidates,
    _rule_engram_layers,
    _rule_engram_sizes,
    _rule_engram_rows,
    _rule_drafts,
)
