"""What the model said: text to reasoning, content and tool calls, as it comes (pure: no torch).

The result does not depend on how the text is cut. Nothing that the model writes is an error: what
does not follow the format of tool calls is reported as it stands. Source: weights specification,
8.4.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from deepinfer.chat.messages import Conversation, Message, Role, ToolCall, ToolChoice
from deepinfer.chat.render import CALLS_BEGIN, CALLS_END, DSML, END_THINK, THINK, Prompt

__all__ = [
    "Answer",
    "AnswerParser",
    "Content",
    "Event",
    "Reasoning",
    "Start",
    "Unparsed",
    "parser_for",
]


class Start(Enum):
    """Where the prompt left off. Continued text keeps its leading line feeds."""

    REASONING = "reasoning"
    REASONING_CONTINUED = "reasoning_continued"
    CONTENT = "content"
    CONTENT_CONTINUED = "content_continued"
    CALLS = "calls"


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Unparsed:
    """The rest of the output, from where tool calls left their format.

    problem  what is wrong with it; a block that only lacks its end may have no text left
    """

    text: str
    problem: str


Event: TypeAlias = Reasoning | Content | ToolCall | Unparsed


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer.

    reasoning   the thinking, None where the prompt asked for none
    content     the answer itself
    tool_calls  the calls that were complete and well formed
    unparsed    what followed them out of format, None when all was well
    """

    reasoning: str | None
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    unparsed: Unparsed | None = None

    def message(self) -> Message:
        """Return the answer as a message, to go on from."""
        return Message(
            role=Role.ASSISTANT,
            content=self.content,
            reasoning=self.reasoning,
            tool_calls=self.tool_calls,
        )


_OPEN: Final = f"<{DSML}"
_SHARE: Final = (END_THINK, _OPEN)
_INVOKE: Final = f'<{DSML} invoke name="'
_INVOKE_END: Final = f"</{DSML} invoke>"
_PARAMETER: Final = f'<{DSML} parameter name="'
_PARAMETER_END: Final = f"</{DSML} parameter>"
_TYPED: Final = re.compile(r'" string="(true|false)">')
_LONGEST_TYPED: Final = len('" string="false">')
_SPACE: Final = " \t\r\n"


def parser_for(conversation: Conversation, prompt: Prompt) -> AnswerParser:
    """Return the parser of the answer to a rendered conversation.

    Calls are named after the place of the answer, so their ids are the same in every run and
    different within a conversation.
    """
    declared = bool(conversation.shown_tools) or any(m.tools for m in conversation.messages)
    marks = [p.text for p in prompt.pieces if p.is_special and p.text in (THINK, END_THINK)]
    thinks = marks[-1:] == [THINK]
    if conversation.tool_choice is ToolChoice.REQUIRED:
        start = Start.CALLS
    elif thinks:
        start = Start.REASONING_CONTINUED if conversation.continues else Start.REASONING
    else:
        start = Start.CONTENT_CONTINUED if conversation.continues else Start.CONTENT
    if start is Start.REASONING_CONTINUED and not conversation.messages[-1].reasoning:
        start = Start.REASONING
    if start is Start.CONTENT_CONTINUED and not conversation.messages[-1].content:
        start = Start.CONTENT
    place = len(conversation.messages)
    return AnswerParser(start, parses_calls=declared, name_call=lambda i: f"call_{place}_{i}")


class AnswerParser:
    """Splits a growing text. Push pieces, then finish; both return what became certain.

    start         where the prompt left off
    parses_calls  whether tools are declared; without, their markup is content
    name_call     gives the i-th call its id
    """

    def __init__(
        self,
        start: Start = Start.CONTENT,
        *,
        parses_calls: bool = True,
        name_call: Callable[[int], str] = "call_{}".format,
    ) -> None:
        self._marks = _SHARE if parses_calls else (END_THINK,)
        self._calls = _CallParser(name_call)
        self._thinks = start in (Start.REASONING, Start.REASONING_CONTINUED)
        self._has_reasoning = self._thinks
        self._in_calls = start is Start.CALLS
        self._skips_feeds = start in (Start.REASONING, Start.CONTENT)
        self._held = ""
        self._events: list[Event] = []
        self._is_finished = False
        if self._in_calls:
            self._calls.push(CALLS_BEGIN.lstrip("\n"))

    def push(self, text: str) -> list[Event]:
        """Take the next piece of the output and return what it makes certain."""
        events: list[Event] = []
        rest = self._held + text
        self._held = ""
        while rest and not self._in_calls:
            rest = self._split(rest, events)
        if rest:
            events += self._calls.push(rest)
        self._events += events
        return events

    def finish(self) -> list[Event]:
        """Return what was held back. Nothing may be pushed after it."""
        if self._is_finished:
            return []
        self._is_finished = True
        events: list[Event] = []
        self._tell(self._held, events)
        self._held = ""
        if self._in_calls:
            events += self._calls.finish()
        self._events += events
        return events

    @property
    def is_thinking(self) -> bool:
        """Whether what comes next is reasoning."""
        return self._thinks and not self._in_calls

    @property
    def has_called(self) -> bool:
        """Whether a call was complete."""
        return any(isinstance(event, ToolCall) for event in self._events)

    def answer(self) -> Answer:
        """Return all that came so far; the whole answer once finished."""
        reasoning = "".join(e.text for e in self._events if isinstance(e, Reasoning))
        return Answer(
            reasoning=reasoning if self._has_reasoning else None,
            content="".join(e.text for e in self._events if isinstance(e, Content)),
            tool_calls=tuple(e for e in self._events if isinstance(e, ToolCall)),
            unparsed=next((e for e in self._events if isinstance(e, Unparsed)), None),
        )

    def _split(self, text: str, events: list[Event]) -> str:
        """Tell what stands before the first mark and pass it; return what is left to look at."""
        if self._skips_feeds:
            text = text.lstrip("\n")
            if not text:
                return ""
        found = [(text.find(mark), mark) for mark in self._marks]
        place, mark = min(((p, m) for p, m in found if p >= 0), default=(-1, ""))
        if place < 0:
            certain = _certain(text, self._marks)
            self._tell(text[:certain], events)
            self._held = text[certain:]
            return ""
        before, after = text[:place], text[place + len(mark) :]
        if mark == _OPEN:
            self._tell(before.rstrip("\n"), events)
            self._in_calls = True
            return mark + after
        if self._thinks:
            self._tell(before.rstrip("\n"), events)
            self._thinks, self._skips_feeds = False, True
        else:  # a second end of thinking means nothing
            self._tell(before, events)
            self._skips_feeds = False
        return after

    def _tell(self, text: str, events: list[Event]) -> None:
        if text:
            events.append(Reasoning(text) if self._thinks else Content(text))
            self._skips_feeds = False


def _certain(text: str, marks: Sequence[str]) -> int:
    """Return how much of a text without marks can neither begin one nor be line feeds before it."""
    partial = 0
    for mark in marks:
        for size in range(min(len(mark) - 1, len(text)), partial, -1):
            if text.endswith(mark[:size]):
                partial = size
                break
    return len(text[: len(text) - partial].rstrip("\n"))


class _State(Enum):
    BLOCK = "the block of tool calls must begin with its tag"
    CALLS = "the block of tool calls may hold calls only"
    NAME = "a call must have a name"
    PARAMETERS = "a call may hold parameters only"
    KEY = "a parameter must have a name and say whether it is a string"
    VALUE = "a parameter's value must end with its tag"
    DONE = "nothing may follow the block of tool calls"
    BROKEN = ""


class _CallParser:
    """Reads a block of calls strictly; a call is told once it is complete."""

    def __init__(self, name_call: Callable[[int], str]) -> None:
        self._name_call = name_call
        self._state = _State.BLOCK
        self._text = ""  # from the end of the last complete call on
        self._at = 0  # how far _text is taken in
        self._seen = 0  # how far a terminator has been looked for
        self._count = 0
        self._name = self._key = ""
        self._is_string = False
        self._arguments: dict[str, str] = {}
        self._problem = ""

    def push(self, text: str) -> list[Event]:
        """Take more of the block."""
        self._text += text
        events: list[Event] = []
        while self._state is not _State.BROKEN and self._advance(events):
            pass
        return events

    def finish(self) -> list[Event]:
        """Return what is left over, with what is wrong."""
        if self._state is _State.DONE and not self._text.strip(_SPACE):
            return []
        problem = self._problem or "the block of tool calls does not end"
        return [Unparsed(self._text, problem)]

    def _advance(self, events: list[Event]) -> bool:
        """Take one element in; False when more text is needed or the format is left."""
        state = self._state
        if state is _State.BLOCK:
            return self._expect({_OPEN + " calls>": _State.CALLS})
        if state is _State.CALLS:
            if not self._expect({_INVOKE: _State.NAME, CALLS_END: _State.DONE}):
                return False
            if self._state is _State.DONE:
                self._drop()
            return True
        if state is _State.PARAMETERS:
            if not self._expect({_PARAMETER: _State.KEY, _INVOKE_END: _State.CALLS}):
                return False
            if self._state is _State.CALLS:
                self._complete(events)
            return True
        if state is _State.NAME:
            name = self._until('">')
            if name is None:
                return False
            self._name, self._arguments = name, {}
            return self._go(_State.PARAMETERS, bool(name))
        if state is _State.KEY:
            return self._read_key()
        if state is _State.VALUE:
            return self._read_value()
        if self._text.strip(_SPACE):
            self._break()
        return False

    def _expect(self, choices: dict[str, _State]) -> bool:
        """Skip space and take one of some texts in."""
        rest = self._text[self._at :].lstrip(_SPACE)
        for text, state in choices.items():
            if rest.startswith(text):
                self._at = len(self._text) - len(rest) + len(text)
                return self._go(state, True)
        if not any(text.startswith(rest) for text in choices):
            self._break()
        return False

    def _until(self, end: str) -> str | None:
        """Take what stands before a text in, and the text; None when it has not come yet."""
        place = self._text.find(end, max(self._at, self._seen - len(end)))
        if place < 0:
            self._seen = len(self._text)
            return None
        found = self._text[self._at : place]
        self._at = place + len(end)
        return found

    def _read_key(self) -> bool:
        found = _TYPED.search(self._text, max(self._at, self._seen - _LONGEST_TYPED))
        if found is None:
            self._seen = len(self._text)
            return False
        self._key = self._text[self._at : found.start()]
        self._at = found.end()
        self._is_string = found[1] == "true"
        return self._go(_State.VALUE, bool(self._key) and self._key not in self._arguments)

    def _read_value(self) -> bool:
        value = self._until(_PARAMETER_END)
        if value is None:
            return False
        if self._is_string:
            value = json.dumps(value, ensure_ascii=False)
        elif not _is_json(value):
            self._break(f"the value of the parameter {self._key!r} is no JSON")
            return False
        self._arguments[self._key] = value
        return self._go(_State.PARAMETERS, True)

    def _go(self, state: _State, is_allowed: bool) -> bool:
        if is_allowed:
            self._state = state
            self._seen = self._at
        elif self._state is _State.KEY and self._key:
            self._break(f"the parameter {self._key!r} is given twice")
        else:
            self._break()
        return is_allowed

    def _break(self, problem: str = "") -> None:
        self._problem = problem or self._state.value
        self._state = _State.BROKEN

    def _complete(self, events: list[Event]) -> None:
        pairs = (f"{json.dumps(k, ensure_ascii=False)}: {v}" for k, v in self._arguments.items())
        arguments = "{" + ", ".join(pairs) + "}"
        events.append(ToolCall(self._name_call(self._count), self._name, arguments))
        self._count += 1
        self._drop()

    def _drop(self) -> None:
        """Forget what is taken in."""
        self._text = self._text[self._at :]
        self._at = self._seen = 0


def _is_json(text: str) -> bool:
    def refuse(constant: str) -> object:
        raise ValueError(constant)

    try:
        json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return True
