"""Random checkpoints: complete, reproducible, finite, with a tokenizer of the right size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, normalizers

from deepinfer.config.model import ModelConfig
from deepinfer.errors import CheckpointError, ConfigError
from deepinfer.model.reference import ReferenceModel
from deepinfer.weights.load import TensorSource, find_nonfinite
from deepinfer.weights.reader import Checkpoint
from deepinfer.weights.synth import write_synthetic
from deepinfer.weights.synth_tokenizer import synthetic_tokenizer


def token_map(tokenizer: Tokenizer) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The compressed id of every token, as the weights specification, 5.1, builds it."""
    marker = "\ue000"
    chain = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), marker),
            normalizers.Strip(),
            normalizers.Replace(marker, " "),
        ]
    )
    seen: dict[str, int] = {}
    found = []
    for i in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([i], skip_special_tokens=False)
        key = tokenizer.id_to_token(i) if "\ufffd" in text else chain.normalize_str(text) or text
        found.append(seen.setdefault(key, len(seen)))
    return np.array(found)


def changed(config: dict[str, Any], **text: Any) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(config))
    copy["text_config"] |= text
    return copy


# The tokenizer


@pytest.mark.parametrize(
    ("vocab", "keys", "kind"),
    [
        (320, 261, "BPE"),
        (320, 232, "BPE"),  # only the special tokens that the config names
        (320, 291, "BPE"),  # no twins but those of single bytes
        (261, 232, "BPE"),
        (1000, 700, "BPE"),
        (2000, 1900, "BPE"),
        (2000, 240, "BPE"),
        (320, 320, "WordLevel"),
        (320, 231, "WordLevel"),
        (260, 200, "WordLevel"),
        (40, 30, "WordLevel"),
        (40, 6, "WordLevel"),
        (5, 5, "WordLevel"),
    ],
)
def test_tokenizer_has_the_sizes_of_the_config(
    beta_config: dict[str, Any], vocab: int, keys: int, kind: str
) -> None:
    raw = changed(
        beta_config, vocab_size=vocab, engram_compressed_vocab_size=keys,
        engram_pad_token_id=3, dspark_noise_token_id=4,
    )  # fmt: skip
    raw |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "image_token_id": 3}
    files = synthetic_tokenizer(ModelConfig.from_dict(raw))
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    assert tokenizer.get_vocab_size() == vocab
    assert sorted(tokenizer.get_vocab().values()) == list(range(vocab))
    assert len(set(token_map(tokenizer))) == keys
    assert json.loads(tokenizer.to_str())["model"]["type"] == kind


@pytest.mark.parametrize("keys", [5, 0, 321])
def test_unreachable_sizes_are_refused_with_the_range(
    beta_config: dict[str, Any], keys: int
) -> None:
    raw = changed(beta_config, engram_compressed_vocab_size=keys)
    with pytest.raises(ConfigError) as caught:
        synthetic_tokenizer(ModelConfig.from_dict(raw))
    if keys == 5:  # the others are no config at all
        assert "found 5, expected 6 to 320" in str(caught.value)


def test_special_tokens_stand_where_the_config_says(beta_config: dict[str, Any]) -> None:
    files = synthetic_tokenizer(ModelConfig.from_dict(beta_config))
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    settings = json.loads(files["tokenizer_config.json"])
    for key in ("bos", "eos", "pad"):
        assert tokenizer.token_to_id(settings[f"{key}_token"]) == beta_config[f"{key}_token_id"]
    assert tokenizer.token_to_id("<｜System｜>") == 319
    assert tokenizer.token_to_id("<｜image｜>") == 318
    for content in ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"):
        assert tokenizer.encode(content).tokens == [content]
    pad = beta_config["text_config"]["engram_pad_token_id"]
    assert token_map(tokenizer)[pad] != pad  # raw and compressed pad differ in this config


def test_any_text_survives_the_tokenizer(beta_config: dict[str, Any]) -> None:
    files = synthetic_tokenizer(ModelConfig.from_dict(beta_config))
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    for text in ("The other Thing\n\n  a\tb", "日本語 é ß 🙂", "\x00\x7f", "<think>no</think>"):
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_packaged_sizes_are_reachable(golden_checkpoint: Path) -> None:
    config = json.loads((golden_checkpoint / "config.json").read_text())
    files = synthetic_tokenizer(ModelConfig.from_dict(config))
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    assert (tokenizer.get_vocab_size(), len(set(token_map(tokenizer)))) == (288, 237)


@pytest.mark.slow
def test_released_sizes_are_reachable(real_config_file: Path) -> None:
    config = ModelConfig.from_dict(json.loads(real_config_file.read_text()))
    tokenizer = Tokenizer.from_str(synthetic_tokenizer(config)["tokenizer.json"].decode())
    assert (tokenizer.get_vocab_size(), len(set(token_map(tokenizer)))) == (129280, 99092)


# The weights


@pytest.fixture(scope="module")
def beta_folder(beta_config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic(beta_config, 11, tmp_path_factory.mktemp("synth") / "beta")


def test_checkpoint_is_complete_and_finite(beta_folder: Path) -> None:
    assert find_nonfinite(Checkpoint.open(beta_folder)) == []


def test_shards_are_as_scattered_as_released_ones(beta_folder: Path) -> None:
    tensors = Checkpoint.open(beta_folder).tensors
    assert len({t.path for t in tensors.values()}) >= 3
    expert = "layers.0.ffn.experts.0"
    assert tensors[f"{expert}.w1.weight"].path != tensors[f"{expert}.w3.weight"].path
    table = "layers.2.engram.embed"
    assert tensors[f"{table}.weight"].path == tensors[f"{table}.scale"].path


def test_same_seed_same_bytes(
    tiny_config: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    again = write_synthetic(tiny_config, 7, tmp_path / "again")
    other = write_synthetic(tiny_config, 8, tmp_path / "other")
    for file in tiny_folder.iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes()
    shard = next(tiny_folder.glob("*.safetensors")).name
    assert (other / shard).read_bytes() != (again / shard).read_bytes()


@pytest.mark.parametrize("numerics", ["noq", "official"])
def test_activations_stay_finite(beta_folder: Path, numerics: Any) -> None:
    checkpoint = Checkpoint.open(beta_folder)
    tokenizer = Tokenizer.from_file(str(beta_folder / "tokenizer.json"))
    weights = TensorSource(checkpoint).as_dict()
    model = ReferenceModel(checkpoint.config, weights, token_map(tokenizer), numerics)
    ids = torch.arange(60) * 7 % checkpoint.config.vocab_size
    trace: dict[str, torch.Tensor] = {}
    logits = model.forward(ids, trace=trace)
    assert logits.isfinite().all()
    assert 0.5 < float(logits.std()) < 10
    assert float(trace["stream_out"].float().std()) < 100


def test_config_is_marked_native(beta_config: dict[str, Any], tmp_path: Path) -> None:
    raw = {k: v for k, v in beta_config.items() if k != "tokenizer_compatibility"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    folder = write_synthetic(tmp_path / "config.json", 0, tmp_path / "out")
    assert Checkpoint.open(folder).config.tokenizer_compatibility == "native"


def test_no_silent_overwriting(tiny_config: dict[str, Any], tmp_path: Path) -> None:
    write_synthetic(tiny_config, 0, tmp_path)
    with pytest.raises(CheckpointError, match="holds a checkpoint already"):
        write_synthetic(tiny_config, 0, tmp_path)
    write_synthetic(tiny_config, 1, tmp_path, overwrite=True)


def test_bad_config_writes_nothing(tmp_path: Path, beta_config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="not supported"):
        write_synthetic(changed(beta_config, head_dim=100), 0, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_negative_seed(tiny_config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found -1, expected an integer >= 0"):
        write_synthetic(tiny_config, -1, tmp_path / "x")


def test_text_only_models_without_drafts_or_engram(
    tiny_config: dict[str, Any], tmp_path: Path
) -> None:
    raw = changed(tiny_config, num_nextn_predict_layers=0, engram_layer_ids=[],
                  engram_num_embeddings=[], compress_ratios=[0, 2, 1])  # fmt: skip
    del raw["vision_config"]
    names = Checkpoint.open(write_synthetic(raw, 0, tmp_path)).tensors
    assert not any(n.startswith(("mtp.", "vision.", "image_")) or "engram" in n for n in names)


def test_writing_needs_no_torch(tmp_path: Path, tiny_config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config))
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from deepinfer.weights.synth import write_synthetic\n"
        f"write_synthetic({str(tmp_path)!r}, 1, {str(tmp_path / 'out')!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
