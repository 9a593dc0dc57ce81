"""Random walks: whatever legal ids are taken, the finished output has the shape.

A few hundred walks run always; `make walks` runs 10,000 for each library and family.
"""

from __future__ import annotations

import random
import re
from json import loads

import pytest
from tests.grammar.families import FAMILIES
from tests.grammar.helpers import BACKENDS, matcher, service, walk

SHAPES_EACH = 8


def run_walks(backend: str, family: str, walks: int, shapes: int) -> tuple[int, int]:
    """Walk until so many outputs have ended; return how many did, and how many grew too long."""
    rng = random.Random(f"{backend} {family}")
    ended = too_long = 0
    for done in range(shapes):
        shape = FAMILIES[family](rng)
        report = service(backend).report(shape)
        for _ in range(4 * walks // shapes):
            if ended * shapes >= walks * (done + 1):
                break
            at = matcher(backend, shape)
            text = walk(at, rng, most=400, keen=rng.choice([0.3, 0.6]))
            if text is None:
                too_long += 1
                continue
            ended += 1
            if shape.kind == "json":
                loads(text)
            elif shape.kind == "regex":
                assert re.fullmatch(shape.text, text), (shape.text, text)
            elif shape.kind == "choice":
                assert text in shape.choices
        assert report.is_exact or shape.kind == "json"
    return ended, too_long


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_walks_end_in_the_shape(backend: str, family: str) -> None:
    ended, _ = run_walks(backend, family, 3 * SHAPES_EACH, SHAPES_EACH)
    assert ended >= SHAPES_EACH


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_ten_thousand_walks(backend: str, family: str) -> None:
    ended, too_long = run_walks(backend, family, 10_000, 200)
    assert ended >= 10_000, (ended, too_long)
