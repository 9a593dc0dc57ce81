"""The check of determinism: it passes where it must, and sees what it must see."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer.bench import determinism
from deepinfer.bench.determinism import Verdict, Way, cases_for, check, compare, ways_for
from deepinfer.cli.main import main
from deepinfer.config.load import load_model_config, resolve_model
from deepinfer.config.model import ModelConfig


@pytest.fixture(autouse=True)
def _costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path))


@pytest.fixture
def config() -> ModelConfig:
    return load_model_config(resolve_model("golden"))


def test_cases_and_ways_cover_the_promise(config: ModelConfig) -> None:
    for quick in (True, False):
        cases = cases_for(config, 4096, quick)
        assert cases == cases_for(config, 4096, quick)
        assert {c.params.is_greedy for c in cases} == {True, False}
        assert any(len(c.prompt) > config.sliding_window for c in cases)
        ways = ways_for(config, len(cases), quick)
        names = [way.name for way in ways]
        assert len(set(names)) == len(names)
        keys = {key for way in ways for key in way.settings}
        assert keys == {
            "scheduling.overlap",
            "scheduling.chunk_size",
            "cache.prefix",
            "parallel.cpu_threads",
            "speculation.num_drafts",
            "speculation.variable",
        }
        sizes = {way.group for way in ways} | {len(cases) + way.companions for way in ways}
        assert {1, len(cases)} <= sizes and max(s for s in sizes if s) >= 64
        assert any(w.preempt for w in ways) and any(w.processes for w in ways)
    assert len(cases_for(config, 4096, False)) == 64
    assert all(len(c.prompt) + c.params.max_tokens <= 40 for c in cases_for(config, 40, False))


def test_compare_names_the_first_difference() -> None:
    one = [((1, 2, 3), (-1.0, -2.0, -3.0), None, "length"), ((1,), None, None, "stop")]
    assert compare(one, one) is None
    other = [((1, 9, 3), (-1.0, -2.0, -3.0), None, "length"), one[1]]
    assert compare(one, other) == "request 0, output 1: tokens 2 became 9"
    other = [((1, 2, 3), (-1.0, -2.0, -3.0000001), None, "length"), one[1]]
    assert "output 2: log-probabilities -3.0 became" in (compare(one, other) or "")
    other = [one[0], ((1, 2), None, None, "length")]
    assert compare(one, other) == "request 1, output 1: tokens nothing became 2"
    other = [one[0], ((1,), None, None, "length")]
    assert compare(one, other) == "request 1: finish reason stop became length"


FEW = [
    Way(name="alone", group=1),
    Way(name="with others", companions=10, stagger=1),
    Way(name="put back", settings={"scheduling.chunk_size": 32}, preempt=True),
    Way(
        name="drafts",
        settings={"speculation.num_drafts": 5, "speculation.variable": True, "cache.prefix": True},
        made_costs=True,
        twice=True,
    ),
    Way(name="a process", settings={"speculation.num_drafts": 2}, processes=1),
    Way(name="other arithmetic", settings={"numerics.mode": "noq"}),
    Way(name="what cannot run", settings={"speculation.num_drafts": 77}),
]


def test_the_check_tells_ways_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last two are controls: a check that could not fail would prove nothing."""
    monkeypatch.setattr(determinism, "ways_for", lambda *_: FEW)
    monkeypatch.setattr(
        determinism, "cases_for", lambda *given: cases_for(given[0], given[1], True)[:4]
    )
    told: list[Verdict] = []
    verdicts = check("golden", "cpu", {}, True, told.append)
    assert told == verdicts and [v.name for v in verdicts[1:]] == [way.name for way in FEW]
    assert [v.difference for v in verdicts[:-2]] == [None] * 6
    assert verdicts[4].note and "drafts accepted" in verdicts[4].note
    assert "put back" in verdicts[3].note
    assert "became" in (verdicts[-2].difference or "")
    assert "speculation.num_drafts" in (verdicts[-1].difference or "")


@pytest.mark.parametrize("difference", [None, "request 0, output 1: tokens 2 became 9"])
def test_the_command(
    difference: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[object] = []

    def fake(model: str, device: str, settings: object, quick: bool, tell: object) -> list[Verdict]:
        seen.append((model, device, settings, quick))
        verdict = Verdict("batches of 1", difference, 1.5, "3 put back")
        tell(verdict)  # type: ignore[operator]
        return [verdict]

    monkeypatch.setattr(determinism, "check", fake)
    args = ["check", "determinism", "--model", "golden", "--quick"]
    assert main([*args, "--set", "cache.tokens_per_block=32"]) == (1 if difference else 0)
    out, err = capsys.readouterr()
    assert seen == [("golden", "auto", {"cache.tokens_per_block": 32}, True)]
    assert "batches of 1 (3 put back)" in out
    assert ("DIFFER" in err) == (difference is not None)
    main([*args, "--json"])
    line = json.loads(capsys.readouterr().out)
    assert line["difference"] == difference and line["name"] == "batches of 1"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["golden", "demo"])
def test_the_whole_matrix(model: str) -> None:
    differences = {v.name: v.difference for v in check(model, "cpu", {}, False)}
    assert set(differences.values()) == {None}, differences
