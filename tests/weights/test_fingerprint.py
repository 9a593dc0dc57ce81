"""The digest of a checkpoint's weights."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from deepinfer.weights import fingerprint
from deepinfer.weights.fingerprint import weights_digest
from deepinfer.weights.reader import Checkpoint


@pytest.fixture
def copy(golden_checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint that may be changed."""
    folder = tmp_path / "copy"
    shutil.copytree(golden_checkpoint, folder)
    for file in folder.iterdir():
        file.chmod(0o644)
    return folder


def digest(folder: Path) -> str:
    return weights_digest(Checkpoint.open(folder))


def change(folder: Path, name: str, place: int) -> Path:
    """Turn one bit of a tensor, in the middle of its file."""
    tensor = Checkpoint.open(folder).tensors[name]
    with open(tensor.path, "r+b") as file:
        file.seek(tensor.offset + place % tensor.nbytes)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    return tensor.path


@pytest.mark.parametrize(("run", "kept"), [(1 << 26, False), (1000, False), (1 << 26, True)])
@pytest.mark.parametrize("place", [0, 9_999, -1])
def test_it_follows_every_byte(
    golden_checkpoint: Path,
    copy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: int,
    kept: bool,
    place: int,
) -> None:
    """The ends of a large tensor and its middle, whether or not digests are kept."""
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprint, "_RUN", run)
    if kept:
        monkeypatch.setattr(fingerprint, "_KEPT_FROM", 0)
    before = digest(golden_checkpoint)
    assert digest(copy) == before and len(before) == 16
    change(copy, "embed.weight", place)
    assert digest(copy) != before
    change(copy, "embed.weight", place)
    assert digest(copy) == before


def test_it_is_made_once(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files as they were are not read again; a kept digest that is damaged is not believed."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(cache))
    monkeypatch.setattr(fingerprint, "_KEPT_FROM", 0)
    before = digest(copy)
    (kept,) = (cache / "weights").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "_whole", lambda _: pytest.fail("read again"))
        assert digest(copy) == before
    for text in ("", "[]", "{}", '{"digest": 5}', '{"digest": "zz"}'):
        kept.write_text(text)
        assert digest(copy) == before
    file = change(copy, "norm.weight", 0)
    times = file.stat()
    after = digest(copy)
    assert after != before
    change(copy, "norm.weight", 0)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # told to look unchanged
    assert digest(copy) == before


def test_a_cache_that_cannot_be_written(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path / "file"))
    before = digest(copy)
    monkeypatch.setattr(fingerprint, "_KEPT_FROM", 0)
    assert digest(copy) == before
