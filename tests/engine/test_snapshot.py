"""State as a value and a file: nothing is lost, nothing damaged or foreign is taken."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from deepinfer.config.engine import EngineConfig
from deepinfer.config.load import load_model_config, resolve_model
from deepinfer.engine.request import SamplingParams
from deepinfer.engine.snapshot import State, contradictions, fingerprint, mismatches
from deepinfer.errors import RequestError, StateError
from deepinfer.grammar.spec import Structured


def state(**values: object) -> State:
    known: dict[str, object] = {
        "prompt_token_ids": (5, 6, 7),
        "token_ids": (8, 9),
        "params": SamplingParams(
            temperature=0.7,
            top_p=0.9,
            stop=["\n", "end"],
            stop_token_ids=[3],
            logit_bias={4: -1.5, 70: 2.0},
            top_logprobs=2,
            forced_token_ids=[1, 2],
        ),
        "seed": 2**64 - 1,
        "num_computed": 4,
        "logprobs": (-0.1, -1e-7),
        "top_logprobs": (((8, -0.1), (2, -3.25)), ((9, -1e-7), (1, -20.5))),
        "parts": {
            "window.0": np.arange(40, dtype=np.uint8).reshape(4, 10),
            "tail.3": np.array([[[0.5, np.nan]]], dtype=np.float32),
            "tail.4": np.empty((0, 2, 8), dtype=np.float32),
            "engram": np.array([1, -2, 3], dtype=np.int32),
        },
        "fingerprint": {"weights": "ab", "config": "cd"},
    }
    return State(**(known | values))  # type: ignore[arg-type]


def test_round_trip(tmp_path: Path) -> None:
    file = tmp_path / "request.state"
    before = state()
    before.save(file)
    after = State.load(file)
    for name in State.__slots__:
        if name != "parts":
            assert getattr(after, name) == getattr(before, name), name
    assert after.parts.keys() == before.parts.keys()
    for name, part in before.parts.items():
        assert after.parts[name].dtype == part.dtype and after.parts[name].shape == part.shape
        assert after.parts[name].tobytes() == part.tobytes()
    assert after.num_tokens == 5 and after.nbytes == before.nbytes
    assert [f.name for f in tmp_path.iterdir()] == ["request.state"]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(structured=Structured(json={"type": "object"}, trigger=[4, 5], bound=4)),
        SamplingParams(structured=Structured(choice=["a", "b"])),
        SamplingParams(timeout_s=3.5, logprobs=True, logprobs_mode="raw", ignore_eos=True),
        SamplingParams(prompt_logprobs=True, min_tokens=3, top_k=7, n=2),
    ],
)
def test_every_parameter(tmp_path: Path, params: SamplingParams) -> None:
    file = tmp_path / "a"
    state(params=params, logprobs=None, top_logprobs=None, prompt_logprobs=(-1.0,)).save(file)
    after = State.load(file)
    assert after.params == params and after.prompt_logprobs == (-1.0,) and after.logprobs is None


def test_code_is_not_data(tmp_path: Path) -> None:
    params = SamplingParams(logits_processors=[lambda: None])
    with pytest.raises(RequestError, match="logits_processors"):
        state(params=params).save(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", [3, 200, -1])
def test_damage_is_found(tmp_path: Path, place: int) -> None:
    file = tmp_path / "a"
    state().save(file)
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(StateError, match="a "):
        State.load(file)


def test_what_cannot_be_written(tmp_path: Path) -> None:
    """One error of ours, the old file as it was, and nothing half done beside it."""
    with pytest.raises(StateError, match="No such file or directory"):
        state().save(tmp_path / "absent" / "a")
    with pytest.raises(StateError, match="a folder has this name"):
        state().save(tmp_path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(StateError, match="no plain file"):
            state().save(tmp_path / "pipe")
        (tmp_path / "pipe").unlink()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk(tmp_path: Path) -> None:
    """The old file stays, and nothing else."""
    resource = pytest.importorskip("resource")
    file = tmp_path / "a"
    state().save(file)
    before = file.read_bytes()
    big = state(parts={"window.0": np.zeros((100, 1000), dtype=np.uint8)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))  # Python ignores SIGXFSZ
    try:
        with pytest.raises(StateError, match="100000 bytes"):
            big.save(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "there")
    state().save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and State.load(tmp_path / "there").seed == 2**64 - 1


def test_files_that_are_no_states(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="cannot be read"):
        State.load(tmp_path / "absent")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(StateError, match="cannot be read"):
        State.load(tmp_path / "text")
    save_file({"x": np.zeros(3)}, tmp_path / "other")
    with pytest.raises(StateError, match="holds no state"):
        State.load(tmp_path / "other")
    state().save(tmp_path / "cut")
    data = (tmp_path / "cut").read_bytes()
    (tmp_path / "cut").write_bytes(data[: len(data) // 2])
    with pytest.raises(StateError, match="cannot be read"):
        State.load(tmp_path / "cut")


def test_what_differs_is_told() -> None:
    model = load_model_config(resolve_model("demo"))
    config = EngineConfig()
    given: dict[str, Any] = {
        "weights": "aa", "tokenizer": b"{}", "numerics": "bf16", "keep_tokens": None
    }  # fmt: skip
    mine = fingerprint(config, model, **given)
    assert mismatches(mine, fingerprint(config, model, **given)) == []
    changed: dict[str, Any] = {
        "weights": "bb", "tokenizer": b"", "numerics": "fp8", "keep_tokens": 70
    }  # fmt: skip
    banning = EngineConfig.from_dotted({"sampling.banned_token_ids": (4, 3)})
    told = mismatches(mine, fingerprint(banning, model, **changed))
    assert [t.split(":")[0] for t in told] == [
        "sampling.banned_token_ids",
        "the arithmetic (numerics.*, device)",
        "bounded replay (replay.*)",
        "tokenizer.json",
        "the weights",
    ]
    assert "'aa'" in told[4] and "'bb'" in told[4] and "'none'" in told[3] and "[3, 4]" in told[0]
    golden = load_model_config(resolve_model("golden"))
    other = fingerprint(config, golden, **given)
    assert [t.split(":")[0] for t in mismatches(mine, other)] == ["the model config"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, []),
        ({"num_computed": 0}, []),
        ({"token_ids": (8, -1)}, ["token_ids hold -1"]),
        ({"token_ids": (8, 100)}, ["token_ids hold 100, outside the vocabulary 0..99"]),
        ({"num_computed": 5}, ["num_computed is 5"]),
        ({"num_computed": -1}, ["num_computed is -1"]),
        ({"logprobs": (-0.1,)}, ["logprobs has 1 entries for 2"]),
        ({"params": SamplingParams(max_tokens=2)}, ["max_tokens 2 ended the request"]),
        ({"token_ids": (), "num_computed": 9}, ["num_computed", "logprobs", "top_logprobs"]),
    ],
)
def test_contradictions(values: dict[str, object], expected: list[str]) -> None:
    told = contradictions(state(**values), 100)
    assert len(told) == len(expected)
    assert all(part in line for part, line in zip(expected, told, strict=True))
