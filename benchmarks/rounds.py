"""Measure the rounds and bytes to a given accuracy: `python benchmarks/rounds.py [FILE ...]`.

The files of `benchmarks/rounds` are specs of `cgd simulate`: the paper's way, each improvement of it, and baselines.
Runs are stored in `results/rounds` one by one, and a program that was stopped continues. The table and the plot of
`docs/rounds.md` show what is stored. The settings of the improved runs were chosen on a part of the training samples:
the runs of `tried.toml`, which the page lists, too.

The data sets are read from the folder in CGD_DATA.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from cgd.experiments import experiment_file, reproduce
from cgd.experiments.runner import ResultStore
from cgd.experiments.spec import POOLED_METHODS
from cgd.experiments.tables import ResultTable
from cgd.files import write_file
from cgd.simulation.result import Spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cgd.experiments.entry_result import EntryResult
    from cgd.experiments.experiment_file import Experiment
    from cgd.experiments.reproduce import ExperimentResult
    from cgd.experiments.runner import RunResult
    from cgd.experiments.spec import RunSpec

ROOT = Path(__file__).parent.parent
SPECS, RESULTS = ROOT / "benchmarks" / "rounds", ROOT / "results" / "rounds"
PAGE, PLOT = ROOT / "docs" / "rounds.md", ROOT / "docs" / "images" / "rounds.png"
BEGIN, END = "<!-- figures: make rounds -->", "<!-- end of figures -->"
TRIED, SCALE = "tried", "paper"
TARGETS = {
    "mnist": (0.90, 0.95, 0.97),
    "cifar10-features": (0.70, 0.74, 0.75),
    "adult": (0.84, 0.85, 0.855),
    "credit-default": (0.80, 0.81, 0.815),
}
WIDTHS = {"mnist": (784, 10), "cifar10-features": (64, 10), "adult": (108, 2), "credit-default": (33, 2)}
"""Features and classes of the data sets, which give the number of parameters."""
WORD_BYTES, VECTORS = 4, 2
"""A member of a secure sum sends about two vectors of words: its values to those that add, and the part it adds."""
NOT_REACHED = "–"
RATIO_DATA, RATIO_TARGET = "mnist", 0.95
RATIO_TITLE = "Rounds to 95 %, divided by those of FedAvg"
RATIO_ABOUT = """
MNIST, runs with local training: the rounds until the mean accuracy is 95 %, divided by those of federated averaging
with the same local training. FedAvg moves by the mean update, as the rows "and local training"; FedAvg with momentum
has momentum of the displacement, as the rows "and both". Only "the first rounds" are evaluated in every round.
""".strip()
AVERAGES = ("FedAvg", "FedAvg with momentum")


def rounds_to(result: RunResult, target: float, metric: str) -> int | None:
    """Return the round after which the mean accuracy over participants was first at least the target."""
    for each in result.history.evaluations:
        values = getattr(each, metric)
        if values and fmean(values) >= target:
            return each.step
    return None


def parameters(spec: RunSpec) -> int:
    """Return the number of parameters of the network of a run."""
    features, classes = WIDTHS[spec.data]
    widths = (features, *spec.hidden, classes)
    return sum((inputs + spec.bias) * outputs for inputs, outputs in itertools.pairwise(widths))


def megabytes(spec: RunSpec, rounds: int | None) -> str:
    """Return what a participant sends in this number of rounds; nothing for pooled training."""
    if rounds is None or spec.method in POOLED_METHODS:
        return NOT_REACHED
    return f"{rounds * VECTORS * WORD_BYTES * parameters(spec) / 1e6:,.0f}"


def table(result: ExperimentResult) -> ResultTable:
    """Return rounds to each accuracy, of kept models if there are any, the bytes, and the accuracies at the end."""
    targets = TARGETS[result.found[0].entry.run.data]
    names = [f"rounds to {100 * target:g} %" for target in targets]
    header = ("", "method", *names, f"MB to {100 * targets[1]:g} %", "rounds", "confined in %", "kept in %")
    rows = []
    for each in result.found:
        entry = each.entry
        if not each.results:
            rows.append((entry.group, entry.label, "not run", *[""] * (len(header) - 3)))
            continue
        own = each.results[0]
        metric = "kept_accuracy" if own.last.kept_accuracy else "accuracy"
        reached = [rounds_to(own, target, metric) for target in targets]
        rows.append(
            (
                entry.group,
                entry.label,
                *(NOT_REACHED if number is None else str(number) for number in reached),
                megabytes(entry.run, reached[1]),
                str(entry.run.steps),
                _percent(own.last.accuracy),
                _percent(own.last.kept_accuracy),
            )
        )
    return ResultTable(result.experiment.title, header, tuple(rows))


def tried_table(result: ExperimentResult) -> ResultTable:
    """Return the settings that were tried, with their accuracies on a part of the training samples."""
    rows = [
        (
            each.entry.group,
            each.entry.label,
            str(each.entry.run.steps),
            _percent(own.last.accuracy),
            _percent(own.last.kept_accuracy),
        )
        for each in result.done
        for own in each.results
    ]
    return ResultTable(result.experiment.title, ("", "tried", "rounds", "confined in %", "kept in %"), tuple(rows))


def ratio_table(found: Sequence[ExperimentResult]) -> ResultTable:
    """Return the rounds to 95 % on MNIST of runs with local training, divided by those of FedAvg with the same one."""
    rows = []
    for result in found:
        runs = [each for each in result.done if each.entry.run.data == RATIO_DATA and each.entry.run.local]
        averages = {
            each.entry.label: _rounds_to_ratio_target(each) for each in runs if each.entry.run.method == "fedavg"
        }
        for each in runs:
            reached = _rounds_to_ratio_target(each)
            if averages and each.entry.label not in averages and reached:
                divided = (averages.get(name) for name in AVERAGES)
                cells = (f"{reached / other:.2f}" if other else NOT_REACHED for other in divided)
                rows.append((result.experiment.title, f"{each.entry.group}, {each.entry.label}", str(reached), *cells))
    return ResultTable(RATIO_TITLE, ("", "method", "rounds", *(f"/ {name}" for name in AVERAGES)), tuple(rows))


def _rounds_to_ratio_target(each: EntryResult) -> int | None:
    own = each.results[0]
    return rounds_to(own, RATIO_TARGET, "kept_accuracy" if own.last.kept_accuracy else "accuracy")


def _percent(values: list[float]) -> str:
    if not values:
        return ""
    spread = Spread.of_accuracies(values)
    worst = f" ({100 * spread.worst:.2f})" if len(values) > 1 else ""
    return f"{100 * spread.mean:.2f}{worst}"


def stored(names: Sequence[str] = ()) -> list[ExperimentResult]:
    """Return the stored results of all files, or of some."""
    store = ResultStore(RESULTS)
    return [reproduce.stored_results(each, SCALE, store) for each in read(names)]


def read(names: Sequence[str] = ()) -> list[Experiment]:
    """Read the files of these names, or all."""
    files = [SPECS / f"{name}.toml" for name in names] or sorted(SPECS.glob("*.toml"), key=_order)
    return [experiment_file.read(file) for file in files]


def _order(file: Path) -> tuple[bool, int, str]:
    """Return a key that sorts files by their numbers, and the settings that were tried last."""
    digits = "".join(filter(str.isdigit, file.stem))
    return file.stem == TRIED, int(digits or 0), file.stem


def with_figures(page: str, found: Sequence[ExperimentResult]) -> str:
    """Return the page with the tables of these results."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    parts = []
    ratios = ratio_table(found)
    for each in found:
        is_tried = each.experiment.name == TRIED
        if is_tried and ratios.rows:
            parts.append(f"### {ratios.title}\n\n{RATIO_ABOUT}\n\n{ratios.to_markdown()}")
        shown = tried_table(each) if is_tried else table(each)
        parts.append(f"### {each.experiment.title}\n\n{each.experiment.about}\n\n{shown.to_markdown()}")
    return f"{before}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}{after}"


def draw(found: Sequence[ExperimentResult], path: Path) -> None:
    """Draw the accuracy against rounds, a panel for each file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [each for each in found if each.done and each.experiment.name != TRIED]
    figure = Figure(figsize=(10, 3.6 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, each in zip(figure.subplots(len(shown), 1, squeeze=False)[:, 0], shown, strict=True):
        _draw_panel(axes, each)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _draw_panel(axes: Any, result: ExperimentResult) -> None:
    for number, each in enumerate(result.done):
        evaluations = [one for one in each.results[0].history.evaluations if one.step]
        kept = bool(evaluations[-1].kept_accuracy)
        values = [100 * fmean(one.kept_accuracy if kept else one.accuracy) for one in evaluations]
        label = f"{each.entry.name}, kept" if kept else each.entry.name
        axes.plot(
            [one.step for one in evaluations], values, label=label, color=f"C{number % 10}", ls="-:"[number // 10]
        )
    low = 100 * TARGETS[result.found[0].entry.run.data][0] - 20
    axes.set(xlabel="rounds", ylabel="accuracy in %", title=result.experiment.title, ylim=(low, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5))


def update_page() -> None:
    """Write the tables and the plot of all stored results."""
    found = stored()
    write_file(PAGE, with_figures(PAGE.read_text(), found))
    draw(found, PLOT)


def main() -> None:
    """Run or continue, and update the page after each file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="*", help="names of files in benchmarks/rounds, such as mnist-10; by default all")
    parser.add_argument("--only", default="", help="run only what has this text in its group and label")
    parser.add_argument("--page", action="store_true", help="run nothing, update the page")
    arguments = parser.parse_args()
    if not arguments.page:
        chosen = read(arguments.file)
        for experiment in reproduce.select(chosen, SCALE, arguments.only) if arguments.only else chosen:
            reproduce.run(experiment, SCALE, ResultStore(RESULTS), None, lambda *_: _report)
    update_page()


def _report(step: int, history: Any) -> None:
    if history.evaluations[-1].step == step:
        last = history.evaluations[-1]
        print(f"round {step}: {_percent(last.accuracy)}, kept {_percent(last.kept_accuracy)}", flush=True)


if __name__ == "__main__":
    main()
