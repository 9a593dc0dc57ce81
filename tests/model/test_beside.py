"""Branches of recorded steps: who waits for whom, on streams that only take notes."""

from __future__ import annotations

import contextlib

import pytest
import torch

from deepinfer.model.fast.beside import Side


class Stream:
    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told

    def wait_stream(self, other: Stream) -> None:
        self.told.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    now = [Stream("first", told)]

    @contextlib.contextmanager
    def stream(other: Stream):  # type: ignore[no-untyped-def]
        now.append(other)
        yield
        now.pop()

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("second", told))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    return told


def test_a_branch_begins_behind_what_was_before_and_is_awaited_where_it_joins(
    told: list[str],
) -> None:
    side = Side(torch.device("cuda"))
    assert side.runs and not Side(torch.device("cpu")).runs
    join = side.run(lambda: told.append("work") or 5)
    told.append("beside it")
    assert join() == 5
    side.run(lambda: None)()
    fork, end = "second waits for first", "first waits for second"
    assert told == [fork, "work", "beside it", end, fork, end]
