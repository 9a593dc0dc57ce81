"""The CPU's form of filters and draws against the form with fixed shapes: equal, bit for bit."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.sampling.host import draw_host, filter_host
from deepinfer.sampling.noise import derive_seed, exponentials, host_words
from deepinfer.sampling.rng import exponential
from deepinfer.sampling.sampler import Sampler, SlotParams, draw, filter_logits

CPU = torch.device("cpu")


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**32 - 1),
    group=st.integers(0, 2**20),
    stream=st.integers(0, 3),
)
def test_words_equal_those_of_the_device(seed: int, position: int, group: int, stream: int) -> None:
    signed = seed - (seed >> 63 << 64)
    there = exponential(
        torch.tensor([signed]), torch.tensor([position]), torch.tensor([group]), stream
    )
    groups = np.array([group])
    one = host_words(np.uint64(seed), np.int64(position), groups, stream)
    many = host_words(np.array([seed], np.uint64), np.array([position]), groups, stream)
    assert np.array_equal(one, many)
    np.testing.assert_allclose(exponentials(one), there.numpy(), rtol=1e-15)


@pytest.mark.parametrize("width", [1, 7, 288, 5001, 40_000])
@pytest.mark.parametrize("spread", [0.0, 0.7, 3.0, 20.0])
def test_draws_equal_those_of_the_device(width: int, spread: float) -> None:
    num = 3 if width > 10_000 else 24
    generator = torch.Generator().manual_seed(width)
    logits = torch.randn(num, width, generator=generator) * spread
    logits[:, ::3].masked_fill_(torch.rand(num, (width + 2) // 3, generator=generator) < 0.4, -99)
    seeds = torch.randint(-(2**62), 2**62, (num,), generator=generator)
    positions = torch.arange(num) * 1000
    expected = draw(logits, seeds, positions).tolist()
    bits = seeds.numpy().view(np.uint64)
    assert draw_host(logits.numpy(), bits, positions.numpy()).tolist() == expected
    alone = [
        int(draw_host(logits[i : i + 1].numpy(), bits[i : i + 1], positions[i : i + 1].numpy())[0])
        for i in range(num)
    ]
    assert alone == expected


@pytest.mark.parametrize("width", [1, 9, 5000])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.95, 1.0])
@pytest.mark.parametrize("top_k", [-1, 1, 40, 2**31 - 1])
def test_filters_equal_those_of_the_device(width: int, top_p: float, top_k: int) -> None:
    generator = torch.Generator().manual_seed(width)
    for spread, steps in ((0.5, 0), (4.0, 0), (3.0, 2), (0.0, 0)):  # steps: many equal logits
        logits = torch.randn(6, width, generator=generator) * spread
        if steps:
            logits = (logits * steps).round() / steps
        logits[1, width // 2 :] = -math.inf
        logits[1, 0] = 1.0
        p, k = torch.full((6,), top_p, dtype=torch.float64), torch.full((6,), top_k)
        expected = filter_logits(logits, p, k)
        got = filter_host(logits.numpy(), p.numpy(), k.numpy())
        assert np.array_equal(got, expected.numpy())


def test_a_filter_never_changes_the_noise_of_what_it_keeps() -> None:
    logits = torch.randn(50, 6000, generator=torch.Generator().manual_seed(1)) * 2
    seeds, positions = np.arange(50, dtype=np.uint64), np.arange(50)
    free = draw_host(logits.numpy(), seeds, positions)
    for top_k in (5, 500, 3000):
        kept = filter_host(logits.numpy(), np.ones(50), np.full(50, top_k))
        drawn = draw_host(kept, seeds, positions)
        inside = kept[np.arange(50), free] > -np.inf
        assert inside.any() and np.array_equal(drawn[inside], free[inside])


def test_the_whole_sampler_in_both_forms() -> None:
    params = [
        SlotParams(temperature=0.0, logprobs=True),
        SlotParams(temperature=0.7, seed=2**64 - 5, top_p=0.8, logprobs=True, num_top_logprobs=4),
        SlotParams(temperature=1.0, seed=6, top_k=20, raw_logprobs=True, logprobs=True),
        SlotParams(temperature=1.0, seed=7, min_tokens=9, ending_ids=(1, 2)),
        SlotParams(temperature=0.8, seed=8, logit_bias={3: 40.0, 5: -100.0}),
        SlotParams(temperature=0.9, seed=9, forced_ids=(7, 8)),
    ]
    width, num = 5003, 30
    logits = torch.randn(num, width, generator=torch.Generator().manual_seed(3)) * 4
    slots = [1 + i % len(params) for i in range(num)]
    bits = torch.randint(-(2**31), 2**31 - 1, (4, -(-width // 32)), dtype=torch.int32)
    masks = (torch.tensor([0, 1, 7, 29]), bits)
    results = []
    for fixed in (False, True):
        sampler = Sampler(width, len(params) + 1, CPU, (11, 12), fixed)
        for slot, row in enumerate(params, 1):
            sampler.admit(slot, row)
        results.append(sampler.sample(logits, slots, range(num), masks, keep_drawn_from=True))
    one, two = results
    assert torch.equal(one.token_ids, two.token_ids)
    for name in ("logprobs", "top_ids", "top_logprobs", "drawn_from"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name


def test_seeds_of_samples_differ_and_stay() -> None:
    seeds = [derive_seed(5, i) for i in range(2000)]
    assert seeds[0] == 5 and len(set(seeds)) == 2000 and max(seeds) < 2**64
    assert seeds[7] == derive_seed(5, 7) != derive_seed(6, 7)


def test_a_whole_vocabulary_is_cheap() -> None:
    """Process CPU time, with a wide margin: full noise and sorting take over ten times as long."""
    sampler = Sampler(129_280, 2, CPU)
    sampler.admit(1, SlotParams(temperature=1.0, seed=1, top_p=0.95, top_k=50))
    logits = torch.randn(16, 129_280, generator=torch.Generator().manual_seed(3)) * 3
    sampler.sample(logits, [1] * 16, range(16))
    begin = time.process_time()
    sampler.sample(logits, [1] * 16, range(16))
    assert time.process_time() - begin < 0.15


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("whole", [True, False])
def test_rows_without_a_largest_logit_leave_others_alone(poison: float, whole: bool) -> None:
    """Such rows are flagged elsewhere; here they must not break those beside them."""
    good = torch.randn(3, 5000, generator=torch.Generator().manual_seed(8))
    broken = good.clone()
    if whole:
        broken[1] = poison
    else:
        broken[1, 17] = poison
    params = SlotParams(seed=3, top_p=0.9, logprobs=True, num_top_logprobs=2)
    told = []
    for logits in (good, broken):
        sampler = Sampler(5000, 2, CPU)
        sampler.admit(1, params)
        told.append(sampler.sample(logits, [1] * 3, [0, 1, 2]))
        assert sampler.sample_drafts(logits, [1] * 3, [0, 1, 2]).token_ids.max() < 5000
    assert told[1].bad.tolist() == [False, True, False]
    for name in ("token_ids", "logprobs", "top_ids"):
        before, now = getattr(told[0], name), getattr(told[1], name)
        assert before[[0, 2]].tolist() == now[[0, 2]].tolist()
    assert 0 <= int(told[1].token_ids[1]) < 5000
