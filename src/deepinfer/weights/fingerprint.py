"""A short digest of a checkpoint: whether two folders hold the same weights (no torch)."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

from deepinfer.config.load import cache_dir
from deepinfer.weights.reader import Checkpoint

__all__ = ["weights_digest"]

_KEPT_FROM: Final = 1 << 28
"""Digests of fewer bytes than this are quicker made anew than looked up safely."""

_RUN: Final = 1 << 26
_THREADS: Final = 8


def weights_digest(checkpoint: Checkpoint) -> str:
    """Return 16 hex digits over every tensor's name, format, shape and all bytes.

    The order and number of files do not matter. Several threads read; above 256 MiB the digest is
    kept in the cache folder, under the places, sizes and times of change of all shards, so that it
    is made once for a checkpoint that stays as it is.
    """
    total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    if total < _KEPT_FROM:
        return _whole(checkpoint)
    kept = cache_dir() / "weights" / f"{_identity(checkpoint)}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        told = json.loads(kept.read_text(encoding="utf-8"))["digest"]
        if len(bytes.fromhex(told)) == 8:
            return str(told)
    digest = _whole(checkpoint)
    with suppress(OSError):  # a read-only home only costs the time
        kept.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{kept.name}.", dir=kept.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                json.dump({"folder": str(checkpoint.folder), "digest": digest}, out)
            Path(name).replace(kept)
        finally:
            Path(name).unlink(missing_ok=True)
    return digest


def _whole(checkpoint: Checkpoint) -> str:
    """Digest runs of 64 MiB each for itself, then all of their digests in order."""
    names = sorted(checkpoint.tensors)
    for name in names:
        checkpoint.bytes(name)  # maps every shard, before threads share them
    runs = [
        (name, start)
        for name in names
        for start in range(0, max(checkpoint.tensors[name].nbytes, 1), _RUN)
    ]

    def of_run(run: tuple[str, int]) -> bytes:
        name, start = run
        data = checkpoint.bytes(name)[start : start + _RUN]
        return hashlib.blake2b(data.data, digest_size=16).digest()

    digest = hashlib.blake2b(digest_size=8)
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        for (name, start), part in zip(runs, pool.map(of_run, runs), strict=True):
            if start == 0:
                tensor = checkpoint.tensors[name]
                digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
            digest.update(part)
    return digest.hexdigest()


def _identity(checkpoint: Checkpoint) -> str:
    """Digest what changes when a shard is written to or put in another's place."""
    files: Sequence[Path] = sorted({tensor.path for tensor in checkpoint.tensors.values()})
    told = []
    for file in files:
        at = file.resolve()
        stat = at.stat()
        told.append((str(at), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino))
    text = json.dumps(["deepinfer-weights-1", told])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
