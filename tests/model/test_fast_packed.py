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
from deepinfer.model.reference import Numerics


@pytest.mark.parametrize(("name", "chunk"), [("alpha", 280), ("beta", 64), ("beta", None)])
def test_prefill_on_packed_entries(
    name: str,
    chunk: int | None,
    pair_of: Callable[[str, Numerics], Pair],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built, packed = inputs.build_inputs, []

    def paged(*args: Any, **kwargs: Any) -> Any:
        return dataclasses.replace(built(*args, **kwargs), paged=True)

    def pack(*args: Any) -> Any:
        packed.append(args)
        return attention_pack(*args)

    attention_pack = attention.pack_window
    monkeypatch.setattr(session, "build_inputs", paged)
    monkeypatch.setattr(attention, "_reads_packed", lambda step, cache: True)
    monkeypatch.setattr(attention, "pack_window", pack)
    pair = pair_of(name, "official")
    trace: dict[str, Tensor] = {}
    new_session(pair, 128, 300).prefill(pair.ids[:300], chunk, trace)
    assert_rows_equal(trace, pair.expected)
    assert packed


def test_only_the_kernel_of_the_release_reads_packed_entries() -> None:
    assert reads_packed("cuda", 64, 512, True) and reads_packed("cuda whole", 64, 512, True)
    assert not reads_packed("triton", 64, 512, True)
    assert not reads_packed("cuda", 8, 64, True) and not reads_packed("cuda", 64, 512, False)
