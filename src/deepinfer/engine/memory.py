"""Where the memory of one device goes: weights, copies, activations, slots, blocks. Pure.

The engine sizes its caches with this plan and `deepinfer plan` prints it, for devices that need not
be present. Weights and caches are exact; activations are an estimate of what one step needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from deepinfer.cache.layout import CacheLayout
from deepinfer.config.engine import EngineConfig
from deepinfer.config.mesh import Mesh
from deepinfer.config.model import ModelConfig
from deepinfer.engine.sizing import Sizes, max_rollback, resolve_sizes
from deepinfer.errors import CacheError
from deepinfer.weights.copies import copies_pay, copy_bytes, is_packed
from deepinfer.weights.layout import FP4, FP8, TensorSpec, expected_tensors, rank_bytes

__all__ = [
    "MemoryPlan",
    "activation_bytes",
    "build_layout",
    "plan_caches",
    "plan_memory",
    "weight_bytes",
]

_SCORES_BYTES = 1 << 30
"""Most bytes of index scores that a step holds at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The bytes of one device, part by part.

    parts         name -> bytes, in the order of allocation
    total_bytes   of the device, None where only what is free was known
    usable_bytes  what the caches may take together, slots and blocks
    slot_bytes    of one sequence's slot, decoded copies of a CPU included; block_bytes likewise
    max_blocks    most blocks for sequences where settings limit them, else None
    beyond_bytes  number of sequences -> what their steps take beyond those that were reckoned with
    """

    parts: Mapping[str, int]
    total_bytes: int | None
    usable_bytes: int
    layout: CacheLayout
    slot_bytes: int
    block_bytes: int
    sizes: Sizes
    model_max_len: int
    max_blocks: int | None
    beyond_bytes: Callable[[int], int]

    @property
    def num_tokens(self) -> int:
        """Positions that all blocks hold together."""
        return (self.sizes.num_blocks - 1) * self.layout.tokens_per_block

    @property
    def longest_context(self) -> int:
        """Most tokens of a sequence that has the caches to itself."""
        room = max(self.usable_bytes - 2 * self.slot_bytes - self.block_bytes, 0)
        blocks = room // self.block_bytes
        if self.max_blocks is not None:
            blocks = min(blocks, self.max_blocks)
        return min(self.model_max_len, blocks * self.layout.tokens_per_block)

    def batch(self, context: int) -> int:
        """Return how many sequences of `context` tokens fit, with a slot for each."""
        blocks = -(-context // self.layout.tokens_per_block)
        low, high = 0, max(self.usable_bytes, 0) // self.slot_bytes
        if self.max_blocks is not None:
            high = min(high, self.max_blocks // blocks)
        while low < high:
            num = (low + high + 1) // 2
            caches = (num + 1) * self.slot_bytes + (num * blocks + 1) * self.block_bytes
            if caches + self.beyond_bytes(num) <= self.usable_bytes:
                low = num
            else:
                high = num - 1
        return low


def build_layout(config: EngineConfig, model: ModelConfig) -> CacheLayout:
    """Lay out the caches of a model under some settings."""
    return CacheLayout.build(
        model,
        config.numerics.mode,
        tokens_per_block=config.cache.tokens_per_block,
        max_rollback=max_rollback(config),
    )


def weight_bytes(
    config: EngineConfig, model: ModelConfig, mesh: Mesh, rank: int, on_cpu: bool
) -> dict[str, int]:
    """Return the bytes of what one rank loads: stored weights by part, and a CPU's fp32 copies.

    Draft blocks count when speculation is on; the vision tower is not loaded.
    """
    specs = [
        spec
        for spec in expected_tensors(model).values()
        if spec.part != "vision" and (spec.part != "draft" or config.speculation.num_drafts)
    ]
    held = rank_bytes(specs, mesh, rank)
    parts = {
        "weights: backbone": held["backbone"],
        "weights: Engram tables": held["engram"],
        "weights: draft blocks": held["draft"],
    }
    copies = _copied_bytes(specs) if on_cpu else 0
    parts["weights: fp32 copies"] = copies if copies <= config.weights.dequantized_bytes else 0
    return parts


def _card_bytes(
    config: EngineConfig, model: ModelConfig, mesh: Mesh, rank: int, total_bytes: int
) -> dict[str, int]:
    """Return what a Hopper card holds of weights beside their stored bytes.

    Packed forms are as large as what is stored, which they replace unless it is kept; copies of FP8
    matrices in bf16 are made as `numerics.dense_copies` says. Other cards hold none of it.
    """
    numerics = config.numerics
    if numerics.mode != "official":
        return {}
    matrices = [
        spec
        for spec in expected_tensors(model).values()
        if spec.dtype in (FP8, FP4)
        and (spec.part == "backbone" or (spec.part == "draft" and config.speculation.num_drafts))
        and is_packed(spec, spec.shape[1] * (2 if spec.dtype == FP4 else 1))
    ]
    found: dict[str, int] = {}
    if config.keeps_stored:
        found["weights: packed copies"] = sum(rank_bytes(matrices, mesh, rank).values())
    drafts = config.speculation.num_drafts > 0
    wanted = numerics.dense_copies == "on" or (
        numerics.dense_copies == "auto"
        and not numerics.batch_invariant
        and copies_pay(model, drafts, total_bytes)
    )
    found["weights: bf16 copies"] = copy_bytes(model, drafts) if wanted else 0
    return found


def _copied_bytes(specs: Iterable[TensorSpec]) -> int:
    """Return the bytes of fp32 copies of every matrix that is multiplied with."""
    return sum(
        4 * spec.num_parameters
        for spec in specs
        if len(spec.shape) == 2 and spec.scale_of is None and not spec.name.endswith("embed.weight")
    )


def activation_bytes(
    config: EngineConfig, model: ModelConfig, sizes: Sizes, num_seqs: int | None = None
) -> int:
    """Estimate the temporaries of the largest step: its rows, its logits and its index scores.

    Counts what is alive together at the worst place of a block, in the types that kernels exchange:
    old and new streams, and either attention's queries and outputs or the experts' sorted rows.

    num_seqs  sequences at a time, `scheduling.max_num_seqs` by default
    """
    num_seqs = num_seqs or config.scheduling.max_num_seqs
    value = 2 if config.numerics.mode == "official" else 4
    drafted = 1 + config.speculation.num_drafts
    rows = max(sizes.max_num_batched_tokens, num_seqs * drafted)
    streams = 2 * model.hc_mult * model.hidden_size * value
    sublayer = model.hidden_size * (2 * value + 1)
    attention = 2 * model.num_attention_heads * model.head_dim * value
    attention += 2 * (model.o_groups * model.o_lora_rank + model.q_lora_rank) * value
    chosen = model.num_experts_per_tok + model.n_shared_experts
    experts = chosen * (model.hidden_size * (value + 1) + 3 * model.moe_intermediate_size * value)
    total = rows * (streams + sublayer + max(attention, experts))
    total += 2 * 4 * num_seqs * drafted * model.vocab_size
    entries = sizes.max_model_len if 1 in model.compress_ratios else sizes.max_model_len // 2
    return total + min(_SCORES_BYTES, rows * entries * value)


def plan_caches(
    config: EngineConfig,
    model: ModelConfig,
    *,
    available_bytes: int,
    on_cpu: bool,
    weights: Mapping[str, int] | None = None,
    total_bytes: int | None = None,
) -> MemoryPlan:
    """Size the caches for a device whose weights are in place.

    available_bytes  what is free beside the weights
    weights          bytes by part, to be told in the plan
    Raises CacheError or ConfigError, as `resolve_sizes` does.
    """
    layout = build_layout(config, model)
    longest = model.max_position_embeddings
    while True:
        try:
            sizes, reserved = _fit(config, model, layout, longest, available_bytes, on_cpu)
            break
        except CacheError:  # index scores of shorter sequences take less
            longest //= 2
            if config.scheduling.max_model_len != "auto" or longest < layout.tokens_per_block:
                raise
    drafts = _draft_logits_bytes(config, model, sizes.num_slots)
    slots, blocks = _decoded(config, layout, sizes) if on_cpu else (0, 0)
    parts = dict(weights or {})
    parts["activations (estimate)"] = activation_bytes(config, model, sizes)
    parts["draft logits"] = drafts
    parts["sequence slots"] = (sizes.num_slots - sizes.num_checkpoints) * layout.slot_bytes
    parts["prefix checkpoints"] = sizes.num_checkpoints * layout.slot_bytes
    parts["cache blocks"] = sizes.num_blocks * layout.block_bytes
    parts["decoded entries"] = slots * sizes.num_slots + blocks * sizes.num_blocks
    usable = int((available_bytes - reserved) * config.cache.memory_fraction)
    return MemoryPlan(
        parts={name: num for name, num in parts.items() if num},
        total_bytes=total_bytes,
        usable_bytes=usable - sizes.num_checkpoints * layout.slot_bytes,
        layout=layout,
        slot_bytes=layout.slot_bytes + slots,
        block_bytes=layout.block_bytes + blocks,
        sizes=sizes,
        model_max_len=longest,
        max_blocks=None if _blocks_are_free(config) else sizes.num_blocks - 1,
        beyond_bytes=lambda num_seqs: (
            0 if on_cpu else _beyond_bytes(config, model, sizes, num_seqs)
        ),
    )


def _blocks_are_free(config: EngineConfig) -> bool:
    """Whether no setting says how many blocks there are."""
    return config.cache.num_blocks == "auto" and config.cache.memory_bytes == "auto"


def _fit(
    config: EngineConfig,
    model: ModelConfig,
    layout: CacheLayout,
    longest: int,
    available_bytes: int,
    on_cpu: bool,
) -> tuple[Sizes, int]:
    """Return sizes for sequences of at most `longest` tokens, and the bytes that a step needs."""
    reserved = 0
    while True:  # the estimate depends on lengths, and these on what it leaves
        sizes = resolve_sizes(
            config,
            model_max_len=longest,
            block_bytes=layout.block_bytes,
            slot_bytes=layout.slot_bytes,
            available_bytes=available_bytes,
            reserved_bytes=reserved,
            on_cpu=on_cpu,
        )
        if on_cpu or reserved:
            return sizes, reserved
        reserved = activation_bytes(config, model, sizes)
        reserved += _draft_logits_bytes(config, model, sizes.num_slots)


def plan_memory(
    config: EngineConfig,
    model: ModelConfig,
    *,
    total_bytes: int,
    mesh: Mesh | None = None,
    rank: int = 0,
    on_cpu: bool = False,
) -> MemoryPlan:
    """Plan one rank's device of `total_bytes`, weights and all.

    Raises CacheError when weights or caches do not fit, ConfigError when sizes contradict.
    """
    mesh = mesh or Mesh()
    weights = weight_bytes(config, model, mesh, rank, on_cpu)
    if not on_cpu:
        weights |= _card_bytes(config, model, mesh, rank, total_bytes)
    left = total_bytes - sum(weights.values())
    if left <= 0:
        raise CacheError(
            "the weights do not fit into the device",
            [
                f"device: {total_bytes} bytes",
                *(f"{name}: {num} bytes" for name, num in weights.items() if num),
                "use more devices (experts and Engram tables are shared out) or a larger one",
            ],
        )
    return plan_caches(
        config,
        model,
        available_bytes=left,
        on_cpu=on_cpu,
        weights=weights,
        total_bytes=total_bytes,
    )


def _beyond_bytes(config: EngineConfig, model: ModelConfig, sizes: Sizes, num_seqs: int) -> int:
    """Return what the steps of `num_seqs` take beyond those of `scheduling.max_num_seqs`."""
    more = num_seqs - config.scheduling.max_num_seqs
    if more <= 0:
        return 0
    steps = activation_bytes(config, model, sizes, num_seqs)
    steps -= activation_bytes(config, model, sizes)
    return steps + _draft_logits_bytes(config, model, more)


def _draft_logits_bytes(config: EngineConfig, model: ModelConfig, num_slots: int) -> int:
    """Return the bytes of the drafts' logits, which rejection sampling keeps for every slot."""
    if config.speculation.method != "rejection":
        return 0
    return 4 * num_slots * config.speculation.num_drafts * model.vocab_size


def _decoded(config: EngineConfig, layout: CacheLayout, sizes: Sizes) -> tuple[int, int]:
    """Return the bytes of decoded fp32 copies beside one slot and one block."""
    if layout.mode == "noq":
        return 0, 0
    budget = config.cache.dequantized_bytes
    window = sum(4 * layout.window_format.dim * ring.length for ring in layout.windows)
    copies = min(2, budget // (window * sizes.num_slots))  # rings are kept twice in a row
    slots = copies * window
    budget -= slots * sizes.num_slots
    blocks = 0
    for kind in ("index", "main"):
        each = sum(4 * p.format.dim * p.num_entries for p in layout.parts if p.kind == kind)
        if each * sizes.num_blocks <= budget:
            blocks += each
            budget -= each * sizes.num_blocks
    return slots, blocks
