"""Writing a checkpoint folder: safetensors shards, index and config, streamed (numpy only).

Everything is written under temporary names first; then shards, side files, index and config get
their names in this order, so that a folder never looks like a checkpoint that it does not hold.
What the tensors contain is decided elsewhere (`export.py`, `synth.py`).
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import CheckpointError
from deepinfer.weights.layout import DTYPE_BYTES, TensorSpec

__all__ = ["CONFIG_NAME", "INDEX_NAME", "ChunkSource", "plan_shards", "write_checkpoint"]

# Yields the stored bytes of one tensor in order; any number of pieces.
ChunkSource = Callable[[TensorSpec], Iterable[NDArray[np.uint8]]]

CONFIG_NAME: Final = "config.json"
INDEX_NAME: Final = "model.safetensors.index.json"
_SHARD: Final = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_ALIGNMENT: Final = 8
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def plan_shards(specs: Iterable[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    """Cut tensors into shards of at most `max_bytes` in the given order.

    A weight and its scale, neighbours in a layout, stay together; what is larger than a shard alone
    gets one of its own.
    """
    units: list[list[TensorSpec]] = []
    for spec in specs:
        if spec.scale_of is not None and units and units[-1][0].name == spec.scale_of:
            units[-1].append(spec)
        else:
            units.append([spec])
    shards: list[list[TensorSpec]] = []
    filled = max_bytes
    for unit in units:
        nbytes = sum(spec.nbytes for spec in unit)
        if filled + nbytes > max_bytes or not shards:
            shards.append([])
            filled = 0
        shards[-1].extend(unit)
        filled += nbytes
    return shards


def write_checkpoint(
    folder: str | os.PathLike[str],
    shards: Sequence[Sequence[TensorSpec]],
    chunks: ChunkSource,
    config: Mapping[str, object],
    side_files: Mapping[str, bytes] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a checkpoint and return its folder.

    shards      the tensors of each shard; inside it wider types come first, so that all are aligned
    chunks      called once per tensor, in file order; one piece is held at a time
    config      becomes `config.json`
    side_files  further files by name, such as the tokenizer
    overwrite   replace a checkpoint that is already there
    Raises CheckpointError when the folder holds a checkpoint already or cannot be written; a folder
    that was there keeps its old content then, and nothing half-written is left.
    """
    path = Path(folder)
    if (path / CONFIG_NAME).exists() and not overwrite:
        raise CheckpointError(
            f"{path} holds a checkpoint already; choose another folder or ask to overwrite it"
        )
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    ordered = [sorted(shard, key=lambda s: -DTYPE_BYTES[s.dtype]) for shard in shards]
    total = sum(spec.nbytes for shard in shards for spec in shard)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {s.name: n for n, shard in zip(names, ordered, strict=True) for s in shard},
    }
    texts = dict(side_files or {})
    texts[INDEX_NAME] = _json_bytes(index, indent=1)
    texts[CONFIG_NAME] = _json_bytes(config, indent=2)
    with _Staging(path, total) as staging:
        for name, shard in zip(names, ordered, strict=True):
            with staging.file(name) as stream:
                _write_shard(stream, shard, chunks)
        for name, text in texts.items():
            with staging.file(name) as stream:
                stream.write(text)
        staging.publish()
    return path


def _json_bytes(value: Mapping[str, object], indent: int | None) -> bytes:
    return (json.dumps(value, indent=indent, ensure_ascii=False) + "\n").encode()


def _write_shard(stream: BinaryIO, shard: Sequence[TensorSpec], chunks: ChunkSource) -> None:
    """Write one safetensors file."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in shard:
        begin, end = end, end + spec.nbytes
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    stream.write(struct.pack("<Q", len(text)) + text)
    for spec in shard:
        written = 0
        for chunk in chunks(spec):
            stream.write(np.ascontiguousarray(chunk).data)
            written += chunk.nbytes
        assert written == spec.nbytes, (spec.name, written, spec.nbytes)


class _Staging:
    """A folder being written: files under temporary names until all of them are complete."""

    def __init__(self, folder: Path, total_bytes: int) -> None:
        self.folder = folder
        self.total_bytes = total_bytes
        self._names: list[str] = []
        self._made: list[Path] = []
        self._published: list[Path] = []

    def __enter__(self) -> _Staging:
        missing = [p for p in (self.folder, *self.folder.parents) if not p.exists()]
        with self._failing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._made = missing  # deepest first
        free = shutil.disk_usage(self.folder).free
        if free < self.total_bytes:
            self._clean()
            raise CheckpointError(
                f"not enough space at {self.folder}: the checkpoint needs {self.total_bytes:,} "
                f"bytes, {free:,} are free"
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._clean()

    @contextmanager
    def file(self, name: str) -> Iterator[BinaryIO]:
        """Open a new file under its temporary name; its bytes are on the disk afterwards."""
        path = self._temporary(name)
        self._names.append(name)
        with self._failing(path), open(path, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())

    def publish(self) -> None:
        """Give all files their names, in the order they were written; drop shards of before."""
        with self._failing(self.folder):
            for name in (CONFIG_NAME, INDEX_NAME):
                (self.folder / name).unlink(missing_ok=True)
            for name in self._names:
                target = self.folder / name
                os.replace(self._temporary(name), target)
                self._published.append(target)
            for old in self.folder.iterdir():
                if old.name not in self._names and _SHARD.fullmatch(old.name):
                    old.unlink()

    def _temporary(self, name: str) -> Path:
        return self.folder / f"{name}.partial"

    def _clean(self) -> None:
        """Remove what was written, and the folder where it was made for it."""
        for path in [*(self._temporary(name) for name in self._names), *self._published]:
            path.unlink(missing_ok=True)
        for made in self._made:
            try:
                made.rmdir()
            except OSError:
                return

    @contextmanager
    def _failing(self, path: Path) -> Iterator[None]:
        """Turn a failure of the file system into a CheckpointError."""
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                why = f"the disk is full; the checkpoint needs {self.total_bytes:,} bytes"
            else:
                why = error.strerror or str(error)
            raise CheckpointError(f"cannot write {path}: {why}; nothing was kept") from error
