"""The digest of a checkpoint's weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from deepinfer.weights import fingerprint
from deepinfer.weights.fingerprint import weights_digest
from deepinfer.weights.reader import Checkpoint


@pytest.mark.parametrize("whole", [True, False])
def test_it_follows_the_bytes(
    golden_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    if not whole:
        monkeypatch.setattr(fingerprint, "_READ_WHOLE", 0)
    before = weights_digest(Checkpoint.open(golden_checkpoint))
    folder = tmp_path / "copy"
    shutil.copytree(golden_checkpoint, folder)
    assert weights_digest(Checkpoint.open(folder)) == before and len(before) == 16
    checkpoint = Checkpoint.open(folder)
    tensor = checkpoint.tensors["norm.weight"]
    file = tensor.path
    data = bytearray(file.read_bytes())
    data[tensor.offset] ^= 1
    file.chmod(0o644)
    file.write_bytes(bytes(data))
    assert weights_digest(Checkpoint.open(folder)) != before
