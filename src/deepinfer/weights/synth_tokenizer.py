"""A tokenizer for a random checkpoint: exactly `vocab_size` entries, a given number of Engram keys.

Engram merges ids whose text is equal up to case, accents and white space (weights specification,
5.1). So the number of distinct keys is chosen by how many entries are twins of others: ` t` and `T`
of `t`, runs of spaces of one space. Byte-level BPE where the sizes permit, so that every text
encodes; whole words otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count, islice, product
from string import ascii_lowercase, ascii_uppercase
from typing import Final

from deepinfer.config.model import ModelConfig
from deepinfer.errors import ConfigError

__all__ = ["synthetic_tokenizer"]

_BYTES: Final = 256
# The keys of the 256 single bytes: A-Z join a-z; tab, line feed and carriage return join the space.
_BYTE_KEYS: Final = _BYTES - len(ascii_uppercase) - 3
_SPACE: Final = "Ġ"
# (content, is special), most useful first; they take the highest free ids.
_CHAT: Final = (
    ("<｜User｜>", True),
    ("<｜Assistant｜>", True),
    ("<think>", False),
    ("</think>", False),
    ("<｜System｜>", True),
    ("｜DSML｜", False),
    ("<｜latest_reminder｜>", True),
)
_BOS: Final = "<｜begin▁of▁sentence｜>"
_EOS: Final = "<｜end▁of▁sentence｜>"
_PAD: Final = "<｜▁pad▁｜>"
_FREQUENT_PAIRS: Final = tuple(
    """
    th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le
    """.split()
)


def synthetic_tokenizer(config: ModelConfig) -> dict[str, bytes]:
    """Return the files `tokenizer.json` and `tokenizer_config.json`.

    Special tokens stand at the ids of the config. Without Engram layers the number of keys is free.
    Raises ConfigError when no tokenizer of this size has `engram_compressed_vocab_size` keys.
    """
    vocab = config.vocab_size
    fixed = _fixed_specials(config)
    keys = config.engram_compressed_vocab_size if config.engram_layer_ids else None
    least = len(fixed) + (len(fixed) < vocab)
    if keys is not None and not least <= keys <= vocab:
        raise ConfigError(
            "no synthetic tokenizer fits the config",
            [
                f"text_config.engram_compressed_vocab_size: found {keys}, expected {least} to "
                f"{vocab} for a vocabulary of {vocab} with {len(fixed)} special tokens"
            ],
        )
    twins_of_bytes = _BYTES - _BYTE_KEYS
    room = vocab - _BYTES - len(fixed)
    if keys is not None:
        room = min(room, keys - _BYTE_KEYS - len(fixed))
    if room < 0 or (keys is not None and vocab - keys < twins_of_bytes):
        specials = fixed
        model = _word_level(config, fixed, keys)
    else:
        specials = _with_chat(fixed, vocab, room)
        model = _byte_level(vocab, specials, keys)
    return {
        "tokenizer.json": _dump(_tokenizer(model, specials)),
        "tokenizer_config.json": _dump(_settings(config, specials)),
    }


def _dump(value: object) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def _fixed_specials(config: ModelConfig) -> dict[int, tuple[str, bool]]:
    """Return id -> (content, is special) of the ids that the config names; the first role wins."""
    fixed = {config.bos_token_id: (_BOS, True)}
    fixed.setdefault(config.eos_token_id, (_EOS, True))
    fixed.setdefault(config.pad_token_id, (_PAD, True))
    if config.num_nextn_predict_layers:
        fixed.setdefault(config.dspark_noise_token_id, ("<｜System｜>", True))
    fixed.setdefault(config.image_token_id, ("<｜image｜>", False))
    return fixed


def _with_chat(
    fixed: dict[int, tuple[str, bool]], vocab: int, room: int
) -> dict[int, tuple[str, bool]]:
    """Add at most `room` chat tokens, at the highest free ids."""
    present = {content for content, _ in fixed.values()}
    wanted = [entry for entry in _CHAT if entry[0] not in present][:room]
    free = (i for i in range(vocab - 1, -1, -1) if i not in fixed)
    ids = sorted(islice(free, len(wanted)))
    return fixed | dict(zip(ids, wanted, strict=True))


def _byte_level(
    vocab: int, specials: dict[int, tuple[str, bool]], keys: int | None
) -> dict[str, object]:
    """Return a BPE model of the 256 bytes, merges with keys of their own, and twins."""
    extra = vocab - _BYTES - len(specials)
    own = extra if keys is None else keys - _BYTE_KEYS - len(specials)
    bases = list(islice(_bases(), own))
    pairs = [(base[:-1], base[-1]) for base in bases]
    pairs += islice(_twins(bases), extra - own)
    tokens = [*_byte_alphabet(), *(left + right for left, right in pairs)]
    assert len(set(tokens)) == len(tokens), "a token came twice"
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": _numbered(vocab, specials, tokens),
        "merges": [list(pair) for pair in pairs],
    }


def _byte_alphabet() -> list[str]:
    """Return the character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = count(0x100)
    return [chr(b) if b in printable else chr(next(others)) for b in range(_BYTES)]


def _bases() -> Iterator[str]:
    """Yield strings of two and more lower-case letters, shorter ones first."""
    yield from _FREQUENT_PAIRS
    for length in count(2):
        for letters in product(ascii_lowercase, repeat=length):
            text = "".join(letters)
            if length > 2 or text not in _FREQUENT_PAIRS:
                yield text


def _twins(bases: list[str]) -> Iterator[tuple[str, str]]:
    """Yield merges whose key another entry has: a space in front, a capital, a run of spaces."""
    for letter in ascii_lowercase + ascii_uppercase:
        yield _SPACE, letter
    for base in bases:
        yield _SPACE, base
    known = set(bases)
    for base in bases:
        if len(base) == 2 or base[1:] in known:
            yield base[0].upper(), base[1:]
    for length in count(1):
        yield _SPACE * length, _SPACE


def _word_level(
    config: ModelConfig, specials: dict[int, tuple[str, bool]], keys: int | None
) -> dict[str, object]:
    """Return a model of whole words; the first word stands for unknown ones."""
    num_words = config.vocab_size - len(specials)
    bases = num_words if keys is None else keys - len(specials)
    words: list[str] = []
    if num_words:
        spellings = -(-num_words // bases)
        length = 1
        while 26**length < bases or 2**length < spellings:
            length += 1
        words = [_word(i % bases, i // bases, length) for i in range(num_words)]
    vocab = _numbered(config.vocab_size, specials, words)
    return {"type": "WordLevel", "vocab": vocab, "unk_token": next(iter([*words, *vocab]))}


def _word(number: int, spelling: int, length: int) -> str:
    """Return a word of `length` letters, chosen by `number`; `spelling` chooses its capitals."""
    letters = ""
    for place in range(length):
        number, digit = divmod(number, 26)
        letter = ascii_lowercase[digit]
        letters += letter.upper() if spelling >> place & 1 else letter
    return letters


def _numbered(
    vocab: int, specials: dict[int, tuple[str, bool]], tokens: list[str]
) -> dict[str, int]:
    """Give the tokens the ids that the special ones leave, in order."""
    free = [i for i in range(vocab) if i not in specials]
    by_id = {i: content for i, (content, _) in specials.items()}
    by_id |= dict(zip(free, tokens, strict=True))
    return {by_id[i]: i for i in range(vocab)}


def _tokenizer(
    model: dict[str, object], specials: dict[int, tuple[str, bool]]
) -> dict[str, object]:
    """Return the content of `tokenizer.json`."""
    words = model["type"] == "WordLevel"
    pieces = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": special,
            }
            for i, (content, special) in sorted(specials.items())
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"} if words else {**pieces, "use_regex": True},
        "post_processor": None,
        "decoder": None if words else {**pieces, "use_regex": True},
        "model": model,
    }


def _settings(config: ModelConfig, specials: dict[int, tuple[str, bool]]) -> dict[str, object]:
    """Return the content of `tokenizer_config.json`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": specials[config.bos_token_id][0],
        "eos_token": specials[config.eos_token_id][0],
        "pad_token": specials[config.pad_token_id][0],
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_position_embeddings,
        "unk_token": None,
    }
