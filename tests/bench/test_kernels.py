"""`deepinfer bench kernels` on a CPU: what is listed, timed, compared, recorded and drawn."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from deepinfer.bench import kernels, kernelworker, peers, points, timing
from deepinfer.bench.ceilings import Ceilings
from deepinfer.bench.kernelreport import GOAL_POINTS, GOALS, kernel_table, reached, sums
from deepinfer.bench.kernels import KernelRecord, measure_kernels, read_record
from deepinfer.bench.peers import list_peers
from deepinfer.bench.points import clone_set, list_members, stored_bytes
from deepinfer.cli.main import main
from deepinfer.errors import UnsupportedError
from deepinfer.kernels.cache_io.cases import empty_cache
from deepinfer.kernels.cases import all_cases
from deepinfer.kernels.hyper_site import SiteWeights
from deepinfer.kernels.linear import DenseWeight, Fp8Weight
from deepinfer.kernels.table import TABLE

CPU = torch.device("cpu")


def record(task: str, rows: int, name: str, us: float, **more: object) -> KernelRecord:
    plain = {"op": "some_op", "case": "real", "note": "", "invariant": True}
    return KernelRecord(task=task, rows=rows, name=name, us=us, **plain | more)  # type: ignore[arg-type]


def test_every_op_and_every_implementation_of_a_cpu_is_listed() -> None:
    members = list_members("small", "cpu")
    listed = {(m.op, m.name) for m in members}
    cased = {case.op for case in all_cases()}
    for op, lines in TABLE.items():
        if op in cased:
            here = {line.name for line in lines if not line.archs or "cpu" in line.archs}
            assert {name for found, name in listed if found == op} == here, op
    assert len({m.key for m in members}) == len(members)


def test_every_large_case_names_its_row_counts() -> None:
    for case in all_cases():
        assert bool(case.timed) == case.large, (case.op, case.name)
    tasks = {m.task for m in list_members("real", "sm90")}
    for goal in GOALS:
        if goal.name != "hyper site":  # joins with its op
            assert tasks >= set(goal.tasks), goal


def test_a_task_of_a_goal_is_one_case_of_an_op() -> None:
    tasks = {task for goal in GOALS for task in goal.tasks if task != "attention decode"}
    cases: dict[str, set[tuple[str, str]]] = {}
    for member in list_members("real", "sm90"):
        if member.op and member.task in tasks:
            cases.setdefault(member.task, set()).add((member.op, member.case))
    found = {task: held for task, held in cases.items() if len(held) != 1}
    assert set(found) == {"attention prefill"}  # entries in pages, or gathered before
    rows = {(m.task, m.rows) for m in list_members("real", "sm90") if m.op}
    assert {(task, goal.rows) for goal in GOALS for task in goal.tasks} <= rows


def test_peers_are_for_cards_and_real_shapes_only() -> None:
    assert list_peers("real", "cpu") == [] == list_peers("small", "sm90")
    names = {peer.name for peer in list_peers("real", "sm90")}
    assert {"cuBLAS bf16", "torch.topk bf16"} <= names
    assert all(peer.op == "" and peer.note is not None for peer in list_peers("real", "sm90"))


def test_a_pattern_chooses_by_op_task_and_case() -> None:
    assert {m.op for m in list_members("small", "cpu", "hyper_mix")} == {"hyper_mix"}
    assert {m.name for m in list_members("small", "cpu", "hyper_mix", skip=["cpu"])} == {
        "reference"
    }
    assert list_members("small", "cpu", "no such op") == []
    some = list_members("small", "cpu", "hyper_mix", skip=[r"hyper_mix.* \| .*cpu$"])
    assert {m.name for m in some} == {"reference"}
    marked = list_members("real", "sm90", points=GOAL_POINTS)
    assert {(m.task, m.rows) for m in marked} <= GOAL_POINTS
    assert ("top-512", 768) in GOAL_POINTS and ("top-512", 32) not in GOAL_POINTS


def test_a_worker_times_and_compares() -> None:
    for member in list_members("small", "cpu", "^select_topk$|^swiglu$"):
        checked = kernelworker.warm(member, CPU)
        assert checked["error"] is not None and checked["error"] < 5e-3, member.key
    members = list_members("small", "cpu", "swiglu")
    told = kernelworker.measure(members, CPU)
    assert set(told) == {m.key for m in members}
    for found in told.values():
        assert found["us"] > 0 and found["us_min"] <= found["us_burst"] and found["mode"] == "clock"
        assert found["flops"] > 0 and found["bytes"] > 0


def test_a_wrong_implementation_is_told_by_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer.kernels.topk import cpu

    (member,) = (m for m in list_members("small", "cpu", "select_topk") if m.name == "cpu")
    right = cpu.select_topk

    def wrong(scores: torch.Tensor, visible: torch.Tensor, count: int) -> torch.Tensor:
        out = right(scores, visible, count)
        out[0, 0] += 1
        return out

    monkeypatch.setattr(cpu, "select_topk", wrong)
    assert kernelworker.warm(member, CPU)["error"] > 0


def test_nan_is_an_error() -> None:
    case = next(c for c in all_cases() if c.op == "swiglu" and not c.large)
    line = TABLE["swiglu"][-1]
    work = points.op_work(case, 4, line, CPU)
    error = work.check()
    assert error is not None and error < 5e-3
    arguments = case.build(4, torch.Generator().manual_seed(7))
    broken = lambda *a: torch.full((4, 32), float("nan"), dtype=torch.bfloat16)
    found = points._error(case, 4, broken, arguments, CPU)
    assert found is not None and found != found


def test_sets_are_copies_that_share_nothing_and_keep_their_views() -> None:
    cache = empty_cache("main_fp4", 3, 4, 64, dense=False, split=True)
    pair = torch.arange(8.0).view(2, 4)
    named = SiteWeights(DenseWeight(pair, None), pair, pair, pair)
    copied = clone_set((cache, (pair, pair[:, 1:3]), 5, None, named))
    twin, (whole, part), five, nothing, again = copied  # type: ignore[misc]
    assert isinstance(again, SiteWeights) and again.norm.data_ptr() != pair.data_ptr()
    assert five == 5 and nothing is None
    assert twin.codes.stride() == cache.codes.stride()  # type: ignore[attr-defined]
    storage = twin.codes.untyped_storage().data_ptr()  # type: ignore[attr-defined]
    assert twin.scales.untyped_storage().data_ptr() == storage  # type: ignore[attr-defined]
    assert storage != cache.codes.untyped_storage().data_ptr()
    whole[0, 1] = 99.0
    assert part[0, 0] == 99.0 and pair[0, 1] == 1.0


def test_bytes_are_of_the_stored_form() -> None:
    codes = torch.zeros(64, 64, dtype=torch.float8_e4m3fn)
    weight = Fp8Weight(codes, torch.zeros(2, 2, dtype=torch.uint8), torch.zeros(64, 64))
    assert stored_bytes((weight, torch.zeros(2, dtype=torch.bfloat16), 3)) == 64 * 64 + 4 + 4


def test_rotation_covers_the_cache_within_the_limit() -> None:
    assert timing.num_sets(100_000_000, 1 << 40) == 3
    assert timing.num_sets(1, 1 << 40) == 64
    assert timing.num_sets(100_000_000, 150_000_000) == 1
    with timing.single_sets():
        assert timing.num_sets(1, 1 << 40) == 1


def test_the_floor_is_the_larger_of_memory_and_arithmetic() -> None:
    found = Ceilings(copy=1e12, read=2e12, bf16=1e12, bf16_steady=5e11, fp8=2e12, fp8_steady=1e12)
    assert found.floor_us(2e6, 0, "bf16", False) == pytest.approx(1.0)
    assert found.floor_us(2e6, 4e6, "bf16", True) == pytest.approx(8.0)
    assert found.floor_us(0, 4e6, "fp8", False) == pytest.approx(2.0)


def test_a_run_writes_records_a_table_and_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "kernels.jsonl", tmp_path / "kernels.png"
    flags = ["--device", "cpu", "--op", "hyper_collapse", "--out", str(out), "--plot", str(page)]
    assert main(["bench", "kernels", *flags]) == 0
    printed = capsys.readouterr().out
    records = [read_record(line) for line in out.read_text().splitlines()]
    assert {r.name for r in records} == {"cpu", "reference"}
    for found in records:
        assert not found.failed and found.us > 0 and found.floor_us > 0
        assert found.error is not None and found.error < 5e-3
        assert found.ceilings and found.ceilings["read"] > 0
        assert "card" not in (found.machine or {})
    assert page.stat().st_size > 1000
    again = tmp_path / "again.png"
    assert main(["bench", "show", str(out), "--plot", str(again)]) == 0
    assert capsys.readouterr().out == printed and again.stat().st_size > 1000


def test_members_can_be_timed_alone_with_errors_of_an_earlier_run(tmp_path: Path) -> None:
    out, again = tmp_path / "compared.jsonl", tmp_path / "alone.jsonl"
    common = ["bench", "kernels", "--device", "cpu", "--op", "^swiglu$"]
    assert main([*common, "--compile-only", "--out", str(out)]) == 0
    compared = [read_record(line) for line in out.read_text().splitlines()]
    assert all(r.failed.startswith("not timed") and r.error is not None for r in compared)
    # An error that no comparison gives, to be seen again; one of other sources is not taken.
    marked, stale = (replace(r, error=0.5) for r in compared)
    stale = replace(stale, versions={"sources": "others"})
    out.write_text("".join(r.to_json() + "\n" for r in (marked, stale)))
    alone = ["--compared", str(out), "--alone", "0.01", "--out", str(again)]
    assert main([*common, *alone]) == 0
    found = {r.name: r for r in map(read_record, again.read_text().splitlines())}
    assert found[marked.name].error == 0.5
    assert found[stale.name].error not in (None, 0.5)
    assert all(r.us > 0 and r.rest_s == 0.01 for r in found.values())
    assert "each alone after 0.01 s" in kernel_table(list(found.values()), brief=True)


def test_a_worker_that_hangs_or_dies_costs_its_member_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "fakeworker.py"
    script.write_text(
        "import json, sys, time\n"
        "print('@' + json.dumps(['ready', 'cpu']), flush=True)\n"
        "for line in sys.stdin:\n"
        "    ask = json.loads(line)\n"
        "    keys = ask['keys']\n"
        "    if ask['mode'] == 'ceilings':\n"
        "        told = dict(copy=1.0, read=1.0, bf16=1.0, bf16_steady=1.0)\n"
        "    elif ask['mode'] == 'warm':\n"
        "        told = {'error': 0.0, 'first_s': 0.1}\n"
        "    else:\n"
        "        for key in keys:\n"
        "            print('@' + json.dumps(['start', key]), flush=True)\n"
        "            if key.endswith('cpu'):\n"
        "                time.sleep(60) if 'swiglu' in key else sys.exit(1)\n"
        "        told = {k: dict(us=1.0, us_burst=1.0, us_min=1.0, steady=False, mode='clock',\n"
        "                        calls=1, sets=1, flops=1.0, bytes=1.0) for k in keys}\n"
        "    print('noise')\n"
        "    print('@' + json.dumps(['answer', told]), flush=True)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(kernels, "_WORKER", "fakeworker")
    monkeypatch.setattr(kernels, "_MEASURE_S", 1.0)
    found = {
        (r.op, r.name): r.failed
        for r in measure_kernels("cpu", "small", "^swiglu$|hyper_collapse", workers=2)
    }
    monkeypatch.setattr(kernels, "_WARM_SHARE", 0.0)
    records = measure_kernels("cpu", "small", "hyper_collapse")
    assert [r.failed for r in records] == ["left out"] * 2
    assert found["swiglu", "reference"] == found["hyper_collapse", "reference"] == ""
    assert found["swiglu", "cpu"] == "took more than 1 s"
    assert found["hyper_collapse", "cpu"] == "the process ended"


def test_what_takes_long_to_compile_comes_first_once() -> None:
    members = list_members("real", "sm90", "attention decode|top-512")
    made = [replace(m, built=m.op if m.name == "triton" else "") for m in members]
    order = kernels._compile_order(made)
    assert sorted(m.key for m in order) == sorted(m.key for m in made)
    sources = {m.built for m in made if m.built}
    assert {m.built for m in order[: len(sources)]} == sources
    assert all(
        m.built for m in order[len(order) - len([m for m in made if m.built]) + len(sources) :]
    )


def test_one_ops_implementation_can_be_left_out() -> None:
    whole = list_members("small", "cpu", "swiglu|select_topk")
    part = list_members("small", "cpu", "swiglu|select_topk", skip=["swiglu/cpu"])
    assert {(m.op, m.name) for m in whole} - {(m.op, m.name) for m in part} == {("swiglu", "cpu")}


def test_sums_take_whole_layers_only() -> None:
    goal = next(g for g in GOALS if g.name == "six dense linears")
    records = [record(task, 32, "triton", 10.0) for task in goal.tasks]
    records += [record(task, 32, "other", 5.0) for task in goal.tasks[1:]]
    records += [record(task, 32, "cuBLAS", 1.0, op="") for task in goal.tasks]
    assert set(sums(records)) == {
        ("six dense linears", 32, "triton", 60.0),
        ("six dense linears", 32, "cuBLAS", 6.0),
        ("six dense linears", 32, "best of ours", 35.0),
    }
    assert "best of ours" in kernel_table(records)


def test_goals_stand_beside_the_best_of_a_run() -> None:
    records = [
        record("attention decode", 32, "triton", 20.0),
        record("attention decode", 32, "cuda", 11.0),
        record("attention decode", 32, "FlashMLA", 25.0, op=""),
        record("attention decode", 32, "TileKernels", 1.0),  # an adapter is not ours
        record("experts gate and up", 192, "cuda fp8", 100.0),
        record("experts gate and up", 192, "cuda", 170.0),
        record("experts down", 192, "cuda", 80.0),
        record("experts both", 192, "cuda", 240.0),
        record("experts gate and up", 192, "DeepGEMM FP8", 1.0, op=""),
        record("experts down", 192, "DeepGEMM FP8", 1.0, op=""),  # other weights
        record("hyper site", 32, "cuda", 12.0),
    ]
    found = {(r.goal.name, r.goal.rows): r for r in reached(records)}
    attention = found["attention decode", 32]
    assert (attention.us, attention.name, attention.peer_us) == (11.0, "cuda", 1.0)
    assert found["experts, exact", 192].us == 240.0
    assert found["experts, exact", 192].peer_us == 0.0
    assert ("experts, W4A8", 192) not in found  # half of it is no mark
    assert found["hyper site", 32].us == 12.0
    text = kernel_table(records)
    assert "reached" in text and "x 1.50" in text


def test_records_round_trip_and_others_are_refused() -> None:
    one = record("t", 1, "triton", 2.0, error=1e-3)
    assert read_record(one.to_json()) == one
    for line in (
        "[]",
        '{"format": 1, "suite": "cpu"}',
        '{"format": 1, "suite": "kernels", "x": 1}',
    ):
        with pytest.raises(ValueError):
            read_record(line)
    assert json.loads(one.to_json())["suite"] == "kernels"


def test_a_card_that_is_absent_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="cuda"):
        measure_kernels("cuda:63", "small")


def test_unseen_entries_are_no_error() -> None:
    (member, *_) = list_members("small", "cpu", "^paged_index_score$")
    error = member.build(CPU).check()
    assert error is not None and error < 0.05  # its keys that a row does not see are -inf


def test_the_page_shows_what_the_command_prints() -> None:
    root = Path(__file__).parents[2]
    kept = (root / "benchmarks" / "kernels-h200.jsonl").read_text().splitlines()
    table = kernel_table([read_record(line) for line in kept], brief=True)
    page = (root / "docs" / "kernels.md").read_text()
    assert "\n".join(line.rstrip() for line in table.splitlines()) in page


def test_peers_are_compared_with_fp32() -> None:
    for build in (
        partial(peers._mm, 3, 40, 64),
        partial(peers._torch_topk, 2),
    ):
        with timing.single_sets():
            error = build(CPU).check()
        assert error is not None and error < 5e-3
