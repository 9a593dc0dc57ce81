"""`deepinfer bench layer | decode | prefill | slice` on a CPU, with small dimensions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepinfer.bench import modelbench
from deepinfer.bench.enginesteps import RunnerSteps
from deepinfer.bench.floors import Rates, floor_us, step_loads
from deepinfer.bench.modelbench import ModelBench, choose_layers, decode_step, split_ops
from deepinfer.bench.slices import (
    Fabric,
    Network,
    Slice,
    exchange_part,
    install,
    statement,
    sync_factor,
)
from deepinfer.bench.stepreport import goal_of, is_fp8, step_table
from deepinfer.bench.steps import Asked, measure_slice, measure_steps, read_step
from deepinfer.cli.main import main
from deepinfer.config import ModelConfig
from deepinfer.config.load import load_model_config, released_config
from deepinfer.errors import ConfigError
from deepinfer.model.fast.model import FastModel
from deepinfer.model.fast.random import shallow

CPU = torch.device("cpu")
FABRIC = Fabric(dispatch_us=20.0, combine_us=25.0, gb_s=350.0)


@pytest.fixture(scope="module")
def small(golden_checkpoint: Path) -> ModelConfig:
    return load_model_config(golden_checkpoint)


@pytest.fixture(scope="module")
def released() -> ModelConfig:
    return released_config()


def bench_of(config: ModelConfig, **more: object) -> ModelBench:
    plain: dict[str, object] = {"depth": 3, "sequences": 2, "context": 40, "rows": 2}
    with torch.inference_mode():
        return ModelBench(config, CPU, **plain | more)  # type: ignore[arg-type]


def test_the_released_dimensions_are_packaged(
    released: ModelConfig, real_config_file: Path
) -> None:
    assert released == load_model_config(real_config_file)


@pytest.mark.parametrize("depth", [1, 2, 3, 5, 6, 7, 12, 20, 39])
def test_any_depth_makes_a_model(released: ModelConfig, depth: int) -> None:
    kept = choose_layers(released, depth)
    assert len(kept) >= depth and len(kept) <= depth + 3
    cut = shallow(released, kept)
    assert cut.num_hidden_layers == len(kept)
    if depth >= 7:
        assert {layer.kind for layer in cut.layers} == {layer.kind for layer in released.layers}
        assert cut.engram_layer_ids
    assert choose_layers(released, 40) == tuple(range(40)) == choose_layers(released, 400)


def test_caches_hold_valid_entries(small: ModelConfig) -> None:
    bench = bench_of(small, depth=8)
    ops = bench.model.ops
    for cache in (*bench.caches.windows, *bench.caches.main.values(), *bench.caches.index.values()):
        count = cache.codes.shape[0] * cache.codes.shape[1]
        values = ops.cache_load(cache, torch.arange(count))
        assert torch.isfinite(values).all()
        assert 0.05 < float(values.square().mean().sqrt()) < 4.0, cache.format
    assert len(set(bench.tables.ravel().tolist())) == bench.tables.size


def test_a_step_is_finite_and_split_by_op(small: ModelConfig) -> None:
    bench = bench_of(small, depth=3)
    step = decode_step(bench, bench.decode_inputs())
    plain = bench.model.ops
    with torch.inference_mode():
        tokens = step()
    assert tokens.shape == (2, small.dspark_block_size + 1)
    split = split_ops(bench, step)
    assert split.counts["hyper_mix"] == 2 * (3 + small.num_nextn_predict_layers)
    assert bench.model.ops is plain and bench.model.draft is not None
    assert bench.model.draft.ops is plain
    assert {"fp8_linear", "sparse_attention", "hyper_mix", "route", "other"} <= set(split.ops)
    assert {name.partition(" ")[0] for name in split.kinds} == {
        *(layer.kind for layer in bench.config.layers),
        "draft",
    }
    assert split.launches == 0 and all(us >= 0 for us in split.ops.values())


def test_kernels_count_for_the_op_that_launched_them() -> None:
    def event(name: str, device: str, start: int, took: int, link: int = 0) -> SimpleNamespace:
        return SimpleNamespace(
            name=lambda: name,
            device_type=lambda: f"DeviceType.{device}",
            start_ns=lambda: start,
            duration_ns=lambda: took,
            correlation_id=lambda: link,
        )

    events = [
        event("layer:full 2", "CPU", 0, 100),
        event("op:swiglu", "CPU", 10, 20),
        event("cuLaunchKernel", "CPU", 15, 2, 1),
        event("cudaLaunchKernel", "CPU", 25, 2, 2),
        event("op:route", "CPU", 40, 20),
        event("cudaLaunchKernelExC", "CPU", 45, 2, 3),
        event("cuLaunchKernel", "CPU", 200, 2, 4),
        event("op:swiglu", "CUDA", 1000, 9000),  # the profiler's own mark on the device
        event("a", "CUDA", 1000, 5000, 1),
        event("b", "CUDA", 7000, 3000, 2),
        event("c", "CUDA", 11000, 2000, 3),
        event("no launch recorded", "CUDA", 14000, 1000, 9),
        event("d", "CUDA", 16000, 4000, 4),
        event("Memcpy HtoD", "CUDA", 30000, 4000, 5),
    ]
    profile = SimpleNamespace(
        profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events))
    )
    times = modelbench._kernels(profile)
    assert len(times) == 5
    found = modelbench._by_span(modelbench._spans(profile, "op:"), times)
    assert found == [("swiglu", 8.0), ("route", 3.0), ("other", 4.0)]
    layers = modelbench._by_span(modelbench._spans(profile, "layer:"), times, each=True)
    assert layers == [("full 2", 11.0)]


def test_another_implementation_can_be_taken(small: ModelConfig) -> None:
    bench = bench_of(small, use=(("rms_norm", "reference"),))
    assert bench.model.ops.choices["rms_norm"].name == "reference"
    other = bench_of(small, use=(("expert_linear", "reference"),))
    assert other.model.ops.choices["expert_linear"].name == "reference"
    assert other.model.draft is not None and other.model.draft.ops is other.model.ops
    for use in (("expert_linear", "triton"), ("no_op", "reference")):
        with pytest.raises(ConfigError, match="expected"):
            bench_of(small, use=(use,))


def test_the_runner_of_accelerators_repeats_its_step(small: ModelConfig) -> None:
    bench = bench_of(small, depth=3, rows=3)
    steps = RunnerSteps(bench, graphs=False)
    first = steps.run()
    assert all(row.num_verified == 2 and row.error is None for row in first.rows)
    moved = [steps.run() for _ in range(3)]
    assert all(len(result.rows) == 2 for result in moved)
    steps.start_again()
    again = steps.run()
    assert [r.token_ids for r in again.rows] == [r.token_ids for r in first.rows]
    split = split_ops(bench, steps.run)
    assert "paged_attention" in split.ops or "sparse_attention" in split.ops
    with pytest.raises(ConfigError, match="rows"):
        RunnerSteps(bench_of(small, depth=1, rows=small.dspark_block_size + 2), graphs=False)


def test_forms_write_records_that_can_be_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    branched: list[bool] = []
    monkeypatch.setattr(FastModel, "branch", lambda model, on: branched.append(on))
    out = tmp_path / "steps.jsonl"
    common = ["--dims", "golden", "--device", "cpu", "--depth", "3", "--out", str(out)]
    small = ["--sequences", "2", "--rows", "2", "--context", "40"]
    assert main(["bench", "decode", *common, *small]) == 0
    assert main(["bench", "prefill", *common, "--rows", "24", "--no-split"]) == 0
    sliced = ["--ranks", "2", "--accepted", "1.5", "--no-split"]
    sliced += ["--set", "numerics.index_scores=final", "--with-prefill", "64"]
    sliced += ["--set", "scheduling.graph_branches=false"]
    assert main(["bench", "slice", *common, *small, *sliced]) == 0
    capsys.readouterr()
    decode, prefill, piece, chunk = (read_step(line) for line in out.read_text().splitlines())
    assert chunk.rows == 64 and chunk.replay == "compact" and chunk.context == 0
    assert decode.form == "decode" and decode.tokens == 2 and decode.ops and decode.kinds
    assert prefill.tokens == 24 and not prefill.ops and prefill.rows == 24
    assert decode.settings == {"numerics.batch_invariant": False}
    assert piece.settings == decode.settings | {
        "numerics.index_scores": "final",
        "scheduling.graph_branches": False,
    }
    assert branched == [True, True, False, False]
    assert piece.tokens == 3.0 and piece.ranks == 2 and piece.law and piece.statement
    assert main(["bench", "show", str(out)]) == 0
    assert piece.statement in capsys.readouterr().out


def test_a_slice_prints_its_statement_with_every_figure(small: ModelConfig) -> None:
    asked = Asked(depth=3, sequences=(1, 2), rows=2, context=40, ranks=2, split=False)
    for plan in (Slice(ranks=2, mode="fold"), Slice(ranks=2, mode="replay", hot=1.5)):
        records = measure_slice(small, "cpu", asked, plan, FABRIC, 1.25)
        assert [r.sequences for r in records] == [1, 2]
        text = step_table(records)
        for record in records:
            assert text.count(record.statement) == len(records)
            assert "3 of 8 layers" in record.statement and "1.25 tokens" in record.statement
            assert record.variants["N0, no network"]["step_us"] == record.step_us
            serial = record.variants["N1, serial"]
            assert serial["step_us"] > record.step_us
            assert serial["tokens_per_s"] < record.tokens_per_s
            assert len(record.sensitivity) == 4 and record.sync >= 1.0
            assert record.pairs > 0
        assert "hot 1.5" in records[0].slice_mode or plan.mode == "fold"


def test_a_rank_of_many_holds_few_experts(small: ModelConfig) -> None:
    """EP64 and EP128 of the released model are one of 64 and of 128: here one of all experts."""
    ranks = small.n_routed_experts
    asked = Asked(depth=3, sequences=(2,), rows=2, context=40, ranks=ranks)
    (record,) = measure_slice(small, "cpu", asked, Slice(ranks=ranks, mode="replay"), FABRIC, 1.25)
    assert f"rank 0 of {ranks}" in record.statement and record.pairs > 0
    few = step_loads(small, sequences=2, rows=2, context=40, local_experts=1, drafts=True)
    all_of_them = dict(few) | {
        "experts": step_loads(
            small, sequences=2, rows=2, context=40, local_experts=ranks, drafts=True
        )["experts"]
    }
    assert few["experts"].bytes < all_of_them["experts"].bytes
    assert set(record.floors) == set(few) and all(us > 0 for us in record.floors.values())


def test_the_floor_of_one_request_is_the_notes(released: ModelConfig) -> None:
    rates = Rates(read=4.68e12, bf16=691e12, fp8=1329e12)

    def floor(sequences: int, **more: Any) -> float:
        plain = {"rows": 6, "context": 131072, "local_experts": 48, "drafts": True} | more
        return sum(floor_us(step_loads(released, sequences=sequences, **plain), rates).values())

    assert floor(1, fp8_experts=True) == pytest.approx(6400, rel=0.02)
    assert floor(1) <= floor(32, fp8_experts=True) < floor(64, fp8_experts=True) < floor(64)
    prompt = {"rows": 4096, "context": 0, "drafts": False, "head_rows": 1}
    assert floor(1, kept=140, **prompt) < 0.6 * floor(1, **prompt)


def test_goals_stand_beside_the_slices_they_speak_of() -> None:
    kept = Path(__file__).parents[2] / "benchmarks" / "steps-h200.jsonl"
    records = [read_step(line) for line in kept.read_text().splitlines()]
    marked = [record for record in records if goal_of(record) is not None]
    assert len({(r.sequences, r.rows, is_fp8(r)) for r in marked}) >= 6
    text, brief = step_table(records), step_table(records, brief=True)
    for record in marked:
        assert f"goal {goal_of(record).tokens_per_s:,.0f}" in text  # type: ignore[union-attr]
        assert f"{record.variants['N1, serial']['tokens_per_s']:,.0f}" in brief
    assert "Acceptance was set" in brief and len(brief) < len(text)


def test_replay_keeps_what_it_drew_and_follows_the_heat(small: ModelConfig) -> None:
    pairs = []
    for hot in (1.0, 3.0):
        bench = bench_of(small, depth=3, experts=(0, 4), sequences=3)
        plan = Slice(ranks=2, mode="replay", hot=hot, seed=3)
        exchanges = install(plan, bench.model, 6, CPU)
        step = decode_step(bench, bench.decode_inputs())
        with torch.inference_mode():
            first = step()
            drawn = [dict(e.drawn) for e in exchanges]
            assert torch.equal(step(), first)
        assert [dict(e.drawn) for e in exchanges] == drawn
        assert all(len(found) == 1 for found in drawn)
        pairs.append(sum(rows.pick.shape[0] for found in drawn for rows in found.values()))
        layer = bench.model.blocks[0].moe.ranks
        assert layer is not None and int(layer.counts.sum()) == 2 * 6 * small.num_experts_per_tok
    assert 2.0 < pairs[1] / pairs[0] < 4.0


def test_prefill_of_a_slice_runs_the_decoder_half_for_the_end_alone(small: ModelConfig) -> None:
    asked = Asked(
        depth=None, sequences=(1,), rows=48, context=0, ranks=2, replay="compact", keep=12,
        split=False,
    )  # fmt: skip
    plan = Slice(ranks=2, mode="replay")
    (record,) = measure_slice(small, "cpu", asked, plan, FABRIC, 3.0, prefill=True)
    assert record.tokens == 48 and record.law.startswith("a prompt")
    whole = Asked(depth=None, sequences=(1,), rows=48, context=0, ranks=2, split=False)
    (other,) = measure_slice(small, "cpu", whole, plan, FABRIC, 3.0, prefill=True)
    exposed = [r.variants["N1, serial"]["step_us"] - r.step_us for r in (record, other)]
    assert exposed[0] < exposed[1]


def test_ranks_that_a_row_needs(released: ModelConfig) -> None:
    """The specification's table: 4.43 of 8 with 400 slots, 5.8 of 64; here without copies."""
    assert Slice(ranks=8, mode="fold").distinct(released) == pytest.approx(4.43, abs=0.02)
    assert Slice(ranks=64, mode="fold").distinct(released) == pytest.approx(5.80, abs=0.02)
    assert Slice(ranks=1, mode="fold").distinct(released) == pytest.approx(1.0)
    assert Slice(ranks=8, mode="fold").experts(released) == (0, 48)


def test_the_network_is_latency_and_bytes(released: ModelConfig) -> None:
    plan = Slice(ranks=8, mode="fold")
    part = exchange_part(plan, released, 384, 40)
    net = Network(fabric=FABRIC, parts=(part,), hidden=5120, overlap_us=60.0)
    out = 384 * part.remote * 5376 / 350e3
    back = 384 * 6 * 7 / 8 * 10240 / 350e3
    assert out == pytest.approx(23.0, abs=0.5)  # as the specification works out
    assert net.layer_us(part) == pytest.approx(45.0 + out + back)
    assert net.serial_us == pytest.approx(40 * net.layer_us(part))
    assert net.overlapped_us == pytest.approx(40 * (net.layer_us(part) - 60.0))
    assert net.with_fabric(0.0, 1e9).serial_us == pytest.approx(0.0, abs=1e-3)
    far = Network(fabric=FABRIC, parts=(part,), hidden=5120, overlap_us=1e9)
    assert far.overlapped_us == 0.0


def test_waiting_for_the_fullest_rank(released: ModelConfig) -> None:
    few = sync_factor(Slice(ranks=8, mode="fold"), released, 6, 0.5)
    many = sync_factor(Slice(ranks=8, mode="fold"), released, 768, 0.5)
    assert few > many > 1.0
    assert sync_factor(Slice(ranks=64, mode="fold"), released, 768, 0.5) > many
    assert sync_factor(Slice(ranks=8, mode="fold"), released, 768, 0.0) == 1.0


def test_the_statement_says_what_was_not_there() -> None:
    text = statement(Slice(ranks=8, mode="fold"), "card", 40, 40, "a law", FABRIC, 1.1)
    for part in ("rank 0 of 8", "full depth", "a law", "350 GB/s", "1.100", "folded", "random"):
        assert part in text


def test_what_cannot_be_run_is_refused_at_once(released: ModelConfig) -> None:
    asked = Asked(depth=1, sequences=(1,), rows=6, context=1 << 30, ranks=7)
    with pytest.raises(ConfigError) as found:
        measure_slice(released, "cpu", asked, Slice(ranks=7, mode="fold", hot=2.0), FABRIC, 3.29)
    assert len(found.value.problems) == 3
    with pytest.raises(ConfigError):
        measure_steps("decode", released, "cpu", asked)


def test_records_of_others_are_refused() -> None:
    for line in ("[]", '{"format": 1, "suite": "kernels"}', '{"format": 1, "suite": "steps"}'):
        with pytest.raises(ValueError):
            read_step(line)


def test_the_page_shows_what_the_command_prints() -> None:
    root = Path(__file__).parents[2]
    kept = (root / "benchmarks" / "steps-h200.jsonl").read_text().splitlines()
    table = step_table([read_step(line) for line in kept], brief=True).partition("\n\n")[0]
    page = (root / "docs" / "benchmarks.md").read_text()
    assert "\n".join(line.rstrip() for line in table.splitlines()) in page
