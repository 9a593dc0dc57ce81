"""The layout against the published counts and the packaged checkpoint."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from deepinfer.config.load import load_model_config
from deepinfer.config.mesh import Mesh
from deepinfer.config.model import ModelConfig
from deepinfer.errors import ConfigError
from deepinfer.weights.layout import (
    PARTS,
    TensorSpec,
    canonical_name,
    expected_tensors,
    is_ignored,
    is_unfolded_norm,
    rank_bytes,
)


@pytest.fixture(scope="module")
def real_config() -> ModelConfig:
    return load_model_config(Path(__file__).parents[1] / "data" / "real" / "config.json")


@pytest.fixture(scope="module")
def real(real_config: ModelConfig) -> dict[str, TensorSpec]:
    return expected_tensors(real_config)


def formula(c: ModelConfig) -> int:
    """The count formula of the weights specification, 2.7."""
    total = c.num_hidden_layers * (30 + 6 * c.n_routed_experts) + 3
    total += sum(2 + (c.compress_ratios[i] > 1) for i in c.kv_source_layer_ids)
    total += 3 * len(c.index_source_layer_ids) + 2 * len(c.kv_source_layer_ids)
    total += 6 * len(c.engram_layer_ids)
    if c.num_nextn_predict_layers:
        total += c.num_nextn_predict_layers * (30 + 6 * c.dspark_n_routed_experts) + 7
    if c.vision is not None:
        total += 3 + 3 + 8 * c.vision.num_hidden_layers + 4
    return total


def test_real_inventory_has_the_published_counts(
    real_config: ModelConfig, real: dict[str, TensorSpec]
) -> None:
    assert len(real) == 96_085 == formula(real_config)
    assert sum(s.nbytes for s in real.values()) == 510_286_023_000
    parameters = Counter[str]()
    for spec in real.values():
        parameters[spec.part] += spec.num_parameters
    assert parameters == {
        "backbone": 551_880_835_184,
        "engram": 196_613_849_600,
        "draft": 14_225_362_530,
        "vision": 485_268_480,
    }


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("layers.0.attn.wo_a.weight", "F8_E4M3", (8192, 4096)),
        ("layers.0.attn.wo_a.scale", "F8_E8M0", (256, 128)),
        ("layers.39.hc_ffn_fn", "F32", (24, 20480)),
        ("layers.7.ffn.experts.383.w2.weight", "I8", (5120, 1152)),
        ("layers.7.ffn.experts.383.w2.scale", "F8_E8M0", (5120, 72)),
        ("layers.14.engram.embed.weight", "F8_E4M3", (384016682, 256)),
        ("layers.14.engram.embed.scale", "F8_E8M0", (384016682, 8)),
        ("layers.1.engram.wkv.weight", "F8_E4M3", (25600, 6144)),
        ("layers.20.attn.indexer.wk.weight", "BF16", (128, 512)),
        ("layers.36.attn.indexer.wq_b.scale", "F8_E8M0", (128, 40)),
        ("mtp.0.main_proj.weight", "F8_E4M3", (5120, 15360)),
        ("mtp.2.confidence_head.proj.weight", "BF16", (1, 5376)),
        ("vision.blocks.31.mlp.w1.weight", "BF16", (5632, 1024)),
        ("aligner.w1.weight", "BF16", (5120, 9216)),
        ("image_newline", "BF16", (5120,)),
    ],
)
def test_real_tensors(
    real: dict[str, TensorSpec], name: str, dtype: str, shape: tuple[int, ...]
) -> None:
    spec = real[name]
    assert (spec.dtype, spec.shape) == (dtype, shape)


def test_absent_tensors_of_the_real_model(real: dict[str, TensorSpec]) -> None:
    specs = real
    assert "layers.20.attn.compressor.wgate.weight" not in specs  # ratio 1 pools nothing
    assert "layers.24.attn.indexer.wk.weight" not in specs  # re-indexes its source's keys
    assert "mtp.1.norm.weight" not in specs and "mtp.1.main_norm.weight" not in specs
    assert not any(re.match(r"hc_head|layers\.0\.engram", n) for n in specs)


def test_packaged_checkpoint_holds_exactly_the_layout(golden_checkpoint: Path) -> None:
    import json

    specs = expected_tensors(load_model_config(golden_checkpoint))
    assert len(specs) == 834
    index = json.loads((golden_checkpoint / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(specs)
    assert sum(s.nbytes for s in specs.values()) == index["metadata"]["total_size"]


def test_beta_follows_the_formula() -> None:
    config = load_model_config(Path(__file__).parents[1] / "data" / "beta" / "config.json")
    assert len(expected_tensors(config)) == formula(config)


def test_scales_and_weights_name_each_other(real: dict[str, TensorSpec]) -> None:
    specs = real
    for spec in specs.values():
        if spec.scale_name is not None:
            assert specs[spec.scale_name].scale_of == spec.name
            assert spec.dtype in ("F8_E4M3", "I8")
        elif spec.scale_of is None:
            assert spec.dtype in ("BF16", "F32")


def test_layers_are_neighbours_and_in_order(real: dict[str, TensorSpec]) -> None:
    names = list(real)
    assert names[0] == "embed.weight"
    layers = [int(m[1]) for n in names if (m := re.match(r"layers\.(\d+)\.", n))]
    assert layers == sorted(layers)
    last = max(i for i, n in enumerate(names) if n.startswith("layers."))
    assert names[last + 1 : last + 3] == ["norm.weight", "head.weight"]


def test_ranks_hold_everything_once(real: dict[str, TensorSpec]) -> None:
    specs = real.values()
    mesh = Mesh(data=8, expert=8, engram=4)
    per_rank = [rank_bytes(specs, mesh, r) for r in range(8)]
    replicated = sum(s.nbytes for s in specs if s.shard == "replicated")
    experts = sum(s.nbytes for s in specs if s.shard == "expert")
    tables = sum(s.nbytes for s in specs if s.shard == "rows")
    assert sum(sum(r.values()) for r in per_rank) == 8 * replicated + experts + 2 * tables
    assert sum(r["engram"] for r in per_rank[:4]) == tables
    assert set(per_rank[0]) == set(PARTS)


def test_uneven_experts_are_refused(real: dict[str, TensorSpec]) -> None:
    with pytest.raises(ConfigError, match="384 experts"):
        rank_bytes(real.values(), Mesh(data=7, expert=7), 0)


def test_names() -> None:
    assert canonical_name("model.layers.0.x") == "layers.0.x"
    assert is_ignored("mtp.1.embed.weight") and is_ignored("mtp.0.head.weight")
    assert not is_ignored("mtp.2.markov_head.embed.weight")
    assert is_unfolded_norm("layers.3.hc_attn_norm.weight")
    assert is_unfolded_norm("hc_head_norm.weight")
    assert not is_unfolded_norm("layers.3.attn_norm.weight")
