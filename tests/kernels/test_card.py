"""Every implementation of the card that is there; and that the program which tells finds errors."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from tests.kernels import card_run

from deepinfer.kernels.cases import all_cases
from deepinfer.kernels.paged_attention import sm90
from deepinfer.kernels.table import TABLE

PROGRAM = Path(card_run.__file__)


@pytest.mark.gpu
def test_implementations_equal_the_reference_and_rows_their_batch() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_every_source_has_a_case_of_the_released_dimensions() -> None:
    cased = {case.op for case in card_run.released()}
    assert {op for op, lines in TABLE.items() if any(e.needs == "nvcc" for e in lines)} <= cased


def test_packed_entries_stay_packed_on_their_way_to_a_card() -> None:
    case = next(c for c in card_run.released() if c.op == "paged_attention")
    given = case.build(2, torch.Generator().manual_seed(0))
    q, window, _, main, main_idx, _, _, rounded = card_run.moved(given, torch.device("cpu"))
    assert sm90.accepts(q, window, main, main_idx, rounded)
    assert window.codes.data_ptr() != given[1].codes.data_ptr()  # type: ignore[union-attr]


def test_definitions_make_what_they_need_where_their_inputs_are() -> None:
    """Nothing is made on the default device, which is another one here."""
    wrong = []
    for case in all_cases():
        if case.large:
            continue
        arguments = case.build(129, torch.Generator().manual_seed(1))
        (line,) = (e for e in TABLE[case.op] if e.name == "reference")
        function = getattr(import_module(f"deepinfer.kernels.{line.module}"), case.op)
        try:
            with torch.device("meta"):
                found = card_run.tensors(function(*arguments))
        except Exception as error:
            wrong.append(f"{case.op} {case.name}: {type(error).__name__} {str(error)[:80]}")
            continue
        if any(part.is_meta for part in found):
            wrong.append(f"{case.op} {case.name}: made elsewhere")
    assert not wrong, wrong


def test_wrong_values_unwritten_ones_and_shapes_are_told() -> None:
    right = torch.linspace(-2.0, 2.0, 64, dtype=torch.bfloat16)
    near = torch.nextafter(right, torch.ones_like(right))
    assert card_run.problem(1e-4, near, right) == ""
    for wrong in (right * 1.1, torch.full_like(right, torch.nan), right.masked_fill(right > 1, 9)):
        assert "error" in card_run.problem(1e-4, wrong, right)
    assert "64 of 64" in card_run.problem(0.0, right + 1, right)
    assert "infinities" in card_run.problem(1e-4, right, right.masked_fill(right > 1, torch.inf))
    rows = right.view(4, 16)
    assert card_run.row_problem(1e-2, rows, rows) == ""
    assert "row is off" in card_run.row_problem(1e-2, rows.masked_fill(rows == rows[2, 3], 3), rows)
    assert "(32,)" in card_run.problem(1e-4, right[:32], right)
