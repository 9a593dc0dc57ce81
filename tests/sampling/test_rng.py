"""Philox against published vectors, and the exponential built on it."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer.sampling.noise import MAX_LOG_NOISE, MIN_LOG_NOISE
from deepinfer.sampling.rng import exponential, philox

MASK = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # the known-answer vectors of the generator's authors, ten rounds
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    got = philox(torch.tensor(counter).unsqueeze(1), torch.tensor(key).unsqueeze(1))
    assert got.squeeze(1).tolist() == list(words)


def test_words_follow_the_token_id() -> None:
    seed = 0xFEDCBA9876543210
    signed = seed - 2**64
    groups = torch.arange(3)
    got = exponential(torch.full_like(groups, signed), torch.full_like(groups, 77), groups)
    got = got.flatten()
    for v in range(12):
        counter = torch.tensor([[77], [v >> 2], [0], [0]])
        key = torch.tensor([[seed & MASK], [seed >> 32]])
        word = int(philox(counter, key)[v & 3, 0])
        exact = -math.log1p(-min((word + 0.5) / 2**32, 1 - 2**-24))
        assert float(got[v]) == pytest.approx(exact, rel=1e-15)


def test_elements_do_not_depend_on_each_other_and_differ() -> None:
    seeds = torch.tensor([0, 0, 0, 1, -1])
    positions = torch.tensor([0, 1, 0, 0, 0])
    groups = torch.tensor([0, 0, 1, 0, 0])
    whole = exponential(seeds, positions, groups)
    alone = [
        exponential(seeds[i : i + 1], positions[i : i + 1], groups[i : i + 1]) for i in range(5)
    ]
    assert torch.equal(whole, torch.cat(alone))
    assert len(set(whole.flatten().tolist())) == 20
    drafts = exponential(seeds[:1], positions[:1], groups[:1], stream=1)
    assert not (drafts == whole[:1]).any()


def test_bits_do_not_depend_on_the_place_in_the_tensor() -> None:
    ids = torch.arange(101)
    zeros = torch.zeros_like(ids)
    whole = exponential(zeros, zeros, ids)
    alone = torch.cat([exponential(zeros[:1], zeros[:1], ids[i : i + 1]) for i in range(101)])
    assert torch.equal(whole, alone)
    logs = [torch.log(x) for x in alone.flatten().split(1)]
    assert torch.equal(torch.log(whole).flatten(), torch.cat(logs))


def test_distribution() -> None:
    n = 50_000
    x = exponential(torch.full((n,), 5), torch.arange(n) % 97, torch.arange(n) // 97).flatten()
    assert abs(float(x.mean()) - 1.0) < 0.01
    assert abs(float((x > 2.0).double().mean()) - math.exp(-2.0)) < 0.003
    noise = -torch.log(x)
    assert float(noise.min()) >= MIN_LOG_NOISE and float(noise.max()) <= MAX_LOG_NOISE
