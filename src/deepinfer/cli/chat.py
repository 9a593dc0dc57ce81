"""`deepinfer chat`: a conversation in the terminal, or line by line through a pipe.

Answers go to stdout as they come; the prompt sign, thinking and speed go to stderr. Ctrl-C during
an answer stops that answer only.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from deepinfer.chat.decode import Content, Reasoning
from deepinfer.chat.messages import Message, Role, Tool, to_mapping, to_message, to_tool
from deepinfer.chat.tokenizer import trained_to_think
from deepinfer.cli.common import (
    SubParsers,
    UsageError,
    add_settings,
    decimal,
    engine_config,
    integer,
    interrupt_sets_flag,
    note,
    parse_ids,
    serves,
    tell,
)
from deepinfer.cli.output import visible
from deepinfer.cli.shapes import add_shape_flags, approximations, shape_of
from deepinfer.config.load import DEMO_MODEL, GOLDEN_MODEL, resolve_model
from deepinfer.dialog.chat import ChatCompletion, ChatOptions, check_options, default_max_tokens
from deepinfer.engine.request import SamplingParams
from deepinfer.errors import ConfigError, RequestError, json_problem, unique_keys

if TYPE_CHECKING:
    from deepinfer.llm import LLM

__all__ = ["add_parser", "run"]

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_HELP: Final = """\
/undo          take the last question and its answer back
/history       show the conversation
/save FILE     write the conversation as JSON; /load FILE reads it
/system TEXT   set the instruction, and begin anew
/reset         begin anew
/exit          leave, as Ctrl-D does
A line that ends with \\ goes on in the next one; // begins a message with a slash.
Ctrl-C stops an answer."""


def add_parser(subparsers: SubParsers[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "chat",
        help="talk with a model",
        description="Talk with a model: every line of stdin is a message, or a command that begins "
        "with a slash (/help lists them).",
    )
    parser.add_argument(
        "--model", default=DEMO_MODEL, help=f"checkpoint folder, or a packaged one ({DEMO_MODEL})"
    )
    parser.add_argument("--system", metavar="TEXT", help="an instruction that stands first")
    parser.add_argument("--load", metavar="FILE", help="a conversation that /save wrote")
    parser.add_argument(
        "--tools", metavar="FILE", help="tools as a JSON list; you type the results of calls"
    )
    parser.add_argument(
        "--thinking",
        choices=("auto", "on", "off"),
        default="auto",
        help="whether it thinks before it answers (auto: as it was trained, `thinks` of "
        "tokenizer_config.json, else on)",
    )
    parser.add_argument("--effort", help="how much: low, high, max or a number from 1 to 100")
    parser.add_argument("--hide-thinking", action="store_true", help="do not show what it thinks")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=integer, help="most tokens of an answer")
    sampling.add_argument("--temperature", type=decimal, help="0 takes the likeliest token (1)")
    sampling.add_argument("--top-p", type=decimal, help="in (0, 1] (1)")
    sampling.add_argument("--top-k", type=integer, help="-1 is off (-1)")
    sampling.add_argument("--seed", type=integer, help="makes the draws repeatable (random)")
    sampling.add_argument(
        "--stop", action="append", metavar="TEXT", help="a text that ends an answer; repeatable"
    )
    sampling.add_argument("--stop-token-ids", type=parse_ids, metavar="IDS", help="ids that end it")
    add_shape_flags(parser)
    engine = parser.add_argument_group("engine")
    engine.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
    add_settings(parser)
    parser.add_argument("--quiet", action="store_true", help="no greeting, no speed")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Talk until stdin ends."""
    options = _options(args, resolve_model(args.model))
    params = _params(args, options)
    config = engine_config(args)
    history = _read_history(args.load) if args.load else []
    if args.system is not None:
        first = history[1:] if history and history[0].role is Role.SYSTEM else history
        history = [Message.system(args.system), *first]
    if serves(args, config):
        return 0
    if sys.stdin is None:
        raise RequestError("stdin is closed, and messages come from there")

    from deepinfer.device import pick_device
    from deepinfer.llm import LLM

    try:
        pick_device(args.device)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    with LLM(args.model, args.device, config) as llm:
        terminal = _Terminal(shows_thinking=not args.hide_thinking, quiet=args.quiet)
        if not args.quiet:
            if args.model == GOLDEN_MODEL:
                note(f"the {GOLDEN_MODEL} checkpoint has random weights: its text means nothing")
            if options.structured is not None:
                for line in approximations(llm.structured_report(options.structured)):
                    note(line)
            if terminal.is_interactive:
                note("/help lists the commands, Ctrl-D leaves")
        return _Session(llm, options, params, terminal, history).run()


class _Session:
    """The conversation so far, and what each line does to it."""

    def __init__(
        self,
        llm: LLM,
        options: ChatOptions,
        params: SamplingParams,
        terminal: _Terminal,
        history: list[Message],
    ) -> None:
        self.history = history
        self.failed = False
        self._llm = llm
        self._options = options
        self._params = params
        self._terminal = terminal

    def run(self) -> int:
        """Take lines until there are no more; return the exit code."""
        while (line := self._terminal.read("> ")) is not None:
            if line.startswith("/") and not line.startswith("//"):
                name, _, rest = line.partition(" ")
                if name in ("/exit", "/quit"):
                    break
                self._command(name, rest.strip())
            elif line.strip():
                self._ask(Message.user(line[1:] if line.startswith("//") else line))
        return 1 if self.failed else 0

    def _command(self, name: str, rest: str) -> None:
        if name == "/help":
            note(_HELP)
        elif name == "/undo":
            self._undo()
        elif name == "/history":
            for message in self.history:
                self._terminal.show(message)
        elif name == "/reset":
            self.history = [m for m in self.history[:1] if m.role is Role.SYSTEM]
        elif name == "/system":
            self.history = [Message.system(rest)] if rest else []
        elif name in ("/save", "/load") and not rest:
            self._complain(f"{name} needs the name of a file")
        elif name == "/save":
            self._save(Path(rest).expanduser())
        elif name == "/load":
            try:
                self.history = _read_history(rest)
            except RequestError as error:
                self._complain(str(error))
        else:
            self._complain(f"{name} is no command: /help lists them")

    def _complain(self, text: str) -> None:
        note(text)
        self.failed = True

    def _undo(self) -> None:
        """Go back to before the last message of the user."""
        asked = [i for i, message in enumerate(self.history) if message.role is Role.USER]
        if asked:
            del self.history[asked[-1] :]
        else:
            note("there is nothing to take back")

    def _save(self, file: Path) -> None:
        try:
            text = json.dumps({"messages": list(map(to_mapping, self.history))}, indent=1)
            file.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            self._complain(f"cannot write {file}: {error.strerror or error}")

    def _ask(self, message: Message) -> None:
        """Put a message to the model, and the results of the tools that it calls."""
        before = len(self.history)
        self.history.append(message)
        while True:
            answer, error = self._answer()
            if error is not None:
                self._complain(f"deepinfer: {error}")
                del self.history[before:]
                return
            self.history.append(answer)
            for call in answer.tool_calls:
                self._terminal.say(f"[{call.name} {call.arguments}]\n")
                line = self._terminal.read(f"{call.name}> ")
                if line is None:
                    return
                self.history.append(Message.tool(line, call.id))
            if not answer.tool_calls:
                return

    def _answer(self) -> tuple[Message, str | None]:
        """Stream one answer and return it, with what went wrong; a stopped one is what was said."""
        terminal, said, thought = self._terminal, "", ""
        result: ChatCompletion | None = None
        start = time.perf_counter()
        with interrupt_sets_flag() as stopped:
            deltas = self._llm.stream_chat(self.history, self._params, self._options)
            with closing(deltas):
                for delta in deltas:
                    for event in delta.events:
                        if isinstance(event, Reasoning):
                            thought += event.text
                            terminal.think(event.text)
                        elif isinstance(event, Content):
                            said += event.text
                            terminal.say(event.text)
                    result = delta.result
                    if stopped.is_set():
                        break
        terminal.end_answer()
        if result is None:
            note("stopped")
            return Message.assistant(said, reasoning=thought or None), None
        terminal.tell_speed(len(result.completion.token_ids), time.perf_counter() - start)
        if result.finish_reason == "length" and not terminal.quiet:
            note("the answer was cut: it reached its limit (--max-tokens, or the model's)")
        if result.answer.unparsed is not None:
            note(f"a tool call cannot be read: {result.answer.unparsed.problem}")
        return result.message, result.error


class _Terminal:
    """Where lines come from and where answers go."""

    def __init__(self, *, shows_thinking: bool, quiet: bool) -> None:
        self.quiet = quiet
        self.is_interactive = sys.stdin.isatty()
        self._shows_thinking = shows_thinking and sys.stderr.isatty()
        self._is_thinking = False
        self._ends_line = True
        self._interrupted = False

    def read(self, sign: str) -> str | None:
        """Return the next message, None at the end; a line ending with a backslash goes on."""
        lines: list[str] = []
        while True:
            try:
                line = self._line(sign if not lines else ". ")
            except KeyboardInterrupt:
                if not self.is_interactive or self._interrupted:
                    raise
                self._interrupted = True
                note("\nCtrl-D or /exit leaves; Ctrl-C once more does, too")
                lines.clear()
                continue
            self._interrupted = False
            if line is None:
                return "\n".join(lines) if lines else None
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    def _line(self, sign: str) -> str | None:
        if not self.is_interactive:
            found = sys.stdin.readline()
            return found.rstrip("\r\n") if found else None
        with suppress(ImportError):
            import readline  # noqa: F401  # line editing and the keys that go back in history
        try:
            return input(sign)
        except EOFError:
            tell("\n")
            return None

    def say(self, text: str) -> None:
        """Show a piece of an answer."""
        self._end_thinking()
        if text:
            print(visible(text), end="", flush=True)
            self._ends_line = text.endswith("\n")

    def think(self, text: str) -> None:
        """Show a piece of thinking."""
        if self._shows_thinking:
            tell(text if self._is_thinking else _DIM + text)
            self._is_thinking = True

    def end_answer(self) -> None:
        """End the line that an answer is on."""
        self._end_thinking()
        if not self._ends_line:
            print(flush=True)
        self._ends_line = True

    def _end_thinking(self) -> None:
        if self._is_thinking:
            tell(_PLAIN + "\n")
            self._is_thinking = False

    def show(self, message: Message) -> None:
        """Show a message of the history."""
        text = message.content if isinstance(message.content, str) else "(parts)"
        calls = "".join(f" [{call.name} {call.arguments}]" for call in message.tool_calls)
        note(f"{message.role}: {visible(text)}{calls}")

    def tell_speed(self, num_tokens: int, took_s: float) -> None:
        """Say how fast an answer was."""
        if not self.quiet and self.is_interactive and num_tokens and took_s > 0:
            note(f"({num_tokens} tokens, {num_tokens / took_s:.1f} tokens/s)")


def _options(args: argparse.Namespace, folder: Path) -> ChatOptions:
    """Return how to answer; raises UsageError, TokenizerError."""
    given: str | None = args.effort
    effort = int(given) if given is not None and given.isdecimal() else given
    thinking = args.thinking == "on" or (args.thinking == "auto" and trained_to_think(folder))
    tools = _read_tools(args.tools) if args.tools else []
    structured = shape_of(args)
    options = ChatOptions(thinking=thinking, effort=effort, tools=tools, structured=structured)
    try:
        check_options(options)
    except RequestError as error:
        raise UsageError(str(error)) from error
    return options


def _params(args: argparse.Namespace, options: ChatOptions) -> SamplingParams:
    """Return the parameters that the flags gave; raises UsageError listing every bad one."""
    names = "max_tokens temperature top_p top_k seed stop stop_token_ids"
    given = {name: getattr(args, name) for name in names.split()}
    given = {name: value for name, value in given.items() if value is not None}
    given.setdefault("max_tokens", default_max_tokens(options.thinking, options.effort))
    try:
        return SamplingParams(**given)
    except RequestError as error:
        raise UsageError(str(error)) from error


def _read_json(name: str) -> object:
    """Read a JSON file; raises RequestError."""
    file = Path(name).expanduser()
    try:
        return json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
    except OSError as error:
        raise RequestError(f"cannot read {name}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name} is no JSON: {json_problem(error)}") from error


def _read_tools(name: str) -> list[Tool]:
    found = _read_json(name)
    if not isinstance(found, list):
        raise RequestError(f"{name} must hold a list of tools")
    return [to_tool(entry) for entry in found]


def _read_history(name: str) -> list[Message]:
    """Read what /save wrote, or a plain list of messages; raises RequestError."""
    found = _read_json(name)
    messages = found.get("messages") if isinstance(found, dict) else found
    if not isinstance(messages, list):
        raise RequestError(f'{name} must hold {{"messages": [...]}}')
    try:
        return [to_message(entry) for entry in messages]
    except RequestError as error:
        raise RequestError(f"{name}: {error.message}", error.problems) from error
