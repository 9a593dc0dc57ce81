"""Text to ids and back: policies, special tokens, and pieces that add up to the whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer

from deepinfer.chat.tokenizer import Tokenizer, trained_to_think
from deepinfer.config.load import load_model_config, resolve_model
from deepinfer.config.model import ModelConfig
from deepinfer.errors import TokenizerError

DEMO = resolve_model("golden")
CONFIG = load_model_config(DEMO)
TOKENIZER = Tokenizer.load(DEMO, CONFIG)
RAW = RawTokenizer.from_file(str(DEMO / "tokenizer.json"))
BOS, EOS, PAD = 0, 1, 2
USER = 283
IDS = st.lists(st.integers(0, CONFIG.vocab_size - 1), max_size=40)


def bytes_as_ids(data: bytes) -> list[int]:
    """Return one id for each byte."""
    ids = {TOKENIZER.piece(i): i for i in range(CONFIG.vocab_size) if len(TOKENIZER.piece(i)) == 1}
    return [ids[bytes([b])] for b in data]


def test_every_byte_has_an_id() -> None:
    assert TOKENIZER.decode(bytes_as_ids(bytes(range(128)))) == bytes(range(128)).decode()


@given(IDS, st.booleans())
@example(bytes_as_ids("€".encode()[:2]), True)
@example([*bytes_as_ids("€".encode()[:2]), USER, *bytes_as_ids("€".encode()[2:])], True)
@example([*bytes_as_ids("€".encode()[:2]), USER, *bytes_as_ids("€".encode()[2:])], False)
@example(bytes_as_ids(b"\xf0\x9f\x98A\xff\xc0\xaf\xed\xa0\x80"), True)
def test_decoding_equals_the_librarys(ids: list[int], skip: bool) -> None:
    whole = RAW.decode(ids, skip_special_tokens=skip)
    assert TOKENIZER.decode(ids, skip) == whole
    stream = TOKENIZER.stream(skip)
    pieces = [stream.push(i) for i in ids]
    assert "".join([*pieces, stream.finish()]) == whole


@given(st.binary(max_size=24))
def test_decoding_any_bytes(data: bytes) -> None:
    assert TOKENIZER.decode(bytes_as_ids(data)) == data.decode("utf-8", "replace")


@given(st.text(max_size=30))
def test_round_trip_and_whole_characters(text: str) -> None:
    ids = TOKENIZER.encode_plain(text)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    stream = TOKENIZER.stream()
    seen = ""
    for token_id in bytes_as_ids(text.encode()):
        seen += stream.push(token_id)
        assert text.startswith(seen)
    assert seen == text and stream.finish() == ""


def test_stream_is_new_after_its_end() -> None:
    stream = TOKENIZER.stream()
    half, rest = bytes_as_ids("é".encode())
    assert stream.push(half) == "" and stream.finish() == "\ufffd"
    assert stream.push(half) == "" and stream.push(rest) == "é" and stream.finish() == ""


def test_stream_never_looks_back() -> None:
    """Its state is the unfinished character, however many ids came before."""
    stream = TOKENIZER.stream()
    for token_id in bytes_as_ids("é".encode()) * 2000 + bytes_as_ids("€".encode())[:2]:
        stream.push(token_id)
    assert stream._utf8.getstate()[0] == "€".encode()[:2]
    assert stream.__dict__.keys() == {"_tokenizer", "_skip", "_utf8", "_begun"}


def test_special_tokens() -> None:
    ids = [BOS, *TOKENIZER.encode_plain("hi"), USER, EOS]
    assert TOKENIZER.decode(ids) == "hi"
    shown = TOKENIZER.decode(ids, skip_special_tokens=False)
    assert shown == "<｜begin▁of▁sentence｜>hi<｜User｜><｜end▁of▁sentence｜>"
    assert TOKENIZER.encode(shown) == ids
    assert not set(TOKENIZER.encode_plain(shown)) & {BOS, EOS, USER}
    assert TOKENIZER.decode(TOKENIZER.encode_plain(shown)) == shown
    assert TOKENIZER.is_special(USER) and TOKENIZER.token_id("<｜User｜>") == USER


@pytest.mark.parametrize("token_id", [-1, 288, 2**31, 2**40])
def test_ids_outside_the_vocabulary_have_no_text(token_id: int) -> None:
    assert TOKENIZER.decode([token_id]) == ""


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(TokenizerError, match="surrogates"):
        TOKENIZER.encode("a\ud800")


def test_release_policy(load: Callable[..., Tokenizer]) -> None:
    settings = {"add_bos_token": False, "add_eos_token": False, "pad_token": "anything"}
    tokenizer = load(settings, tokenizer_compatibility="release")
    plain = tokenizer.encode_plain("hi")
    assert tokenizer.encode("hi") == [BOS, *plain]
    assert tokenizer.encode("<｜begin▁of▁sentence｜>hi") == [BOS, *plain]
    assert tokenizer.encode("") == [BOS]
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert ids == (BOS, EOS, PAD)
    assert tokenizer.decode([288, 308]) == (
        "<|place_holder_mm_span_0000|><|place_holder_mm_span_0020|>"
    )
    assert tokenizer.decode([309]) == ""


def test_release_policy_lists_every_disagreement(
    load: Callable[..., Tokenizer], content: dict[str, Any]
) -> None:
    content["added_tokens"] = [t for t in content["added_tokens"] if t["id"] != EOS]
    vocab = content["model"]["vocab"]
    del vocab["<｜end▁of▁sentence｜>"]
    settings = {"add_eos_token": True, "bos_token": {"content": "<s>"}}
    with pytest.raises(TokenizerError) as caught:
        load(settings, tokenizer_compatibility="release")
    problems = "\n".join(caught.value.problems)
    for part in ("id none, expected eos_token_id 1", 'found "<s>"', "add_eos_token", "287 entries"):
        assert part in problems
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize(
    ("settings", "begins"),
    [
        ({"add_bos_token": True}, True),
        ({"add_bos_token": False}, False),
        ({}, False),
        (None, False),
    ],
)
def test_native_policy(
    load: Callable[..., Tokenizer], settings: dict[str, Any] | None, begins: bool
) -> None:
    tokenizer = load(settings)
    assert (tokenizer.encode("hi")[0] == BOS) is begins
    assert tokenizer.decode([288]) == ""


def test_whether_the_model_thinks(load: Callable[..., Tokenizer]) -> None:
    assert load(None).thinks and load({}).thinks and not load({"thinks": False}).thinks
    with pytest.raises(TokenizerError) as caught:
        load({"thinks": "no"})
    assert "thinks: found 'no', expected true or false" in str(caught.value)


def test_training_decides_about_thinking(tmp_path: Path) -> None:
    assert trained_to_think(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    for text, thinks in (("{}", True), ('{"thinks": true}', True), ('{"thinks": false}', False)):
        file.write_text(text)
        assert trained_to_think(tmp_path) is thinks
    for text in ('{"thinks": 0}', "{"):
        file.write_text(text)
        with pytest.raises(TokenizerError, match="tokenizer_config"):
            trained_to_think(tmp_path)


def test_native_policy_takes_the_files_template(
    load: Callable[..., Tokenizer], content: dict[str, Any]
) -> None:
    token = "<｜begin▁of▁sentence｜>"
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": token, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {token: {"id": token, "ids": [BOS], "tokens": [token]}},
    }
    assert load({}).encode("hi")[0] == BOS
    assert load({"add_bos_token": False}).encode("hi")[0] != BOS


def test_whole_words(load: Callable[..., Tokenizer], content: dict[str, Any]) -> None:
    """Without a decoder the library puts a space between tokens."""
    content["decoder"] = None
    tokenizer = load()
    assert tokenizer.decode([20, BOS, 30, 283]) == tokenizer._raw.decode([20, BOS, 30, 283])


def test_unsupported_decoder_and_ids_are_refused_together(
    load: Callable[..., Tokenizer], content: dict[str, Any]
) -> None:
    content["decoder"] = {"type": "Fuse"}
    with pytest.raises(TokenizerError) as caught:
        load(vocab_size=280, image_token_id=279, dspark_noise_token_id=279)
    assert len(caught.value.problems) == 2
    assert "decoder is Fuse" in str(caught.value) and "largest id is 287" in str(caught.value)


def test_absent_and_damaged_files(
    tmp_path: Path, load: Callable[..., Tokenizer], config: ModelConfig
) -> None:
    with pytest.raises(TokenizerError, match=r"holds no tokenizer\.json"):
        Tokenizer.load(tmp_path, config)
    load()
    folder = tmp_path / "model"
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(TokenizerError, match="one JSON object"):
        Tokenizer.load(folder, config)
    (folder / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match="not a valid"):
        Tokenizer.load(folder, config)


@given(text=st.text(max_size=200) | st.text("x ", max_size=400))
def test_a_text_has_at_least_so_many_tokens(text: str) -> None:
    assert TOKENIZER.least_tokens(text) <= len(TOKENIZER.encode_plain(text))


def test_long_texts_have_many_tokens() -> None:
    assert TOKENIZER.least_tokens("x" * 2**20) > 2048
