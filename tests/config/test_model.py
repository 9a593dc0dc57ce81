"""ModelConfig: what it derives, what it refuses and how it says so."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.config.load import load_model_config
from deepinfer.config.model import ModelConfig
from deepinfer.errors import ConfigError

Raw = dict[str, Any]
ABSENT = object()


def put(raw: Raw, path: str, value: object) -> Raw:
    """Set or remove (ABSENT) the value at a dotted path."""
    *parents, key = path.split(".")
    part = raw
    for parent in parents:
        part = part[parent]
    if value is ABSENT:
        del part[key]
    else:
        part[key] = value
    return raw


def problems_of(raw: Raw) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(raw)
    return caught.value.problems


def test_released_roles(raw: Raw) -> None:
    config = ModelConfig.from_dict(raw)
    kinds = {layer.layer_id: layer.kind for layer in config.layers if layer.kind != "reuse"}
    assert kinds == {
        **dict.fromkeys((0, 1), "window"),
        **dict.fromkeys((2, 8, 14, 20), "full"),
        **dict.fromkeys((24, 28, 32, 36), "reindex"),
    }
    assert config.first_decoder_layer == 20
    assert [x.layer_id for x in config.layers if x.filters_candidates] == [24, 28, 32, 36]
    assert [x.layer_id for x in config.layers if x.is_candidate_source] == [20]
    assert [(x.layer_id, x.engram_idx) for x in config.layers if x.engram_idx is not None] == [
        (1, 0),
        (14, 1),
    ]
    assert (config.layers[7].kv_source, config.layers[7].index_source) == (2, 2)
    assert (config.layers[39].kv_source, config.layers[39].index_source) == (20, 36)
    assert config.layers[0].kv_source is None
    assert config.layers[0].index_source is None
    assert [x.is_decoder for x in config.layers] == [False] * 20 + [True] * 20
    assert len(config.layers) == 40
    assert config.vision is not None
    assert config.vision.max_wh_ratio is None
    assert config.rope_scaling.original_max_position_embeddings == 65536
    assert config.tokenizer_compatibility == "release"
    assert config.index_k_source_layer_ids == config.kv_source_layer_ids


def test_packaged(golden_checkpoint: Path) -> None:
    config = load_model_config(golden_checkpoint)
    assert config.vision is None
    assert config.tokenizer_compatibility == "native"
    assert config.engram_num_embeddings == (630, 834)
    assert load_model_config(golden_checkpoint / "config.json") == config


def test_other_dimensions(other: Raw) -> None:
    config = ModelConfig.from_dict(other)
    layers = config.layers
    assert layers[4].kind == "window"  # a window layer between compressed ones
    assert layers[5].kv_source == 3
    assert layers[5].kind == "reindex"
    assert not layers[5].filters_candidates  # below the candidate source
    assert [x.layer_id for x in layers if x.filters_candidates] == [8, 9]
    assert layers[7].index_source == 6
    assert config.vision is None
    assert config.candidate_block_size == 4


@pytest.mark.parametrize("which", ["raw", "other"])
def test_round_trip(which: str, request: pytest.FixtureRequest) -> None:
    config = ModelConfig.from_dict(request.getfixturevalue(which))
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_frozen(raw: Raw) -> None:
    config = ModelConfig.from_dict(raw)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 1  # type: ignore[misc]


def test_replace_is_checked(raw: Raw) -> None:
    config = ModelConfig.from_dict(raw)
    assert dataclasses.replace(config, hidden_size=64).hidden_size == 64
    with pytest.raises(ConfigError, match="hidden_size: found 65"):
        dataclasses.replace(config, hidden_size=65)


# Each row: path, value, words that must stand in the one problem reported.
REFUSED: list[tuple[str, object, str]] = [
    ("architectures", ["DeepseekV41ForCausalLM", "Other"], "architectures: found"),
    ("architectures", "DeepseekV41ForCausalLM", "architectures"),
    ("dtype", "float16", 'dtype: found "float16", expected "bfloat16"'),
    ("dtype", ABSENT, "dtype: missing"),
    ("torch_dtype", "float32", "torch_dtype"),
    ("bos_token_id", 129280, "below vocab_size (129280)"),
    ("image_token_id", 200000, "image_token_id: found 200000"),
    ("eos_token_id", -1, "eos_token_id"),
    ("pad_token_id", True, "pad_token_id: found true"),
    ("tie_word_embeddings", True, "tie_word_embeddings: found true"),
    ("tokenizer_compatibility", "other", '"release" or "native"'),
    ("text_config", ABSENT, "text_config: missing, expected an object"),
    ("text_config", [], "text_config: found []"),
    ("surprise", 1, "surprise: unknown key"),
    ("text_config.surprise", 1, "text_config.surprise: unknown key"),
    ("text_config.hidden_sizes", 5120, "did you mean hidden_size"),
    ("vision_config.surprise", 1, "vision_config.surprise: unknown key"),
    ("quantization_config.surprise", 1, "quantization_config.surprise: unknown key"),
    ("text_config.rope_scaling.surprise", 1, "text_config.rope_scaling.surprise: unknown key"),
    ("quantization_config", ABSENT, "quantization_config: missing"),
    ("quantization_config.quant_method", "int8", 'expected "fp8"'),
    ("quantization_config.expert_dtype", "fp8", 'expected "fp4"'),
    ("quantization_config.activation_scheme", "static", 'expected "dynamic"'),
    ("quantization_config.weight_block_size", [128, 128], "expected [32, 32]"),
    ("quantization_config.scale_fmt", "fp32", 'expected "ue8m0"'),
    ("text_config.num_key_value_heads", 8, "expected 1"),
    ("text_config.num_key_value_heads", True, "found true, expected 1"),
    ("text_config.hidden_act", "gelu", 'expected "silu"'),
    ("text_config.attention_bias", True, "attention_bias"),
    ("text_config.attention_dropout", 0.1, "attention_dropout"),
    ("text_config.tie_word_embeddings", True, "text_config.tie_word_embeddings"),
    ("text_config.scoring_func", "softmax", "sqrtsoftplus"),
    ("text_config.topk_method", "greedy", "noaux_tc"),
    ("text_config.norm_topk_prob", False, "norm_topk_prob"),
    ("text_config.n_shared_experts", 2, "n_shared_experts: found 2, expected 1"),
    ("text_config.hc_shifted", False, "hc_shifted"),
    ("text_config.dspark_target_attn_input", False, "dspark_target_attn_input"),
    ("text_config.use_fp4_sparse_kv", 1, "use_fp4_sparse_kv: found 1, expected true or false"),
    ("text_config.index_k_source_layer_ids", [2, 8], "expected kv_source_layer_ids"),
    ("text_config.vocab_size", 129280.0, "vocab_size: found 129280.0"),
    ("text_config.hidden_size", "5120", 'found "5120"'),
    ("text_config.hidden_size", ABSENT, "hidden_size: missing"),
    ("text_config.hidden_size", 5121, "a multiple of 32"),
    ("text_config.moe_intermediate_size", 2300, "a multiple of 32"),
    ("text_config.q_lora_rank", 1290, "a multiple of 32"),
    ("text_config.o_lora_rank", 1000, "a multiple of 32"),
    ("text_config.head_dim", 520, "a multiple of 32"),
    ("text_config.index_head_dim", 100, "a multiple of 32"),
    ("text_config.engram_head_dim", 200, "a multiple of 32"),
    ("text_config.qk_rope_head_dim", 63, "an even number"),
    ("text_config.qk_rope_head_dim", 160, "at most index_head_dim (128)"),
    ("text_config.o_groups", 7, "a divisor of num_attention_heads (64)"),
    ("text_config.num_experts_per_tok", 385, "at most n_routed_experts (384)"),
    ("text_config.dspark_num_experts_per_tok", 129, "at most dspark_n_routed_experts (128)"),
    ("text_config.rms_norm_eps", 0, "rms_norm_eps"),
    ("text_config.rms_norm_eps", float("nan"), "rms_norm_eps"),
    ("text_config.swiglu_limit", -1, "swiglu_limit"),
    ("text_config.rope_theta", ABSENT, "rope_theta: missing"),
    ("text_config.rope_scaling", None, "rope_scaling: found null"),
    ("text_config.rope_scaling.rope_type", "linear", 'expected "yarn"'),
    ("text_config.rope_scaling.factor", 0.5, "factor"),
    ("text_config.rope_scaling.beta_fast", 0.5, "beta_slow"),
    ("text_config.compress_ratios", [0, 0] + [2] * 18 + [1] * 20 + [0] * 2, "43 values"),
    ("text_config.compress_ratios", [0, 0] + [4] * 38 + [0] * 3, "values out of 0, 1, 2"),
    ("text_config.compress_ratios", [0, 0] + [2] * 18 + [1] * 23, "for the last 3 (draft) layers"),
    ("text_config.kv_source_layer_ids", [2, 8, 14, 21], "a subset of index_source_layer_ids"),
    ("text_config.kv_source_layer_ids", [2, 8, 14], "a source of ratio 1 for layer 20"),
    ("text_config.kv_source_layer_ids", [8, 14, 20], "a source at or below layer 2"),
    ("text_config.kv_source_layer_ids", [8, 2, 14, 20], "ascending"),
    ("text_config.index_source_layer_ids", [1, 2, 8, 14, 20], "compress_ratio > 0 only, not [1]"),
    ("text_config.index_source_layer_ids", [2, 8, 14, 20, 40], "not [40]"),
    ("text_config.candidate_source_layer_id", 21, "one of index_source_layer_ids"),
    ("text_config.candidate_source_layer_id", 14, "compress_ratio of the later index sources"),
    ("text_config.candidate_source_layer_id", True, "found true"),
    ("text_config.candidate_topk_blocks", 64, ">= index_topk + candidate_block_size - 1 (519)"),
    ("text_config.candidate_topk_blocks", ABSENT, "candidate_topk_blocks: missing"),
    ("text_config.engram_layer_ids", [14, 1], "ascending"),
    ("text_config.engram_layer_ids", [1, 1], "ascending"),
    ("text_config.engram_layer_ids", [1, 20], "below the first of ratio 1 (20)"),
    ("text_config.engram_layer_ids", [], "engram_num_embeddings"),
    (
        "text_config.engram_num_embeddings",
        [384006168, 384016683],
        "sums of primes from engram_vocab_size",
    ),
    ("text_config.engram_num_embeddings", [384006168], "sums of primes from engram_vocab_size"),
    ("text_config.engram_vocab_size", 16000058, "engram_num_embeddings"),
    ("text_config.engram_n_heads", 100000, "at most 1024 hash columns"),
    ("text_config.engram_pad_token_id", 129280, "below vocab_size"),
    ("text_config.engram_compressed_vocab_size", 129281, "at most vocab_size"),
    ("text_config.dspark_noise_token_id", 129280, "below vocab_size"),
    ("text_config.dspark_target_layer_ids", [37, 38, 40], "below num_hidden_layers (40)"),
    ("text_config.dspark_target_layer_ids", [], "one or more"),
    ("text_config.dspark_block_size", ABSENT, "dspark_block_size: missing"),
    ("text_config.dspark_confidence_temperatures", [1.0, 0.0], "numbers > 0"),
    ("text_config.dspark_confidence_temperatures", [1.0, 1.0], "dspark_block_size (5)"),
    ("text_config.bos_token_id", 5, "as at the top level"),
    ("vision_config", 3, "vision_config: found 3"),
    ("vision_config.patch_size", 0, "patch_size"),
    ("vision_config.min_pixels", 1.5, "min_pixels"),
    ("vision_config.num_attention_heads", 15, "a multiple of 4 * num_attention_heads"),
    ("vision_config.num_attention_heads", 512, "a multiple of 4 * num_attention_heads"),
    ("vision_config.max_wh_ratio", 0.5, "max_wh_ratio"),
    ("vision_config.hidden_size", ABSENT, "vision_config.hidden_size: missing"),
]


@pytest.mark.parametrize(("path", "value", "words"), REFUSED)
def test_refused(raw: Raw, path: str, value: object, words: str) -> None:
    found = problems_of(put(raw, path, value))
    assert any(words in problem for problem in found), found
    name = path.rsplit(".", 1)[-1]
    assert any(name in problem for problem in found), found
    assert len(found) <= 2, found  # one mistake, at most one follow-up


# Each row: path, value; all of these load.
ACCEPTED: list[tuple[str, object]] = [
    ("torch_dtype", "bfloat16"),
    ("tie_word_embeddings", False),
    ("transformers_version", "5.0"),
    ("_name_or_path", "somewhere"),
    ("use_cache", True),
    ("initializer_range", 0.02),
    ("text_config.dtype", "bfloat16"),
    ("text_config.initializer_range", 0.02),
    ("text_config.use_cache", False),
    ("text_config.attention_dropout", 0),
    ("text_config.attention_dropout", ABSENT),
    ("text_config.hc_shifted", True),
    ("text_config.index_k_source_layer_ids", [2, 8, 14, 20]),
    ("text_config.use_fp4_sparse_kv", False),
    ("text_config.bos_token_id", 0),
    ("text_config.swiglu_limit", 0),
    ("text_config.candidate_source_layer_id", None),
    ("text_config.candidate_source_layer_id", -1),
    ("text_config.candidate_source_layer_id", 24),
    ("text_config.candidate_block_size", 4),
    ("text_config.candidate_topk_blocks", 2047),
    ("text_config.index_n_heads", 100),
    ("text_config.index_topk", 7),
    ("text_config.head_dim", 96),
    ("text_config.index_source_layer_ids", [2, 3, 8, 14, 20]),
    ("text_config.dspark_confidence_temperatures", [1.5]),
    ("text_config.dspark_confidence_temperatures", [1, 2, 3, 4, 5]),
    ("text_config.model_type", "anything"),
    ("vision_config", ABSENT),
    ("vision_config.max_wh_ratio", 4),
    ("tokenizer_compatibility", "native"),
]


@pytest.mark.parametrize(("path", "value"), ACCEPTED)
def test_accepted(raw: Raw, path: str, value: object) -> None:
    config = ModelConfig.from_dict(put(raw, path, value))
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_torch_dtype_alone(raw: Raw) -> None:
    del raw["dtype"]
    raw["torch_dtype"] = "bfloat16"
    ModelConfig.from_dict(raw)


def test_no_candidates(raw: Raw) -> None:
    for key in ("candidate_source_layer_id", "candidate_topk_blocks", "candidate_block_size"):
        del raw["text_config"][key]
    config = ModelConfig.from_dict(raw)
    assert config.candidate_source_layer_id is None
    assert not any(x.filters_candidates or x.is_candidate_source for x in config.layers)


def test_no_engram(raw: Raw) -> None:
    for key in [k for k in raw["text_config"] if k.startswith("engram_")]:
        del raw["text_config"][key]
    config = ModelConfig.from_dict(raw)
    assert config.engram_layer_ids == ()
    assert all(x.engram_idx is None for x in config.layers)


def test_no_drafts(raw: Raw) -> None:
    text = raw["text_config"]
    for key in [k for k in text if k.startswith("dspark_")]:
        del text[key]
    text["num_nextn_predict_layers"] = 0
    text["compress_ratios"] = text["compress_ratios"][:40]
    config = ModelConfig.from_dict(raw)
    assert config.dspark_block_size == 0
    assert config.dspark_target_layer_ids == ()


def test_no_decoder_half(raw: Raw) -> None:
    text = raw["text_config"]
    text["compress_ratios"] = [0, 0] + [2] * 38 + [0] * 3
    config = ModelConfig.from_dict(raw)
    assert config.first_decoder_layer == 40
    assert not any(x.is_decoder for x in config.layers)


def test_windows_only(raw: Raw) -> None:
    text = raw["text_config"]
    text["compress_ratios"] = [0] * 43
    text["kv_source_layer_ids"] = text["index_source_layer_ids"] = []
    text["candidate_source_layer_id"] = None
    assert {x.kind for x in ModelConfig.from_dict(raw).layers} == {"window"}


def test_text_only_vision(raw: Raw) -> None:
    raw["vision_config"] = {"model_type": "deepseek_v41_vision", "num_hidden_layers": 0}
    assert ModelConfig.from_dict(raw).vision is None
    raw["vision_config"]["patch_size"] = 0
    assert problems_of(raw) == ("vision_config.patch_size: found 0, expected an integer >= 1",)


def nested_rope(raw: Raw) -> Raw:
    """Move the rotary numbers into `main` and `compress` objects."""
    text = raw["text_config"]
    yarn = dict(text.pop("rope_scaling"), rope_theta=text.pop("compress_rope_theta"))
    main = {"rope_type": "default", "rope_theta": text.pop("rope_theta")}
    text["rope_scaling"] = {"main": main, "compress": yarn}
    return raw


def test_rope_sub_objects(raw: Raw) -> None:
    flat = ModelConfig.from_dict(raw)
    nested = nested_rope(raw)
    assert ModelConfig.from_dict(nested) == flat
    nested["text_config"] |= {"rope_theta": 10000, "compress_rope_theta": 160000.0}
    nested["text_config"]["rope_scaling"]["compress"]["partial_rotary_factor"] = 0.125
    assert ModelConfig.from_dict(nested) == flat
    nested["text_config"]["rope_parameters"] = nested["text_config"].pop("rope_scaling")
    assert ModelConfig.from_dict(nested) == flat


def test_rope_sub_objects_refused(raw: Raw) -> None:
    nested = nested_rope(raw)
    scaling = nested["text_config"]["rope_scaling"]
    scaling["main"]["rope_type"] = "yarn"
    scaling["compress"]["partial_rotary_factor"] = 0.5
    scaling["other"] = {}
    nested["text_config"]["compress_rope_theta"] = 10000
    found = "\n".join(problems_of(nested))
    for words in ("main.rope_type", "partial_rotary_factor", "rope_scaling.other: unknown",
                  "compress.rope_theta: found 160000"):  # fmt: skip
        assert words in found
    assert found.count("\n") == 3


def test_all_problems_together(raw: Raw) -> None:
    for path, value in [
        ("dtype", "float16"),
        ("text_config.hidden_act", "gelu"),
        ("text_config.head_dim", 500),
        ("text_config.surprise", 0),
        ("quantization_config.scale_fmt", "e4m3"),
        ("vision_config.patch_size", -1),
        ("text_config.dspark_target_layer_ids", [50]),
    ]:
        put(raw, path, value)
    assert len(problems_of(raw)) == 7


@pytest.mark.parametrize("name", ["deepseek_v4", "deepseek_v3", "llama", None])
def test_other_models(raw: Raw, name: str | None) -> None:
    raw["model_type"] = name
    with pytest.raises(ConfigError, match=r"not a DeepSeek-V4\.1-Flash config") as caught:
        ModelConfig.from_dict(raw)
    assert len(caught.value.problems) == 1


def test_flat_v4_config_names_the_model_only() -> None:
    flat = {"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"], "dim": 4096}
    assert len(problems_of(flat)) == 2


SCALARS = st.none() | st.booleans() | st.integers(-3, 300000) | st.floats() | st.text(max_size=3)
JUNK = SCALARS | st.lists(SCALARS, max_size=4) | st.dictionaries(st.text(max_size=3), SCALARS)
REAL: Raw = json.loads((Path(__file__).parents[1] / "data" / "real" / "config.json").read_text())


@given(data=st.data())
def test_junk_never_crashes(data: st.DataObject) -> None:
    """Whatever stands under whatever keys, loading gives a config or a list of problems."""
    raw = copy.deepcopy(REAL)
    sections = ["", "text_config.", "vision_config.", "quantization_config.",
                "text_config.rope_scaling."]  # fmt: skip
    for _ in range(data.draw(st.integers(1, 4))):
        prefix = data.draw(st.sampled_from(sections))
        part: Any = raw
        for name in prefix.split(".")[:-1]:
            part = part.get(name) if isinstance(part, dict) else None
        if isinstance(part, dict) and part:
            part[data.draw(st.sampled_from(sorted(part)))] = data.draw(JUNK)
    try:
        config = ModelConfig.from_dict(raw)
    except ConfigError as error:
        assert error.problems
        assert all(isinstance(problem, str) and problem for problem in error.problems)
    else:
        assert ModelConfig.from_dict(config.to_dict()) == config
