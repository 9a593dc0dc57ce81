"""From entries of a sequence to entries of a cache, and from columns to entries."""

from __future__ import annotations

from importlib.util import find_spec

from torch import Tensor

__all__ = ["block_entries", "flat_entries"]


def flat_entries(
    entries: Tensor,
    table: Tensor,
    rows: Tensor,
    per_block: int,
    blocks: Tensor | None = None,
    size: int = 1,
) -> Tensor:
    """Return block * per_block + offset of each entry.

    entries  [T, K]      int64 entries of each row's sequence, -1 = absent, and stays so
    table    [S, width]  int64 block tables
    rows     [T]         int64, the row of `table` that is a row's sequence
    blocks   [T, N]      int64: `entries` are columns of these blocks, as of `block_entries`
    """
    if entries.device.type == "cuda" and find_spec("triton"):
        from deepinfer.kernels.paged_index import triton

        return triton.flat_entries(entries, table, rows, per_block, blocks, size)
    if blocks is not None:
        entries = block_entries(entries, blocks, size)
    held = entries.clamp(min=0)
    page = table[rows[:, None], held // per_block]
    return (page * per_block + held % per_block).masked_fill_(entries < 0, -1)


def block_entries(found: Tensor, blocks: Tensor, size: int) -> Tensor:
    """Return the entries of a sequence that columns of its candidate blocks stand for.

    found   [T, K]  int64 columns, -1 = absent, and stays so
    blocks  [T, N]  int64: column c is entry c % size of block blocks[c // size]
    """
    held = found.clamp(min=0)
    return (blocks.gather(1, held // size) * size + held % size).masked_fill_(found < 0, -1)
