"""One safetensors file: its header parsed and checked, its bytes mapped (numpy only).

Nothing here knows our model; `reader.py` compares what the shards hold with what the config
implies. Problems are returned, not raised, so that those of all shards can be told together.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["JsonObject", "MappedFile", "StoredTensor", "parse_object", "read_header"]

_MAX_HEADER_BYTES: Final = 100_000_000
_METADATA: Final = "__metadata__"
# A touched page brings its aligned neighbourhood of this size into the map.
_READ_AHEAD_BYTES: Final = 1 << 16
# Every type of the format that fills whole bytes; which ones are ours is the layout's business.
_ITEM_BYTES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies: type, shape, and its bytes [offset, offset + nbytes) of a file."""

    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int


def read_header(path: Path) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return the tensors of a safetensors file and what is wrong with it.

    Reads the header alone. Tensors whose own entry is bad are left out.
    """
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            if len(prefix) < 8:
                return {}, [f"{path.name} is no safetensors file: it has {size} bytes only"]
            (length,) = struct.unpack("<Q", prefix)
            if length > size - 8:
                return {}, [
                    f"{path.name}: its header length is {length}, but {size - 8} bytes follow; the "
                    f"file is damaged or truncated"
                ]
            if length > _MAX_HEADER_BYTES:
                return {}, [
                    f"{path.name}: its header length is {length}, expected at most "
                    f"{_MAX_HEADER_BYTES}"
                ]
            text = stream.read(length)
    except OSError as error:
        return {}, [f"cannot read {path.name}: {error.strerror or error}"]
    header = parse_object(text)
    if header is None:
        return {}, [
            f"{path.name}: the {length} bytes of its header are no JSON object; the header or its "
            f"length is damaged"
        ]
    return _read_entries(path, header, 8 + length, size)


def parse_object(text: bytes) -> JsonObject | None:
    """Return the JSON object that a text is, None when it is none."""
    try:
        value: object = json.loads(text, object_pairs_hook=JsonObject)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, JsonObject) else None


class JsonObject(dict[str, object]):
    """A JSON object that remembers which keys came more than once."""

    def __init__(self, pairs: Sequence[tuple[str, object]]) -> None:
        super().__init__(pairs)
        self.repeated: list[str] = []
        if len(self) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    self.repeated.append(key)
                seen.add(key)


def _read_entries(
    path: Path, header: JsonObject, start: int, size: int
) -> tuple[dict[str, StoredTensor], list[str]]:
    """Check every entry of a header, then that their bytes fill the file exactly."""
    problems = [f"{path.name} holds {name} twice" for name in header.repeated]
    tensors: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        if name == _METADATA:
            continue
        found = _read_entry(path, entry, start)
        if isinstance(found, str):
            problems.append(f"{path.name}: {name} {found}")
        else:
            tensors[name] = found
    if not problems:
        problems = _check_ranges(path, tensors, start, size)
    return tensors, problems


def _read_entry(path: Path, entry: object, start: int) -> StoredTensor | str:
    """Return a header entry, or what is wrong with it."""
    if not isinstance(entry, dict):
        return "has no object for its entry"
    dtype, dims = entry.get("dtype"), _sizes(entry.get("shape"))
    ends = _sizes(entry.get("data_offsets"))
    if not isinstance(dtype, str):
        return "has no dtype"
    if dims is None:
        return "has no list of sizes for its shape"
    if ends is None or len(ends) != 2 or ends[0] > ends[1]:
        return "has no ascending pair for its data_offsets"
    begin, end = ends
    if dtype in _ITEM_BYTES:
        expected = math.prod(dims) * _ITEM_BYTES[dtype]
        if expected != end - begin:
            return f"takes {end - begin} bytes, but {dtype} {list(dims)} needs {expected}"
    return StoredTensor(dtype, dims, path, start + begin, end - begin)


def _sizes(value: object) -> tuple[int, ...] | None:
    """Return a list of integers >= 0 as a tuple, None when it is none."""
    if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)
    return None


def _check_ranges(
    path: Path, tensors: Mapping[str, StoredTensor], start: int, size: int
) -> list[str]:
    """Return what is wrong with how the tensors share out the bytes behind the header."""
    problems: list[str] = []
    position, previous = start, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset < position:
            problems.append(f"{path.name}: the bytes of {name} overlap those of {previous}")
        elif tensor.offset > position:
            gap = tensor.offset - position
            problems.append(f"{path.name}: {gap} bytes in front of {name} belong to no tensor")
        position, previous = max(position, tensor.offset + tensor.nbytes), name
    if position > size:
        cut = [n for n, t in tensors.items() if t.offset + t.nbytes > size]
        problems.append(
            f"{path.name} is truncated: it has {size} bytes, its header needs {position}; "
            f"{len(cut)} tensors are cut off, among them {cut[0]}"
        )
    elif position < size:
        problems.append(
            f"{path.name} has {size - position} bytes more than its header describes; the file or "
            f"its header length is damaged"
        )
    return problems


class MappedFile:
    """A file mapped read-only; pages come in when they are touched."""

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as stream:
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self.data: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)

    def release(self, offset: int, nbytes: int) -> None:
        """Drop the pages of a range, and those read ahead beside it, from memory.

        The next touch reads them again.
        """
        begin = offset - offset % _READ_AHEAD_BYTES
        end = min(offset + nbytes + _READ_AHEAD_BYTES, self.data.size)
        if nbytes and hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)
