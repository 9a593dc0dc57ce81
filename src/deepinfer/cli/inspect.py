"""`deepinfer inspect`: what a checkpoint holds and what a rank of a cluster would hold (no torch).

Reads headers only, so memory stays small however large the weights are. Given a `config.json`
alone, it prints the same from the layout.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, TypedDict

from deepinfer.cache.layout import CacheLayout, Ring
from deepinfer.cli.common import integer, positive
from deepinfer.config.load import load_model_config, resolve_model
from deepinfer.config.mesh import Mesh
from deepinfer.config.model import ModelConfig
from deepinfer.weights.layout import PARTS, Part, TensorSpec, expected_tensors, rank_bytes
from deepinfer.weights.reader import Checkpoint

__all__ = ["add_parser", "run"]

_PART_TITLES: Final[dict[Part, str]] = {
    "backbone": "backbone",
    "engram": "Engram tables",
    "draft": "draft blocks",
    "vision": "vision, aligner",
}
_FORMAT_TITLES: Final = {
    "I8": "fp4_e2m1, packed pairs",
    "F8_E4M3": "fp8_e4m3",
    "F8_E8M0": "ue8m0 scales",
    "BF16": "bf16",
    "F32": "fp32",
}


class Amount(TypedDict):
    """How much of something there is."""

    tensors: int
    bytes: int
    parameters: int


class RankShare(TypedDict):
    """What one rank holds, in bytes by part."""

    rank: int
    world: int
    expert_parallel: int
    engram_parallel: int
    bytes: dict[Part, int]
    total_bytes: int


class Inventory(TypedDict):
    """Everything that `inspect` tells; the object that `--json` prints."""

    source: str
    shards: int | None
    total: Amount
    parts: dict[Part, Amount]
    formats: dict[str, Amount]
    kv_bytes_per_token: float
    window_slots: int
    window_slot_bytes: int
    window_bytes_per_sequence: int
    tail_bytes_per_sequence: int
    rank: RankShare | None


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "inspect",
        help="print what a checkpoint holds",
        description="Check a checkpoint and print its tensors, sizes, formats and parameters.",
    )
    parser.add_argument("model", help="checkpoint folder, 'demo', 'golden' or a config.json alone")
    parser.add_argument("--rank", type=integer, help="also print what this rank would hold")
    parser.add_argument(
        "--expert-parallel", type=positive, default=1, metavar="N", help="expert ranks"
    )
    parser.add_argument(
        "--engram-parallel", type=positive, default=1, metavar="N", help="Engram ranks"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print the inventory of a checkpoint or config."""
    path = Path(args.model).expanduser()
    shards: int | None = None
    if path.is_file():
        config = load_model_config(path)
        specs = list(expected_tensors(config).values())
    else:
        path = resolve_model(args.model)
        checkpoint = Checkpoint.open(path)
        config, specs = checkpoint.config, list(checkpoint.specs.values())
        shards = len({tensor.path for tensor in checkpoint.tensors.values()})
    share = None
    if args.rank is not None or args.expert_parallel != 1 or args.engram_parallel != 1:
        rank = 0 if args.rank is None else args.rank
        share = _rank_share(specs, rank, args.expert_parallel, args.engram_parallel)
    inventory = _take(config, specs, str(path), shards, share)
    print(json.dumps(inventory) if args.json else "\n".join(_lines(inventory, config)))
    return 0


def _take(
    config: ModelConfig,
    specs: Sequence[TensorSpec],
    source: str,
    shards: int | None,
    share: RankShare | None,
) -> Inventory:
    """Count everything; caches in the official formats, with room for one draft block."""
    caches = CacheLayout.build(config, "official")
    return Inventory(
        source=source,
        shards=shards,
        total=_amount(specs),
        parts={part: _amount(s for s in specs if s.part == part) for part in PARTS},
        formats={name: _amount(s for s in specs if s.dtype == name) for name in _FORMAT_TITLES},
        kv_bytes_per_token=sum(part.format.entry_bytes / part.ratio for part in caches.parts),
        window_slots=caches.ring_length,
        window_slot_bytes=caches.window_format.entry_bytes,
        window_bytes_per_sequence=_ring_bytes(caches.windows),
        tail_bytes_per_sequence=_ring_bytes(ring for _, ring in caches.tails),
        rank=share,
    )


def _amount(specs: Iterable[TensorSpec]) -> Amount:
    tensors = nbytes = parameters = 0
    for spec in specs:
        tensors += 1
        nbytes += spec.nbytes
        parameters += spec.num_parameters
    return Amount(tensors=tensors, bytes=nbytes, parameters=parameters)


def _rank_share(specs: Sequence[TensorSpec], rank: int, expert: int, engram: int) -> RankShare:
    """Return what a rank holds; raises ConfigError when the sizes do not fit or it is none."""
    replicas = math.lcm(max(expert, 1), max(engram, 1))
    mesh = Mesh(data=replicas, expert=expert, engram=engram)
    held = rank_bytes(specs, mesh, rank)
    return RankShare(
        rank=rank,
        world=mesh.world,
        expert_parallel=expert,
        engram_parallel=engram,
        bytes=held,
        total_bytes=sum(held.values()),
    )


def _ring_bytes(rings: Iterable[Ring]) -> int:
    return sum(ring.length * ring.entry_bytes for ring in rings)


def _lines(inventory: Inventory, config: ModelConfig) -> list[str]:
    """Lay the inventory out for reading."""
    total = inventory["total"]
    where = "from the layout; no weights read"
    if inventory["shards"] is not None:
        where = f"in {inventory['shards']} shard{'s' if inventory['shards'] != 1 else ''}; complete"
    parts = inventory["parts"]
    lines = [
        inventory["source"],
        f"{total['tensors']:,} tensors, {total['bytes']:,} bytes ({_gib(total['bytes'])}) {where}",
        "",
        *_table("part", {_PART_TITLES[p]: parts[p] for p in PARTS}),
        "",
        *_table("format", {t: inventory["formats"][f] for f, t in _FORMAT_TITLES.items()}),
        "",
        f"parameters               {_short(parts['backbone']['parameters'])} backbone, "
        f"{_short(parts['engram']['parameters'])} Engram tables, "
        f"{_short(parts['draft']['parameters'])} drafts, "
        f"{_short(parts['vision']['parameters'])} vision",
        f"KV per token             {inventory['kv_bytes_per_token']:,.12g} bytes",
        f"window per sequence      {inventory['window_bytes_per_sequence']:,} bytes "
        f"({config.num_hidden_layers} layers and {config.num_nextn_predict_layers} draft blocks x "
        f"{inventory['window_slots']} slots x {inventory['window_slot_bytes']} bytes)",
        f"tails per sequence       {inventory['tail_bytes_per_sequence']:,} bytes",
    ]
    share = inventory["rank"]
    if share is not None:
        lines += [
            "",
            f"rank {share['rank']} of {share['world']} (experts over {share['expert_parallel']}, "
            f"Engram rows over {share['engram_parallel']})",
            *(
                f"  {_PART_TITLES[p]:<22} {share['bytes'][p]:>19,} bytes"
                for p in PARTS
                if share["bytes"][p]
            ),
            f"  {'total':<22} {share['total_bytes']:>19,} bytes ({_gib(share['total_bytes'])})",
        ]
    return lines


def _table(title: str, rows: dict[str, Amount]) -> list[str]:
    """Return a table of the rows that are not empty."""
    lines = [f"{title:<24} {'tensors':>8} {'bytes':>19} {'parameters':>19}"]
    for name, amount in rows.items():
        if amount["tensors"]:
            lines.append(
                f"{name:<24} {amount['tensors']:>8,} {amount['bytes']:>19,} "
                f"{amount['parameters']:>19,}"
            )
    return lines


def _short(number: int) -> str:
    """Return a count with three digits at most and a letter, such as 552B."""
    size, unit = float(number), ""
    for unit in ("", "K", "M", "B"):
        if size < 999.5 or unit == "B":
            break
        size /= 1000
    return f"{size:.1f}{unit}" if unit and size < 9.95 else f"{size:.0f}{unit}"


def _gib(nbytes: int) -> str:
    """Return bytes in the largest binary unit that keeps a digit in front of the point."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:,.2f} {unit}"
    return f"{nbytes} B"
