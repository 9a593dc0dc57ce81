"""The checkpoint's tokenizer: text to ids, ids to text, whole or one id at a time (pure: no torch).

Ids of special tokens come from the config; `tokenizer_compatibility` chooses the policy. Under
`release` the files must agree with the config and a prompt begins with BOS; under `native` the
files are taken as they are. Source: weights specification, 8.1 and 8.2.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer as RawTokenizer

from deepinfer.chat.token_map import read_tokenizer
from deepinfer.config.load import read_json
from deepinfer.config.model import ModelConfig
from deepinfer.errors import ConfigError, TokenizerError

__all__ = ["StreamDecoder", "Tokenizer", "trained_to_think"]

_BOS: Final = "<｜begin▁of▁sentence｜>"
_EOS: Final = "<｜end▁of▁sentence｜>"
_PAD: Final = "<｜▁pad▁｜>"
# Ids behind the vocabulary that stand for image positions; they decode, and no text encodes to one.
_PLACEHOLDERS: Final = tuple(f"<|place_holder_mm_span_{i:04d}|>" for i in range(21))


def _byte_of_character() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Printable Latin-1 characters stand for themselves; the other bytes take the code points from 256
    on, in order.
    """
    table = {chr(b): b for b in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))}
    others = [b for b in range(256) if chr(b) not in table]
    return table | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES: Final = _byte_of_character()


class Tokenizer:
    """Text and token ids of one checkpoint. Build with `Tokenizer.load`.

    bos_token_id, eos_token_id, pad_token_id  as the config says
    adds_bos  whether `encode` begins a prompt with BOS
    thinks    whether the model was trained to think before it answers: `thinks` of
              `tokenizer_config.json`, a key of ours; the released model does
    """

    def __init__(
        self,
        raw: RawTokenizer,
        config: ModelConfig,
        adds_bos: bool | None,
        thinks: bool = True,
    ) -> None:
        self.bos_token_id = config.bos_token_id
        self.eos_token_id = config.eos_token_id
        self.pad_token_id = config.pad_token_id
        self.adds_bos = bool(adds_bos)
        self.thinks = thinks
        self._raw = raw
        self._post_process = adds_bos is None
        self._byte_level = raw.decoder is not None
        added = raw.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._special = frozenset(i for i, token in added.items() if token.special)
        self._pieces: dict[int, bytes] = {}
        self._placeholders = range(config.vocab_size, config.vocab_size + len(_PLACEHOLDERS))
        if config.tokenizer_compatibility == "release":
            ids = self._placeholders
            spelled = (text.encode() for text in _PLACEHOLDERS)
            self._pieces.update(zip(ids, spelled, strict=True))

    @classmethod
    def load(cls, folder: Path, config: ModelConfig) -> Tokenizer:
        """Read `tokenizer.json`, and `tokenizer_config.json` where it exists.

        Raises TokenizerError when a file is absent, damaged or of an unsupported kind, when an id
        lies outside the config's vocabulary and, under `release`, with everything in which files
        and config disagree.
        """
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(f"{folder} holds no tokenizer.json: text needs it, ids do not")
        raw = read_tokenizer(file)
        problems = _decoder_problems(raw)
        last = max(raw.get_vocab(with_added_tokens=True).values(), default=-1)
        if last >= config.vocab_size:
            problems.append(
                f"its largest id is {last}, the config's vocabulary is 0..{config.vocab_size - 1}"
            )
        settings = _read_settings(folder)
        adds_bos: bool | None = True
        if config.tokenizer_compatibility == "release":
            problems += _release_problems(raw, settings, config)
        else:
            flag = settings.get("add_bos_token")
            adds_bos = flag if isinstance(flag, bool) else None
        thinks = _thinks(settings, problems)
        if problems:
            raise TokenizerError(f"{file} does not fit the config", problems)
        return cls(raw, config, adds_bos, thinks)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a raw prompt.

        Spellings of special tokens become these tokens: a raw prompt is the whole token stream, as
        a rendered conversation is. BOS is put in front by policy, unless the text spells it.
        Raises TokenizerError when the text holds code points that are no characters.
        """
        ids = _encode(self._raw, text, self._post_process)
        if self.adds_bos and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of text that must stay text, such as a chat message: no special token is
        recognized in it and none is added. Errors as in `encode`.
        """
        return _encode(self._plain, text, False)

    def least_tokens(self, text: str) -> int:
        """Return how many ids a text has at least, by its size; 0 when that cannot be told.

        Encoding is slow and takes 200 bytes of memory for each of the text: this is how to refuse
        what is far too long.
        """
        return -(-len(text.encode("utf-8", "replace")) // self._longest) if self._longest else 0

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids. Bytes that are no UTF-8 become U+FFFD, as one unit per run that
        could have begun a character; ids outside the vocabulary have no text.
        """
        stream = self.stream(skip_special_tokens)
        return "".join([*map(stream.push, token_ids), stream.finish()])

    def stream(self, skip_special_tokens: bool = True) -> StreamDecoder:
        """Return a decoder that takes ids one at a time; its pieces add up to `decode` of all."""
        return StreamDecoder(self, skip_special_tokens)

    def token_id(self, content: str) -> int | None:
        """Return the id of a token by its spelling in the file, None when there is none."""
        return self._raw.token_to_id(content)

    def is_special(self, token_id: int) -> bool:
        """Tell whether the file marks an id as special."""
        return token_id in self._special

    def is_added(self, token_id: int) -> bool:
        """Tell whether an id is a token of its own that no text is merged into, special or not."""
        return token_id in self._added or token_id in self._placeholders

    def piece(self, token_id: int) -> bytes:
        """Return the bytes that an id decodes to, b'' outside the vocabulary."""
        piece = self._pieces.get(token_id)
        if piece is None:
            token = self._raw.id_to_token(token_id) if 0 <= token_id < 2**32 else None
            piece = self._pieces[token_id] = self._spell(token or "")
        return piece

    def to_json(self) -> str:
        """Return the content of the tokenizer.json that this was read from."""
        return self._raw.to_str()

    @property
    def separator(self) -> str:
        """What stands between the pieces of two ids: nothing, or a space for whole words."""
        return "" if self._byte_level else " "

    def _spell(self, token: str) -> bytes:
        """Turn a token's spelling into bytes; one that is not in byte characters is text."""
        if self._byte_level and all(c in _BYTES for c in token):
            return bytes(_BYTES[c] for c in token)
        return token.encode()

    @cached_property
    def _longest(self) -> int:
        """The bytes of the longest token; 0 where text may vanish on the way to ids."""
        if not self._byte_level or self._raw.normalizer is not None:
            return 0
        return max(len(token.encode()) for token in self._raw.get_vocab(with_added_tokens=True))

    @cached_property
    def _plain(self) -> RawTokenizer:
        """The same tokenizer without its added tokens."""
        content: dict[str, object] = json.loads(self._raw.to_str())
        return RawTokenizer.from_str(json.dumps(content | {"added_tokens": []}))


class StreamDecoder:
    """Text of a growing run of ids: O(1) per id, whole characters only, joined exactly as decoding
    all ids at once.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = False

    def push(self, token_id: int) -> str:
        """Take the next id and return the text that it completes, possibly none."""
        tokenizer = self._tokenizer
        if self._skip and tokenizer.is_special(token_id):
            return ""
        piece = tokenizer.piece(token_id)
        if not tokenizer.separator:
            return self._utf8.decode(piece)
        if not piece:
            return ""
        gap, self._begun = tokenizer.separator if self._begun else "", True
        return gap + self._utf8.decode(piece)

    def finish(self) -> str:
        """Return what is held back, U+FFFD for the beginning of a character; the decoder is then
        as new.
        """
        held = self._utf8.decode(b"", True)
        self._utf8.reset()
        self._begun = False
        return held


def _encode(raw: RawTokenizer, text: str, add_special_tokens: bool) -> list[int]:
    try:
        return list(raw.encode(text, add_special_tokens=add_special_tokens).ids)
    except (UnicodeEncodeError, TypeError) as error:
        raise TokenizerError(
            "the text holds code points that are no characters (lone surrogates): give valid UTF-8"
        ) from error


def _decoder_problems(raw: RawTokenizer) -> list[str]:
    """Return what keeps ids from being decoded one at a time."""
    if raw.decoder is None:
        return []
    state: dict[str, object] = json.loads(raw.decoder.__getstate__())
    parts = state.get("decoders") if state.get("type") == "Sequence" else [state]
    kinds = [part.get("type") for part in parts] if isinstance(parts, list) else []
    if kinds == ["ByteLevel"]:
        return []
    return [f"its decoder is {' + '.join(map(str, kinds))}, expected ByteLevel or none"]


def trained_to_think(folder: Path) -> bool:
    """Return `thinks` of a checkpoint's `tokenizer_config.json`, true where that says nothing.

    Raises TokenizerError when the file is damaged or says neither true nor false.
    """
    problems: list[str] = []
    thinks = _thinks(_read_settings(folder), problems)
    if problems:
        raise TokenizerError(f"{folder} cannot be used", problems)
    return thinks


def _read_settings(folder: Path) -> dict[str, object]:
    file = folder / "tokenizer_config.json"
    try:
        return read_json(file) if file.is_file() else {}
    except ConfigError as error:
        raise TokenizerError(error.message, error.problems) from None


def _thinks(settings: Mapping[str, object], problems: list[str]) -> bool:
    """Return whether the model thinks first; what is neither true nor false becomes a problem."""
    thinks = settings.get("thinks", True)
    if not isinstance(thinks, bool):
        problems.append(f"tokenizer_config.json thinks: found {thinks!r}, expected true or false")
    return thinks is True


def _release_problems(
    raw: RawTokenizer, settings: Mapping[str, object], config: ModelConfig
) -> list[str]:
    """Return where files and config disagree about the released special tokens."""
    problems = []
    roles = (
        ("bos", _BOS, config.bos_token_id),
        ("eos", _EOS, config.eos_token_id),
        ("pad", _PAD, config.pad_token_id),
    )
    for role, spelling, expected in roles:
        found = raw.token_to_id(spelling)
        if found != expected:
            problems.append(
                f"{spelling}: found id {'none' if found is None else found}, expected "
                f"{role}_token_id {expected}"
            )
        if role == "pad":  # the released file names EOS as its padding; the id of the config counts
            continue
        named = _content(settings.get(f"{role}_token"))
        if named is not None and named != spelling:
            problems.append(
                f'tokenizer_config.json {role}_token: found "{named}", expected "{spelling}"'
            )
    if settings.get("add_eos_token", False) is not False:
        problems.append("tokenizer_config.json add_eos_token: expected false")
    size = raw.get_vocab_size(with_added_tokens=True)
    if size != config.vocab_size:
        problems.append(f"it has {size} entries, expected vocab_size {config.vocab_size}")
    return problems


def _content(token: object) -> str | None:
    """Return the spelling of a token in `tokenizer_config.json`: a text, or an object with it."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None
