"""`deepinfer plan`: what fits into a device of some size, for any checkpoint config (no torch)."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Final

from deepinfer.cli.common import UsageError, add_settings, engine_config, positive
from deepinfer.config.engine import EngineConfig
from deepinfer.config.load import load_model_config, resolve_model
from deepinfer.config.mesh import Mesh
from deepinfer.engine.memory import MemoryPlan, plan_memory
from deepinfer.engine.replay import keep_tokens
from deepinfer.engine.speculation import check_speculation
from deepinfer.errors import ConfigError

__all__ = ["add_parser", "run"]

DEVICES: Final = {
    "a100": 80_000_000_000,
    "h100": 80_000_000_000,
    "h200": 141_000_000_000,
    "b200": 180_000_000_000,
    "b300": 288_000_000_000,
}
"""Name -> bytes, as sold."""
_CONTEXTS: Final = (4096, 32768, 131072, 1048576)
_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS_BINARY: Final = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "plan",
        help="say what fits into a device",
        description="Lay weights, caches and activations out on devices of some size, with the "
        "code that sizes the engine's caches. Nothing is loaded, no device is needed.",
    )
    parser.add_argument(
        "--model", required=True, help="checkpoint folder, 'demo', 'golden' or a config.json alone"
    )
    parser.add_argument(
        "--device",
        choices=(*DEVICES, "cpu"),
        help="size and kind of each device; cpu needs --device-bytes (default: h200)",
    )
    parser.add_argument(
        "--device-bytes", type=_bytes, metavar="N", help="memory of each device: 141G, 80GiB, bytes"
    )
    parser.add_argument(
        "--num-devices",
        type=positive,
        default=1,
        metavar="N",
        help="devices that share the weights; each serves its own requests (default: 1)",
    )
    parser.add_argument(
        "--expert-parallel",
        type=positive,
        metavar="N",
        help="devices that share one copy of the experts (default: all)",
    )
    parser.add_argument(
        "--engram-parallel",
        type=positive,
        metavar="N",
        help="devices that share one copy of the Engram tables (default: all)",
    )
    parser.add_argument(
        "--context",
        type=positive,
        action="append",
        metavar="N",
        help="also tell the batch of this context; repeatable",
    )
    add_settings(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan of one device; all devices hold the same but for a part row of a table."""
    path = Path(args.model).expanduser()
    model = load_model_config(path if path.is_file() else resolve_model(args.model))
    config = engine_config(args)
    on_cpu = args.device == "cpu"
    if on_cpu and args.device_bytes is None:
        raise UsageError("--device cpu has no size of its own: give --device-bytes")
    total = args.device_bytes or DEVICES[args.device or "h200"]
    try:
        mesh = Mesh(
            data=args.num_devices,
            expert=args.expert_parallel or args.num_devices,
            engram=args.engram_parallel or args.num_devices,
        )
        mesh.expert_range(0, model.n_routed_experts)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    if mesh.world > args.num_devices:
        raise UsageError(
            f"--engram-parallel: found {args.engram_parallel}, but there are --num-devices "
            f"{args.num_devices}"
        )
    check_speculation(config.speculation, model)
    keep_tokens(config, model)
    longest = model.max_position_embeddings
    beyond = [c for c in args.context or () if c > longest]
    if beyond:
        raise UsageError(f"--context: found {beyond[0]}, but the model ends at {longest} tokens")
    plan = plan_memory(config, model, total_bytes=total, mesh=mesh, on_cpu=on_cpu)
    asked = {plan.model_max_len, *_CONTEXTS, *(args.context or ())}
    contexts = sorted(c for c in asked if c <= longest)
    found = _as_object(plan, config, mesh, args.model, contexts)
    print(json.dumps(found) if args.json else "\n".join(_lines(plan, mesh, args.model, contexts)))
    return 0


def _as_object(
    plan: MemoryPlan, config: EngineConfig, mesh: Mesh, model: str, contexts: list[int]
) -> dict[str, object]:
    sizes = plan.sizes
    return {
        "model": model,
        "num_devices": mesh.world,
        "expert_parallel": mesh.expert,
        "engram_parallel": mesh.engram,
        "device_bytes": plan.total_bytes,
        "parts": dict(plan.parts),
        "free_bytes": _free(plan),
        "tokens_per_block": plan.layout.tokens_per_block,
        "block_bytes": plan.block_bytes,
        "slot_bytes": plan.slot_bytes,
        "num_blocks": sizes.num_blocks,
        "num_slots": sizes.num_slots,
        "cache_tokens": plan.num_tokens,
        "max_num_seqs": config.scheduling.max_num_seqs,
        "max_model_len": sizes.max_model_len,
        "max_num_batched_tokens": sizes.max_num_batched_tokens,
        "longest_context": plan.longest_context,
        "batches": [
            {"context": c, "per_device": plan.batch(c), "total": plan.batch(c) * mesh.data}
            for c in contexts
        ],
    }


def _free(plan: MemoryPlan) -> int:
    assert plan.total_bytes is not None
    return plan.total_bytes - sum(plan.parts.values())


def _lines(plan: MemoryPlan, mesh: Mesh, model: str, contexts: list[int]) -> list[str]:
    assert plan.total_bytes is not None
    sizes, layout = plan.sizes, plan.layout
    many = f"{mesh.world} devices, each" if mesh.world > 1 else "one device of"
    lines = [f"{model} on {many} {plan.total_bytes:,} bytes ({_human(plan.total_bytes)})", ""]
    rows = [*plan.parts.items(), ("free", _free(plan))]
    width = max(len(name) for name, _ in rows)
    for name, num in rows:
        share = 100.0 * num / plan.total_bytes
        lines.append(f"  {name:<{width}}  {num:>18,}  {_human(num):>9}  {share:5.1f} %")
    per_token = plan.block_bytes / layout.tokens_per_block
    num_seqs = sizes.num_slots - sizes.num_checkpoints - 1
    lines += [
        "",
        f"blocks: {sizes.num_blocks - 1:,} of {layout.tokens_per_block} tokens and "
        f"{plan.block_bytes:,} bytes ({per_token:,.0f} a token); {plan.num_tokens:,} tokens in all",
        f"slots: {num_seqs:,} sequences at a time, {plan.slot_bytes:,} bytes each",
        f"longest sequence: {sizes.max_model_len:,} tokens as set, {plan.longest_context:,} if it "
        "has the caches to itself",
        "batch that fits, with slots as needed:",
    ]
    for context in contexts:
        batch = plan.batch(context)
        all_told = f", {batch * mesh.data:,} in all" if mesh.data > 1 else ""
        lines.append(f"  {context:>9,} tokens: {batch:,} sequences a device{all_told}")
    return lines


def _human(num_bytes: float) -> str:
    """Spell a size with three digits and a binary unit."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    place = min(int(math.log2(abs(num_bytes)) // 10), 4) if abs(num_bytes) >= 1 else 0
    return f"{num_bytes / 1024**place:.3g} {units[place]}"


def _bytes(text: str) -> int:
    """Read `141G`, `80GiB`, `64000000000`; raises argparse.ArgumentTypeError otherwise."""
    number = text.strip().removesuffix("B").removesuffix("b")
    unit = number.lstrip("0123456789.")
    factor = {**_UNITS, **_UNITS_BINARY}.get(unit[:1].upper() + unit[1:])
    try:
        value = int(float(number.removesuffix(unit)) * factor) if factor else 0
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected bytes, as in 141G, 80GiB or 64000000000"
        )
    return value
