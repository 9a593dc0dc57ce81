"""The shape of the demonstration model, as the official `config.json` spells it.

The numbers come from the size limit: at most 10 MB on disk, where embedding and head (bf16), the fp32 `hc_*_fn`
matrices and the Engram tables weigh most and fp4 experts least.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from deepinfer.config.engram import engram_multipliers, engram_primes
from demo.synth import SYSTEM
from demo.tokens import IMAGE, VOCAB_SIZE

LAYERS = 10
ENGRAM_LAYERS = (1, 3)
ENGRAM_BUCKETS = 1999
ENGRAM_HEADS = 2
ENGRAM_HEAD_DIM = 32
MAX_NGRAM = 4


def official_config(compressed_vocab_size: int, token_ids: dict[str, int]) -> dict[str, object]:
    """Return `config.json` of the demonstration model."""
    primes = np.array(engram_primes(len(ENGRAM_LAYERS), ENGRAM_BUCKETS, MAX_NGRAM, ENGRAM_HEADS))
    text: dict[str, object] = {
        "model_type": "deepseek_v41_text",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 192,
        "moe_intermediate_size": 32,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 32,
        "q_lora_rank": 96,
        "o_lora_rank": 64,
        "o_groups": 2,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": 2048,
        "rope_theta": 10000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 2,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 1024,
        },
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": 64,
        "compress_ratios": [0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 0, 0],
        "compress_rope_theta": 160000,
        "kv_source_layer_ids": [1, 3, 5],
        "index_source_layer_ids": [1, 3, 5, 8],
        "index_n_heads": 4,
        "index_head_dim": 64,
        "index_topk": 64,
        "candidate_source_layer_id": 5,
        "candidate_topk_blocks": 96,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": list(ENGRAM_LAYERS),
        "engram_num_embeddings": [int(n) for n in primes.sum(axis=(1, 2))],
        "engram_max_ngram_size": MAX_NGRAM,
        "engram_vocab_size": ENGRAM_BUCKETS,
        "engram_n_heads": ENGRAM_HEADS,
        "engram_head_dim": ENGRAM_HEAD_DIM,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": compressed_vocab_size,
        "num_nextn_predict_layers": 2,
        "dspark_block_size": 5,
        "dspark_noise_token_id": token_ids[SYSTEM],
        "dspark_target_layer_ids": [7, 8, 9],
        "dspark_markov_rank": 32,
        "dspark_n_routed_experts": 8,
        "dspark_num_experts_per_tok": 4,
        "tie_word_embeddings": False,
    }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": token_ids[IMAGE],
        "tie_word_embeddings": False,
        "tokenizer_compatibility": "native",
        "quantization_config": {
            "quant_method": "fp8",
            "expert_dtype": "fp4",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
        },
        "text_config": text,
    }


def constants(config: dict[str, object], compressed: np.ndarray) -> dict[str, np.ndarray]:
    """Return the Engram constants that training needs: compression map, primes, offsets, multipliers, pad."""
    primes = np.array(
        engram_primes(len(ENGRAM_LAYERS), ENGRAM_BUCKETS, MAX_NGRAM, ENGRAM_HEADS), np.int64
    )
    flat = primes.reshape(len(ENGRAM_LAYERS), -1)
    return {
        "compressed": compressed.astype(np.int64),
        "primes": flat,
        "offsets": np.cumsum(flat, axis=1) - flat,
        "multipliers": engram_multipliers(ENGRAM_LAYERS, int(compressed.max()) + 1, MAX_NGRAM),
        "pad": compressed[2:3].astype(np.int64),
    }


def main() -> None:
    """Write `config.json` and the constants beside the tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".carry"))
    folder = parser.parse_args().work / "tokens"
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    token_ids = {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    compressed = np.load(folder / "tokens.npz")["compressed"]
    config = official_config(int(compressed.max()) + 1, token_ids)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    np.savez(folder / "constants.npz", **constants(config, compressed))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
