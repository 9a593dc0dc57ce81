"""What every "auto" of the settings comes to, for one model on one device (pure)."""

from __future__ import annotations

from deepinfer.config.engine import EngineConfig
from deepinfer.config.model import ModelConfig
from deepinfer.engine.memory import MemoryPlan
from deepinfer.engine.replay import keep_tokens
from deepinfer.engine.sizing import max_rollback, num_checkpoints

__all__ = ["SMALL_HIDDEN", "cpu_threads", "effective_config", "overlaps"]

SMALL_HIDDEN = 1024
"""Below this width an operation on a CPU is too short to share out, or to overlap with planning:
waiting for a second thread, which may have been pushed off its core, costs more than it brings."""


def overlaps(config: EngineConfig, model: ModelConfig, *, on_cpu: bool) -> bool:
    """Return whether a step is planned while the one before runs.

    On a CPU the device side is a thread of the same interpreter: between the short operations of a
    narrow model the two threads wait for each other more than they gain.
    """
    if config.scheduling.overlap == "auto":
        return not on_cpu or model.hidden_size >= SMALL_HIDDEN
    return config.scheduling.overlap


def cpu_threads(config: EngineConfig, model: ModelConfig) -> int | None:
    """Return the threads of one operation, None for as many as torch takes by itself."""
    given = config.parallel.cpu_threads
    if given != "auto":
        return given
    return 1 if model.hidden_size < SMALL_HIDDEN else None


def effective_config(
    config: EngineConfig, model: ModelConfig, plan: MemoryPlan, *, on_cpu: bool, cores: int
) -> EngineConfig:
    """Return the settings with every "auto" replaced that stands for a value.

    plan   what the caches were given
    cores  processors that the process may use
    `replay.keep_tokens` stays "auto" while replay is off.
    """
    sizes = plan.sizes
    kept = keep_tokens(config, model)
    numerics = config.numerics
    values: dict[str, object] = {
        "scheduling.overlap": overlaps(config, model, on_cpu=on_cpu),
        "scheduling.max_num_batched_tokens": sizes.max_num_batched_tokens,
        "scheduling.max_model_len": sizes.max_model_len,
        "scheduling.chunk_size": sizes.chunk_tokens,
        "cache.num_blocks": sizes.num_blocks - 1,
        "cache.memory_bytes": sizes.num_blocks * plan.layout.block_bytes,
        "cache.max_rollback": max_rollback(config),
        "parallel.data": config.mesh.data,
        "parallel.cpu_threads": cpu_threads(config, model) or cores,
    }
    if config.cache.prefix:
        values["cache.prefix_checkpoints"] = num_checkpoints(config)
    if kept is not None:
        values["replay.keep_tokens"] = kept
    if numerics.output_projection == "auto":
        exact = on_cpu or numerics.mode == "noq"
        values["numerics.output_projection"] = "bf16" if exact else "fp8"
    if numerics.index_scores == "auto":
        values["numerics.index_scores"] = "reference" if on_cpu else "final"
    if numerics.dense_copies == "auto" and (on_cpu or numerics.batch_invariant):
        values["numerics.dense_copies"] = "off"
    shards = config.parallel.engram > 1
    if config.parallel.engram_rows == "auto" and (on_cpu or shards):
        values["parallel.engram_rows"] = "shards" if shards else "device"
    if on_cpu and config.parallel.backend == "auto":
        values["parallel.backend"] = "exact"
    if on_cpu and config.scheduling.cuda_graphs == "auto":
        values["scheduling.cuda_graphs"] = "off"
    if config.grammar.threads == "auto":
        values["grammar.threads"] = cores
    if not config.speculation.confidence_temperatures and config.speculation.num_drafts:
        given = model.dspark_confidence_temperatures
        if len(given) in (1, config.speculation.num_drafts):
            values["speculation.confidence_temperatures"] = given
    return config.with_dotted(values)
