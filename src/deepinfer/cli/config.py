"""`deepinfer config`: the settings of a run, resolved and printable (no torch)."""

from __future__ import annotations

import argparse
import json

from deepinfer.cli.common import SubParsers, add_settings, engine_config
from deepinfer.config.engine import EngineConfig, settings

__all__ = ["add_parser", "run", "to_lines"]


def add_parser(subparsers: SubParsers[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "config",
        help="print all settings",
        description="Print every setting as --config, --set and the environment make it, by its "
        "dotted key. The lines are TOML that --config reads.",
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
        print("\n".join(to_lines(config, args.describe)))
    return 0


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
