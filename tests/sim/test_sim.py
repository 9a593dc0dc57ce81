"""The simulator against closed forms, brute force, a second form of itself, and measured tables."""

from __future__ import annotations

import itertools
import json
import math
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from deepinfer.bench.kernels import KernelRecord
from deepinfer.bench.report import read
from deepinfer.bench.simtimes import _LINEARS, measured_times
from deepinfer.bench.simulation import STUDIES, interval
from deepinfer.cli.main import main
from deepinfer.engine.costs import CostCurve
from deepinfer.engine.speculation import choose_rows
from deepinfer.errors import ConfigError
from deepinfer.sim.cluster import Cluster, simulate
from deepinfer.sim.events import bulk_us, event_us
from deepinfer.sim.prefill import prompt_us, simulate_prefill
from deepinfer.sim.settings import Settings, load_settings
from deepinfer.sim.times import distinct_ranks, load_times
from deepinfer.sim.verify import choose_alone, choose_together, likeliest

TIMES = load_times("h200")
SMALL = Settings(
    gpus=8, expert=8, copies=16, counted_layers=4, seqs=8, policy="none", steps=40, warmup=10
)


def test_one_rank_is_the_sum_of_its_parts() -> None:
    cluster = Cluster(
        SMALL.but(gpus=1, expert=1, copies=0, drafts=0, warmup=0, steps=3, output=1000.0), 0, TIMES
    )
    rows = np.full((1, 4, 384, 1), 2.0, np.float32)
    cluster.routing.rows = lambda placement, tokens: rows  # type: ignore[method-assign]
    told = 0.0
    for _ in range(3):
        keys = np.array([float(cluster._context.sum())])
        layer = TIMES.decode_layer(np.array([8.0]), keys)[0] + TIMES.experts(rows)[0, 0, 0]
        told += 40 * layer + TIMES.curves["head"](8) + TIMES.curves["sampler"](8)
        cluster.step()
    assert cluster.clock_us[0] == pytest.approx(told, rel=1e-6)
    outcome = cluster.outcome()
    assert outcome.exchange_share == 0 and outcome.balance == 1
    assert outcome.wait == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("draw", ["exact", "normal"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_even_routing_has_the_expected_maximum_of_a_multinomial(draw: str, ranks: int) -> None:
    settings = SMALL.but(gpus=ranks, expert=ranks, copies=0, counted_layers=40, seqs=400, steps=30,
                         warmup=2, hot=1.0, change=0.0, draw=draw, drafts=0,
                         output=1e6)  # fmt: skip
    found = simulate(settings, 0, TIMES).balance
    n = 400 * ranks * 6
    if ranks == 2:  # E max = n/2 + E|X - n/2|
        log = [math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(n)]
        spread = sum(abs(k - n / 2) * math.exp(v - n * math.log(2)) for k, v in enumerate(log))
        most = n / 2 + spread + n / 2 * 2.0**-n
    else:
        rng = np.random.default_rng(1)
        most = float(rng.multinomial(n, np.full(ranks, 1 / ranks), 40_000).max(axis=1).mean())
    assert found == pytest.approx(n / ranks / most, rel=4e-3)


def test_without_copies_the_hottest_expert_bounds_balance() -> None:
    settings = SMALL.but(gpus=64, expert=64, copies=0, counted_layers=8, hot=12.0, change=0.0,
                         policy="steps", window=16, warmup=30, seqs=64)  # fmt: skip
    cluster = Cluster(settings, 0, TIMES)
    found = cluster.run()
    bound = 384 / 64 / 12
    assert 0.9 * bound < found.balance <= 1.02 * bound


@pytest.mark.parametrize("place", ["pull", "fixed"])
@pytest.mark.parametrize(("groups", "prefill"), [(1, False), (2, True)])
def test_every_token_of_every_request_is_made_once(place: str, groups: int, prefill: bool) -> None:
    settings = SMALL.but(gpus=4 * groups, expert=4, copies=0, counted_layers=1, requests=150,
                         output=40.0, output_spread=0.0, prompt=300.0, prompt_spread=0.8,
                         place=place, prefill=prefill, batched=512,
                         patience=3)  # fmt: skip
    cluster = Cluster(settings, 3, TIMES)
    cluster.run()
    assert cluster.produced == 150 * 40
    assert not cluster._left.any() and not cluster._todo.any()


def test_a_full_batch_drains_in_as_many_steps_as_tokens() -> None:
    settings = SMALL.but(requests=64, drafts=0, output=25.0)
    cluster = Cluster(settings, 0, TIMES)
    outcome = cluster.run()
    assert cluster.num_steps == 25
    assert outcome.tokens_per_s == pytest.approx(64 * 25 / cluster.clock_us[0] * 1e6 / 8)
    assert outcome.tail == pytest.approx(1, abs=0.25)  # even speed to the end


def test_seeds_decide_everything_and_a_policy_does_not_change_the_load() -> None:
    assert simulate(SMALL, 5, TIMES) == simulate(SMALL, 5, TIMES)
    assert simulate(SMALL, 5, TIMES) != simulate(SMALL, 6, TIMES)
    settings = SMALL.but(output_spread=0.7, prompt_spread=0.7, difficulty=1.0, output=20.0)
    first = Cluster(settings, 5, TIMES)
    second = Cluster(settings.but(verify="none"), 5, TIMES)
    np.testing.assert_array_equal(first._total, second._total)


def test_both_fidelities_agree_without_jitter() -> None:
    rng = np.random.default_rng(0)
    fabric = TIMES.fabrics["node"]
    for ranks in (1, 2, 8, 16):
        dense = np.full((6, ranks), 400.0)
        experts = np.full((6, ranks), 250.0)
        sent = np.full((6, ranks, ranks), 2e5) + rng.normal(0, 1e3, (6, ranks, ranks))
        bulk = bulk_us(dense, experts, sent, fabric, 1.9)
        assert event_us(dense, experts, sent, fabric, 1.9) == pytest.approx(bulk, rel=0.02)
    late = event_us(dense, experts, sent, fabric, 1.9, {(3, 2): 500.0})
    assert late == pytest.approx(bulk + 500, rel=0.02)
    uneven = experts + rng.uniform(0, 100, experts.shape)
    assert event_us(dense, uneven, sent, fabric, 1.9) <= 1.02 * bulk_us(
        dense, uneven, sent, fabric, 1.9
    )


def test_planning_with_the_engines_code_brings_balance_and_is_gated() -> None:
    settings = SMALL.but(gpus=16, expert=16, copies=16, window=16, steps=60, warmup=30, seqs=64,
                         fabric="domain")  # fmt: skip
    none = simulate(settings, 0, TIMES)
    staged = simulate(settings.but(policy="steps"), 0, TIMES)
    stopped = simulate(settings.but(policy="totals", staged=False, warmup=0), 0, TIMES)
    assert staged.balance > none.balance + 0.1
    assert staged.plans == stopped.plans == 1
    assert stopped.moving > 0 and staged.moving == 0
    short = simulate(settings.but(policy="totals", interval=20, fabric="node"), 0, TIMES)
    assert short.plans == 0  # 20 steps do not pay for moving all those weights that slowly


def test_verification_together_is_the_best_of_all_choices() -> None:
    rng = np.random.default_rng(0)
    curve = CostCurve((1, 4, 12), (1.0, 1.1, 3.0), (1,), (0.05,))
    for _ in range(20):
        reach = np.cumprod(rng.random((3, 2, 2)), axis=2)
        busy = np.array([[True, True], [True, False], [True, rng.random() < 0.5]])
        own = busy.sum(axis=1)
        best = 0.0
        for counts in itertools.product(*(range(2 * n + 1) for n in own)):
            taken = likeliest(reach, busy, np.array(counts))
            gain = sum(reach[r, s, : taken[r, s]].sum() for r in range(3) for s in range(2))
            seconds = float(curve.step_s(int((own + counts).max()))) + 0.05
            best = max(best, (own.sum() + gain) / seconds)
        budgets = choose_together(reach, busy, curve)
        taken = likeliest(reach, busy, budgets)
        assert (taken.sum(axis=1) == budgets).all() and not taken[~busy].any()
        gain = sum(reach[r, s, : taken[r, s]].sum() for r in range(3) for s in range(2))
        seconds = float(curve.step_s(int((own + budgets).max()))) + 0.05
        assert (own.sum() + gain) / seconds == pytest.approx(best)
        alone = choose_alone(reach, busy, curve)
        told = sum(choose_rows(reach[0], curve, extra_s=0.05)[0])
        assert alone[0] == told


@pytest.mark.parametrize("verify", ["none", "fixed", "rank", "group"])
def test_each_way_of_verifying_runs(verify: str) -> None:
    settings = SMALL.but(verify=verify, difficulty=1.0, doubt=1.0, seqs=32, lag=1)
    found = simulate(settings, 0, TIMES)
    limits = {"none": (1, 1), "fixed": (5.5, 6), "rank": (1, 6), "group": (1, 6)}[verify]
    assert limits[0] <= found.verified_length <= limits[1] and 0 <= found.wasted < 0.8


def test_distinct_ranks_and_the_fits_reproduce_their_tables() -> None:
    table = {2: (384, 1.97), 4: (384, 3.30), 8: (400, 4.43), 16: (400, 5.16), 32: (416, 5.58),
             64: (448, 5.80), 128: (512, 5.91)}  # fmt: skip
    for ranks, (slots, told) in table.items():
        assert distinct_ranks(ranks, slots, 6) == pytest.approx(told, abs=6e-3)
    rng = np.random.default_rng(0)
    measured = {(48, 6): 38, (48, 24): 107, (48, 96): 208, (48, 192): 232, (48, 768): 247,
                (48, 3072): 377, (48, 24576): 1818, (6, 24): 47, (6, 192): 55, (6, 768): 86,
                (6, 3072): 253, (6, 24576): 1547}  # fmt: skip
    for (experts, rows), us in measured.items():
        drawn = rng.multinomial(rows, np.full(experts, 1 / experts), 20).astype(np.float32)
        assert TIMES.experts(drawn[..., None]).mean() == pytest.approx(us, rel=0.2)


def test_shared_prompts_take_less_time_to_the_first_token() -> None:
    settings = SMALL.but(requests=16, prompt=20000.0, prompt_spread=0.4)
    alone = simulate_prefill(settings, 1, 8192, 0, TIMES)
    shared = simulate_prefill(settings, 8, 8192, 0, TIMES)
    assert shared["first_token_ms"] < 0.5 * alone["first_token_ms"]
    with pytest.raises(ConfigError, match="do not divide"):
        simulate_prefill(settings, 3, 8192, 0, TIMES)
    whole, halves = (prompt_us(TIMES, settings, 8192, c, 4096) for c in (1, 2))
    assert halves < 0.62 * whole


def test_settings_name_every_problem_and_read_three_formats(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(gpus=10, expert=4, hot=100.0, acceptance=1.0)
    assert all(word in str(caught.value) for word in ("expert:", "hot:", "acceptance:"))
    with pytest.raises(ConfigError, match="verify"):
        Settings(verify="maybe")  # type: ignore[arg-type]
    for name, text in (
        ("a.json", '{"gpus": 16, "expert": 16, "hot": 2}'),
        ("a.toml", "gpus = 16\nexpert = 16\nhot = 2\n"),
        ("a.yaml", "gpus: 16\nexpert: 16\nhot: 2\n"),
    ):
        if name.endswith("yaml"):
            pytest.importorskip("yaml")
        (tmp_path / name).write_text(text)
        found = load_settings(tmp_path / name, ["seqs=3", "fabric=domain"])
        assert (found.gpus, found.hot, found.seqs, found.fabric) == (16, 2.0, 3, "domain")
    with pytest.raises(ConfigError, match="did you mean expert"):
        load_settings(None, ["exprt=4"])
    (tmp_path / "times.json").write_text('{"format": 1, "name": "x"}')
    with pytest.raises(ConfigError, match="curves"):
        load_times(str(tmp_path / "times.json"))


def test_intervals_are_students() -> None:
    mean, half = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (mean, half) == (3.0, pytest.approx(2.776 * math.sqrt(2.5 / 5)))


def test_the_command_runs_a_cluster_and_a_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [f"--set={pair}" for pair in ("gpus=4", "expert=4", "copies=0", "counted_layers=2",
                                         "steps=12", "warmup=6", "window=4", "seqs=4")]  # fmt: skip
    assert main(["sim", "run", "--seeds", "2", "--json", *sets]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["tokens_per_s"]) == 2
    assert main(["sim", "run", "--seeds", "2", *sets]) == 0
    assert "4 GPUs, 1 expert groups" in capsys.readouterr().out
    assert main(["sim", "run", "--set", "gpus=three"]) == 2
    assert main(["sim", "study", "nothing"]) == 2
    out = tmp_path / "study.jsonl"
    few = [f"--set={pair}" for pair in ("counted_layers=1", "gpus=8", "expert=8", "copies=0",
                                        "steps=6", "warmup=3", "window=4",
                                        "policy=none")]  # fmt: skip
    plot = ["--plot", str(tmp_path / "study.png")] if find_spec("matplotlib") else []
    assert main(["sim", "study", "skew", "--seeds=2", "--out", str(out), *plot, *few]) == 0
    assert capsys.readouterr().out.count("± ") == 3 * 3 * 5
    assert {record.suite for record in read(out)} == {"sim skew"}
    assert not plot or (tmp_path / "study.png").stat().st_size > 10_000


def test_every_study_is_made_of_valid_runs() -> None:
    for study in STUDIES.values():
        labels = [label for label, _ in study.lines(Settings(**study.base))]  # type: ignore[arg-type]
        assert len(labels) == len(set(labels)) > 1


def test_measured_kernels_take_the_place_of_stated_times() -> None:
    def record(task: str, rows: int, us: float, op: str = "x", failed: str = "") -> KernelRecord:
        return KernelRecord(task=task, rows=rows, name="n", op=op, case="c", note="",
                            invariant=True, us=us, failed=failed)  # fmt: skip

    records = [record(task, rows, rows / 4) for task in _LINEARS for rows in (32, 128)]
    records += [record("dense wq_b", 512, 9.0), record("hyper site", 32, 7.0)]
    records += [record("hyper site", 32, 1.0, op=""), record("hyper site", 32, 1.0, failed="no")]
    rng = np.random.default_rng(0)
    even = np.full(48, 1 / 48)
    for rows in (24, 192, 768, 3072, 24576):
        drawn = rng.multinomial(rows, even, 16).astype(np.float32)[..., None]
        records.append(record("experts both", rows, 1.4 * float(TIMES.experts(drawn).mean())))
    times, told = measured_times(TIMES, records)
    assert times.curves["linears"](128) == 6 * 32 and times.curves["linears"].rows == (32, 128)
    assert times.curves["hyper"](32) == 14 and times.curves["hyper"](64) == 28
    assert times.curves["attend"] is TIMES.curves["attend"]
    assert times.experts_fit.read_us == pytest.approx(1.4 * TIMES.experts_fit.read_us, rel=0.1)
    assert len(told) == 3


def test_predictions_stand_beside_measured_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from deepinfer.bench.simcheck import compare_steps, read_measured
    from deepinfer.bench.steps import StepRecord

    def record(**values: object) -> StepRecord:
        return StepRecord(form="slice", depth=40, of_depth=40, ranks=8, rows=6, context=16384,
                          burst_us=0.0, wall_us=None, idle=None, mode="graph", tokens=1.0,
                          tokens_per_s=1.0, **values)  # type: ignore[arg-type]  # fmt: skip

    file = tmp_path / "steps.jsonl"
    lines = [record(sequences=n, step_us=1e4).to_json() for n in (8, 64)]
    file.write_text("\n".join(lines) + "\n")
    found = compare_steps(TIMES, read_measured(file))
    assert found[0].told_us and found[1].told_us
    assert 5e3 < found[0].told_us < found[1].told_us < 1e5
    # The same load as a cluster of one step, its network taken away.
    cluster = SMALL.but(seqs=64, copies=0, prompt=16384.0, hot=1.0, change=0.0, output=400.0,
                        counted_layers=8)  # fmt: skip
    whole = simulate(cluster, 0, TIMES)
    without = whole.step_ms * 1e3 * (1 - whole.exchange_share)
    assert without == pytest.approx(found[1].told_us, rel=0.05)
    assert main(["sim", "check", str(file)]) == 0
    assert f"{found[0].ratio:.2f}" in capsys.readouterr().out


def test_times_are_fitted_to_steps_taken_apart_and_tell_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from deepinfer.bench.modelbench import choose_layers
    from deepinfer.bench.simfit import drawn_experts, fitted_times
    from deepinfer.bench.steps import StepRecord
    from deepinfer.config.load import released_config

    config = released_config()

    def record(sequences: int, ranks: int, context: int, split: bool) -> StepRecord:
        """A step of a made-up card: what a row and an expert take is known."""
        rows = sequences * 6
        experts = float(TIMES.experts(drawn_experts(384 // ranks, rows * 6)).mean())
        index = 0.5e-6 * rows * context
        dense, draft, ends = 100.0 + rows, 50.0 + sequences, 11.0 * sequences
        ops = {"routed_experts": 40 * experts, "paged_index_score": 40 * index,
               "fp8_linear": 40 * dense + 3 * draft, "other": ends}  # fmt: skip
        names = {f"{config.layers[i].kind} {config.layers[i].ratio}" for i in range(40)}
        kinds = {**dict.fromkeys(names, dense + index + experts), "draft": draft}
        return StepRecord(
            form="slice", depth=40, of_depth=40, ranks=ranks, rows=6, context=context,
            sequences=sequences, step_us=sum(ops.values()), burst_us=0.0, wall_us=None, idle=None,
            mode="graph", tokens=1.0, tokens_per_s=1.0, ops=ops if split else {},
            kinds=kinds if split else {},
        )  # fmt: skip

    assert len(choose_layers(config, 40)) == 40
    fit = [record(n, 8, 131072, True) for n in (1, 16, 32, 64)]
    other = [record(24, 8, 131072, False), record(32, 8, 40000, False), record(32, 64, 9999, False)]
    file = tmp_path / "steps.jsonl"
    file.write_text("".join(each.to_json() + "\n" for each in [*fit, *other]))
    times, told = fitted_times(TIMES, fit)
    assert times.experts_fit.read_us == pytest.approx(TIMES.experts_fit.read_us, rel=0.2)
    assert "4 steps of 6, 96, 192, 384 rows" in told
    links = tmp_path / "exchange.jsonl"
    links.write_text("".join(
        json.dumps({"what": "symm", "bytes": size, "graph_us": 30 + size / 2e5}) + "\n"
        for size in (1_000_000, 100_000_000)
    ))  # fmt: skip
    shared = {"suite": "scaling", "what": "symm", "ranks": 2, "depth": 6, "sequences": 32,
              "rows": 1, "context": 2048, "step_us": 5e3}  # fmt: skip
    with file.open("a") as lines:
        lines.write(json.dumps(shared) + "\n")
    assert main(["sim", "check", str(file), "--fit", str(file), "--exchange", str(links)]) == 0
    shown = capsys.readouterr()
    assert "30 us and 200 GB/s" in shown.err
    assert shown.out.count("  fitted\n") == 4 and "too few steps of its kind" in shown.out
    assert "predicted: 3 steps" in shown.out
    worst = float(shown.out.rsplit("average, ", 1)[1].split("%")[0])
    assert worst < 8
    assert main(["sim", "check", str(file), "--fit", str(file), "--hold", "16"]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("  fitted\n") == 3 and "predicted: 4 steps" in shown.out
    assert main(["sim", "check", str(file), "--each"]) == 0
    shown = capsys.readouterr()
    assert " fitted\n" not in shown.out and "predicted: 7 steps" in shown.out
    assert float(shown.out.rsplit("average, ", 1)[1].split("%")[0]) < 20  # bends elsewhere
    with file.open("w") as lines:  # beside its slice a shared step needs no fit
        for what, us in (("slice", 5e3), ("fixed", 9e3), ("symm", 5.2e3), ("whole", 6e3)):
            lines.write(json.dumps({**shared, "what": what, "step_us": us}) + "\n")
    assert main(["sim", "check", str(file), "--exchange", str(links)]) == 0
    shown = capsys.readouterr()
    bytes_sent = (
        32 * (distinct_ranks(2, 384, 6) * TIMES.dispatch_bytes + 6 * TIMES.combine_bytes) / 2
    )
    told = 5e3 + 6 * (30 + bytes_sent / 2e5)
    assert f"{told / 5.2e3:.2f}" in shown.out and "9.00" not in shown.out
    assert shown.out.count("  fitted\n") == 1 and "predicted: 2 steps" in shown.out
    more = [float(TIMES.experts(drawn_experts(held, 192)).mean()) for held in (384, 192)]
    assert f"{(5e3 + 6 * (more[0] - more[1])) / 1e3:.2f}" in shown.out


def test_kept_steps_are_told_within_a_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    """Each from other sizes, and the step of two GPUs from a slice and from exchanges."""
    folder = Path(__file__).parents[2] / "benchmarks"
    files = [str(folder / name) for name in ("sim-steps-h200.jsonl", "scaling-h200.jsonl")]
    links = str(folder / "exchange.jsonl")
    assert main(["sim", "check", *files, "--exchange", links, "--each"]) == 0
    predicted = capsys.readouterr().out.rsplit("predicted: ", 1)[1]
    assert int(predicted.split()[0]) >= 6
    assert float(predicted.split("average, ")[1].split("%")[0]) < 10
    unseen = str(folder / "sim-unseen-h200.jsonl")
    for fit, told in ((["--fit", unseen, "--hold", "32"], 1), ([], 3)):
        assert main(["sim", "check", unseen, *fit]) == 0
        predicted = capsys.readouterr().out.rsplit("predicted: ", 1)[1]
        assert int(predicted.split()[0]) == told
        assert float(predicted.split("average, ")[1].split("%")[0]) < 10
