"""Results survive a file; tables and verdicts say what the figures say; the page is drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer.bench.evalreport import EvalRecord, Figure, last_run, markdown, verdicts
from deepinfer.bench.plot import draw_evaluation
from deepinfer.bench.report import append
from deepinfer.cli.main import main
from deepinfer.errors import ConfigError


def figure(task: str, name: str, value: float, count: int = 10, **labels: str | int) -> Figure:
    return Figure(task=task, name=name, unit="x", value=value, count=count, labels=labels)


FIGURES = [
    figure("bpb", "model", 1.25, source="natural"),
    figure("bpb", "xz -9", 2.5, source="natural"),
    figure("bpb", "PPMd", 1.5, source="natural"),
    figure("bpb", "model", 0.1, source="json"),
    figure("experts", "least load", 0.3, source="natural", layer="all"),
    figure("experts", "most load", 2.0, source="natural", layer="all"),
    figure("experts", "least load", 0.3, source="natural", layer=0),
    figure("experts", "most load", 1.5, source="natural", layer=0),
    figure("retrieval", "needle", 0.5, 30, selection="indexer", distance=128),
    figure("retrieval", "needle", 1.0, 30, selection="indexer", distance=256),
    figure("retrieval", "needle", 0.9, 10, selection="indexer", distance=512),
    figure("retrieval", "needle", 0.1, 30, selection="random", distance=256),
    figure("drafts", "mean accepted length", 2.7, source="natural"),
    figure("drafts", "acceptance", 0.8, source="natural", place=1),
    figure("drafts", "repeated 8-grams", 0.2, source="natural"),
    figure("drafts", "mean accepted length, engine", 2.6, source="natural"),
    figure("drafts", "mean accepted length", 3.4, source="json"),
    figure("calibration", "expected calibration error", 0.04, source="all", place="all"),
    figure("calibration", "expected calibration error", 0.07, source="all", place=1),
    figure("calibration", "accuracy", 0.7, source="all", place="all", confidence="0.7210"),
    figure("json", "valid", 0.75),
]


def record(
    which: Figure, when: str = "2026-01-02T03:04:05+00:00", model: str = "demo"
) -> EvalRecord:
    return EvalRecord(
        figure=which,
        model=model,
        checkpoint="ab12",
        data="cd34",
        limit=None,
        when=when,
        versions={"torch": "2"},
    )


def test_the_last_run_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "eval.jsonl"
    append(file, [record(FIGURES[0], "2026-01-01T00:00:00+00:00")])
    append(file, [record(found) for found in FIGURES])
    assert [r.figure for r in last_run(file)] == FIGURES
    line = json.loads(file.read_text().splitlines()[-1])
    assert line["task"] == "json" and line["value"] == 0.75 and line["model"] == "demo"
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="no records"):
        last_run(tmp_path / "empty")


@pytest.mark.parametrize(
    "line", ["3", '{"format": 1, "suite": "cpu"}', '{"format": 1, "suite": "eval"}']
)
def test_bad_lines(tmp_path: Path, line: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(ConfigError, match="line 1"):
        last_run(file)


def test_tables() -> None:
    text = markdown(FIGURES)
    assert "| natural | 10 | 1.250 | 2.500 | 1.500 |" in text
    assert "| json | 10 | 0.100 | - | - |" in text
    assert "| natural | 0.30 | 2.00 |" in text
    assert "| needle | 256 or more | 30 | 1.000 | 0.100 |" in text
    assert "| natural | 10 | 2.70 | 0.80 | 0.20 | 2.60 | - |" in text
    assert "| all | 10 | 0.040 | 0.070 |" in text
    assert "| valid | 10 | 0.750 |" in text
    assert all(line.startswith("| ") for line in text.splitlines() if line)


def test_verdicts() -> None:
    met = {verdict.what: (verdict.found, verdict.met) for verdict in verdicts(FIGURES)}
    assert met == {
        "bits per byte, natural text": ("1.250", True),
        "load of every expert, natural text": ("0.30x to 2.00x", True),
        "needle, 256 tokens back and more": ("0.975, at random 0.100", True),
        "mean accepted length, natural": ("2.70", True),
        "mean accepted length, json": ("3.40", False),
        "calibration error, all drafts": ("0.040", True),
    }
    worse = [figure("bpb", "model", 1.6, source="natural"), *FIGURES[1:]]
    assert not next(iter(verdicts(worse))).met  # below 1.75, above PPMd


def test_reading_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file, page = tmp_path / "eval.jsonl", tmp_path / "new" / "page.png"
    append(file, [record(found) for found in FIGURES])
    assert main(["eval", "--read", str(file), "--plot", str(page)]) == 0
    shown = capsys.readouterr().out
    assert markdown(FIGURES) in shown and "| **no** |" in shown
    assert page.read_bytes().startswith(b"\x89PNG")
    other = tmp_path / "other.jsonl"
    append(other, [record(FIGURES[0], model="mine")])
    assert main(["eval", "--read", str(other)]) == 0
    assert "wanted" not in capsys.readouterr().out
    draw_evaluation([record(FIGURES[-1])], page)  # most panels empty


def test_tables_take_their_place_in_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- figures -->\nold\n<!-- end of figures -->\nafter\n")
    file = tmp_path / "eval.jsonl"
    append(file, [record(found) for found in FIGURES])
    for _ in range(2):
        assert main(["eval", "--read", str(file), "--page", str(page)]) == 0
        text = page.read_text()
        assert text.startswith("before\n<!-- figures -->\n| what the demonstration model")
        assert text.endswith("|\n<!-- end of figures -->\nafter\n") and "old" not in text
    page.write_text("no marks")
    assert main(["eval", "--read", str(file), "--page", str(page)]) == 1
    assert page.read_text() == "no marks"


def test_flags_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--read", "x", "--task", "bpb"]) == 2
    assert main(["eval", "--quick", "--limit", "3"]) == 2
    assert main(["eval", "--task", "typing"]) == 2
    assert main(["eval", "--read", str(tmp_path / "absent")]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_without_matplotlib_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("deepinfer.bench.plot.find_spec", lambda name: None)
    assert main(["eval", "--quick", "--plot", "x.png"]) == 1
    assert "deepinfer[plot]" in capsys.readouterr().err
