"""Groups, back ends and a shared model over four processes of this host, through gloo.

One test, so that the processes start once, whichever worker gets it.
"""

from __future__ import annotations

import contextlib

import pytest
from tests.parallel.pool import Pool

BACK_ENDS = [("exact", 0.0), ("fixed", 0.0), ("fixed", 1.0), ("gathered", 0.0)]
MODELS = [("golden", "exact", 4), ("demo", "fixed", 0), ("golden", "gathered", 0)]


def test_four_ranks() -> None:
    """What each case checks stands in rank_cases.py; here, that all ranks make the same calls."""
    cases: list[tuple[object, ...]] = [("collectives",)]
    cases += [
        ("exchange", name, factor, *form)
        for name, factor in BACK_ENDS
        for form in ((True, "bfloat16"), (False, "float32"))
    ]
    cases += [("tables",), *(("model", *model) for model in MODELS)]
    with contextlib.closing(Pool(data=4, expert=4, engram=4)) as pool:
        for case in cases:
            counts = pool.run(str(case[0]), *case[1:])
            assert counts[0] and all(count == counts[0] for count in counts), (case, counts)
        with pytest.raises(AssertionError, match=r"(?s)rank 0: .*parallel\.backend"):
            pool.run("exchange", "nothing", 0.0, True, "bfloat16")  # the pool is no silent witness
