"""The model under evaluation: scores of whole texts, several greedy streams with drafts, and other
ways to select entries, put in place of two ops.
"""

from __future__ import annotations

import math
import multiprocessing
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.assembly import set_cpu_threads
from deepinfer.bench.machine import cpu_count
from deepinfer.cache.layout import CacheLayout
from deepinfer.cache.tensors import Caches
from deepinfer.chat.token_map import load_token_map
from deepinfer.chat.tokenizer import Tokenizer
from deepinfer.config.engine import EngineConfig
from deepinfer.config.load import load_model_config
from deepinfer.config.model import ModelConfig
from deepinfer.device import pick_device
from deepinfer.errors import RequestError
from deepinfer.kernels.ops import Ops
from deepinfer.model.fast.inputs import SequenceRows, build_inputs
from deepinfer.model.fast.model import FastModel
from deepinfer.weights.load import check_steering
from deepinfer.weights.reader import Checkpoint

__all__ = ["EvalModel", "Scored", "Selection", "Streams"]

Selection = Literal["indexer", "random", "all"]
"""Which compressed entries a row sees: the indexers' choice, as many at random, or all visible."""

_BLOCK: Final = 128
_MOST_TOKENS: Final = 2048
_CHUNK: Final = 512
_SEED: Final = 7
_TEXTS_A_WORKER: Final = 8


@dataclass(frozen=True, slots=True)
class Scored:
    """A text as the model saw it.

    token_ids  [T] the text, BOS first
    log_probs  [T-1] natural log-probability of each token behind the first
    correct    [T-1] whether it was the likeliest
    loads      [layers, experts] tokens of the text that each expert took, None when not counted
    """

    token_ids: Sequence[int]
    log_probs: NDArray[np.float64]
    correct: NDArray[np.bool_]
    loads: NDArray[np.int64] | None


class EvalModel:
    """A checkpoint on the CPU through the fast path that the engine runs, drafts included."""

    def __init__(self, folder: Path, engine: EngineConfig) -> None:
        self.folder = folder
        self.engine = engine
        self.config: ModelConfig = load_model_config(folder)
        set_cpu_threads(engine, self.config)
        self.tokenizer = Tokenizer.load(folder, self.config)
        checkpoint = Checkpoint.open(folder)
        check_steering(checkpoint)
        self.device = pick_device("cpu").torch_device
        self._noise = torch.Generator()
        self.model = FastModel.load(
            checkpoint,
            engine.numerics,
            self.device,
            load_token_map(folder, self.config),
            engine.weights.dequantized_bytes,
            with_drafts=True,
        )

    @property
    def max_tokens(self) -> int:
        """Most tokens of one text: the model's positions, 2,048 of them at most."""
        return min(self.config.max_position_embeddings, _MOST_TOKENS)

    def streams(self, num: int, max_tokens: int) -> Streams:
        """Return empty sequences of at most `max_tokens` each."""
        return Streams(self.model, self.engine, num, max_tokens)

    def score(self, token_ids: Sequence[int], loads: bool = False, chunk: int = _CHUNK) -> Scored:
        """Run a text of at least two tokens and compare every next token.

        loads  count the experts' tokens as well
        Raises RequestError when the text is longer than the model's positions.
        """
        fed_in_all = len(token_ids) - 1
        if fed_in_all > self.max_tokens:
            raise RequestError(
                f"a text of {fed_in_all} tokens is longer than the {self.max_tokens} at most"
            )
        streams = self.streams(1, fed_in_all)
        self._noise.manual_seed(_SEED)  # a text's noise does not depend on the texts before it
        size = (self.config.num_hidden_layers, self.config.n_routed_experts)
        counts = np.zeros(size, np.int64)
        log_probs: list[Tensor] = []
        correct: list[Tensor] = []
        with torch.inference_mode():
            for start in range(0, fed_in_all, chunk):
                fed = token_ids[start : min(start + chunk, fed_in_all)]
                trace: dict[str, Tensor] | None = {} if loads else None
                logits = streams.prefill(0, fed, trace)
                wanted = torch.tensor(token_ids[start + 1 : start + 1 + len(fed)])
                log_probs.append(logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0])
                correct.append(logits.argmax(-1) == wanted)
                if trace is not None:
                    counts += _count(trace["route_idx"], size[1])
        return Scored(
            token_ids,
            torch.cat(log_probs).double().numpy(),
            torch.cat(correct).numpy(),
            counts if loads else None,
        )

    def score_all(
        self, texts: Sequence[Sequence[int]], loads: bool = False, chunk: int = _CHUNK
    ) -> list[Scored]:
        """Score many texts; many of them on two cores at once where processes can be forked."""
        workers = min(cpu_count(), len(texts) // _TEXTS_A_WORKER)
        # A forked process has none of the threads that its parent had: there must be none.
        single = torch.get_num_threads() == 1 and threading.active_count() == 1
        score = partial(self.score, loads=loads, chunk=chunk)
        if workers < 2 or not single or "fork" not in multiprocessing.get_all_start_methods():
            return list(map(score, texts))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=DeprecationWarning)  # of threads that wait
            pool = multiprocessing.get_context("fork").Pool(workers, _adopt, (score,))
        with pool:
            return pool.map(_adopted, texts, chunksize=1)

    @contextmanager
    def selecting(self, selection: Selection) -> Iterator[None]:
        """Put another selection of entries in place of the indexers' within the block.

        Only `select_topk` and `select_blocks` of this model's own set of ops are replaced.
        """
        kept = self.model.ops
        if selection == "random":
            self.model.ops = _random_ops(kept, self._noise)
        elif selection == "all":
            self.model.ops = replace(kept, select_topk=_all_entries, select_blocks=_all_blocks)
        try:
            yield
        finally:
            self.model.ops = kept


_score: Callable[[Sequence[int]], Scored]
"""What a forked process runs: it came along with the parent's memory, model and all."""


def _adopt(score: Callable[[Sequence[int]], Scored]) -> None:
    global _score
    _score = score


def _adopted(text: Sequence[int]) -> Scored:
    return _score(text)


def _count(chosen: Tensor, num_experts: int) -> NDArray[np.int64]:
    """Return how often each expert occurs in [layers, T, k]."""
    rows = [torch.bincount(layer.flatten(), minlength=num_experts) for layer in chosen]
    return torch.stack(rows).numpy()


def _random_ops(ops: Ops, generator: torch.Generator) -> Ops:
    """Return ops that rank what may be chosen by noise instead of by its score."""

    def noise(scores: Tensor) -> Tensor:
        drawn = torch.rand(scores.shape, generator=generator)
        return drawn.masked_fill(scores == -math.inf, -math.inf)

    def select_topk(scores: Tensor, visible: Tensor, count: int) -> Tensor:
        return ops.select_topk(noise(scores), visible, count)

    def select_blocks(scores: Tensor, visible: Tensor, num_blocks: int, block_size: int) -> Tensor:
        return ops.select_blocks(noise(scores), visible, num_blocks, block_size)

    return replace(ops, select_topk=select_topk, select_blocks=select_blocks)


def _all_entries(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """Choose everything visible: [T, S], -1 padded; `count` does not bound it."""
    entry = torch.arange(scores.shape[1]).expand(scores.shape)
    return entry.masked_fill(entry >= visible[:, None], -1)


def _all_blocks(scores: Tensor, visible: Tensor, num_blocks: int, block_size: int) -> Tensor:
    """Choose every block with a visible entry."""
    block = torch.arange(-(-scores.shape[1] // block_size)).expand(scores.shape[0], -1)
    return block.masked_fill(block * block_size >= visible[:, None], -1)


class Streams:
    """Sequences side by side in caches of their own; what each computes does not depend on the
    others.
    """

    def __init__(self, model: FastModel, engine: EngineConfig, num: int, max_tokens: int) -> None:
        self.model = model
        self.layout = CacheLayout.build(model.config, engine.numerics.mode, _BLOCK)
        each = -(-max_tokens // _BLOCK)
        self._blocks = [list(range(1 + i * each, 1 + (i + 1) * each)) for i in range(num)]
        self._caches = Caches.allocate(
            self.layout,
            1 + num * each,
            1 + num,
            model.device,
            engine.cache.dequantized_bytes,
        )
        self.lengths = [0] * num

    def prefill(
        self, stream: int, token_ids: Sequence[int], trace: dict[str, Tensor] | None = None
    ) -> Tensor:
        """Feed tokens to one sequence; returns the logits of every row [T, V]."""
        return self._feed([stream], [token_ids], False, trace)

    def decode(self, streams: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Feed one token to each of some sequences; returns their logits [S, V]."""
        return self._feed(streams, [[token] for token in tokens], True, None)

    def draft(self, streams: Sequence[int], tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Draft behind `tokens`, not fed yet; returns drafts and raw confidences, each [S, B]."""
        assert self.model.draft is not None
        with torch.inference_mode():
            drafted, confidences, _ = self.model.draft.propose(
                self._caches,
                [stream + 1 for stream in streams],
                [self.lengths[stream] - 1 for stream in streams],
                tokens,
            )
        return drafted[:, 1:], confidences

    @torch.inference_mode()
    def _feed(
        self,
        streams: Sequence[int],
        token_ids: Sequence[Sequence[int]],
        decode: bool,
        trace: dict[str, Tensor] | None,
    ) -> Tensor:
        rows = [
            SequenceRows(stream + 1, self.lengths[stream], ids, self._blocks[stream])
            for stream, ids in zip(streams, token_ids, strict=True)
        ]
        inputs = build_inputs(rows, decode, self.layout, self.model.device)
        every = torch.arange(inputs.num_rows, device=self.model.device)
        logits = self.model.forward(inputs, self._caches, every, trace)
        for stream, ids in zip(streams, token_ids, strict=True):
            self.lengths[stream] += len(ids)
        return logits
