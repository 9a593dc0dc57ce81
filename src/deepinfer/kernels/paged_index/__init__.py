"""Index scores of a sequence's keys where they lie in their cache."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from deepinfer.errors import ShapeError
from deepinfer.kernels.cache_io import PagedCache
from deepinfer.kernels.contract import check
from deepinfer.kernels.paged_index import reference

__all__ = ["paged_index_score"]

_Impl = Callable[
    [Tensor, Tensor, PagedCache, Tensor, Tensor, Tensor, Tensor | None, int, int, str], Tensor
]


def paged_index_score(
    q: Tensor,
    weight: Tensor,
    cache: PagedCache,
    table: Tensor,
    rows: Tensor,
    visible: Tensor,
    blocks: Tensor | None,
    block_size: int,
    num_entries: int,
    rounding: str,
    *,
    impl: _Impl = reference.paged_index_score,
) -> Tensor:
    """Score entries of each row's sequence by its queries; -inf for what a row does not see.

    q            [T, H, D]  bf16 or fp32, quantized
    weight       [T, H]     dtype of q
    cache        index keys, any format
    table        [S, width] int64 block tables; entry e of a sequence is entry e % per_block of its
                 block e // per_block
    rows         [T]        int64, the row of `table` that is a row's sequence
    visible      [T]        int64, entries 0..visible-1 are seen
    blocks       [T, n]     int64 candidate blocks of `block_size` entries, ascending, -1 padded;
                 column c of the result is then entry blocks[c // size] * size + c % size. None:
                 column c is entry c
    num_entries  columns without `blocks`; at most what `table` covers
    rounding     as of `index_score`
    returns      [T, num_entries] or [T, n * block_size] fp32; an implementation may return bf16
                 where `rounding` leaves nothing that bf16 lacks, and rows further apart than long
    Equals `cache_load`, then `index_score`. Source: backbone specification, 3.4.
    """
    check(
        "paged_index_score",
        ("q", q, "T H D"),
        ("weight", weight, "T H"),
        ("table", table, "_ _"),
        ("rows", rows, "T"),
        ("visible", visible, "T"),
    )
    if blocks is not None:
        check("paged_index_score", ("q", q, "T H D"), ("blocks", blocks, "T _"))
    elif num_entries > table.shape[1] * cache.codes.shape[1]:
        raise ShapeError(
            f"paged_index_score: {num_entries} entries of tables of {table.shape[1]} blocks of "
            f"{cache.codes.shape[1]}"
        )
    columns = num_entries if blocks is None else blocks.shape[1] * block_size
    if not q.shape[0] or not columns:
        return q.new_empty(q.shape[0], columns).float()
    return impl(q, weight, cache, table, rows, visible, blocks, block_size, num_entries, rounding)
