"""Philox against published vectors, and the exponential built on it."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer.sampling.rng import MAX_LOG_NOISE, MIN_LOG_NOISE, exponential, philox

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
    ids = torch.arange(10)
    got = exponential(torch.full_like(ids, signed), torch.full_like(ids, 77), ids)
    for v in range(10):
        counter = torch.tensor([[77], [v >> 2], [0], [0]])
        key = torch.tensor([[seed & MASK], [seed >> 32]])
        word = int(philox(counter, key)[v & 3, 0])
        exact = -math.log1p(-min((word + 0.5) / 2**32, 1 - 2**-24))
        assert float(got[v]) == pytest.approx(exact, rel=1e-15)


def test_elements_do_not_depend_on_each_other_and_differ() -> None:
    seeds = torch.tensor([0, 0, 0, 1, -1])
    positions = torch.tensor([0, 1, 0, 0, 0])
    ids = torch.tensor([0, 0, 1, 0, 0])
    whole = exponential(seeds, positions, ids)
    alone = [
        float(exponential(seeds[i : i + 1], positions[i : i + 1], ids[i : i + 1])) for i in range(5)
    ]
    assert whole.tolist() == alone
    assert len(set(alone)) == 5
    assert float(exponential(seeds[:1], positions[:1], ids[:1], stream=1)) != alone[0]


def test_bits_do_not_depend_on_the_place_in_the_tensor() -> None:
    ids = torch.arange(101)
    zeros = torch.zeros_like(ids)
    whole = exponential(zeros, zeros, ids)
    alone = torch.cat([exponential(zeros[:1], zeros[:1], ids[i : i + 1]) for i in range(101)])
    assert torch.equal(whole, alone)
    assert torch.equal(torch.log(whole), torch.cat([torch.log(x) for x in alone.split(1)]))


def test_distribution() -> None:
    n = 200_000
    x = exponential(torch.full((n,), 5), torch.arange(n) % 97, torch.arange(n) // 97)
    assert abs(float(x.mean()) - 1.0) < 0.01
    assert abs(float((x > 2.0).double().mean()) - math.exp(-2.0)) < 0.003
    noise = -torch.log(x)
    assert float(noise.min()) >= MIN_LOG_NOISE and float(noise.max()) <= MAX_LOG_NOISE
