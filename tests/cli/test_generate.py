"""`deepinfer generate`: what is printed where, exit codes, bad input, Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from deepinfer import llm as llm_module
from deepinfer.cli import output
from deepinfer.cli.main import main
from deepinfer.cli.output import Meter, print_results, speed
from deepinfer.config.engine import EngineConfig
from deepinfer.engine.request import Completion, FinishReason, SamplingParams
from deepinfer.llm import Interrupted, Progress

GREEDY = ("--temperature", "0", "--ignore-eos", "--max-tokens", "4", "--device", "cpu")


class FakeLLM:
    """Answers each prompt with ids 5, 6 and the text `<prompt>!`, and keeps what it was given."""

    last: FakeLLM
    answer: Callable[[int, object], Completion] | None = None
    interrupts = False

    def __init__(self, model: str, device: str, config: EngineConfig) -> None:
        type(self).last = self
        self.model, self.device, self.config = model, device, config
        self.closed = False

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True

    def generate(
        self,
        prompts: Sequence[Any],
        params: SamplingParams,
        *,
        progress: Callable[[Progress], None] | None,
    ) -> list[Completion]:
        self.prompts, self.params, self.progress = prompts, params, progress
        results = [(self.answer or answer)(i, prompt) for i, prompt in enumerate(prompts)]
        if self.interrupts:
            raise Interrupted(results)
        return results


def answer(index: int, prompt: object, **changes: Any) -> Completion:
    ids = tuple(prompt) if isinstance(prompt, list) else (1, 2)
    given: dict[str, Any] = {
        "index": index,
        "request_id": index,
        "prompt_token_ids": ids,
        "token_ids": (5, 6),
        "text": f"{prompt}!",
        "finish_reason": FinishReason.LENGTH,
        "ttft_s": 0.5,
        "finish_s": 1.0,
    }
    return Completion(**(given | changes))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    class Fresh(FakeLLM):
        pass

    monkeypatch.setattr(llm_module, "LLM", Fresh)
    return Fresh


def generate(*argv: str, model: str = "golden") -> int:
    return main(["generate", "--model", model, *argv])


def test_the_packaged_checkpoint(golden_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The real engine: recorded tokens of an id prompt, beside one that cannot run."""
    recorded = json.loads((golden_folder / "prompts.json").read_text())["prompts"][0]
    ids = ",".join(map(str, recorded["tokens"]))
    code = generate("--token-ids", ids, "--token-ids", "288", *GREEDY, "--json", "--logprobs")
    shown = capsys.readouterr()
    good, bad = map(json.loads, shown.out.splitlines())
    assert code == 1
    sure = min(4, recorded["robust_greedy_tokens"])
    assert sure and good["token_ids"][:sure] == recorded["greedy_tokens"][:sure]
    assert list(good) == [
        "index",
        "prompt_token_ids",
        "token_ids",
        "text",
        "finish_reason",
        "error",
        "logprobs",
        "timings",
    ]
    assert good["prompt_token_ids"] == recorded["tokens"] and isinstance(good["text"], str)
    assert good["finish_reason"] == "length" and good["error"] is None
    assert len(good["logprobs"]) == 4 and max(good["logprobs"]) <= 0
    assert 0 < good["timings"]["ttft_s"] <= good["timings"]["finish_s"]
    assert good["timings"]["decode_tokens_per_s"] > 0
    assert bad["index"] == 1 and bad["finish_reason"] == "invalid_request"
    assert "288 is outside the vocabulary" in bad["error"] and bad["token_ids"] == []
    assert "prompt 1: token id 288" in shown.err
    assert "random weights" in shown.err
    assert "1 of 2 finished, 4 tokens in" in shown.err and "tokens/s" in shown.err


def test_one_text_alone(fake: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert generate("--prompt", "hi", "--quiet") == 0
    shown = capsys.readouterr()
    assert shown.out == "hi!\n" and shown.err == ""
    assert fake.last.closed and fake.last.progress is None


def test_several_in_order(
    fake: type[FakeLLM], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "p.txt"
    file.write_bytes("zwei ü\r\n".encode())
    assert generate("--prompt", "a", "--prompt-file", str(file), "--prompt=-c") == 0
    assert fake.last.prompts == ["a", "zwei ü", "-c"]
    assert capsys.readouterr().out == "[0] a!\n[1] zwei ü!\n[2] -c!\n"


def test_flags_reach_the_engine(fake: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--token-ids 1,2 --token-ids 3 --max-tokens 9 --min-tokens 2 --temperature 0.5 --top-p 0.9 "
        "--top-k 40 --seed 7 --stop a --stop bc --stop-token-ids 4,5 --ignore-eos --logprobs "
        "--top-logprobs 3 --device cpu --set scheduling.max_num_seqs=3 --set numerics.mode=noq"
    )
    assert generate(*flags.split()) == 0
    engine = fake.last
    assert engine.prompts == [[1, 2], [3]] and engine.device == "cpu"
    assert engine.params == SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        seed=7,
        stop=("a", "bc"),
        stop_token_ids=(4, 5),
        ignore_eos=True,
        logprobs=True,
        top_logprobs=3,
    )
    assert engine.config.scheduling.max_num_seqs == 3 and engine.config.numerics.mode == "noq"


def test_flags_left_out_keep_the_librarys_defaults(fake: type[FakeLLM]) -> None:
    assert generate("--prompt", "x") == 0
    assert fake.last.params == SamplingParams() and fake.last.config == EngineConfig()


def test_stdin(fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from stdin\n")))
    assert generate("--prompt-file", "-") == 0
    assert fake.last.prompts == ["from stdin"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--temperature", "inf"], "temperature"),
        (["--temperature", "warm"], "--temperature"),
        (["--top-p", "0"], "top_p"),
        (["--top-p", "1.5"], "top_p"),
        (["--top-k", "0"], "top_k"),
        (["--max-tokens", "-1"], "max_tokens"),
        (["--min-tokens", "99"], "min_tokens"),
        (["--top-logprobs", "1001"], "top_logprobs"),
        (["--stop", ""], "stop"),
        (["--stop-token-ids", "x"], "--stop-token-ids"),
        (["--set", "cache.blocks=3"], "cache.blocks"),
        (["--device", "gpu"], "expected auto, cpu, cuda"),
        (["--token-ids", "1"], "--token-ids and --prompt are both given"),
        (["--prompt-file", "-", "--prompt-file", "-"], "stdin can be read once"),
        (["--nonsense"], "--nonsense"),
        (["extra"], "extra"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_usage_errors(
    fake: type[FakeLLM], capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert generate("--prompt", "x", *flags) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and message in shown.err
    assert not hasattr(fake, "last") or fake.last is None


def test_bad_parameters_are_told_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate("--prompt", "x", "--temperature", "-1", "--top-p", "0") == 2
    err = capsys.readouterr().err
    assert "temperature" in err and "top_p" in err


@pytest.mark.parametrize("ids", ["1,,2", "1;2", "a", "1.5", ","])
def test_ids_that_are_none(ids: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate("--token-ids", ids) == 2
    assert "as in 1,2,3" in capsys.readouterr().err


def test_nothing_to_continue(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate() == 2
    assert "--prompt-file or --token-ids" in capsys.readouterr().err
    assert main(["generate", "--prompt", "x"]) == 2


@pytest.mark.parametrize("make", ["absent", "empty", "file"])
def test_model_folders_that_are_none(
    tmp_path: Path, make: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / make
    if make == "empty":
        folder.mkdir()
    elif make == "file":
        folder.write_text("x")
    assert generate("--prompt", "x", "--device", "cpu", model=str(folder)) == 1
    err = capsys.readouterr().err
    assert str(folder) in err and "config.json" in err


@pytest.mark.parametrize(("data", "message"), [(None, "No such file"), (b"\xff", "not UTF-8")])
def test_prompt_files_that_cannot_be_read(
    tmp_path: Path, data: bytes | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "p"
    if data is not None:
        file.write_bytes(data)
    good = tmp_path / "good"
    good.write_text("x")
    files = (file, good, tmp_path / "absent")
    flags = [f"--prompt-file={path}" for path in files]
    assert generate(*flags, model=str(tmp_path / "no model either")) == 1
    err = capsys.readouterr().err
    assert message in err and "absent: No such file" in err and "good" not in err
    assert err.startswith("deepinfer: nothing was generated")


def test_failed_requests_beside_good_ones(
    fake: type[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail_second(index: int, prompt: object) -> Completion:
        if index != 1:
            return answer(index, prompt)
        reason = FinishReason.INVALID_REQUEST
        return answer(index, prompt, token_ids=(), text="", finish_reason=reason, error="too bad")

    fake.answer = staticmethod(fail_second)
    assert generate("--prompt", "a", "--prompt", "b", "--prompt", "c", "--quiet") == 1
    shown = capsys.readouterr()
    assert shown.out == "[0] a!\n[2] c!\n"
    assert shown.err == "deepinfer: prompt 1: too bad\n"


@pytest.mark.parametrize("as_json", [False, True])
def test_interrupted(
    fake: type[FakeLLM], capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    def abort_second(index: int, prompt: object) -> Completion:
        reason = FinishReason.ABORT if index == 1 else FinishReason.STOP
        return answer(index, prompt, finish_reason=reason)

    fake.answer, fake.interrupts = staticmethod(abort_second), True
    flags = ["--json"] if as_json else []
    assert generate("--prompt", "a", "--prompt", "b", *flags) == 130
    shown = capsys.readouterr()
    assert "interrupted" in shown.err and "1 of 2 finished" in shown.err
    if as_json:
        reasons = [json.loads(line)["finish_reason"] for line in shown.out.splitlines()]
        assert reasons == ["stop", "abort"]
    else:
        assert shown.out == "[0] a!\n[1] b!\n"
        assert "prompt 1: interrupted, its text is cut" in shown.err


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
def test_ctrl_c_prints_what_is_finished() -> None:
    """A real process: the short prompt is done, the long one runs when the signal comes."""
    code = (
        "import os, signal, sys\n"
        "from deepinfer.cli import output\n"
        "from deepinfer.cli.main import main\n"
        "class Meter(output.Meter):\n"
        "    def __call__(self, state):\n"
        "        if state.num_tokens >= 3: os.kill(os.getpid(), signal.SIGINT)\n"
        "import deepinfer.cli.generate as command\n"
        "command.Meter = Meter\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    flags = ["--token-ids", "999", "--token-ids", "5,6", "--json", "--max-tokens", "500"]
    done = subprocess.run(
        [sys.executable, "-c", code, "generate", "--model", "golden", "--ignore-eos", *flags],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert done.returncode == 130, done.stderr
    first, second = map(json.loads, done.stdout.splitlines())
    assert first["finish_reason"] == "invalid_request"
    assert second["finish_reason"] == "abort" and 3 <= len(second["token_ids"]) < 500
    assert "Traceback" not in done.stderr and "interrupted" in done.stderr


def test_results_without_text_and_with_alternatives(capsys: pytest.CaptureFixture[str]) -> None:
    result = answer(
        0,
        [1],
        text=None,
        logprobs=(-0.5, -1.0),
        top_logprobs=(((5, -0.5), (7, -2.0)), ((9, -0.25), (6, -1.0))),
    )
    print_results([result], False, SamplingParams(top_logprobs=2))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "5,6"
    assert lines[1].split() == ["5", "-0.5000", "of", "5:", "-0.5000,", "7:", "-2.0000"]
    print_results([result], True, SamplingParams(top_logprobs=2))
    found = json.loads(capsys.readouterr().out)
    assert found["text"] is None and found["top_logprobs"][1] == [[9, -0.25], [6, -1.0]]
    assert found["timings"] == {"ttft_s": 0.5, "finish_s": 1.0, "decode_tokens_per_s": 2.0}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_shown_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    print_results([answer(0, "x", text="\x1b[2Ja\tb\nc\x9b")], False, SamplingParams())
    assert terminal.getvalue() == "\\x1b[2Ja\tb\nc\\x9b\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    stream = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    now = 100.0
    monkeypatch.setattr(output.time, "perf_counter", lambda: now)
    meter = Meter()
    meter(Progress(0, 4, 1))
    assert stream.getvalue() == "", "told at once"
    now = 102.5
    meter(Progress(1, 4, 50))
    meter(Progress(2, 4, 51))
    told = stream.getvalue()
    assert told.count("finished") == 1 and "1/4 finished, 50 tokens, 20.0 tokens/s" in told
    now = 105.0
    meter(Progress(1, 4, 50, 2))
    told = stream.getvalue()
    assert "1/4 finished, 2 failed, 50 tokens" in told
    meter.close()
    if is_terminal:
        assert (
            told.startswith("\r[#######...")
            and "\r[" + "#" * 22 + "." in told
            and "\n" not in stream.getvalue()
        )
        assert stream.getvalue().endswith(" \r")
    else:
        assert stream.getvalue() == told and told.endswith("\n")


def test_long_runs_get_sparser_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    now = 0.0
    monkeypatch.setattr(output.time, "perf_counter", lambda: now)
    meter = Meter()
    for second in range(3600):
        now = float(second)
        meter(Progress(0, 1, second))
    assert 30 < stream.getvalue().count("\n") < 80


def test_speed_of_nothing() -> None:
    assert speed([], 0.0) == "0 of 0 finished, 0 tokens in 0.00 s"
    assert speed([answer(0, "x")], 0.5) == "1 of 1 finished, 2 tokens in 0.50 s, 4.0 tokens/s"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--choice", ""], "--choice '' holds an empty text"),
        (["--choice", "a,,b"], "--choice 'a,,b' holds an empty text"),
        (["--regex", "a", "--trigger", ""], "--trigger is empty"),
        (["--regex", "a", "--trigger", "x", "--bound", ""], "--bound is empty"),
    ],
)
def test_empty_texts_of_shapes_are_refused(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a shell's unset variable gives them."""
    assert main(["generate", "--model", "golden", "--prompt", "x", *flags]) == 2
    assert told in capsys.readouterr().err
