"""Random walks: whatever legal ids are taken, the finished output has the shape.

A few hundred walks run always; `make walks` runs 10,000 for each library and family and records
them, see `walks.py`.
"""

from __future__ import annotations

import pytest
from tests.grammar.families import FAMILIES
from tests.grammar.helpers import BACKENDS
from tests.grammar.walks import run_walks

SHAPES_EACH = 8


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_walks_end_in_the_shape(backend: str, family: str) -> None:
    ended, _ = run_walks(backend, family, 3 * SHAPES_EACH, SHAPES_EACH)
    assert ended >= SHAPES_EACH
