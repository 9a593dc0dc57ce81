"""`deepinfer`: the entry of the command line.

Exit codes: 0 done; 1 failed, or something asked for failed; 2 the command line is wrong; 130
interrupted; 141 the reader of stdout went away. Errors are one message on stderr. Only the module
of the command asked for is imported, so that commands without torch start at once.
"""

from __future__ import annotations

import errno
import importlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

import deepinfer
from deepinfer.cli.common import Parser, UsageError, note, tell
from deepinfer.config.load import log_level
from deepinfer.errors import ConfigError, DeepInferError, UnsupportedError

__all__ = ["COMMANDS", "build_parser", "main"]

FAILED: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141

COMMANDS: Final[Mapping[str, str]] = {
    "generate": "continue prompts",
    "chat": "talk with a model",
    "run": "answer a file of requests",
    "inspect": "print what a checkpoint holds",
    "synth": "write a random checkpoint",
    "trace": "write every value of a forward pass",
    "compare": "find where two traces differ",
    "config": "print all settings",
    "doctor": "print what this machine can run",
    "bench": "measure speed",
    "eval": "measure what a checkpoint is worth",
    "plan": "say what fits into a device",
    "sim": "simulate a cluster",
    "check": "prove a promise of the engine",
}
"""Command -> its line in the list of commands; each is the module of that name beside this one."""


def build_parser(command: str | None = None) -> Parser:
    """Return the parser of all commands, with the flags of one.

    Raises UnsupportedError when the command's module is not part of the installation.
    """
    parser = Parser(
        prog="deepinfer",
        description="Offline inference of DeepSeek-V4.1-Flash.",
        epilog="Each command explains itself: deepinfer COMMAND --help.",
    )
    parser.add_argument("--version", action="version", version=f"deepinfer {deepinfer.__version__}")
    subparsers = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", required=True
    )
    for name, line in COMMANDS.items():
        if name != command:
            subparsers.add_parser(name, help=line)
            continue
        module = f"deepinfer.cli.{name}"
        try:
            importlib.import_module(module).add_parser(subparsers)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            raise UnsupportedError(f"this installation has no command '{name}'") from None
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, `sys.argv` by default, and return its exit code."""
    if sys.stderr is None:  # closed by the caller; what was meant for it must not go to stdout
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # open to the end of the process
    if sys.stdout is None:
        note("deepinfer: stdout is closed, and results go there: open it, or use > /dev/null")
        return FAILED
    for stream in (sys.stdout, sys.stderr):
        _make_printable(stream)
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            return _run(sys.argv[1:] if argv is None else list(argv))
        except UsageError as error:
            note(f"deepinfer: {error}")
            return USAGE
        except DeepInferError as error:
            note(f"deepinfer: {error}")
            return FAILED
        except KeyboardInterrupt:
            note("deepinfer: interrupted")
            return INTERRUPTED
        except BrokenPipeError:
            _silence_stdout()
            return BROKEN_PIPE
        except MemoryError:
            note("deepinfer: out of memory")
            return FAILED
        except OSError as error:
            if error.errno is None:
                raise
            where = f": {error.filename}" if error.filename else ""
            advice = "; free some space" if error.errno == errno.ENOSPC else ""
            note(f"deepinfer: {error.strerror}{where}{advice}")
            return FAILED


def _run(argv: Sequence[str]) -> int:
    """Parse and run; argparse's own endings become exit codes."""
    command = next((text for text in argv if not text.startswith("-")), None)
    if not argv:
        tell(build_parser().format_help())
        return USAGE
    try:
        args = build_parser(command).parse_args(argv)
    except SystemExit as stop:  # argparse has printed why
        sys.stdout.flush()
        return stop.code if isinstance(stop.code, int) else USAGE
    _start_log()
    code: int = args.func(args)
    sys.stdout.flush()
    return code


def _silence_stdout() -> None:
    """Send what the interpreter still flushes at its end nowhere."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _make_printable(stream: object) -> None:
    """Let a stream of a narrow encoding show what it cannot print, instead of failing."""
    if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() not in ("utf-8", "utf8"):
        stream.reconfigure(errors="backslashreplace")


def _start_log() -> None:
    try:
        level = log_level()
    except ConfigError as error:
        raise UsageError(str(error)) from error
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("deepinfer").setLevel(level.upper())


def _show_warning(message: Warning | str, *args: object, **kwargs: object) -> None:
    """Print a warning as one line, without the place in the source."""
    note(f"deepinfer: warning: {message}")


if __name__ == "__main__":
    sys.exit(main())
