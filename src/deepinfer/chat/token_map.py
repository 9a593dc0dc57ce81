"""Engram's compressed vocabulary: token ids whose text is equal up to case, accents and white space
share one id (pure: no torch).

The map follows from `tokenizer.json` alone and is part of the checkpoint format, since every hash
depends on it. Building takes seconds for a full vocabulary, so large maps are kept in the folder of
rebuildable files, each with its checksum. Source: weights specification, 5.1.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, normalizers

from deepinfer.config.load import cache_dir
from deepinfer.config.model import ModelConfig
from deepinfer.errors import TokenizerError

__all__ = ["TOKEN_MAP_FILE", "build_token_map", "load_token_map", "read_tokenizer"]

TOKEN_MAP_FILE: Final = "engram_token_map.npy"
"""A map that a model folder may hold in place of `tokenizer.json`: int32 [vocab_size]."""

_REPLACEMENT: Final = "\ufffd"
_SENTINEL: Final = "\ue000"
_CACHED_FROM: Final = 4096  # smaller maps are built in less time than a file is worth
_VERSION: Final = 1  # of the rule and of the cached file
_DIGEST_BYTES: Final = hashlib.sha256().digest_size


def build_token_map(tokenizer_json: Path, vocab_size: int) -> NDArray[np.int32]:
    """Return the compressed id of every token id, [vocab_size] int32, numbered by first appearance.

    The key of an id is its decoded text, normalized; its raw spelling when the text is not whole
    UTF-8; the text as it is when nothing is left of it. Raises TokenizerError when the file cannot
    be read.
    """
    tokenizer = read_tokenizer(tokenizer_json)
    normalize = _normalizer().normalize_str
    new_ids: dict[str, int] = {}
    result = np.empty(vocab_size, dtype=np.int32)
    for token_id in range(vocab_size):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        if _REPLACEMENT in text:
            key = tokenizer.id_to_token(token_id) or text
        else:
            key = normalize(text) or text
        result[token_id] = new_ids.setdefault(key, len(new_ids))
    return result


def load_token_map(folder: Path, config: ModelConfig) -> NDArray[np.int32] | None:
    """Return the map of a checkpoint folder, [vocab_size] int32; None without Engram layers.

    Taken from `tokenizer.json`, through the cache; a folder without that file may hold the map
    itself, as `engram_token_map.npy`. Raises TokenizerError when both are absent, when the file is
    damaged, and when the number of compressed ids is not the one that the config states.
    """
    if not config.engram_layer_ids:
        return None
    source = folder / "tokenizer.json"
    if source.is_file():
        token_map = _through_cache(source, config.vocab_size)
    else:
        source = folder / TOKEN_MAP_FILE
        if not source.is_file():
            raise TokenizerError(
                f"{folder} has Engram layers, which look tokens up by their text, but neither "
                f"tokenizer.json nor {TOKEN_MAP_FILE}: copy the release's tokenizer.json into it"
            )
        token_map = _read_map_file(source, config.vocab_size)
    found, expected = int(token_map.max()) + 1, config.engram_compressed_vocab_size
    if found != expected:
        raise TokenizerError(
            f"{source} compresses to {found} ids, but the config says "
            f"engram_compressed_vocab_size {expected}: the file belongs to another checkpoint"
        )
    return token_map


def read_tokenizer(file: Path) -> Tokenizer:
    """Read a `tokenizer.json`; raises TokenizerError when that fails."""
    try:
        return Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise TokenizerError(f"cannot read {file}: {error.strerror or error}") from error
    except Exception as error:  # the library raises this class itself
        raise TokenizerError(f"{file} is not a valid tokenizer.json: {error}") from error


def _normalizer() -> normalizers.Normalizer:
    """Return the chain of 5.1: a text that is one space stays one, all others are stripped."""
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _SENTINEL),
            normalizers.Strip(),
            normalizers.Replace(_SENTINEL, " "),
        ]
    )


def _through_cache(source: Path, vocab_size: int) -> NDArray[np.int32]:
    """Return the cached map of exactly this file, or build it and try to keep it."""
    if vocab_size < _CACHED_FROM:
        return build_token_map(source, vocab_size)
    try:
        digest = hashlib.sha256(source.read_bytes()).hexdigest()
    except OSError as error:
        raise TokenizerError(f"cannot read {source}: {error.strerror or error}") from error
    cached = cache_dir() / "token_map" / f"v{_VERSION}-{digest}-{vocab_size}.bin"
    token_map = _read_cached(cached, vocab_size)
    if token_map is None:
        token_map = build_token_map(source, vocab_size)
        _write_cached(cached, token_map)
    return token_map


def _read_cached(file: Path, vocab_size: int) -> NDArray[np.int32] | None:
    """Return a cached map, None when there is none or its checksum does not fit."""
    try:
        data = file.read_bytes()
    except OSError:
        return None
    body = data[_DIGEST_BYTES:]
    if len(body) != 4 * vocab_size or hashlib.sha256(body).digest() != data[:_DIGEST_BYTES]:
        return None
    return np.frombuffer(body, dtype="<i4").astype(np.int32)


def _write_cached(file: Path, token_map: NDArray[np.int32]) -> None:
    """Keep a map: checksum and bytes, complete under its name or not there. Failing is no error."""
    body = token_map.astype("<i4").tobytes()
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
        try:
            with os.fdopen(descriptor, "wb") as out:
                out.write(hashlib.sha256(body).digest() + body)
            os.replace(name, file)
        except OSError:
            with suppress(OSError):
                os.unlink(name)


def _read_map_file(file: Path, vocab_size: int) -> NDArray[np.int32]:
    """Read a map that stands in a model folder, checked for what every such map satisfies."""
    try:
        found: NDArray[np.generic] = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise TokenizerError(f"cannot read {file}: {error}") from error
    if found.shape != (vocab_size,) or not np.issubdtype(found.dtype, np.integer):
        raise TokenizerError(
            f"{file} holds {found.dtype} {list(found.shape)}, expected int32 [{vocab_size}]"
        )
    values = found.astype(np.int64)
    highest_before = np.concatenate([[-1], np.maximum.accumulate(values)[:-1]])
    if (values < 0).any() or (values > highest_before + 1).any():
        raise TokenizerError(f"{file} is damaged: its ids are not numbered by first appearance")
    return values.astype(np.int32)
