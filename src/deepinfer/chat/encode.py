"""Conversation to token ids (pure: no torch).

The text of messages never becomes a special token: each run of plain text is encoded without the
added vocabulary, and the special tokens between are looked up. Source: weights specification, 8.3.
"""

from __future__ import annotations

from typing import Literal

from deepinfer.chat import companion, render
from deepinfer.chat.messages import Conversation
from deepinfer.chat.render import Prompt
from deepinfer.chat.tokenizer import Tokenizer
from deepinfer.errors import RequestError, TokenizerError

__all__ = [
    "Renderer",
    "encode_conversation",
    "encode_prompt",
    "refuse_images",
    "refuse_long",
    "render_conversation",
]

Renderer = Literal["auto", "own", "companion"]


def render_conversation(conversation: Conversation, renderer: Renderer = "auto") -> Prompt:
    """Return the prompt of a conversation as pieces.

    renderer  `companion`: the library deepseek-recipe; `own`: this package; `auto`: the library
              where it is installed and can express the conversation (effort by number is ours
              alone). Both give the same pieces
    Raises UnsupportedError when `companion` is asked for and absent.
    """
    if renderer == "own":
        return render.render(conversation)
    if renderer == "companion" or (
        companion.is_installed() and companion.can_express(conversation)
    ):
        return companion.render(conversation)
    return render.render(conversation)


def encode_conversation(
    conversation: Conversation, tokenizer: Tokenizer, renderer: Renderer = "auto"
) -> list[int]:
    """Return the token ids of a conversation, up to where the model's answer begins.

    They begin with BOS: give them to `LLM.generate` as ids. Raises RequestError for images, which
    need a checkpoint with an image tower, and TokenizerError when the checkpoint's tokenizer lacks
    a token that the prompt needs.
    """
    refuse_images(conversation)
    return encode_prompt(render_conversation(conversation, renderer), tokenizer)


def refuse_images(conversation: Conversation) -> None:
    """Raise RequestError for a conversation with images: no checkpoint here can see them."""
    images = [i for i, message in enumerate(conversation.messages) if message.has_images]
    if images:
        raise RequestError(
            f"message {images[0]} holds an image, and this model takes text only: leave images out"
        )


def refuse_long(text: str, tokenizer: Tokenizer, max_model_len: int) -> None:
    """Raise RequestError for a text that cannot fit, before any work is spent on it."""
    least = tokenizer.least_tokens(text)
    if least > max_model_len:
        raise RequestError(
            f"the text has at least {least} tokens, and the context holds {max_model_len}: shorten "
            "it"
        )


def encode_prompt(
    prompt: Prompt, tokenizer: Tokenizer, max_model_len: int | None = None
) -> list[int]:
    """Return the token ids of a rendered prompt. Raises TokenizerError as encode_conversation.

    max_model_len  refuses what cannot fit, with RequestError, as far as its size alone tells
    """
    if max_model_len is not None:
        refuse_long(prompt.text, tokenizer, max_model_len)
    special = {piece.text for piece in prompt.pieces if piece.is_special}
    ids = {spelling: tokenizer.token_id(spelling) for spelling in special}
    missing = sorted(spelling for spelling, token_id in ids.items() if token_id is None)
    if missing:
        raise TokenizerError(
            f"the checkpoint's tokenizer has no token {', '.join(missing)}, which a conversation "
            "needs: this checkpoint continues plain prompts only"
        )
    found: list[int] = []
    for piece in prompt.pieces:
        token_id = ids.get(piece.text) if piece.is_special else None
        if token_id is not None:
            found.append(token_id)
        else:
            found += tokenizer.encode_plain(piece.text)
    return found
