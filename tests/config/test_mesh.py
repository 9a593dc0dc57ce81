"""Mesh: every expert and every Engram row is held once a group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.config.mesh import Mesh, num_slots, split_evenly
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


@given(data=SIZES, context=SIZES, groups=SIZES, engines=st.integers(1, 3), rows=st.integers(1, 99))
def test_groups_partition_the_ranks(
    data: int, context: int, groups: int, engines: int, rows: int
) -> None:
    attention = data * context
    expert = attention // groups if attention % groups == 0 else attention
    for engram in {attention * engines, 1, attention}:
        mesh = Mesh(data=data, context=context, expert=expert, engram=engram)
        every = range(mesh.world)
        for group, place in (
            (mesh.data_group, mesh.data_rank),
            (mesh.context_group, mesh.context_rank),
            (mesh.expert_group, mesh.expert_rank),
            (mesh.engram_group, mesh.engram_rank),
        ):
            for rank in every:
                members = group(rank)
                assert rank in members
                assert all(group(other) == members for other in members)
                assert [place(other) for other in members] == list(range(len(members)))
        for rank in every:  # one rank in common: a prompt's ranks and those that vote
            assert set(mesh.data_group(rank)) & set(mesh.context_group(rank)) == {rank}
            assert {r // mesh.engine_size for r in mesh.expert_group(rank)} == {
                rank // mesh.engine_size
            }
        for row in range(rows):
            assert row in mesh.engram_rows(mesh.engram_owner(row, rows), rows)


@pytest.mark.parametrize(
    ("given_sizes", "data", "engram", "world"),
    [
        ({}, 1, 1, 1),
        ({"expert": 8}, 8, 8, 8),
        ({"expert": 8, "context": 4}, 2, 8, 8),
        ({"expert": 2, "context": 4}, 1, 4, 4),
        ({"data": 4}, 4, 4, 4),
        ({"data": 4, "engram": 1}, 4, 1, 4),
        ({"expert": 4, "engram": 8}, 4, 8, 8),
    ],
)
def test_sizes_left_open(given_sizes: dict[str, int], data: int, engram: int, world: int) -> None:
    mesh = Mesh.fit(**given_sizes)
    assert (mesh.data, mesh.engram, mesh.world) == (data, engram, world)


def test_fit_refuses() -> None:
    with pytest.raises(ConfigError, match=r"divisor of parallel\.data"):
        Mesh.fit(expert=4, context=3)
    with pytest.raises(ConfigError, match=r"parallel\.context"):
        Mesh.fit(context=0)
    with pytest.raises(ConfigError, match="rows 0 to 3"):
        Mesh().engram_owner(4, 4)


@pytest.mark.parametrize(
    ("experts", "ranks", "redundant", "slots"),
    [(384, 8, 16, 400), (384, 64, 64, 448), (128, 64, 0, 128), (128, 64, 1, 192), (16, 8, 4, 24)],
)
def test_physical_experts(experts: int, ranks: int, redundant: int, slots: int) -> None:
    assert num_slots(experts, ranks, redundant) == slots
    with pytest.raises(ConfigError, match="not negative"):
        num_slots(experts, ranks, -1)
