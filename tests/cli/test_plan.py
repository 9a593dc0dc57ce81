"""`deepinfer plan`: figures for the released config, bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepinfer.cli.main import main


def tell(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert main(["plan", *argv]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def test_the_released_config(real_config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tell(capsys, "--model", str(real_config_file), "--num-devices", "8")
    for expected in ("8 devices", "141,000,000,000", "45,943,977,408", "890 a token", "1,048,576"):
        assert expected in text


def test_json(real_config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", str(real_config_file), "--device-bytes", "141G", "--num-devices", "8"]
    found: dict[str, Any] = json.loads(tell(capsys, *argv, "--context", "1000", "--json"))
    assert found["device_bytes"] == 141 * 10**9
    assert sum(found["parts"].values()) + found["free_bytes"] == found["device_bytes"]
    assert found["longest_context"] == 1_048_576
    batches = {b["context"]: b["per_device"] for b in found["batches"]}
    assert list(batches) == [1000, 4096, 32768, 131072, 1048576]
    assert list(batches.values()) == sorted(batches.values(), reverse=True)
    assert found["batches"][0]["total"] == 8 * batches[1000]


def test_settings_change_the_plan(
    real_config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", str(real_config_file), "--device", "h200", "--num-devices", "8", "--json"]
    few: dict[str, Any] = json.loads(tell(capsys, *argv))
    many: dict[str, Any] = json.loads(tell(capsys, *argv, "--set", "scheduling.max_num_seqs=512"))
    assert (few["num_slots"], many["num_slots"]) == (65, 513)
    assert many["num_blocks"] < few["num_blocks"]


def test_packaged_model_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    text = tell(capsys, "--model", "demo", "--device", "cpu", "--device-bytes", "4GiB")
    assert "fp32 copies" in text and "decoded entries" in text


@pytest.mark.parametrize(
    ("argv", "code", "told"),
    [
        (["--device", "cpu"], 2, "--device-bytes"),
        (["--device-bytes", "much"], 2, "expected bytes"),
        (["--num-devices", "8", "--expert-parallel", "3"], 2, "parallel.expert"),
        (["--device-bytes", "1M"], 1, "do not fit"),
        (["--set", "cache.nothing=1"], 2, "cache.nothing"),
        (["--num-devices", "0"], 2, ">= 1"),
        (["--num-devices", "2", "--engram-parallel", "4"], 2, "--engram-parallel: found 4"),
        (["--context", "2049"], 2, "the model ends at 2048"),
        (["--set", "speculation.num_drafts=9"], 1, "speculation.num_drafts"),
        (["--set", "replay.mode=mask", "--set", "replay.keep_tokens=3"], 1, "replay.keep_tokens"),
    ],
)
def test_bad_input(
    argv: list[str], code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in tell(capsys, "--model", "demo", *argv, code=code)
