"""The memory plan: parts add up, nothing overlaps, and the engine's own sizes come out of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.config import ModelConfig
from deepinfer.config.engine import EngineConfig
from deepinfer.config.load import load_model_config, resolve_model
from deepinfer.config.mesh import Mesh
from deepinfer.engine.memory import (
    MemoryPlan,
    activation_bytes,
    build_layout,
    plan_caches,
    plan_memory,
)
from deepinfer.engine.sizing import resolve_sizes
from deepinfer.errors import CacheError, DeepInferError
from deepinfer.weights.copies import copy_bytes

GIB = 2**30
H200 = 141 * 10**9


@pytest.fixture(scope="module")
def real(real_config_file: Path) -> ModelConfig:
    return load_model_config(real_config_file)


@pytest.fixture(scope="module")
def demo() -> ModelConfig:
    return load_model_config(resolve_model("demo"))


def config(**values: object) -> EngineConfig:
    return EngineConfig.from_dotted({key.replace("__", "."): v for key, v in values.items()})


def test_the_released_model_on_eight_devices(real: ModelConfig) -> None:
    plan = plan_memory(config(), real, total_bytes=H200, mesh=Mesh(data=8, expert=8, engram=8))
    assert plan.parts["weights: backbone"] == 45_943_977_408
    assert plan.parts["weights: Engram tables"] == 25_344_754_248
    assert "weights: draft blocks" not in plan.parts and "decoded entries" not in plan.parts
    assert sum(plan.parts.values()) <= H200
    assert plan.block_bytes == 128 * 890
    assert plan.longest_context == 1_048_576
    assert plan.batch(1_048_576) > 40 and plan.batch(4096) > 5000


def test_drafts_and_checkpoints_take_their_share(real: ModelConfig) -> None:
    mesh = Mesh(data=8, expert=8, engram=8)
    plain = plan_memory(config(), real, total_bytes=H200, mesh=mesh)
    held = config(cache__prefix_checkpoints=100)  # nothing without cache.prefix
    assert plan_memory(held, real, total_bytes=H200, mesh=mesh).parts == plain.parts


def test_a_card_holds_packed_weights_once(real: ModelConfig) -> None:
    """Beside the stored ones only where these are kept; copies of FP8 matrices where they pay."""
    mesh = Mesh(data=8, expert=8, engram=8)

    def parts(**values: object) -> dict[str, int]:
        return dict(plan_memory(config(**values), real, total_bytes=H200, mesh=mesh).parts)

    plain = parts()
    assert "weights: packed copies" not in plain and "weights: bf16 copies" not in plain
    kept = parts(weights__keep_stored=True)["weights: packed copies"]
    assert 0.85 * plain["weights: backbone"] < kept < plain["weights: backbone"]
    moves = {"parallel__data": 8, "parallel__expert": 8, "parallel__engram": 8}
    assert "weights: packed copies" not in parts(**moves), "experts move packed"
    moves["numerics__expert_products"] = "w4a8"
    assert parts(**moves)["weights: packed copies"] == kept
    assert "weights: packed copies" not in parts(**moves, parallel__balance_interval=0)
    copies = parts(numerics__batch_invariant=False)["weights: bf16 copies"]
    assert 0.1 * H200 > copies == copy_bytes(real, drafts=False) > 10e9
    drafting = parts(numerics__batch_invariant=False, speculation__num_drafts=5)
    assert drafting["weights: bf16 copies"] == copy_bytes(real, drafts=True) > copies
    off = parts(numerics__batch_invariant=False, numerics__dense_copies="off")
    assert "weights: bf16 copies" not in off


def test_rejection_keeps_logits_of_drafts(real: ModelConfig) -> None:
    mesh = Mesh(data=8, expert=8, engram=8)
    found = []
    for method in ("coupled", "rejection"):
        chosen = config(speculation__num_drafts=5, speculation__method=method)
        found.append(plan_memory(chosen, real, total_bytes=H200, mesh=mesh))
    assert "weights: draft blocks" in found[0].parts and "draft logits" not in found[0].parts
    assert found[1].parts["draft logits"] == 65 * 5 * real.vocab_size * 4
    assert found[1].sizes.num_blocks < found[0].sizes.num_blocks


def test_one_device_is_too_small(real: ModelConfig) -> None:
    with pytest.raises(CacheError, match="the weights do not fit") as caught:
        plan_memory(config(), real, total_bytes=H200)
    assert "backbone" in str(caught.value) and "more devices" in str(caught.value)


def test_the_engine_takes_its_sizes_from_the_plan(demo: ModelConfig) -> None:
    settings_ = config(scheduling__max_num_seqs=5)
    layout = build_layout(settings_, demo)
    sizes = resolve_sizes(
        settings_,
        model_max_len=demo.max_position_embeddings,
        block_bytes=layout.block_bytes,
        slot_bytes=layout.slot_bytes,
        available_bytes=GIB,
        on_cpu=True,
    )
    plan = plan_caches(settings_, demo, available_bytes=GIB, on_cpu=True)
    assert plan.sizes == sizes and plan.layout == layout
    assert plan.parts["cache blocks"] == sizes.num_blocks * layout.block_bytes


@pytest.mark.parametrize("budget", [0, 2**22, 2**23, 15 * 2**20, 2**27, 2**30])
@pytest.mark.parametrize("mode", ["official", "noq"])
def test_the_caches_take_what_the_plan_says(demo: ModelConfig, budget: int, mode: str) -> None:
    """Byte for byte, pools and decoded copies, whatever copies the budget allows."""
    from deepinfer.cache.tensors import Caches

    settings_ = config(
        scheduling__max_num_seqs=3,
        cache__num_blocks=9,
        cache__dequantized_bytes=budget,
        cache__prefix=True,
        cache__prefix_checkpoints=2,
        numerics__mode=mode,
    )
    plan = plan_caches(settings_, demo, available_bytes=GIB, on_cpu=True)
    sizes = plan.sizes
    assert (sizes.num_slots, sizes.num_checkpoints) == (6, 2)
    caches = Caches.allocate(plan.layout, sizes.num_blocks, sizes.num_slots, "cpu", budget)
    assert caches.blocks.nbytes == plan.parts["cache blocks"]
    told = plan.parts["sequence slots"] + plan.parts["prefix checkpoints"]
    assert caches.slots.nbytes == told
    decoded = 0
    for cache in (*caches.windows, *caches.main.values(), *caches.index.values()):
        copies = cache.dense if cache.twice is None else cache.twice
        decoded += 0 if copies is None else copies.nbytes
    assert plan.parts.get("decoded entries", 0) == decoded


def fits_by_hand(plan: MemoryPlan, batch: int, context: int) -> bool:
    blocks = batch * -(-context // plan.layout.tokens_per_block) + 1
    caches = (batch + 1) * plan.slot_bytes + blocks * plan.block_bytes
    return caches + plan.beyond_bytes(batch) <= plan.usable_bytes


REAL = load_model_config(Path(__file__).parents[1] / "data" / "real" / "config.json")


@settings(max_examples=60)
@given(
    available=st.integers(1, 300),
    context=st.integers(1, 200_000),
    seqs=st.integers(1, 500),
    drafts=st.sampled_from([0, 5]),
    method=st.sampled_from(["coupled", "rejection"]),
)
def test_what_fits_really_fits(
    available: int, context: int, seqs: int, drafts: int, method: str
) -> None:
    """The batch told is the largest one, and the parts never exceed what there is."""
    chosen = config(
        scheduling__max_num_seqs=seqs, speculation__num_drafts=drafts, speculation__method=method
    )
    try:
        plan = plan_caches(chosen, REAL, available_bytes=available * 10**9, on_cpu=False)
    except DeepInferError:
        assert available < 20
        return
    assert sum(plan.parts.values()) <= available * 10**9
    batch = plan.batch(context)
    assert fits_by_hand(plan, batch, context) or batch == 0
    assert not fits_by_hand(plan, batch + 1, context)
    if plan.longest_context:
        assert plan.batch(plan.longest_context) >= 1


def test_a_larger_batch_has_larger_steps(real: ModelConfig) -> None:
    """What is told to fit does fit when it is asked for, logits and rows of drafts included."""
    mesh = Mesh(data=8, expert=8, engram=8)
    asked = {"speculation__num_drafts": 5, "speculation__method": "rejection"}
    plan = plan_memory(config(**asked), real, total_bytes=H200, mesh=mesh)
    for context in (4096, 131072):
        batch = plan.batch(context)
        more = config(**asked, scheduling__max_num_seqs=batch, scheduling__max_model_len=context)
        grown = plan_memory(more, real, total_bytes=H200, mesh=mesh)
        assert grown.sizes.num_blocks - 1 >= batch * context // 128
        assert plan.beyond_bytes(batch) > 0 or batch <= 64


def test_set_blocks_limit_what_fits(demo: ModelConfig) -> None:
    for limit in ({"cache__num_blocks": 4}, {"cache__memory_bytes": 5 * 17920}):
        plan = plan_memory(config(**limit), demo, total_bytes=GIB)
        assert plan.longest_context == 512
        assert (plan.batch(128), plan.batch(257), plan.batch(513)) == (4, 1, 0)


def test_small_devices_get_shorter_sequences() -> None:
    """Index scores of a million tokens take more than the device has; those of fewer do not."""
    golden = load_model_config(resolve_model("golden"))
    plan = plan_memory(config(), golden, total_bytes=10**9)
    assert 4096 <= plan.sizes.max_model_len < golden.max_position_embeddings
    assert sum(plan.parts.values()) <= 10**9
    with pytest.raises(CacheError, match="do not fit") as caught:
        plan_memory(config(), golden, total_bytes=10**8)
    assert "scheduling.max_num_batched_tokens 8192" in str(caught.value)
    assert "-" not in str(caught.value).replace("\n  - ", "")  # nothing negative
    few = config(scheduling__max_num_batched_tokens=64, scheduling__max_num_seqs=4)
    assert plan_memory(few, golden, total_bytes=10**8).sizes.max_model_len >= 128


def test_activations_grow_with_the_step(real: ModelConfig) -> None:
    mesh = Mesh(data=8, expert=8, engram=8)
    found = []
    for tokens in (4096, 16384, 65536):
        chosen = config(scheduling__max_num_batched_tokens=tokens)
        plan = plan_memory(chosen, real, total_bytes=H200, mesh=mesh)
        found.append(activation_bytes(chosen, real, plan.sizes))
    assert found == sorted(found) and found[0] < found[-1]


def test_planning_loads_no_torch() -> None:
    program = (
        "import sys, deepinfer.engine.memory, deepinfer.cli.plan; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
