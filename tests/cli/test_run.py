"""`deepinfer run`: flags, summary, exit codes, Ctrl-C; the rest is tested with the jobs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.jobs.engine import TOKENIZER, ToyEngine

from deepinfer import llm as llm_module
from deepinfer.cli import run as run_module
from deepinfer.cli.main import main
from deepinfer.config.load import load_model_config, resolve_model
from deepinfer.jobs.runner import Totals


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the engine."""

    class Toy(ToyEngine):
        tokenizer = TOKENIZER
        max_model_len = 2048
        model_config = load_model_config(resolve_model("demo"))

        def __init__(self, *given: object) -> None:
            super().__init__()

        def __enter__(self) -> Toy:
            return self

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(llm_module, "LLM", Toy)


def rows_in(path: Path, *rows: Any) -> list[str]:
    """Write rows and return the flags of a run over them."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (path / "in").write_text("".join(f"{line}\n" for line in lines))
    return ["run", "-i", str(path / "in"), "-o", str(path / "out")]


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "out").read_text().splitlines()]


def test_summary_and_exit_codes(
    toy: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = rows_in(tmp_path, {"prompt": [5, 6]}, {"prompt": [7]})
    assert main([*flags, "--max-tokens", "5"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["done"] == 2 and summary["output_tokens"] == 10 and summary["stopped"] is None
    assert len(answers(tmp_path)[0]["token_ids"]) == 5
    assert main([*flags, "--max-tokens", "5"]) == 0
    assert json.loads(capsys.readouterr().out)["skipped"] == 2
    assert main([*flags, "--max-tokens", "6"]) == 1
    assert "differs from what" in capsys.readouterr().err


def test_failed_rows_fail_the_run(
    toy: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = rows_in(tmp_path, {"prompt": [5]}, "{", "{", "{")
    assert main([*flags, "--max-errors", "1"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["stopped"] == "max_errors" and "more than 1 rows have failed" in err
    assert main(flags) == 1
    assert json.loads(capsys.readouterr().out)["stopped"] is None
    assert main(flags) == 1  # nothing is left to do, but what is there holds errors


def test_rows_that_are_gone_are_told(
    toy: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(rows_in(tmp_path, {"prompt": [5]}, {"prompt": [6]}))
    assert main(rows_in(tmp_path, {"prompt": [5]})) == 0
    assert "answers 1 rows that" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "code", "problem"),
    [
        (["--max-errors", "-1"], 2, "expected an integer >= 0"),
        (["--window", "0"], 2, "expected an integer >= 1"),
        (["--temperature", "-1"], 2, "temperature must be"),
        (["--trigger", "x"], 2, "--trigger needs one of"),
        (["-o", "/nowhere/out"], 1, "cannot write /nowhere/out: No such file"),
        (["-i", "/nowhere/in"], 1, "cannot read /nowhere/in: No such file"),
        (["--model", "/nowhere"], 1, "/nowhere"),
    ],
)
def test_bad_flags(
    toy: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    code: int,
    problem: str,
) -> None:
    assert main([*rows_in(tmp_path, {"prompt": [5]}), *flags]) == code
    assert problem in capsys.readouterr().err


def test_input_is_never_the_output(
    toy: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = rows_in(tmp_path, {"prompt": [5]})
    assert main(["run", "-i", flags[2], "-o", flags[2]]) == 2
    assert "the same file" in capsys.readouterr().err


def test_progress_is_told() -> None:
    totals = Totals(done=3, failed=1, skipped=2, prompt_tokens=40, output_tokens=80, seconds=4.0)
    totals.fraction, totals.drafts_verified, totals.drafts_accepted = 0.25, 10, 6
    assert run_module.describe(totals) == (
        "3 done, 1 failed, 2 answered before, 10.0 prompt and 20.0 output tokens/s, "
        "60 % of drafts accepted, about 0:00:12 left"
    )
    assert run_module.describe(Totals()).startswith("0 done, 0 failed, 0.0 prompt")


def test_with_the_demo_checkpoint(tmp_path: Path) -> None:
    """A process that is interrupted, and another one that finishes its work."""
    rows = [{"prompt": f"Tell {i}", "max_tokens": 8, "seed": 1} for i in range(14)]
    flags = rows_in(tmp_path, *rows)
    command = [sys.executable, "-m", "deepinfer.cli.main", *flags, "--window", "4"]
    command += ["--set", "scheduling.max_num_seqs=4"]
    for number, expected in ((signal.SIGINT, 130), (None, 0)):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            deadline = time.monotonic() + 60
            while number is not None and process.poll() is None and time.monotonic() < deadline:
                if (tmp_path / "out").exists() and (tmp_path / "out").stat().st_size:
                    os.kill(process.pid, number)
                    break
                time.sleep(0.01)
            out, err = process.communicate(timeout=120)
        assert process.returncode == expected, err
        if number == signal.SIGINT:
            assert json.loads(out)["stopped"] == "interrupted"
            assert b"the same command goes on" in err
    found = answers(tmp_path)
    assert sorted(r["run"]["line"] for r in found) == list(range(1, 15))
    assert all(r["error"] is None and r["text"] for r in found)
