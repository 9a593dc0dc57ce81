"""The code in the pages runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deepinfer.chat import companion

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["../README", "chat", "protocol", "structured", "caches"])
def test_code_runs(
    page: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if page == "protocol" and not companion.is_installed():
        pytest.skip("needs deepinfer[chat]")
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {"__name__": page})
    assert capsys.readouterr().out
