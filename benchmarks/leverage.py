"""Measure how membership inference by leverage decreases with the number of records: `python benchmarks/leverage.py`.

Two honest participants train with two colluders, which score known records by their leverage in the gradients of the
first layer (`cgd.audit.attacks.membership`). For several numbers of honest records per input (the bias counts as an
input), the AUC is averaged over seeds; each seed draws the split of the records and the origins, and the standard error
covers these draws, not other data sets. The same scores of records that nobody trained on ("strangers") are the
control. `results/leverage.json` has the curve; `tests/audit/test_leverage.py` compares the privacy warnings with it.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from cgd.audit.attacks import membership
from cgd.audit.embedded import participants, samples, split
from cgd.audit.schemes import observe
from cgd.audit.view import Truth

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cgd.audit.scenario import Sample, Scenario

FILE = Path(__file__).parent.parent / "results" / "leverage.json"
PER_INPUT = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0)
SEEDS = 100
MIN_STRANGERS = 30
COLLUDERS_RECORDS = 2 * 20


@dataclass(frozen=True)
class Setting:
    """A training to attack.

    Attributes:
        name: the key in the results file.
        data: "breast-cancer" (569 records), "digits" (1,797), or "normal": independent normal features, drawn.
        inputs: the number of features.
        steps: the number of steps that the colluders observe.
        linear: train a linear model with two outputs instead of a network with 32 ReLU units.
    """

    name: str
    data: str
    inputs: int
    steps: int = 5
    linear: bool = False

    @property
    def rank(self) -> int:
        """The inputs and the bias."""
        return self.inputs + 1


SETTINGS = (
    Setting("tumours", "breast-cancer", 30),
    Setting("tumours, linear model", "breast-cancer", 30, 200, linear=True),
    Setting("digits", "digits", 64),
    Setting("normal", "normal", 30),
)


def scenario(setting: Setting, each: int, seed: int) -> tuple[Scenario, Sample]:
    """Return a scenario with `each` records per honest participant, and records that nobody trains on.

    Raises:
        InputError: the data set has fewer records.
    """
    if setting.data == "normal":
        random = torch.Generator().manual_seed(seed)
        count = 2 * each + COLLUDERS_RECORDS + 300
        x = torch.randn(count, setting.inputs, generator=random)
        y = (x @ torch.randn(setting.inputs, generator=random) + torch.randn(count, generator=random) > 0).long()
        found, _ = membership.scenario(1, setting.steps, data="breast-cancer", seed=seed)
        given, fresh = split((x, y), participants(2, each, own=20)[0])
        found = replace(found, data=given)
    else:
        data: Any = setting.data
        found, fresh = membership.scenario(each, setting.steps, data=data, seed=seed)
    if setting.linear:
        found = replace(found, build_model=lambda: nn.Sequential(nn.Linear(setting.inputs, 2)))
    return found, fresh


def measure(setting: Setting, each: int, seed: int) -> tuple[float, float]:
    """Return the AUC of members against strangers, and of half of the strangers against the other half."""
    trained, (x, y) = scenario(setting, each, seed)
    view, truth = observe(trained, "cgd")
    half = len(y) // 2
    nobody = Truth({"nobody": x[:half]}, {"nobody": y[:half]}, {})
    return (
        membership.leverage_membership(view, truth, (x, y)).value,
        membership.leverage_membership(view, nobody, (x[half:], y[half:])).value,
    )


def point(setting: Setting, per_input: float, seeds: Iterable[int]) -> dict[str, Any] | None:
    """Return the mean AUC and its standard error at a number of records per input; None if there are too few records.

    The two honest participants have the same number of records, so the nearest even number is measured.
    """
    each = round(per_input * setting.rank / 2)
    data: Any = setting.data
    if data != "normal" and len(samples(data)[1]) - 2 * each - COLLUDERS_RECORDS < MIN_STRANGERS:
        return None
    found = [measure(setting, each, seed) for seed in seeds]
    members, strangers = zip(*found, strict=True)
    return {
        "records": 2 * each,
        "per_input": round(2 * each / setting.rank, 2),
        "seeds": len(found),
        "auc": round(fmean(members), 4),
        "standard_error": round(stdev(members) / len(found) ** 0.5, 4),
        "strangers_auc": round(fmean(strangers), 4),
        "strangers_standard_error": round(stdev(strangers) / len(found) ** 0.5, 4),
    }


def main() -> None:
    """Measure the curve of every setting, print it as a table and write it."""
    parser = argparse.ArgumentParser(description="Measure membership inference by leverage against records per input.")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"seeds per point, at least 20 (default: {SEEDS})")
    parser.add_argument("--out", type=Path, default=FILE, help="the file to write")
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("setting", "records", "per input", "AUC", "strangers", "errors above 0.5", box=None)
    curves = []
    for setting in SETTINGS:
        points = [found for each in PER_INPUT if (found := point(setting, each, range(given.seeds))) is not None]
        for each in points:
            table.add_row(
                setting.name,
                f"{each['records']:,}",
                f"{each['per_input']:.2f}",
                f"{each['auc']:.3f} ± {each['standard_error']:.3f}",
                f"{each['strangers_auc']:.3f} ± {each['strangers_standard_error']:.3f}",
                f"{(each['auc'] - 0.5) / each['standard_error']:.1f}",
            )
        curves.append({"setting": setting.name, "inputs": setting.inputs, "steps": setting.steps, "points": points})
    Console(width=100).print(table)
    given.out.write_text(json.dumps(curves, indent=1) + "\n")


if __name__ == "__main__":
    main()
