"""What may import what, checked on the source and in a process where torch cannot be imported."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import deepinfer

ROOT = Path(deepinfer.__file__).parent
PURE = [
    "deepinfer",
    "deepinfer.errors",
    "deepinfer.config",
    "deepinfer.config.mesh",
    "deepinfer.config.engram",
    "deepinfer.weights.layout",
    "deepinfer.weights.reader",
    "deepinfer.cache.layout",
    "deepinfer.cache.blocks",
    "deepinfer.cache.slots",
    "deepinfer.parallel.balance",
    "deepinfer.parallel.migrate",
    "deepinfer.engine.request",
    "deepinfer.engine.sequence",
    "deepinfer.engine.plan",
    "deepinfer.engine.scheduler",
    "deepinfer.chat.tokenizer",
    "deepinfer.chat.encode",
    "deepinfer.dialog.chat",
    "deepinfer.dialog.protocol",
    "deepinfer.jobs.runner",
    "deepinfer.cli.main",
    "deepinfer.cli.inspect",
    "deepinfer.bench.measures",
    "deepinfer.bench.tasks",
    "deepinfer.bench.evaldata",
    "deepinfer.bench.evalreport",
    "deepinfer.cli.eval",
]
# package -> the places that may import it
CONFINED = {
    "triton": ("kernels/",),
    "tilelang": ("kernels/",),
    "llguidance": ("grammar/",),
    "xgrammar": ("grammar/",),
    "deepseek_recipe": ("chat/",),
    "ray": ("replicas/ray.py",),
    "matplotlib": ("bench/plot.py", "bench/simplot.py"),
    "yaml": ("sim/settings.py",),
    "pyppmd": ("bench/evaluate.py",),
}
BLOCKED = """
import importlib, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is blocked here")
sys.meta_path.insert(0, Block())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def imports_of(file: Path) -> set[str]:
    """Return the full names of all modules that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def exists(module: str) -> bool:
    path = ROOT.parent / module.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_pure_modules_need_no_torch() -> None:
    names = [name for name in PURE if exists(name)]
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *names], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_reference_imports_config_only() -> None:
    ours = {m for m in imports_of(ROOT / "model" / "reference.py") if m.startswith("deepinfer")}
    assert ours
    assert all(m.startswith(("deepinfer.config", "deepinfer.errors")) for m in ours), ours


@pytest.mark.parametrize("package", sorted(CONFINED))
def test_optional_packages_stay_in_their_place(package: str) -> None:
    places = CONFINED[package]
    for file in ROOT.rglob("*.py"):
        name = file.relative_to(ROOT).as_posix()
        if any(m.partition(".")[0] == package for m in imports_of(file)):
            assert name.startswith(places), f"{name} imports {package}"


LAUNCHERS = ("cluster/launch.py", "replicas/ray.py", "bench/gang.py", "kernels/nvcc.py")
"""These talk to what starts processes, and start some themselves."""


def test_only_load_reads_settings_from_the_environment() -> None:
    for file in ROOT.rglob("*.py"):
        name = file.relative_to(ROOT).as_posix()
        reads = {
            node.attr
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
        }
        allowed = name in ("config/load.py", *LAUNCHERS)
        assert not reads or allowed, f"{name} reads the environment"


def test_public_names() -> None:
    assert set(deepinfer._HOME) | {"__version__"} == set(deepinfer.__all__)
    for name in deepinfer.__all__:
        assert getattr(deepinfer, name) is not None
        assert name in dir(deepinfer)
    with pytest.raises(AttributeError, match="nothing"):
        _ = deepinfer.nothing
