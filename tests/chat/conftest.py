"""A small byte-level tokenizer whose file the tests can change, and a config that fits it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepinfer.chat.tokenizer import Tokenizer
from deepinfer.config.load import load_model_config
from deepinfer.config.model import ModelConfig


@pytest.fixture
def config(golden_checkpoint: Path) -> ModelConfig:
    """The packaged checkpoint's config: 288 ids, 237 of them compressed."""
    return load_model_config(golden_checkpoint)


@pytest.fixture
def content(golden_checkpoint: Path) -> dict[str, Any]:
    """The packaged tokenizer.json, to be changed."""
    found: dict[str, Any] = json.loads((golden_checkpoint / "tokenizer.json").read_text("utf-8"))
    return found


@pytest.fixture
def load(tmp_path: Path, config: ModelConfig, content: dict[str, Any]) -> Callable[..., Tokenizer]:
    """Return a function that writes `content` and settings to a folder and loads them."""

    def build(settings: dict[str, Any] | None = None, **changes: Any) -> Tokenizer:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
        file = folder / "tokenizer_config.json"
        file.unlink(missing_ok=True)
        if settings is not None:
            file.write_text(json.dumps(settings), encoding="utf-8")
        return Tokenizer.load(folder, replace(config, **changes))

    return build
