"""EngineConfig: dotted keys, text, near matches and bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.config.engine import (
    CacheConfig,
    EngineConfig,
    NumericsConfig,
    ParallelConfig,
    SchedulingConfig,
    parse_set,
    settings,
)
from deepinfer.errors import ConfigError


def problems_of(values: dict[str, object]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_dotted(values)
    return caught.value.problems


def test_defaults() -> None:
    values = EngineConfig().to_dotted()
    assert values["numerics.mode"] == "official"
    assert values["cache.tokens_per_block"] == 128
    assert values["scheduling.max_num_seqs"] == 64
    assert values["numerics.batch_invariant"] is True
    assert list(values) == list(settings())


def test_round_trip() -> None:
    config = EngineConfig.from_dotted({"numerics.mode": "noq", "cache.num_blocks": 12})
    assert EngineConfig.from_dotted(config.to_dotted()) == config
    assert config == EngineConfig(
        numerics=NumericsConfig(mode="noq"), cache=CacheConfig(num_blocks=12)
    )


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("scheduling.max_num_seqs", "16", 16),
        ("scheduling.max_model_len", "auto", "auto"),
        ("scheduling.max_model_len", " 4_096 ", 4096),
        ("scheduling.overlap", "False", False),
        ("numerics.batch_invariant", "0", False),
        ("numerics.batch_invariant", "on", True),
        ("cache.memory_fraction", "0.5", 0.5),
        ("cache.memory_fraction", "1", 1.0),
        ("cache.memory_fraction", 1, 1.0),
        ("weights.dequantized_bytes", "0", 0),
        ("numerics.output_projection", "fp8", "fp8"),
        ("replay.mode", "off", "off"),
        ("sampling.banned_token_ids", "", ()),
        ("sampling.banned_token_ids", "5", (5,)),
        ("sampling.banned_token_ids", 5, (5,)),
        ("sampling.banned_token_ids", "0..3, 7", (0, 1, 2, 3, 7)),
        ("sampling.banned_token_ids", "[1,2]", (1, 2)),
        ("sampling.banned_token_ids", [1, 2], (1, 2)),
        ("speculation.confidence_temperatures", "1.5", (1.5,)),
        ("speculation.confidence_temperatures", 2, (2.0,)),
    ],
)
def test_values(key: str, text: object, value: object) -> None:
    found = EngineConfig.from_dotted({key: text}).to_dotted()[key]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("scheduling.max_num_seqs", 0, "an integer >= 1"),
        ("scheduling.max_num_seqs", True, "found true"),
        ("scheduling.max_num_seqs", "many", 'found "many"'),
        ("scheduling.max_num_seqs", 1.0, "found 1.0"),
        ("scheduling.max_num_seqs", None, "found null"),
        ("scheduling.chunk_size", "Auto", '"auto"'),
        ("cache.memory_fraction", 1.5, "<= 1"),
        ("cache.memory_fraction", float("nan"), "cache.memory_fraction"),
        ("numerics.mode", "fast", '"official" or "noq"'),
        ("numerics.batch_invariant", "maybe", "true or false"),
        ("numerics.batch_invariant", 1, "found 1"),
        ("sampling.banned_token_ids", "1,x", "each item an integer"),
        ("sampling.banned_token_ids", [1, -1], "each item an integer >= 0"),
        ("sampling.banned_token_ids", "9..2", "each item"),
        ("sampling.banned_token_ids", [True], "[true]"),
        ("speculation.confidence_temperatures", [1.0, 2.0], "found 2 values"),
    ],
)
def test_refused(key: str, value: object, words: str) -> None:
    (problem,) = problems_of({key: value})
    assert problem.startswith(key)
    assert words in problem


def test_noq_has_no_quantized_projection() -> None:
    values: dict[str, object] = {"numerics.mode": "noq", "numerics.output_projection": "fp8"}
    assert "quantizes nothing" in problems_of(values)[0]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("numerics.mod", "numerics.mode"),
        ("max_num_seqs", "scheduling.max_num_seqs"),
        ("zzz", "the groups are scheduling"),
        ("cache", "unknown setting"),
        ("scheduling.zzz", "; scheduling has overlap, "),
        ("numerics.max_num_seqs", "scheduling.max_num_seqs"),
    ],
)
def test_unknown_keys(key: str, words: str) -> None:
    (problem,) = problems_of({key: 1})
    assert "unknown setting" in problem
    assert words in problem


def test_groups_are_checked_when_built() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.data"):
        ParallelConfig(data=0)
    with pytest.raises(ConfigError) as caught:
        SchedulingConfig(max_num_seqs=-1, chunk_size="big")  # type: ignore[arg-type]
    assert len(caught.value.problems) == 2
    with pytest.raises(ConfigError, match="expected CacheConfig"):
        EngineConfig(cache={"num_blocks": 1})  # type: ignore[arg-type]


def test_all_problems_together() -> None:
    found = problems_of(
        {"numerics.mode": 1, "cache": {"num_blocks": 0, "nothing": 1}, "parallel.expert": 0}
    )
    assert len(found) == 4


def test_every_setting_is_documented() -> None:
    for setting in settings().values():
        assert setting.doc
        assert setting.accepts


@pytest.mark.parametrize("text", ["numerics.mode", "=1", " = "])
def test_bad_set(text: str) -> None:
    with pytest.raises(ConfigError, match="key=value"):
        parse_set(text)


def test_set_keeps_later_equals() -> None:
    assert parse_set("a.b = c=d") == ("a.b", "c=d")


@given(st.dictionaries(st.sampled_from(sorted(settings())), st.text(max_size=6), max_size=4))
def test_text_never_crashes(values: dict[str, str]) -> None:
    try:
        config = EngineConfig.from_dotted(values)
    except ConfigError as error:
        assert error.problems
    else:
        assert EngineConfig.from_dotted(config.to_dotted()) == config


def test_ranks_fit_together() -> None:
    config = EngineConfig.from_dotted({"parallel.expert": 4})
    assert (config.mesh.data, config.mesh.world) == (4, 4)
    assert EngineConfig().mesh.world == 1
    (problem,) = problems_of({"parallel.data": 3, "parallel.expert": 2})
    assert "divisor" in problem
    assert len(problems_of({"parallel.engram_rows": "shards"})) == 1
    EngineConfig.from_dotted({"parallel.engram": 2, "parallel.engram_rows": "shards"})
