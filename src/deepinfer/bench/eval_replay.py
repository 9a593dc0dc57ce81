"""What bounded replay costs in quality and what it saves, against the exact prefill.

A prompt is prefilled both ways and its true continuation is scored behind each, as decoding would
see it. Only `compact` runs: `mask` gives the same numbers (tests/model/test_replay.py).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from deepinfer.bench.evaldata import held_out_documents
from deepinfer.bench.evalreport import Figure
from deepinfer.cache.layout import CacheLayout
from deepinfer.cache.tensors import Caches
from deepinfer.engine.replay import exact_keep_tokens, least_keep_tokens, replay_floor
from deepinfer.model.fast.inputs import SequenceRows, build_inputs

if TYPE_CHECKING:
    from deepinfer.bench.evalmodel import EvalModel
    from deepinfer.bench.evaluate import Evaluation

__all__ = ["keeps", "replay"]

TIMED_TOKENS: Final = 1500
_CONTINUED: Final = 128
_LEAST_PROMPT: Final = 384
_ROWS: Final = 24
_REPEATS: Final = 3


def keeps(model: EvalModel) -> list[int]:
    """Return the numbers of kept tokens to compare: the default, its double, the exact bound."""
    least = -(-least_keep_tokens(model.engine, model.config) // 10) * 10
    return sorted({least, 2 * least, exact_keep_tokens(model.config)})


def replay(run: Evaluation) -> Iterator[Figure]:
    """Yield bits per byte and greedy agreement of continuations, decoder rows and prefill times.

    Counts are bytes, tokens, prompt tokens and repeats. Labels: `keep`, 0 = replay off.
    """
    model = run.model
    rows = [row for row in run.rows(held_out_documents())
            if len(row.token_ids) > _LEAST_PROMPT + _CONTINUED]  # fmt: skip
    rows = list(run.picked(rows, run.capped(_ROWS)))
    compared = [0, *keeps(model)]
    bits = dict.fromkeys(compared, 0.0)
    agreed = dict.fromkeys(compared, 0)
    first = dict.fromkeys(compared, 0)
    num_bytes = num_tokens = 0
    run.tell(f"replay: {len(rows)} prompts, each continued by {_CONTINUED} tokens")
    for row in rows:
        ids = list(row.token_ids)[: model.max_tokens]
        prompt, rest = ids[:-_CONTINUED], ids[-_CONTINUED:]
        num_bytes += len(b"".join(map(run.tokenizer.piece, rest)))
        num_tokens += len(rest)
        exact: Tensor | None = None
        for keep in compared:
            logits = continued(model, prompt, rest, keep)
            wanted = torch.tensor(rest)
            nats = -logits.log_softmax(-1).gather(1, wanted[:, None]).double().sum()
            bits[keep] += float(nats) / math.log(2)
            best = logits.argmax(-1)
            exact = best if exact is None else exact
            agreed[keep] += int((best == exact).sum())
            first[keep] += int(best[0] == exact[0])
    for keep in compared if rows else ():
        yield _figure("model", "bits/byte", bits[keep] / num_bytes, num_bytes, keep)
        yield _figure("greedy agreement", "share", agreed[keep] / num_tokens, num_tokens, keep)
        yield _figure("first token agreement", "share", first[keep] / len(rows), len(rows), keep)
    yield from _times(run, compared)


def continued(model: EvalModel, prompt: Sequence[int], rest: Sequence[int], keep: int) -> Tensor:
    """Return the logits [len(rest), V] that predict `rest` behind a prompt.

    keep  tokens that the decoder half keeps of the prompt, 0 = all
    """
    sequence = _Sequence(model, len(prompt) + len(rest))
    last = sequence.feed(prompt, replay_floor(len(prompt), keep or None), 1)
    if len(rest) == 1:
        return last
    return torch.cat([last, sequence.feed(rest[:-1], 0, len(rest) - 1)])


def _times(run: Evaluation, compared: Sequence[int]) -> Iterator[Figure]:
    """Yield the processor time of one prefill, in turns so that a slow spell hits all alike; under
    a limit of one alone.
    """
    model = run.model
    ids = [i for row in run.rows(held_out_documents()) for i in row.token_ids]
    prompt = (ids * -(-TIMED_TOKENS // len(ids)))[: min(TIMED_TOKENS, model.max_tokens)]
    repeats = _REPEATS if run.limit is None else 1
    run.tell(f"replay: prefill of {len(prompt)} tokens, {repeats} times each way")
    took: dict[int, list[float]] = {keep: [] for keep in compared}
    for _ in range(repeats):
        for keep in compared:
            sequence = _Sequence(model, len(prompt))
            start = time.process_time()
            sequence.feed(prompt, replay_floor(len(prompt), keep or None), 1)
            took[keep].append(time.process_time() - start)
    for keep in compared:
        rows = min(keep or len(prompt), len(prompt))
        yield _figure("decoder rows", "rows", rows, len(prompt), keep)
        yield _figure("prefill", "s (CPU)", statistics.median(took[keep]), len(prompt), keep)


def _figure(name: str, unit: str, value: float, count: int, keep: int) -> Figure:
    return Figure(
        task="replay", name=name, unit=unit, value=value, count=count, labels={"keep": keep}
    )


class _Sequence:
    """One sequence in caches of its own."""

    def __init__(self, model: EvalModel, max_tokens: int) -> None:
        self._model = model.model
        self._layout = CacheLayout.build(model.config, model.engine.numerics.mode)
        num_blocks = -(-max_tokens // self._layout.tokens_per_block)
        self._blocks = list(range(1, num_blocks + 1))
        self._caches = Caches.allocate(
            self._layout,
            num_blocks + 1,
            2,
            self._model.device,
            model.engine.cache.dequantized_bytes,
        )
        self._length = 0

    @torch.inference_mode()
    def feed(self, token_ids: Sequence[int], floor: int, num_logits: int) -> Tensor:
        """Prefill tokens; returns the logits of the last rows."""
        rows = SequenceRows(1, self._length, token_ids, self._blocks, floor)
        inputs = build_inputs([rows], False, self._layout, self._model.device, "compact")
        wanted = torch.arange(len(token_ids) - num_logits, len(token_ids))
        logits = self._model.forward(inputs, self._caches, wanted)
        self._length += len(token_ids)
        return logits
