"""`deepinfer compare`: first difference, errors by layer, exit codes; reference against fast."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from deepinfer.cli.compare import compare_values, report
from deepinfer.cli.main import main
from deepinfer.cli.values import KINDS, LayerIds, first_not_finite, in_order

IDS = LayerIds(engram=(1,), index=(2, 3), candidate=(3,))
LAYERS, ROWS = 4, 5


def values() -> dict[str, Tensor]:
    """A small trace with every kind of value."""
    torch.manual_seed(0)
    shapes: dict[str, list[int]] = {
        "tokens": [ROWS],
        "engram_hash": [ROWS, 1, 2],
        "engram_out": [1, ROWS, 2, 3],
        "idx_topk": [2, ROWS, 4],
        "cand_blocks": [ROWS, 2],
        "attn_out": [LAYERS, ROWS, 3],
        "route_idx": [LAYERS, ROWS, 2],
        "route_weight": [LAYERS, ROWS, 2],
        "ffn_out": [LAYERS, ROWS, 3],
        "stream_out": [LAYERS, ROWS, 2, 3],
        "pre_mix": [LAYERS, ROWS, 2],
        "main_hidden": [ROWS, 3],
        "logits": [ROWS, 7],
        "greedy_tokens": [3],
        "decode_logits": [2, 7],
        "draft_tokens": [2, 3],
        "draft_conf": [2, 2],
        "draft_logits": [2, 2, 7],
    }
    made = {}
    for name, shape in shapes.items():
        dtype = KINDS[name].dtype
        value = torch.randn(shape)
        if dtype in ("int32", "uint8"):
            value = (value.abs() * 3).to(getattr(torch, dtype))
        made[name] = value
    made["route_idx"] = torch.tensor([4, 1], dtype=torch.int32).expand(LAYERS, ROWS, 2).clone()
    return made


@pytest.fixture
def write(tmp_path: Path) -> object:
    def save(name: str, tensors: dict[str, Tensor], ids: LayerIds = IDS) -> str:
        file = tmp_path / name
        save_file({k: v.contiguous() for k, v in tensors.items()}, file, ids.to_metadata())
        return str(file)

    return save


def compared(write: object, a: dict[str, Tensor], b: dict[str, Tensor], *flags: str) -> int:
    save = write
    assert callable(save)
    return main(["compare", save("a", a), save("b", b), *flags])


def test_every_kind_is_in_the_small_trace() -> None:
    assert set(values()) == set(KINDS)


def test_equal(write: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(write, values(), values()) == 0
    out = capsys.readouterr().out
    assert "equal, bit for bit" in out
    assert "*" not in out


@pytest.mark.parametrize(
    ("name", "place", "told"),
    [
        ("tokens", (2,), "tokens, position 2"),
        ("engram_out", (0, 3, 1, 2), "engram_out of layer 1, position 3, at [1, 2]"),
        ("idx_topk", (1, 4, 0), "idx_topk of layer 3, position 4, at [0]"),
        ("cand_blocks", (1, 1), "cand_blocks of layer 3, position 1, at [1]"),
        ("attn_out", (2, 0, 1), "attn_out of layer 2, position 0, at [1]"),
        ("route_weight", (3, 1, 0), "route_weight of layer 3, position 1"),
        ("logits", (4, 6), "logits, position 4, at [6]"),
        ("draft_logits", (1, 0, 5), "draft_logits, position 1, at [0, 5]"),
    ],
)
def test_one_number(
    name: str,
    place: tuple[int, ...],
    told: str,
    write: object,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whichever number differs, its value, layer and position are named, and it alone is marked."""
    b = values()
    b[name][place] += 1
    assert compared(write, values(), b) == 1
    out = capsys.readouterr().out
    assert f"first difference: {told}" in out
    found = compare_values(values(), b, IDS)
    assert [one.name for one in found if one.differs] == [name]


def test_the_first_is_the_first_computed(write: object, capsys: pytest.CaptureFixture[str]) -> None:
    """Layer 1 comes before layer 2 whatever the values are called; inside a layer, attention."""
    b = values()
    b["attn_out"][2] += 1
    b["stream_out"][1, 4] += 1
    b["logits"] += 1
    assert compared(write, values(), b) == 1
    assert "first difference: stream_out of layer 1, position 4" in capsys.readouterr().out
    b["engram_out"][0, 2] += 1
    assert compared(write, values(), b) == 1
    assert "first difference: engram_out of layer 1, position 2" in capsys.readouterr().out


def test_the_table(write: object, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = values(), values()
    b["ffn_out"][3, 1:, 0] += 0.5
    b["idx_topk"][0, :2] += 1
    b["decode_logits"][1, 2] += 2
    assert compared(write, a, b) == 1
    lines = capsys.readouterr().out.splitlines()
    (head,) = [line.split() for line in lines if line.startswith("layer")]
    rows = {line.split()[0]: line for line in lines if line[:1].isdigit()}
    assert set(rows) == {"0", "1", "2", "3"}
    assert head[1] == "engram_out"
    assert "0.5*" in rows["3"]
    assert f"2/{ROWS}*" in rows["2"]
    assert "*" not in rows["0"] + rows["1"]
    (last,) = [line.split() for line in lines if line.startswith("decode_logits")]
    assert last[1] == "2" and last[3:] == ["1/2", "1"]


def test_tolerance(write: object) -> None:
    a, b = values(), values()
    b["logits"] *= 1.01
    assert compared(write, a, b) == 1
    assert compared(write, a, b, "--rtol", "0.02") == 0
    assert compared(write, a, b, "--rtol", "0", "--atol", "1") == 0
    b["tokens"][0] += 1
    assert compared(write, a, b, "--rtol", "9", "--atol", "9") == 1, "integers must be equal"


def test_the_order_of_experts_is_free(write: object) -> None:
    b = values()
    b["route_idx"], b["route_weight"] = b["route_idx"].flip(-1), b["route_weight"].flip(-1)
    assert compared(write, values(), b) == 0
    b["route_weight"] = b["route_weight"].flip(-1)
    assert compared(write, values(), b) == 1, "weights belong to their experts"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.pop("pre_mix"), "pre_mix is only in A"),
        (lambda t: t.update(extra=torch.ones(2)), "extra is only in B"),
        (lambda t: t.update(logits=t["logits"][:3]), f"logits has shapes [{ROWS}, 7] and [3, 7]"),
        (lambda t: t.update(logits=t["logits"].bfloat16()), "types float32 and bfloat16"),
    ],
)
def test_what_cannot_be_compared(
    change: object, told: str, write: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is told, the rest is compared all the same, and the exit code is 1."""
    b = values()
    assert callable(change)
    change(b)
    b["attn_out"][1, 2] += 1
    assert compared(write, values(), b) == 1
    out = capsys.readouterr().out
    assert told in out
    assert "first difference: attn_out of layer 1, position 2" in out


@pytest.mark.parametrize(
    ("x", "y", "differs"),
    [
        (math.nan, math.nan, False),
        (math.inf, math.inf, False),
        (math.inf, -math.inf, True),
        (math.nan, 0.0, True),
        (0.0, math.nan, True),
        (math.inf, 1.0, True),
        (1.0, math.inf, True),
        (0.0, -0.0, False),
    ],
)
def test_not_finite(x: float, y: float, differs: bool) -> None:
    (one,) = compare_values({"v": torch.tensor([x])}, {"v": torch.tensor([y])}, LayerIds())
    assert one.differs is differs
    assert (one.max_abs > 0) is differs


@given(
    st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=6),
    st.lists(st.floats(-1, 1, width=32), min_size=6, max_size=6),
    st.floats(0, 0.1),
    st.floats(0, 0.1),
)
def test_tolerance_is_the_stated_one(
    numbers: list[float], nudges: list[float], rtol: float, atol: float
) -> None:
    x = torch.tensor(numbers)
    y = x + torch.tensor(nudges[: len(numbers)])
    (one,) = compare_values({"v": x}, {"v": y}, LayerIds(), rtol, atol)
    pairs = list(zip(x.tolist(), y.tolist(), strict=True))
    beyond = [i for i, (p, q) in enumerate(pairs) if abs(p - q) > atol + rtol * abs(q)]
    assert one.first == (beyond[0] if beyond else None)
    assert one.positions == len(beyond)


def test_layers_without_metadata_count_from_zero(
    write: object, capsys: pytest.CaptureFixture[str]
) -> None:
    save = write
    assert callable(save)
    b = values()
    b["idx_topk"][1] += 1
    assert main(["compare", save("a", values(), LayerIds()), save("b", b)]) == 1
    assert "idx_topk of layer 1" in capsys.readouterr().out


def test_scalars_and_nothing() -> None:
    (one,) = compare_values({"v": torch.tensor(1.0)}, {"v": torch.tensor(2.0)}, LayerIds())
    assert one.first == 0
    (none,) = compare_values({"v": torch.ones(0, 3)}, {"v": torch.ones(0, 3)}, LayerIds())
    assert not none.differs
    assert "nothing to compare" in report([], ("a", "b"), 0, 0)


def test_order_and_first_not_finite() -> None:
    found = values()
    order = [(item.name, item.layer) for item in in_order(found, IDS)]
    assert order.index(("engram_out", 1)) < order.index(("attn_out", 1))
    assert order.index(("stream_out", 0)) < order.index(("engram_out", 1))
    assert order.index(("idx_topk", 3)) < order.index(("cand_blocks", 3))
    assert order[:2] == [("tokens", None), ("engram_hash", None)]
    assert len(order) == len(set(order))
    assert first_not_finite(found, IDS) is None
    found["logits"][0, 0] = math.nan
    found["ffn_out"][2, 0, 0] = math.inf
    assert str(first_not_finite(found, IDS)) == "ffn_out of layer 2"


@pytest.mark.parametrize("numerics", ["official", "noq"])
def test_reference_against_fast(numerics: str, capsys: pytest.CaptureFixture[str]) -> None:
    ids = ",".join(str(3 + i * 37 % 280) for i in range(12))
    flags = ["--numerics", numerics, "--chunk", "5", "--decode", "1"]
    assert main(["compare", "--model", "golden", "--token-ids", ids, *flags]) == 0
    out = capsys.readouterr().out
    assert "A: fast" in out and "B: reference" in out
    assert "equal" in out and "draft_logits" in out


def test_a_difference_between_the_paths(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fast path that is wrong from layer 3 on is caught there."""
    from deepinfer.kernels.router import cpu

    real, calls = cpu.route, []

    def wrong(*args: object) -> tuple[Tensor, Tensor]:
        calls.append(1)
        chosen, weight = real(*args)  # type: ignore[arg-type]
        return chosen, weight * 1.01 if len(calls) > 3 else weight

    monkeypatch.setattr(cpu, "route", wrong)
    assert main(["compare", "--model", "golden", "--token-ids", "5,6,7"]) == 1
    assert "first difference: route_weight of layer 3, position 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "takes two files"),
        (["a"], "got 1 files"),
        (["a", "b", "c"], "got 3 files"),
        (["a", "b", "--token-ids", "5"], "--token-ids needs --model"),
        (["a", "b", "--model", "golden", "--token-ids", "5"], "not both"),
        (["--model", "golden"], "--model needs --token-ids"),
        (["a", "b", "--rtol", "-1"], "expected a number >= 0"),
        (["a", "b", "--atol", "nan"], "expected a number >= 0"),
    ],
)
def test_usage_errors(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *argv]) == 2
    assert message in capsys.readouterr().err


def test_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("no tensors here")
    absent = tmp_path / "absent"
    assert main(["compare", str(text), str(text)]) == 1
    assert "not a safetensors file" in capsys.readouterr().err
    assert main(["compare", str(absent), str(text)]) == 1
    assert "absent" in capsys.readouterr().err
