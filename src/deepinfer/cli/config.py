"""`deepinfer config`: the settings of a run, resolved and printable (no torch)."""

from __future__ import annotations

import argparse
import json

from deepinfer.cli.common import SubParsers, add_settings, engine_config
from deepinfer.config.engine import EngineConfig, Value, settings

__all__ = ["add_parser", "run", "to_toml"]


def add_parser(subparsers: SubParsers[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "config",
        help="print all settings",
        description="Print every setting as --config, --set and the environment make it. The TOML "
        "is what --config reads.",
    )
    add_settings(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--describe", action="store_true", help="say what each setting means")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print the settings."""
    config = engine_config(args)
    if args.json:
        print(json.dumps(config.to_dotted(), indent=1))
    else:
        print(to_toml(config, args.describe), end="")
    return 0


def to_toml(config: EngineConfig, describe: bool = False) -> str:
    """Return the settings as TOML, a table for each group; `describe` adds comments."""
    lines: list[str] = []
    table = ""
    described = settings()
    for key, value in config.to_dotted().items():
        group, _, name = key.partition(".")
        if group != table:
            lines += ["", f"[{group}]"] if table else [f"[{group}]"]
            table = group
        if describe:
            lines.append(f"# {described[key].doc}: {described[key].accepts}")
        lines.append(f"{name} = {_toml_value(value)}")
    return "\n".join(lines) + "\n"


def _toml_value(value: Value) -> str:
    """Spell a setting's value; JSON's spelling is TOML's for all of them."""
    return json.dumps(list(value) if isinstance(value, tuple) else value)
