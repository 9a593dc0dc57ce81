"""`deepinfer inspect` on the released config, on folders, and its memory."""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepinfer.cli import inspect
from deepinfer.config.load import load_model_config
from deepinfer.errors import CheckpointError, ConfigError, DeepInferError
from deepinfer.weights.layout import expected_tensors
from deepinfer.weights.writer import plan_shards


def call(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    inspect.add_parser(parser.add_subparsers())
    args = parser.parse_args(["inspect", *argv])
    result: int = args.func(args)
    return result


def test_released_config(real_config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(str(real_config_file)) == 0
    text = capsys.readouterr().out
    for expected in (
        "96,085 tensors, 510,286,023,000 bytes (475.24 GiB) from the layout",
        "552B backbone, 197B Engram tables, 14B drafts, 485M vision",
        "890 bytes",
        "3,042,336 bytes (40 layers and 3 draft blocks x 134 slots x 528 bytes)",
        "86,016 bytes",
    ):
        assert expected in text


def test_json_holds_the_same(real_config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(str(real_config_file), "--json", "--rank", "5", "--expert-parallel", "8")
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["total"]["tensors"] == 96_085
    assert found["total"]["bytes"] == 510_286_023_000
    assert found["kv_bytes_per_token"] == 890
    assert found["parts"]["backbone"]["parameters"] == 551_880_835_184
    assert sum(f["bytes"] for f in found["formats"].values()) == found["total"]["bytes"]
    share = found["rank"]
    assert (share["rank"], share["world"]) == (5, 8)
    assert share["bytes"]["engram"] == found["parts"]["engram"]["bytes"]
    assert share["bytes"]["backbone"] < found["parts"]["backbone"]["bytes"] / 6


def test_packaged_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    call("golden")
    text = capsys.readouterr().out
    assert "834 tensors, 3,912,568 bytes (3.73 MiB) in 2 shards; complete" in text
    assert "712 bytes" in text and "vision, aligner" not in text


def test_shares_of_all_ranks_make_up_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    shares = []
    for rank in range(4):
        call("golden", "--json", "--rank", str(rank), "--expert-parallel", "4", "--engram-parallel",
             "4")  # fmt: skip
        shares.append(json.loads(capsys.readouterr().out))
    assert sum(s["rank"]["bytes"]["engram"] for s in shares) == 48_312
    assert all(s["rank"]["world"] == 4 for s in shares)


@pytest.mark.parametrize(
    ("argv", "error", "text"),
    [
        (["nowhere"], ConfigError, "does not exist"),
        (["golden", "--expert-parallel", "3"], ConfigError, "a divisor of the 8 experts"),
        (["golden", "--rank", "1"], ConfigError, "rank 1 does not exist"),
        (["golden", "--rank", "-1"], ConfigError, "rank -1 does not exist"),
    ],
)
def test_mistakes(argv: list[str], error: type[DeepInferError], text: str) -> None:
    with pytest.raises(error, match=text):
        call(*argv)


def test_damage_is_an_error(tmp_path: Path, real_config_file: Path) -> None:
    (tmp_path / "config.json").write_bytes(real_config_file.read_bytes())
    with pytest.raises(CheckpointError, match="holds no weights"):
        call(str(tmp_path))


def test_memory_stays_small_at_the_released_size(tmp_path: Path, real_config_file: Path) -> None:
    """Shards of the released size with holes for data: only headers cost memory."""
    if not Path("/proc/self/status").exists():
        pytest.skip("this system does not tell a process's peak")
    specs = expected_tensors(load_model_config(real_config_file))
    (tmp_path / "config.json").write_bytes(real_config_file.read_bytes())
    weight_map = {}
    for i, shard in enumerate(plan_shards(specs.values(), 12 << 30)):
        name, end, header = f"model-{i:05}.safetensors", 0, {}
        for spec in shard:
            ends = [end, end := end + spec.nbytes]
            header[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": ends}
            weight_map[spec.name] = name
        text = json.dumps(header).encode()
        with open(tmp_path / name, "wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            try:
                stream.truncate(8 + len(text) + end)
            except OSError:
                pytest.skip("the file system has no room for a sparse file of this size")
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    code = (
        "import argparse, sys\n"
        "sys.modules['torch'] = None\n"
        "from deepinfer.cli import inspect\n"
        "parser = argparse.ArgumentParser()\n"
        "inspect.add_parser(parser.add_subparsers())\n"
        f"args = parser.parse_args(['inspect', {str(tmp_path)!r}])\n"
        "args.func(args)\n"
        "lines = open('/proc/self/status').read().splitlines()\n"
        "print(next(line for line in lines if line.startswith('VmHWM')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert "96,085 tensors" in done.stdout and "complete" in done.stdout
    # unlike getrusage, this peak does not include that of the process which started it
    assert int(done.stdout.split()[-2]) < 300 << 10
