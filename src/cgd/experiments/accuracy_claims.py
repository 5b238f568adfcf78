"""Claims of the paper about the accuracy of confined models, compared with other ways of training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from cgd.experiments.claims import Claim, Finding, Judgement, every, not_checkable, shown_by_tests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cgd.experiments.claims import Evidence
    from cgd.experiments.entry_result import EntryResult
    from cgd.experiments.experiment_file import RunEntry

MAX_ACCURACY_GAP, MAX_LOSS_GAP = 1.0, 0.05
"""The differences from a centralised model that the paper calls marginal: points of accuracy, and loss."""
MAX_REPRODUCTION_ERROR = 1.0
"""Our accuracy counts as the paper's if it differs by at most these points."""
MAX_LARGE_GRID_GAP = {"MNIST": 4.0, "CIFAR-10": 2.0}
"""The largest grid counts as close to a centralised model up to these points, a little more than the paper reports."""
MAX_SPREAD = 1.0
"""Confined models count as alike up to this standard deviation over participants, in points."""
NEAR_GUESSING = 20.0
"""With ten classes, twice the accuracy of guessing, in per cent."""
GRIDS, DP = "Accuracy, MNIST and CIFAR-10", "Comparison with differential privacy"
TABLES = {"MNIST": ("table-3", "table-8"), "CIFAR-10": ("table-5",)}


def command(*experiments: str) -> tuple[str, ...]:
    """Return the commands that run experiments."""
    return tuple(f"cgd reproduce {name} --scale {{scale}}" for name in experiments)


def is_confined(entry: RunEntry) -> bool:
    """Tell whether an entry is a grid of confined participants, without noise, that the paper reports."""
    return entry.run.method == "cgd" and entry.run.privacy is None and bool(entry.reported)


def is_private(entry: RunEntry) -> bool:
    """Tell whether an entry is one model on all data, trained with noise."""
    return entry.run.method in ("dp-sgd", "private-centralised")


def points(result: EntryResult) -> float:
    """Return the mean accuracy in per cent; NaN without classes."""
    return 100 * (math.nan if result.accuracy is None else result.accuracy)


def mean_loss(result: EntryResult) -> float:
    """Return the mean loss."""
    loss = result.spread("loss")
    return math.nan if loss is None else loss.mean


def baseline(evidence: Evidence, experiment: str, delta: float | None = None) -> EntryResult | None:
    """Return the centralised run, with this δ if the experiment has several; None if it has not been run."""
    first = next(
        entry
        for entry in (each.entry for each in evidence.experiments[experiment].found)
        if entry.run.method == "centralised" and delta in (None, entry.run.delta)
    )
    found = evidence.select(experiment, lambda entry: entry is first)
    return found[0] if found else None


@dataclass(frozen=True)
class GridGap:
    """The difference of a grid from a centralised model, here and in the paper's tables.

    Attributes:
        name: name of the grid.
        ours: differences of accuracy, in points, and of loss; both are positive if the grid is worse.
        paper: the same by the paper's tables.
    """

    name: str
    ours: dict[str, float]
    paper: dict[str, float]


def _gaps(evidence: Evidence) -> Iterator[GridGap]:
    """Yield the differences of all grids whose results exist, each once."""
    seen = set()
    for experiment in ("table-3", "table-8", "table-7", "table-5"):
        for each in evidence.select(experiment, is_confined):
            run, paper = each.entry.run, each.entry.reported
            delta = run.delta[1] if isinstance(run.delta, tuple) else run.delta
            central = baseline(evidence, experiment, delta if experiment == "table-7" else None)
            if central is None or run in seen:
                continue
            seen.add(run)
            base = central.entry.reported
            yield GridGap(
                f"{run.data} {each.entry.name}",
                {"accuracy": points(central) - points(each), "loss": mean_loss(each) - mean_loss(central)},
                {"accuracy": 100 * (base["accuracy"] - paper["accuracy"]), "loss": paper["loss"] - base["loss"]},
            )


def _mostly_within(metric: str, limit: float, unit: str = "") -> Callable[[Evidence], Judgement]:
    def judge(evidence: Evidence) -> Judgement:
        found = list(_gaps(evidence))
        if not found:
            return Judgement(holds=False, figures="")
        # Rounded, because differences of the paper's decimals are not exact.
        within, paper = (
            sum(round(gap[metric], 4) <= limit for gap in gaps)
            for gaps in ([each.ours for each in found], [each.paper for each in found])
        )
        worst = max(found, key=lambda each: each.ours[metric])
        figures = (
            f"{within} of {len(found)} grids are within {limit:g}{unit}, the largest difference is "
            f"{worst.ours[metric]:.2f} ({worst.name}); by the paper's own tables, {paper} of these {len(found)}"
        )
        return Judgement(2 * within > len(found), figures)

    return judge


def _close_to_baseline(experiment: str, rows: int, columns: int, limit: float) -> Callable[[Evidence], Judgement]:
    def judge(evidence: Evidence) -> Judgement:
        central = baseline(evidence, experiment)
        grid = (rows, columns)
        found = evidence.select(
            experiment, lambda entry: is_confined(entry) and (entry.run.rows, entry.run.columns) == grid
        )
        if central is None or not found:
            return Judgement(holds=False, figures="")
        gap, reported = points(central) - points(found[0]), found[0].entry.reported
        paper = 100 * (central.entry.reported["accuracy"] - reported["accuracy"])
        spread = found[0].spread("accuracy")
        worst = "" if spread is None else f", worst {100 * spread.worst:.2f} %"
        figures = (
            f"{points(found[0]):.2f} %{worst}, centralised {points(central):.2f} %: {gap:.2f} points below "
            f"(paper: {paper:.2f})"
        )
        return Judgement(gap <= limit, figures)

    return judge


def _same_grid(first: EntryResult, others: Sequence[EntryResult]) -> EntryResult | None:
    run = first.entry.run
    same = (each for each in others if (each.entry.run.rows, each.entry.run.columns) == (run.rows, run.columns))
    return next(same, None)


def _better_than_local(*experiments: str) -> Callable[[Evidence], Judgement]:
    def judge(evidence: Evidence) -> Judgement:
        findings = []
        for experiment in experiments:
            local = evidence.select(experiment, lambda entry: entry.run.method == "local")
            for each in evidence.select(experiment, is_confined):
                alone, spread = _same_grid(each, local), each.spread("accuracy")
                if alone is None or spread is None:
                    continue
                figures = f"{each.entry.group}: {100 * spread.worst:.2f} and {points(alone):.2f} %"
                findings.append(Finding(100 * spread.worst > points(alone), figures))
        return every(findings)

    return judge


def _local_declines(evidence: Evidence) -> Judgement:
    found = evidence.select("table-3", lambda entry: entry.run.method == "local")
    ordered = sorted(found, key=lambda each: each.entry.run.rows * each.entry.run.columns)
    accuracies = [points(each) for each in ordered]
    falling = all(after < before for before, after in pairwise(accuracies))
    figures = "; ".join(f"{each.entry.group}: {points(each):.2f} %" for each in ordered)
    return Judgement(falling and bool(accuracies) and accuracies[-1] < NEAR_GUESSING, figures)


def _alike(evidence: Evidence) -> Judgement:
    findings = []
    for experiment in ("table-3", "table-8", "table-5"):
        for each in evidence.select(experiment, is_confined):
            spread = each.spread("accuracy")
            if spread is not None:
                name = f"{each.entry.run.data} {each.entry.group}"
                findings.append(Finding(100 * spread.deviation <= MAX_SPREAD, f"{name}: {100 * spread.deviation:.2f}"))
    return every(findings)


def reproduced(method: str, *experiments: str) -> Callable[[Evidence], Judgement]:
    """Return a function that compares the accuracies of a method with those that the paper reports."""

    def judge(evidence: Evidence) -> Judgement:
        findings = []
        for experiment in experiments:
            chosen = evidence.select(
                experiment,
                lambda entry: entry.run.method == method and entry.run.privacy is None and bool(entry.reported),
            )
            for each in chosen:
                difference = points(each) - 100 * each.entry.reported["accuracy"]
                figures = f"{each.entry.name}: {points(each):.2f} % ({difference:+.2f})"
                findings.append(Finding(abs(difference) <= MAX_REPRODUCTION_ERROR, figures))
        return every(findings)

    return judge


def _towers(evidence: Evidence) -> Judgement:
    central = baseline(evidence, "table-3")
    findings = []
    for each in evidence.select("towers", lambda entry: entry.run.method == "cgd"):
        fused = each.spread("fused_accuracy")
        if central is None or fused is None:
            continue
        after = f"after {each.entry.run.steps} steps"
        figures = f"{each.entry.group}, {after}: {points(each):.2f} % alone, {100 * fused.mean:.2f} % by late fusion"
        findings.append(Finding(points(central) - points(each) <= MAX_LARGE_GRID_GAP["MNIST"], figures))
    return every(findings)


def _better_than_dp(experiment: str) -> Callable[[Evidence], Judgement]:
    """Compare the grids with the best private model of each ε, in the order of the table."""

    def judge(evidence: Evidence) -> Judgement:
        central = baseline(evidence, experiment)
        confined = {each.entry.group: each for each in evidence.select(experiment, is_confined)}
        private: dict[str, list[EntryResult]] = {}
        for each in evidence.select(experiment, is_private):
            private.setdefault(each.entry.group, []).append(each)
        entries = [each.entry for each in evidence.experiments[experiment].found]
        grids = dict.fromkeys(entry.group for entry in entries if is_confined(entry))
        budgets = dict.fromkeys(entry.group for entry in entries if is_private(entry))
        findings = []
        for grid, budget in zip(grids, budgets, strict=True):
            if central is None or grid not in confined or budget not in private:
                continue
            same = (confined[grid], *private[budget])
            own, best = (points(central) - value for value in (points(same[0]), max(map(points, same[1:]))))
            theirs = (each.entry.reported.get("gap") for each in same)
            paper = " and ".join(f"{gap:g}" for gap in theirs if gap is not None)
            findings.append(Finding(own < best, f"{grid}: {own:.2f}, {budget}: {best:.2f} (paper: {paper})"))
        return every(findings)

    return judge


CLAIMS = (
    Claim(
        GRIDS,
        "In most grids, the accuracy of confined models is within 1 point of a centralised model.",
        "abstract, §1",
        "more than half of the paper's grids (MNIST with every δ, CIFAR-10) are within "
        f"{MAX_ACCURACY_GAP:g} point of a centralised model with the same δ (for a random δ: with 0.1)",
        command("table-3", "table-8", "table-7", "table-5"),
        _mostly_within("accuracy", MAX_ACCURACY_GAP, " point"),
    ),
    Claim(
        GRIDS,
        "In most grids, the validation loss is within 0.05 of a centralised model's.",
        "abstract, §1",
        f"the same, with a difference of loss of at most {MAX_LOSS_GAP:g}",
        command("table-3", "table-8", "table-7", "table-5"),
        _mostly_within("loss", MAX_LOSS_GAP),
    ),
    Claim(
        GRIDS,
        "With 112,000 participants, each with 60 images and 7 pixels of them, training still comes close to a "
        "centralised model. (Only `joint` columns do this, and they reveal raw records: N9.)",
        "§7.1.1, table 3",
        f"1000×112 on MNIST is at most {MAX_LARGE_GRID_GAP['MNIST']:g} points below the centralised model",
        command("table-3"),
        _close_to_baseline("table-3", 1000, 112, MAX_LARGE_GRID_GAP["MNIST"]),
    ),
    Claim(
        GRIDS,
        "1,000 participants with 60 images each come close to a centralised model.",
        "app. C, table 8",
        f"1000×1 on MNIST is at most {MAX_LARGE_GRID_GAP['MNIST']:g} points below the centralised model",
        command("table-8"),
        _close_to_baseline("table-8", 1000, 1, MAX_LARGE_GRID_GAP["MNIST"]),
    ),
    Claim(
        GRIDS,
        "On CIFAR-10, 32,000 participants come close to a centralised model.",
        "§7.1.2, table 5",
        f"1000×32 is at most {MAX_LARGE_GRID_GAP['CIFAR-10']:g} points below the centralised model",
        command("table-5"),
        _close_to_baseline("table-5", 1000, 32, MAX_LARGE_GRID_GAP["CIFAR-10"]),
    ),
    Claim(
        GRIDS,
        "On MNIST, confined models are clearly better than models that participants train alone.",
        "§7.1.1, tables 3 and 8",
        "in every grid, the worst evaluated confined model is better than the mean of local training",
        command(*TABLES["MNIST"]),
        _better_than_local(*TABLES["MNIST"]),
    ),
    Claim(
        GRIDS,
        "On CIFAR-10, too, confined models are clearly better than models that participants train alone.",
        "§7.1.2, table 5",
        "the same",
        command(*TABLES["CIFAR-10"]),
        _better_than_local(*TABLES["CIFAR-10"]),
    ),
    Claim(
        GRIDS,
        "The less data a participant has, the worse it trains alone, in the end hardly better than guessing.",
        "§7.1.1, table 3",
        f"the mean accuracy of local training falls from grid to grid, and is below {NEAR_GUESSING:g} % at 1000×112",
        command("table-3"),
        _local_declines,
    ),
    Claim(
        GRIDS,
        "All confined models of a training are about equally good.",
        "§7.1",
        f"in every grid, the standard deviation of accuracy over the participants is at most {MAX_SPREAD:g} point",
        command("table-3", "table-8", "table-5"),
        _alike,
    ),
    Claim(
        GRIDS,
        "The accuracies of CGD on MNIST.",
        "tables 3 and 8",
        f"ours differ by at most {MAX_REPRODUCTION_ERROR:g} point in every grid",
        command(*TABLES["MNIST"]),
        reproduced("cgd", *TABLES["MNIST"]),
    ),
    Claim(
        GRIDS,
        "The accuracies of CGD on CIFAR-10.",
        "table 5",
        f"ours differ by at most {MAX_REPRODUCTION_ERROR:g} point in every grid",
        command(*TABLES["CIFAR-10"]),
        reproduced("cgd", *TABLES["CIFAR-10"]),
    ),
    Claim(
        GRIDS,
        "The accuracies of the centralised models.",
        "tables 3 and 5",
        f"ours differ by at most {MAX_REPRODUCTION_ERROR:g} point",
        command("table-3", "table-5"),
        reproduced("centralised", "table-3", "table-5"),
    ),
    Claim(
        GRIDS,
        "The accuracies of local training. (`cgd reproduce schedule` tries smaller steps, which explain a part.)",
        "tables 3, 5 and 8",
        f"ours differ by at most {MAX_REPRODUCTION_ERROR:g} point in every grid",
        command("table-3", "table-8", "table-5"),
        reproduced("local", "table-3", "table-8", "table-5"),
    ),
    Claim(
        GRIDS,
        "Algorithm 2, in which each participant predicts from its own features alone, has the accuracies of table 3.",
        "§6, algorithm 2",
        "in `towers`, which is Algorithm 2 as printed, each participant alone, every grid is at most "
        f"{MAX_LARGE_GRID_GAP['MNIST']:g} points below the centralised model",
        command("towers", "table-3"),
        _towers,
    ),
    shown_by_tests(
        GRIDS,
        "In a grid, layers 2…N are summed over all participants, and the first layer within a column only.",
        "§6, algorithm 2",
        "real participants that do so get the same models as the simulation",
        ("tests/simulation/test_protocol.py::test_simulated_grids_equal_real_participants",),
    ),
    Claim(
        DP,
        "On MNIST, CGD loses less accuracy than federated learning with differential privacy. (CGD alone bounds "
        "nothing that the sums reveal, N14, so this compares two different protections.)",
        "§1, §7.1.1, table 4",
        "grid by grid, against ε = 8, 2, 0.5: the gap to the centralised model is smaller than that of the better "
        "private model of ours",
        command("table-4"),
        _better_than_dp("table-4"),
    ),
    Claim(
        DP,
        "On CIFAR-10, too, CGD loses less accuracy than with differential privacy.",
        "§7.1.2, table 6",
        "the same, against ε = 8, 4, 2",
        command("table-6"),
        _better_than_dp("table-6"),
    ),
    not_checkable(
        DP,
        "The accuracies of differentially private training that CGD is compared with.",
        "tables 4 and 6",
        "they are quoted from another paper, of another network with another baseline; ours are in the rows above",
    ),
)
"""The claims about accuracy, in the order of the page."""
