"""Random checkpoints of any dims whose activations stay finite (numpy only).

Values depend on the seed and the tensor's name alone. Stored codes are drawn directly; scales and
plain weights are sized so that every projection keeps about unit variance. Source: weights
specification, 9.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deepinfer.config.load import read_json
from deepinfer.config.model import ModelConfig
from deepinfer.errors import ConfigError
from deepinfer.weights.layout import TensorSpec, expected_tensors
from deepinfer.weights.synth_tokenizer import synthetic_tokenizer
from deepinfer.weights.writer import plan_shards, write_checkpoint

__all__ = ["write_synthetic"]

_CHUNK_BYTES: Final = 1 << 23
_MAX_SHARD_BYTES: Final = 4 << 30
_MIN_SHARDS: Final = 3
# Root mean squares of uniformly drawn codes times those of the scales' spread, in powers of two.
_SPREAD: Final = {"F8_E4M3": 1, "I8": 2}
_RMS: Final = {"F8_E4M3": 100.0 * 1.3, "I8": 2.9 * 2.1}


@dataclass(frozen=True, slots=True)
class _Normal:
    """A normal distribution; with `per_input` its spread is divided by the root of the inputs."""

    pattern: str
    mean: float
    std: float
    per_input: bool = False


# The first pattern found in the name decides.
_RULES: Final = (
    _Normal(r"norm\d?\.weight$", 1.0, 0.1),
    _Normal(r"engram\.[qk]_weight$", 1.0, 0.25),
    _Normal(r"attn_sink$", 0.0, 1.0),
    _Normal(r"gate\.bias(_vl)?$", 0.0, 0.1),
    _Normal(r"hc_\w+_base$", 0.0, 0.5),
    _Normal(r"hc_\w+_scale$", 1.0, 0.2),
    _Normal(r"hc_\w+_fn$", 0.0, 0.5, per_input=True),
    _Normal(r"^image_|embed\.weight$", 0.0, 1.0),
    _Normal(r"^head\.weight$", 0.0, 2.5, per_input=True),
    _Normal(r"\.bias$", 0.0, 0.02),
    _Normal(r"", 0.0, 1.0, per_input=True),
)


def write_synthetic(
    config: Mapping[str, object] | str | os.PathLike[str],
    seed: int,
    out_dir: str | os.PathLike[str],
    overwrite: bool = False,
) -> Path:
    """Write a random checkpoint with its tokenizer and return its folder.

    config   the content of a `config.json`, its path, or the folder that holds it
    seed     the same seed, config and numpy give the same bytes
    The written config says `tokenizer_compatibility: native`: the tokenizer is not the release's.
    Raises ConfigError for an unsupported config or a negative seed, and CheckpointError when
    writing fails.
    """
    if seed < 0:
        raise ConfigError(f"seed: found {seed}, expected an integer >= 0")
    raw = dict(config) if isinstance(config, Mapping) else read_json(_config_file(config))
    raw["tokenizer_compatibility"] = "native"
    model = ModelConfig.from_dict(raw)
    tokenizer = synthetic_tokenizer(model)
    specs = expected_tensors(model)

    def chunks(spec: TensorSpec) -> Iterator[NDArray[np.uint8]]:
        scaled = specs[spec.scale_of] if spec.scale_of is not None else None
        return _draw(spec, scaled, seed)

    shards = _plan(list(specs.values()))
    return write_checkpoint(out_dir, shards, chunks, raw, tokenizer, overwrite)


def _config_file(path: str | os.PathLike[str]) -> Path:
    file = Path(path).expanduser()
    return file / "config.json" if file.is_dir() else file


def _plan(specs: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    """Spread the tensors over three or more shards; the halves of one expert lie in two of them."""
    moved = [s for s in specs if s.name.startswith("layers.0.ffn.experts.0.w3.")]
    rest = [s for s in specs if s not in moved]
    total = sum(s.nbytes for s in rest)
    shards = plan_shards(rest, min(-(-total // _MIN_SHARDS), _MAX_SHARD_BYTES))
    holds_w1 = any(s.name.startswith("layers.0.ffn.experts.0.w1.") for s in shards[-1])
    if len(shards) < _MIN_SHARDS or holds_w1:
        shards.append([])
    shards[-1].extend(moved)
    return shards


def _draw(spec: TensorSpec, scaled: TensorSpec | None, seed: int) -> Iterator[NDArray[np.uint8]]:
    """Yield the stored bytes of one tensor; `scaled` is the weight that a scale belongs to."""
    digest = hashlib.sha256(spec.name.encode()).digest()
    entropy = [seed, *np.frombuffer(digest, np.uint32).tolist()]
    random = np.random.Generator(np.random.SFC64(np.random.SeedSequence(entropy)))
    size = math.prod(spec.shape)
    step = _CHUNK_BYTES // 4
    for begin in range(0, size, step):
        count = min(step, size - begin)
        if scaled is not None:
            low, high = _scale_range(spec, scaled)
            yield random.integers(low, high + 1, count, dtype=np.uint8)
        elif spec.dtype in _RMS:
            yield _codes(random, count, spec.dtype)
        else:
            yield _normal(random, count, spec)


def _scale_range(spec: TensorSpec, scaled: TensorSpec) -> tuple[int, int]:
    """Return the smallest and largest exponent byte of a tensor of scales."""
    if spec.shard == "rows":
        return 116, 123
    inputs = spec.shape[1] * 32
    centre = 127 - round(math.log2(_RMS[scaled.dtype] * math.sqrt(inputs)))
    spread = _SPREAD[scaled.dtype]
    return centre - spread, centre + spread


def _codes(random: np.random.Generator, count: int, dtype: str) -> NDArray[np.uint8]:
    """Draw stored codes uniformly; the NaN codes of e4m3 become the largest finite ones."""
    raw: NDArray[np.uint64] = random.bit_generator.random_raw(-(-count // 8))
    codes = raw.view(np.uint8)[:count]
    if dtype == "F8_E4M3":
        codes -= (codes & 0x7F) == 0x7F
    return codes


def _normal(random: np.random.Generator, count: int, spec: TensorSpec) -> NDArray[np.uint8]:
    """Draw a plain weight and round it to its stored type."""
    rule = next(r for r in _RULES if re.search(r.pattern, spec.name))
    std = rule.std / math.sqrt(spec.shape[-1]) if rule.per_input else rule.std
    values = random.standard_normal(count, dtype=np.float32)
    values *= np.float32(std)
    values += np.float32(rule.mean)
    if spec.dtype == "F32":
        return values.view(np.uint8)
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return rounded.astype(np.uint16).view(np.uint8)
