"""Sampler: distributions, filters and their ties, masks, logprobs, rows alone and in batches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepinfer.sampling.host import draw_host
from deepinfer.sampling.noise import STREAM_DRAFT
from deepinfer.sampling.rng import exponential
from deepinfer.sampling.sampler import (
    LOGPROB_FLOOR,
    Sampler,
    SlotParams,
    draw,
    filter_logits,
    stable_topk,
)

CPU = torch.device("cpu")


def make(vocab_size: int, *params: SlotParams, banned: tuple[int, ...] = ()) -> Sampler:
    """A sampler whose slots 1.. hold the given parameters."""
    sampler = Sampler(vocab_size, len(params) + 1, CPU, banned)
    for slot, row in enumerate(params, 1):
        sampler.admit(slot, row)
    return sampler


def chi_square(logits: Tensor, params: SlotParams, expected: Tensor, n: int = 20_000) -> float:
    """Return the chi-square statistic per degree of freedom of n draws at n positions."""
    sampler = make(len(logits), params)
    tokens = sampler.sample(logits.expand(n, -1).contiguous(), [1] * n, range(n)).token_ids
    counts = torch.bincount(tokens, minlength=len(logits)).double()
    assert counts[expected == 0].sum() == 0, "a filtered token was drawn"
    live = expected > 0
    expected_counts = expected[live].double() * n
    statistic = ((counts[live] - expected_counts) ** 2 / expected_counts).sum()
    return float(statistic) / max(1, int(live.sum()) - 1)


def naive_filter(logits: list[float], top_p: float, top_k: int) -> set[int]:
    """The kept ids, in double precision, one at a time."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weights = {i: math.exp(logits[i] - max(logits)) for i in order}
    total = sum(weights.values())
    kept: list[int] = []
    mass = 0.0
    for i in order:
        if kept and mass >= top_p * total and top_p < 1:
            break
        kept.append(i)
        mass += weights[i]
    return set(kept if top_k < 0 else kept[:top_k])


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [(1.0, 1.0, -1), (0.6, 1.0, -1), (2.0, 1.0, -1), (1.0, 0.8, -1), (1.0, 1.0, 5), (0.8, 0.9, 7)],
)
def test_draws_follow_the_filtered_softmax(temperature: float, top_p: float, top_k: int) -> None:
    logits = torch.randn(24, generator=torch.Generator().manual_seed(7)) * 2
    kept = naive_filter((logits / temperature).tolist(), top_p, top_k)
    expected = torch.zeros(24)
    ids = torch.tensor(sorted(kept))
    expected[ids] = torch.softmax(logits[ids] / temperature, 0)
    params = SlotParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=11)
    # about four standard deviations of the statistic at its degrees of freedom
    limit = 1 + 4 * math.sqrt(2 / max(1, len(kept) - 1))
    assert chi_square(logits, params, expected) < limit


def test_a_wrong_temperature_would_be_noticed() -> None:
    logits = torch.randn(24, generator=torch.Generator().manual_seed(7)) * 2
    expected = torch.softmax(logits / 1.1, 0)
    assert chi_square(logits, SlotParams(temperature=1.0, seed=11), expected) > 3


@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 0.5, 2.0]), min_size=1, max_size=12),
    top_p=st.floats(0.01, 1.0),
    top_k=st.sampled_from([-1, 1, 2, 5, 40]),
)
def test_filter_matches_one_by_one(logits: list[float], top_p: float, top_k: int) -> None:
    weights = sorted((math.exp(x - max(logits)) for x in logits), reverse=True)
    marks = np.cumsum(weights) / sum(weights)
    if np.abs(marks - top_p).min() < 1e-6:
        return  # rounding decides
    got = filter_logits(
        torch.tensor([logits]), torch.tensor([top_p], dtype=torch.float64), torch.tensor([top_k])
    )[0]
    kept = naive_filter(logits, top_p, top_k)
    assert {i for i, x in enumerate(got.tolist()) if x > -math.inf} == kept
    assert all(got[i] == logits[i] for i in kept)


def test_ties_go_to_the_lower_id() -> None:
    flat = torch.zeros(1, 300)
    kept = filter_logits(flat, torch.tensor([0.5], dtype=torch.float64), torch.tensor([-1]))
    assert torch.nonzero(kept[0] == 0).squeeze(1).tolist() == list(range(150))
    kept = filter_logits(flat, torch.tensor([1.0], dtype=torch.float64), torch.tensor([3]))
    assert torch.nonzero(kept[0] == 0).squeeze(1).tolist() == [0, 1, 2]
    assert stable_topk(flat, 4).tolist() == [[0, 1, 2, 3]]
    greedy = make(300, SlotParams(temperature=0.0))
    assert greedy.sample(flat, [1], [0]).token_ids.tolist() == [0]
    flat[0, [5, 250]] = 1.0
    assert greedy.sample(flat, [1], [0]).token_ids.tolist() == [5]


@given(
    values=st.lists(
        st.floats(-1e6, 1e6, width=32) | st.sampled_from([0.0, -0.0, -math.inf]),
        min_size=1,
        max_size=20,
    )
)
def test_stable_topk_orders_like_a_sort(values: list[float]) -> None:
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    assert stable_topk(torch.tensor([values]), len(values))[0].tolist() == order


@pytest.mark.parametrize("draw_seed", [0, 1, 2**63, 2**64 - 1])
def test_extreme_rows(draw_seed: int) -> None:
    logits = torch.full((3, 8), -50.0)
    logits[0, 3] = 60.0  # one candidate
    logits[1, :] = 0.0
    logits[2, 2] = 1e30
    sampler = make(8, SlotParams(temperature=1.0, seed=draw_seed))
    for position in range(40):
        tokens = sampler.sample(logits, [1, 1, 1], [position] * 3).token_ids.tolist()
        assert tokens[0] == 3 and tokens[2] == 2 and 0 <= tokens[1] < 8


def test_temperature_to_the_limits() -> None:
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(3))
    cold = make(50, SlotParams(temperature=1e-5, seed=3))
    assert torch.equal(cold.sample(logits, [1] * 64, range(64)).token_ids, logits.argmax(-1))
    hot = make(50, SlotParams(temperature=1e300, seed=3), banned=(0,))
    tokens = hot.sample(logits, [1] * 64, range(64)).token_ids
    assert len(set(tokens.tolist())) > 20 and 0 not in tokens


def test_pruning_changes_nothing() -> None:
    logits = torch.randn(200, 40, generator=torch.Generator().manual_seed(5)) * 12
    seeds = torch.arange(200)
    positions = torch.arange(200) * 3
    rows = torch.arange(200).repeat_interleave(10)
    groups = torch.arange(10).repeat(200)
    noise = torch.log(exponential(seeds[rows], positions[rows], groups)).reshape(200, 40)
    lead = (logits - logits.amax(-1, keepdim=True)).double()
    assert torch.equal(draw(logits, seeds, positions), (lead - noise).argmax(-1))


def test_an_unlikely_token_wins_as_often_as_it_should() -> None:
    n, lead = 400_000, 10.0
    logits = torch.full((5,), -math.inf)
    logits[0], logits[4] = 0.0, -lead  # noise comes in groups of four ids
    logits = logits.expand(n, 5)
    drawn = draw_host(logits.contiguous().numpy(), np.zeros(n, np.uint64), np.arange(n))
    tokens = torch.from_numpy(drawn)
    expected = n / (1 + math.exp(lead))  # 18
    assert abs(int((tokens == 4).sum()) - expected) < 4 * math.sqrt(expected)


def test_same_draw_at_a_position_whatever_the_order_of_steps() -> None:
    logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(1))
    sampler = make(30, SlotParams(temperature=1.0, seed=9, top_p=0.9))
    forward = [int(sampler.sample(logits[p : p + 1], [1], [p]).token_ids) for p in range(6)]
    backward = [
        int(sampler.sample(logits[p : p + 1], [1], [p]).token_ids) for p in reversed(range(6))
    ]
    assert forward == backward[::-1]
    assert forward == sampler.sample(logits, [1] * 6, range(6)).token_ids.tolist()


MIX = [
    SlotParams(temperature=0.0, logprobs=True),
    SlotParams(temperature=0.7, seed=5, top_p=0.8, logprobs=True, num_top_logprobs=4),
    SlotParams(temperature=1.0, seed=6),
    SlotParams(
        temperature=1.3, seed=7, top_k=3, logprobs=True, raw_logprobs=True, num_top_logprobs=2
    ),
    SlotParams(
        temperature=0.0, min_tokens=99, ending_ids=(1, 2), logprobs=True, num_top_logprobs=1
    ),
    SlotParams(temperature=1.0, seed=8, logit_bias={3: 4.0, 5: -100.0}, logprobs=True),
    SlotParams(temperature=0.9, seed=9, forced_ids=(7, 8, 9), logprobs=True, num_top_logprobs=3),
]


@pytest.mark.parametrize("vocab_size", [288, 1031])
def test_a_row_alone_equals_the_row_in_any_batch(vocab_size: int) -> None:
    sampler = make(vocab_size, *MIX, banned=(11, 12))
    generator = torch.Generator().manual_seed(2)
    n = 40
    logits = torch.randn(n, vocab_size, generator=generator) * 3
    slots = [1 + i % len(MIX) for i in range(n)]
    positions = [i % 5 for i in range(n)]
    whole = sampler.sample(logits, slots, positions)
    assert (
        whole.logprobs is not None and whole.top_ids is not None and whole.top_logprobs is not None
    )
    order = torch.randperm(n, generator=generator).tolist()
    for size in (1, 3, 17):
        for begin in range(0, n, size):
            part = order[begin : begin + size]
            got = sampler.sample(
                logits[part], [slots[i] for i in part], [positions[i] for i in part]
            )
            for row, i in enumerate(part):
                params = MIX[slots[i] - 1]
                assert got.token_ids[row] == whole.token_ids[i]
                if params.logprobs:
                    assert got.logprobs is not None
                    assert got.logprobs[row] == whole.logprobs[i]
                k = params.num_top_logprobs
                if k:
                    assert got.top_ids is not None and got.top_logprobs is not None
                    assert torch.equal(got.top_ids[row, :k], whole.top_ids[i, :k])
                    assert torch.equal(got.top_logprobs[row, :k], whole.top_logprobs[i, :k])


def test_input_logits_are_left_alone() -> None:
    sampler = make(50, *MIX, banned=(11,))
    logits = torch.randn(len(MIX), 50, generator=torch.Generator().manual_seed(2))
    before = logits.clone()
    sampler.sample(logits, list(range(1, len(MIX) + 1)), [0] * len(MIX))
    assert torch.equal(logits, before)


def test_masks_and_forced_ids() -> None:
    logits = torch.zeros(1, 10)
    logits[0, [1, 4]] = torch.tensor([9.0, 8.0])
    params = SlotParams(temperature=0.0, num_prompt_tokens=5, min_tokens=2, ending_ids=(1,))
    sampler = make(10, params)
    assert [int(sampler.sample(logits, [1], [p]).token_ids) for p in (5, 6, 7)] == [4, 4, 1]
    forced = make(
        10, SlotParams(temperature=0.0, num_prompt_tokens=5, forced_ids=(3, 9)), banned=(1,)
    )
    assert [int(forced.sample(logits, [1], [p]).token_ids) for p in (5, 6, 7)] == [3, 9, 4]
    huge = {0: 1e300} | dict.fromkeys(range(1, 10), -1e300)
    far = make(10, SlotParams(temperature=0.0, logit_bias=huge, logprobs=True))
    drawn = far.sample(logits, [1], [0])
    assert drawn.token_ids.tolist() == [0]
    assert drawn.logprobs is not None and drawn.logprobs.tolist() == [0.0]  # not NaN
    biased = make(10, SlotParams(temperature=0.0, logit_bias={0: 50.0, 1: -50.0}))
    assert int(biased.sample(logits, [1], [0]).token_ids) == 0


def test_a_slot_forgets_its_last_request() -> None:
    sampler = make(
        10, SlotParams(temperature=0.0, logit_bias={0: 50.0}, forced_ids=(2,) * 9, logprobs=True)
    )
    sampler.admit(1, SlotParams(temperature=0.0))
    logits = torch.arange(10.0).unsqueeze(0)
    got = sampler.sample(logits, [1], [0])
    assert int(got.token_ids) == 9 and got.logprobs is None


def test_logprobs() -> None:
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(4))
    exact = torch.log_softmax(logits.double(), -1)
    cases = [
        (SlotParams(temperature=0.0, logprobs=True, num_top_logprobs=3), exact),
        (
            SlotParams(temperature=0.5, logprobs=True, num_top_logprobs=3),
            torch.log_softmax(2 * logits.double(), -1),
        ),
        (SlotParams(temperature=0.5, logprobs=True, num_top_logprobs=3, raw_logprobs=True), exact),
    ]
    for params, expected in cases:
        got = make(20, params).sample(logits, [1], [0])
        assert got.logprobs is not None and got.top_ids is not None and got.top_logprobs is not None
        torch.testing.assert_close(
            got.logprobs.double(), expected[0, got.token_ids], atol=1e-5, rtol=0
        )
        top = expected.topk(3)
        assert got.top_ids.tolist() == top.indices.tolist()
        torch.testing.assert_close(got.top_logprobs.double(), top.values, atol=1e-5, rtol=0)


def test_filtered_logprobs_are_clamped() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0]])
    params = SlotParams(temperature=1.0, top_k=2, logprobs=True, num_top_logprobs=4)
    got = make(4, params).sample(logits, [1], [0])
    assert got.top_logprobs is not None
    assert got.top_logprobs[0, 2:].tolist() == [LOGPROB_FLOOR] * 2
    torch.testing.assert_close(got.top_logprobs[0, :2].exp().sum(), torch.tensor(1.0))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_rows_are_flagged_and_leave_others_alone(poison: float, temperature: float) -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(4))
    sampler = make(
        40,
        SlotParams(temperature=temperature, seed=3, top_p=0.9, logprobs=True, num_top_logprobs=2),
    )
    good = sampler.sample(logits, [1] * 3, [0, 1, 2])
    broken = logits.clone()
    broken[1, 17] = poison
    got = sampler.sample(broken, [1] * 3, [0, 1, 2])
    assert got.bad.tolist() == [False, True, False] and not good.bad.any()
    assert got.token_ids[[0, 2]].tolist() == good.token_ids[[0, 2]].tolist()


def test_processors_see_the_history_and_change_one_row() -> None:
    seen: list[list[int]] = []

    def ban_last(tokens: Sequence[int], logits: Tensor) -> Tensor:
        seen.append(list(tokens))
        logits[tokens[-1]] = -math.inf
        return logits

    def double(_: Sequence[int], logits: Tensor) -> Tensor:
        return logits * 2

    sampler = make(
        6,
        SlotParams(temperature=0.0, processors=(ban_last, double), logprobs=True),
        SlotParams(temperature=0.0, logprobs=True),
    )
    logits = torch.arange(6.0).repeat(3, 1)
    histories = [[1, 5], [2], [4, 5]]
    got = sampler.sample(logits, [1, 2, 1], [2, 1, 2], history=histories.__getitem__)
    assert got.token_ids.tolist() == [4, 5, 4] and seen == [[1, 5], [4, 5]]
    assert torch.equal(logits, torch.arange(6.0).repeat(3, 1))
    expected = torch.log_softmax(torch.tensor([0.0, 2, 4, 6, 8, -math.inf]), 0)[4]
    assert got.logprobs is not None
    torch.testing.assert_close(got.logprobs[0], expected)


def test_masks_allow_what_their_bits_say() -> None:
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(3, 70, generator=generator)
    sampler = make(70, SlotParams(temperature=0.0), SlotParams(temperature=1.0, seed=4))
    bits = torch.zeros(2, 3, dtype=torch.int32)
    bits[0, 1] = -(2**31)  # id 63
    bits[1, 2] = 0b100000  # id 69
    masks = (torch.tensor([0, 2]), bits)
    got = sampler.sample(logits, [1, 1, 2], [5, 6, 7], masks)
    assert got.token_ids.tolist() == [63, int(logits[1].argmax()), 69]
    assert not got.bad.any()
    none = (torch.tensor([1]), torch.zeros(1, 3, dtype=torch.int32))
    assert sampler.sample(logits, [1, 1, 2], [5, 6, 7], none).bad.tolist() == [False, True, False]


def test_drafts_share_the_noise_of_targets_but_not_their_forced_ids() -> None:
    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(6))
    params = SlotParams(temperature=0.8, top_k=30, seed=4, logit_bias={1: 2.0})
    sampler = make(50, params)
    target = sampler.sample(logits, [1] * 40, range(40)).token_ids
    assert torch.equal(sampler.sample_drafts(logits, [1] * 40, range(40)).token_ids, target)
    other = sampler.sample_drafts(logits, [1] * 40, range(40), STREAM_DRAFT).token_ids
    assert not torch.equal(other, target)
    forced = make(50, SlotParams(temperature=0.0, forced_ids=(3,) * 40))
    drafts = forced.sample_drafts(logits, [1] * 40, range(40)).token_ids
    assert torch.equal(drafts, logits.argmax(-1))


def test_scores_of_given_tokens() -> None:
    logits = torch.randn(200, 30, generator=torch.Generator().manual_seed(6))
    ids = [i % 30 for i in range(200)]
    sampler = make(
        30,
        SlotParams(temperature=0.0),
        SlotParams(temperature=0.5, logit_bias={0: 1.0}),
        SlotParams(temperature=0.5, raw_logprobs=True),
    )
    plain = torch.log_softmax(logits, -1)[torch.arange(200), ids]
    torch.testing.assert_close(sampler.score(logits, [1] * 200, ids), plain)
    torch.testing.assert_close(sampler.score(logits, [3] * 200, ids), plain)
    biased = logits.clone()
    biased[:, 0] += 1
    tempered = torch.log_softmax(biased / 0.5, -1)[torch.arange(200), ids]
    torch.testing.assert_close(sampler.score(logits, [2] * 200, ids), tempered)
    part = [sampler.score(logits[i : i + 1], [2], ids[i : i + 1]) for i in range(200)]
    assert torch.equal(torch.cat(part), sampler.score(logits, [2] * 200, ids))
    assert sampler.score(logits[:0], [], []).shape == (0,)
