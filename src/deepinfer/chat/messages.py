"""What a conversation is: messages, parts, tools, thinking, response format (pure: no torch).

Everything is frozen and checked when built; mappings of the public protocols' chat form become
messages through `to_message`. Turning a conversation into text is `chat/render.py`, into token ids
`chat/encode.py`. Source: weights specification, 8.3.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

from deepinfer.errors import RequestError

__all__ = [
    "EFFORTS",
    "Content",
    "Conversation",
    "ImagePart",
    "Message",
    "MessageLike",
    "ResponseFormat",
    "Role",
    "TextPart",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "to_mapping",
    "to_message",
    "to_tool",
]

EFFORTS: Final[Mapping[str, int]] = {
    "minimal": 50,
    "low": 50,
    "medium": 75,
    "high": 75,
    "xhigh": 75,
    "max": 100,
}
"""Reasoning effort by name; the prompt holds the number. `high` is the default."""


class Role(StrEnum):
    """Who speaks. `latest_reminder` is an instruction that stands beside the turns."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"
    LATEST_REMINDER = "latest_reminder"


class ToolChoice(StrEnum):
    """Whether the model may, must not or must call a tool."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class TextPart:
    """A run of text in a message."""

    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image in a message: its address, a data URL, or its encoded bytes."""

    source: str | bytes
    detail: str = "high"


Content: TypeAlias = str | Sequence[TextPart | ImagePart]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made.

    id         names the call for its result
    name       the tool
    arguments  its arguments as JSON text, as the model gave them: an object when all went well
    """

    id: str
    name: str
    arguments: str

    def parsed(self) -> dict[str, object] | None:
        """Return the arguments as an object, None when they are not one."""
        try:
            found = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call.

    name         what the model calls it; with a namespace `namespace::name`
    description  what it does, for the model
    parameters   the JSON Schema of its arguments, None for none
    strict       whether calls are to be held to that schema while they are generated; not shown to
                 the model
    """

    name: str
    description: str = ""
    parameters: Mapping[str, object] | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        """Refuse a tool without a name or with a schema that is no JSON; raises RequestError."""
        if not isinstance(self.name, str) or not self.name:
            raise RequestError(f"a tool needs a name, found {self.name!r}")
        _check_json(
            [self.name, self.description], f"name and description of the tool {self.name!r}"
        )
        _check_json(self.parameters, f"the parameters of the tool {self.name!r}")


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """What form the answer is to have.

    kind    `text`, `json_object`, `json_schema` or `regex`
    schema  the JSON Schema of `json_schema`
    regex   the expression of `regex`; it is enforced only, the model is not told
    Raises RequestError when kind and content do not go together.
    """

    kind: str = "text"
    schema: object | None = None
    regex: str | None = None

    def __post_init__(self) -> None:
        """Check that exactly what the kind needs is there."""
        kinds = ("text", "json_object", "json_schema", "regex")
        if self.regex is not None and not isinstance(self.regex, str):
            raise RequestError(
                f"the expression of a response format must be a text, not {self.regex!r}"
            )
        if self.kind not in kinds:
            raise RequestError(
                f"response format {self.kind!r} is unknown: use one of {', '.join(kinds)}"
            )
        if (self.kind == "json_schema") != (self.schema is not None):
            raise RequestError("a schema goes with the response format json_schema, and only there")
        if (self.kind == "regex") != (self.regex is not None):
            raise RequestError("an expression goes with the response format regex, and only there")
        _check_json(self.schema, "the schema of the response format")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message.

    role          who speaks
    content       a text, or text and image parts in order
    reasoning     assistant only: the thinking that led to `content`, None where there was none
    tool_calls    assistant only
    tool_call_id  tool only: the call that this is the result of
    prefix        assistant, last message only: the answer goes on after this text
    tools         system only: tools that are declared from here on
    """

    role: Role
    content: Content = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    prefix: bool = False
    tools: tuple[Tool, ...] = ()

    @classmethod
    def system(cls, content: Content, tools: Iterable[Tool] = ()) -> Message:
        """Return an instruction."""
        return cls(role=Role.SYSTEM, content=content, tools=tuple(tools))

    @classmethod
    def user(cls, content: Content) -> Message:
        """Return what the user says."""
        return cls(role=Role.USER, content=content)

    @classmethod
    def assistant(
        cls,
        content: str = "",
        *,
        reasoning: str | None = None,
        tool_calls: Iterable[ToolCall] = (),
        prefix: bool = False,
    ) -> Message:
        """Return what the model said, or the beginning of what it is to say."""
        return cls(
            role=Role.ASSISTANT,
            content=content,
            reasoning=reasoning,
            tool_calls=tuple(tool_calls),
            prefix=prefix,
        )

    @classmethod
    def tool(cls, content: Content, tool_call_id: str) -> Message:
        """Return the result of a call."""
        return cls(role=Role.TOOL, content=content, tool_call_id=tool_call_id)

    @classmethod
    def reminder(cls, content: str) -> Message:
        """Return a reminder."""
        return cls(role=Role.LATEST_REMINDER, content=content)

    @property
    def parts(self) -> tuple[TextPart | ImagePart, ...]:
        """The content as parts."""
        if isinstance(self.content, str):
            return (TextPart(self.content),)
        return tuple(self.content)

    @property
    def has_images(self) -> bool:
        """Whether any part is an image."""
        return any(isinstance(part, ImagePart) for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages and how the model is to answer them.

    messages         in order, at least one
    thinking         whether the model thinks before it answers
    effort           how much: a name of EFFORTS, a number from 1 to 100, or None for `high`;
                     without thinking it is not used
    tools            declared to the model in the first system turn
    tool_choice      `auto`; `none` leaves the tools out; `required` makes the answer begin inside a
                     call, which goes without thinking only
    response_format  the form of the answer
    Raises RequestError with every problem found.
    """

    messages: tuple[Message, ...]
    thinking: bool = True
    effort: str | int | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice.AUTO
    response_format: ResponseFormat = field(default_factory=ResponseFormat)

    def __post_init__(self) -> None:
        """Check the whole."""
        problems = [*self._setting_problems(), *_message_problems(self.messages)]
        if not self.messages:
            problems.append("there is no message")
        if problems:
            raise RequestError("the conversation cannot be used", problems)

    @classmethod
    def of(
        cls,
        messages: Iterable[MessageLike],
        *,
        thinking: bool = True,
        effort: str | int | None = None,
        tools: Sequence[Tool | Mapping[str, object]] = (),
        tool_choice: str = ToolChoice.AUTO,
        response_format: ResponseFormat | None = None,
    ) -> Conversation:
        """Build one from messages and tools in any accepted form. Raises RequestError."""
        problems: list[str] = []
        found: list[Message] = []
        for place, entry in enumerate(messages):
            try:
                found.append(to_message(entry))
            except RequestError as error:
                problems += [f"message {place}: {p}" for p in error.problems or (error.message,)]
        declared: list[Tool] = []
        for place, tool in enumerate(_sequence(tools, "tools", problems)):
            try:
                declared.append(to_tool(tool))
            except RequestError as error:
                problems.append(f"tool {place}: {error.message}")
        if not isinstance(tool_choice, str) or tool_choice not in set(ToolChoice):
            problems.append(f"tool_choice must be auto, none or required, not {tool_choice!r}")
        thinks: object = thinking
        if not isinstance(thinks, bool):
            problems.append(f"thinking must be True or False, not {thinking!r}")
        if problems:
            raise RequestError("the conversation cannot be used", problems)
        return cls(
            messages=tuple(found),
            thinking=thinking,
            effort=effort,
            tools=tuple(declared),
            tool_choice=ToolChoice(tool_choice),
            response_format=response_format or ResponseFormat(),
        )

    @property
    def effort_number(self) -> int:
        """The number that the prompt states."""
        if self.effort is None:
            return EFFORTS["high"]
        return self.effort if isinstance(self.effort, int) else EFFORTS[self.effort]

    @property
    def shown_tools(self) -> tuple[Tool, ...]:
        """The tools that the prompt declares."""
        return () if self.tool_choice is ToolChoice.NONE else self.tools

    @property
    def continues(self) -> bool:
        """Whether the answer goes on after the last message."""
        return self.messages[-1].prefix

    def _setting_problems(self) -> list[str]:
        problems = []
        effort = self.effort
        if isinstance(effort, bool) or not (
            effort is None
            or (isinstance(effort, int) and 1 <= effort <= 100)
            or (isinstance(effort, str) and effort in EFFORTS)
        ):
            problems.append(
                f"effort must be one of {', '.join(EFFORTS)} or an integer from 1 to 100, "
                f"not {effort!r}"
            )
        names = [tool.name for tool in self.tools]
        twice = sorted({name for name in names if names.count(name) > 1})
        problems += [f"the tool {name!r} is declared twice" for name in twice]
        if self.tool_choice is ToolChoice.REQUIRED:
            if self.thinking:
                problems.append("tool_choice required goes without thinking only: turn it off")
            if not self.tools:
                problems.append("tool_choice required needs tools, and none is declared")
        return problems


MessageLike: TypeAlias = Message | Mapping[str, object]
"""A message, or its form in the chat protocols: {"role": ..., "content": ...}."""


def _message_problems(messages: Sequence[Message]) -> list[str]:
    """Return what is wrong with messages and their order, each with its place."""
    problems: list[str] = []
    calls: set[str] = set()
    for place, message in enumerate(messages):
        found = [*_role_problems(message), *_text_problems(message)]
        if message.prefix and place != len(messages) - 1:
            found.append("prefix is for the last message")
        if message.prefix and message.tool_calls:
            found.append("an answer to be continued (prefix) cannot hold tool calls")
        if message.tool_calls:
            ids = [call.id for call in message.tool_calls]
            calls = set(ids)
            if len(calls) < len(ids):
                found.append("two tool calls have the same id")
        if message.role is Role.TOOL and message.tool_call_id not in calls:
            known = ", ".join(sorted(calls)) or "there is none"
            found.append(
                f"tool result without a call: tool_call_id {message.tool_call_id!r} is none of the "
                f"preceding calls ({known})"
            )
        problems += [f"message {place} ({message.role}): {problem}" for problem in found]
    return problems


def _role_problems(message: Message) -> list[str]:
    """Return the fields that do not belong to the role."""
    role = message.role
    misplaced = (
        ("reasoning", message.reasoning is not None, (Role.ASSISTANT,)),
        ("tool_calls", bool(message.tool_calls), (Role.ASSISTANT,)),
        ("prefix", message.prefix, (Role.ASSISTANT,)),
        ("tool_call_id", message.tool_call_id is not None, (Role.TOOL,)),
        ("tools", bool(message.tools), (Role.SYSTEM,)),
        ("images", message.has_images, (Role.SYSTEM, Role.USER, Role.TOOL)),
    )
    return [
        f"{name} is for {', '.join(roles)} messages"
        for name, given, roles in misplaced
        if given and role not in roles
    ]


def _check_json(value: object, what: str) -> None:
    """Raise RequestError for what JSON cannot hold."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{what} cannot be written as JSON: {error}") from error


def _text_problems(message: Message) -> list[str]:
    texts = [part.text for part in message.parts if isinstance(part, TextPart)]
    texts += [message.reasoning or ""]
    texts += [text for call in message.tool_calls for text in (call.name, call.arguments)]
    if any("\ud800" <= c <= "\udfff" for text in texts for c in text):
        return ["the text holds code points that are no characters (lone surrogates)"]
    return []


def to_message(entry: MessageLike) -> Message:
    """Return a message from its protocol form; a Message is returned as it is.

    Read are role (`developer` is `system`), content (text, null, or parts of type text, image_url
    and image), reasoning_content or reasoning, tool_calls (with a `function` or flat), tool_call_id
    and prefix. Raises RequestError listing all that does not fit.
    """
    if isinstance(entry, Message):
        return entry
    if not isinstance(entry, Mapping):
        raise RequestError(f"a message is a Message or a mapping, not {type(entry).__name__}")
    problems: list[str] = []
    known = {"role", "content", "reasoning_content", "reasoning", "tool_calls", "tool_call_id"}
    unknown = sorted(str(key) for key in entry.keys() - known - {"prefix", "name", "tools"})
    if unknown:
        problems.append(f"unknown keys: {', '.join(unknown)}")
    given = entry.get("role")
    role = "system" if given == "developer" else given
    if not isinstance(role, str) or role not in set(Role):
        problems.append(f"unknown role {given!r}: use one of {', '.join(Role)}")
        role = Role.USER
    content = _content(entry.get("content"), problems)
    reasoning = entry.get("reasoning_content", entry.get("reasoning"))
    if reasoning is not None and not isinstance(reasoning, str):
        problems.append("reasoning_content must be a text")
        reasoning = None
    call_id = entry.get("tool_call_id")
    if call_id is not None and not isinstance(call_id, str):
        problems.append("tool_call_id must be a text")
        call_id = None
    prefix = entry.get("prefix", False)
    if not isinstance(prefix, bool):
        problems.append("prefix must be true or false")
    tools = []
    for tool in _sequence(entry.get("tools"), "tools", problems):
        try:
            tools.append(to_tool(tool))
        except RequestError as error:
            problems.append(error.message)
    calls = _tool_calls(entry.get("tool_calls"), problems)
    if "content" not in entry and "tools" not in entry and role != Role.ASSISTANT:
        problems.append("content is missing: give a text, or parts")
    if problems:
        raise RequestError("the message cannot be used", problems)
    return Message(
        role=Role(str(role)),
        content=content,
        reasoning=reasoning,
        tool_calls=calls,
        tool_call_id=call_id,
        prefix=prefix is True,
        tools=tuple(tools),
    )


def to_mapping(message: Message) -> dict[str, object]:
    """Return a message in its protocol form; `to_message` reads it back.

    Raises RequestError for images given as bytes, which that form cannot hold.
    """
    content: object = message.content
    if not isinstance(content, str):
        content = [_part_mapping(part) for part in message.parts]
    found: dict[str, object] = {"role": str(message.role), "content": content}
    if message.reasoning is not None:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.prefix:
        found["prefix"] = True
    if message.tools:
        found["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.parameters,
                    "strict": tool.strict,
                },
            }
            for tool in message.tools
        ]
    return found


def _part_mapping(part: TextPart | ImagePart) -> dict[str, object]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part.source, bytes):
        raise RequestError("an image given as bytes has no protocol form: give a data URL")
    return {"type": "image_url", "image_url": {"url": part.source, "detail": part.detail}}


def to_tool(entry: object) -> Tool:
    """Return a tool from its protocol form, flat or inside `function`; raises RequestError."""
    if isinstance(entry, Tool):
        return entry
    if not isinstance(entry, Mapping):
        raise RequestError(f"a tool is a Tool or a mapping, not {type(entry).__name__}")
    kind = entry.get("type", "function")
    if kind != "function":
        raise RequestError(f"tools of type {kind!r} are unknown: use function")
    inner = entry.get("function", entry)
    if not isinstance(inner, Mapping):
        raise RequestError("a tool's function must be a mapping")
    name, description = inner.get("name"), inner.get("description")
    parameters, strict = inner.get("parameters"), inner.get("strict")
    if not isinstance(name, str) or not name:
        raise RequestError(f"a tool needs a name, found {name!r}")
    if description is not None and not isinstance(description, str):
        raise RequestError(f"the description of the tool {name!r} must be a text")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise RequestError(f"the parameters of the tool {name!r} must be a JSON Schema")
    return Tool(name, description or "", parameters, strict is True)


def _content(given: object, problems: list[str]) -> Content:
    if given is None:
        return ""
    if isinstance(given, str):
        return given
    parts: list[TextPart | ImagePart] = []
    form = "a text or a list of parts"
    for place, part in enumerate(_sequence(given, "content", problems, form)):
        if isinstance(part, TextPart | ImagePart):
            parts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        value = part.get(kind) if isinstance(part, Mapping) and isinstance(kind, str) else None
        detail = "high"
        if isinstance(value, Mapping):
            detail = str(value.get("detail", detail))
            value = value.get("url")
        if kind == "text" and isinstance(value, str):
            parts.append(TextPart(value))
        elif kind in ("image_url", "image") and isinstance(value, str | bytes):
            parts.append(ImagePart(value, detail))
        else:
            problems.append(
                f"content part {place} must be of type text or image_url with that content, "
                f"not {kind!r}"
            )
    return tuple(parts)


def _tool_calls(given: object, problems: list[str]) -> tuple[ToolCall, ...]:
    calls = []
    for place, call in enumerate(_sequence(given, "tool_calls", problems)):
        if isinstance(call, ToolCall):
            calls.append(call)
            continue
        inner = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(inner, Mapping):
            problems.append(f"tool call {place} must be a mapping with a function")
            continue
        name, arguments = inner.get("name"), inner.get("arguments", "{}")
        if isinstance(arguments, Mapping):
            arguments = json.dumps(arguments, ensure_ascii=False)
        call_id = call.get("id")
        if isinstance(name, str) and isinstance(arguments, str) and isinstance(call_id, str):
            calls.append(ToolCall(call_id, name, arguments))
        else:
            problems.append(f"tool call {place} needs id, name and arguments, all texts")
    return tuple(calls)


def _sequence(
    given: object, name: str, problems: list[str], form: str = "a list"
) -> Sequence[object]:
    if given is None:
        return ()
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        return given
    problems.append(f"{name} must be {form}, not {type(given).__name__}")
    return ()
