"""The 16-row products: right, and the same bits for any number of rows."""

from __future__ import annotations

import pytest
import torch

from deepinfer.errors import ShapeError
from deepinfer.kernels.contract import check
from deepinfer.kernels.rows import ROW_BLOCK, matmul_rows, sigmoid, sum_in_order


@pytest.mark.parametrize(("columns", "outputs"), [(32, 2048), (64, 1), (160, 33), (1024, 64)])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_in_any_batch(columns: int, outputs: int, threads: int) -> None:
    torch.set_num_threads(threads)
    x, weight = torch.randn(5 * ROW_BLOCK - 3, columns), torch.randn(outputs, columns)
    whole = matmul_rows(x, weight)
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(whole.double(), exact, rtol=0, atol=1e-3)
    for size in range(1, 41):
        start = (7 * size) % (len(x) - size)
        part = matmul_rows(x[start : start + size], weight)
        assert torch.equal(part, whole[start : start + size]), size


def test_sum_in_order_goes_left_to_right() -> None:
    x = torch.tensor([[1e8, 1.0, -1e8, 1.0]])
    assert sum_in_order(x, 1).tolist() == [1.0]
    assert sum_in_order(x.flip(1), 1).tolist() == [0.0]
    assert sum_in_order(x[:, :1], 1).tolist() == [1e8]


def test_sigmoid_ignores_the_place_in_memory() -> None:
    x = torch.randn(1000) * 20
    whole = sigmoid(x)
    assert all(torch.equal(sigmoid(x[i:]), whole[i:]) for i in range(1, 40))
    torch.testing.assert_close(whole, torch.sigmoid(x), rtol=1e-6, atol=1e-38)
    assert sigmoid(torch.tensor([-200.0, 200.0])).tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("spec", "other", "problem"),
    [
        ("T D", "T", r"b has shape \(3, 4\), expected \[T\]"),
        ("T D", "D T", r"b has shape \(3, 4\), expected \[D T\] with D = 4"),
        ("T D", "T 5", r"b has shape \(3, 4\), expected \[T 5\] with 5 = 5"),
        ("T D E", "T D", r"a has shape \(3, 4\), expected \[T D E\]"),
        ("T T", "T D", r"a has shape \(3, 4\), expected \[T T\] with T = 3"),
    ],
)
def test_the_contract_names_what_is_wrong(spec: str, other: str, problem: str) -> None:
    a = torch.zeros(3, 4)
    with pytest.raises(ShapeError, match=f"^op: {problem}"):
        check("op", ("a", a, spec), ("b", a, other))


def test_the_contract_accepts_what_agrees() -> None:
    a = torch.zeros(3, 4)
    check("op", ("a", a, "T D"), ("b", a, "T _"), ("c", a.T, "D T"), ("d", a, "3 4"))
