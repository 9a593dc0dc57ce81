"""The compressed vocabulary: its rule, the recorded map, the cache, maps in model folders."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from deepinfer.chat import token_map as module
from deepinfer.chat.token_map import TOKEN_MAP_FILE, build_token_map, load_token_map
from deepinfer.config.model import ModelConfig
from deepinfer.errors import TokenizerError


@pytest.fixture
def folder(tmp_path: Path, golden_checkpoint: Path) -> Path:
    """A model folder that holds the tokenizer only."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "tokenizer.json").write_bytes((golden_checkpoint / "tokenizer.json").read_bytes())
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own cache folder, used for maps of every size."""
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_CACHED_FROM", 0)
    return tmp_path / "cache" / "token_map"


def forbid_building(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*args: object) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(module, "build_token_map", build)


def test_recorded_map(golden_checkpoint: Path, golden_folder: Path, config: ModelConfig) -> None:
    recorded = load_file(golden_folder / "static.safetensors")["token_map"]
    found = build_token_map(golden_checkpoint / "tokenizer.json", config.vocab_size)
    assert found.dtype == np.int32 and found.max() + 1 == 237
    np.testing.assert_array_equal(found, recorded)
    loaded = load_token_map(golden_checkpoint, config)
    assert loaded is not None
    np.testing.assert_array_equal(loaded, recorded)


def words(*texts: str) -> dict[str, Any]:
    """A tokenizer without decoder whose ids decode to exactly these texts."""
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {text: i for i, text in enumerate(texts)},
            "unk_token": texts[0],
        },
    }


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["The", " The", "the", " THE\n", "tha"], [0, 0, 0, 0, 1]),
        (["\n", "\n\n", " ", "\t", "\r\n  "], [0, 0, 0, 0, 0]),  # one space stays one
        (["é", "e", "e\u0301", "É", "ﬁ", "fi"], [0, 0, 0, 0, 1, 1]),
        (["a b", "a\t\nb", "ab", "a  B "], [0, 0, 1, 0]),
        (["x", "\u0301", "\u00a0", "\u3000"], [0, 1, 2, 2]),  # U+00A0 is one space after NFKC
        (["İ", "i\u0307", "i", "ß", "ss"], [0, 0, 0, 1, 2]),
    ],
)
def test_rule(tmp_path: Path, texts: list[str], expected: list[int]) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(words(*texts)), encoding="utf-8")
    assert build_token_map(file, len(texts)).tolist() == expected


def test_half_characters_keep_their_spelling(
    tmp_path: Path, content: dict[str, Any], config: ModelConfig
) -> None:
    """Bytes that are no UTF-8 alone all decode to U+FFFD, yet none shares an id with another."""
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    token_map = build_token_map(file, config.vocab_size)
    vocab = content["model"]["vocab"]
    lead = [vocab[c] for c in "ÃâðÎ"]  # bytes c3 e2 f0 ce
    assert len({int(token_map[i]) for i in lead}) == len(lead)


def test_no_engram_layers_no_map(tmp_path: Path, config: ModelConfig) -> None:
    assert load_token_map(tmp_path, replace(config, engram_layer_ids=())) is None


def test_missing_and_broken_files_are_named(folder: Path, config: ModelConfig) -> None:
    (folder / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is not a valid"):
        load_token_map(folder, config)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=rf"tokenizer\.json nor {TOKEN_MAP_FILE}"):
        load_token_map(folder, config)


def test_other_size_than_the_config_says(folder: Path, config: ModelConfig) -> None:
    with pytest.raises(TokenizerError, match=r"compresses to 237 ids.* 238"):
        load_token_map(folder, replace(config, engram_compressed_vocab_size=238))


def test_cache_is_used(
    folder: Path, config: ModelConfig, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = load_token_map(folder, config)
    assert [file.suffix for file in cache.iterdir()] == [".bin"]
    forbid_building(monkeypatch)
    again = load_token_map(folder, config)
    np.testing.assert_array_equal(again, built)


def test_cache_belongs_to_the_files_bytes(
    folder: Path, config: ModelConfig, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_token_map(folder, config)
    with (folder / "tokenizer.json").open("a") as file:
        file.write("\n")
    forbid_building(monkeypatch)
    with pytest.raises(AssertionError, match="built again"):
        load_token_map(folder, config)


@pytest.mark.parametrize("damage", [b"", b"x" * 20, None], ids=["empty", "short", "one bit"])
def test_damaged_cache_is_built_anew(
    folder: Path, config: ModelConfig, cache: Path, damage: bytes | None
) -> None:
    built = load_token_map(folder, config)
    (file,) = cache.iterdir()
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]) if damage is None else damage)
    np.testing.assert_array_equal(load_token_map(folder, config), built)
    assert file.read_bytes() == good


def test_cache_that_cannot_be_written(folder: Path, config: ModelConfig, cache: Path) -> None:
    cache.parent.write_text("a file in the way")
    assert load_token_map(folder, config) is not None


def test_failed_write_leaves_nothing(
    folder: Path, config: ModelConfig, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "replace", fail)
    assert load_token_map(folder, config) is not None
    assert list(cache.iterdir()) == []


def test_map_in_the_folder(folder: Path, config: ModelConfig) -> None:
    built = load_token_map(folder, config)
    assert built is not None
    (folder / "tokenizer.json").unlink()
    np.save(folder / TOKEN_MAP_FILE, built)
    loaded = load_token_map(folder, config)
    assert loaded is not None and loaded.dtype == np.int32
    np.testing.assert_array_equal(loaded, built)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (np.zeros(5, np.int32), r"int32 \[5\], expected int32 \[288\]"),
        (np.zeros(288, np.float32), "float32"),
        (np.arange(288)[::-1], "first appearance"),
        (np.full(288, -1), "first appearance"),
        (np.zeros(288, np.int32), "compresses to 1 ids"),
        (np.array([{}], dtype=object), "cannot read"),
    ],
)
def test_damaged_map_in_the_folder(
    folder: Path, config: ModelConfig, value: np.ndarray[Any, Any], match: str
) -> None:
    (folder / "tokenizer.json").unlink()
    np.save(folder / TOKEN_MAP_FILE, value, allow_pickle=True)
    with pytest.raises(TokenizerError, match=match):
        load_token_map(folder, config)
