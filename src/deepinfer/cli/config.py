"""`deepinfer config`: the settings of a run, resolved and printable (no torch)."""

from __future__ import annotations

import argparse
import json

from deepinfer.bench.machine import describe_machine
from deepinfer.cli.common import SubParsers, UsageError, add_settings, engine_config
from deepinfer.config.engine import EngineConfig, settings
from deepinfer.config.load import DEMO_MODEL, GOLDEN_MODEL, load_model_config, resolve_model
from deepinfer.config.mesh import Mesh

__all__ = ["add_parser", "run", "to_lines"]


def add_parser(subparsers: SubParsers[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "config",
        help="print all settings",
        description="Print every setting as --config, --set and the environment make it, by its "
        "dotted key. The lines are TOML that --config reads.",
    )
    parser.add_argument(
        "what", nargs="?", choices=("show",), help="show is what happens without a word, too"
    )
    add_settings(parser)
    parser.add_argument(
        "--model",
        help=f"replace every auto by what it comes to for this checkpoint folder, '{DEMO_MODEL}' "
        f"or '{GOLDEN_MODEL}' on this machine now; loads no weights",
    )
    parser.add_argument(
        "--device", help="with --model: auto, cpu, cuda or cuda:N (auto)", default=None
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--describe", action="store_true", help="say what each setting means")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print the settings."""
    config = engine_config(args)
    if args.model is not None:
        config = _effective(config, args.model, args.device or "auto")
    elif args.device is not None:
        raise UsageError("--device says nothing without --model")
    if args.json:
        print(json.dumps(config.to_dotted(), indent=1))
    else:
        print("\n".join(to_lines(config, args.describe)))
    return 0


def _effective(config: EngineConfig, model: str, device_name: str) -> EngineConfig:
    """Resolve every auto as an engine that started now would."""
    from deepinfer.device import pick_device
    from deepinfer.engine.effective import effective_config
    from deepinfer.engine.memory import plan_caches, weight_bytes

    model_config = load_model_config(resolve_model(model))
    device = pick_device(device_name)
    on_cpu = device.torch_device.type == "cpu"
    available = device.available_bytes()
    if not on_cpu:
        available -= sum(weight_bytes(config, model_config, Mesh(), 0, on_cpu).values())
    plan = plan_caches(config, model_config, available_bytes=available, on_cpu=on_cpu)
    cores = int(describe_machine()["cpu_count"])
    return effective_config(config, model_config, plan, on_cpu=on_cpu, cores=cores)


def to_lines(config: EngineConfig, describe: bool = False) -> list[str]:
    """Return the settings as dotted `key = value` lines, which are TOML; `describe` adds comments.

    A text value stands in quotes, a list in brackets; `--set` takes both spellings.
    """
    lines: list[str] = []
    described = settings()
    for key, value in config.to_dotted().items():
        if describe:
            lines.append(f"# {described[key].doc}: {described[key].accepts}")
        lines.append(f"{key} = {json.dumps(value)}")  # JSON's spelling is TOML's for all of them
    return lines
