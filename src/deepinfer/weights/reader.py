"""Opening a checkpoint folder: complete, exact and undamaged, or one error that names it all.

`Checkpoint.open` reads the config, the index and the header of every shard and compares them with
the layout before any compute; no tensor data is touched. Then it hands out views of the mapped
bytes. numpy only, so that `inspect` needs no torch; `load.py` makes torch tensors of them.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deepinfer.config.load import load_model_config
from deepinfer.config.model import ModelConfig
from deepinfer.errors import CheckpointError
from deepinfer.weights.layout import (
    TensorSpec,
    canonical_name,
    expected_tensors,
    is_ignored,
    is_unfolded_norm,
)
from deepinfer.weights.shards import (
    JsonObject,
    MappedFile,
    StoredTensor,
    parse_object,
    read_header,
)
from deepinfer.weights.writer import INDEX_NAME

__all__ = ["Checkpoint", "StoredTensor"]

_SINGLE_NAME: Final = "model.safetensors"
_SHOWN: Final = 3
_NUMPY: Final[Mapping[str, type[np.generic]]] = {
    "F32": np.float32,
    "BF16": np.uint16,
    "F8_E4M3": np.uint8,
    "F8_E8M0": np.uint8,
    "I8": np.uint8,
}


class Checkpoint:
    """A checked checkpoint, its tensors mapped.

    folder   where it lies
    config   its model config
    specs    what the config implies, by name
    tensors  where each of them is stored, by the same names
    """

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        specs: Mapping[str, TensorSpec],
        tensors: Mapping[str, StoredTensor],
    ) -> None:
        self.folder = folder
        self.config = config
        self.specs = specs
        self.tensors = tensors
        self._files: dict[Path, MappedFile] = {}

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Checkpoint:
        """Read and check a folder with config, weights and, for several shards, an index.

        Raises CheckpointError with every problem of the weights, ConfigError with every problem of
        the config.
        """
        path = Path(folder).expanduser()
        if not path.is_dir():
            what = "is a file" if path.exists() else "does not exist"
            raise CheckpointError(f"{path} {what}; expected a checkpoint folder")
        config = load_model_config(path)
        inventory = _Inventory(path)
        specs = expected_tensors(config)
        tensors = inventory.match(specs, config)
        if inventory.problems:
            raise CheckpointError(
                f"{path} holds no complete and sound checkpoint", inventory.problems
            )
        return cls(path, config, specs, tensors)

    def bytes(self, name: str) -> NDArray[np.uint8]:
        """Return the stored bytes of a tensor: a read-only view of the mapped file, 1-D."""
        tensor = self.tensors[name]
        return self.mapped(tensor.path).data[tensor.offset : tensor.offset + tensor.nbytes]

    def array(self, name: str) -> NDArray[np.generic]:
        """Return a tensor in its stored shape: F32 as such, BF16 as uint16, the others as uint8.

        A view where the file's alignment allows, which it does for our own files.
        """
        tensor, data = self.tensors[name], self.bytes(name)
        dtype = np.dtype(_NUMPY[tensor.dtype])
        if tensor.offset % dtype.itemsize:
            data = data.copy()
        return data.view(dtype).reshape(tensor.shape)

    def mapped(self, path: Path) -> MappedFile:
        """Return a shard's mapping, made on first use."""
        if path not in self._files:
            self._files[path] = MappedFile(path)
        return self._files[path]

    def release(self, name: str) -> None:
        """Drop a tensor's pages from memory; the next touch reads them again."""
        tensor = self.tensors[name]
        if tensor.path in self._files:
            self._files[tensor.path].release(tensor.offset, tensor.nbytes)


class _Inventory:
    """What the files of a folder hold, and everything that is wrong with them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[str] = []
        # stored name -> shard file name, as the index says; None without a usable index
        self._index = self._read_index()
        self._broken: set[str] = set()
        self._stored: dict[str, StoredTensor] = {}
        self._read_shards()

    def _read_index(self) -> dict[str, str] | None:
        """Return the weight map, None when there is a single file or no usable index."""
        file = self.folder / INDEX_NAME
        if not file.exists():
            return None
        try:
            raw = parse_object(file.read_bytes())
        except OSError as error:
            self.problems.append(f"cannot read {INDEX_NAME}: {error.strerror or error}")
            return None
        if raw is None:
            self.problems.append(f"{INDEX_NAME} is no JSON object")
            return None
        weight_map = raw.get("weight_map")
        if not isinstance(weight_map, JsonObject):
            self.problems.append(f"{INDEX_NAME} has no object weight_map")
            return None
        self._tell(f"{INDEX_NAME} names twice", weight_map.repeated)
        bad = [n for n, shard in weight_map.items() if not _is_file_name(shard)]
        self._tell(f"{INDEX_NAME} gives no plain file name for", bad)
        return {n: str(shard) for n, shard in weight_map.items() if _is_file_name(shard)}

    def _read_shards(self) -> None:
        """Read the headers of all shards; compare them with the index where there is one."""
        shards = self._shard_names()
        homes: defaultdict[str, list[str]] = defaultdict(list)
        for shard in shards:
            path = self.folder / shard
            if not path.is_file():
                assert self._index is not None
                count = sum(1 for home in self._index.values() if home == shard)
                self.problems.append(f"{shard} is missing; the index puts {count} tensors into it")
                self._broken.add(shard)
                continue
            tensors, problems = read_header(path)
            if problems:
                self.problems += problems
                self._broken.add(shard)
            for name, tensor in tensors.items():
                homes[name].append(shard)
                self._stored[name] = tensor
        twice = [name for name, files in homes.items() if len(files) > 1]
        self._tell("stored in more than one shard", twice)
        if self._index is not None:
            self._compare_index(self._index, homes)

    def _shard_names(self) -> list[str]:
        """Return the shards to read: those of the index, the single file, or all that are there."""
        if self._index is not None:
            return sorted(set(self._index.values()))
        if not self.problems and (self.folder / _SINGLE_NAME).is_file():
            return [_SINGLE_NAME]
        present = sorted(file.name for file in self.folder.glob("*.safetensors"))
        if not self.problems:
            if present:
                self.problems.append(
                    f"{INDEX_NAME} is missing, although there are {len(present)} shards"
                )
            else:
                raise CheckpointError(
                    f"{self.folder} holds no weights: neither {INDEX_NAME} nor {_SINGLE_NAME}"
                )
        return present

    def _compare_index(self, index: Mapping[str, str], homes: Mapping[str, list[str]]) -> None:
        """Note names that the index places where they are not, and names that it does not know."""
        absent = [
            f"{name} ({shard})"
            for name, shard in index.items()
            if shard not in self._broken and shard not in homes.get(name, ())
        ]
        self._tell("in the index but not in its shard", absent)
        unlisted = [n for n in homes if n not in index and not is_ignored(canonical_name(n))]
        self._tell("in a shard but not in the index", unlisted)

    def match(
        self, specs: Mapping[str, TensorSpec], config: ModelConfig
    ) -> dict[str, StoredTensor]:
        """Return the stored tensors under the layout's names; note all that differs."""
        found: dict[str, StoredTensor] = {}
        both: list[str] = []
        for name, tensor in self._stored.items():
            plain = canonical_name(name)
            if plain in found:
                both.append(plain)
            found[plain] = tensor
        self._tell("stored with and without the prefix model.", both)
        # What a broken or missing shard should hold is not missing a second time.
        excused = {canonical_name(n) for n, s in (self._index or {}).items() if s in self._broken}
        if self._index is None and self._broken:
            excused = set(specs)
        self._compare(specs, found, excused, config)
        return {name: found[name] for name in specs if name in found}

    def _compare(
        self,
        specs: Mapping[str, TensorSpec],
        found: Mapping[str, StoredTensor],
        excused: set[str],
        config: ModelConfig,
    ) -> None:
        """Note missing, unexpected, mistyped and misshaped tensors and absent scales."""
        missing: list[str] = []
        unscaled: list[str] = []
        types: list[str] = []
        shapes: list[str] = []
        for name, spec in specs.items():
            tensor = found.get(name)
            if tensor is None:
                if name not in excused:
                    (unscaled if spec.scale_of in found else missing).append(name)
                continue
            if tensor.dtype != spec.dtype:
                types.append(f"{name} (found {tensor.dtype}, expected {spec.dtype})")
            if tensor.shape != spec.shape:
                shapes.append(f"{name} (found {list(tensor.shape)}, expected {list(spec.shape)})")
        others = [name for name in found if name not in specs and not is_ignored(name)]
        folded = [name for name in others if is_unfolded_norm(name)]
        images = re.compile(r"vision\.|aligner\.|image_")
        vision = [n for n in others if config.vision is None and images.match(n)]
        rest = set(others) - set(folded) - set(vision)
        self._tell("missing", missing)
        self._tell("without its scale", unscaled)
        self._tell("of another type", types)
        self._tell("of another shape", shapes)
        self._tell("not folded into its hc_*_fn, convert the checkpoint again", folded)
        self._tell("unexpected, as the config has no vision tower", vision)
        self._tell("unexpected", sorted(rest, key=_natural))

    def _tell(self, what: str, items: Iterable[str]) -> None:
        """Note the items, one line for all whose names differ in layer and expert only."""
        groups: defaultdict[str, list[str]] = defaultdict(list)
        for item in items:
            groups[re.sub(r"\.\d+\.", ".*.", item.partition(" (")[0])].append(item)
        for members in groups.values():
            shown = ", ".join(members[:_SHOWN])
            more = f" and {len(members) - _SHOWN} more" if len(members) > _SHOWN else ""
            self.problems.append(f"{what}: {shown}{more}")


def _is_file_name(value: object) -> bool:
    """Tell whether a value names a file in the folder itself."""
    return isinstance(value, str) and value not in ("", ".", "..") and Path(value).name == value


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key under which layer 10 comes after layer 9."""
    return [(int(p), "") if p.isdigit() else (-1, p) for p in re.split(r"(\d+)", name)]
