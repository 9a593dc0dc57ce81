"""The reference model against the recorded values of the packaged checkpoint, in five tiers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from tests.model import golden
from torch import Tensor

from deepinfer.config import ModelConfig
from deepinfer.config.engram import engram_tables
from deepinfer.model import reference
from deepinfer.model.reference import (
    LayerState,
    Numerics,
    OutputProjection,
    ReferenceModel,
    dequantize,
    matmul,
)

FORCED_EQUAL_ROWS = 0.96


@lru_cache(maxsize=4)
def model(numerics: Numerics, projection: OutputProjection = "bf16") -> ReferenceModel:
    """The reference on the packaged checkpoint."""
    args = (golden.config(), golden.weights(), golden.token_map())
    return ReferenceModel(*args, numerics=numerics, output_projection=projection)


@lru_cache(maxsize=8)
def run(name: str, numerics: Numerics) -> tuple[dict[str, Tensor], Tensor]:
    """Trace of prompt and fed tokens, and the decode logits: computed once for all tests."""
    trace: dict[str, Tensor] = {}
    prompt, fed = golden.prompt_ids(name), golden.fed_ids(name)
    decode_logits = model(numerics).decode(prompt, fed, trace)
    return trace, decode_logits


# --- tier 1: exact ---------------------------------------------------------------------------


def test_engram_constants() -> None:
    """The hash constants are the recorded integers."""
    static, tables = golden.recorded("static"), engram_tables(golden.config())
    for name in ("primes", "offsets", "multipliers"):
        assert getattr(tables, name).tolist() == static[name].tolist(), name
    assert static["pad_id"].item() == static["token_map"][golden.config().engram_pad_token_id]


@pytest.mark.parametrize("name", golden.PROMPTS)
def test_engram_hash(name: str) -> None:
    """Every looked-up row is the recorded one."""
    golden.check_hash(name, run(name, "noq")[0])


def test_rope_frequencies() -> None:
    """Recorded frequencies may be one ulp off: they were read back from an angle."""
    config, static = golden.config(), golden.recorded("static")
    dims = config.qk_rope_head_dim
    window = reference.rope_frequencies(dims, config.rope_theta, None)
    stretched = reference.rope_frequencies(dims, config.compress_rope_theta, config.rope_scaling)
    torch.testing.assert_close(window, static["rope_freq_window"], rtol=2e-7, atol=0)
    torch.testing.assert_close(stretched, static["rope_freq_compress"], rtol=2e-7, atol=0)


def test_fp8_quantizer_bits() -> None:
    """Codes, scales and dequantized values equal the recorded bytes."""
    units = golden.recorded("units")
    values, scale = reference.fp8_codes(units["quant_input"].float())
    codes = values.flatten(-2).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(codes, units["fp8_values"].view(torch.uint8))
    assert torch.equal(scale[..., 0], units["fp8_scales"].float())
    assert torch.equal((values * scale).flatten(-2), units["fp8_dequant"].float())


@pytest.mark.parametrize(
    ("quantizer", "name"),
    [(reference.fp4_e4m3_codes, "fp4_block16"), (reference.fp4_ue8m0_codes, "fp4_block32")],
)
def test_fp4_quantizer_bits(
    quantizer: Callable[[Tensor], tuple[Tensor, Tensor]], name: str
) -> None:
    """Packed codes, scales and dequantized values equal the recorded bytes."""
    units = golden.recorded("units")
    values, scale = quantizer(units["quant_input"].float())
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    flat = values.flatten(-2)
    codes = torch.searchsorted(grid, flat.abs()) + 8 * flat.signbit()
    packed = (codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
    assert torch.equal(packed, units[f"{name}_packed"])
    assert torch.equal(scale[..., 0], units[f"{name}_scales"].float())
    assert torch.equal((values * scale).flatten(-2), units[f"{name}_dequant"].float())


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_block_gemm(kind: str) -> None:
    """Quantized products equal the recorded ones, bit for bit after the bf16 rounding."""
    units = golden.recorded("units")
    values, scale = reference.fp8_codes(units["gemm_act"].float())
    weight = dequantize(units[f"gemm_{kind}_weight"], units[f"gemm_{kind}_scale"])
    out = matmul((values * scale).flatten(-2), weight).bfloat16()
    assert torch.equal(out, units[f"gemm_{kind}_out"])


def test_attention_unit() -> None:
    """Attention with absent entries and sinks equals the recorded one, rounded and not."""
    units = golden.recorded("units")
    args = (
        units["attn_q"][0].float(),
        units["attn_kv"][0].float(),
        units["attn_idx"][0].long(),
        units["attn_sink"],
        units["attn_q"].shape[-1] ** -0.5,
    )
    rounded = reference.sparse_attention(*args, round_weights=True)
    assert torch.equal(rounded.bfloat16(), units["attn_out"][0])
    exact = reference.sparse_attention(*args, round_weights=False)
    torch.testing.assert_close(exact, units["attn_out_fp32"][0], rtol=1e-5, atol=1e-6)


def test_mix_unit() -> None:
    """Mix coefficients equal the recorded ones to fp32 accuracy."""
    units = golden.recorded("units")
    args = (units["hc_mixes"], units["hc_scale"], units["hc_base"], golden.config())
    for got, name in zip(reference.mix_coefficients(*args), ("pre", "post", "comb"), strict=True):
        torch.testing.assert_close(got, units[f"hc_{name}"], rtol=0, atol=1e-6, msg=name)


# --- tier 2: strict --------------------------------------------------------------------------


@pytest.mark.parametrize("name", golden.PROMPTS)
def test_strict(name: str) -> None:
    """Logits, choices and intermediates of unrounded arithmetic agree, prefill and decode."""
    trace, decode_logits = run(name, "noq")
    golden.check_strict_logits(name, trace["logits"], decode_logits)
    golden.check_strict_choices(name, trace)
    golden.check_strict_values(name, trace)


# --- tier 3: forced layers -------------------------------------------------------------------


def forced(numerics: Numerics, projection: OutputProjection) -> dict[str, Tensor]:
    """Run every block on its recorded input; blocks share their own compressed entries."""
    reference_model, config = model(numerics, projection), golden.config()
    ids = torch.tensor(golden.prompt_ids(golden.FORCED_PROMPT))
    width = min(ids.shape[0], config.sliding_window)
    ids = ids[: golden.FORCED_ROWS]
    state = reference_model.state(ids.shape[0], torch.full_like(ids, width))
    rows = reference.engram_rows(config, ids, golden.token_map().long())
    stream, pre = reference_model.start(ids)
    for layer in config.layers:
        inputs = golden.forced_inputs(layer.layer_id)
        if inputs is not None:
            stream, pre = inputs[0].float(), inputs[1]
        if layer.engram_idx is not None:
            added = reference_model.engram(layer.layer_id, stream, rows[:, layer.engram_idx])
            state.note("engram_out", added)
            stream = golden.forced_engram(layer.engram_idx).float()
        reference_model.block(layer, stream, pre, state)
    return {name: torch.stack(values) for name, values in state.trace.items()}


def test_forced_layers_equal() -> None:
    """With the published output projection nearly every row has the recorded bits."""
    values = forced("official", "bf16")
    worst = golden.check_forced(values, golden.TIGHT)
    assert max(worst.values()) == 0.0, worst
    expected = golden.recorded(golden.FORCED_PROMPT)
    for key in ("stream_out", "engram_out"):
        same = (values[key].float() == expected[f"{key}_all"].float()).flatten(2).all(-1)
        assert bool((same.double().mean(1) >= FORCED_EQUAL_ROWS).all()), (key, same.sum(1))
    torch.testing.assert_close(values["pre_mix"], expected["pre_mix_all"], rtol=0, atol=1e-6)


def test_forced_layers_fp8_projection() -> None:
    """The serving output projection stays within the wide limits, and is visibly another one."""
    worst = golden.check_forced(forced("official", "fp8"), golden.WIDE)
    assert worst["attn_out"] > golden.TIGHT["attn_out"]


# --- tier 4: whole model ---------------------------------------------------------------------


@pytest.mark.parametrize("name", golden.LONG_PROMPTS)
def test_whole_model(name: str) -> None:
    """Official logits, entries and experts agree as far as rounding and ties allow."""
    golden.check_whole_model(name, run(name, "official")[0])


@pytest.mark.parametrize("name", ["p1", "p7"])
def test_whole_model_without_ties(name: str) -> None:
    """Where nothing is rejected the recorded values come back, but for a flipped rounding."""
    trace, g = run(name, "official")[0], golden.recorded(name)
    errors = (trace["logits"][: g["tokens"].shape[0]] - g["logits_official"]).abs().amax(-1)
    assert float(errors.median()) < 1e-5 and float(errors.max()) < 0.02, errors
    same = (trace["stream_out"][:, g["sel_positions"].long()] == g["stream_out_sel"]).flatten(2)
    assert float(same.all(-1).double().mean()) >= 0.95


@pytest.mark.parametrize("name", golden.LONG_PROMPTS)
def test_whole_model_with_recorded_ties(name: str) -> None:
    """With the recorded choices most logit rows have the recorded bits; ties explain the rest."""
    g = golden.recorded(name)
    chosen = g["idx_topk_official"].long()
    trace: dict[str, Tensor] = {}
    fixed = dict(zip(golden.INDEX_SOURCES, chosen, strict=True))
    logits = model("official").forward(golden.prompt_ids(name), trace, selections=fixed)
    errors = golden.relative_errors(logits, g["logits_official"])
    assert float(errors.median()) == 0.0
    same = (logits == g["logits_official"]).all(-1)
    assert float(same.double().mean()) >= 0.7
    # At rows with the recorded bits the first affected source differs in ties only.
    clear = trace["idx_margin"][0] > 0
    assert bool((trace["idx_topk"][0] == chosen[0]).all(-1)[same & clear].all())


# --- tier 5: continuations and drafts --------------------------------------------------------


@pytest.mark.parametrize("name", golden.PROMPTS)
@pytest.mark.parametrize("numerics", ["official", "noq"])
def test_greedy(name: str, numerics: Numerics) -> None:
    """Fed the recorded tokens, each step prefers the recorded next one at a clear margin."""
    trace, decode_logits = run(name, numerics)
    last = trace["logits"][len(golden.prompt_ids(name)) - 1]
    predicted = torch.cat([last[None], decode_logits]).argmax(-1).tolist()
    golden.check_greedy(name, predicted)


def test_greedy_runs_free() -> None:
    """Free greedy decoding follows the recorded tokens."""
    expected = golden.recorded("p7")["greedy_tokens"].tolist()
    assert model("official").greedy(golden.prompt_ids("p7"), 5) == expected[:5]


@pytest.mark.parametrize("name", golden.PROMPTS)
@pytest.mark.parametrize("numerics", ["official", "noq"])
def test_drafts(name: str, numerics: Numerics) -> None:
    """The blocks drafted in all decode steps agree."""
    features = run(name, numerics)[0]["main_hidden"]
    start = len(golden.prompt_ids(name))
    greedy = golden.recorded(name)["greedy_tokens"].tolist()
    blocks = [
        model(numerics).draft(features, start + step, greedy[step + 1])
        for step in range(len(greedy) - 1)
    ]
    tokens, conf, logits = (torch.stack(part) for part in zip(*blocks, strict=True))
    golden.check_drafts(name, tokens, conf, logits[0], strict=numerics == "noq")
    if name == "p7" and numerics == "official":  # all taps are the recorded ones here
        worst = float((conf - golden.recorded(name)["draft_conf"]).abs().max())
        assert worst < 1e-5, worst


@pytest.mark.parametrize("name", ["p7", "p130", "p260"])
@pytest.mark.parametrize("numerics", ["official", "noq"])
def test_draft_after_prompt(name: str, numerics: Numerics) -> None:
    """The block right after the prompt agrees; its last tap was recorded from a decode step."""
    prompt, g = golden.prompt_ids(name), golden.recorded(name)
    trace: dict[str, Tensor] = {}
    model(numerics).decode(prompt[:-1], prompt[-1:], trace)
    first = int(g["greedy_tokens"][0])
    tokens, conf, logits = model(numerics).draft(trace["main_hidden"], len(prompt) - 1, first)
    suffix = "_noq" if numerics == "noq" else ""
    assert torch.equal(tokens.int(), g[f"draft_end_tokens{suffix}"])
    if numerics == "noq" or name == "p7":
        assert float((conf - g[f"draft_end_conf{suffix}"]).abs().max()) < 1e-4
        assert float((logits - g[f"draft_end_logits{suffix}"]).abs().max()) < 1e-4


# --- deliberate mistakes ---------------------------------------------------------------------


class _HalfSplit(ReferenceModel):
    """Rotates the two halves of the tail instead of adjacent pairs."""

    def _rotate(
        self, x: Tensor, frequencies: Tensor, positions: Tensor, inverse: bool = False
    ) -> Tensor:
        dims = self.config.qk_rope_head_dim
        half = dims // 2
        order = torch.arange(dims).view(2, half).T.flatten()
        mixed = torch.cat([x[..., :-dims], x[..., -dims:][..., order]], dim=-1)
        turned = super()._rotate(mixed, frequencies, positions, inverse)
        return torch.cat([turned[..., :-dims], turned[..., -dims:][..., order.argsort()]], dim=-1)


class _NoInverse(ReferenceModel):
    """Leaves the attention output rotated."""

    def _rotate(
        self, x: Tensor, frequencies: Tensor, positions: Tensor, inverse: bool = False
    ) -> Tensor:
        return x if inverse else super()._rotate(x, frequencies, positions)


class _NoDelay(ReferenceModel):
    """Collapses the streams with the mix of the sublayer itself."""

    def _collapse(self, stream: Tensor, pre: Tensor) -> Tensor:
        return super()._collapse(stream, self._own if stream is self._seen else pre)

    def _mixes(self, name: str, stream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self._seen = stream
        pre, post, comb = super()._mixes(name, stream)
        self._own = pre
        return pre, post, comb


class _NoPin(ReferenceModel):
    """Does not pin the newest block."""

    def _candidate_blocks(self, scores: Tensor, visible: Tensor, state: LayerState) -> Tensor:
        return super()._candidate_blocks(scores, torch.zeros_like(visible), state)


class _AllCandidates(ReferenceModel):
    """Ignores the candidate filter."""

    def _candidate_blocks(self, scores: Tensor, visible: Tensor, state: LayerState) -> Tensor:
        return torch.ones_like(super()._candidate_blocks(scores, visible, state))


class _LinearGate(ReferenceModel):
    """Gates Engram by the dot product itself, without the signed root."""

    def engram(self, layer_id: int, stream: Tensor, rows: Tensor) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "sqrt", lambda x: x)
            return super().engram(layer_id, stream, rows)


def _config(**changes: object) -> ModelConfig:
    return replace(golden.config(), **changes)  # type: ignore[arg-type]


def _weights(part: str, value: float) -> dict[str, Tensor]:
    """The stored weights with every tensor of some name filled with one value."""
    return {
        name: torch.full_like(tensor, value) if name.endswith(part) else tensor
        for name, tensor in golden.weights().items()
    }


def _flat_yarn() -> ModelConfig:
    return _config(rope_scaling=replace(golden.config().rope_scaling, factor=1.0))


MISTAKES: dict[str, Callable[[], tuple[type[ReferenceModel], ModelConfig, dict[str, Tensor]]]] = {
    "sink ignored": lambda: (ReferenceModel, _config(), _weights("attn_sink", -1e30)),
    "window one short": lambda: (ReferenceModel, _config(sliding_window=127), golden.weights()),
    "window one long": lambda: (ReferenceModel, _config(sliding_window=129), golden.weights()),
    "top-k one short": lambda: (ReferenceModel, _config(index_topk=15), golden.weights()),
    "one Sinkhorn step": lambda: (ReferenceModel, _config(hc_sinkhorn_iters=1), golden.weights()),
    "no clamp": lambda: (ReferenceModel, _config(swiglu_limit=0.0), golden.weights()),
    "window theta": lambda: (ReferenceModel, _config(rope_theta=160000.0), golden.weights()),
    "no YaRN": lambda: (ReferenceModel, _flat_yarn(), golden.weights()),
    "no selection bias": lambda: (ReferenceModel, _config(), _weights("gate.bias", 0.0)),
    "wrong scaling": lambda: (
        ReferenceModel,
        _config(routed_scaling_factor=1.0),
        golden.weights(),
    ),
    "half-split rotation": lambda: (_HalfSplit, _config(), golden.weights()),
    "no inverse rotation": lambda: (_NoInverse, _config(), golden.weights()),
    "mix not delayed": lambda: (_NoDelay, _config(), golden.weights()),
    "newest block not pinned": lambda: (_NoPin, _config(), golden.weights()),
    "no candidate filter": lambda: (_AllCandidates, _config(), golden.weights()),
    "linear Engram gate": lambda: (_LinearGate, _config(), golden.weights()),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_strict_tier_catches(mistake: str) -> None:
    """A deliberate mistake moves the strict logits of a long prompt beyond the limit."""
    kind, config, stored = MISTAKES[mistake]()
    wrong = kind(config, stored, golden.token_map(), numerics="noq")
    logits = wrong.forward(golden.prompt_ids("p130"))
    with pytest.raises(AssertionError, match=r"difference|median"):
        golden.check_strict_logits("p130", logits, None)


def test_image_bias_has_no_influence() -> None:
    """`bias_vl` is stored for images and changes no bit of text."""
    other = ReferenceModel(
        golden.config(), _weights("bias_vl", 7.0), golden.token_map(), numerics="noq"
    )
    ids = golden.prompt_ids("p7")
    assert torch.equal(other.forward(ids), model("noq").forward(ids))
