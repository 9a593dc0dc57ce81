"""Mesh: every expert and every Engram row is held once a group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.config.mesh import Mesh, split_evenly
from deepinfer.errors import ConfigError

SIZES = st.integers(1, 6)


@given(count=st.integers(0, 500), parts=st.integers(1, 40))
def test_split_covers_once(count: int, parts: int) -> None:
    found = [i for part in range(parts) for i in split_evenly(count, parts, part)]
    assert found == list(range(count))


@given(data=SIZES, context=SIZES, groups=SIZES, engram=SIZES, rows=st.integers(1, 300))
def test_groups_hold_everything(
    data: int, context: int, groups: int, engram: int, rows: int
) -> None:
    attention = data * context
    if attention % groups:
        return
    expert = attention // groups
    mesh = Mesh(data=data, context=context, expert=expert, engram=attention * engram)
    assert mesh.world == attention * engram
    held = [e for rank in range(expert) for e in mesh.expert_range(rank, expert * 3)]
    assert held == list(range(expert * 3))
    held = [r for rank in range(mesh.world) for r in mesh.engram_rows(rank, rows)]
    assert held == list(range(rows))


def test_numbering() -> None:
    mesh = Mesh(data=4, context=2, expert=4, engram=8)
    assert [mesh.context_rank(r) for r in range(8)] == [0, 1] * 4
    assert [mesh.data_rank(r) for r in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [mesh.expert_rank(r) for r in range(8)] == [0, 1, 2, 3] * 2
    assert [mesh.engram_rank(r) for r in range(8)] == list(range(8))
    assert mesh.expert_range(5, 384) == range(96, 192)


@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 0},
        {"expert": 2},
        {"data": 4, "expert": 3},
        {"data": 6, "engram": 4},
        {"data": True},
    ],
)
def test_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="parallel"):
        Mesh(**sizes)


def test_bad_rank_and_experts() -> None:
    mesh = Mesh(data=4, expert=4)
    with pytest.raises(ConfigError, match="ranks 0 to 3"):
        mesh.expert_range(4, 8)
    with pytest.raises(ConfigError, match="divisor of the 6 experts"):
        mesh.expert_range(0, 6)
