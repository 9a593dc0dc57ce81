"""Cache sizes: what fits, what is refused and with which settings named."""

from __future__ import annotations

import pytest

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.sizing import CPU_POOL_BYTES, Sizes, max_rollback, resolve_sizes
from deepinfer.errors import CacheError, ConfigError

MIB = 2**20
BLOCK = 128 * 1024


def resolve(available: int = 4096 * MIB, on_cpu: bool = True, **settings: object) -> Sizes:
    """Resolve sizes for a model of 1M tokens with blocks of 128 KiB and slots of 1 MiB."""
    dotted = {key.replace("__", "."): value for key, value in settings.items()}
    return resolve_sizes(
        EngineConfig.from_dotted(dotted),
        model_max_len=1048576,
        block_bytes=BLOCK,
        slot_bytes=MIB,
        available_bytes=available,
        on_cpu=on_cpu,
    )


def test_a_cpu_gets_a_modest_pool() -> None:
    sizes = resolve()
    assert sizes.num_blocks - 1 == CPU_POOL_BYTES // BLOCK
    assert sizes.num_slots == 65
    assert sizes.max_model_len == (sizes.num_blocks - 1) * 128
    assert (sizes.max_num_batched_tokens, sizes.chunk_tokens) == (2048, 2048)


def test_a_cpu_pool_grows_for_one_long_sequence() -> None:
    sizes = resolve(scheduling__max_model_len=500_000)
    assert sizes.num_blocks - 1 == -(-500_000 // 128) and sizes.max_model_len == 500_000


def test_short_sequences_need_a_small_pool() -> None:
    sizes = resolve(scheduling__max_model_len=200, scheduling__max_num_seqs=4)
    assert sizes.num_blocks - 1 == 8


def test_an_accelerator_uses_its_share() -> None:
    sizes = resolve(on_cpu=False, cache__memory_fraction=0.5)
    assert sizes.num_blocks == (2048 - 65) * MIB // BLOCK
    assert sizes.chunk_tokens == 8192


@pytest.mark.parametrize(
    ("settings", "blocks"), [({"cache__num_blocks": 7}, 7), ({"cache__memory_bytes": MIB}, 7)]
)
def test_given_pools(settings: dict[str, object], blocks: int) -> None:
    sizes = resolve(**settings)
    assert sizes.num_blocks == blocks + 1 and sizes.max_model_len == blocks * 128


@pytest.mark.parametrize(
    ("settings", "error", "named"),
    [
        ({"cache__memory_bytes": 100}, CacheError, "cache.memory_bytes"),
        ({"cache__num_blocks": 10**6}, CacheError, "cache.num_blocks"),
        ({"scheduling__max_num_seqs": 10**5}, CacheError, "scheduling.max_num_seqs"),
        ({"scheduling__max_model_len": 2 * 10**6}, ConfigError, "1048576"),
        (
            {"scheduling__max_model_len": 1000, "cache__num_blocks": 7},
            CacheError,
            "cache.num_blocks",
        ),
        (
            {"scheduling__chunk_size": 300, "scheduling__max_num_batched_tokens": 200},
            ConfigError,
            "scheduling.chunk_size",
        ),
    ],
)
def test_refused(settings: dict[str, object], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        resolve(**settings)


@pytest.mark.parametrize(
    ("settings", "budget", "chunk"),
    [
        ({"scheduling__max_num_batched_tokens": 300}, 300, 256),
        ({"scheduling__max_num_batched_tokens": 100}, 100, 100),
        ({"scheduling__chunk_size": 7}, 2048, 7),
        ({"scheduling__chunk_size": 5000}, 5000, 5000),
    ],
)
def test_budgets(settings: dict[str, object], budget: int, chunk: int) -> None:
    sizes = resolve(**settings)
    assert (sizes.max_num_batched_tokens, sizes.chunk_tokens) == (budget, chunk)


def test_rollback() -> None:
    assert max_rollback(EngineConfig()) == 0
    assert max_rollback(EngineConfig.from_dotted({"cache.max_rollback": 6})) == 6
