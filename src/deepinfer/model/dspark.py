"""DSpark: a block of drafts proposed at once, chosen one after the other.

The draft blocks attend to keys made from the backbone's features (stored in rings of their own
during the backbone's step) and to every row of their block, in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from deepinfer.cache.tensors import Caches
from deepinfer.config import ModelConfig
from deepinfer.kernels.cache_io import PagedCache
from deepinfer.kernels.draft_block import lay_out_block, markov_step
from deepinfer.kernels.draw import largest
from deepinfer.kernels.linear import DenseWeight
from deepinfer.kernels.ops import Ops
from deepinfer.kernels.rope.tables import window_inv_freq
from deepinfer.kernels.streams import start_streams
from deepinfer.model.fast.attention import (
    project,
    project_output,
    rounds_outputs,
    store_entries,
)
from deepinfer.model.fast.beside import Side
from deepinfer.model.fast.block import Open, run_block, run_open, sites_of
from deepinfer.model.fast.moe import serve_experts
from deepinfer.model.fast.packing import pack_block, pack_linear
from deepinfer.model.fast.step import Numerics, Pass, Step
from deepinfer.model.fast.weights import AttentionWeights, BlockWeights, Loader

__all__ = ["Choose", "DraftModel"]

Choose = Callable[[int, Tensor], Tensor]
"""Picks a draft of every sequence: its index, logits [S, V] fp32 -> tokens [S] int64."""


class DraftModel:
    """The draft blocks `mtp.*` with their Markov and confidence heads."""

    def __init__(
        self,
        config: ModelConfig,
        loader: Loader,
        ops: Ops,
        numerics: Numerics,
        embed: Tensor,
        head: DenseWeight,
        lean: bool = False,
    ) -> None:
        """Build the blocks; lean as of `FastModel`."""
        self.config = config
        self.ops = ops
        self.numerics = numerics
        self.embed = embed
        self.head = head
        self.side: Side | None = Side(loader.device)
        last = f"mtp.{config.num_nextn_predict_layers - 1}"
        self.main_proj = loader.fp8("mtp.0.main_proj")
        self.main_norm = loader.norm("mtp.0.main_norm.weight")
        blocks: list[BlockWeights] = []
        if lean:
            pack_linear(ops, numerics, self.main_proj)
        for i in range(config.num_nextn_predict_layers):
            blocks.append(loader.block(f"mtp.{i}", config.dspark_n_routed_experts, None))
            if lean:
                pack_block(ops, numerics, blocks[-1], config.o_groups)
        self.blocks: tuple[BlockWeights, ...] = tuple(blocks)
        self.norm = loader.norm(f"{last}.norm.weight")
        self.markov_embed = loader.mapped(f"{last}.markov_head.embed.weight")
        self.markov_head = loader.dense(f"{last}.markov_head.head.weight")
        self.confidence = loader.dense(f"{last}.confidence_head.proj.weight")
        self._inv_freq = window_inv_freq(config).to(loader.device)
        self.paged = loader.device.type != "cpu"
        fused = ops.choices["hyper_site"].name != "reference"
        self._sites = [sites_of(block, numerics.dtype) for block in self.blocks if fused]

    def store(self, step: Step, features: Tensor) -> None:
        """Store the keys of a step's rows; features [T, taps * C]."""
        ops, config = self.ops, self.config
        main = ops.fp8_linear(features, self.main_proj, self.numerics.quantize)
        main = ops.rms_norm(main, self.main_norm, config.rms_norm_eps)
        windows = step.caches.windows[config.num_hidden_layers :]
        pairs = zip((block.attention for block in self.blocks), windows, strict=True)
        store_entries(step, tuple(pairs), main)

    def propose(
        self,
        caches: Caches,
        slots: Tensor | Sequence[int],
        positions: Tensor | Sequence[int],
        first_tokens: Tensor | Sequence[int],
        choose: Choose | None = None,
        num_drafts: int | None = None,
        with_logits: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draft for S sequences, each behind the token chosen for its position + 1.

        slots         [S] state slots; their rings hold the keys of positions up to `positions`
        positions     [S] last position whose features are stored
        first_tokens  [S] the token at position + 1
        choose        takes the index of a draft and its logits [S, V] fp32 and returns [S] int64
                      tokens; None takes the largest
        num_drafts    K, drafts to choose, at most the block's size B; None = B. The block has B
                      rows whatever K is, so that fewer drafts are the first of more
        with_logits   False may leave the logits out
        returns       tokens [S, K+1] int64, column 0 = first_tokens; confidences [S, K] fp32, raw;
                      logits [S, K, V] fp32 with the Markov bias
        A sequence's values do not depend on the others, and shapes do not depend on values.
        Source: weights specification, 6.3 and 6.4.
        """
        ops, config = self.ops, self.config
        device, size = self.embed.device, config.dspark_block_size
        slots, last, first = (
            torch.as_tensor(value, dtype=torch.int64, device=device)
            for value in (slots, positions, first_tokens)
        )
        num, window, ring = slots.shape[0], config.sliding_window, caches.layout.ring_length
        noise, pages = config.dspark_noise_token_id, None
        if self.paged and ring >= window + size:
            laid = lay_out_block(slots, last, first, size, window, ring, noise)
            ids, rows, live = laid.token_ids, laid.positions, laid.live
            pages = laid.own, laid.seen
        else:
            rows = (last[:, None] + 1 + torch.arange(size, device=device)).flatten()
            ids = torch.full((num, size), noise, device=device)
            ids[:, 0] = first
            ids, live = ids.flatten(), (slots > 0).repeat_interleave(size)
            load, index = self._slots(caches, slots, last)
        stream, pre = start_streams(self.embed, ids, config.hc_mult, self.numerics.dtype)
        rotation = ops.cos_sin(rows, self._inv_freq)
        on_card = device.type != "cpu"  # its runner pads with slot 0
        step = Pass(
            config,
            ops,
            self.numerics,
            {False: rotation},
            None,
            live=live if on_card else None,
            side=self.side,
        )
        opened = Open(stream, pre)
        for i, block in enumerate(self.blocks):
            cache = caches.windows[config.num_hidden_layers + i]
            attend: _AttendPages | _Attend
            if pages is not None:
                attend = _AttendPages(step, block.attention, cache, *pages)
            else:
                attend = _Attend(step, block.attention, ops.cache_load(cache, load), index)
            active = config.dspark_num_experts_per_tok
            if self._sites:
                opened, _ = run_open(step, block, self._sites[i], opened, attend, active)
            else:
                opened = Open(*run_block(step, block, opened.stream, opened.pre, attend, active))
        opened = opened.close(ops)
        stream, pre = opened.stream, opened.pre
        hidden = ops.hyper_collapse(stream, pre)
        normed = ops.rms_norm(hidden, self.norm, config.rms_norm_eps)
        base = ops.dense_linear(normed, self.head, torch.float32).view(num, size, -1)
        count = size if num_drafts is None else num_drafts
        assert 0 <= count <= size, f"{count} drafts from a block of {size}"
        hidden = hidden.view(num, size, -1)
        if choose is None and not with_logits and self.paged and count:
            return self._largest(first, hidden, base, count)
        return self._choose(first, hidden, base, count, choose)

    @np.errstate(all="ignore")
    def idle(self) -> None:
        """Take part in a proposal without sequences: run what other ranks send."""
        step = Pass(self.config, self.ops, self.numerics, {}, None)
        for block in self.blocks:
            serve_experts(step, block.moe, self.config.dspark_num_experts_per_tok)

    def _slots(self, caches: Caches, slots: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ring entries to load [S*W] and every row's indices [S*B, W+B].

        Indices point into [loaded | block rows]; each row sees its sequence's held entries in the
        order of a ring of W, then its block. Before W tokens there are fewer, and -1 at the end.
        """
        window, size = self.config.sliding_window, self.config.dspark_block_size
        length, device, num = caches.layout.ring_length, slots.device, slots.shape[0]
        places = torch.arange(window, device=device)
        # The youngest position that has this place in a ring of W.
        found = last[:, None] - (last[:, None] - places) % window
        load = torch.where(found >= 0, slots[:, None] * length + found % length, -1)
        columns = torch.arange(window + size, device=device)
        held = (last + 1).clamp(max=window)[:, None]
        sequence = torch.arange(num, device=device)[:, None]
        own = num * window + sequence * size + columns - held
        index = torch.where(columns < held, sequence * window + columns, own)
        index = torch.where(columns < held + size, index, -1)
        return load.flatten(), index.repeat_interleave(size, dim=0)

    def _largest(
        self, first: Tensor, hidden: Tensor, base: Tensor, count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `_choose` of the largest, in few launches and without the logits."""
        num = first.shape[0]
        confidences = torch.empty(num, count, dtype=torch.float32, device=first.device)
        tokens = [first]
        for row in range(count):
            markov = markov_step(
                self.markov_embed,
                tokens[-1],
                hidden[:, row],
                self.confidence.stored,
                confidences[:, row],
            )
            bias = self.ops.dense_linear(markov, self.markov_head, torch.float32)
            tokens.append(largest(base[:, row], bias)[0])
        return torch.stack(tokens, 1), confidences, base[:, :0]

    def _choose(
        self, first: Tensor, hidden: Tensor, base: Tensor, count: int, choose: Choose | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Add each chosen token's bias to the next row's logits and choose again."""
        ops, num = self.ops, first.shape[0]
        tokens, confidences, logits = [first], [], []
        for row in range(count):
            markov = self.markov_embed[tokens[-1]]
            biased = base[:, row] + ops.dense_linear(markov, self.markov_head, torch.float32)
            # bf16 holds both exactly, where activations are bf16; products are fp32 in any case.
            joint = torch.cat([hidden[:, row], markov.to(hidden.dtype)], dim=1)
            confidences.append(ops.dense_linear(joint, self.confidence, torch.float32)[:, 0])
            logits.append(biased)
            tokens.append(biased.argmax(-1) if choose is None else choose(row, biased))
        if not count:
            none = base.new_empty(num, 0)
            return first.unsqueeze(1), none, base.new_empty(num, 0, base.shape[2])
        return torch.stack(tokens, 1), torch.stack(confidences, 1), torch.stack(logits, 1)


class _AttendPages:
    """Attention of a draft block with its own rows in the rings, too."""

    def __init__(
        self,
        step: Pass,
        weights: AttentionWeights,
        cache: PagedCache,
        own: Tensor,
        seen: Tensor,
    ) -> None:
        self._step, self._weights = step, weights
        self._cache, self._own, self._seen = cache, own, seen

    def __call__(self, x: Tensor, rounded: Tensor | None = None) -> Tensor:
        """Attend x [S*B, C]."""
        step, weights = self._step, self._weights
        rotation = step.rotation[False]
        into = self._cache, self._own
        _, queries, _ = project(step, weights, x, rotation, into, rounded=rounded, turned=False)
        out = step.ops.paged_attention(
            queries(),
            self._cache,
            self._seen,
            None,
            None,
            weights.attn_sink,
            step.config.head_dim**-0.5,
            step.numerics.quantize,
            *rotation,
            rounds_outputs(step),
        )
        return project_output(step, weights, out, None)


class _Attend:
    """Attention of a draft block: stored keys, then the block's own rows."""

    def __init__(
        self, step: Pass, weights: AttentionWeights, context: Tensor, index: Tensor
    ) -> None:
        self._step = step
        self._weights = weights
        self._context = context
        self._index = index

    def __call__(self, x: Tensor, rounded: Tensor | None = None) -> Tensor:
        """Attend x [S*B, C]."""
        step, weights = self._step, self._weights
        rotation = step.rotation[False]
        _, queries, kv = project(step, weights, x, rotation, rounded=rounded)
        assert kv is not None
        own = step.act_quantized(kv, "act8").float()
        out = step.ops.sparse_attention(
            queries(),
            torch.cat([self._context, own]),
            self._index,
            None,
            None,
            weights.attn_sink,
            step.config.head_dim**-0.5,
            step.numerics.quantize,
        )
        return project_output(step, weights, out, rotation)
