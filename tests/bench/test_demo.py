"""What `make demo` prints, at a smaller size."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepinfer.bench import demo


def test_everything_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "_TEXT", replace(demo._TEXT, max_tokens=6))
    monkeypatch.setattr(demo, "_ANSWER", replace(demo._ANSWER, max_tokens=6))
    monkeypatch.setattr(demo, "_HELD_OUT", 1)
    monkeypatch.setattr(demo, "_PROMPT_TOKENS", 8)
    monkeypatch.setattr(demo, "_DRAFTED", replace(demo._DRAFTED, max_tokens=8))
    assert demo.main(["The whale "]) == 0
    shown = capsys.readouterr().out
    assert "\nThe whale " in shown and "\nUser: " in shown and "\nAssistant: " in shown
    for part in ("tokens/s, one stream", "tokens accepted a step", "All of it: "):
        assert part in shown
