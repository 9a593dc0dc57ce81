"""Every op refuses arguments that do not fit, and says which one of what."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer.device import pick_device
from deepinfer.errors import ShapeError
from deepinfer.kernels.cases import Case, all_cases
from deepinfer.kernels.ops import Ops
from deepinfer.kernels.table import TABLE

OPS = Ops.resolve(pick_device("cpu").capability)
FIRST: dict[str, Case] = {c.op: c for c in reversed(all_cases()) if not c.large}


def arguments_of(op: str) -> list[object]:
    return list(FIRST[op].build(4, torch.Generator().manual_seed(0)))


# op -> (place of the argument to replace, what replaces it, what the message must name)
WRONG: dict[str, list[tuple[int, Tensor, str]]] = {
    "rms_norm": [(1, torch.ones(5), "weight"), (0, torch.ones(5), "x")],
    "cos_sin": [(0, torch.zeros(3), "positions"), (1, torch.ones(2, 2), "inv_freq")],
    "rotate_tail": [(0, torch.ones(5), "x")],
    "round_trip": [(0, torch.ones(2, 33), "last dimension 33")],
    "fp8_linear": [(0, torch.ones(2, 32, 1), "x"), (0, torch.ones(2, 3), "weight.codes")],
    "dense_linear": [(0, torch.ones(2), "x"), (0, torch.ones(2, 3), "weight.stored")],
    "grouped_linear": [(0, torch.ones(2, 3), "x"), (0, torch.ones(2, 2, 3), "weight.codes")],
    "expert_linear": [(0, torch.ones(2), "x"), (0, torch.ones(7, 64), "7 rows")],
    "swiglu": [(1, torch.ones(4, 5), "up")],
    "routed_experts": [
        (1, torch.zeros(4), "rows of type"),
        (2, torch.ones(5), "weights"),
        (0, torch.ones(5, 7), "w2.codes"),
    ],
    "route": [(0, torch.ones(2, 3), "gate.stored"), (2, torch.ones(5), "bias")],
    "route_rounded": [(0, torch.ones(2, 3), "gate.stored"), (2, torch.ones(5), "bias")],
    "hyper_mix": [(0, torch.ones(2, 3), "h"), (3, torch.ones(7), "base")],
    "hyper_collapse": [(1, torch.ones(4, 7), "pre")],
    "hyper_expand": [
        (1, torch.ones(4, 7), "y"),
        (2, torch.ones(4, 7), "post"),
        (3, torch.ones(4, 4, 7), "comb"),
    ],
    "hyper_site": [
        (1, torch.ones(4, 7), "y"),
        (2, torch.ones(4, 7), "post"),
        (4, torch.ones(5, 4), "pre"),
    ],
    "hyper_site_rounded": [(1, torch.ones(4, 7), "y"), (4, torch.ones(5, 4), "pre")],
    "latent_entry": [(0, torch.ones(4, 7), "rows of 7"), (3, torch.ones(5, 2), "cos")],
    "latent_store": [
        (0, torch.ones(4, 7), "rows of 7"),
        (8, torch.zeros(5, dtype=torch.int64), "idx"),
    ],
    "compress": [(1, torch.ones(4, 7), "gate"), (0, torch.ones(3), "kv")],
    "index_score": [(1, torch.ones(4, 7), "weight"), (2, torch.ones(5, 7), "keys")],
    "select_topk": [(0, torch.ones(4), "scores"), (1, torch.ones(5), "visible")],
    "select_blocks": [(0, torch.ones(4), "scores"), (1, torch.ones(5), "visible")],
    "block_mask": [(0, torch.ones(4), "blocks")],
    "sparse_attention": [
        (1, torch.ones(9, 7), "window_kv"),
        (2, torch.zeros(5, 8, dtype=torch.int64), "window_idx"),
        (5, torch.ones(99), "sink"),
    ],
    "paged_index_score": [
        (1, torch.ones(4, 7), "weight"),
        (4, torch.zeros(5, dtype=torch.int64), "rows"),
        (3, torch.zeros(3, 1, dtype=torch.int64), "entries of tables"),
    ],
    "paged_attention": [
        (2, torch.zeros(5, 8, dtype=torch.int64), "window_idx"),
        (5, torch.ones(99), "sink"),
    ],
    "cache_load": [(1, torch.zeros(2, 2, dtype=torch.int64), "idx")],
    "engram_hash": [(0, torch.zeros(4, dtype=torch.int64), "ngrams"), (1, torch.ones(9), "multip")],
    "engram_lookup": [(2, torch.zeros(4, dtype=torch.int64), "rows")],
    "engram_gate": [(1, torch.ones(5, 9), "kv"), (2, torch.ones(1, 1), "qk_weight")],
}


def test_every_op_is_tried() -> None:
    assert set(WRONG) == set(TABLE) - {"cache_store", "entry_store"}  # they return nothing


@pytest.mark.parametrize(
    ("op", "place", "wrong", "named"),
    [(op, *entry) for op, entries in WRONG.items() for entry in entries],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_a_wrong_shape_is_refused(op: str, place: int, wrong: Tensor, named: str) -> None:
    arguments = arguments_of(op)
    getattr(OPS, op)(*arguments)  # right as they are
    arguments[place] = wrong
    prefix = r"(act8|round_trip)" if op == "round_trip" else op
    with pytest.raises(ShapeError, match=rf"^{prefix}: .*{named}"):
        getattr(OPS, op)(*arguments)


def test_an_expert_needs_as_many_offsets_as_experts() -> None:
    arguments = arguments_of("expert_linear")
    offsets = arguments[2]
    assert isinstance(offsets, list)
    for wrong in (offsets[1:], [*offsets, offsets[-1]], [*offsets[:-1], offsets[-1] + 1]):
        with pytest.raises(ShapeError, match=rf"^expert_linear: {len(wrong)} offsets ending in"):
            OPS.expert_linear(arguments[0], arguments[1], wrong, arguments[3])


def test_compress_takes_whole_runs() -> None:
    with pytest.raises(ShapeError, match="compress: 5 rows, expected a multiple of 2"):
        OPS.compress(torch.ones(5, 4), torch.ones(5, 4), 2)
