"""`deepinfer doctor`: what this machine can run, which implementation each op would use and why."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypedDict

import deepinfer
from deepinfer.cli.common import SubParsers, UsageError
from deepinfer.config.load import DEMO_MODEL, resolve_model
from deepinfer.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from deepinfer.device.base import Capability, Device
    from deepinfer.kernels.table import Implementation

__all__ = ["PACKAGES", "Package", "add_parser", "run"]

_NVIDIA_DRIVER: Final = Path("/proc/driver/nvidia/version")


class Package(NamedTuple):
    """A package that DeepInfer can use.

    needs  least version
    extra  the extra that installs it, "" = always installed
    """

    name: str
    needs: str
    extra: str
    purpose: str


PACKAGES: Final = (
    Package("torch", "2.11", "", "all computing"),
    Package("safetensors", "0.5", "", "checkpoints"),
    Package("tokenizers", "0.21", "", "text"),
    Package("numpy", "1.26", "", "tables and plans"),
    Package("triton", "3.3", "cuda", "kernels for NVIDIA cards"),
    Package("llguidance", "1.9", "grammar", "structured output"),
    Package("jsonschema", "4.23", "grammar", "structured output"),
    Package("xgrammar", "0.2.9", "xgrammar", "structured output with xgrammar"),
    Package("deepseek-recipe", "0.2", "chat", "conversations"),
    Package("zstandard", "0.22", "jobs", "packed job files"),
    Package("ray", "", "ray", "several machines"),
    Package("matplotlib", "3.8", "plot", "plots of benchmarks"),
    Package("pyyaml", "6", "sim", "descriptions of clusters"),
    Package("pyppmd", "1.1", "eval", "PPMd beside the model in eval"),
)


class PackageState(TypedDict):
    """A package as found; `problem` is None when it can be used."""

    name: str
    version: str | None
    extra: str
    purpose: str
    problem: str | None


class DeviceState(TypedDict):
    """A device that torch can use."""

    device: str
    name: str
    arch: str
    total_bytes: int
    available_bytes: int


class OtherChoice(TypedDict):
    """An implementation that is not used."""

    implementation: str
    why_not: str


class OpState(TypedDict):
    """What computes an op; the implementation is None when nothing can.

    `under_batch_invariant` is what does where `numerics.batch_invariant` is set.
    """

    op: str
    implementation: str | None
    why: str
    batch_invariant: bool
    under_batch_invariant: str | None
    others: list[OtherChoice]


class ModelState(TypedDict):
    """Whether a checkpoint's weights fit the device."""

    model: str
    weight_bytes: int
    available_bytes: int
    fits: bool


class Report(TypedDict):
    """Everything that `doctor` tells; the object that `--json` prints."""

    deepinfer: str
    python: str
    system: str
    cpu_count: int
    torch_threads: int
    torch_cuda: str | None
    devices: list[DeviceState]
    chosen: str
    model: ModelState
    ops: list[OpState]
    packages: list[PackageState]
    advice: list[str]


def add_parser(subparsers: SubParsers[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="print what this machine can run",
        description="Print the devices, which implementation each op would use and why, the "
        "versions of all packages, and what is worth installing.",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
    parser.add_argument(
        "--model",
        default=DEMO_MODEL,
        help=f"checkpoint whose size is held against the memory ({DEMO_MODEL})",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 when something that DeepInfer cannot do without is amiss."""
    folder = resolve_model(args.model)
    packages = [_package_state(package) for package in PACKAGES]
    broken = [p for p in packages if not p["extra"] and p["problem"]]
    if any(p["name"] == "torch" and p["version"] is None for p in broken):
        raise UnsupportedError(
            "torch is not installed, and nothing computes without it: pip install deepinfer"
        )
    report = _report(args.device, args.model, folder, packages)
    print(json.dumps(report) if args.json else "\n".join(_lines(report)))
    return 1 if broken or any(op["implementation"] is None for op in report["ops"]) else 0


def _report(name: str, model: str, folder: Path, packages: list[PackageState]) -> Report:
    import torch

    from deepinfer.device import pick_device
    from deepinfer.device.cuda import cuda_count
    from deepinfer.weights.reader import Checkpoint

    try:
        device = pick_device(name)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    devices = [_device_state(pick_device("cpu"))]
    devices += [_device_state(pick_device(f"cuda:{index}")) for index in range(cuda_count())]
    nbytes = sum(tensor.nbytes for tensor in Checkpoint.open(folder).tensors.values())
    free = device.available_bytes()
    return Report(
        deepinfer=deepinfer.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu_count=_cpu_count(),
        torch_threads=torch.get_num_threads(),
        torch_cuda=torch.version.cuda,
        devices=devices,
        chosen=str(device.torch_device),
        model=ModelState(
            model=model, weight_bytes=nbytes, available_bytes=free, fits=nbytes < free
        ),
        ops=_op_states(device.capability.arch),
        packages=packages,
        advice=list(_advice(packages, torch.version.cuda, cuda_count())),
    )


def _cpu_count() -> int:
    """Return the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _device_state(device: Device) -> DeviceState:
    capability = device.capability
    return DeviceState(
        device=str(device.torch_device),
        name=capability.name,
        arch=capability.arch,
        total_bytes=capability.total_bytes,
        available_bytes=device.available_bytes(),
    )


def _op_states(arch: str) -> list[OpState]:
    """Walk the dispatch table as the engine does, and note why each line was taken or not."""
    from deepinfer.device.base import Capability
    from deepinfer.kernels.ops import choose
    from deepinfer.kernels.table import TABLE

    capability = Capability(name="", arch=arch, total_bytes=0)
    states = []
    for op, implementations in TABLE.items():
        chosen: Implementation | None = None
        try:
            chosen = choose(op, capability)
            why = chosen.why
        except UnsupportedError as error:
            why = error.message
        others = []
        for other in implementations:
            if other is chosen:
                continue
            others.append(OtherChoice(implementation=other.name, why_not=_why_not(other, arch)))
        states.append(
            OpState(
                op=op,
                implementation=None if chosen is None else chosen.name,
                why=why,
                batch_invariant=chosen is not None and chosen.invariant,
                under_batch_invariant=_invariant(op, capability),
                others=others,
            )
        )
    return states


def _invariant(op: str, capability: Capability) -> str | None:
    """Return what `numerics.batch_invariant` takes, None when nothing does."""
    from deepinfer.kernels.ops import choose

    try:
        return choose(op, capability, invariant=True).name
    except UnsupportedError:
        return None


def _why_not(line: Implementation, arch: str) -> str:
    """Say why a line of the table was not taken."""
    from deepinfer.kernels.libraries import why_not

    if line.archs and arch not in line.archs:
        return f"runs on {', '.join(line.archs)}"
    if line.needs and why_not(line.needs):
        return why_not(line.needs)
    return "comes later in the table" if line.chosen else f"for benchmarks: {line.why}"


def _package_state(package: Package) -> PackageState:
    try:
        version: str | None = importlib.metadata.version(package.name)
    except importlib.metadata.PackageNotFoundError:
        version = None
    problem = None
    if version is None:
        problem = "not installed"
    elif package.needs and _numbers(version) < _numbers(package.needs):
        problem = f"too old: {package.needs} or later is needed"
    return PackageState(
        name=package.name,
        version=version,
        extra=package.extra,
        purpose=package.purpose,
        problem=problem,
    )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, without zeros at the end: (2, 11) of 2.11.0+cpu."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _advice(
    packages: Iterable[PackageState], torch_cuda: str | None, num_cards: int
) -> Iterable[str]:
    """Say what is worth installing on this machine, the pressing first."""
    packages = list(packages)
    for package in packages:
        if package["problem"] and not package["extra"]:
            yield f"{package['name']} is {package['problem']}: pip install --upgrade deepinfer"
        elif package["version"] and package["problem"]:
            yield (
                f"{package['name']} is {package['problem']}: "
                f"pip install --upgrade 'deepinfer[{package['extra']}]'"
            )
    missing = {p["name"] for p in packages if p["version"] is None}
    if _NVIDIA_DRIVER.exists() and not num_cards:
        if torch_cuda is None:
            yield (
                "an NVIDIA driver is here, but torch is a build without CUDA: install a CUDA build"
            )
        else:
            yield (
                f"an NVIDIA driver is here, but torch (CUDA {torch_cuda}) sees no card: check "
                "CUDA_VISIBLE_DEVICES and the driver's version"
            )
    if num_cards and "triton" in missing:
        yield "kernels for the NVIDIA card need Triton: pip install 'deepinfer[cuda]'"


def _lines(report: Report) -> list[str]:
    """Lay the report out for reading."""
    cuda = report["torch_cuda"]
    lines = [
        f"deepinfer {report['deepinfer']}, Python {report['python']}, {report['system']}",
        f"{report['cpu_count']} processors, torch uses {report['torch_threads']} threads and "
        + ("is built without CUDA" if cuda is None else f"is built for CUDA {cuda}"),
        "",
        "devices",
    ]
    for device in report["devices"]:
        used = "  <- used" if device["device"] == report["chosen"] else ""
        free, total = _size(device["available_bytes"]), _size(device["total_bytes"])
        lines.append(
            f"  {device['device']:<8} {device['arch']:<6} {free} free of {total}, "
            f"{device['name']}{used}"
        )
    model = report["model"]
    verdict = "fits" if model["fits"] else "does not fit"
    lines += [
        "",
        f"model {model['model']}: {_size(model['weight_bytes'])} of weights, {verdict} into "
        f"{_size(model['available_bytes'])}",
        "",
        f"ops on {report['chosen']}",
        *_op_lines(report["ops"]),
        "",
        "packages",
    ]
    for package in report["packages"]:
        version = package["version"] or "-"
        text = f"  {package['name']:<16} {version:<14} {package['purpose']}"
        if package["problem"]:
            text += f"; {package['problem']}"
            if package["extra"]:
                text += f": pip install 'deepinfer[{package['extra']}]'"
        lines.append(text)
    lines += ["", "to do" if report["advice"] else "nothing is amiss"]
    return lines + [f"  - {text}" for text in report["advice"]]


def _op_lines(ops: Sequence[OpState]) -> list[str]:
    lines = []
    for op in ops:
        text = f"  {op['op']:<16} {op['implementation'] or 'none':<10} {op['why']}"
        if op["implementation"] and not op["batch_invariant"]:
            alone = op["under_batch_invariant"] or "nothing"
            text += f"; a row's bits depend on its batch, numerics.batch_invariant takes {alone}"
        for other in op["others"]:
            text += f"; not {other['implementation']}: {other['why_not']}"
        lines.append(text)
    return lines


def _size(nbytes: int) -> str:
    """Return bytes in the largest binary unit that keeps a digit in front of the point."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes >= size:
            return f"{nbytes / size:,.1f} {unit}"
    return f"{nbytes / 1024:.1f} KiB"
