"""A model of random weights, made on the device: real dimensions without a checkpoint.

For benchmarks and tests on cards. Scales are such that every product has about unit gain, so
activations stay finite at any depth.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from deepinfer.config import LayerConfig, ModelConfig
from deepinfer.config.engine import NumericsConfig
from deepinfer.config.engram import engram_primes
from deepinfer.device import pick_device
from deepinfer.kernels.expert_linear import Fp4Weight
from deepinfer.kernels.ops import Ops
from deepinfer.model.fast.model import FastModel, asked_ops, resolve_numerics
from deepinfer.model.fast.weights import BlockWeights, EngramWeights, Loader, MoeWeights
from deepinfer.weights.layout import TensorSpec, expected_tensors

__all__ = ["RandomLoader", "random_model", "random_weights", "shallow"]

_FP4_RMS: Final = 2.93  # of an e2m1 code drawn evenly
_DTYPES: Final = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "I8": torch.uint8,
}


def shallow(config: ModelConfig, keep: Sequence[int]) -> ModelConfig:
    """Return the config of a model with some of the backbone's layers, ascending ids.

    Sources among them stay sources; the last layers feed the drafts. `(1, 2, 3, 20, 21, 24)` of the
    released model has every kind of layer once or twice. Raises ConfigError when the layers do not
    make a model: each with compressed entries needs its source before it.
    """
    place = {layer_id: new for new, layer_id in enumerate(keep)}

    def kept(ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(place[i] for i in ids if i in place)

    source = config.candidate_source_layer_id
    engram = kept(config.engram_layer_ids)
    primes = (
        engram_primes(
            len(engram),
            config.engram_vocab_size,
            config.engram_max_ngram_size,
            config.engram_n_heads,
        )
        if engram
        else ()
    )
    taps = min(len(config.dspark_target_layer_ids), len(keep))
    has_source = source in place
    return dataclasses.replace(
        config,
        num_hidden_layers=len(keep),
        compress_ratios=(
            *(config.compress_ratios[i] for i in keep),
            *(0,) * config.num_nextn_predict_layers,
        ),
        kv_source_layer_ids=kept(config.kv_source_layer_ids),
        index_source_layer_ids=kept(config.index_source_layer_ids),
        index_k_source_layer_ids=kept(config.index_k_source_layer_ids),
        candidate_source_layer_id=place[source] if has_source and source is not None else None,
        engram_layer_ids=engram,
        engram_num_embeddings=tuple(sum(sum(group) for group in layer) for layer in primes),
        dspark_target_layer_ids=tuple(range(len(keep) - taps, len(keep))),
    )


class _NoFile:
    """Stands where a loader has its checkpoint."""

    def release(self) -> None:
        """Do nothing: nothing is mapped."""


class RandomLoader(Loader):
    """Makes weights instead of loading them; the same seed gives the same weights.

    experts      (first, count) of the backbone's routed experts that are made, None = all. A layer
                 of drafts gets the same share of its own. Routing still scores all of them, and a
                 choice falls to the expert `choice % count` (`moe.py`)
    engram_rows  most rows of an Engram table; a row is looked up modulo its height
    """

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        experts: tuple[int, int] | None = None,
        seed: int = 0,
        engram_rows: int = 1 << 20,
    ) -> None:
        self.source = _NoFile()  # type: ignore[assignment]  # nothing reads from it
        self.config = config
        self.device = device
        self.keep_dense = False
        self.ranks = None
        self.tables = None
        self.experts = experts or (0, config.n_routed_experts)
        self.seed = seed
        self.engram_rows = engram_rows
        self._specs = expected_tensors(config)

    def tensor(self, name: str) -> Tensor:
        """Make a tensor in its stored form."""
        return self._make(self._specs[name], 1)[0]

    def mapped(self, name: str) -> Tensor:
        """Make a tensor in its stored form."""
        return self.tensor(name)

    def fp4(self, experts: Sequence[str], *names: str) -> Fp4Weight:
        """Make MXFP4 matrices of all experts, each expert's stacked in rows."""
        num = len(experts) * len(names)
        codes, scale = (
            self._make(self._specs[f"{experts[0]}.{names[0]}.{kind}"], num)
            for kind in ("weight", "scale")
        )
        codes, scale = (
            t.view(len(experts), len(names) * t.shape[1], t.shape[2]) for t in (codes, scale)
        )
        return Fp4Weight(codes, scale, None)

    def block(self, name: str, num_experts: int, layer: LayerConfig | None) -> BlockWeights:
        """Make the weights of `layers.N` or of `mtp.N`."""
        block = super().block(name, num_experts, layer)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # of what the weights were made from
        return block

    def _moe(self, name: str, num_experts: int) -> MoeWeights:
        total = self.config.n_routed_experts
        first, count = (part * num_experts // total for part in self.experts)
        experts = [f"{name}.experts.{e}" for e in range(first, first + max(1, count))]
        return MoeWeights(
            gate=self.dense(f"{name}.gate.weight"),
            bias=self.tensor(f"{name}.gate.bias"),
            w1_w3=self.fp4(experts, "w1", "w3"),
            w2=self.fp4(experts, "w2"),
            shared_w1_w3=self.fp8(f"{name}.shared_experts.w1", f"{name}.shared_experts.w3"),
            shared_w2=self.fp8(f"{name}.shared_experts.w2"),
        )

    def _engram(self, name: str) -> EngramWeights:
        weights = super()._engram(name)
        spec = self._specs[f"{name}.embed.weight"]
        return dataclasses.replace(weights, fold=weights.codes.shape[0] < spec.shape[0])

    def _make(self, spec: TensorSpec, num: int) -> Tensor:
        """Make `num` tensors of one kind, [num, *shape]."""
        shape = spec.shape
        if spec.part == "engram":
            shape = (min(shape[0], self.engram_rows), *shape[1:])
        generator = torch.Generator(self.device)
        generator.manual_seed(zlib.crc32(spec.name.encode()) ^ self.seed)
        size = (num, *shape)
        if spec.dtype == "I8":
            return self._bytes(generator, size, 0, 256)
        if spec.dtype == "F8_E8M0":
            weight = self._specs[spec.scale_of or ""]
            columns = weight.shape[-1] * (2 if weight.dtype == "I8" else 1)
            rms = _FP4_RMS if weight.dtype == "I8" else 1.0
            middle = 127 - round(float(np.log2(rms * columns**0.5)))
            if spec.part == "engram":
                middle = 127  # looked up, never multiplied with
            return self._bytes(generator, size, middle - 1, middle + 2)
        if spec.name.endswith(("norm.weight", "q_weight", "k_weight")):
            return torch.ones(size, dtype=_DTYPES[spec.dtype], device=self.device)
        if spec.name.endswith(("_base", "_sink", "bias", "bias_vl")):
            return self._normal(generator, size, 0.1, torch.float32)
        if spec.name.endswith("hc_attn_scale") or spec.name.endswith("hc_ffn_scale"):
            return torch.full(size, 0.1, device=self.device)
        gain = 1.0 if spec.dtype == "F8_E4M3" else shape[-1] ** -0.5
        if spec.name.endswith("embed.weight") and spec.dtype == "BF16":
            gain = 1.0
        return self._normal(generator, size, gain, _DTYPES[spec.dtype])

    def _bytes(
        self, generator: torch.Generator, size: tuple[int, ...], low: int, high: int
    ) -> Tensor:
        made = torch.empty(size, dtype=torch.uint8, device=self.device)
        return made.random_(low, high, generator=generator)

    def _normal(
        self, generator: torch.Generator, size: tuple[int, ...], gain: float, dtype: torch.dtype
    ) -> Tensor:
        through = torch.float32 if dtype == torch.float32 else torch.bfloat16
        made = torch.empty(size, dtype=through, device=self.device)
        return made.normal_(0.0, gain, generator=generator).to(dtype)


def random_weights(
    config: ModelConfig,
    device: torch.device | str,
    experts: tuple[int, int] | None = None,
    seed: int = 0,
) -> RandomLoader:
    """Return a loader that makes the weights of a config on a device.

    experts  (first, count): a slice of the routed experts, e.g. (0, 48) of 384 = one rank of EP8;
             choices fold onto them, `choice % count`, so that T tokens give as many pairs as the
             rank would get from all ranks. None = all
    The layers build themselves from it as from a checkpoint: `FastModel(config, loader, ...)`.
    """
    return RandomLoader(config, torch.device(device), experts, seed)


def random_model(
    config: ModelConfig,
    device: torch.device | str,
    experts: tuple[int, int] | None = None,
    seed: int = 0,
    *,
    numerics: NumericsConfig | None = None,
    with_drafts: bool = False,
    only_reference: bool = False,
    lean: bool = False,
) -> FastModel:
    """Return a model of random weights; arguments as of `random_weights` and `FastModel.load`.

    Engram's token map is random, too. The released model of 40 layers with (0, 48) experts takes
    about 45 GB.
    """
    loader = random_weights(config, device, experts, seed)
    picked = pick_device(str(loader.device))
    numerics = numerics or NumericsConfig()
    alone = numerics.batch_invariant
    asked = asked_ops(numerics, picked.capability, config, with_drafts)
    ops = Ops.resolve(picked.capability, only_reference, False, alone, asked)
    token_map = None
    if config.engram_layer_ids:
        rng = np.random.default_rng(seed)
        token_map = rng.integers(0, config.engram_compressed_vocab_size, config.vocab_size)
    resolved = resolve_numerics(numerics, loader.device)
    return FastModel(config, loader, ops, resolved, token_map, with_drafts, lean)
