"""Formats and byte sizes of every cache of a checkpoint (pure).

Two pools hold everything. A **block** covers `tokens_per_block` positions of one sequence and keeps
the index keys and main entries of every layer that owns compressed KV. A **slot** belongs to one
sequence and keeps its window rings (backbone, then draft layers), its compressor tails and its
Engram tail. Block 0 and slot 0 are never given out: they absorb padding. Source: backbone
specification, 6 and 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from deepinfer.config import ModelConfig
from deepinfer.errors import ConfigError

__all__ = ["CacheLayout", "EntryFormat", "Part", "Ring", "entry_format"]

FormatName = Literal["window_fp8", "main_fp4", "index_fp4", "fp32"]

_ALIGN_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class EntryFormat:
    """How one cached vector of `dim` values is stored: code bytes, then scale bytes."""

    name: FormatName
    dim: int
    code_bytes: int
    scale_bytes: int

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry."""
        return self.code_bytes + self.scale_bytes


def entry_format(name: FormatName, dim: int) -> EntryFormat:
    """Return a format for vectors of `dim` values.

    window_fp8  e4m3, one ue8m0 byte per 32 values
    main_fp4    e2m1 pairs, one e4m3 byte per 16 values
    index_fp4   e2m1 pairs, one ue8m0 byte per 32 values
    fp32        unrounded, no scales
    """
    if name == "window_fp8":
        return EntryFormat(name, dim, dim, dim // 32)
    if name == "main_fp4":
        return EntryFormat(name, dim, dim // 2, dim // 16)
    if name == "index_fp4":
        return EntryFormat(name, dim, dim // 2, dim // 32)
    return EntryFormat(name, dim, 4 * dim, 0)


@dataclass(frozen=True, slots=True)
class Part:
    """The main entries or the index keys of one layer inside a block.

    Main entries interleave codes and scales; index keys keep all codes first, then all scales.
    """

    layer_id: int
    kind: Literal["main", "index"]
    ratio: int
    num_entries: int
    offset: int
    format: EntryFormat

    @property
    def num_bytes(self) -> int:
        """Bytes of this part in a block."""
        return self.num_entries * self.format.entry_bytes


@dataclass(frozen=True, slots=True)
class Ring:
    """One ring inside a slot: `length` entries of `entry_bytes`; position p lies at p % length."""

    offset: int
    length: int
    entry_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """Where everything lies in a block and in a slot.

    ratios        compression ratios in use, ascending
    windows       one ring per backbone layer, then one per draft layer
    tails         layer -> fp32 (gate, value) pairs of the last tokens, for ratios above 1
    engram_tail   int32 compressed ids of the last tokens, None without Engram layers
    """

    mode: Literal["official", "noq"]
    tokens_per_block: int
    window: int
    max_rollback: int
    ratios: tuple[int, ...]
    parts: tuple[Part, ...]
    block_bytes: int
    window_format: EntryFormat
    windows: tuple[Ring, ...]
    tails: tuple[tuple[int, Ring], ...]
    engram_tail: Ring | None
    engram_history: int
    slot_bytes: int

    @property
    def ring_length(self) -> int:
        """Positions a window ring holds."""
        return self.windows[0].length

    @property
    def tail_length(self) -> int:
        """Positions a compressor tail holds."""
        return 2 + max(0, self.max_rollback - 1)

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        mode: Literal["official", "noq"],
        tokens_per_block: int = 128,
        max_rollback: int | None = None,
    ) -> CacheLayout:
        """Lay out the caches of a checkpoint.

        mode          "official": the released byte formats; "noq": fp32 entries
        max_rollback  positions that a sequence may step back; None = one draft block and its bonus
        Raises ConfigError when a block does not hold whole entries of every ratio.
        """
        if max_rollback is None:
            max_rollback = config.dspark_block_size + 1 if config.num_nextn_predict_layers else 0
        if tokens_per_block < 1 or any(r and tokens_per_block % r for r in config.compress_ratios):
            raise ConfigError(
                f"cache.tokens_per_block: found {tokens_per_block}, expected a positive multiple "
                "of every compression ratio of the model (1 and 2)"
            )

        def stored(name: FormatName, dim: int) -> EntryFormat:
            return entry_format(name if mode == "official" else "fp32", dim)

        parts: list[Part] = []
        offset = 0
        main: FormatName = "main_fp4" if config.use_fp4_sparse_kv else "window_fp8"
        formats: tuple[tuple[Literal["main", "index"], EntryFormat], ...] = (
            ("index", stored("index_fp4", config.index_head_dim)),
            ("main", stored(main, config.head_dim)),
        )
        for layer in config.layers:
            if not layer.owns_kv:
                continue
            for kind, form in formats:
                num = tokens_per_block // layer.ratio
                part = Part(layer.layer_id, kind, layer.ratio, num, offset, form)
                parts.append(part)
                offset = _aligned(offset + part.num_bytes)
        block_bytes = offset

        window_format = stored("window_fp8", config.head_dim)
        length = config.sliding_window + max_rollback
        offset = 0
        windows: list[Ring] = []
        for _ in range(config.num_hidden_layers + config.num_nextn_predict_layers):
            windows.append(Ring(offset, length, window_format.entry_bytes))
            offset = _aligned(offset + length * window_format.entry_bytes)
        tails: list[tuple[int, Ring]] = []
        for layer in config.layers:
            if layer.owns_kv and layer.ratio > 1:
                ring = Ring(offset, layer.ratio + max(0, max_rollback - 1), 8 * config.head_dim)
                tails.append((layer.layer_id, ring))
                offset = _aligned(offset + ring.length * ring.entry_bytes)
        engram_tail = None
        history = max(config.engram_max_ngram_size - 1, 0) if config.engram_layer_ids else 0
        if history:
            engram_tail = Ring(offset, history + max_rollback, 4)
            offset = _aligned(offset + engram_tail.length * 4)
        ratios = sorted({layer.ratio for layer in config.layers if layer.ratio})
        return cls(
            mode=mode,
            tokens_per_block=tokens_per_block,
            window=config.sliding_window,
            max_rollback=max_rollback,
            ratios=tuple(ratios),
            parts=tuple(parts),
            block_bytes=block_bytes,
            window_format=window_format,
            windows=tuple(windows),
            tails=tuple(tails),
            engram_tail=engram_tail,
            engram_history=history,
            slot_bytes=offset,
        )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
