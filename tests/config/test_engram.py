"""Engram's constants: recorded values, the released values and a brute-force twin."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from deepinfer.config.engram import engram_multipliers, engram_primes, engram_tables, is_prime
from deepinfer.config.load import load_model_config
from deepinfer.config.model import ModelConfig


def test_recorded_values(golden_checkpoint: Path, golden_folder: Path) -> None:
    recorded = load_file(golden_folder / "static.safetensors")
    tables = engram_tables(load_model_config(golden_checkpoint))
    for name in ("primes", "offsets", "multipliers"):
        found = getattr(tables, name)
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, recorded[name])


def test_released_values(real_config_file: Path) -> None:
    tables = engram_tables(load_model_config(real_config_file))
    primes = tables.primes
    assert primes.shape == (2, 3, 8)
    assert primes[0, 0].tolist() == [
        16000057, 16000079, 16000081, 16000097, 16000121, 16000129, 16000133, 16000183,
    ]  # fmt: skip
    assert primes[0, 1, [0, -1]].tolist() == [16000189, 16000321]
    assert primes[0, 2, [0, -1]].tolist() == [16000339, 16000463]
    assert (primes[1, 0, 0], primes[1, 2, -1]) == (16000477, 16000889)
    assert primes.sum(axis=(1, 2)).tolist() == [384006168, 384016682]
    assert tables.offsets[:, 0].tolist() == [0, 0]
    assert tables.offsets[0, 1] == 16000057
    assert tables.multipliers.tolist() == [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ]


def test_released_hash(real_config_file: Path) -> None:
    """The published test vector, through these constants."""
    tables = engram_tables(load_model_config(real_config_file))
    ids = [0, 98615, 15844, 14, 1751, 3, 98616, 98634]

    def rows(position: int, layer: int) -> list[int]:
        look_back = [ids[position - r] if position >= r else 2 for r in range(4)]
        multipliers = tables.multipliers[layer].tolist()
        acc, found = look_back[0] * multipliers[0], []
        for order in range(1, 4):
            acc ^= look_back[order] * multipliers[order]
            found += [acc % p for p in tables.primes[layer, order - 1].tolist()]
        return (np.array(found) + tables.offsets[layer]).tolist()

    first = rows(0, 0)
    assert first[:3] == [5702652, 24393184, 39183301]
    assert first[8:10] == [131476717, 152385926]
    assert first[16:18] == [257520185, 283540304]
    assert first[-1] == 380066193
    last = rows(7, 1)
    assert last[:3] == [13564020, 18908159, 36913214]
    assert last[-1] == 370580572


def brute_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def test_small_primes() -> None:
    assert [n for n in range(2000) if is_prime(n)] == [n for n in range(2000) if brute_prime(n)]


@pytest.mark.parametrize("n", [561, 3215031751, 3825123056546413051, 318665857834031151167461])
def test_pseudoprimes(n: int) -> None:
    """Composites that fool several Miller-Rabin bases."""
    assert not is_prime(n)


@pytest.mark.parametrize("n", [2147483647, 16000057, 2**61 - 1, 67280421310721])
def test_large_primes(n: int) -> None:
    assert is_prime(n)


@given(
    layers=st.integers(1, 3),
    start=st.integers(1, 400),
    order=st.integers(2, 4),
    heads=st.integers(1, 4),
)
def test_search_by_its_definition(layers: int, start: int, order: int, heads: int) -> None:
    used: set[int] = set()
    expected = []
    for _ in range(layers):
        groups = []
        for _ in range(order - 1):
            p, group = start - 1, []
            for _ in range(heads):
                p += 1
                while p in used or not brute_prime(p):
                    p += 1
                used.add(p)
                group.append(p)
            groups.append(tuple(group))
        expected.append(tuple(groups))
    assert engram_primes(layers, start, order, heads) == tuple(expected)


@given(size=st.integers(1, 200000), layer=st.integers(0, 60))
def test_multipliers_never_overflow(size: int, layer: int) -> None:
    found = engram_multipliers([layer], size, 4)
    assert (found % 2 == 1).all()
    assert all(int(m) * (size - 1) < 2**63 for m in found[0])


def test_without_engram(real_config_file: Path) -> None:
    raw = load_model_config(real_config_file).to_dict()
    text = raw["text_config"]
    assert isinstance(text, dict)
    for key in [k for k in text if k.startswith("engram_")]:
        del text[key]
    tables = engram_tables(ModelConfig.from_dict(raw))
    assert len(tables.primes) == len(tables.offsets) == len(tables.multipliers) == 0
