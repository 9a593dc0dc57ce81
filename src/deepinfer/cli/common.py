"""What the commands share: usage errors, the flags of models and settings, token ids (no torch)."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from deepinfer.config.engine import EngineConfig
from deepinfer.config.load import load_engine_config
from deepinfer.errors import ConfigError

__all__ = [
    "Parser",
    "SubParsers",
    "UsageError",
    "add_sampling",
    "add_settings",
    "decimal",
    "engine_config",
    "integer",
    "interrupt_sets_flag",
    "note",
    "parse_ids",
    "positive",
    "serves",
    "tell",
]

SubParsers = argparse._SubParsersAction  # the only name that argparse has for it


class UsageError(Exception):
    """The command line itself is wrong; the exit code is 2."""


class Parser(argparse.ArgumentParser):
    """An argument parser that takes flags by their full names only, in all subcommands."""

    def __init__(self, **options: Any) -> None:  # whatever argparse takes
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        """End with the mistake and where the flags are told, not with all of them; exit code 2."""
        self.exit(2, f"{self.prog}: {message}\n{self.prog} --help lists what it takes\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help on stdout and errors on stderr; unlike argparse's own, a full stdout fails."""
        if message and file is sys.stdout:
            file.write(message)
        elif message:
            tell(message)


def note(text: str) -> None:
    """Print a line for people: on stderr, so that stdout holds results only."""
    tell(text + "\n")


def tell(text: str) -> None:
    """Write to stderr, line breaks included; a stderr that cannot be written to costs no result."""
    with suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose engine settings."""
    parser.add_argument("--config", metavar="FILE", help="settings as TOML")
    parser.add_argument(
        "--set",
        dest="sets",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="one setting by its dotted key, as `deepinfer config` prints it; repeatable",
    )


def add_sampling(sampling: argparse._ArgumentGroup) -> None:
    """Add the flags of how to draw; what is not given stays None."""
    sampling.add_argument("--max-tokens", type=integer, help="most tokens to generate (16)")
    sampling.add_argument("--min-tokens", type=integer, help="fewest tokens to generate (0)")
    sampling.add_argument("--temperature", type=decimal, help="0 takes the likeliest token (1)")
    sampling.add_argument("--top-p", type=decimal, help="in (0, 1] (1)")
    sampling.add_argument("--top-k", type=integer, help="-1 is off (-1)")
    sampling.add_argument("--seed", type=integer, help="makes the draws repeatable (random)")
    sampling.add_argument(
        "--stop", action="append", metavar="TEXT", help="a text that ends the output; repeatable"
    )
    sampling.add_argument("--stop-token-ids", type=parse_ids, metavar="IDS", help="ids that end it")
    sampling.add_argument(
        "--ignore-eos", action="store_true", default=None, help="go on after end-of-sequence"
    )
    sampling.add_argument(
        "--logprobs", action="store_true", default=None, help="log-probability of each token"
    )
    sampling.add_argument("--top-logprobs", type=integer, metavar="N", help="and of N alternatives")


def engine_config(args: argparse.Namespace, **values: str) -> EngineConfig:
    """Return the settings of a command line; `values` are settings that other flags gave.

    Raises UsageError for what `--config` and `--set` must not hold.
    """
    dotted = {key.replace("__", "."): value for key, value in values.items()}
    try:
        return load_engine_config(toml=args.config, values=dotted, sets=args.sets)
    except ConfigError as error:
        raise UsageError(str(error)) from error


def serves(args: argparse.Namespace, config: EngineConfig) -> bool:
    """Where torchrun or SLURM has started this process as a rank above 0: serve rank 0's engine to
    its end and return True. The command itself is rank 0's.
    """
    if config.mesh.world == 1:
        return False
    from deepinfer.cluster.launch import environment

    found = environment()
    if found is None or found.rank == 0:
        return False
    from deepinfer.llm import LLM

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 ends in order, and this one with it
    with LLM(args.model, args.device, config) as llm:
        llm.serve()
    return True


def parse_ids(text: str) -> list[int]:
    """Read `1,2,3`; spaces may stand around the numbers, and nothing at all is the empty list.

    Raises argparse.ArgumentTypeError, which argparse turns into a usage error.
    """
    parts: Sequence[str] = text.split(",") if text.strip() else ()
    try:
        return [int(part) for part in parts]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"found {text!r}, expected integers with commas between them, as in 1,2,3"
        ) from None


def integer(text: str) -> int:
    """Read an integer; raises argparse.ArgumentTypeError otherwise."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected an integer") from None


def positive(text: str) -> int:
    """Read an integer >= 1; raises argparse.ArgumentTypeError otherwise."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected an integer >= 1")
    return value


def decimal(text: str) -> float:
    """Read a number, NaN and infinities too; raises argparse.ArgumentTypeError otherwise."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number") from None


@contextmanager
def interrupt_sets_flag() -> Iterator[threading.Event]:
    """Let the first Ctrl-C set a flag, so that a step is never torn; the next one interrupts."""
    flag = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if flag.is_set():
            raise KeyboardInterrupt
        flag.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)
