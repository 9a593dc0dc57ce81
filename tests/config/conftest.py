"""Raw configs for the config tests: the released one, and one of other dimensions."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

Raw = dict[str, object]

# A checkpoint that shares no dimension with the packaged one.
OTHER_TEXT: Raw = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "head_dim": 128,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 64,
    "o_groups": 4,
    "o_lora_rank": 64,
    "swiglu_limit": 0,
    "sliding_window": 48,
    "compress_ratios": [0, 2, 2, 2, 0, 2, 1, 1, 1, 1, 0],
    "kv_source_layer_ids": [1, 3, 6],
    "index_source_layer_ids": [1, 2, 3, 5, 6, 8, 9],
    "index_n_heads": 4,
    "index_head_dim": 64,
    "index_topk": 20,
    "candidate_source_layer_id": 6,
    "candidate_topk_blocks": 9,
    "candidate_block_size": 4,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 5,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "engram_layer_ids": [0, 3, 5],
    "engram_num_embeddings": [384, 552, 724],
    "engram_max_ngram_size": 3,
    "engram_vocab_size": 53,
    "engram_n_heads": 3,
    "engram_head_dim": 64,
    "engram_pad_token_id": 7,
    "engram_compressed_vocab_size": 400,
    "num_nextn_predict_layers": 1,
    "dspark_block_size": 4,
    "dspark_noise_token_id": 511,
    "dspark_target_layer_ids": [2, 9],
    "dspark_markov_rank": 24,
    "dspark_n_routed_experts": 5,
    "dspark_num_experts_per_tok": 1,
}


@pytest.fixture(scope="session")
def _real(real_config_file: Path) -> Raw:
    loaded: Raw = json.loads(real_config_file.read_text())
    return loaded


@pytest.fixture
def raw(_real: Raw) -> Raw:
    """The released config, free to change."""
    return copy.deepcopy(_real)


@pytest.fixture
def other(raw: Raw) -> Raw:
    """A text-only config of other dimensions, free to change."""
    text = raw["text_config"]
    assert isinstance(text, dict)
    text.update(copy.deepcopy(OTHER_TEXT))
    raw["image_token_id"] = 500
    del raw["vision_config"]
    return raw
