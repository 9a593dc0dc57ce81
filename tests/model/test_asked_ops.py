"""Which implementations settings ask for."""

from __future__ import annotations

import pytest

from deepinfer.config.engine import EngineConfig, NumericsConfig
from deepinfer.config.load import released_config
from deepinfer.device.base import Capability
from deepinfer.errors import ConfigError
from deepinfer.kernels.table import COPIES, W4A8
from deepinfer.model.fast import model
from deepinfer.model.fast.model import asked_ops

H200 = Capability(name="H200", arch="sm90", total_bytes=141 << 30)
H100 = Capability(name="H100", arch="sm90", total_bytes=80 << 30)
CPU = Capability(name="CPU", arch="cpu", total_bytes=1 << 40)
BOTH = {"fp8_linear": COPIES, "grouped_linear": COPIES}


def test_copies_are_asked_for_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "is_usable", lambda needs: True)
    config, free = released_config(), NumericsConfig(batch_invariant=False)
    assert asked_ops(free, H200, config) == BOTH  # 14.8 GB of copies
    assert asked_ops(free, H100, config) == asked_ops(free, CPU, config) == {}
    assert asked_ops(NumericsConfig(), H200, config) == {}
    on = NumericsConfig(batch_invariant=False, dense_copies="on")
    assert asked_ops(on, H100, config) == BOTH
    off = NumericsConfig(batch_invariant=False, dense_copies="off", expert_products="w4a8")
    assert asked_ops(off, H200, config) == {"expert_linear": W4A8, "routed_experts": W4A8}
    monkeypatch.setattr(model, "is_usable", lambda needs: False)
    assert asked_ops(free, H200, config) == {}


def test_copies_are_refused_where_bits_must_not_depend_on_the_batch() -> None:
    with pytest.raises(ConfigError, match=r"numerics\.dense_copies"):
        EngineConfig.from_dotted({"numerics.dense_copies": "on"})
