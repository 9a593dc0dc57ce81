"""Conversation to prompt text, as V4.1 was trained to see it (pure: no torch).

A prompt is a run of pieces: special tokens by their spelling, and plain text between them, which
stays text whatever it spells. The sentences that the model was trained with are data
(`data/chat/fixed.json`). `chat/companion.py` gives the same pieces through the companion library;
tests hold both to equality. Source: weights specification, 8.3.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

from deepinfer.chat.messages import (
    Conversation,
    Message,
    Role,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
)

__all__ = [
    "ASSISTANT",
    "BOS",
    "CALLS_BEGIN",
    "CALLS_END",
    "DSML",
    "END_THINK",
    "EOS",
    "IMAGE",
    "Piece",
    "Prompt",
    "REMINDER",
    "SYSTEM",
    "THINK",
    "USER",
    "fixed_texts",
    "render",
]

BOS: Final = "<｜begin▁of▁sentence｜>"
EOS: Final = "<｜end▁of▁sentence｜>"
SYSTEM: Final = "<｜System｜>"
USER: Final = "<｜User｜>"
ASSISTANT: Final = "<｜Assistant｜>"
REMINDER: Final = "<｜latest_reminder｜>"
THINK: Final = "<think>"
END_THINK: Final = "</think>"
DSML: Final = "｜DSML｜"
IMAGE: Final = "<｜image｜>"
"""The image placeholder; its spelling differs between tokenizers, so it is resolved by id."""

CALLS_BEGIN: Final = f"\n\n<{DSML} calls>"
CALLS_END: Final = f"</{DSML} calls>"

_MAX_DEPTH: Final = 127  # deepest nesting of arguments that are taken apart
_MARKS: Final = re.compile(f"({re.escape(DSML)}|{THINK}|{END_THINK})")


@dataclass(frozen=True, slots=True)
class Piece:
    """A special token by its spelling, or a run of plain text."""

    text: str
    is_special: bool


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation. Neighbouring plain texts are one piece, and none is empty."""

    pieces: tuple[Piece, ...]

    @property
    def text(self) -> str:
        """The whole as text; encoding it would take spellings inside messages for tokens."""
        return "".join(piece.text for piece in self.pieces)

    @classmethod
    def join(cls, pieces: Iterable[Piece]) -> Prompt:
        """Merge neighbouring plain texts and drop empty ones."""
        merged: list[Piece] = []
        plain: list[str] = []
        for piece in [*pieces, Piece("", True)]:
            if not piece.is_special:
                plain.append(piece.text)
                continue
            if text := "".join(plain):
                merged.append(Piece(text, False))
            plain.clear()
            if piece.text:
                merged.append(piece)
        return cls(tuple(merged))


def render(conversation: Conversation) -> Prompt:
    """Return the prompt of a conversation, up to where the model's answer begins."""
    writer = _Writer()
    writer.special(BOS)
    messages = _without_repeated_reminders(conversation.messages)
    first = messages.pop(0) if messages and messages[0].role is Role.SYSTEM else None
    _write_opening(writer, conversation, first)
    keeps_reasoning = bool(conversation.shown_tools)
    is_alone = len(conversation.messages) == 1 and not _states_form(conversation)
    calls: dict[str, int] = {}
    for turn in _turns(messages):
        role = turn[0].role
        if role in (Role.USER, Role.TOOL):
            _write_user(writer, turn, calls)
        elif role is Role.ASSISTANT:
            keeps = keeps_reasoning or (turn[0].prefix and not is_alone)
            _write_answer(writer, turn[0], conversation.thinking and keeps)
            calls = _places(turn[0].tool_calls) or calls
        else:
            writer.special(SYSTEM if role is Role.SYSTEM else REMINDER)
            writer.content(turn[0])
            _write_update(writer, turn[0].tools)
    if not conversation.continues:
        writer.special(ASSISTANT)
        writer.special(THINK if conversation.thinking else END_THINK)
    if conversation.tool_choice is ToolChoice.REQUIRED:
        writer.marked(CALLS_BEGIN + "\n")
    return Prompt.join(writer.pieces)


@cache
def fixed_texts() -> Mapping[str, str]:
    """Return the sentences that the model was trained with, by their use."""
    text = files("deepinfer").joinpath("data/chat/fixed.json").read_text(encoding="utf-8")
    found: dict[str, str] = json.loads(text)
    return found


class _Writer:
    """Collects pieces."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []

    def special(self, spelling: str) -> None:
        """Add a special token."""
        self.pieces.append(Piece(spelling, True))

    def plain(self, text: str) -> None:
        """Add text that stays text."""
        self.pieces.append(Piece(text, False))

    def marked(self, text: str) -> None:
        """Add text of the format itself, in which spellings are tokens."""
        for place, part in enumerate(_MARKS.split(text)):
            self.pieces.append(Piece(part, place % 2 == 1))

    def content(self, message: Message) -> None:
        """Add text and image parts, an empty line between each two."""
        for place, part in enumerate(message.parts):
            if place:
                self.plain("\n\n")
            if isinstance(part, TextPart):
                self.plain(part.text)
            else:
                self.special(IMAGE)


def _without_repeated_reminders(messages: Sequence[Message]) -> list[Message]:
    """Keep the first of each run of reminders."""
    kept: list[Message] = []
    for message in messages:
        if not (kept and message.role is Role.LATEST_REMINDER is kept[-1].role):
            kept.append(message)
    return kept


def _turns(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield runs of user and tool messages, and every other message alone."""
    turn: list[Message] = []
    for message in messages:
        shared = message.role in (Role.USER, Role.TOOL)
        if turn and not (shared and turn[0].role in (Role.USER, Role.TOOL)):
            yield turn
            turn = []
        turn.append(message)
    if turn:
        yield turn


def _write_opening(writer: _Writer, conversation: Conversation, first: Message | None) -> None:
    """Write the first system turn: effort, text, tools, response format; nothing if all are empty.

    Tools that the message itself declares stand last.
    """
    tools, response = conversation.shown_tools, conversation.response_format
    states_form = _states_form(conversation)
    if not (conversation.thinking or first or tools or states_form):
        return
    fixed = fixed_texts()
    writer.special(SYSTEM)
    if conversation.thinking:
        writer.plain(fixed["effort"].format(effort=conversation.effort_number))
    if first is not None:
        writer.content(first)
    if tools:
        writer.marked(fixed["tools_before"])
        writer.plain(_schemas(tools))
        writer.marked(fixed["tools_after"])
    if states_form:
        writer.plain(fixed["response_format"])
        schema = response.schema if response.kind == "json_schema" else {"type": "json_object"}
        writer.plain(_json(schema))
    if first is not None:
        _write_update(writer, first.tools)


def _states_form(conversation: Conversation) -> bool:
    """Whether the prompt says which form the answer is to have."""
    return conversation.response_format.kind in ("json_object", "json_schema")


def _write_update(writer: _Writer, tools: Sequence[Tool]) -> None:
    """Declare tools within the conversation."""
    if tools:
        writer.plain(fixed_texts()["tools_update"] + _schemas(tools))


def _schemas(tools: Sequence[Tool]) -> str:
    """Return one line for each tool."""
    lines = (
        {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        for tool in tools
    )
    return "\n".join(map(_json, lines))


def _write_user(writer: _Writer, turn: Sequence[Message], calls: Mapping[str, int]) -> None:
    """Write one user turn; tool results are put in the order of the calls before it.

    Other messages keep their places; results of unknown calls go with the first call.
    """
    results = [message for message in turn if message.role is Role.TOOL]
    in_order = iter(sorted(results, key=lambda result: calls.get(result.tool_call_id or "", 0)))
    writer.special(USER)
    for place, message in enumerate(turn):
        if place:
            writer.plain("\n\n")
        if message.role is Role.TOOL:
            writer.plain("<tool_result>")
            writer.content(next(in_order))
            writer.plain("</tool_result>")
        else:
            writer.content(message)


def _places(tool_calls: Sequence[ToolCall]) -> dict[str, int]:
    """Return the place of each call by its id, the first of equal ones."""
    places: dict[str, int] = {}
    for place, call in enumerate(tool_calls):
        places.setdefault(call.id, place)
    return places


def _write_answer(writer: _Writer, message: Message, keeps_reasoning: bool) -> None:
    """Write an assistant turn.

    Earlier reasoning is kept where tools are declared. An answer to be continued keeps its own,
    unless nothing stands before it, and goes on inside it as long as there is nothing after it.
    """
    writer.special(ASSISTANT)
    if keeps_reasoning:
        writer.special(THINK)
        writer.plain(message.reasoning or "")
        if message.prefix and not any(part != TextPart("") for part in message.parts):
            return
    writer.special(END_THINK)
    writer.content(message)
    if message.tool_calls:
        writer.marked(CALLS_BEGIN + "\n")
        for call in message.tool_calls:
            _write_call(writer, call)
        writer.marked(CALLS_END)
    if not message.prefix:
        writer.special(EOS)


def _write_call(writer: _Writer, call: ToolCall) -> None:
    """Write one call; arguments that are no JSON object become one parameter, `arguments`."""
    arguments = _object(call.arguments)
    if arguments is None:
        arguments = {"arguments": call.arguments}
    writer.marked(f'<{DSML} invoke name="')
    writer.plain(call.name)
    writer.plain('">\n')
    for place, (name, value) in enumerate(arguments.items()):
        is_text = isinstance(value, str)
        writer.plain("\n" if place else "")
        writer.marked(f'<{DSML} parameter name="')
        writer.plain(name)
        writer.plain(f'" string="{"true" if is_text else "false"}">')
        writer.plain(value if isinstance(value, str) else _json(value))
        writer.marked(f"</{DSML} parameter>")
    writer.marked(f"\n</{DSML} invoke>\n")


def _json(value: object) -> str:
    """Write JSON as the model saw it: a space after `,` and `:`, every character as it is."""
    return json.dumps(value, ensure_ascii=False)


def _object(text: str) -> dict[str, object] | None:
    """Read a JSON object strictly, None when it is none.

    Refused as well: NaN and infinity, numbers beyond a float, halves of surrogate pairs, nesting
    beyond 127. Integers beyond 64 bits become floats, and -0 is one.
    """
    try:
        found = json.loads(
            text.strip(" \t\r\n"),
            parse_int=_integer,
            parse_float=_finite,
            parse_constant=_refuse,
        )
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not _is_storable(found):
        return None
    return found


def _integer(digits: str) -> int | float:
    if digits == "-0" or len(digits) > 20 or not -(2**63) <= int(digits) < 2**64:
        return _finite(digits)
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        _refuse(digits)
    return value


def _refuse(text: str) -> object:
    raise ValueError(f"{text} is no number of JSON")


def _is_storable(value: object) -> bool:
    """Tell whether nesting and texts are within what the format takes."""
    level: list[object] = [value]
    depth = 0
    while level:
        below: list[object] = []
        for item in level:
            if isinstance(item, str):
                if any("\ud800" <= c <= "\udfff" for c in item):
                    return False
            elif isinstance(item, dict | list):
                if depth == _MAX_DEPTH:
                    return False
                below += [*item.keys(), *item.values()] if isinstance(item, dict) else item
        level = below
        depth += 1
    return True
