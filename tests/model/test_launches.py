"""How many kernels a decode step of the released dimensions launches, counted without a card."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.model.launches import decode_step

from deepinfer.config.load import load_model_config
from deepinfer.model.fast.random import shallow

CONFIG = Path(__file__).parents[1] / "data" / "real" / "config.json"
LAYERS = (1, 2, 3, 20, 21, 24)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_a_decode_step_launches_few_kernels() -> None:
    """Numbers that a change may lower; `docs/gpu.md` says what is left and why."""
    config = shallow(load_model_config(CONFIG), LAYERS)
    step = decode_step(config, sequences=2, rows=6, context=8192)
    counts = Counter(layer for layer, _ in step.found)
    told = {layer: step.of(layer) for layer in counts}
    # One of each layer's folds the choices onto the experts that this model has.
    assert counts["2 reuse 2"] == counts["4 reuse 1"] <= 16, told["2 reuse 2"]
    assert counts["0 window 0"] <= 19, told["0 window 0"]
    assert counts["1 full 2"] <= 30, told["1 full 2"]
    assert counts["3 full 1"] <= 30, told["3 full 1"]
    assert counts["5 reindex 1"] <= 24, told["5 reindex 1"]
    assert counts["draft 1"] <= 17, told["draft 1"]
    assert counts[""] <= 71, told[""]
    assert sum(counts.values()) == len(step.found)
