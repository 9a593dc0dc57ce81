"""From what users pass as prompts and parameters to checked lists. Pure.

A bad prompt does not stop the others: it is carried as a `BadPrompt` and becomes a completion that
says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np

from deepinfer.engine.request import SamplingParams
from deepinfer.errors import DeepInferError, RequestError

__all__ = ["BadPrompt", "Prompt", "Prompts", "check_prompt", "match_params", "split_prompts"]

Prompt = str | Sequence[int] | np.ndarray
Prompts = Prompt | Sequence[Prompt]


@dataclass(frozen=True, slots=True)
class BadPrompt:
    """Why a prompt cannot be run, and its ids as far as they are known."""

    error: str
    token_ids: tuple[int, ...] = ()


def split_prompts(prompts: Prompts) -> list[object]:
    """Return one entry per prompt: a text or a flat run of integers counts as one prompt.

    Raises RequestError when the argument as a whole is neither.
    """
    if isinstance(prompts, str):
        return [prompts]
    array = _as_array(prompts)
    if isinstance(array, np.ndarray):
        return [array] if array.ndim <= 1 else list(array)
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | dict):
        raise RequestError(
            f"prompts must be text, token ids, or a list of these, not {type(prompts).__name__}"
        )
    entries: list[object] = list(prompts)
    return [entries] if entries and all(isinstance(e, Integral) for e in entries) else entries


def _as_array(value: object) -> object:
    """Turn what numpy can read as an array, such as a tensor, into one; leave all else."""
    if isinstance(value, str | Integral) or not hasattr(value, "__array__"):
        return value
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # on another device, or it needs a gradient
        return value


def match_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """Return one SamplingParams per prompt. Raises RequestError on another type or number."""
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    listed: list[object] = list(params) if isinstance(params, list | tuple) else [params]
    good = [p for p in listed if isinstance(p, SamplingParams)]
    if len(good) < len(listed):
        wrong = next(p for p in listed if not isinstance(p, SamplingParams))
        raise RequestError(
            "sampling_params must be a SamplingParams or a list of them, "
            f"not {type(wrong).__name__}"
        )
    if len(good) != count:
        raise RequestError(
            f"got {len(good)} sampling_params for {count} prompts: "
            "pass one for all, or one for each"
        )
    return good


def check_prompt(
    prompt: object, vocab_size: int, encode: Callable[[str], Sequence[int]] | None
) -> tuple[int, ...] | BadPrompt:
    """Return a prompt's token ids, or what is wrong with it.

    encode  text to ids; None when the model has no tokenizer
    """
    if isinstance(prompt, str):
        if not prompt:
            return BadPrompt("the prompt is empty: give at least one character or token id")
        if encode is None:
            return BadPrompt("text prompts need the checkpoint's tokenizer.json: give token ids")
        try:
            return tuple(encode(prompt))
        except DeepInferError as error:
            return BadPrompt(str(error))
    prompt = _as_array(prompt)
    if isinstance(prompt, np.ndarray):
        if prompt.ndim != 1 or not (prompt.size == 0 or np.issubdtype(prompt.dtype, np.integer)):
            return BadPrompt(
                "a prompt given as an array must be one-dimensional and of integers, "
                f"not {prompt.ndim}-dimensional {prompt.dtype}"
            )
        ids = prompt.tolist()
    elif isinstance(prompt, Iterable) and not isinstance(prompt, bytes | dict):
        ids = list(prompt)
        wrong = [i for i in ids if isinstance(i, bool) or not isinstance(i, Integral)]
        if wrong:
            return BadPrompt(f"token ids must be integers, not {wrong[0]!r}")
        ids = [int(i) for i in ids]
    else:
        return BadPrompt(f"a prompt must be text or token ids, not {type(prompt).__name__}")
    if not ids:
        return BadPrompt("the prompt is empty: give at least one character or token id")
    outside = next((i for i in ids if not 0 <= i < vocab_size), None)
    if outside is not None:
        return BadPrompt(
            f"token id {outside} is outside the vocabulary 0..{vocab_size - 1}", tuple(ids)
        )
    return tuple(ids)
