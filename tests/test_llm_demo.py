"""LLM on the packaged checkpoint: recorded continuations, batch independence, damaged weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from deepinfer.engine.request import Completion, SamplingParams
from deepinfer.errors import TokenizerError
from deepinfer.llm import LLM
from deepinfer.weights.synth import write_synthetic

GREEDY = SamplingParams(temperature=0, max_tokens=17, ignore_eos=True, logprobs=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("golden", device="cpu") as engine:
        yield engine


def outcome(result: Completion) -> tuple[object, ...]:
    """What must not depend on the batch, bit for bit."""
    return (result.token_ids, result.logprobs, result.top_logprobs, result.finish_reason)


def test_recorded_greedy_continuations_in_one_batch(llm: LLM, golden_folder: Path) -> None:
    prompts = json.loads((golden_folder / "prompts.json").read_text())["prompts"]
    results = llm.generate([p["tokens"] for p in prompts], GREEDY)
    for prompt, result in zip(prompts, results, strict=True):
        pairs = enumerate(zip(result.token_ids, prompt["greedy_tokens"], strict=True))
        parted = next((step for step, (got, recorded) in pairs if got != recorded), None)
        # Only a token that led by little may differ, and then all that follow.
        assert parted is None or prompt["greedy_margins"][parted] < 0.3, (prompt["name"], parted)
        assert parted is None or parted >= 7, prompt["name"]


@pytest.fixture(scope="module")
def together(llm: LLM) -> list[Completion]:
    """The mixed requests in one batch."""
    return llm.generate(*mixed_requests())


def mixed_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts around block and window borders, with parameters of every kind."""
    rng = np.random.default_rng(3)
    lengths = [1, 2, 3, 31, 127, 128, 129, 150]
    prompts = [rng.integers(3, 280, n).tolist() for n in lengths]
    params = [
        SamplingParams(
            temperature=(0.0, 0.7, 1.0)[i % 3],
            top_p=(1.0, 0.8)[i % 2],
            seed=i,
            max_tokens=6,
            ignore_eos=True,
            logprobs=i % 2,
            top_logprobs=3,
        )
        for i in range(len(prompts))
    ]
    return prompts, params


def test_a_request_alone_equals_it_in_a_batch(llm: LLM, together: list[Completion]) -> None:
    prompts, params = mixed_requests()
    for prompt, own, result in zip(prompts, params, together, strict=True):
        assert outcome(llm.generate(prompt, own)[0]) == outcome(result)
    backwards = llm.generate(prompts[::-1], params[::-1])
    assert [outcome(r) for r in backwards[::-1]] == [outcome(r) for r in together]


@pytest.mark.parametrize(
    "settings",
    [
        {"scheduling.max_num_seqs": 2},
        {"scheduling.chunk_size": 7, "scheduling.max_num_batched_tokens": 20},
        {"scheduling.chunk_size": 64, "numerics.batch_invariant": False},
        {"scheduling.overlap": True},
        {"scheduling.overlap": True, "scheduling.max_num_seqs": 3},
    ],
    ids=str,
)
def test_schedules_change_nothing(together: list[Completion], settings: dict[str, object]) -> None:
    with LLM("golden", device="cpu", config=settings) as other:
        got = other.generate(*mixed_requests())
    assert [outcome(r) for r in got] == [outcome(r) for r in together]


@pytest.mark.parametrize("overlap", [False, True])
def test_putting_sequences_back_changes_nothing(together: list[Completion], overlap: bool) -> None:
    prompts, params = mixed_requests()
    with LLM("golden", device="cpu", config={"scheduling.overlap": overlap}) as other:
        assert other._loop is not None
        ids = [other.submit(p, own) for p, own in zip(prompts, params, strict=True)]
        done: dict[int, Completion] = {}
        step = 0
        while other.has_work:
            done |= {c.request_id: c for c in other.step()}
            step += 1
            if step % 2 == 0 and step < 8:
                other._loop.scheduler.preempt(ids[step % len(ids)])
        assert other._loop.scheduler.num_preemptions >= 2
    assert [outcome(done[i]) for i in ids] == [outcome(r) for r in together]


def test_a_small_pool_puts_back_and_changes_nothing(llm: LLM) -> None:
    prompts = [[5 + i, 6, 7, 8, 9, 10, 11, 12, 13, 14] for i in range(5)]
    params = SamplingParams(max_tokens=24, seed=2, ignore_eos=True, logprobs=True)
    settings = {
        "numerics.batch_invariant": False,
        "cache.tokens_per_block": 4,
        "cache.num_blocks": 26,
        "scheduling.max_model_len": 40,
    }
    with LLM("golden", device="cpu", config=settings) as other:
        got = other.generate(prompts, params)
        assert other.stats().num_preemptions > 0, "the pool was large enough"
    assert [outcome(r) for r in got] == [outcome(r) for r in llm.generate(prompts, params)]


def test_forced_tokens_get_the_models_logprobs(llm: LLM) -> None:
    (free,) = llm.generate([5, 6, 7], GREEDY)
    forced = SamplingParams(
        temperature=0,
        max_tokens=17,
        ignore_eos=True,
        logprobs=True,
        forced_token_ids=free.token_ids[:16],
    )
    assert outcome(llm.generate([5, 6, 7], forced)[0]) == outcome(free)


def test_stop_string_and_streams_on_real_text(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    (plain,) = llm.generate("Once", params)
    assert plain.text is not None and len(plain.text) > 4
    stop = plain.text[3:5]
    cut = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=stop)
    (stopped,) = llm.generate("Once", cut)
    assert stopped.text == plain.text[: plain.text.index(stop)]
    assert stopped.token_ids == plain.token_ids[: len(stopped.token_ids)]
    chunks = list(llm.stream("Once", cut))
    assert "".join(chunk.text for chunk in chunks) == stopped.text


def poison(folder: Path, name: str, first: int = 0, count: int = 1) -> None:
    """Overwrite bf16 values of a stored tensor with NaN."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = folder / index["weight_map"][name]
    size = int.from_bytes(file.open("rb").read(8), "little")
    header = json.loads(file.read_bytes()[8 : 8 + size])
    assert header[name]["dtype"] == "BF16"
    with file.open("r+b") as stream:
        stream.seek(8 + size + header[name]["data_offsets"][0] + 2 * first)
        stream.write(b"\xc0\x7f" * count)


@pytest.fixture
def copy(tmp_path: Path, golden_checkpoint: Path) -> Path:
    """A writable copy of the checkpoint."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in golden_checkpoint.iterdir():
        shutil.copyfile(file, folder / file.name)
    return folder


def test_one_damaged_row_ends_one_request(llm: LLM, copy: Path) -> None:
    hidden = llm.model_config.hidden_size
    poison(copy, "embed.weight", first=77 * hidden, count=hidden)
    good = [[5, 6, 7], [9] * 140]
    params = SamplingParams(temperature=0, max_tokens=5, logit_bias={77: -100.0})
    expected = [outcome(r) for r in llm.generate(good, params)]
    with LLM(copy, device="cpu", config={"scheduling.max_num_seqs": 2}) as damaged:
        for _ in range(3):  # later requests take over blocks and slots that held NaN
            results = damaged.generate([good[0], [5, 77, 7] * 50, good[1], [77]], params)
            assert [outcome(results[i]) for i in (0, 2)] == expected
            for bad in (results[1], results[3]):
                assert bad.finish_reason == "numerical" and bad.token_ids == ()
                assert "embed.weight" in (bad.error or "")


def test_damaged_weights_are_named(copy: Path) -> None:
    poison(copy, "layers.3.attn_norm.weight")
    with LLM(copy, device="cpu") as damaged:
        results = damaged.generate([[5, 6], [7]], SamplingParams(max_tokens=4))
    for result in results:
        assert result.finish_reason == "numerical"
        assert "layers.3.attn_norm.weight" in (result.error or "")


def test_ids_alone_need_no_tokenizer(tmp_path: Path, golden_checkpoint: Path) -> None:
    config = json.loads((golden_checkpoint / "config.json").read_text())
    text = config["text_config"]
    config["text_config"] = {k: v for k, v in text.items() if not k.startswith("engram_")}
    folder = write_synthetic(config, 1, tmp_path / "plain")
    (folder / "tokenizer.json").unlink()
    with LLM(folder, device="cpu") as llm:
        ids, text_prompt = llm.generate([[5, 6, 7], "text"], SamplingParams(max_tokens=4))
    assert ids.error is None and len(ids.token_ids) >= 1 and ids.text is None
    assert "tokenizer.json" in (text_prompt.error or "")


def test_engram_without_tokenizer_is_one_error(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        LLM(copy, device="cpu")
