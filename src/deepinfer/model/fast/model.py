"""The text model on paged caches: the only model that the engine runs."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, MutableMapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.cache.tensors import Caches
from deepinfer.config import ModelConfig
from deepinfer.config.engine import NumericsConfig
from deepinfer.device import pick_device
from deepinfer.device.base import Capability
from deepinfer.errors import TokenizerError
from deepinfer.kernels.libraries import is_usable
from deepinfer.kernels.ops import Ops
from deepinfer.kernels.rope.tables import compressed_inv_freq, window_inv_freq
from deepinfer.kernels.streams import mean_into, start_streams
from deepinfer.kernels.table import COPIES, TABLE, W4A8
from deepinfer.model.dspark import DraftModel
from deepinfer.model.fast.attention import attention
from deepinfer.model.fast.beside import Side
from deepinfer.model.fast.block import Open, run_block, run_open, sites_of
from deepinfer.model.fast.compressor import compress_step
from deepinfer.model.fast.engram import EngramHash, add_engram, engram_products
from deepinfer.model.fast.few import FewBlock, FewRows, fits
from deepinfer.model.fast.inputs import ModelInputs, Replay
from deepinfer.model.fast.moe import serve_experts
from deepinfer.model.fast.packing import pack_block
from deepinfer.model.fast.step import Numerics, Pass, Step
from deepinfer.model.fast.weights import BlockWeights, Loader
from deepinfer.parallel.experts import ExpertRanks
from deepinfer.parallel.tables import MakeTable, Read
from deepinfer.weights.copies import copies_pay
from deepinfer.weights.load import TensorSource
from deepinfer.weights.reader import Checkpoint

__all__ = ["FastModel", "asked_ops", "resolve_numerics"]

_PER_SEQUENCE = ("main_hidden", "engram_hash", "cand_blocks")
"""Trace values that are not stacked over layers."""


def resolve_numerics(config: NumericsConfig, device: torch.device) -> Numerics:
    """Resolve "auto": the recorded arithmetic on a CPU, the serving one on an accelerator."""
    official, recorded = config.mode == "official", device.type == "cpu"
    output = config.output_projection
    if output == "auto":
        output = "bf16" if recorded else "fp8"
    scores = config.index_scores
    if scores == "auto":
        scores = "reference" if recorded else "final"
    return Numerics(
        dtype=torch.bfloat16 if official else torch.float32,
        quantize=official,
        fp8_output=official and output == "fp8",
        index_rounding=scores if official else "none",
    )


def asked_ops(
    numerics: NumericsConfig, capability: Capability, config: ModelConfig, with_drafts: bool = True
) -> dict[str, str]:
    """Return the implementations that settings name: op -> implementation."""
    asked: dict[str, str] = {}
    if numerics.expert_products != "exact":
        asked |= dict.fromkeys(("expert_linear", "routed_experts"), W4A8)
    if numerics.dense_copies == "on" or (
        numerics.dense_copies == "auto"
        and _uses_copies(numerics, capability)
        and copies_pay(config, with_drafts, capability.total_bytes)
    ):
        asked |= dict.fromkeys(("fp8_linear", "grouped_linear"), COPIES)
    return asked


def _uses_copies(numerics: NumericsConfig, capability: Capability) -> bool:
    """Whether a card multiplies with bf16 copies of FP8 matrices."""
    line = next(line for line in TABLE["fp8_linear"] if line.name == COPIES)
    usable = capability.arch in line.archs and is_usable(line.needs)
    return usable and not numerics.batch_invariant


class _Kept(threading.local):
    """A thread's buffers of decode steps, by their number of rows."""

    def __init__(self) -> None:
        self.rows: dict[int, FewRows] = {}


class _Taps:
    """What drafts are made from: the mean stream of some layers, side by side, [T, count * C]."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._all: Tensor | None = None
        self.found = 0

    def add(self, stream: Tensor) -> None:
        """Take the stream [T, M, C] that the next of the layers begins with."""
        num_rows, _, width = stream.shape
        if self._all is None:
            shape = num_rows, self._count * width
            self._all = torch.empty(shape, dtype=stream.dtype, device=stream.device)
        mean_into(stream, self._all[:, self.found * width : (self.found + 1) * width])
        self.found += 1

    def keep(self, rows: Tensor) -> None:
        """Go on with some of the rows."""
        if self._all is not None:
            self._all = self._all[rows]

    @property
    def features(self) -> Tensor:
        """All of them."""
        assert self._all is not None and self.found == self._count
        return self._all


class FastModel:
    """Backbone, head and draft blocks of one checkpoint on one device.

    with_drafts  keep the draft blocks' keys up to date in every step
    """

    def __init__(
        self,
        config: ModelConfig,
        loader: Loader,
        ops: Ops,
        numerics: Numerics,
        token_map: NDArray[np.integer] | None,
        with_drafts: bool = False,
        lean: bool = False,
    ) -> None:
        """Build every block; raises TokenizerError when Engram layers lack the token map.

        lean  pack each block for the device's kernels as it is loaded, and free its stored bytes
        """
        self.config = config
        self.ops = ops
        self.numerics = numerics
        self.with_drafts = with_drafts
        self.device = loader.device
        if config.engram_layer_ids and token_map is None:
            raise TokenizerError(
                "the model has Engram layers, which need the compressed vocabulary: give the "
                "tokenizer.json of the checkpoint"
            )
        self._hash: EngramHash | None = None
        if config.engram_layer_ids and token_map is not None:
            self._hash = EngramHash(config, torch.as_tensor(token_map), self.device)
        self.ranks = loader.ranks
        self.embed = loader.mapped("embed.weight")
        self.head = loader.dense("head.weight")
        self.norm = loader.norm("norm.weight")
        blocks: list[BlockWeights] = []
        for layer in config.layers:
            name = f"layers.{layer.layer_id}"
            blocks.append(loader.block(name, config.n_routed_experts, layer))
            if lean:
                pack_block(ops, numerics, blocks[-1], config.o_groups)
        self.blocks: tuple[BlockWeights, ...] = tuple(blocks)
        self._fused = ops.choices["hyper_site"].name != "reference"
        self._sites = [sites_of(block, numerics.dtype) for block in self.blocks if self._fused]
        self._few_blocks: dict[int, FewBlock] = {}
        self._kept = _Kept()
        self.draft: DraftModel | None = None
        if with_drafts and config.num_nextn_predict_layers:
            self.draft = DraftModel(config, loader, ops, numerics, self.embed, self.head, lean)
        self.side: Side | None = Side(self.device)
        self._inv_freq = {
            False: window_inv_freq(config).to(self.device),
            True: compressed_inv_freq(config).to(self.device),
        }

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        numerics: NumericsConfig,
        device: torch.device | str,
        token_map: NDArray[np.integer] | None,
        dequantized_bytes: int,
        *,
        with_drafts: bool = False,
        only_reference: bool = False,
        checked: bool = False,
        ranks: ExpertRanks | None = None,
        tables: MakeTable | None = None,
        lean: bool = False,
    ) -> FastModel:
        """Load a checkpoint that has been checked.

        dequantized_bytes  what fp32 copies of weights may take on a CPU; changes speed only
        only_reference     run every op in its defining form
        checked            check the shapes of every op's arguments
        ranks              hold a share of the experts; None holds all
        tables             makes what reads Engram rows; None puts them on the device
        lean               as of the constructor
        """
        device = torch.device(device)
        capability = pick_device(str(device)).capability
        ops = Ops.resolve(
            capability,
            only_reference,
            checked,
            numerics.batch_invariant,
            asked_ops(numerics, capability, checkpoint.config, with_drafts),
        )
        source = TensorSource(checkpoint)
        loader = Loader(source, checkpoint.config, device, dequantized_bytes, ranks, tables)
        resolved = resolve_numerics(numerics, device)
        return cls(checkpoint.config, loader, ops, resolved, token_map, with_drafts, lean)

    @np.errstate(all="ignore")  # what is not finite is found in the logits
    def forward(
        self,
        inputs: ModelInputs,
        caches: Caches,
        logits_rows: Tensor | None,
        trace: MutableMapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Run a step, update the caches, return the logits [L, V] fp32 of the named rows.

        logits_rows  [L] int64 rows of the step; None = all that it ends with
        trace        filled with every layer's values over the step's rows, under the names of
                     `deepinfer trace`
        """
        config, ops = self.config, self.ops
        step = self._step(inputs, caches, trace is not None)
        stream, pre = start_streams(
            self.embed, inputs.token_ids, config.hc_mult, self.numerics.dtype
        )
        few = self._few(step, stream, pre)
        opened = Open(stream, pre) if self._fused and step.trace is None else None
        rows = [] if self._hash is None else self._hash.rows(step)
        ngrams = self._look_up(step, rows)
        taps = _Taps(len(config.dspark_target_layer_ids))
        for layer, block in zip(config.layers, self.blocks, strict=True):
            enters = inputs.replay is not None and layer.layer_id == config.first_decoder_layer
            tapped = layer.layer_id in config.dspark_target_layer_ids
            tapped = tapped and (self.draft is not None or step.trace is not None)
            if opened is not None:
                if enters or layer.engram_idx is not None:
                    opened = opened.close(ops)
                stream, pre = opened.stream, opened.pre
            if inputs.replay is not None and layer.layer_id == config.first_decoder_layer:
                entered = self._enter_decoder(step, inputs.replay, block, stream, pre)
                if entered is None:
                    self.idle(layer.layer_id)
                    return self._no_logits(stream)
                step, stream, pre = entered
                if inputs.replay.rows is not None:
                    taps.keep(inputs.replay.rows)
                if inputs.replay.places is not None and logits_rows is not None:
                    logits_rows = inputs.replay.places[logits_rows]
            if layer.engram_idx is not None and block.engram is not None:
                kv = ngrams[layer.engram_idx]()
                stream = add_engram(step, block.engram, stream, kv)
                if few is not None:
                    few.put(stream)
                step.note("engram_out", stream)
            if tapped and opened is None:
                taps.add(stream)
            if few is not None:
                few.run(step, layer, block, self._few_block(layer.layer_id))
                stream = few.streams()
                continue
            attend = functools.partial(attention, step, layer, block)
            if opened is not None:
                if opened.out is None:  # what was closed may have changed since
                    opened = Open(stream, pre)
                sites = self._sites[layer.layer_id]
                active = config.num_experts_per_tok
                opened, began = run_open(step, block, sites, opened, attend, active)
                if tapped:
                    taps.add(began)
                continue
            stream, pre = run_block(step, block, stream, pre, attend, config.num_experts_per_tok)
        if few is not None:
            pre = torch.from_numpy(few.pre)
        if opened is not None:
            opened = opened.close(ops)
            stream, pre = opened.stream, opened.pre
        stored: Callable[[], None] | None = None
        if self.draft is not None:
            stored = step.beside(functools.partial(self.draft.store, step, taps.features))
        if trace is not None and step.trace is not None:
            if rows:
                step.note("engram_hash", torch.stack(rows, dim=1).int())
            if taps.found:
                step.note("main_hidden", taps.features)
            for name, values in step.trace.items():
                trace[name] = values[0] if name in _PER_SEQUENCE else torch.stack(values)
        logits = self._logits(step, stream, pre, logits_rows)
        if stored is not None:
            stored()
        return logits

    def _logits(
        self, step: Step, stream: Tensor, pre: Tensor, logits_rows: Tensor | None
    ) -> Tensor:
        """Return the logits of the named rows, None = all."""
        ops = self.ops
        if logits_rows is not None and not logits_rows.shape[0]:
            return self._no_logits(stream)
        context = step.inputs.context
        if context is None and logits_rows is None:
            hidden = ops.hyper_collapse(stream, pre)
        elif context is None:
            hidden = ops.hyper_collapse(stream[logits_rows], pre[logits_rows])
        else:
            hidden = context.logits(ops.hyper_collapse(stream, pre))
            if not context.draws:
                return self._no_logits(stream)
        hidden = ops.rms_norm(hidden, self.norm, self.config.rms_norm_eps)
        return ops.dense_linear(hidden, self.head, torch.float32)

    def _look_up(self, step: Step, rows: Sequence[Tensor]) -> dict[int, Callable[[], Tensor]]:
        """Return what makes or awaits the products of each Engram layer.

        Where a step has branches those of tables on the device are made beside the first layers.
        """
        found: dict[int, Callable[[], Tensor]] = {}
        reads = self._read(rows)
        for layer, block in zip(self.config.layers, self.blocks, strict=True):
            idx = layer.engram_idx
            if idx is not None and block.engram is not None:
                read = reads.get(idx)
                work = functools.partial(engram_products, step, block.engram, rows[idx], read)
                begins = step.branches and read is None
                found[idx] = step.beside(work) if begins else work
        return found

    @property
    def ahead(self) -> bool:
        """Whether Engram rows are read before the step that needs them begins."""
        return any(b.engram and b.engram.table and b.engram.table.ahead for b in self.blocks)

    def look_ahead(self, caches: Caches, slots: Tensor, positions: Tensor, ids: Tensor) -> None:
        """Start reading the Engram rows of tokens that the next step is likely to run.

        slots, positions  [N] of the first tokens, everything before them cached; ids  [N, J]
        """
        assert self._hash is not None and caches.engram_tail is not None
        rows = self._hash.ahead(self.ops, caches.engram_tail, slots, positions, ids)
        for layer, block in zip(self.config.layers, self.blocks, strict=True):
            if layer.engram_idx is not None and block.engram and block.engram.table:
                block.engram.table.look_ahead(rows[layer.engram_idx])

    def branch(self, on: bool) -> None:
        """Let steps that are recorded from now on have branches, as they do at first, or not."""
        self.side = Side(self.device) if on else None
        if self.draft is not None:
            self.draft.side = self.side

    def begin(self, most_rows: int) -> None:
        """Say how many rows the fullest rank has in what follows."""
        if self.ranks is not None:
            self.ranks.exchange.begin(most_rows)

    @property
    def flows(self) -> bool:
        """Whether a step that ranks take together never waits on the host."""
        tables = [block.engram.table for block in self.blocks if block.engram is not None]
        if any(table is not None and not table.flows for table in tables):
            return False
        return self.ranks is None or self.ranks.exchange.flows

    def check(self) -> None:
        """Raise GroupBroken if a rank did not come in a step that has ended."""
        if self.ranks is not None:
            self.ranks.exchange.check()

    @np.errstate(all="ignore")
    def idle(self, first_layer: int = 0) -> None:
        """Take part in a step, from a layer on, without rows: run what other ranks send."""
        step = Pass(self.config, self.ops, self.numerics, {}, None)
        if not first_layer and self._hash is not None:
            columns = (self.config.engram_max_ngram_size - 1) * self.config.engram_n_heads
            none = torch.empty(0, columns, dtype=torch.int64, device=self.device)
            for read in self._read([none] * len(self.config.engram_layer_ids)).values():
                read.wait(self.numerics.dtype)
        for block in self.blocks[first_layer:]:
            serve_experts(step, block.moe, self.config.num_experts_per_tok)

    def _read(self, rows: Sequence[Tensor]) -> dict[int, Read]:
        """Start reading the rows of tables that are not on the device, by Engram layer."""
        return {
            layer.engram_idx: block.engram.table.start(rows[layer.engram_idx])
            for layer, block in zip(self.config.layers, self.blocks, strict=True)
            if layer.engram_idx is not None
            and block.engram is not None
            and block.engram.table is not None
        }

    def _enter_decoder(
        self, step: Step, replay: Replay, block: BlockWeights, stream: Tensor, pre: Tensor
    ) -> tuple[Step, Tensor, Tensor] | None:
        """Go on with the decoder half's rows, None when there are none.

        All rows give their compressed entries first: these need the encoder half only.
        Source: backbone specification, 7.4.
        """
        if replay.inputs is not None and replay.rows is None:
            return dataclasses.replace(step, inputs=replay.inputs), stream, pre
        assert step.trace is None, "rows that are left out have no values to trace"
        layer = self.config.layers[self.config.first_decoder_layer]
        assert block.compressor is not None, "the decoder half begins with its entries"
        x = self.ops.hyper_collapse(stream, pre)
        x = self.ops.rms_norm(x, block.attn_norm, self.config.rms_norm_eps)
        compress_step(step, layer, block.compressor, x)
        if replay.inputs is None or replay.rows is None:
            return None
        rows = replay.rows
        kept = Step(
            config=self.config,
            ops=self.ops,
            numerics=self.numerics,
            rotation={kind: (cos[rows], sin[rows]) for kind, (cos, sin) in step.rotation.items()},
            trace=None,
            inputs=replay.inputs,
            caches=step.caches,
            emit_rotation={},
            compressed=True,
        )
        return kept, stream[rows], pre[rows]

    def _few(self, step: Step, stream: Tensor, pre: Tensor) -> FewRows | None:
        """Return this thread's buffers for a step of few rows, where they fit it."""
        if not fits(step, self.blocks):
            return None
        kept, num_rows = self._kept.rows, step.inputs.num_rows
        if num_rows not in kept:
            kept[num_rows] = FewRows(self.config, num_rows)
        kept[num_rows].start(step, stream, pre)
        return kept[num_rows]

    def _few_block(self, layer_id: int) -> FewBlock:
        found = self._few_blocks.get(layer_id)
        if found is None:
            found = FewBlock.of(self.blocks[layer_id], self.config)
            self._few_blocks[layer_id] = found
        return found

    def _no_logits(self, stream: Tensor) -> Tensor:
        return stream.new_empty(0, self.config.vocab_size, dtype=torch.float32)

    def diagnose(self, inputs: ModelInputs, caches: Caches) -> str:
        """Run rows again and name the first layer whose output is not finite."""
        trace: dict[str, Tensor] = {}
        rows = torch.arange(inputs.num_rows, device=self.device)
        logits = self.forward(inputs, caches, rows, trace)
        if not bool(torch.isfinite(self.embed[inputs.token_ids].float()).all()):
            return "the embedding (embed.weight) of a token is not finite"
        engram = iter(trace.get("engram_out", ()))
        for layer, block in zip(self.config.layers, self.blocks, strict=True):
            stages = [] if layer.engram_idx is None else [("engram", next(engram))]
            stages.append(("attention", trace["attn_out"][layer.layer_id]))
            around = block.hc_attn  # its damage shows first in what the experts read
            parts = (around.fn.stored, around.scale, around.base)
            stages += [("hyper-connections", part) for part in parts]
            stages.append(("experts", trace["ffn_out"][layer.layer_id]))
            stages.append(("hyper-connections", trace["stream_out"][layer.layer_id]))
            for stage, value in stages:
                if not bool(torch.isfinite(value).all()):
                    return f"layers.{layer.layer_id} is the first bad layer, in its {stage}"
        if not bool(torch.isfinite(logits).all()):
            return "all layers are finite, the final norm or head is not (norm.weight, head.weight)"
        return "a second run of the same rows is finite"

    def _step(self, inputs: ModelInputs, caches: Caches, traced: bool) -> Step:
        """Return the shared state of a forward pass."""
        cos_sin = self.ops.cos_sin
        compressed = self._inv_freq[True]
        rotation = {kind: cos_sin(inputs.positions, freq) for kind, freq in self._inv_freq.items()}
        own = inputs.context is None  # then every row completes an entry of ratio 1, where it is
        return Step(
            config=self.config,
            ops=self.ops,
            numerics=self.numerics,
            rotation=rotation,
            trace={} if traced else None,
            inputs=inputs,
            caches=caches,
            emit_rotation={
                ratio: rotation[True]
                if ratio == 1 and own
                else cos_sin(part.emit_starts, compressed)
                for ratio, part in inputs.ratios.items()
            },
            live=inputs.live,
            side=self.side if inputs.decode and inputs.context is None else None,
        )
