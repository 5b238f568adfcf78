"""Label-skewed divisions of samples among rows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cgd import Cell, Grid, InputError, Skew

if TYPE_CHECKING:
    import numpy.typing as npt

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=8)


def labels_of(sizes: list[int]) -> npt.NDArray[Any]:
    return np.repeat(np.arange(len(sizes)), sizes)


def check_division(found: list[npt.NDArray[Any]], rows: int, samples: int) -> None:
    assert len(found) == rows
    assert all(len(row) for row in found)
    assert sorted(np.concatenate(found)) == list(range(samples))


@given(SIZES, st.integers(1, 12), st.integers(1, 8), st.integers(0, 99))
def test_each_row_has_the_number_of_classes_wherever_that_is_possible(
    sizes: list[int], rows: int, classes: int, seed: int
) -> None:
    labels = labels_of(sizes)
    # A class has at most as many parts as rows, and as samples; every class needs a row.
    possible = classes <= len(sizes) <= rows * classes <= sum(min(rows, size) for size in sizes)
    try:
        found = Skew(classes=classes).divide(labels, rows, seed)
    except InputError:
        assert not possible
        return
    assert possible
    check_division(found, rows, len(labels))
    assert {len(np.unique(labels[row])) for row in found} == {classes}
    for label in range(len(sizes)):  # the rows of a class have equal parts of it
        parts = [count for row in found if (count := int((labels[row] == label).sum()))]
        assert max(parts) - min(parts) <= 1


def test_more_rows_have_a_larger_class() -> None:
    labels = labels_of([600, 600, 600, 600, 1600])
    found = Skew(classes=2).divide(labels, 10, 3)
    assert [sum(label in labels[row] for row in found) for label in range(5)] == [3, 3, 3, 3, 8]
    assert [len(row) for row in found] == [400] * 10


def test_pairs_of_classes_are_drawn_at_random() -> None:
    labels = labels_of([60] * 10)
    pairs = [{tuple(np.unique(labels[row])) for row in Skew(classes=2).divide(labels, 30, seed)} for seed in range(3)]
    assert all(len(each) > 12 for each in pairs)  # of 45; a division in the order of classes has 5
    assert pairs[0] != pairs[1] != pairs[2]


@given(SIZES, st.integers(1, 40), st.sampled_from([5e-324, 1e-3, 0.1, 1.0, 1e9]), st.integers(0, 99))
def test_dirichlet_gives_every_sample_to_one_row_and_leaves_no_row_empty(
    sizes: list[int], rows: int, alpha: float, seed: int
) -> None:
    labels = labels_of(sizes)
    if rows > len(labels):
        with pytest.raises(InputError, match=f"^{len(labels)} samples are too few for {rows} rows"):
            Skew(dirichlet=alpha).divide(labels, rows, seed)
        return
    check_division(Skew(dirichlet=alpha).divide(labels, rows, seed), rows, len(labels))


def test_shares_of_a_class_are_distributed_as_dirichlet_shares() -> None:
    """A share has the mean 1/r and the variance (r − 1)/(r²·(rα + 1))."""
    rows, alpha = 4, 0.5
    labels = labels_of([1000] * 400)
    found = Skew(dirichlet=alpha).divide(labels, rows, 7)
    shares = np.array([np.bincount(labels[row], minlength=400) for row in found]) / 1000
    variance = (rows - 1) / (rows**2 * (rows * alpha + 1))
    # 400 independent draws per row: 5 standard errors of the mean; false positives below 1e-5 for all rows together.
    assert np.abs(shares.mean(axis=1) - 1 / rows).max() < 5 * math.sqrt(variance / 400)
    assert shares.var() == pytest.approx(variance, rel=0.2)
    even = Skew(dirichlet=1e9).divide(labels, rows, 7)
    assert np.array([np.bincount(labels[row], minlength=400) for row in even]).std() < 1


def test_rows_without_a_sample_take_one_from_the_largest() -> None:
    labels = np.zeros(50, dtype=np.int64)
    sizes = sorted(len(row) for row in Skew(dirichlet=1e-6).divide(labels, 8, 1))
    assert sizes == [1] * 7 + [43]  # with this α, one row has all samples of the class


def test_seed_determines_the_division() -> None:
    labels = labels_of([30] * 5)
    for skew in (Skew(classes=2), Skew(dirichlet=0.3)):
        first, same, other = (skew.divide(labels, 6, seed) for seed in (1, 1, 2))
        assert all(np.array_equal(*pair) for pair in zip(first, same, strict=True))
        assert not all(np.array_equal(*pair) for pair in zip(first, other, strict=True))


def test_split_gives_the_members_of_a_row_the_same_samples() -> None:
    labels = torch.from_numpy(labels_of([30] * 4))
    x = torch.arange(120.0).reshape(-1, 1) + torch.tensor([0.0, 1000.0, 2000.0])
    grid, skew = Grid(6, 3), Skew(classes=2)
    blocks = grid.split(x, labels, seed=5, skew=skew)
    for row, expected in enumerate(skew.divide(labels, 6, 5)):
        for cell in grid.row_peers(Cell(row, 0)):
            assert torch.equal(blocks[cell].x[:, 0] - 1000 * cell.column, torch.from_numpy(expected).float())
            assert torch.equal(blocks[cell].y, labels[expected])


def test_labels_may_be_any_whole_numbers_or_texts() -> None:
    for labels in (np.array([-3, 7] * 10), np.array([True, False] * 10), np.array(["a", "b"] * 10)):
        found = Skew(classes=1).divide(labels, 4, 0)
        assert [len(np.unique(labels[row])) for row in found] == [1] * 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Skew(), "classes is None and dirichlet is None; a skew has exactly one of them"),
        (lambda: Skew(2, 0.1), "classes is 2 and dirichlet is 0.1; a skew has exactly one of them"),
        (lambda: Skew(classes=-1), "classes is -1; it must be a whole number from 1"),
        (lambda: Skew(dirichlet=math.nan), "dirichlet is nan; it must be a number above 0"),
        (lambda: Skew(classes=4).divide(labels_of([9] * 3), 5, 0), "4 classes and there are 3; set fewer classes"),
        (lambda: Skew(classes=2).divide(labels_of([9] * 5), 2, 0), "2 rows of 2 .* hold at most 4 of 5 classes; set"),
        (lambda: Skew(classes=2).divide(labels_of([9, 1]), 3, 0), "need 6 parts of classes, .* suffice for 4; set fe"),
        (lambda: Skew(classes=1).divide(labels_of([2, 1]), 4, 0), "^3 samples are too few for 4 rows"),
        (lambda: Skew(classes=1).divide(np.zeros(9), 3, 0), "type float64 and the shape .9,.; a skew divides classes"),
        (lambda: Skew(dirichlet=1).divide(np.zeros((9, 1), int), 3, 0), "the shape .9, 1.; a skew divides classes"),
        (
            lambda: Grid(2).split(np.zeros((4, 1)), labels_of([2, 2]), seed=None, skew=Skew(classes=1)),
            "there is a skew, the seed is None",
        ),
        (
            lambda: Grid(2).split(np.zeros((4, 1)), labels_of([2, 2]), row_shares=(1, 1), skew=Skew(classes=1)),
            "the shares of samples are .1, 1.; a skew needs a seed",
        ),
    ],
)
def test_invalid_skews_are_rejected(call: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
