"""`deepinfer trace`: names, shapes and types of a file, the recorded values, both paths, errors."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from deepinfer.cli import trace as trace_command
from deepinfer.cli.main import main
from deepinfer.cli.values import KINDS, LayerIds
from deepinfer.config.load import load_model_config, resolve_model
from deepinfer.weights.synth import write_synthetic

CONFIG = load_model_config(resolve_model("golden"))
BETA = Path(__file__).parents[1] / "data" / "beta" / "config.json"
DRAFT = CONFIG.dspark_block_size


def joined(ids: Tensor | list[int]) -> str:
    return ",".join(str(int(i)) for i in ids)


def trace(out: Path, ids: str, *argv: str, model: str = "golden") -> int:
    return main(["trace", "--model", model, "--token-ids", ids, "--out", str(out), *argv])


@pytest.fixture(scope="module")
def recorded(golden_folder: Path) -> dict[str, Tensor]:
    return load_file(golden_folder / "p7.safetensors")


@pytest.mark.parametrize("path", ["reference", "fast"])
@pytest.mark.parametrize("numerics", ["official", "noq"])
def test_names_shapes_and_types(
    path: str, numerics: str, recorded: dict[str, Tensor], tmp_path: Path
) -> None:
    """Exactly what the format says, and nothing else; integers are the recorded ones."""
    out, steps = tmp_path / "t.safetensors", 2
    fed = joined(recorded["greedy_tokens"][: steps + 1])
    flags = ("--path", path, "--numerics", numerics, "--decode", str(steps), "--decode-ids", fed)
    assert trace(out, joined(recorded["tokens"]), *flags) == 0
    found = load_file(out)
    rows, layers = recorded["tokens"].shape[0], CONFIG.num_hidden_layers
    streams, hidden, vocab = CONFIG.hc_mult, CONFIG.hidden_size, CONFIG.vocab_size
    shapes = {
        "tokens": [rows],
        "engram_hash": [rows, len(CONFIG.engram_layer_ids), 6],
        "engram_out": [len(CONFIG.engram_layer_ids), rows, streams, hidden],
        "idx_topk": [len(CONFIG.index_source_layer_ids), rows, CONFIG.index_topk],
        "cand_blocks": [rows, 1],
        "attn_out": [layers, rows, hidden],
        "route_idx": [layers, rows, CONFIG.num_experts_per_tok],
        "route_weight": [layers, rows, CONFIG.num_experts_per_tok],
        "ffn_out": [layers, rows, hidden],
        "stream_out": [layers, rows, streams, hidden],
        "pre_mix": [layers, rows, streams],
        "main_hidden": [rows, hidden * len(CONFIG.dspark_target_layer_ids)],
        "logits": [rows, vocab],
        "greedy_tokens": [steps + 1],
        "decode_logits": [steps, vocab],
        "draft_tokens": [steps, DRAFT + 1],
        "draft_conf": [steps, DRAFT],
        "draft_logits": [steps, DRAFT, vocab],
    }
    assert {name: list(value.shape) for name, value in found.items()} == shapes
    assert set(shapes) == set(KINDS)
    held = "bfloat16" if numerics == "official" else "float32"
    for name, value in found.items():
        dtype = KINDS[name].dtype
        assert str(value.dtype) == f"torch.{held if dtype == 'held' else dtype}", name
    assert torch.equal(found["tokens"], recorded["tokens"])
    assert torch.equal(found["engram_hash"], recorded["engram_hash"])
    assert torch.equal(found["idx_topk"], recorded[f"idx_topk_{numerics}"].int())
    assert torch.equal(found["cand_blocks"], recorded[f"cand_blocks_{numerics}"])
    assert torch.equal(found["draft_tokens"][:, 0], recorded["greedy_tokens"][1 : steps + 1])
    if numerics == "noq":
        near = torch.testing.assert_close
        rows_kept = recorded["noq_positions"].long()
        near(found["logits"][rows_kept], recorded["logits_noq"], rtol=0, atol=1e-4)
        near(found["decode_logits"], recorded["decode_logits_noq"][:steps], rtol=0, atol=1e-4)
        near(found["draft_conf"], recorded["draft_conf_noq"][:steps], rtol=0, atol=1e-4)
        near(found["draft_logits"][:1], recorded["draft_logits_noq"], rtol=0, atol=1e-4)
        assert torch.equal(found["draft_tokens"], recorded["draft_tokens_noq"][:steps])
    with safe_open(out, "pt") as file:
        metadata = file.metadata()
    assert (metadata["path"], metadata["numerics"]) == (path, numerics)
    assert LayerIds.from_metadata(metadata) == LayerIds.of(CONFIG)


def test_greedy_decoding_feeds_what_it_chose(tmp_path: Path) -> None:
    """Without ids, a step feeds the likeliest token and drafts from the one behind."""
    out, again = tmp_path / "a", tmp_path / "b"
    assert trace(out, "5,6,7", "--decode", "3") == 0
    found = load_file(out)
    greedy = found["greedy_tokens"]
    assert greedy[0] == found["logits"][-1].argmax()
    assert torch.equal(greedy[1:], found["decode_logits"].argmax(-1).int())
    assert torch.equal(found["draft_tokens"][:, 0], greedy[1:])
    assert trace(again, "5,6,7", "--decode", "3", "--decode-ids", joined(greedy[:3])) == 0
    for name, value in load_file(again).items():
        assert torch.equal(value, found[name]), name


def test_given_ids_are_fed_and_drafted_from(tmp_path: Path) -> None:
    """M ids leave the last draft to the likeliest token, M + 1 name it."""
    with_m, with_more = tmp_path / "m", tmp_path / "more"
    assert trace(with_m, "5,6,7", "--decode", "2", "--decode-ids", "9,11") == 0
    assert trace(with_more, "5,6,7", "--decode", "2", "--decode-ids", "9,11,13") == 0
    a, b = load_file(with_m), load_file(with_more)
    assert torch.equal(a["decode_logits"], b["decode_logits"])
    assert a["draft_tokens"][:, 0].tolist() == [11, int(a["greedy_tokens"][2])]
    assert b["draft_tokens"][:, 0].tolist() == [11, 13]


def test_chunks_change_nothing_without_rounding(tmp_path: Path) -> None:
    ids = joined(np.random.default_rng(1).integers(0, 288, 20).tolist())
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    assert trace(whole, ids, "--numerics", "noq") == 0
    assert trace(pieces, ids, "--numerics", "noq", "--chunk", "7") == 0
    a, b = load_file(whole), load_file(pieces)
    assert a.keys() == b.keys()
    assert "decode_logits" not in a
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], rtol=0, atol=1e-4, msg=name)


def test_settings_reach_both_paths(tmp_path: Path) -> None:
    """The serving form of the output projection, by its setting: another arithmetic on both."""
    ids, logits = "5,6,7,8", {}
    for path in ("reference", "fast"):
        for projection in ("bf16", "fp8"):
            out = tmp_path / f"{path}.{projection}"
            flags = ["--path", path, "--set", f"numerics.output_projection={projection}"]
            assert trace(out, ids, *flags, "--window-slots", "full") == 0
            logits[path, projection] = load_file(out)["logits"]
    for projection in ("bf16", "fp8"):
        assert torch.equal(logits["reference", projection], logits["fast", projection])
    assert not torch.equal(logits["fast", "bf16"], logits["fast", "fp8"])


def test_other_dims(tmp_path: Path) -> None:
    """A checkpoint in which every size differs, and one without Engram, drafts, candidates."""
    raw = json.loads(BETA.read_text())
    write_synthetic(BETA, 3, tmp_path / "beta")
    config = load_model_config(tmp_path / "beta")
    out = tmp_path / "t"
    assert trace(out, "1,2,3,4,5", "--decode", "1", model=str(tmp_path / "beta")) == 0
    found = load_file(out)
    assert list(found["draft_tokens"].shape) == [1, config.dspark_block_size + 1]
    assert found["idx_topk"].shape[2] == config.index_topk
    text = raw["text_config"]
    text["compress_ratios"] = text["compress_ratios"][: text["num_hidden_layers"]]
    text["num_nextn_predict_layers"] = 0
    text["engram_layer_ids"], text["engram_num_embeddings"] = [], []
    plain = tmp_path / "plain.json"
    plain.write_text(json.dumps(raw))
    write_synthetic(plain, 3, tmp_path / "plain")
    assert trace(out, "1,2,3", "--decode", "1", model=str(tmp_path / "plain")) == 0
    assert not {"engram_hash", "engram_out", "draft_tokens", "draft_conf"} & set(load_file(out))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--decode-ids", "5"], "--decode-ids needs --decode"),
        (["--decode", "3", "--decode-ids", "5,6"], "expected 3 or 4"),
        (["--decode", "-1"], "--decode: found -1"),
        (["--chunk", "0"], "expected an integer >= 1"),
        (["--path", "third"], "invalid choice"),
        (["--numerics", "half"], "invalid choice"),
        (["--set", "numerics.mod=noq"], "numerics.mode"),
    ],
)
def test_usage_errors(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t"
    assert trace(out, "5", *flags) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("ids", "flags", "message"),
    [
        ("5,288", [], "--token-ids: token id 288 is outside the vocabulary 0..287"),
        ("", [], "--token-ids is empty"),
        ("5", ["--decode", "1", "--decode-ids", "999"], "--decode-ids: token id 999"),
        ("5", ["--device", "cuda:77"], "cuda:77"),
    ],
)
def test_failures(
    ids: str,
    flags: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "t"
    assert trace(out, ids, *flags) == 1
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_what_is_no_plain_file_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Devices, pipes and folders stay what they are; told before anything is computed."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, told in (
        ("pipe", "it is no plain file"),
        ("folder", "a folder has this name"),
        ("absent/t", "there is no folder"),
    ):
        assert trace(tmp_path / name, "5") == 1
        assert told in capsys.readouterr().err
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "folder").is_dir()


def test_a_file_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trace(tmp_path / "absent" / "t", "5") == 1
    assert "cannot write" in capsys.readouterr().err

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace_command.Path, "replace", full)
    assert trace(tmp_path / "t", "5") == 1
    assert "No space left" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_chunks_mean_nothing_to_the_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trace(tmp_path / "t", "5", "--path", "reference", "--chunk", "2") == 0
    assert "no effect" in capsys.readouterr().err


def damaged(folder: Path, name: str) -> Path:
    """Copy the packaged checkpoint with NaN throughout one fp32 tensor."""
    shutil.copytree(resolve_model("golden"), folder)
    for shard in folder.glob("*.safetensors"):
        shard.chmod(0o644)
        data = bytearray(shard.read_bytes())
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        if name in header:
            begin, end = header[name]["data_offsets"]
            data[8 + length + begin : 8 + length + end] = b"\xff" * (end - begin)
            shard.write_bytes(data)
            return folder
    raise AssertionError(name)


def test_damaged_weights_are_traced_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is there to be looked at, the message names the first bad value, decoding stops."""
    folder = damaged(tmp_path / "bad", "layers.3.hc_ffn_base")
    out = tmp_path / "t"
    assert trace(out, "5,6", model=str(folder)) == 1
    message = capsys.readouterr().err
    assert "is written, but holds NaN or infinity, first in stream_out of layer 3" in message
    assert not load_file(out)["logits"].isfinite().all()
    out.unlink()
    assert trace(out, "5,6", "--decode", "2", model=str(folder)) == 1
    assert "the logits are not finite" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("path", ["fast", "reference"])
def test_damage_that_only_steers_is_refused(
    tmp_path: Path, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "layers.3.ffn.gate.bias"
    folder = damaged(tmp_path / "bad", name)
    assert trace(tmp_path / "t", "5,6", "--path", path, model=str(folder)) == 1
    err = capsys.readouterr().err
    assert f"{name} holds NaN or infinity" in err and not (tmp_path / "t").exists()
