"""A prefill that attends to packed entries, as on Hopper, has the bits of one that loads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from tests.model.pair import Pair, assert_rows_equal, new_session
from torch import Tensor

from deepinfer.kernels.paged_attention import reads_packed
from deepinfer.model.fast import attention, inputs, session
from deepinfer.model.fast.step import Pass
from deepinfer.model.reference import Numerics


@pytest.mark.parametrize(
    ("name", "chunk", "fuses"),
    [("alpha", 280, False), ("beta", 64, False), ("beta", None, False), ("beta", 64, True)],
)
def test_prefill_on_packed_entries(
    name: str,
    chunk: int | None,
    fuses: bool,
    pair_of: Callable[[str, Numerics], Pair],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built, packed = inputs.build_inputs, []

    def paged(*args: Any, **kwargs: Any) -> Any:
        return dataclasses.replace(built(*args, **kwargs), paged=True)

    def open_(*args: Any) -> Any:
        packed.append(args)
        return attention_open(*args)

    attention_open = attention.open_window
    monkeypatch.setattr(session, "build_inputs", paged)
    monkeypatch.setattr(attention, "_reads_packed", lambda step, cache: True)
    monkeypatch.setattr(attention, "open_window", open_)
    monkeypatch.setattr(Pass, "fuses", property(lambda _: fuses))
    pair = pair_of(name, "official")
    trace: dict[str, Tensor] = {}
    made = new_session(pair, 128, 300)
    if fuses:  # what is stored goes from the packed block to the rings
        windows = [dataclasses.replace(w, dense=None, twice=None) for w in made.caches.windows]
        made.caches = dataclasses.replace(made.caches, windows=tuple(windows))
    made.prefill(pair.ids[:300], chunk, trace)
    assert_rows_equal(trace, pair.expected)
    assert packed


@pytest.mark.parametrize("packed", [True, False])
def test_prompts_on_a_card_have_the_logits_of_prompts_on_a_cpu(
    packed: bool, pair_of: Callable[[str, Numerics], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is traced: what a card does only then. Candidates are filtered."""
    pair, built = pair_of("alpha", "official"), inputs.build_inputs
    want = new_session(pair, 32, 300).prefill(pair.ids[:300], 150)
    monkeypatch.setattr(
        session, "build_inputs", lambda *given: dataclasses.replace(built(*given), paged=True)
    )
    monkeypatch.setattr(attention, "_reads_packed", lambda step, cache: packed)
    assert want.equal(new_session(pair, 32, 300).prefill(pair.ids[:300], 150))


def test_kernels_of_the_release_and_of_short_entries_read_packed_ones() -> None:
    assert reads_packed("cuda", 64, 512, True) and reads_packed("cuda whole", 64, 512, True)
    assert not reads_packed("triton", 64, 512, True)
    assert not reads_packed("cuda", 8, 256, True) and not reads_packed("cuda", 64, 512, False)
    assert reads_packed("cuda", 8, 64, True) and reads_packed("triton", 8, 128, True)
    assert not reads_packed("reference", 8, 64, True) and not reads_packed("triton", 8, 64, False)
