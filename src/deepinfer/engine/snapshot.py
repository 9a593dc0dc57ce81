"""State: one request in the middle of its generation, as a value and as a file. Pure.

A state holds the request, what it has generated, and everything of the caches that later tokens may
read, in the order of positions: it fits any engine of the same weights, config and arithmetic,
whatever the number of its blocks and slots. Who else runs, drafts and overlap do not matter.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from deepinfer.config.engine import EngineConfig
from deepinfer.config.model import ModelConfig
from deepinfer.engine.commit import Gate, TokenMatcher
from deepinfer.engine.request import SamplingParams
from deepinfer.errors import DeepInferError, RequestError, StateError
from deepinfer.grammar.spec import Structured

__all__ = ["ResumedGate", "State", "contradictions", "fingerprint", "mismatches"]

_FORMAT: Final = "deepinfer-state-1"
_TELLS: Final[Mapping[str, str]] = {
    "weights": "the weights",
    "tokenizer": "tokenizer.json",
    "config": "the model config",
    "numerics": "the arithmetic (numerics.*, device)",
    "replay": "bounded replay (replay.*)",
    "banned": "sampling.banned_token_ids",
}
_Array = NDArray[np.generic]


def fingerprint(
    config: EngineConfig,
    model: ModelConfig,
    *,
    weights: str,
    tokenizer: bytes,
    numerics: str,
    keep_tokens: int | None,
) -> dict[str, str]:
    """Return what must be equal for a state to be continued.

    weights    digest of the checkpoint
    tokenizer  contents of its tokenizer.json, empty without; Engram's ids derive from it
    numerics   the resolved arithmetic, spelled out
    """
    text = json.dumps(model.to_dict(), sort_keys=True)
    return {
        "weights": weights,
        "tokenizer": hashlib.blake2b(tokenizer, digest_size=8).hexdigest() if tokenizer else "none",
        "config": hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
        "numerics": f"{config.numerics.mode}, {numerics}",
        "replay": "off" if keep_tokens is None else f"the last {keep_tokens} tokens",
        "banned": str(sorted(set(config.sampling.banned_token_ids))),
    }


def mismatches(found: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Say which parts of two fingerprints differ: the state's, then the engine's."""
    return [
        f"{_TELLS.get(name, name)}: the state has {found.get(name)!r}, "
        f"the engine {expected.get(name)!r}"
        for name in sorted(found.keys() | expected)
        if found.get(name) != expected.get(name)
    ]


def contradictions(state: State, vocab_size: int) -> list[str]:
    """Say what of a state no running request can have: one that was put together by hand."""
    told = []
    outside = [i for i in state.token_ids if not 0 <= i < vocab_size]
    if outside:
        told.append(f"token_ids hold {outside[0]}, outside the vocabulary 0..{vocab_size - 1}")
    if len(state.token_ids) >= state.params.max_tokens:
        told.append(
            f"token_ids hold {len(state.token_ids)} tokens, max_tokens {state.params.max_tokens} "
            "ended the request"
        )
    if state.num_computed and not 0 < state.num_computed < state.num_tokens:
        told.append(
            f"num_computed is {state.num_computed}, expected less than its {state.num_tokens} "
            "tokens: the last one is always fed"
        )
    for name in ("logprobs", "top_logprobs"):
        values = getattr(state, name)
        if values is not None and len(values) != len(state.token_ids):
            told.append(f"{name} has {len(values)} entries for {len(state.token_ids)} token_ids")
    return told


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class State:
    """A request that can go on elsewhere: `LLM.snapshot` makes it, `LLM.resume` takes it.

    token_ids     generated so far
    seed          the resolved seed, so that the same draws follow
    num_computed  leading tokens, of prompt and output, whose cache entries are in `parts`
    parts         name -> array, as `cache/live.py` reads them; empty before the first step
    fingerprint   of weights, config and arithmetic
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    num_computed: int
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    prompt_logprobs: tuple[float, ...] | None = None
    parts: Mapping[str, _Array]
    fingerprint: Mapping[str, str]

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    @property
    def nbytes(self) -> int:
        """Bytes of the cache parts."""
        return sum(part.nbytes for part in self.parts.values())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to a safetensors file, whole or not at all; a link stays a link.

        Raises StateError when it cannot be written, RequestError for logits processors.
        """
        file = Path(path).expanduser().resolve()
        about = {
            "prompt_token_ids": list(self.prompt_token_ids),
            "token_ids": list(self.token_ids),
            "params": _params_to_json(self.params),
            "seed": self.seed,
            "num_computed": self.num_computed,
            "logprobs": self.logprobs,
            "top_logprobs": self.top_logprobs,
            "prompt_logprobs": self.prompt_logprobs,
            "fingerprint": dict(self.fingerprint),
        }
        parts = {name: np.ascontiguousarray(part) for name, part in self.parts.items()}
        digest = _digest(json.dumps(about), parts)
        meta = {"format": _FORMAT, "state": json.dumps(about), "digest": digest}
        half: str | None = None
        try:
            if file.exists() and not file.is_file():
                raise OSError(f"{'a folder' if file.is_dir() else 'no plain file'} has this name")
            handle, half = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
            os.close(handle)
            save_file(parts, half, meta)
            os.replace(half, file)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            raise StateError(
                f"cannot write the state to {file}: {reason}; it needs a folder that can be "
                f"written to, and about {self.nbytes} bytes"
            ) from error
        finally:
            if half is not None:
                Path(half).unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> State:
        """Read a state; raises StateError when the file is absent, damaged or none of ours."""
        file = Path(path).expanduser()
        try:
            with safe_open(file, "numpy") as opened:
                meta = opened.metadata() or {}
                if meta.get("format") != _FORMAT:
                    found = meta.get("format")
                    raise StateError(f"{file} holds no state: format {found!r}, not {_FORMAT!r}")
                parts = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            if _digest(meta["state"], parts) != meta.get("digest"):
                raise StateError(f"{file} is damaged: its contents do not match their digest")
            return cls._read(json.loads(meta["state"]), parts)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise StateError(f"{file} cannot be read as a state: {error}") from error

    @classmethod
    def _read(cls, about: Mapping[str, object], parts: Mapping[str, _Array]) -> State:
        """Build a state from what a file holds."""
        got: dict[str, object] = dict(about)
        for name in ("prompt_token_ids", "token_ids", "logprobs", "prompt_logprobs"):
            value = got[name]
            got[name] = tuple(value) if isinstance(value, list) else None
        top = got["top_logprobs"]
        if isinstance(top, list):
            got["top_logprobs"] = tuple(tuple((i, lp) for i, lp in pairs) for pairs in top)
        try:
            got["params"] = _params_from_json(got["params"])
        except DeepInferError as error:
            raise StateError(f"the state's parameters cannot be used: {error}") from error
        return cls(parts=parts, **got)  # type: ignore[arg-type]  # written by `save`, under a digest


class ResumedGate:
    """A gate whose grammar first takes what a saved request has generated."""

    def __init__(self, gate: Gate, token_ids: Sequence[int]) -> None:
        self._gate = gate
        self._token_ids = token_ids

    def poll(self) -> TokenMatcher | str | None:
        """Return the matcher behind the tokens, an error, or None to go on waiting."""
        found = self._gate.poll()
        if found is None or isinstance(found, str):
            return found
        for token_id in self._token_ids:
            if not found.accept(token_id):
                return f"the grammar refuses token {token_id} of the saved request"
        return found


def _digest(about: str, parts: Mapping[str, _Array]) -> str:
    """Return a digest over everything a file holds."""
    digest = hashlib.blake2b(about.encode(), digest_size=16)
    for name in sorted(parts):
        digest.update(f"{name} {parts[name].dtype} {parts[name].shape}\n".encode())
        digest.update(np.ascontiguousarray(parts[name]).tobytes())
    return digest.hexdigest()


def _params_to_json(params: SamplingParams) -> dict[str, object]:
    """Spell parameters out; raises RequestError for logits processors, which are code."""
    if params.processor_factories:
        raise RequestError("a state cannot hold logits_processors: they are code, not data")
    found: dict[str, object] = {}
    for f in fields(params):
        value = getattr(params, f.name)
        if isinstance(value, Structured):
            value = {g.name: getattr(value, g.name) for g in fields(value)}
        found[f.name] = value
    found["logit_bias"] = list(params.logit_bias.items())
    return found


def _params_from_json(given: object) -> SamplingParams:
    """Read what `_params_to_json` wrote."""
    if not isinstance(given, dict):
        raise TypeError("params are no object")
    found = dict(given)
    found["logit_bias"] = dict(found["logit_bias"])
    return SamplingParams(**found)
