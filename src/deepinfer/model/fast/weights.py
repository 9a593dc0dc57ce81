"""The weights that the layers hold, under the checkpoint's names and in stored form.

Nothing is dequantized for good, except where fp32 copies of all matrices fit into
`weights.dequantized_bytes`: a CPU multiplies them faster, with the same values, so the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.config import LayerConfig, ModelConfig
from deepinfer.kernels.expert_linear import Fp4Weight
from deepinfer.kernels.linear import DenseWeight, Fp8Weight
from deepinfer.parallel.experts import ExpertRanks, LayerExperts
from deepinfer.parallel.tables import MakeTable, RowTable
from deepinfer.weights.load import TensorSource

__all__ = [
    "AttentionWeights",
    "BlockWeights",
    "CompressorWeights",
    "EngramWeights",
    "HyperWeights",
    "IndexerWeights",
    "Loader",
    "MoeWeights",
]


@dataclass(frozen=True, slots=True)
class HyperWeights:
    """Hyper-connection coefficients of one sublayer, fp32."""

    fn: DenseWeight
    base: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True)
class CompressorWeights:
    """Pools the KV of a layer that owns compressed entries; `wgate` is None for ratio 1.

    wgate_wkv  both, stacked in rows, where they lie in memory like that
    """

    wkv: DenseWeight
    wgate: DenseWeight | None
    norm: Tensor
    index_wk: DenseWeight
    index_k_norm: Tensor
    wgate_wkv: DenseWeight | None = None


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """Queries and head weights of one index source."""

    wq_b: Fp8Weight
    weights_proj: DenseWeight


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """One attention sublayer; `wq_a` and `wkv` read the same input and are stacked."""

    wq_a_wkv: Fp8Weight
    q_norm: Tensor
    wq_b: Fp8Weight
    kv_norm: Tensor
    wo_a: Fp8Weight
    wo_b: Fp8Weight
    attn_sink: Tensor


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """Router, routed experts stacked over E, shared expert; gate and up are stacked in rows.

    ranks  the experts are those of this rank's slots, the others are on other ranks; None: all are
           here
    """

    gate: DenseWeight
    bias: Tensor
    w1_w3: Fp4Weight
    w2: Fp4Weight
    shared_w1_w3: Fp8Weight
    shared_w2: Fp8Weight
    ranks: LayerExperts | None = None


@dataclass(frozen=True, slots=True)
class EngramWeights:
    """Table rows (stored form, possibly a view of the file), projection and gate.

    fold   the table holds fewer rows than the model's: row r is looked up at r modulo its height
    table  reads the rows where they do not lie on the device; None: they do
    """

    codes: Tensor
    scale: Tensor
    wkv: Fp8Weight
    qk_weight: Tensor
    fold: bool = False
    table: RowTable | None = None


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """One block: attention, experts, and the hyper-connections around them."""

    name: str
    attn_norm: Tensor
    ffn_norm: Tensor
    hc_attn: HyperWeights
    hc_ffn: HyperWeights
    attention: AttentionWeights
    moe: MoeWeights
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None
    engram: EngramWeights | None


class Loader:
    """Builds the weights of blocks from a checkpoint.

    keep_dense: on a CPU, fp32 copies of all matrices fit into `dequantized_bytes`.
    ranks: of experts, whose slots say which this rank loads; None loads all.
    tables: makes what reads the Engram rows; None puts them on the device.
    """

    tables: MakeTable | None = None

    def __init__(
        self,
        source: TensorSource,
        config: ModelConfig,
        device: torch.device,
        dequantized_bytes: int,
        ranks: ExpertRanks | None = None,
        tables: MakeTable | None = None,
    ) -> None:
        self.tables = tables
        self.ranks = ranks
        self.source = source
        self.config = config
        self.device = device
        self.keep_dense = device.type == "cpu" and _dense_bytes(source) <= dequantized_bytes

    def tensor(self, name: str) -> Tensor:
        """Return a small tensor on the device."""
        return self.source.copy(name).to(self.device)

    def norm(self, name: str) -> Tensor:
        """Return a norm's weight in fp32, exact."""
        return self.tensor(name).float()

    def mapped(self, name: str) -> Tensor:
        """Return a tensor as a view of the file on a CPU, copied elsewhere."""
        return self.source.get(name).to(self.device)

    def dense(self, name: str) -> DenseWeight:
        """Return a bf16 or fp32 matrix."""
        stored = self.mapped(name)
        if self.keep_dense:
            return DenseWeight(stored, stored.float())
        return DenseWeight(stored, stored if stored.dtype == torch.float32 else None)

    def fp8(self, *names: str) -> Fp8Weight:
        """Return e4m3 matrices with [32, 32] scales, stacked in rows; names are without suffix.

        One matrix stays a view of the file; stacked ones are copied, and their heights are
        multiples of 32.
        """
        if len(names) == 1:
            codes, scale = self.mapped(f"{names[0]}.weight"), self.mapped(f"{names[0]}.scale")
        else:
            codes = torch.cat([self.tensor(f"{n}.weight").view(torch.uint8) for n in names])
            codes = codes.view(torch.float8_e4m3fn)
            scale = torch.cat([self.tensor(f"{n}.scale") for n in names])
        weight = Fp8Weight(codes, scale, None)
        if self.keep_dense:
            return Fp8Weight(weight.codes, weight.scale, weight.dequantize())
        return weight

    def fp4(self, experts: Sequence[str], *names: str) -> Fp4Weight:
        """Return MXFP4 matrices of all experts, each expert's stacked in rows."""
        codes, scale = (
            self.source.stack([f"{e}.{n}.{kind}" for e in experts for n in names]).to(self.device)
            for kind in ("weight", "scale")
        )
        codes, scale = (
            t.view(len(experts), len(names) * t.shape[1], t.shape[2]) for t in (codes, scale)
        )
        weight = Fp4Weight(codes, scale, None)
        if self.keep_dense:
            dense = torch.stack([weight.dequantize(e) for e in range(codes.shape[0])])
            return Fp4Weight(codes, scale, dense)
        return weight

    def block(self, name: str, num_experts: int, layer: LayerConfig | None) -> BlockWeights:
        """Return the weights of `layers.N` (with its LayerConfig) or of `mtp.N` (without)."""
        block = BlockWeights(
            name=name,
            attn_norm=self.norm(f"{name}.attn_norm.weight"),
            ffn_norm=self.norm(f"{name}.ffn_norm.weight"),
            hc_attn=self._hyper(f"{name}.hc_attn"),
            hc_ffn=self._hyper(f"{name}.hc_ffn"),
            attention=self._attention(f"{name}.attn"),
            moe=self._moe(f"{name}.ffn", num_experts),
            compressor=self._compressor(f"{name}.attn", layer) if layer else None,
            indexer=self._indexer(f"{name}.attn.indexer") if layer and layer.owns_index else None,
            engram=self._engram(f"{name}.engram")
            if layer and layer.engram_idx is not None
            else None,
        )
        self.source.release()
        return block

    def _hyper(self, name: str) -> HyperWeights:
        return HyperWeights(
            self.dense(f"{name}_fn"), self.tensor(f"{name}_base"), self.tensor(f"{name}_scale")
        )

    def _attention(self, name: str) -> AttentionWeights:
        return AttentionWeights(
            wq_a_wkv=self.fp8(f"{name}.wq_a", f"{name}.wkv"),
            q_norm=self.norm(f"{name}.q_norm.weight"),
            wq_b=self.fp8(f"{name}.wq_b"),
            kv_norm=self.norm(f"{name}.kv_norm.weight"),
            wo_a=self.fp8(f"{name}.wo_a"),
            wo_b=self.fp8(f"{name}.wo_b"),
            attn_sink=self.tensor(f"{name}.attn_sink"),
        )

    def _moe(self, name: str, num_experts: int) -> MoeWeights:
        layer: LayerExperts | None = None
        held: Sequence[int] = range(num_experts)
        if self.ranks is not None:
            layer = self.ranks.layer(num_experts, drafts=name.startswith("mtp."))
            held = layer.maps.local_experts
        experts = [f"{name}.experts.{e}" for e in held]
        return MoeWeights(
            gate=self.dense(f"{name}.gate.weight"),
            bias=self.tensor(f"{name}.gate.bias"),
            w1_w3=self.fp4(experts, "w1", "w3"),
            w2=self.fp4(experts, "w2"),
            shared_w1_w3=self.fp8(f"{name}.shared_experts.w1", f"{name}.shared_experts.w3"),
            shared_w2=self.fp8(f"{name}.shared_experts.w2"),
            ranks=layer,
        )

    def _compressor(self, name: str, layer: LayerConfig) -> CompressorWeights | None:
        if not layer.owns_kv:
            return None
        wkv, both = self.dense(f"{name}.compressor.wkv.weight"), None
        wgate = self.dense(f"{name}.compressor.wgate.weight") if layer.ratio > 1 else None
        if wgate is not None and self.device.type != "cpu":
            stored = torch.cat([wgate.stored, wkv.stored])
            whole = None if wkv.dense is None else stored
            both = DenseWeight(stored, whole)
            wgate, wkv = (
                DenseWeight(part, None if whole is None else part) for part in stored.chunk(2)
            )
        return CompressorWeights(
            wkv=wkv,
            wgate=wgate,
            norm=self.norm(f"{name}.compressor.norm.weight"),
            index_wk=self.dense(f"{name}.indexer.wk.weight"),
            index_k_norm=self.norm(f"{name}.indexer.k_norm.weight"),
            wgate_wkv=both,
        )

    def _indexer(self, name: str) -> IndexerWeights:
        return IndexerWeights(self.fp8(f"{name}.wq_b"), self.dense(f"{name}.weights_proj.weight"))

    def _engram(self, name: str) -> EngramWeights:
        q = self.tensor(f"{name}.q_weight").float()
        k = self.tensor(f"{name}.k_weight").float()
        if self.tables is not None:
            codes, scale = (self.source.get(f"{name}.embed.{kind}") for kind in ("weight", "scale"))
            wkv, table = self.fp8(f"{name}.wkv"), self.tables(codes, scale)
            return EngramWeights(codes, scale, wkv, q * k, table=table)
        return EngramWeights(
            codes=self.mapped(f"{name}.embed.weight"),
            scale=self.mapped(f"{name}.embed.scale"),
            wkv=self.fp8(f"{name}.wkv"),
            qk_weight=q * k,
        )


def _dense_bytes(source: TensorSource) -> int:
    """Bytes of fp32 copies of every matrix that is multiplied with."""
    total = 0
    for name, tensor in source.checkpoint.tensors.items():
        table = name.endswith("embed.weight")  # rows are looked up, never multiplied
        if len(tensor.shape) == 2 and not table and not name.endswith(".scale"):
            total += 4 * math.prod(tensor.shape) * (2 if tensor.dtype == "I8" else 1)
    return total
