"""Acceptance of drafts: greedy and coupled exactly, rejection by its distribution."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.sampling.host import draw_host
from deepinfer.sampling.noise import STREAM_DRAFT, STREAM_TARGET
from deepinfer.sampling.sampler import draw
from deepinfer.sampling.speculative import (
    Windows,
    accept_equal,
    accept_rejection,
    split_budget,
)

VOCAB = 6
K = 3


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_equal_accepts_the_leading_matches(data: st.DataObject) -> None:
    num = data.draw(st.integers(1, 5))
    counts = data.draw(st.lists(st.integers(0, K), min_size=num, max_size=num))
    token = st.integers(0, 1)
    drafts = [data.draw(st.lists(token, min_size=K, max_size=K)) for _ in range(num)]
    flat = data.draw(
        st.lists(token, min_size=sum(counts) + num, max_size=sum(counts) + num), label="sampled"
    )
    first = list(itertools.accumulate([0, *(c + 1 for c in counts)]))[:-1]
    windows = Windows(torch.tensor(first), torch.tensor(drafts), torch.tensor(counts))
    accepted, emitted = accept_equal(torch.tensor(flat), windows)
    for i in range(num):
        own = flat[first[i] : first[i] + counts[i] + 1]
        right = 0
        while right < counts[i] and own[right] == drafts[i][right]:
            right += 1
        assert int(accepted[i]) == right
        assert emitted[i, : right + 1].tolist() == own[: right + 1]


def toy_logits(generator: torch.Generator, noise: float) -> tuple[Tensor, Tensor]:
    """Target and draft logits [VOCAB+1, VOCAB], by the token before (the last row begins)."""
    target = torch.randn(VOCAB + 1, VOCAB, generator=generator) * 1.5
    target[:, 1] = -math.inf  # what a filter took out
    draft = target + torch.randn(VOCAB + 1, VOCAB, generator=generator) * noise
    return target, draft


def plain(target: Tensor, seeds: Tensor, length: int) -> Tensor:
    """[N, length] tokens drawn one by one."""
    last = torch.full_like(seeds, VOCAB)
    tokens = []
    for position in range(length):
        last = draw(target[last], seeds, torch.full_like(seeds, position))
        tokens.append(last)
    return torch.stack(tokens, 1)


def speculate(
    rule: str, target: Tensor, draft: Tensor, seeds: Tensor, counts: Tensor, length: int
) -> tuple[Tensor, float]:
    """[N, length] tokens from steps that verify `counts` drafts, and the share accepted."""
    num = len(seeds)
    out = torch.zeros(num, length + K + 1, dtype=torch.int64)
    have = torch.zeros(num, dtype=torch.int64)
    last = torch.full((num,), VOCAB)
    tried = hit = 0
    row = torch.arange(num)
    while int(have.min()) < length:
        drafts, draft_rows, prev = [], [], last
        for place in range(K):
            stream = STREAM_TARGET if rule == "coupled" else STREAM_DRAFT
            draft_rows.append(draft[prev])
            prev = draw(draft[prev], seeds, have + place, stream)
            drafts.append(prev)
        matrix = torch.stack(drafts, 1)
        places = torch.arange(K + 1)
        inputs = torch.cat([last.unsqueeze(1), matrix], 1)
        real = places <= counts.unsqueeze(1)
        first = torch.cat([torch.zeros(1, dtype=torch.int64), (counts + 1).cumsum(0)[:-1]])
        positions = (have.unsqueeze(1) + places)[real]
        logits = target[inputs[real]]
        tokens = draw(logits, seeds.unsqueeze(1).expand(-1, K + 1)[real], positions)
        windows = Windows(first, matrix, counts)
        if rule == "coupled":
            accepted, emitted = accept_equal(tokens, windows)
        else:
            accepted, emitted = accept_rejection(
                tokens,
                logits,
                torch.stack(draft_rows, 1),
                windows,
                seeds,
                have,
                torch.zeros(num, dtype=torch.bool),
            )
        for place in range(K + 1):
            keep = (place <= accepted) & (have + place < length)
            out[row[keep], (have + place)[keep]] = emitted[keep, place]
        last = emitted[row, accepted]
        have = torch.minimum(have + accepted + 1, torch.tensor(length))
        tried, hit = tried + int(counts.sum()), hit + int(accepted.sum())
    return out[:, :length], hit / tried if tried else 0.0


def test_coupled_output_does_not_depend_on_drafts() -> None:
    generator = torch.Generator().manual_seed(1)
    target, draft = toy_logits(generator, 0.7)
    seeds = torch.arange(400)
    expected = plain(target, seeds, 12)
    for counts in (0, 1, 3, None):
        verify = (
            torch.randint(0, K + 1, (400,), generator=generator)
            if counts is None
            else torch.full((400,), counts)
        )
        got, _ = speculate("coupled", target, draft, seeds, verify, 12)
        assert torch.equal(got, expected)


def test_coupled_drafts_agree_more_often_than_independent_ones() -> None:
    generator = torch.Generator().manual_seed(2)
    target, draft = toy_logits(generator, 0.3)
    seeds, counts = torch.arange(2000), torch.full((2000,), K)
    _, coupled = speculate("coupled", target, draft, seeds, counts, 8)
    _, rejection = speculate("rejection", target, draft, seeds, counts, 8)
    distance = 0.5 * (target.softmax(-1) - draft.softmax(-1)).abs().sum(-1).mean()
    assert coupled > float((1 - distance) / (1 + distance)) * 0.75  # whole prefixes must agree
    assert rejection > 0.75 and coupled > 0.7


@pytest.mark.parametrize("verify", ["fixed", "variable"])
@pytest.mark.parametrize("noise", [0.0, 0.5, 3.0])
def test_rejection_follows_the_target(noise: float, verify: str) -> None:
    """Two samples of tuples, plain and speculated with other seeds, by a chi-square test each."""
    num, length = 8000, 4
    generator = torch.Generator().manual_seed(3)
    target, draft = toy_logits(generator, noise)
    counts = torch.full((num,), K)
    if verify == "variable":
        counts = torch.randint(0, K + 1, (num,), generator=generator)
    want = plain(target, torch.arange(num), length)
    got, _ = speculate("rejection", target, draft, torch.arange(num) + 10**10, counts, length)
    assert not (got == 1).any(), "a filtered token came out"
    # Pairs of neighbours at each place, and the first with the last.
    pairs = [(0, 1), (1, 2), (2, 3), (0, 3)]
    for one, two in pairs:
        cells_want = torch.bincount(want[:, one] * VOCAB + want[:, two], minlength=VOCAB**2)
        cells_got = torch.bincount(got[:, one] * VOCAB + got[:, two], minlength=VOCAB**2)
        both = (cells_want + cells_got).double()
        live = both >= 10
        statistic = ((cells_want - cells_got)[live].double() ** 2 / both[live]).sum()
        freedom = int(live.sum()) - 1
        # Bonferroni over 4 pairs x 6 cases at 1e-3: 3.93 deviations, as a chi-square quantile.
        part = 2 / (9 * freedom)
        assert float(statistic) < freedom * (1 - part + 3.93 * math.sqrt(part)) ** 3, (one, two)


def test_rejection_that_replaced_by_the_target_would_be_noticed() -> None:
    """The residual matters: drawing the replacement from p itself shifts the first token."""
    num = 6000
    target, draft = toy_logits(torch.Generator().manual_seed(3), 3.0)
    seeds = torch.arange(num)
    p, q = target[VOCAB].softmax(-1), draft[VOCAB].softmax(-1)
    exact = p
    naive = torch.minimum(p, q) + (1 - torch.minimum(p, q).sum()) * p
    assert float((exact - naive).abs().sum()) > 0.2
    got, _ = speculate("rejection", target, draft, seeds, torch.full((num,), 1), 1)
    seen = torch.bincount(got[:, 0], minlength=VOCAB) / num
    assert float((seen - exact).abs().max()) < 0.03 < float((seen - naive).abs().max())


def test_greedy_rows_use_equality_under_both_rules() -> None:
    tokens = torch.tensor([4, 2, 3])
    target = torch.full((3, VOCAB), -1.0)
    target[torch.arange(3), tokens] = 1.0
    drafts = torch.tensor([[4, 5]])
    windows = Windows(torch.tensor([0]), drafts, torch.tensor([2]))
    accepted, emitted = accept_rejection(
        tokens,
        target,
        torch.zeros(1, 2, VOCAB),
        windows,
        torch.tensor([1]),
        torch.tensor([0]),
        torch.tensor([True]),
    )
    assert accepted.tolist() == [1] and emitted[0, :2].tolist() == [4, 2]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_split_takes_the_likeliest(data: st.DataObject) -> None:
    num, most = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    value = st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0])
    confidences = [data.draw(st.lists(value, min_size=most, max_size=most)) for _ in range(num)]
    valid = data.draw(st.lists(st.integers(0, most), min_size=num, max_size=num))
    budget = data.draw(st.integers(0, num * most + 2))
    got = split_budget(
        torch.tensor(confidences), torch.tensor(valid), torch.tensor(budget)
    ).tolist()
    assert all(0 <= g <= v for g, v in zip(got, valid, strict=True))
    assert sum(got) == min(budget, sum(valid))
    reach = np.cumprod(np.array(confidences), axis=1)

    def worth(counts: tuple[int, ...] | list[int]) -> float:
        return float(sum(reach[i, :c].sum() for i, c in enumerate(counts)))

    ways = itertools.product(*(range(v + 1) for v in valid))
    best = max(worth(way) for way in ways if sum(way) <= budget)
    assert worth(got) == pytest.approx(best)


def test_host_and_device_forms_accept_alike() -> None:
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(50, 40, generator=generator)
    seeds, positions = torch.arange(50), torch.arange(50) * 7
    host = draw_host(logits.numpy(), seeds.numpy().astype(np.uint64), positions.numpy())
    assert host.tolist() == draw(logits, seeds, positions).tolist()


def test_drafts_that_are_not_finite_are_refused_and_replaced_from_the_target() -> None:
    num = 4000
    target = torch.log(torch.tensor([0.5, 0.3, 0.2]))
    windows = Windows(
        torch.arange(num) * 2, torch.zeros(num, 1, dtype=torch.int64), torch.ones(num).long()
    )
    accepted, emitted = accept_rejection(
        torch.zeros(2 * num, dtype=torch.int64),
        target.expand(2 * num, 3),
        torch.full((num, 1, 3), math.nan),
        windows,
        torch.arange(num),
        torch.zeros(num, dtype=torch.int64),
        torch.zeros(num, dtype=torch.bool),
    )
    assert not accepted.any()
    shares = torch.bincount(emitted[:, 0], minlength=3) / num
    assert float((shares - target.exp()).abs().max()) < 0.04
