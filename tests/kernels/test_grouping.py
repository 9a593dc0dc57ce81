"""Choices sorted by expert and summed back, against plain Python."""

from __future__ import annotations

import pytest
import torch

from deepinfer.kernels.grouping import combine, group


def draw(num_rows: int, active: int, experts: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.stack(
        [torch.randperm(experts, generator=generator)[:active] for _ in range(num_rows)]
    )
    chosen[torch.rand(chosen.shape, generator=generator) < 0.2] = -1
    return chosen, torch.rand(chosen.shape, generator=generator)


@pytest.mark.parametrize(("num_rows", "active", "experts"), [(1, 3, 8), (17, 6, 24), (40, 1, 3)])
def test_choices_are_sorted_by_expert_and_those_left_out_stand_last(
    num_rows: int, active: int, experts: int, seed: int
) -> None:
    chosen, weight = draw(num_rows, active, experts, seed)
    live = torch.ones(num_rows, dtype=torch.bool)
    live[1::4] = False
    found = group(chosen, weight, experts, live)
    chosen = chosen.masked_fill(~live[:, None], -1)
    flat = chosen.flatten().tolist()
    order = sorted(range(len(flat)), key=lambda i: (flat[i] if flat[i] >= 0 else experts, i))
    assert found.rows.tolist() == [i // active for i in order]
    assert torch.equal(found.weights, weight.flatten()[order])
    assert found.offsets.tolist() == [sum(0 <= c < e for c in flat) for e in range(experts + 1)]
    places = found.place.flatten().tolist()
    assert places == [order.index(i) if flat[i] >= 0 else -1 for i in range(len(flat))]


def test_terms_add_up_in_the_order_of_experts_and_the_shared_one_comes_last(seed: int) -> None:
    chosen, weight = draw(9, 4, 12, seed)
    found = group(chosen, weight, 12)
    generator = torch.Generator().manual_seed(seed)
    routed = torch.randn(36, 8, generator=generator).bfloat16()
    shared = torch.randn(9, 8, generator=generator).bfloat16()
    got = combine(routed, found.place, shared)
    for row in range(9):
        total = torch.zeros(8)
        by_expert = sorted(
            (e, p) for e, p in zip(chosen[row].tolist(), found.place[row].tolist(), strict=True)
        )
        for expert, place in by_expert:
            if expert >= 0:
                total = total + routed[place].float()
        assert torch.equal(got[row], (total + shared[row].float()).bfloat16())
