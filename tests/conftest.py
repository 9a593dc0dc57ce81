"""What all tests share: the default tier, a seed per test, one thread per worker, the data."""

from __future__ import annotations

import fcntl
import hashlib
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

# A worker owns one core. The libraries read these when they load: set them before any import.
if "PYTEST_XDIST_WORKER" in os.environ:
    for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[_name] = "1"

# A shell starts what runs in its background without Ctrl-C, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

OPT_IN = ("gpu", "multi", "official", "bench", "slow", "sm90", "sm100", "ascend")
NEEDS_GPU = ("sm90", "sm100", "ascend")
DATA = Path(__file__).parent / "data"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the seed that all tests' seeds depend on."""
    parser.addoption("--seed", type=int, default=0, help="changes the seed of every test")


def pytest_configure(config: pytest.Config) -> None:
    """Select the cpu tier when nothing is asked for, and make Hypothesis repeatable."""
    if not config.option.markexpr:
        config.option.markexpr = "cpu and not slow"
    source = str(Path(__file__).parents[1] / "src")  # child processes import this tree, too
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    repeatable = config.getoption("--seed") == 0
    settings.register_profile("deepinfer", deadline=None, derandomize=repeatable)
    settings.load_profile("deepinfer")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark a test as cpu unless it asks for something else, and as gpu when it names a chip."""
    for item in items:
        names = {mark.name for mark in item.iter_markers()}
        if names & set(NEEDS_GPU):
            item.add_marker("gpu")
        if not names & (set(OPT_IN) - {"slow"}):
            item.add_marker("cpu")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A number that belongs to this test alone: a hash of its id and `--seed`."""
    text = f"{request.node.nodeid} {request.config.getoption('--seed')}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    """Seed every global generator before each test."""
    random.seed(seed)
    np.random.seed(seed)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)


@pytest.fixture(autouse=True, scope="session")
def _quiet_environment() -> None:
    """Keep the caller's own DEEPINFER_* variables out of the tests."""
    for name in [n for n in os.environ if n.startswith("DEEPINFER_")]:
        del os.environ[name]


@pytest.fixture(scope="session")
def built_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a folder of files for all workers: `make(folder)` runs in the first that asks."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    def build(name: str, make: Callable[[Path], None]) -> Path:
        folder, done = shared / name, shared / f"{name}.done"
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                folder.mkdir(exist_ok=True)
                make(folder)
                done.touch()
        return folder

    return build


@pytest.fixture(scope="session")
def golden_folder() -> Path:
    """Recorded values of the packaged checkpoint: prompts.json, one safetensors file a prompt."""
    return DATA / "golden" / "alpha"


@pytest.fixture(scope="session")
def real_config_file() -> Path:
    """The released model's config.json."""
    return DATA / "real" / "config.json"


@pytest.fixture(scope="session")
def golden_checkpoint() -> Path:
    """The packaged checkpoint of random weights, to which the recorded values belong."""
    from deepinfer.config.load import resolve_model

    return resolve_model("golden")


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The packaged checkpoint that is trained."""
    from deepinfer.config.load import resolve_model

    return resolve_model("demo")
