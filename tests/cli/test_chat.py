"""`deepinfer chat`: lines in, answers out, commands, Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from deepinfer import llm as llm_module
from deepinfer.chat.decode import Answer, Content, Reasoning
from deepinfer.chat.messages import Message, ToolCall
from deepinfer.cli.main import main
from deepinfer.config.load import resolve_model
from deepinfer.dialog.chat import ChatCompletion, ChatDelta, ChatOptions
from deepinfer.engine.request import Completion, FinishReason, SamplingParams


class FakeLLM:
    """Answers `<last message>!`; to `call` it calls a tool, to `fail` it fails."""

    last: FakeLLM
    interrupts = False

    def __init__(self, model: str, device: str, config: object) -> None:
        type(self).last = self
        self.model = model
        self.asked: list[list[Message]] = []

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams, options: ChatOptions
    ) -> Generator[ChatDelta]:
        self.asked.append(list(messages))
        self.params, self.options = params, options
        text = str(messages[-1].content)
        if options.thinking:
            yield ChatDelta(0, (Reasoning("hm"),))
        for c in text:
            yield ChatDelta(0, (Content(c),))
            if self.interrupts:
                os.kill(os.getpid(), signal.SIGINT)
        calls = (ToolCall("1", "f", '{"a": 1}'),) if text == "call" else ()
        error = "it failed" if text == "fail" else None
        yield ChatDelta(
            0,
            (Content("!"),),
            ChatCompletion(
                Answer("hm" if options.thinking else None, text + "!", calls),
                "tool_calls" if calls else "stop",
                Completion(
                    index=0,
                    request_id=0,
                    prompt_token_ids=(0,),
                    token_ids=(5, 6),
                    finish_reason=FinishReason.STOP,
                    error=error,
                ),
            ),
        )


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function: lines and flags in; exit code, stdout, stderr and the engine out."""

    class Fresh(FakeLLM):
        pass

    monkeypatch.setattr(llm_module, "LLM", Fresh)

    def run(
        lines: str, *flags: str, interrupts: bool = False, with_engine: bool = True
    ) -> tuple[int, str, str, FakeLLM | None]:
        Fresh.interrupts = interrupts
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        code = main(["chat", *flags])
        out, err = capsys.readouterr()
        return code, out, err, Fresh.last if with_engine else None

    return run


def contents(messages: Sequence[Message]) -> list[str]:
    return [str(message.content) for message in messages]


def test_lines_are_messages(talk: Any) -> None:
    code, out, err, engine = talk("one\n\ntwo\\\nlines\n//three")
    assert (code, out, err) == (0, "one!\ntwo\nlines!\n/three!\n", "")
    assert contents(engine.asked[2]) == ["one", "one!", "two\nlines", "two\nlines!", "/three"]
    assert not engine.options.thinking and engine.params.max_tokens == 8192


def test_a_copied_demo_model_does_not_think(talk: Any, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(resolve_model("demo"), folder)
    *_, engine = talk("one\n", "--model", str(folder))
    assert not engine.options.thinking
    (folder / "tokenizer_config.json").write_text("{}")
    *_, engine = talk("one\n", "--model", str(folder))
    assert engine.options.thinking
    (folder / "tokenizer_config.json").write_text('{"thinks": "no"}')
    code, _, err, _ = talk("one\n", "--model", str(folder), with_engine=False)
    assert code == 1 and "thinks: found 'no', expected true or false" in err


def test_flags(talk: Any, tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text('[{"type": "function", "function": {"name": "f"}}]')
    *_, engine = talk(
        "one\n", "--system", "S", "--thinking", "on", "--effort", "37", "--max-tokens", "3",
        "--temperature", "0", "--seed", "5", "--stop", "x", "--tools", str(tools),
    )  # fmt: skip
    assert contents(engine.asked[0]) == ["S", "one"]
    assert engine.options.thinking and engine.options.effort == 37
    assert engine.options.tools[0].name == "f"
    assert engine.params == SamplingParams(max_tokens=3, temperature=0, seed=5, stop="x")
    *_, engine = talk("one\n", "--thinking", "on", "--effort", "max")
    assert engine.params.max_tokens == 131072


def test_undo_reset_system_history(talk: Any) -> None:
    lines = "one\ntwo\n/undo\nthree\n/history\n/system S\nfour\n/reset\n/undo\nfive\n/exit\nsix\n"
    code, _, err, engine = talk(lines)
    assert code == 0
    assert [contents(asked) for asked in engine.asked] == [
        ["one"],
        ["one", "one!", "two"],
        ["one", "one!", "three"],
        ["S", "four"],
        ["S", "five"],
    ]
    assert "user: one\nassistant: one!\nuser: three\nassistant: three!\n" in err
    assert "there is nothing to take back" in err


def test_save_and_load(talk: Any, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    talk(f"one\n/save {file}\n", "--thinking", "on")
    saved = json.loads(file.read_text())["messages"]
    assert saved[1] == {"role": "assistant", "content": "one!", "reasoning_content": "hm"}
    *_, engine = talk("two\n", "--load", str(file), "--system", "S")
    assert contents(engine.asked[0]) == ["S", "one", "one!", "two"]
    *_, engine = talk(f"/load {file}\ntwo\n")
    assert contents(engine.asked[0]) == ["one", "one!", "two"]


def test_tools_are_answered_by_the_next_line(talk: Any) -> None:
    code, out, _, engine = talk("call\nresult\nnext\n")
    assert code == 0
    assert out == 'call!\n[f {"a": 1}]\nresult!\nnext!\n'
    assert engine.asked[1][-1] == Message.tool("result", "1")
    assert engine.asked[1][-2].tool_calls == (ToolCall("1", "f", '{"a": 1}'),)


def test_a_failed_question_is_forgotten(talk: Any) -> None:
    code, _, err, engine = talk("fail\none\n")
    assert code == 1 and "it failed" in err
    assert contents(engine.asked[1]) == ["one"]


def test_ctrl_c_stops_the_answer_only(talk: Any) -> None:
    code, out, err, engine = talk("one\ntwo\n", interrupts=True)
    assert code == 0 and out == "on\ntw\n" and err == "stopped\nstopped\n"
    assert contents(engine.asked[1]) == ["one", "on", "two"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("/bogus", "is no command"),
        ("/save", "needs the name of a file"),
        ("/save /nowhere/x", "cannot write /nowhere/x: No such file"),
        ("/load /nowhere", "cannot read /nowhere: No such file"),
    ],
)
def test_bad_commands_are_told(talk: Any, line: str, complaint: str) -> None:
    code, out, err, _ = talk(line + "\none\n")
    assert complaint in err and out == "one!\n" and code == 1


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "is no JSON"),
        ("3", "must hold"),
        ('[{"role": "wizard"}]', "unknown role 'wizard'"),
    ],
)
def test_bad_files_are_told(talk: Any, tmp_path: Path, content: str, complaint: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(content)
    code, _, err, _ = talk("one\n", "--load", str(file), with_engine=False)
    assert code == 1 and complaint in err


@pytest.mark.parametrize(
    "flags",
    [("--effort", "extreme"), ("--temperature", "-1"), ("--thinking", "maybe"), ("--device", "x")],
)
def test_bad_flags(talk: Any, flags: tuple[str, ...]) -> None:
    assert talk("one\n", *flags, with_engine=False)[0] == 2


def test_with_the_demo_checkpoint() -> None:
    """A process, a pipe, and an interrupt between two answers."""
    command = [sys.executable, "-m", "deepinfer.cli.main", "chat", "--temperature", "0"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write("Tell me a long story.\n")
        process.stdin.flush()
        first = process.stdout.read(1)
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.1)
        out, err = process.communicate("Hi\n", timeout=60)
    assert first and process.returncode == 0, err
    assert out.count("\n") >= 1
