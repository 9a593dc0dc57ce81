"""`deepinfer synth`: write a random checkpoint for a config, with its tokenizer (no torch)."""

from __future__ import annotations

import argparse
import time

from deepinfer.weights.synth import write_synthetic

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "synth",
        help="write a random checkpoint",
        description="Write a random checkpoint in the official layout, with a tokenizer that fits. "
        "Its activations stay finite; its texts mean nothing.",
    )
    parser.add_argument("--config", required=True, help="config.json, or the folder that holds one")
    parser.add_argument("--seed", type=_seed, required=True, help="the same seed, the same bytes")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--force", action="store_true", help="replace a checkpoint in DIR")
    parser.set_defaults(func=run)


def _seed(text: str) -> int:
    """Read an integer >= 0; raises argparse.ArgumentTypeError otherwise."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected an integer >= 0")
    return value


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint and say how large it is."""
    start = time.perf_counter()
    folder = write_synthetic(args.config, args.seed, args.out, overwrite=args.force)
    took = time.perf_counter() - start
    shards = sorted(folder.glob("*.safetensors"))
    nbytes = sum(shard.stat().st_size for shard in shards)
    print(f"{folder}: {nbytes:,} bytes in {len(shards)} shards, seed {args.seed}, {took:.1f} s")
    return 0
