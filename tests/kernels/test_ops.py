"""Every line of the dispatch table over every case: right, the same bits in any batch, checked."""

from __future__ import annotations

import dataclasses
from importlib import import_module

import pytest
import torch
from tests.kernels.twins import TWINS
from torch import Tensor

from deepinfer.device import pick_device
from deepinfer.errors import ShapeError, UnsupportedError
from deepinfer.kernels.cases import Case, all_cases, num_bytes
from deepinfer.kernels.ops import Ops, choose
from deepinfer.kernels.table import TABLE, W4A8

CAPABILITY = pick_device("cpu").capability
OPS = Ops.resolve(CAPABILITY)
REFERENCE = Ops.resolve(CAPABILITY, only_reference=True)
CASES = [case for case in all_cases() if not case.large]
STORES = {"cache_store", "entry_store"}  # returns nothing: see test_cache_io
BATCH = 40


def tensors(result: object) -> list[Tensor]:
    found = [result] if isinstance(result, Tensor) else list(result)
    assert all(isinstance(t, Tensor) for t in found)
    return found


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype.is_floating_point and a.dtype == b.dtype:  # NaN = NaN, 0 != -0
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
        return torch.equal(a.view(bits), b.view(bits))
    return a.dtype == b.dtype and torch.equal(a, b)


def build(case: Case, num_rows: int, seed: int) -> tuple[object, ...]:
    return case.build(num_rows, torch.Generator().manual_seed(seed))


@pytest.fixture(params=CASES, ids=lambda c: f"{c.op}-{c.name}")
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def test_every_op_has_cases_and_a_twin() -> None:
    assert {c.op for c in CASES} == set(TABLE) - STORES == set(TWINS)
    names = [(c.op, c.name) for c in CASES]
    assert len(names) == len(set(names))


def test_equals_its_exact_twin(case: Case, seed: int) -> None:
    got = tensors(getattr(REFERENCE, case.op)(*build(case, 13, seed)))
    want = tensors(TWINS[case.op](*build(case, 13, seed)))  # an op may reuse what it is handed
    assert len(got) == len(want)
    for mine, exact in zip(got, want, strict=True):
        assert mine.shape == exact.shape
        if not mine.dtype.is_floating_point:
            assert torch.equal(mine, exact)
            continue
        if case.tolerance == 0.0:
            assert same_bits(mine, exact.to(mine.dtype))
            continue
        infinite = exact.isinf()
        assert torch.equal(mine[infinite].double(), exact[infinite])
        mine, exact = mine[~infinite], exact[~infinite]
        spread = exact.square().mean().sqrt()
        rounding = torch.finfo(mine.dtype).eps / 2 * exact.abs()
        assert (mine.double() - exact).abs().sub(rounding).max() <= case.tolerance * spread


def test_every_implementation_equals_the_reference(case: Case, seed: int) -> None:
    for implementation in TABLE[case.op]:
        if implementation.archs and CAPABILITY.arch not in implementation.archs:
            continue
        function = getattr(import_module(f"deepinfer.kernels.{implementation.module}"), case.op)
        for num_rows in (1, 7, BATCH):
            arguments = build(case, num_rows, seed)
            want = tensors(getattr(REFERENCE, case.op)(*arguments))
            for a, b in zip(tensors(function(*arguments)), want, strict=True):
                assert same_bits(a, b), implementation.name


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_in_any_batch(case: Case, threads: int, seed: int) -> None:
    torch.set_num_threads(threads)
    arguments = build(case, BATCH, seed)
    op = getattr(OPS, case.op)
    together = tensors(op(*arguments))
    groups = [torch.arange(n) for n in range(1, BATCH)]
    groups += [torch.arange(n, BATCH) for n in (1, 5, 16, 39)]
    groups += [torch.tensor([row]) for row in range(0, BATCH, 3)]
    groups += [torch.arange(start, BATCH, 5) for start in range(5)]
    for group in groups:
        apart = tensors(op(*case.select(arguments, group)))
        for whole, part in zip(together, apart, strict=True):
            assert same_bits(whole[group], part), f"rows {group.tolist()}"


def test_threads_change_no_bit(case: Case, seed: int) -> None:
    arguments = build(case, 96, seed)
    one = tensors(getattr(OPS, case.op)(*arguments))
    torch.set_num_threads(2)
    two = tensors(getattr(OPS, case.op)(*arguments))
    assert all(same_bits(a, b) for a, b in zip(one, two, strict=True))


def test_leaves_its_arguments_alone(case: Case, seed: int) -> None:
    arguments = build(case, 5, seed)
    getattr(OPS, case.op)(*arguments)
    again = build(case, 5, seed)
    for used, fresh in zip(arguments, again, strict=True):
        if isinstance(used, Tensor):
            assert isinstance(fresh, Tensor) and same_bits(used, fresh)


def test_no_rows_give_no_rows(case: Case, seed: int) -> None:
    some = build(case, 3, seed)
    none = case.select(some, torch.arange(0))
    want = tensors(getattr(OPS, case.op)(*some))
    for empty, full in zip(tensors(getattr(OPS, case.op)(*none)), want, strict=True):
        assert empty.shape == (0, *full.shape[1:]) and empty.dtype == full.dtype


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if len(c.rows) > 1 and c.take is None],
    ids=lambda c: f"{c.op}-{c.name}",
)
def test_a_missing_row_is_refused(case: Case, seed: int) -> None:
    """Arguments with one row per result row must agree about their number."""
    arguments = list(build(case, 4, seed))
    place = next(p for p in case.rows[1:] if arguments[p] is not None)
    arguments[place] = arguments[place][:-1]
    with pytest.raises(ShapeError, match=case.op):
        getattr(OPS, case.op)(*arguments)


def test_large_cases_are_sized_like_the_release(seed: int) -> None:
    large = [c for c in all_cases() if c.large]
    assert {c.op for c in large} >= {"rms_norm", "fp8_linear", "sparse_attention"}
    case = next(c for c in large if c.op == "rms_norm")
    assert num_bytes(*build(case, 2, seed)) == 3 * 5120 * 2


def test_choices_name_what_runs() -> None:
    assert set(OPS.choices) == set(TABLE)
    assert OPS.choices["hyper_mix"].name == "cpu"
    assert REFERENCE.choices["hyper_mix"].name == "reference"
    for op, lines in TABLE.items():
        last = [line for line in lines if line.chosen][-1]
        assert last.name == "reference" and not last.archs, op
        assert all(line.why for line in lines)


def test_what_is_asked_for_by_name_is_taken_or_refused() -> None:
    card = dataclasses.replace(CAPABILITY, arch="sm90")
    assert choose("rms_norm", card, asked="triton").name == "triton"
    with pytest.raises(UnsupportedError, match=r"routed_experts: there is no cuda W4A8 for cpu"):
        choose("routed_experts", CAPABILITY, asked=W4A8)


def test_another_chip_falls_back_to_the_reference() -> None:
    other = dataclasses.replace(CAPABILITY, arch="unheard of")
    assert {choose(op, other).name for op in TABLE} == {"reference"}


def test_an_op_without_implementation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = tuple(line for line in TABLE["hyper_mix"] if line.archs)
    monkeypatch.setattr("deepinfer.kernels.ops.TABLE", {"hyper_mix": lines})
    with pytest.raises(UnsupportedError, match=r"hyper_mix.*ascend950"):
        choose("hyper_mix", dataclasses.replace(CAPABILITY, arch="ascend950"))


def test_unchecked_ops_compute_the_same(seed: int) -> None:
    bare = Ops.resolve(CAPABILITY, checked=False)
    for case in CASES:
        arguments = build(case, 3, seed)
        want = tensors(getattr(OPS, case.op)(*arguments))
        for a, b in zip(tensors(getattr(bare, case.op)(*arguments)), want, strict=True):
            assert same_bits(a, b), case
