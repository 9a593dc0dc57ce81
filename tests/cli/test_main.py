"""The entry: commands load alone, exit codes, one message for each error; `config`."""

from __future__ import annotations

import errno
import importlib
import json
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import deepinfer
from deepinfer.cli import common
from deepinfer.cli import config as config_command
from deepinfer.cli.main import COMMANDS, build_parser, main
from deepinfer.config.engine import EngineConfig
from deepinfer.errors import CheckpointError, ConfigError
from deepinfer.llm import LLM

HERE = Path(common.__file__).parent
WRITTEN = [name for name in COMMANDS if (HERE / f"{name}.py").is_file()]


def python(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *argv], capture_output=True, text=True, timeout=120, encoding="utf-8"
    )


def test_inspect_loads_neither_torch_nor_other_commands(real_config_file: Path) -> None:
    code = (
        "import sys\n"
        "from deepinfer.cli.main import main\n"
        f"assert main(['inspect', {str(real_config_file)!r}]) == 0\n"
        "names = {n.rpartition('.')[2] for n in sys.modules if n.startswith('deepinfer.cli.')}\n"
        "assert names == {'main', 'common', 'inspect'}, names\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "96,085 tensors" in done.stdout


@pytest.mark.parametrize("argv", [["config"], ["--help"], ["generate", "--help"], ["--version"]])
def test_what_needs_no_torch_loads_none(argv: list[str]) -> None:
    code = (
        "import sys\n"
        "from deepinfer.cli.main import main\n"
        f"assert main({argv!r}) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_the_package_runs_as_a_module() -> None:
    done = python("-m", "deepinfer", "--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"deepinfer {deepinfer.__version__}")
    assert python("-m", "deepinfer", "nosuch").returncode == 2


def test_closed_pipe_is_quiet() -> None:
    command = f"{sys.executable} -m deepinfer.cli.main config --describe"
    piped = subprocess.run(
        ["bash", "-c", f"{command} | true; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert piped.stdout.strip() in ("0", "141")  # 0 when all fitted into the pipe before it closed
    assert piped.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("redirect", "code", "out", "err"),
    [
        ("config --set=a >&-", 1, "", "stdout is closed"),
        ("config --set=a 2>&-", 2, "", ""),
        ("config --set=a 2>/dev/full", 2, "", ""),
        ("config >/dev/full", 1, "", "No space left"),
        ("generate --help >/dev/full", 1, "", "No space left"),
        ("generate --no-such-flag 2>/dev/full", 2, "", ""),
        ("generate --model demo --prompt-file - <&-", 1, "", "stdin is closed"),
    ],
)
def test_streams_that_are_closed_or_full(redirect: str, code: int, out: str, err: str) -> None:
    command = f"{sys.executable} -m deepinfer.cli.main {redirect}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=120, encoding="utf-8"
    )
    assert (done.returncode, done.stdout) == (code, out)
    assert err in done.stderr and "Traceback" not in done.stderr


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"deepinfer {deepinfer.__version__}\n"
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"    {name} " in shown and line in shown for name, line in COMMANDS.items())


@pytest.mark.parametrize(
    ("argv", "mistake"),
    [
        (
            ["generate", "--max-tokens", "1e3"],
            "argument --max-tokens: found '1e3', expected an int",
        ),
        (["chat", "--top-p", "half"], "argument --top-p: found 'half', expected a number"),
        (["inspect", "demo", "--expert-parallel", "0"], "found '0', expected an integer >= 1"),
        (["sim", "run", "--seeds", "0"], "argument --seeds: found '0', expected an integer >= 1"),
        (["trace", "--model", "demo"], "the following arguments are required: --token-ids, --out"),
        (["bench"], "the following arguments are required: FORM"),
    ],
)
def test_a_mistake_is_told_without_all_flags(
    argv: list[str], mistake: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    told = capsys.readouterr()
    first, second = told.err.splitlines()
    command = " ".join(["deepinfer", *argv[: 2 if argv[0] == "sim" else 1]])
    assert first.startswith(f"{command}: ") and mistake in first and told.out == ""
    assert second == f"{command} --help lists what it takes"


def test_no_command_prints_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    told = capsys.readouterr()
    assert told.out == "" and all(name in told.err for name in COMMANDS)


@pytest.mark.parametrize("command", WRITTEN)
def test_each_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: deepinfer {command} ")
    with pytest.raises(SystemExit):
        build_parser(command).parse_args([command, "--no-such-flag"])


def test_config_resolves_every_auto(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["config", "show", "--model", "golden", "--device", "cpu", "--json"]
    assert main([*argv, "--set", "scheduling.max_model_len=512"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {key for key, value in shown.items() if value == "auto"} == {
        "cache.prefix_checkpoints",
        "replay.keep_tokens",
    }  # both parts are off
    assert shown["scheduling.max_model_len"] == 512 and shown["scheduling.overlap"] is False
    with LLM("golden", device="cpu", config={"scheduling.max_model_len": 512}) as llm:
        sizes = llm.sizes
    assert shown["cache.num_blocks"] == sizes.num_blocks - 1
    assert shown["scheduling.chunk_size"] == sizes.chunk_tokens
    again = EngineConfig.from_dotted(shown)
    assert again.to_dotted() == {
        key: tuple(value) if isinstance(value, list) else value for key, value in shown.items()
    }
    assert main(["config", "--device", "cpu"]) == 2


def test_an_absent_command_breaks_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = importlib.import_module

    def find(name: str) -> ModuleType:
        if name == "deepinfer.cli.bench":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return load(name)

    monkeypatch.setattr("deepinfer.cli.main.importlib.import_module", find)
    assert main(["bench", "cpu"]) == 1
    assert "no command 'bench'" in capsys.readouterr().err
    assert main(["config"]) == 0


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["nonsense"],
        ["config", "--nonsense"],
        ["--nonsense", "config"],
        ["config", "--js"],  # flags are not abbreviated
        ["config", "--set", "scheduling.overlp=true"],
        ["config", "--set", "overlap"],
        ["config", "--set", "numerics.mode=fast"],
        ["config", "--config", "/nowhere.toml"],
        ["config", "--set", "parallel.cpu_threads=100000"],
    ],
    ids=" ".join,
)
def test_usage_errors(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err and "Traceback" not in shown.err


def test_near_matches_of_a_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--set", "numerics.mod=noq"]) == 2
    err = capsys.readouterr().err
    assert "numerics.mode" in err and "--set" in err


def raise_(error: BaseException) -> Callable[[object], int]:
    def run(args: object) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (CheckpointError("bad folder", ["a", "b"]), 1, "deepinfer: bad folder\n  - a\n  - b\n"),
        (ConfigError("bad config"), 1, "deepinfer: bad config\n"),
        (common.UsageError("bad flag"), 2, "deepinfer: bad flag\n"),
        (KeyboardInterrupt(), 130, "deepinfer: interrupted\n"),
        (MemoryError(), 1, "deepinfer: out of memory\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/x"),
            1,
            "deepinfer: No space left on device: /x; free some space\n",
        ),
        (PermissionError(errno.EACCES, "Permission denied"), 1, "deepinfer: Permission denied\n"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_are_one_message(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr(config_command, "run", raise_(error))
    assert main(["config"]) == code
    assert capsys.readouterr().err == message


def test_our_own_mistakes_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_command, "run", raise_(AssertionError("a bug")))
    with pytest.raises(AssertionError, match="a bug"):
        main(["config"])


def test_config_lines_are_toml_that_config_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = ["--set", "numerics.mode=noq", "--set", "sampling.banned_token_ids=0..2,7"]
    assert main(["config", *sets, "--describe"]) == 0
    text = capsys.readouterr().out
    assert 'numerics.mode = "noq"' in text
    assert "sampling.banned_token_ids = [0, 1, 2, 7]" in text
    parsed = tomllib.loads(text)
    assert EngineConfig.from_dotted(parsed).to_dotted()["numerics.mode"] == "noq"
    file = tmp_path / "x.toml"
    file.write_text(text)
    assert main(["config", "--config", str(file), "--set", "numerics.mode=official"]) == 0
    again = tomllib.loads(capsys.readouterr().out)
    assert again["numerics"]["mode"] == "official"
    assert again["sampling"] == parsed["sampling"]


def test_config_lines_are_accepted_by_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(EngineConfig().to_dotted())
    plain = [line.replace('"', "").replace(" = ", "=") for line in lines]  # as a shell leaves them
    assert main(["config", *(f"--set={line}" for line in plain)]) == 0
    assert capsys.readouterr().out.splitlines() == lines


def test_config_honours_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEEPINFER_LOGGING_INTERVAL_STEP", "7")
    assert main(["config", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["log.interval_steps"] == 7
    assert main(["config", "--json", "--set", "log.interval_steps=9"]) == 0
    assert json.loads(capsys.readouterr().out)["log.interval_steps"] == 9
    monkeypatch.setenv("DEEPINFER_LOGGING_INTERVAL_STEP", "often")
    assert main(["config"]) == 2
    assert "DEEPINFER_LOGGING_INTERVAL_STEP" in capsys.readouterr().err


def test_unknown_variables_are_one_warning_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEEPINFER_LOG_LEVLE", "debug")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main(["config"]) == 0
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("deepinfer: warning: DEEPINFER_LOG_LEVLE")
    monkeypatch.setenv("DEEPINFER_LOG_LEVEL", "loud")
    assert main(["config"]) == 2
