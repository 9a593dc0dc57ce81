"""The fast model beside the reference on one checkpoint, and several sequences by hand.

No row depends on later ones, so one reference pass over a long sequence holds the expected values
of every shorter one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.cache.layout import CacheLayout
from deepinfer.cache.tensors import Caches
from deepinfer.chat.token_map import load_token_map
from deepinfer.config import ModelConfig
from deepinfer.config.engine import NumericsConfig
from deepinfer.model.fast.inputs import ReplayMode, SequenceRows, build_inputs
from deepinfer.model.fast.model import FastModel
from deepinfer.model.fast.session import Session
from deepinfer.model.reference import Numerics, ReferenceModel
from deepinfer.weights.load import TensorSource
from deepinfer.weights.reader import Checkpoint

MODES: tuple[Numerics, ...] = ("noq", "official")
ROWS_FIRST = ("logits", "main_hidden", "engram_hash", "cand_blocks", "cand_margin")
LONGEST = 600
DENSE_BYTES = 1 << 27


def load_fast(
    folder: Path,
    mode: Numerics,
    *,
    dense: int = DENSE_BYTES,
    with_drafts: bool = True,
    only_reference: bool = False,
    checked: bool = True,
    **numerics: str,
) -> FastModel:
    """Load the fast model of a folder on the CPU; `numerics` are more fields of NumericsConfig."""
    checkpoint = Checkpoint.open(folder)
    return FastModel.load(
        checkpoint,
        NumericsConfig(mode=mode, **numerics),  # type: ignore[arg-type]
        "cpu",
        load_token_map(folder, checkpoint.config),
        dense,
        with_drafts=with_drafts,
        only_reference=only_reference,
        checked=checked,
    )


def load_reference(folder: Path, mode: Numerics, projection: str = "bf16") -> ReferenceModel:
    """Load the reference model of a folder."""
    checkpoint = Checkpoint.open(folder)
    return ReferenceModel(
        checkpoint.config,
        TensorSource(checkpoint).as_dict(),
        load_token_map(folder, checkpoint.config),
        mode,
        projection,  # type: ignore[arg-type]
    )


@dataclass
class Pair:
    """Both models of one checkpoint in one arithmetic, and one long sequence.

    ids       [LONGEST] random tokens
    expected  the reference's trace over all of them, windows laid out in full
    """

    folder: Path
    mode: Numerics
    fast: FastModel
    reference: ReferenceModel
    ids: list[int]
    expected: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path, mode: Numerics, length: int = LONGEST, seed: int = 1) -> Pair:
        """Load both and run the reference once."""
        reference = load_reference(folder, mode)
        ids = random_ids(reference.config, length, seed)
        trace: dict[str, Tensor] = {}
        reference.forward(ids, trace, window_slots="full")
        return cls(folder, mode, load_fast(folder, mode), reference, ids, trace)

    @property
    def config(self) -> ModelConfig:
        """Their config."""
        return self.fast.config


def random_ids(config: ModelConfig, length: int, seed: int) -> list[int]:
    """Draw tokens of the whole vocabulary, images left out; PAD and EOS are ordinary here."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, config.vocab_size, (length,), generator=generator)
    ids[ids == config.image_token_id] = config.bos_token_id
    return [int(i) for i in ids]


def rows_of(trace: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    """Cut rows start..stop-1 out of a trace."""
    return {
        name: value[start:stop] if name in ROWS_FIRST else value[:, start:stop]
        for name, value in trace.items()
        if name != "tokens"
    }


def assert_rows_equal(
    got: Mapping[str, Tensor], expected: Mapping[str, Tensor], start: int = 0
) -> None:
    """Every traced value has the bits of the reference's rows from `start` on."""
    count = got["logits"].shape[0]
    want = rows_of(expected, start, start + count)
    wrong: list[str] = []
    for name, actual in got.items():
        if name == "tokens":
            continue
        target = want[name]
        if name == "cand_blocks":  # as wide as the longest row needs
            assert not target[:, actual.shape[1] :].any(), "blocks beyond the sequence"
            target = target[:, : actual.shape[1]]
        if actual.shape != target.shape or not torch.equal(actual, target.to(actual.dtype)):
            wrong.append(name)
    assert not wrong, f"{wrong} differ from the reference, rows {start}..{start + count - 1}"
    assert {"logits", "stream_out", "attn_out", "ffn_out", "route_idx"} <= set(got)


@dataclass
class Row:
    """One sequence of a Bench."""

    slot: int
    blocks: list[int]
    length: int = 0


class Bench:
    """Several sequences in shared caches, with blocks and slots dealt out of order.

    fill  byte that all caches hold before use
    """

    def __init__(
        self,
        model: FastModel,
        num_sequences: int,
        max_tokens: int,
        tokens_per_block: int = 128,
        fill: int = 0,
        max_rollback: int | None = None,
        dense_cache: int = 0,
    ) -> None:
        self.model = model
        mode: Numerics = "official" if model.numerics.quantize else "noq"
        self.layout = CacheLayout.build(model.config, mode, tokens_per_block, max_rollback)
        each = -(-max_tokens // tokens_per_block)
        total = num_sequences * each + 1
        self.caches = Caches.allocate(self.layout, total, num_sequences + 1, "cpu", dense_cache)
        if fill:
            self.fill(fill)
        order = list(range(total - 1, 0, -1))
        self.rows = [
            Row(num_sequences - i, order[i::num_sequences][:each]) for i in range(num_sequences)
        ]

    def fill(self, byte: int) -> None:
        """Overwrite everything held, padding and decoded copies too."""
        self.caches.blocks.fill_(byte)
        self.caches.slots.fill_(byte)
        caches = [*self.caches.windows, *self.caches.main.values(), *self.caches.index.values()]
        for cache in caches:
            if cache.dense is not None:
                cache.dense.fill_(float("nan"))

    @torch.inference_mode()
    def feed(
        self,
        parts: Iterable[tuple[int, Sequence[int]]],
        decode: bool = False,
        trace: dict[str, Tensor] | None = None,
        replay: ReplayMode = "off",
        floors: Mapping[int, int] | None = None,
        saves: Mapping[int, Sequence[tuple[int, int]]] | None = None,
    ) -> list[Tensor]:
        """Run one step of (sequence, tokens); returns each one's logits [n, V].

        floors, saves  of the sequences that have any; with dropped rows, logits are those of kept
                       rows only
        """
        parts = list(parts)
        floors, saves = floors or {}, saves or {}
        step = [
            SequenceRows(
                self.rows[i].slot,
                self.rows[i].length,
                ids,
                self.rows[i].blocks[
                    : -(-(self.rows[i].length + len(ids)) // self.layout.tokens_per_block)
                ],
                floors.get(i, 0),
                saves.get(i, ()),
            )
            for i, ids in parts
        ]
        inputs = build_inputs(step, decode, self.layout, "cpu", replay)
        counts = [len(ids) for _, ids in parts]
        rows = torch.arange(inputs.num_rows)
        if replay == "compact" and not decode:
            skipped = [min(max(s.floor - s.start, 0), len(s.token_ids)) for s in step]
            starts = torch.tensor([0, *counts]).cumsum(0)[:-1].tolist()
            ends = zip(starts, skipped, counts, strict=True)
            rows = torch.cat([rows[at + skip : at + count] for at, skip, count in ends])
            counts = [count - skip for count, skip in zip(counts, skipped, strict=True)]
        logits = self.model.forward(inputs, self.caches, rows, trace)
        for i, ids in parts:
            self.rows[i].length += len(ids)
        return list(torch.split(logits, counts))

    @torch.inference_mode()
    def draft(self, parts: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor]:
        """Draft for (sequence, first token), all at once."""
        assert self.model.draft is not None
        return self.model.draft.propose(
            self.caches,
            [self.rows[i].slot for i, _ in parts],
            [self.rows[i].length - 1 for i, _ in parts],
            [token for _, token in parts],
        )


def new_session(pair: Pair, tokens_per_block: int = 128, length: int = LONGEST) -> Session:
    """A sequence of its own with room for `length` tokens."""
    return Session(pair.fast, length, tokens_per_block)
