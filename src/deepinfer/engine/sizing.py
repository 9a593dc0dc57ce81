"""How many cache blocks fit, and what lengths and budgets follow: every "auto" that needs memory.

Pure: byte sizes and free memory are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.config.engine import EngineConfig
from deepinfer.errors import CacheError, ConfigError

__all__ = [
    "CPU_POOL_BYTES",
    "Sizes",
    "max_rollback",
    "num_checkpoints",
    "resolve_sizes",
    "token_budgets",
]

CPU_POOL_BYTES = 256 * 2**20
"""What the block pool of a CPU gets unless told otherwise; one sequence of `max_model_len` always
fits."""

_CPU_BATCHED_TOKENS = 2048
_DEVICE_BATCHED_TOKENS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Resolved sizes. `num_blocks` and `num_slots` include the padding block and slot 0.

    num_checkpoints  slots at the end of `num_slots` that keep the state of prefixes, not sequences
    """

    num_blocks: int
    num_slots: int
    max_model_len: int
    max_num_batched_tokens: int
    chunk_tokens: int
    num_checkpoints: int = 0


def max_rollback(config: EngineConfig) -> int:
    """Return how many positions a sequence may step back: for drafts, or what is set."""
    drafts = config.speculation.num_drafts
    needed = drafts + 1 if drafts else 0
    given = config.cache.max_rollback
    return needed if given == "auto" else max(given, needed)


def num_checkpoints(config: EngineConfig) -> int:
    """Return how many prefixes can be kept ready to continue: a slot's worth of memory each."""
    if not config.cache.prefix:
        return 0
    given = config.cache.prefix_checkpoints
    return config.scheduling.max_num_seqs if given == "auto" else given


def resolve_sizes(
    config: EngineConfig,
    *,
    model_max_len: int,
    block_bytes: int,
    slot_bytes: int,
    available_bytes: int,
    on_cpu: bool,
    reserved_bytes: int = 0,
) -> Sizes:
    """Fit the caches into memory and derive the limits.

    available_bytes  free memory of the device, weights already loaded
    reserved_bytes   of these, what a step needs beside the caches
    Raises CacheError when the memory cannot hold the caches or a sequence of the asked length,
    ConfigError when the settings exceed the model or each other; both name the settings that change
    it.
    """
    tokens_per_block = config.cache.tokens_per_block
    given_len = config.scheduling.max_model_len
    if given_len != "auto" and given_len > model_max_len:
        raise ConfigError(
            f"scheduling.max_model_len: found {given_len}, "
            f"but the model ends at {model_max_len} tokens"
        )
    checkpoints = num_checkpoints(config)
    num_slots = config.scheduling.max_num_seqs + 1 + checkpoints
    blocks = _num_blocks(
        config,
        longest=model_max_len if given_len == "auto" else given_len,
        block_bytes=block_bytes,
        slots_bytes=num_slots * slot_bytes,
        available_bytes=available_bytes,
        reserved_bytes=reserved_bytes,
        on_cpu=on_cpu,
    )
    room = blocks * tokens_per_block
    if given_len != "auto" and given_len > room:
        raise CacheError(
            f"scheduling.max_model_len {given_len} needs {-(-given_len // tokens_per_block)} "
            f"blocks of {block_bytes} bytes, the pool has {blocks}: "
            "lower it, or raise cache.num_blocks or cache.memory_bytes"
        )
    budget, chunk = token_budgets(config, on_cpu)
    return Sizes(
        num_blocks=blocks + 1,
        num_slots=num_slots,
        max_model_len=min(model_max_len, room) if given_len == "auto" else given_len,
        max_num_batched_tokens=budget,
        chunk_tokens=chunk,
        num_checkpoints=checkpoints,
    )


def _num_blocks(
    config: EngineConfig,
    *,
    longest: int,
    block_bytes: int,
    slots_bytes: int,
    available_bytes: int,
    reserved_bytes: int,
    on_cpu: bool,
) -> int:
    cache = config.cache
    left = available_bytes - reserved_bytes
    free_told = [f"free memory: {available_bytes} bytes"]
    steps_lower = ""
    if reserved_bytes:
        free_told.append(
            f"a step's temporaries and logits: about {reserved_bytes} bytes for "
            f"scheduling.max_num_batched_tokens {token_budgets(config, on_cpu)[0]}"
        )
        steps_lower = "scheduling.max_num_batched_tokens, "
    slots_told = (
        f"sequence slots: {slots_bytes} bytes for scheduling.max_num_seqs "
        f"{config.scheduling.max_num_seqs}"
    )
    if num_checkpoints(config):
        slots_told += f" and cache.prefix_checkpoints {num_checkpoints(config)}"
    given: int | None = None
    if cache.num_blocks != "auto":
        given = cache.num_blocks
    elif cache.memory_bytes != "auto":
        given = cache.memory_bytes // block_bytes - 1
        if given < 1:
            raise CacheError(
                f"cache.memory_bytes {cache.memory_bytes} holds less than two blocks of "
                f"{block_bytes} bytes (one is padding): raise it"
            )
    if given is not None:
        if (given + 1) * block_bytes + slots_bytes > left:
            raise CacheError(
                "the caches do not fit into memory",
                [
                    *free_told,
                    slots_told,
                    f"blocks: {(given + 1) * block_bytes} bytes for {given + 1}",
                    "lower cache.num_blocks, cache.memory_bytes, cache.max_rollback, "
                    f"{steps_lower}or scheduling.max_num_seqs",
                ],
            )
        return given
    usable = int(left * cache.memory_fraction) - slots_bytes
    if usable < 2 * block_bytes:
        raise CacheError(
            "the caches do not fit into memory",
            [
                *free_told,
                f"cache.memory_fraction {cache.memory_fraction:g} of what is left",
                slots_told,
                f"blocks: {block_bytes} bytes each, at least two",
                f"lower scheduling.max_num_seqs, {steps_lower}cache.max_rollback "
                "or cache.tokens_per_block, or raise cache.memory_fraction",
            ],
        )
    per_sequence = -(-longest // cache.tokens_per_block)
    wanted = per_sequence * config.scheduling.max_num_seqs
    if on_cpu:
        least = per_sequence if config.scheduling.max_model_len != "auto" else 1
        wanted = min(wanted, max(least, CPU_POOL_BYTES // block_bytes))
    return min(wanted, usable // block_bytes - 1)


def token_budgets(config: EngineConfig, on_cpu: bool) -> tuple[int, int]:
    """Return the token budget of a prefill step and the size of one prompt's chunk."""
    given_budget = config.scheduling.max_num_batched_tokens
    given_chunk = config.scheduling.chunk_size
    if given_budget == "auto":
        budget = _CPU_BATCHED_TOKENS if on_cpu else _DEVICE_BATCHED_TOKENS
        if given_chunk != "auto":
            budget = max(budget, given_chunk)
    else:
        budget = given_budget
    if given_chunk == "auto":
        return budget, budget - budget % config.cache.tokens_per_block or budget
    if given_chunk > budget:
        raise ConfigError(
            f"scheduling.chunk_size {given_chunk} is above scheduling.max_num_batched_tokens "
            f"{budget}: lower the first or raise the second"
        )
    return budget, given_chunk
