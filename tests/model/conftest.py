"""Checkpoints of the fast model's tests: the packaged one, and one with all dims different."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.model.pair import Pair

from deepinfer.model.reference import Numerics
from deepinfer.weights.synth import write_synthetic

BETA_CONFIG = Path(__file__).parents[1] / "data" / "beta" / "config.json"


@pytest.fixture(scope="session")
def beta_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint whose dimensions all differ from the packaged one."""
    return write_synthetic(BETA_CONFIG, 5, tmp_path_factory.mktemp("beta") / "checkpoint")


@pytest.fixture(scope="session")
def folder_of(golden_checkpoint: Path, beta_folder: Path) -> dict[str, Path]:
    """The folders by name."""
    return {"alpha": golden_checkpoint, "beta": beta_folder}


@pytest.fixture(scope="session")
def pair_of(folder_of: dict[str, Path]) -> Callable[[str, Numerics], Pair]:
    """Both models of a checkpoint (name, numerics), loaded once."""
    loaded: dict[tuple[str, Numerics], Pair] = {}

    def get(name: str, mode: Numerics) -> Pair:
        if (name, mode) not in loaded:
            loaded[name, mode] = Pair.load(folder_of[name], mode)
        return loaded[name, mode]

    return get
