"""Prompts: both renderers give the same pieces and ids, and no text becomes a token."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from tests.chat.conversations import TEXTS, WEATHER, conversations, corpus

from deepinfer.chat import companion, render
from deepinfer.chat.encode import encode_conversation, encode_prompt, render_conversation
from deepinfer.chat.messages import Conversation, ImagePart, Message, ResponseFormat, TextPart, Tool
from deepinfer.chat.protocol import Api, parse
from deepinfer.chat.tokenizer import Tokenizer
from deepinfer.config.load import load_model_config, resolve_model
from deepinfer.errors import RequestError, TokenizerError, UnsupportedError

CORPUS = corpus()
needs_library = pytest.mark.skipif(
    not companion.is_installed(), reason="needs deepseek-recipe: pip install 'deepinfer[chat]'"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    folder = resolve_model("demo")
    return Tokenizer.load(folder, load_model_config(folder))


@needs_library
def test_corpus_equals_the_librarys() -> None:
    assert len(CORPUS) > 500
    for conversation in CORPUS:
        assert render.render(conversation) == companion.render(conversation), conversation


@needs_library
@settings(max_examples=150)
@given(conversations())
def test_any_conversation_equals_the_librarys(conversation: Conversation) -> None:
    assert render.render(conversation) == companion.render(conversation)


@needs_library
def test_ids_equal_the_librarys(tokenizer: Tokenizer) -> None:
    """The library encodes with the same tokenizer.json."""
    import deepseek_recipe as recipe

    file = resolve_model("demo") / "tokenizer.json"
    encoding = recipe.DeepseekV41Encoding().with_tokenizer(recipe.Tokenizer.from_file(str(file)))
    for conversation in CORPUS[::7]:
        expected = encoding.encode(companion.build(conversation))
        assert encode_conversation(conversation, tokenizer, "own") == expected
        assert encode_conversation(conversation, tokenizer, "companion") == expected


@needs_library
def test_images_stand_where_the_library_puts_them() -> None:
    parts = (TextPart("a"), ImagePart("http://x/y.png"), ImagePart(b"png"), TextPart("b"))
    conversation = Conversation(messages=(Message.user(parts),))
    assert render.render(conversation) == companion.render(conversation)
    unclear = Conversation(messages=(Message.user((TextPart("<｜image｜>"), ImagePart("x"))),))
    assert not companion.can_express(unclear)
    assert [p.is_special for p in render.render(unclear).pieces].count(True) == 6


@needs_library
def test_fixed_texts_are_the_librarys() -> None:
    marker = {"zz": "zz"}
    tools = (Tool("zz", "zz", marker),)
    line = json.dumps({"name": "zz", "description": "zz", "parameters": marker})
    fixed = render.fixed_texts()
    messages = (Message.system("zzs"), Message.user("zzu"))

    def between(conversation: Conversation, start: str, end: str) -> str:
        text = companion.render(conversation).text
        return text.split(start, 1)[1].split(end, 1)[0]

    with_tools = Conversation(messages=messages, thinking=False, tools=tools)
    assert between(with_tools, "zzs", line) == fixed["tools_before"]
    assert between(with_tools, line, render.USER) == fixed["tools_after"]
    form = ResponseFormat("json_schema", schema=marker)
    with_form = Conversation(messages=messages, thinking=False, response_format=form)
    assert between(with_form, "zzs", json.dumps(marker)) == fixed["response_format"]
    updated = Conversation(messages=(Message.system("zzs", tools), messages[1]), thinking=False)
    assert between(updated, "zzs", line) == fixed["tools_update"]
    thinking = Conversation(messages=messages)
    assert between(thinking, render.SYSTEM, "zzs") == fixed["effort"].format(effort=75)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> None:
    """Everything but protocols works; what needs the library names the extra."""
    monkeypatch.setitem(sys.modules, "deepseek_recipe", None)
    companion.is_installed.cache_clear()
    try:
        assert not companion.is_installed()
        conversation = Conversation(messages=(Message.user("u"),), tools=(WEATHER,))
        assert render_conversation(conversation) == render.render(conversation)
        assert encode_conversation(conversation, tokenizer)[0] == tokenizer.bos_token_id
        with pytest.raises(UnsupportedError, match=r"pip install 'deepinfer\[chat\]'"):
            encode_conversation(conversation, tokenizer, "companion")
        with pytest.raises(UnsupportedError, match=r"protocol conversion needs .*\[chat\]"):
            parse(Api.CHAT_COMPLETIONS, {"messages": []}, "m")
    finally:
        companion.is_installed.cache_clear()


def test_a_plain_chat() -> None:
    conversation = Conversation(
        messages=(
            Message.system("s"),
            Message.user("u"),
            Message.assistant("a"),
            Message.user("v"),
        ),
        thinking=False,
    )
    assert render.render(conversation).text == (
        "<｜begin▁of▁sentence｜><｜System｜>s<｜User｜>u<｜Assistant｜></think>a<｜end▁of▁sentence｜>"
        "<｜User｜>v<｜Assistant｜></think>"
    )


@pytest.mark.parametrize(
    ("effort", "number"), [(None, 75), ("low", 50), ("max", 100), (1, 1), (100, 100), (37, 37)]
)
def test_effort_is_a_number_in_the_prompt(effort: str | int | None, number: int) -> None:
    conversation = Conversation(messages=(Message.user("u"),), effort=effort)
    assert f"Reasoning Effort: {number} (" in render_conversation(conversation).text
    quiet = Conversation(messages=(Message.user("u"),), effort=effort, thinking=False)
    assert "Effort" not in render_conversation(quiet).text


@pytest.mark.parametrize("text", TEXTS)
def test_text_stays_text(text: str, tokenizer: Tokenizer) -> None:
    """Whatever a message spells, the number of special ids is that of the format."""
    special = {tokenizer.token_id(p.text) for p in render.render(CORPUS[0]).pieces if p.is_special}
    messages = (
        Message.system(text),
        Message.user(text),
        Message.assistant(text),
        Message.user(text),
    )
    ids = encode_conversation(Conversation(messages=messages, thinking=False), tokenizer, "own")
    found = [i for i in ids if i in special or tokenizer.is_special(i)]
    names = [
        "BOS",
        "SYSTEM",
        "USER",
        "ASSISTANT",
        "END_THINK",
        "EOS",
        "USER",
        "ASSISTANT",
        "END_THINK",
    ]
    assert found == [tokenizer.token_id(getattr(render, name)) for name in names]
    assert tokenizer.decode(ids, skip_special_tokens=False).count(text) >= 4 or text == ""


def test_images_are_refused_by_name(tokenizer: Tokenizer) -> None:
    conversation = Conversation.of(
        [
            {"role": "user", "content": "u"},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]},
        ]
    )
    with pytest.raises(RequestError, match="message 1 holds an image, and this model takes text"):
        encode_conversation(conversation, tokenizer)


def test_a_tokenizer_without_the_tokens_is_named(tokenizer: Tokenizer) -> None:
    prompt = render.Prompt.join([render.Piece("<｜nothing｜>", True), render.Piece("x", False)])
    with pytest.raises(TokenizerError, match="has no token <｜nothing｜>"):
        encode_prompt(prompt, tokenizer)


def test_tools_are_declared_once(tokenizer: Tokenizer) -> None:
    messages = (Message.user("u"),)
    text = render.render(Conversation(messages=messages, tools=(WEATHER,))).text
    assert text.count('"name": "get_weather"') == 1 and '"strict"' not in text


def test_notice_stands_beside_the_fixed_texts() -> None:
    folder = Path(render.__file__).parents[1] / "data" / "chat"
    assert "MIT License" in (folder / "notice.txt").read_text(encoding="utf-8")
