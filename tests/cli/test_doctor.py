"""`deepinfer doctor`: the table as it resolves here, packages as pyproject.toml names them."""

from __future__ import annotations

import importlib.metadata
import json
import re
import tomllib
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from deepinfer.cli import doctor
from deepinfer.cli.doctor import PACKAGES
from deepinfer.cli.main import main
from deepinfer.device import pick_device
from deepinfer.kernels import ops as ops_module
from deepinfer.kernels import table as table_module
from deepinfer.kernels.ops import Ops
from deepinfer.kernels.table import TABLE, Implementation

ROOT = Path(__file__).parents[2]


def report(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    main(["doctor", "--device", "cpu", "--json", *argv])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_ops_are_those_the_engine_takes(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys)
    choices = Ops.resolve(pick_device("cpu").capability).choices
    assert {op["op"]: op["implementation"] for op in found["ops"]} == {
        op: choice.name for op, choice in choices.items()
    }
    assert [op["op"] for op in found["ops"]] == list(TABLE)
    assert all(op["why"] for op in found["ops"])
    assert found["chosen"] == "cpu" and found["devices"][0]["arch"] == "cpu"


def test_text_holds_ops_devices_and_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    for part in (*TABLE, *(package.name for package in PACKAGES), "<- used", "of weights, fits"):
        assert part in shown


def test_why_not(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {
        "rms_norm": (
            Implementation("triton", "rms_norm.triton", ("sm90", "sm100"), why="one pass"),
            Implementation("cpu", "rms_norm.cpu", ("cpu",), invariant=False, why="in numpy"),
            Implementation("reference", "rms_norm.reference"),
        ),
        "route": (Implementation("triton", "router.triton", ("sm90",)),),
    }
    for module in (table_module, ops_module):
        monkeypatch.setattr(module, "TABLE", MappingProxyType(rows))
    first, second = report(capsys)["ops"]
    assert first == {
        "op": "rms_norm",
        "implementation": "cpu",
        "why": "in numpy",
        "batch_invariant": False,
        "under_batch_invariant": "reference",
        "others": [
            {"implementation": "triton", "why_not": "runs on sm90, sm100"},
            {"implementation": "reference", "why_not": "comes later in the table"},
        ],
    }
    assert second["implementation"] is None and "route" in second["why"]
    assert main(["doctor", "--device", "cpu"]) == 1, "an op without implementation is a failure"
    assert "a row's bits depend on its batch" in capsys.readouterr().out


def test_packages_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    del groups["dev"]
    stated = set()
    for extra, requirements in groups.items():
        for text in requirements:
            found = re.match(r"([\w-]+)(?:>=([\d.]+))?", text)
            assert found is not None
            stated.add((found[1], found[2] or "", extra))
    assert {(p.name, p.needs, p.extra) for p in PACKAGES} == stated


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        ("2.11", None),
        ("2.11.0+cpu", None),
        ("2.13.0a0+git1234", None),
        ("3.0", None),
        ("2.9.1", "too old: 2.11 or later is needed"),
        ("2.11rc1", None),
    ],
)
def test_versions(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    version: str,
    problem: str | None,
) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(
        doctor.importlib.metadata, "version", lambda n: version if n == "torch" else real(n)
    )
    found = report(capsys)
    torch = next(p for p in found["packages"] if p["name"] == "torch")
    assert torch["version"] == version and torch["problem"] == problem
    assert bool(found["advice"] and "torch is too old" in found["advice"][0]) is bool(problem)
    assert main(["doctor", "--device", "cpu"]) == (1 if problem else 0)


def state(name: str, version: str | None, extra: str = "") -> doctor.PackageState:
    problem = None if version else "not installed"
    return doctor.PackageState(name=name, version=version, extra=extra, purpose="", problem=problem)


@pytest.mark.parametrize(
    ("has_driver", "cuda", "cards", "triton", "part"),
    [
        (False, None, 0, None, None),
        (True, None, 0, None, "without CUDA"),
        (True, "13.0", 0, None, "sees no card"),
        (True, "13.0", 1, None, "deepinfer[cuda]"),
        (True, "13.0", 1, "3.5", None),
    ],
)
def test_advice(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_driver: bool,
    cuda: str | None,
    cards: int,
    triton: str | None,
    part: str | None,
) -> None:
    driver = tmp_path / "version"
    if has_driver:
        driver.touch()
    monkeypatch.setattr(doctor, "_NVIDIA_DRIVER", driver)
    packages = [state("torch", "2.11"), state("triton", triton, "cuda")]
    advice = list(doctor._advice(packages, cuda, cards))
    assert [part in text for text in advice] == [True] if part else advice == []


def test_model_and_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = report(capsys)["model"]
    folder = Path(str(doctor.resolve_model("demo")))
    on_disk = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert 0.5 * on_disk < model["weight_bytes"] < on_disk and model["fits"]
    assert main(["doctor", "--model", str(tmp_path / "absent")]) == 1
    assert main(["doctor", "--device", "gpu"]) == 2
    assert main(["doctor", "--device", "cuda:99"]) == 1
    assert "cuda:99" in capsys.readouterr().err
