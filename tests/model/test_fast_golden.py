"""The fast path against the recorded values of the packaged checkpoint, in five tiers."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import pytest
import torch
from tests.model import golden
from tests.model.pair import MODES, load_fast
from torch import Tensor

from deepinfer.cache.layout import CacheLayout
from deepinfer.cache.tensors import Caches
from deepinfer.config.load import resolve_model
from deepinfer.model.fast.attention import attention
from deepinfer.model.fast.block import run_block
from deepinfer.model.fast.engram import add_engram, engram_products
from deepinfer.model.fast.inputs import SequenceRows, build_inputs
from deepinfer.model.fast.model import FastModel
from deepinfer.model.fast.session import Session
from deepinfer.model.fast.step import Step
from deepinfer.model.reference import Numerics

Drafts = tuple[Tensor, Tensor, Tensor]


@lru_cache(maxsize=4)
def model(mode: Numerics, projection: str = "auto") -> FastModel:
    """The packaged checkpoint on the fast path."""
    return load_fast(resolve_model("golden"), mode, output_projection=projection)


@lru_cache(maxsize=8)
def run(name: str, mode: Numerics) -> tuple[dict[str, Tensor], Tensor, Drafts]:
    """Trace of the prompt, logits and draft blocks of the recorded decode steps."""
    session = Session(model(mode), 300)
    trace: dict[str, Tensor] = {}
    session.prefill(golden.prompt_ids(name), None, trace)
    greedy = golden.recorded(name)["greedy_tokens"].tolist()
    logits, drafts = [], []
    for fed, following in pairwise(greedy):
        logits.append(session.decode(fed))
        drafts.append(session.draft(following))
    tokens, conf, draft_logits = (torch.stack(part) for part in zip(*drafts, strict=True))
    return trace, torch.stack(logits), (tokens, conf, draft_logits)


@pytest.mark.parametrize("name", golden.PROMPTS)
@pytest.mark.parametrize("mode", MODES)
def test_engram_hash(name: str, mode: Numerics) -> None:
    """Tier 1: every looked-up row is the recorded one."""
    golden.check_hash(name, run(name, mode)[0])


@pytest.mark.parametrize("name", golden.PROMPTS)
def test_strict(name: str) -> None:
    """Tier 2: strict logits, choices and intermediates, prefill and decode."""
    trace, decode_logits, _ = run(name, "noq")
    golden.check_strict_logits(name, trace["logits"], decode_logits)
    golden.check_strict_choices(name, trace)
    golden.check_strict_values(name, trace)


@pytest.mark.parametrize("chunk", [64, 7])
def test_strict_in_chunks(chunk: int) -> None:
    """Tier 2 does not depend on the chunk size."""
    trace: dict[str, Tensor] = {}
    Session(model("noq"), 300).prefill(golden.prompt_ids("p130"), chunk, trace)
    golden.check_strict_logits("p130", trace["logits"], None)
    golden.check_strict_choices("p130", trace)


@torch.inference_mode()
def forced(projection: str) -> dict[str, Tensor]:
    """Run every block on its recorded input; blocks share caches and selections of one step."""
    fast, config = model("official", projection), golden.config()
    ids = golden.prompt_ids(golden.FORCED_PROMPT)[: golden.FORCED_ROWS]
    layout = CacheLayout.build(config, "official")
    inputs = build_inputs([SequenceRows(1, 0, ids, [1])], False, layout)
    step: Step = fast._step(inputs, Caches.allocate(layout, 2, 2, "cpu"), True)
    assert fast._hash is not None and step.trace is not None
    rows = fast._hash.rows(step)
    stream = fast.embed[inputs.token_ids].unsqueeze(1).repeat(1, config.hc_mult, 1)
    pre = torch.zeros(len(ids), config.hc_mult)
    pre[:, 0] = 1.0
    for layer, block in zip(config.layers, fast.blocks, strict=True):
        given = golden.forced_inputs(layer.layer_id)
        if given is not None:
            stream, pre = given
        if layer.engram_idx is not None and block.engram is not None:
            kv = engram_products(step, block.engram, rows[layer.engram_idx])
            step.note("engram_out", add_engram(step, block.engram, stream, kv))
            stream = golden.forced_engram(layer.engram_idx)

        def attend(x: Tensor, layer=layer, block=block) -> Tensor:  # type: ignore[no-untyped-def]
            return attention(step, layer, block, x)

        run_block(step, block, stream, pre, attend, config.num_experts_per_tok)
    names = ("attn_out", "ffn_out", "stream_out", "engram_out", "pre_mix")
    return {name: torch.stack(step.trace[name]) for name in names}


def test_forced_layers() -> None:
    """Tier 3: with the published output projection the medians are exact."""
    values = forced("bf16")
    worst = golden.check_forced(values, golden.TIGHT)
    assert max(worst.values()) == 0.0, worst
    expected = golden.recorded(golden.FORCED_PROMPT)["engram_out_all"]
    same = (values["engram_out"].float() == expected.float()).flatten(2).all(-1)
    assert float(same.double().mean(1).min()) >= 0.96


def test_forced_layers_fp8_projection() -> None:
    """Tier 3: the serving output projection stays within the wide limits, and shows."""
    worst = golden.check_forced(forced("fp8"), golden.WIDE)
    assert worst["attn_out"] > golden.TIGHT["attn_out"]


@pytest.mark.parametrize("name", golden.LONG_PROMPTS)
def test_whole_model(name: str) -> None:
    """Tier 4: official logits, entries and experts agree as far as rounding and ties allow."""
    golden.check_whole_model(name, run(name, "official")[0])


@pytest.mark.parametrize("name", golden.PROMPTS)
@pytest.mark.parametrize("mode", MODES)
def test_greedy(name: str, mode: Numerics) -> None:
    """Tier 5: fed the recorded tokens, each step prefers the recorded next one."""
    trace, decode_logits, _ = run(name, mode)
    predicted = torch.cat([trace["logits"][-1:], decode_logits]).argmax(-1).tolist()
    golden.check_greedy(name, predicted)


@pytest.mark.parametrize("name", golden.PROMPTS)
def test_greedy_runs_free(name: str) -> None:
    """Tier 5: free greedy decoding gives the recorded tokens up to a step of small margin."""
    session = Session(model("official"), 300)
    token = int(session.prefill(golden.prompt_ids(name))[-1].argmax())
    expected = golden.recorded(name)["greedy_tokens"].tolist()
    for step, (want, margin) in enumerate(
        zip(expected, golden.prompt_notes()[name]["greedy_margins"], strict=True)
    ):
        if token != want:
            assert margin < 0.3, f"{name}: step {step} of margin {margin} gave {token}, not {want}"
            return
        token = int(session.decode(token).argmax())


@pytest.mark.parametrize("name", golden.PROMPTS)
@pytest.mark.parametrize("mode", MODES)
def test_drafts(name: str, mode: Numerics) -> None:
    """Tier 5: the blocks drafted in all decode steps agree."""
    tokens, conf, logits = run(name, mode)[2]
    golden.check_drafts(name, tokens, conf, logits[0], strict=mode == "noq")


@pytest.mark.parametrize("name", ["p7", "p130", "p260"])
@pytest.mark.parametrize("mode", MODES)
def test_draft_after_prompt(name: str, mode: Numerics) -> None:
    """Tier 5: the block right after the prompt, whose last token went through decoding."""
    session, g = Session(model(mode), 300), golden.recorded(name)
    prompt = golden.prompt_ids(name)
    session.prefill(prompt[:-1])
    session.decode(prompt[-1])
    tokens, conf, logits = session.draft(int(g["greedy_tokens"][0]))
    suffix = "_noq" if mode == "noq" else ""
    assert torch.equal(tokens.int(), g[f"draft_end_tokens{suffix}"].flatten())
    if mode == "noq":
        assert float((conf - g["draft_end_conf_noq"]).abs().max()) < golden.STRICT_CONFIDENCE
        assert float((logits - g["draft_end_logits_noq"]).abs().max()) < golden.STRICT_LOGIT


MISTAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "one entry less": lambda topk: topk.masked_fill(topk == topk.amax(-1, keepdim=True), -1),
    "one entry back": lambda topk: topk - 1,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_strict_tier_catches(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong entries on the fast path move the strict logits beyond the limit."""
    from deepinfer.model.fast import indexer

    keep, change = indexer._keep, MISTAKES[mistake]
    monkeypatch.setattr(indexer, "_keep", lambda step, layer, topk: keep(step, layer, change(topk)))
    logits = Session(model("noq"), 300).prefill(golden.prompt_ids("p130"))
    with pytest.raises(AssertionError, match=r"difference|median"):
        golden.check_strict_logits("p130", logits, None)
