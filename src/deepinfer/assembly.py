"""Assembly: the parts of an engine, built from its settings in the one order that works.

Owns what each part needs of the others: weights before caches, which take what memory is left, and
caches before the policies that are measured on them. Requests and calls are the matter of `llm`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from deepinfer.cache.blocks import BlockPool
from deepinfer.cache.layout import CacheLayout
from deepinfer.cache.prefix import PrefixCache
from deepinfer.cache.slots import SlotPool
from deepinfer.cache.tensors import Caches
from deepinfer.chat.token_map import load_token_map
from deepinfer.cluster.launch import Membership
from deepinfer.config.engine import EngineConfig
from deepinfer.config.mesh import num_slots
from deepinfer.config.model import ModelConfig
from deepinfer.device.base import Device
from deepinfer.engine.calibrate import make_drafter, make_planner
from deepinfer.engine.device_runner import make_runner, settle
from deepinfer.engine.effective import cpu_threads
from deepinfer.engine.graphs import row_bucket
from deepinfer.engine.masks import MaskBuffer
from deepinfer.engine.memory import plan_caches
from deepinfer.engine.replay import keep_tokens
from deepinfer.engine.runner import Runner, host_rows
from deepinfer.engine.scheduler import Limits, Scheduler
from deepinfer.engine.shapes import fill_matchers
from deepinfer.engine.sizing import Sizes, max_rollback, token_budgets
from deepinfer.engine.speculation import DraftPlanner, check_speculation
from deepinfer.engine.state import SlotState
from deepinfer.errors import ConfigError, TokenizerError
from deepinfer.model.fast.balanced import make_balancer
from deepinfer.model.fast.context import ContextShare
from deepinfer.model.fast.model import FastModel, resolve_numerics
from deepinfer.parallel.experts import ExpertRanks, RowShape, make_exchange
from deepinfer.parallel.live import LiveBalancer
from deepinfer.parallel.tables import HostRows, MakeTable, ShardedRows, mapped_rows
from deepinfer.sampling.sampler import Sampler
from deepinfer.weights.load import check_steering, find_nonfinite
from deepinfer.weights.reader import Checkpoint

__all__ = [
    "Blueprint",
    "Parts",
    "build_parts",
    "check_settings",
    "make_scheduler",
    "set_cpu_threads",
]

_SEARCHED_BYTES = 32 * 2**30
"""Checkpoints above this are not read through for the cause of a bad logit."""

_TABLE_SHARE = 0.25
"""Engram tables above this share of the device's free memory stay on the host."""


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What is to be built: one rank's engine.

    path    the checkpoint folder
    member  this process's place among several ranks, None where one process is the engine
    """

    config: EngineConfig
    model_config: ModelConfig
    path: Path
    device: Device
    member: Membership | None


@dataclass(frozen=True, slots=True)
class Parts:
    """What was built, without what plans the steps.

    planner   chooses how many drafts are verified, None without drafts
    balancer  moves experts between ranks, None where they stay
    """

    runner: Runner
    layout: CacheLayout
    sizes: Sizes
    planner: DraftPlanner | None
    balancer: LiveBalancer | None


def set_cpu_threads(config: EngineConfig, model_config: ModelConfig, sharing: int = 1) -> None:
    """Set torch's threads for the whole process; bits do not depend on them.

    sharing  processes of this host that run the model together
    """
    threads = cpu_threads(config, model_config)
    if threads is None and sharing > 1:
        threads = max(1, (os.cpu_count() or 1) // sharing)
    if threads is not None:
        torch.set_num_threads(threads)


def check_settings(config: EngineConfig, model_config: ModelConfig) -> None:
    """Refuse settings that this model cannot follow, before weights are read or ranks start.

    Raises ConfigError or UnsupportedError.
    """
    num_slots(model_config.n_routed_experts, config.parallel.expert, config.parallel.copies)
    keep_tokens(config, model_config)
    check_speculation(config.speculation, model_config)
    outside = [i for i in config.sampling.banned_token_ids if i >= model_config.vocab_size]
    if outside:
        raise ConfigError(
            f"sampling.banned_token_ids holds {outside[0]}, outside the vocabulary "
            f"0..{model_config.vocab_size - 1}"
        )


def build_parts(blueprint: Blueprint) -> Parts:
    """Load the weights and build the caches and the runner over them; ranks call it together.

    Raises CheckpointError, TokenizerError, CacheError or UnsupportedError.
    """
    config, model_config, member = blueprint.config, blueprint.model_config, blueprint.member
    device = blueprint.device.torch_device
    on_cpu = device.type == "cpu"
    token_map = load_token_map(blueprint.path, model_config)
    if model_config.engram_layer_ids and token_map is None:
        raise TokenizerError(
            f"{blueprint.path} has Engram layers, which need its tokenizer.json or the cached "
            "token map: put tokenizer.json into the folder"
        )
    checkpoint = Checkpoint.open(blueprint.path)
    check_steering(checkpoint)
    model = FastModel.load(
        checkpoint,
        config.numerics,
        device,
        token_map,
        config.weights.dequantized_bytes,
        with_drafts=config.speculation.num_drafts > 0,
        ranks=_expert_ranks(blueprint),
        tables=_tables(blueprint, checkpoint),
        lean=not on_cpu and not config.keeps_stored,
    )
    model.branch(config.scheduling.graph_branches)
    if not on_cpu:
        tokens, rollback = config.cache.tokens_per_block, max_rollback(config)
        settle(model, CacheLayout.build(model_config, config.numerics.mode, tokens, rollback))
    plan = plan_caches(
        config, model_config, available_bytes=_available_bytes(blueprint), on_cpu=on_cpu
    )
    layout, sizes = plan.layout, plan.sizes
    caches = Caches.allocate(
        layout,
        sizes.num_blocks,
        sizes.num_slots,
        device,
        config.cache.dequantized_bytes if on_cpu else 0,
    )
    banned = config.sampling.banned_token_ids
    sampler = Sampler(model_config.vocab_size, sizes.num_slots, device, banned)
    state = SlotState(sizes.num_slots, config.speculation.num_drafts, device)
    runner = make_runner(
        config,
        sizes,
        model,
        caches,
        layout,
        sampler,
        state,
        device,
        make_drafter(config, model, sampler, state),
        lambda: _name_nonfinite(checkpoint),
    )
    balancer = None
    if member is not None and member.ranks.context.size > 1:
        runner.share_prefill(ContextShare(member.ranks.context, config.parallel.context_exchange))
    if member is not None and member.ranks.expert.size > 1 and config.parallel.balance_interval:
        balancer = make_balancer(config.parallel, member.ranks, model)
        runner.between = balancer.between
    planner = make_planner(
        config,
        runner,
        sizes.num_blocks,
        blueprint.path,
        blueprint.device.capability.name,
        lambda value: _largest(member, value),
    )
    return Parts(runner, layout, sizes, planner, balancer)


def make_scheduler(
    config: EngineConfig, model_config: ModelConfig, sizes: Sizes, planner: DraftPlanner | None
) -> Scheduler:
    """Return a scheduler over empty caches of these sizes."""
    limits = Limits(
        max_num_seqs=config.scheduling.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=sizes.max_model_len,
        chunk_tokens=sizes.chunk_tokens,
        eos_token_id=model_config.eos_token_id,
        fixed_chunks=config.numerics.batch_invariant,
        reserve=config.numerics.batch_invariant,
        vocab_size=model_config.vocab_size,
        keep_tokens=keep_tokens(config, model_config),
    )
    blocks = BlockPool(sizes.num_blocks)
    num_slots = sizes.num_slots - sizes.num_checkpoints
    tokens_per_block = config.cache.tokens_per_block
    prefix = None
    if config.cache.prefix:
        checkpoints = range(num_slots, sizes.num_slots)
        prefix = PrefixCache(blocks, tokens_per_block, checkpoints)
    return Scheduler(
        limits,
        blocks,
        SlotPool(num_slots),
        tokens_per_block,
        prefix,
        planner,
        fill_matchers,
        MaskBuffer(host_rows),
    )


def _expert_ranks(blueprint: Blueprint) -> ExpertRanks | None:
    """Return what the model needs to share its experts with other ranks, None where it has all."""
    member, config = blueprint.member, blueprint.config
    if member is None or member.ranks.expert.size == 1:
        return None
    parallel, model, drafts = config.parallel, blueprint.model_config, config.speculation.num_drafts
    device = blueprint.device.torch_device
    quantize = resolve_numerics(config.numerics, device).quantize
    budget, _ = token_budgets(config, device.type == "cpu")
    block = max(1 + drafts, model.dspark_block_size if drafts else 0)
    most = row_bucket(config.scheduling.max_num_seqs)
    experts = max(model.n_routed_experts, model.dspark_n_routed_experts if drafts else 0)
    active = max(model.num_experts_per_tok, model.dspark_num_experts_per_tok if drafts else 0)
    shape = RowShape(
        capacity=max(budget, row_bucket(most * block)),
        columns=model.hidden_size,
        active=active,
        experts=num_slots(experts, member.ranks.expert.size, parallel.copies),
        dtype=torch.bfloat16 if quantize else torch.float32,
    )
    exchange = make_exchange(
        parallel.backend, member.ranks.expert, quantize, parallel.capacity_factor, shape,
        member.ranks.store, device, parallel.timeout_s,
    )  # fmt: skip
    return ExpertRanks(member.ranks.expert, device, exchange, parallel.copies)


def _tables(blueprint: Blueprint, checkpoint: Checkpoint) -> MakeTable | None:
    """Return what makes the tables of Engram rows, None where they are on the device."""
    where, member = blueprint.config.parallel.engram_rows, blueprint.member
    device = blueprint.device.torch_device
    if member is not None and member.ranks.engram.size > 1:
        group = member.ranks.engram
        return lambda codes, scale: ShardedRows(codes, scale, group, device)
    if where == "auto" and device.type != "cpu":  # a CPU has them mapped anyway
        tables = [t for name, t in checkpoint.tensors.items() if ".engram.embed." in name]
        most = _TABLE_SHARE * blueprint.device.available_bytes()
        where = "host" if sum(t.nbytes for t in tables) > most else "device"
    if where == "mapped" and device.type == "cuda":
        return mapped_rows(device)
    return HostRows if where == "host" else None


def _largest(member: Membership | None, value: float) -> float:
    """Return the largest of a number over all ranks, which call it together."""
    if member is None:
        return value
    found = torch.tensor([value], dtype=torch.float64)
    return float(member.ranks.world.all_reduce(found, largest=True))


def _available_bytes(blueprint: Blueprint) -> int:
    """Return what this rank may use, the same for all ranks: the least that one has."""
    available, member = blueprint.device.available_bytes(), blueprint.member
    if member is None:
        return available
    if blueprint.device.torch_device.type == "cpu":
        available //= member.local_world
    return -int(_largest(member, -available))


def _name_nonfinite(checkpoint: Checkpoint) -> str | None:
    """Name the first stored tensors that hold NaN or infinity; None when none does, or unread."""
    if sum(tensor.nbytes for tensor in checkpoint.tensors.values()) > _SEARCHED_BYTES:
        return None
    names = find_nonfinite(checkpoint, limit=3)
    return f"{', '.join(names)} holds NaN or infinity" if names else None
