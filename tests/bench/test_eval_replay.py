"""The replay task by hand: the exact bound costs nothing, a short suffix something."""

from __future__ import annotations

import pytest
import torch

from deepinfer.bench import eval_replay
from deepinfer.bench.eval_replay import continued, keeps, replay
from deepinfer.bench.evalreport import markdown
from deepinfer.bench.evaluate import Evaluation
from deepinfer.cli.main import main
from deepinfer.config.engine import EngineConfig
from deepinfer.config.load import resolve_model


@pytest.fixture(scope="module")
def run() -> Evaluation:
    return Evaluation(resolve_model("demo"), EngineConfig(), limit=1)


def test_keeps(run: Evaluation) -> None:
    assert keeps(run.model) == [70, 140, 64 + 4 * 63]


def test_continuation(run: Evaluation) -> None:
    """Off is one pass over all; the exact bound differs nowhere, the least number does."""
    ids = [(i * 37) % 1000 + 5 for i in range(470)]
    prompt, rest = ids[:430], ids[430:]
    exact = continued(run.model, prompt, rest, 0)
    streams = run.model.streams(1, len(ids))
    whole = streams.prefill(0, ids[:-1])
    assert torch.equal(exact, whole[429:])
    assert torch.equal(continued(run.model, prompt, rest, 400), exact)
    assert not torch.equal(continued(run.model, prompt, rest, 70), exact)
    assert torch.equal(continued(run.model, prompt, rest[:1], 0), exact[:1])


def test_task(run: Evaluation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval_replay, "TIMED_TOKENS", 420)
    monkeypatch.setattr(eval_replay, "_ROWS", 1)
    figures = list(replay(run))
    found = {(f.name, f.labels["keep"]): f.value for f in figures}
    exact = keeps(run.model)[-1]
    assert found["model", exact] == pytest.approx(found["model", 0], abs=1e-3)
    assert found["greedy agreement", 0] == 1 and found["greedy agreement", exact] > 0.9
    assert found["decoder rows", 0] == 420 and found["decoder rows", 70] == 70
    assert found["prefill", 70] > 0
    table = markdown(figures)
    assert table.count("\n") == 2 + len(keeps(run.model)) and "| off |" in table


def test_the_task_by_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`deepinfer eval replay` is `--task replay`; other words are refused."""
    monkeypatch.setattr(eval_replay, "TIMED_TOKENS", 100)
    monkeypatch.setattr(eval_replay, "_REPEATS", 1)
    monkeypatch.setattr(eval_replay, "_LEAST_PROMPT", 10**9)
    assert main(["eval", "replay", "--limit", "1"]) == 0
    assert "| kept tokens |" in capsys.readouterr().out
    assert main(["eval", "replays"]) == 2
    assert "no task 'replays'" in capsys.readouterr().err
