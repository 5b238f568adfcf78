"""`cgd privacy`: the budget of a data set, raised only by an explicit option, and the expected cost of noise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from cgd.cli import app
from cgd.dp.budget_file import BudgetFile
from cgd.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def budget(tmp_path: Path) -> BudgetFile:
    made = BudgetFile(tmp_path / "records.budget", epsilon=2.0, delta=1e-5)
    made.charge(0.01, "five-hospitals", "a step")
    made.charge(0.01, "five-hospitals", "a step")
    return made


def run(*arguments: str, command: str = "budget") -> list[str]:
    result = CliRunner().invoke(app, ["privacy", command, *arguments], catch_exceptions=False)
    return result.output.splitlines()


def test_budget_is_shown_by_training(budget: BudgetFile) -> None:
    limit, spent, left, training = run(str(budget.path))
    assert limit == "limit: epsilon 2 at delta 1e-05, for every record"
    assert spent == "spent: epsilon 0.497, by 2 openings"
    assert left == "left: epsilon 1.9, for one more training (trainings add up by μ², not by ε)"
    assert 1.9 <= budget.epsilon_left < 1.91
    assert training.startswith("  five-hospitals: 2 openings, 20")


def test_limit_is_raised_and_never_lowered(budget: BudgetFile) -> None:
    assert run(str(budget.path), "--raise", "3")[0] == "limit: epsilon 3 at delta 1e-05, for every record"
    assert run(str(budget.path))[1].endswith(", without a reason")
    raised = run(str(budget.path), "--raise", "4", "--reason", "decided by the board")
    assert raised[2].startswith("  raised to epsilon 4, 20")
    assert raised[2].endswith(": decided by the board")
    with pytest.raises(InputError, match="give it with --raise"):
        run(str(budget.path), "--reason", "none")
    with pytest.raises(InputError, match="name a higher one, not 1"):
        run(str(budget.path), "--raise", "1")
    assert BudgetFile(budget.path, 1.0, 1e-5).epsilon == 4.0


def test_missing_file_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        run(str(tmp_path / "records.budget"))
    assert not list(tmp_path.iterdir())


def test_expected_cost_is_shown_for_numbers(tmp_path: Path) -> None:
    options = ("--records", "20000", "--columns", "14", "--members", "5", "--epsilon", "1")
    first, meaning, *rest = run(*options, command="expect")
    assert first == (
        "20,000 records (16,000 of them to train on), 14 columns, 5 participants (up to 1 colluding), epsilon = 1, "
        "delta = 1e-07"
    )
    assert "can be 73.1 % sure at most" in meaning
    assert {"Logistic regression:", "One hidden layer of 32 units:"} <= set(rest)
    assert "This is no promise" in rest[-1]
    with pytest.raises(InputError, match="choose at most 4"):
        run(*options, "--colluders", "5", command="expect")
    with pytest.raises(InputError, match="epsilon is 0.0"):
        run(*options[:-1], "0", command="expect")
    with pytest.raises(InputError, match="cannot be read"):
        run(str(tmp_path / "nothing.toml"), *options, command="expect")
