"""How much of a prompt the decoder half keeps, and what is refused."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from deepinfer.config import ModelConfig
from deepinfer.config.engine import EngineConfig
from deepinfer.config.load import load_model_config, resolve_model
from deepinfer.engine.replay import (
    exact_keep_tokens,
    keep_tokens,
    least_keep_tokens,
    replay_floor,
)
from deepinfer.errors import ConfigError


@pytest.fixture(scope="module")
def real(real_config_file: Path) -> ModelConfig:
    return load_model_config(real_config_file)


def config(**values: object) -> EngineConfig:
    dotted = {key.replace("__", "."): value for key, value in values.items()}
    return EngineConfig.from_dotted({"replay.mode": "compact", **dotted})


def test_the_released_dims(real: ModelConfig) -> None:
    assert least_keep_tokens(config(), real) == 134
    assert keep_tokens(config(), real) == 140
    assert exact_keep_tokens(real) == 128 + 19 * 127 == 2541
    assert keep_tokens(config(replay__keep_tokens=134), real) == 134
    assert keep_tokens(config(cache__max_rollback=20), real) == 150


def test_other_dims() -> None:
    demo = load_model_config(resolve_model("demo"))
    assert keep_tokens(config(), demo) == 70  # a window of 64
    assert keep_tokens(EngineConfig(), demo) is None


def changed(model: ModelConfig, **values: object) -> ModelConfig:
    """A config with some values replaced, checked again."""
    kept = {f.name: getattr(model, f.name) for f in fields(model) if f.init}
    return ModelConfig(**(kept | values))


@pytest.mark.parametrize("given", [1, 133])
def test_too_few(real: ModelConfig, given: int) -> None:
    with pytest.raises(ConfigError, match=f"replay.keep_tokens: found {given}, .* least 134"):
        keep_tokens(config(replay__keep_tokens=given), real)


def test_drafting_changes_nothing(real: ModelConfig) -> None:
    """The number holds for any number of drafts, so outputs do not depend on speculation."""
    assert keep_tokens(config(cache__max_rollback=6), real) == 140


def test_models_that_cannot() -> None:
    demo = load_model_config(resolve_model("demo"))
    sources = (*demo.kv_source_layer_ids, 8)
    other = changed(
        demo,
        kv_source_layer_ids=sources,
        index_k_source_layer_ids=sources,
        candidate_source_layer_id=None,
        candidate_topk_blocks=0,
        candidate_block_size=0,
    )
    with pytest.raises(ConfigError, match=r"layers \[8\] of the decoder half"):
        keep_tokens(config(), other)


def test_the_floor() -> None:
    assert replay_floor(1000, None) == 0
    assert [replay_floor(n, 140) for n in (1, 139, 140, 141, 1000)] == [0, 0, 0, 1, 860]
