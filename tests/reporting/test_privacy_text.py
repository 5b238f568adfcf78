"""The guarantee of differential privacy in words."""

from __future__ import annotations

from typing import Any

import pytest

from cgd.reporting.privacy_text import describe_guarantee
from cgd.reporting.run_file import BudgetInfo, CostInfo, PrivacyInfo
from cgd.reporting.training_report import render
from support import runs


def guarantee(**values: Any) -> dict[str, str]:
    content: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-6, "colluders": 1, "members": 5}
    return describe_guarantee(PrivacyInfo(**content | values))


def test_numbers_are_explained() -> None:
    text = guarantee()["How much"]
    assert "73.1 % sure at most, instead of 50 %" in text
    assert "instead of 50 %, in all but about one of 50,000 cases." in text
    assert "at most e^ε = 2.72 times the probability (ε = 1) that it has without, plus δ = 1e-06" in text
    assert "in all but about one of 11,000 cases" in guarantee(epsilon=2.0, delta=1e-5)["How much"]
    assert "an enormous number" in guarantee(epsilon=1000.0)["How much"]


def test_promise_is_about_what_is_protected() -> None:
    single, person = guarantee(clip=0.5), guarantee(unit="patient", clip=0.5)
    assert "If a record about you was used here" in single["What is promised"]
    assert "thinks before the training that your record was used" in single["How much"]
    assert "the gradient of your record counts with a norm of at most C = 0.5" in single["How much"]
    assert "If records about you were used here" in person["What is promised"]
    assert "cannot learn much about them" in person["What is promised"]
    assert "thinks before the training that your records were used" in person["How much"]
    assert "the mean gradient of your records counts with a norm of at most C = 0.5" in person["How much"]
    assert "the number of different values of patient" in person["What it covers"]
    assert not [text for text in person.values() if "your record " in text or "a record about you" in text]
    assert "C =" not in guarantee()["How much"]


@pytest.mark.parametrize(
    ("colluders", "text"),
    [
        (0, "Against everybody outside who sees what was opened"),
        (1, "Against every single participant, if all others add their part of the noise."),
        (3, "Against any 3 participants that combine what they know and add no noise."),
        (4, "Against all other participants together, whatever they do."),
    ],
)
def test_coalition_is_named(colluders: int, text: str) -> None:
    assert guarantee(colluders=colluders)["Against whom"].startswith(text)


def test_other_trainings_are_named_if_there_is_a_budget_file() -> None:
    assert "All trainings together" not in guarantee()
    text = guarantee(budget=BudgetInfo("a.csv.budget", 2.0, 1e-6, 1.25))["All trainings together"]
    assert "ε = 1.25 of 2 at δ = 1e-06 is spent for these records. The file a.csv.budget has the list" in text


def test_cost_is_that_of_measurements_and_no_promise() -> None:
    assert "What it costs" not in guarantee()
    cost = CostInfo(accuracy=(-0.001, 0.0123), auc=(0.001, 0.02), datasets=["adult", "tumours"])
    text = guarantee(cost=cost)["What it costs"]
    assert "The same model without noise was not trained." in text
    assert "(adult, tumours)" in text
    assert "the accuracy was 0.0 to 1.2 points below that without noise, and the AUC 0.001 to 0.020." in text
    assert "With our records, the loss may be smaller or larger." in text
    unknown = guarantee(cost=CostInfo(unknown="this training has 3 classes instead of two"))["What it costs"]
    assert "There are no measurements to compare with: this training has 3 classes instead of two." in unknown


def test_certainty_of_a_large_epsilon_is_not_rounded_to_all() -> None:
    assert "99.966 % sure at most" in guarantee(epsilon=8.0)["How much"]


def test_report_without_privacy_has_no_guarantee() -> None:
    from cgd.json_files import convert
    from cgd.reporting.run_file import Run
    from cgd.reporting.run_scores import ClassificationScores

    plain = runs.classification()
    assert 'id="privacy"' not in render(convert(plain, Run[ClassificationScores]))
    spent = [{"what": "a step", "openings": 100, "records": "training", "share": 0.8}]
    private = plain | {"privacy": {"epsilon": 1.0, "delta": 1e-6, "colluders": 1, "members": 5, "spent": spent}}
    page = render(convert(private, Run[ClassificationScores]))
    assert 'id="privacy"' in page
    assert "Part of the budget" in page
    assert "no noise is added" not in page
