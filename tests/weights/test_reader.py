"""Opening checkpoints: what passes, and how every kind of damage is told."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from deepinfer.errors import CheckpointError, ConfigError, DeepInferError
from deepinfer.weights.reader import Checkpoint
from deepinfer.weights.shards import read_header

if TYPE_CHECKING:
    from conftest import Folder

Make = Callable[[], "Folder"]
INDEX = "model.safetensors.index.json"
WQ = "layers.0.attn.wq_a.weight"


def problems_of(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    return "\n".join(caught.value.problems) or caught.value.message


def edited(make: Make, change: Callable[[Folder], None]) -> str:
    folder = make()
    change(folder)
    return problems_of(folder.write())


# What passes


def test_packaged_checkpoint_opens(golden_checkpoint: Path) -> None:
    checkpoint = Checkpoint.open(golden_checkpoint)
    assert len(checkpoint.tensors) == 834
    sink = checkpoint.array("layers.0.attn.attn_sink")
    assert sink.dtype == np.float32 and sink.shape == (4,)
    assert checkpoint.array("norm.weight").dtype == np.uint16
    assert checkpoint.array("layers.0.ffn.experts.0.w1.weight").shape == (32, 32)


def test_views_hold_the_stored_values(damaged: Make) -> None:
    folder = damaged()
    checkpoint = Checkpoint.open(folder.path)
    for tensors in folder.shards.values():
        for name, tensor in tensors.items():
            assert checkpoint.bytes(name).tobytes() == tensor.data
            assert list(checkpoint.array(name).shape) == tensor.shape


def test_views_are_read_only_and_survive_release(tiny_folder: Path) -> None:
    checkpoint = Checkpoint.open(tiny_folder)
    view = checkpoint.bytes("embed.weight")
    before = view.tobytes()
    checkpoint.release("embed.weight")
    assert view.tobytes() == before
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_prefixed_names_pass(damaged: Make) -> None:
    folder = damaged()
    for shard, tensors in folder.shards.items():
        folder.shards[shard] = {f"model.{n}" if "attn" in n else n: t for n, t in tensors.items()}
    checkpoint = Checkpoint.open(folder.write())
    assert WQ in checkpoint.tensors


def test_single_file_without_index_passes(damaged: Make) -> None:
    folder = damaged()
    for shard in folder.shards:
        (folder.path / shard).unlink()
    (folder.path / INDEX).unlink()
    merged = {n: t for tensors in folder.shards.values() for n, t in tensors.items()}
    folder.shards = {"model.safetensors": merged}
    assert len(Checkpoint.open(folder.write(with_index=False)).tensors) == len(merged)


def test_copies_of_shared_draft_tensors_are_ignored(damaged: Make) -> None:
    folder = damaged()
    home = folder.home(WQ)
    home["mtp.0.embed.weight"] = home["mtp.0.head.weight"] = home[WQ]
    assert "mtp.0.embed.weight" not in Checkpoint.open(folder.write()).tensors


def test_unaligned_data_is_read(damaged: Make) -> None:
    folder = damaged()
    home = folder.home("layers.0.attn.attn_sink")
    sink = home["layers.0.attn.attn_sink"]
    moved = {"mtp.0.head.x": type(sink)("U8", [1], b"\1"), **home}
    home.clear()
    home.update(moved)
    checkpoint = Checkpoint.open(folder.write())
    assert checkpoint.array("layers.0.attn.attn_sink").tobytes() == sink.data


# What a folder may lack


def test_unknown_folder(tmp_path: Path) -> None:
    assert "does not exist" in problems_of(tmp_path / "nowhere")


def test_file_instead_of_folder(tiny_folder: Path) -> None:
    assert "is a file" in problems_of(tiny_folder / "config.json")


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        Checkpoint.open(tmp_path)


def test_folder_without_weights(tiny_folder: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_folder / "config.json", tmp_path)
    assert "holds no weights" in problems_of(tmp_path)


def test_shards_without_index(damaged: Make) -> None:
    folder = damaged()
    (folder.path / INDEX).unlink()
    assert f"{INDEX} is missing, although there are 4 shards" in problems_of(folder.path)
    (folder.path / INDEX).mkdir()
    assert f"cannot read {INDEX}: Is a directory" in problems_of(folder.path)


# What the tensors may get wrong


def drop(*names: str) -> Callable[[Folder], None]:
    def change(folder: Folder) -> None:
        for name in names:
            del folder.home(name)[name]

    return change


def copy_as(name: str, source: str = WQ) -> Callable[[Folder], None]:
    def change(folder: Folder) -> None:
        folder.home(source)[name] = folder.home(source)[source]

    return change


def reshape(name: str, shape: list[int]) -> Callable[[Folder], None]:
    def change(folder: Folder) -> None:
        folder.home(name)[name].shape = shape

    return change


def retype(name: str, dtype: str) -> Callable[[Folder], None]:
    def change(folder: Folder) -> None:
        folder.home(name)[name].dtype = dtype

    return change


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (drop("norm.weight"), "missing: norm.weight"),
        (drop("layers.0.attn.wq_a.scale"), "without its scale: layers.0.attn.wq_a.scale"),
        (drop("layers.1.engram.embed.scale"), "without its scale: layers.1.engram.embed.scale"),
        (drop("layers.2.ffn.experts.3.w3.weight", "layers.2.ffn.experts.3.w3.scale"),
         "missing: layers.2.ffn.experts.3.w3.weight"),
        (copy_as("layers.9.attn.wq_a.weight"), "unexpected: layers.9.attn.wq_a.weight"),
        (copy_as("layers.0.ffn.experts.6.w1.weight"), "unexpected: layers.0.ffn.experts.6.w1"),
        (copy_as("model." + WQ), f"with and without the prefix model.: {WQ}"),
        (copy_as("layers.0.hc_attn_norm.weight"), "not folded into its hc_*_fn, convert"),
        (copy_as("hc_head_norm.weight"), "not folded into its hc_*_fn, convert"),
        (reshape(WQ, [16, 64]), f"of another shape: {WQ} (found [16, 64], expected [32, 32])"),
        (retype(WQ, "I8"), f"of another type: {WQ} (found I8, expected F8_E4M3)"),
        (retype(WQ, "F8_FUTURE"), f"of another type: {WQ} (found F8_FUTURE, expected F8_E4M3)"),
        (retype(WQ, "BF16"), f"{WQ} takes 1024 bytes, but BF16 [32, 32] needs 2048"),
        (reshape(WQ, [32, 31]), f"{WQ} takes 1024 bytes, but F8_E4M3 [32, 31] needs 992"),
        (retype("layers.0.hc_attn_fn", "I32"), "layers.0.hc_attn_fn (found I32, expected F32)"),
    ],
)  # fmt: skip
def test_wrong_tensors_are_told(
    damaged: Make, change: Callable[[Folder], None], expected: str
) -> None:
    assert expected in edited(damaged, change)


def test_everything_is_told_at_once(damaged: Make) -> None:
    folder = damaged()
    for change in (
        drop("norm.weight", "layers.0.attn.wq_b.scale"),
        copy_as("nonsense"),
        reshape("layers.0.attn.wkv.weight", [32, 128]),
        retype("embed.weight", "F16"),
    ):
        change(folder)
    folder.write()
    last = sorted(folder.shards)[-1]
    with open(folder.path / last, "ab") as stream:
        stream.truncate((folder.path / last).stat().st_size - 5)
    text = problems_of(folder.path)
    for expected in ("missing: norm.weight", "wq_b.scale", "unexpected: nonsense",
                     "attn.wkv.weight (found", "embed.weight (found F16", "truncated"):  # fmt: skip
        assert expected in text


def test_long_lists_are_summed_up_by_pattern(damaged: Make, tiny_config: dict[str, Any]) -> None:
    folder = damaged()
    config = json.loads(json.dumps(tiny_config))
    config["text_config"]["n_routed_experts"] = 20
    (folder.path / "config.json").write_text(json.dumps(config))
    lines = problems_of(folder.path).splitlines()
    missing = [line for line in lines if line.startswith("missing")]
    # three matrices with their scales, 14 experts in each of 3 layers
    assert len(missing) == 6
    assert all(line.endswith("and 39 more") for line in missing)
    assert missing[0].count("layers.0.ffn.experts.6.w1.weight") == 1


def test_vision_tensors_follow_the_config(damaged: Make, tiny_config: dict[str, Any]) -> None:
    folder = damaged()
    config = {k: v for k, v in tiny_config.items() if k != "vision_config"}
    (folder.path / "config.json").write_text(json.dumps(config))
    assert "unexpected, as the config has no vision tower: image_start" in problems_of(folder.path)
    for shard, tensors in folder.shards.items():
        folder.shards[shard] = {
            n: t for n, t in tensors.items() if not n.startswith(("vision.", "aligner.", "image_"))
        }
    folder.write()
    assert Checkpoint.open(folder.path).config.vision is None


# What the index may get wrong


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "is no JSON object"),
        ("[]", "is no JSON object"),
        ("{}", "has no object weight_map"),
        ('{"weight_map": [1]}', "has no object weight_map"),
        ('{"weight_map": {"a": "../x.safetensors", "b": 3}}', "no plain file name for: a"),
        ('{"weight_map": {"a": "x", "a": "x"}}', "names twice: a"),
        ("\ufeff\u0000", "is no JSON object"),
    ],
)
def test_bad_index(damaged: Make, text: str, expected: str) -> None:
    folder = damaged()
    (folder.path / INDEX).write_text(text)
    assert expected in problems_of(folder.path)


def test_bad_index_does_not_hide_bad_tensors(damaged: Make) -> None:
    folder = damaged()
    drop("norm.weight")(folder)
    folder.write()
    (folder.path / INDEX).write_text("{")
    text = problems_of(folder.path)
    assert "is no JSON object" in text and "missing: norm.weight" in text


def test_index_and_shards_disagree(damaged: Make) -> None:
    folder = damaged()
    index = folder.index()
    shards = sorted(set(index.values()))
    moved = "norm.weight"
    other = next(s for s in shards if s != index[moved])
    unlisted = "head.weight"
    folder.write_index({"weight_map": {n: s for n, s in index.items() if n != unlisted}
                        | {moved: other}})  # fmt: skip
    text = problems_of(folder.path)
    assert f"in the index but not in its shard: {moved} ({other})" in text
    assert f"in a shard but not in the index: {unlisted}" in text


def test_missing_shard_is_told_once(damaged: Make) -> None:
    folder = damaged()
    shard = sorted(folder.shards)[0]
    (folder.path / shard).unlink()
    text = problems_of(folder.path)
    assert text == f"{shard} is missing; the index puts {len(folder.shards[shard])} tensors into it"


def test_tensor_in_two_shards(damaged: Make) -> None:
    folder = damaged()
    index = folder.index()
    other = next(tensors for shard, tensors in folder.shards.items() if shard != index[WQ])
    other[WQ] = folder.shards[index[WQ]][WQ]
    folder.write()
    folder.write_index({"weight_map": index})
    assert f"stored in more than one shard: {WQ}" in problems_of(folder.path)


# What a shard may get wrong


def test_truncated_shard(damaged: Make) -> None:
    folder = damaged()
    file = folder.path / sorted(folder.shards)[1]
    size = file.stat().st_size
    with open(file, "ab") as stream:
        stream.truncate(size - 100)
    text = problems_of(folder.path)
    assert f"{file.name} is truncated: it has {size - 100} bytes, its header needs {size}" in text
    assert "missing" not in text


@pytest.mark.parametrize("length", [0, 1, 40, 10**7, 2**40, 2**63, 2**64 - 1])
def test_wrong_header_length(damaged: Make, length: int) -> None:
    folder = damaged()
    file = folder.path / sorted(folder.shards)[0]
    raw = file.read_bytes()
    file.write_bytes(struct.pack("<Q", length) + raw[8:])
    text = problems_of(folder.path)
    assert file.name in text and "header" in text and "missing" not in text


@pytest.mark.parametrize("delta", [-1, 1])
def test_header_length_off_by_one(damaged: Make, delta: int) -> None:
    folder = damaged()
    for file in folder.path.glob("*.safetensors"):
        raw = file.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        # A padded header stays valid JSON when its last blank is cut off.
        padded = raw[8 : 8 + length] + b"   "
        body = struct.pack("<Q", len(padded) + delta) + padded + raw[8 + length :]
        file.write_bytes(body)
    assert problems_of(folder.path).count("header") >= 4


def header_problems(tmp_path: Path, header: object, data: bytes = b"") -> list[str]:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return read_header(file)[1]


def entry(begin: Any, end: Any, dtype: Any = "U8", shape: Any = None) -> dict[str, Any]:
    shape = [end - begin] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "size", "expected"),
    [
        ({"a": entry(0, 4), "b": entry(4, 8)}, 8, None),
        ({"__metadata__": {"x": "y"}, "a": entry(0, 4)}, 4, None),
        ({"a": entry(0, 0), "b": entry(0, 4)}, 4, None),
        ({"b": entry(4, 8), "a": entry(0, 4)}, 8, None),
        ({"a": entry(0, 4), "b": entry(3, 7)}, 7, "the bytes of b overlap those of a"),
        ({"a": entry(0, 4), "b": entry(0, 4)}, 4, "the bytes of b overlap those of a"),
        ({"a": entry(0, 4), "b": entry(6, 8)}, 8, "2 bytes in front of b belong to no tensor"),
        ({"a": entry(0, 4)}, 9, "5 bytes more than its header describes"),
        ({"a": entry(0, 40)}, 9, "is truncated"),
        ({"a": entry(4, 0, shape=[4])}, 4, "no ascending pair"),
        ({"a": entry(-4, 0, shape=[4])}, 4, "no ascending pair"),
        ({"a": entry(0.0, 4.0, shape=[4])}, 4, "no ascending pair"),
        ({"a": entry(0, 4, shape=[-2, -2])}, 4, "no list of sizes"),
        ({"a": entry(0, 4, shape=[True, 4])}, 4, "no list of sizes"),
        ({"a": entry(0, 4, shape="4")}, 4, "no list of sizes"),
        ({"a": entry(0, 4, dtype=None)}, 4, "has no dtype"),
        ({"a": entry(0, 4, dtype="F32", shape=[2])}, 4, "takes 4 bytes, but F32 [2] needs 8"),
        ({"a": entry(0, 4, shape=[2**70])}, 4, "takes 4 bytes"),
        ({"a": 3}, 4, "no object for its entry"),
        ([1], 0, "no JSON object"),
        (b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},'
         b' "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}', 1, "holds a twice"),
        (b"[" * 100000, 0, "no JSON object"),
        (b"\xff\xfe", 0, "no JSON object"),
    ],
)  # fmt: skip
def test_headers(tmp_path: Path, header: object, size: int, expected: str | None) -> None:
    problems = header_problems(tmp_path, header, bytes(size))
    if expected is None:
        assert problems == []
    else:
        assert expected in "\n".join(problems)


@pytest.mark.parametrize("raw", [b"", b"\0", b"\0" * 7])
def test_files_without_a_header(tmp_path: Path, raw: bytes) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(raw)
    assert "no safetensors file" in read_header(file)[1][0]


@given(data=st.data())
def test_no_damage_raises_anything_else(data: st.DataObject, tmp_path_factory: Any) -> None:
    raw = bytearray(save({"a": np.arange(6, dtype=np.float32).reshape(2, 3),
                          "b": np.zeros(5, np.uint8)}))  # fmt: skip
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    file = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    file.write_bytes(raw[:cut] if data.draw(st.booleans()) else raw)
    tensors, problems = read_header(file)
    size = file.stat().st_size
    if not problems:
        assert all(t.offset + t.nbytes <= size for t in tensors.values())


def test_config_error_comes_first(damaged: Make) -> None:
    folder = damaged()
    (folder.path / "config.json").write_text('{"model_type": "deepseek_v4"}')
    with pytest.raises(DeepInferError, match=r"not a DeepSeek-V4\.1-Flash config"):
        Checkpoint.open(folder.path)


def test_reader_needs_no_torch(tiny_folder: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from deepinfer.weights.reader import Checkpoint\n"
        f"Checkpoint.open({str(tiny_folder)!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
