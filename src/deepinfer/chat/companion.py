"""The companion library deepseek-recipe behind our own types (pure: no torch).

Imported where it is used; only the extra `chat` installs it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import cache
from types import ModuleType

from deepinfer.chat.messages import Conversation, ImagePart, Message, Role, TextPart, Tool
from deepinfer.chat.render import IMAGE, Piece, Prompt
from deepinfer.errors import UnsupportedError

__all__ = ["build", "can_express", "is_installed", "library", "pieces_of", "render"]


@cache
def is_installed() -> bool:
    """Whether the library can be imported."""
    return importlib.util.find_spec("deepseek_recipe") is not None


def library(needed_for: str) -> ModuleType:
    """Return the library; raises UnsupportedError naming the extra when it is absent."""
    try:
        import deepseek_recipe
    except ModuleNotFoundError:
        raise UnsupportedError.missing_extra("deepseek-recipe", "chat", needed_for) from None
    module: ModuleType = deepseek_recipe
    return module


def can_express(conversation: Conversation) -> bool:
    """Whether the library takes such a conversation.

    It knows effort by name only, schemas with integers of 64 bits, and finds the places of images
    by a spelling that no text beside them may hold.
    """
    if conversation.thinking and isinstance(conversation.effort, int):
        return False
    if any(
        message.has_images
        and any(isinstance(p, TextPart) and IMAGE in p.text for p in message.parts)
        for message in conversation.messages
    ):
        return False
    tools = [*conversation.tools, *(tool for m in conversation.messages for tool in m.tools)]
    return all(
        map(_has_small_integers, [conversation.response_format.schema, *map(_schema, tools)])
    )


def _schema(tool: Tool) -> object:
    return tool.parameters


def _has_small_integers(value: object) -> bool:
    if isinstance(value, int):
        return -(2**63) <= value < 2**64
    if isinstance(value, Mapping):
        return all(map(_has_small_integers, value.values()))
    return not isinstance(value, list | tuple) or all(map(_has_small_integers, value))


def render(conversation: Conversation) -> Prompt:
    """Return the prompt as the library renders it, in the same pieces as `chat/render.py`."""
    recipe = library("rendering through the companion library")
    return pieces_of(recipe.DeepseekV41Encoding().render_conversation(build(conversation)))


def build(conversation: Conversation) -> object:
    """Return the conversation in the library's own type."""
    recipe = library("rendering through the companion library")
    response = conversation.response_format
    names = {"minimal": "low", "medium": "high"}
    effort = conversation.effort if isinstance(conversation.effort, str) else None
    built: object = recipe.Conversation(
        [_message(recipe, message) for message in conversation.messages],
        thinking_mode=conversation.thinking,
        tools=[_tool(recipe, tool) for tool in conversation.tools],
        tool_choice=str(conversation.tool_choice),
        reasoning_effort=None if effort is None else names.get(effort, effort),
        response_format="json_object" if response.kind == "json_object" else "text",
        response_schema=response.schema,
        response_regex=response.regex,
    )
    return built


def pieces_of(rendered: object) -> Prompt:
    """Return the pieces of the library's rendered prompt."""
    text: str = rendered.prompt  # type: ignore[attr-defined]  # the library has no types here
    ranges: list[tuple[int, int]] = rendered.special_ranges  # type: ignore[attr-defined]
    pieces = []
    last = 0
    for start, end in ranges:
        pieces += [Piece(text[last:start], False), Piece(text[start:end], True)]
        last = end
    return Prompt.join([*pieces, Piece(text[last:], False)])


def _message(recipe: ModuleType, message: Message) -> object:
    text, images = _content(recipe, message)
    if message.role is Role.SYSTEM:
        return recipe.SystemMessage(
            text, images, [_tool(recipe, tool) for tool in message.tools] or None
        )
    if message.role is Role.USER:
        return recipe.UserMessage(text, images)
    if message.role is Role.TOOL:
        return recipe.ToolMessage(text, message.tool_call_id, images)
    if message.role is Role.LATEST_REMINDER:
        return recipe.LatestReminderMessage(text)
    calls = [recipe.ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls]
    return recipe.AssistantMessage(text, message.reasoning, calls or None, message.prefix)


def _content(recipe: ModuleType, message: Message) -> tuple[str, list[object] | None]:
    """Return the text with a placeholder for each image, and the images."""
    images: list[object] = []
    texts = []
    for part in message.parts:
        if isinstance(part, TextPart):
            texts.append(part.text)
            continue
        texts.append(IMAGE)
        images.append(_image(recipe, part))
    return "\n\n".join(texts), images or None


def _image(recipe: ModuleType, part: ImagePart) -> object:
    if isinstance(part.source, bytes):
        return recipe.BytesImageSource(part.source, part.detail)
    if part.source.startswith("data:"):
        return recipe.DataUrlImageSource(part.source, part.detail)
    return recipe.UrlImageSource(part.source, part.detail)


def _tool(recipe: ModuleType, tool: Tool) -> object:
    parameters = None if tool.parameters is None else dict(tool.parameters)
    return recipe.ToolDefinition(tool.name, tool.description, parameters, tool.strict or None)
