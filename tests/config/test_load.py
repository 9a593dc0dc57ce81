"""The edge: folders, JSON, TOML, the command line and the environment."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from deepinfer.config.engine import settings
from deepinfer.config.load import (
    _ALIASES,
    cache_dir,
    load_engine_config,
    load_model_config,
    log_level,
    resolve_model,
)
from deepinfer.errors import ConfigError


@pytest.mark.parametrize("name", ["demo", "golden"])
def test_packaged_checkpoints(name: str) -> None:
    folder = resolve_model(name)
    assert (folder / "config.json").is_file()
    assert (folder / "model.safetensors.index.json").is_file()


def test_unknown_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        resolve_model(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        resolve_model(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        load_model_config(tmp_path)
    with pytest.raises(ConfigError, match="cannot read"):
        load_model_config(tmp_path / "none" / "config.json")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[1]", "holds a list"),
        (b"null", "holds null"),
        (b'{"a": 1, "a": 2}', "repeated key a"),
        (b"[" * 100000, "not valid JSON"),
        (b"{}", "model_type: missing"),
    ],
)
def test_bad_json(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_model_config(tmp_path)
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_precedence(tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text('[numerics]\nmode = "noq"\n[cache]\nnum_blocks = 5\nmemory_fraction = 1\n')
    config = load_engine_config(
        environ={"DEEPINFER_BATCH_INVARIANT": "0", "DEEPINFER_MAX_BACKTRACKING_TOKENS": "9"},
        toml=toml,
        values={"cache.num_blocks": 6, "cache": {"max_rollback": 8}},
        sets=["cache.num_blocks=7", "sampling.banned_token_ids=1,2"],
    )
    found = config.to_dotted()
    assert found["numerics.mode"] == "noq"
    assert found["numerics.batch_invariant"] is False
    assert found["cache.max_rollback"] == 8
    assert found["cache.num_blocks"] == 7
    assert found["sampling.banned_token_ids"] == (1, 2)


def test_problems_name_their_source(tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text("[cache]\nnum_block = 5\n")
    with pytest.raises(ConfigError) as caught:
        load_engine_config(
            toml=toml,
            sets=["numerics.mode=x"],
            environ={"DEEPINFER_USE_NEXTN_DECODE": "-5"},
        )
    found = str(caught.value)
    assert "DEEPINFER_USE_NEXTN_DECODE" in found
    assert "run.toml" in found
    assert "--set" in found
    assert len(caught.value.problems) == 3


def test_bad_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_engine_config(toml=tmp_path / "none.toml", environ={})
    (tmp_path / "bad.toml").write_text("=")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_engine_config(toml=tmp_path / "bad.toml", environ={})


def test_aliases_name_settings() -> None:
    assert set(_ALIASES.values()) <= set(settings())


def test_alias_spellings() -> None:
    environ = {
        "DEEPINFER_DECODE_TOKEN_BLACKLIST": "0..2,9",
        "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": "0",
        "DEEPINFER_LOGGING_INTERVAL_STEP": "-1",
        "DEEPINFER_ENABLE_MTP_VARLEN": "0",
        "DEEPINFER_ZERO_OVERHEAD_SCHEDULING": "",
    }
    found = load_engine_config(environ=environ).to_dotted()
    assert found["sampling.banned_token_ids"] == (0, 1, 2, 9)
    assert found["replay.keep_tokens"] == "auto"
    assert found["log.interval_steps"] == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("DEEPINFER_USE_NEXTN", "USE_NEXTN_DECODE"),
        ("DEEPINFER_LOGLEVEL", "LOG_LEVEL"),
        ("DEEPINFER_NCCL_NUM_SMS", "no effect in this version"),
        ("DEEPINFER_ZZZ", "no variable of DeepInfer"),
    ],
)
def test_unknown_variables_warn(name: str, words: str) -> None:
    with pytest.warns(UserWarning, match=words):
        load_engine_config(environ={name: "1"})


def test_own_variables() -> None:
    environ = {"DEEPINFER_LOG_LEVEL": "DEBUG", "DEEPINFER_CACHE_DIR": "/somewhere", "HOME": "/h"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_engine_config(environ=environ)
    assert log_level(environ) == "debug"
    assert log_level({}) == "warning"
    assert cache_dir(environ) == Path("/somewhere")
    assert cache_dir({"XDG_CACHE_HOME": "/c"}) == Path("/c/deepinfer")
    assert cache_dir({}).name == "deepinfer"
    with pytest.raises(ConfigError, match="LOG_LEVEL"):
        log_level({"DEEPINFER_LOG_LEVEL": "loud"})
