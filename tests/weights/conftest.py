"""A small random checkpoint, and a way to damage copies of it."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deepinfer.weights.synth import write_synthetic

INDEX = "model.safetensors.index.json"


@dataclass
class Tensor:
    """One tensor of a shard, open to any change."""

    dtype: str
    shape: list[int]
    data: bytes


class Folder:
    """A checkpoint folder whose shards can be taken apart and put together again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shards = {file.name: self._read(file) for file in sorted(path.glob("*.safetensors"))}

    @staticmethod
    def _read(file: Path) -> dict[str, Tensor]:
        raw = file.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header: dict[str, Any] = json.loads(raw[8 : 8 + length])
        header.pop("__metadata__", None)
        data = raw[8 + length :]
        return {n: Tensor(e["dtype"], e["shape"], data[slice(*e["data_offsets"])])
                for n, e in header.items()}  # fmt: skip

    def home(self, name: str) -> dict[str, Tensor]:
        """Return the shard that holds a tensor."""
        return next(tensors for tensors in self.shards.values() if name in tensors)

    def write(self, with_index: bool = True) -> Path:
        """Write the shards, and the index that fits them."""
        for shard, tensors in self.shards.items():
            header, end = {}, 0
            for name, tensor in tensors.items():
                ends = [end, end := end + len(tensor.data)]
                header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": ends}
            text = json.dumps(header).encode()
            data = b"".join(t.data for t in tensors.values())
            (self.path / shard).write_bytes(struct.pack("<Q", len(text)) + text + data)
        if with_index:
            weight_map = {n: shard for shard, tensors in self.shards.items() for n in tensors}
            self.write_index({"weight_map": weight_map})
        return self.path

    def write_index(self, index: object) -> None:
        """Write an index of any content."""
        (self.path / INDEX).write_text(json.dumps(index))

    def index(self) -> dict[str, str]:
        """Return the weight map on the disk."""
        result: dict[str, str] = json.loads((self.path / INDEX).read_text())["weight_map"]
        return result


@pytest.fixture(scope="session")
def beta_config() -> dict[str, Any]:
    """The content of the second small config; take a deep copy before changing it."""
    file = Path(__file__).parents[1] / "data" / "beta" / "config.json"
    config: dict[str, Any] = json.loads(file.read_text())
    return config


@pytest.fixture(scope="session")
def tiny_config(beta_config: dict[str, Any]) -> dict[str, Any]:
    """A config with every kind of tensor and little data."""
    config: dict[str, Any] = json.loads(json.dumps(beta_config))
    config["text_config"] |= {
        "num_hidden_layers": 3,
        "compress_ratios": [0, 2, 1, 0],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2],
        "candidate_source_layer_id": 2,
        "engram_layer_ids": [1],
        "num_nextn_predict_layers": 1,
        "dspark_target_layer_ids": [1, 2],
        "hidden_size": 32,
        "moe_intermediate_size": 32,
        "q_lora_rank": 32,
    }
    config["vision_config"] = {
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "patch_size": 2,
        "rope_theta": 10000,
        "downsample_ratio": 2,
        "max_image_tokens": 64,
        "min_pixels": 64,
        "max_wh_ratio": None,
    }
    return config


@pytest.fixture(scope="session")
def tiny_folder(tiny_config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the tiny config; not to be changed."""
    return write_synthetic(tiny_config, 7, tmp_path_factory.mktemp("weights") / "tiny")


@pytest.fixture
def damaged(tiny_folder: Path, tmp_path: Path) -> Callable[[], Folder]:
    """Copies of the tiny checkpoint, to be damaged."""
    count = iter(range(100))

    def make() -> Folder:
        return Folder(Path(shutil.copytree(tiny_folder, tmp_path / f"copy{next(count)}")))

    return make
