"""Figures in the README and the docs agree with the stored results.

A page's sentence is built here from the results and must occur in the page, word for word. Results are made by the
commands that the pages name: `make demo-results`, `make table-results`, `make private-table-results`, `make
privacy-results`, `make audit-results`, `cgd reproduce`.
"""

from __future__ import annotations

import json
import math
import re
from itertools import product
from pathlib import Path
from statistics import NormalDist, mean, median
from typing import TYPE_CHECKING, Any

import pytest

from cgd.audit import results, verdicts
from cgd.audit.attacks.membership import allowed_auc, allowed_record_auc
from cgd.audit.schemes import DELTA
from cgd.audit.view import EPSILONS
from cgd.dp.accountant import exceedance, mu_of
from cgd.experiments.demo import DemoSettings, run
from cgd.federation.config import FOR_PRIVATE_TABLES
from cgd.reporting.privacy_text import certainty
from cgd.tabular.privacy_costs import PrivateSetting, cost_table, needed_signals
from cgd.tabular.privacy_expectation import _round
from support.pages import load_script

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cgd.audit.verdicts import Verdict

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
# Everything that looks like a measured figure: a percentage, or a number with decimals.
FIGURE = re.compile(r"\d+(?:\.\d+)? %|\d+\.\d+")
# Numbers with decimals that are not measured.
NOT_MEASURED = {"3.11": "a version of Python", "2.0": "a licence", "2104.13050": "the paper's number"}


def load(path: str) -> Any:
    return json.loads((RESULTS / path).read_text())


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def last_accuracies(run: str) -> list[float]:
    (path,) = (RESULTS / "paper").glob(f"{run}-*.json")
    return list(json.loads(path.read_text())["history"]["evaluations"][-1]["accuracy"])


def demo() -> str:
    result = load("demo.json")
    participants = result["participants"]
    sizes = [each["samples"] for each in participants]
    alone, confined = (
        percent(mean(each[kind]["accuracy"][-1] for each in participants)) for kind in ("alone", "confined")
    )
    return (
        f"The demo's five hospitals have {max(sizes)} to {min(sizes)} records. Trained alone, their models reach "
        f"{alone} on held-out records on average; the confined models reach {confined}, and a model of all data pooled "
        f"reaches {percent(result['pooled']['accuracy'][-1])}."
    )


def adult() -> str:
    splits = load("tables/results.json")["adult, one hidden layer of 32"]
    sizes = list(splits[0]["records"].values())
    smallest = min(splits[0]["records"], key=splits[0]["records"].get)
    confined = [each["auc"] for split in splits for each in split["confined"].values()]
    alone = [split["alone"][smallest]["auc"] for split in splits]
    pooled = [split["pooled"]["auc"] for split in splits]
    assert len(splits) == 3
    return (
        f"On UCI Adult, divided among five offices with {max(sizes):,} to {min(sizes)} records, the confined networks "
        f"reach an AUC of {min(confined):.3f} to {max(confined):.3f} over three random divisions, a network on all "
        f"records pooled {min(pooled):.3f} to {max(pooled):.3f}, the smallest office alone {min(alone):.3f} to "
        f"{max(alone):.3f} (`make table-results`)."
    )


def mnist() -> str:
    confined, (centralised,) = (
        last_accuracies("mnist-cgd-1000x1-d0.1-t2000"),
        last_accuracies("mnist-centralised-d0.1-t2000"),
    )
    assert len(confined) == 10
    return (
        "On MNIST with 1000 participants of 60 images each, ten sampled confined models reach "
        f"{percent(mean(confined))} on average (the paper: 93.8 %), one centralised model {percent(centralised)} "
        "(97.5 %)"
    )


def joint_grid() -> str:
    joint, one_column = (last_accuracies(f"mnist-cgd-10x{grid}-d0.1-t2000") for grid in ("7-joint", "1"))
    (centralised,) = last_accuracies("mnist-centralised-d0.1-t2000")
    assert len(joint) == len(one_column) == 10
    return (
        f"On MNIST in a `joint` grid of 10 × 7 participants, ten sampled confined models reach {percent(mean(joint))} "
        f"on average; with the same rows and one column they reach {percent(mean(one_column))}. A centralised model "
        f"reaches {percent(centralised)}."
    )


def verdicts_of(attack: str, setting: str, scheme: str = "cgd") -> Iterator[Verdict]:
    """Return the verdicts on a scheme of all stored audits, with this text in the setting."""
    for folder in sorted((RESULTS / "audit").iterdir()):
        (found,) = (each for each in results.load(folder).attacks if each.id == attack)
        yield from (row.cells[scheme] for row in verdicts.rows(found) if setting in row.setting and scheme in row.cells)


def joint_records() -> str:
    assert {each.result.value for each in verdicts_of("joint", "60 records, 8 rounds, joint")} == {1.0}
    return "`cgd audit` recovers 60 of 60 records of a row from 8 steps."


def departure() -> str:
    error = median(each.result.value for each in verdicts_of("dropout", "a step apart"))
    return f"in `cgd audit` they give that participant's gradient with a relative error of {error:.2f}."


def detectable_gap() -> str:
    details = [each.result.detail for each in verdicts_of("simulator", "the protocol as it is")]
    found = [re.search(r"over (\d+) runs .* a gap of ([\d.]+) .* probability ([\d.]+)", each) for each in details]
    ((runs, gap, power),) = {each.groups() for each in found if each is not None}
    return (
        f"`cgd audit` repeats the comparison with {runs} runs, where a gap of {gap} would be detected with probability "
        f"{power}."
    )


def displacement_as_model() -> str:
    large, small = (
        median(each.result.value for each in verdicts_of("theorem3", f"δ = {delta}")) for delta in (0.1, 0.02)
    )
    return (
        "The relative error of a coalition that uses the displacement as the model depends on δ: its median is "
        f"{large:.1f} at 0.1 and {small:.2f} at 0.02 (attack `theorem3`)."
    )


def canaries() -> str:
    """Return the table of the measured bounds of ε."""
    found = load("canaries.json")
    names = {
        "no noise": "No noise",
        "half of the noise": "Half of the noise",
        "the same noise in every step": "Same noise in every step",
        "no clipping": "No clipping",
        "one member more than t leaves out its noise": "One more than t without noise",
    }
    assert set(names) == set(found["mutations"])
    assert (found["confidence"], found["confidence_one_run"]) == (1 - 1e-6, 0.95)
    rows = [
        f"| Claimed ε | Lower bound, 20 seeds | All together | {' | '.join(names.values())} | Without assumptions |",
        f"|{'---|' * (len(names) + 4)}",
    ]
    for claim, each in found["claims"].items():
        bounds, weak = ([seed[name] for seed in each["seeds"]] for name in ("epsilon_lower", "epsilon_lower_one_run"))
        removed = [found["mutations"][name][claim]["epsilon_lower"] for name in names]
        assert len(bounds) == 20
        assert max(*bounds, each["all"]["epsilon_lower"]) < float(claim) < min(removed)
        assert {seed["canaries"] for seed in each["seeds"]} == {20_000}
        cells = [
            claim,
            f"{min(bounds):.2f} to {max(bounds):.2f}",
            f"{each['all']['epsilon_lower']:.2f}",
            *(f"{value:.2f}" for value in removed),
            f"{min(weak):.2f} to {max(weak):.2f}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return " ".join(" ".join(rows).split())


def four_organisations() -> str:
    stored = load("four-organisations.json")
    draws = stored["schemes"]
    steered = [each["records by steering"] for each in draws["cgd"]]
    assert {each["records by watching"] for each in draws["cgd"]} == {0}
    private = {each[f"records by {how}"] for name in ("dp8", "dp2", "dp0.5") for each in draws[name] for how in HOW}
    assert (stored["records"], len(steered), private) == (410, 20, {0})
    auc = {name: mean(each["AUC by leverage"] for each in draws[name]) for name in ("cgd", "dp2")}
    return (
        f"without noise it reads {min(steered)} to {max(steered)} records by steering in each of 20 seeds, and none "
        "by watching; at ε = 8, 2 and 0.5, with t = 1, it reads none in any seed. Membership by leverage has a mean "
        f"AUC of {auc['cgd']:.3f} without noise and {auc['dp2']:.3f} at ε = 2."
    )


def organisations() -> str:
    module = load_script("organisations", ACCURACY)
    sections = [
        module.section(*name.split(", "), [module.SplitResult(**split) for split in splits])
        for name, splits in load("tables/results.json").items()
    ]
    return " ".join("\n".join(sections).split())


def largest_auc() -> str:
    mu = [mu_of(epsilon, DELTA) for epsilon in (8.0, 2.0, 0.5)]
    pair, one = ([f"{allowed(each):.3f}" for each in mu] for allowed in (allowed_auc, allowed_record_auc))
    return (
        f"has an AUC of at most Φ(μ): {pair[0]}, {pair[1]} and {pair[2]} at ε = 8, 2 and 0.5 with δ = 10⁻⁵. (For the "
        f"decision about one given record, it is Φ(μ/√2): {one[0]}, {one[1]} and {one[2]}.)"
    )


def private_organisations() -> str:
    module = load_script("private_organisations", ACCURACY)
    runs, exact = load("private-tables/results.json"), load("tables/results.json")
    sections = [module.section(*each, runs, exact) for each in product(module.DATASETS, module.MODELS)]
    page = module.HEAD + "\n".join(sections)
    assert page == (RESULTS / "private-tables" / "report.md").read_text()
    return " ".join("\n".join(sections).split())


def private_losses(dataset: str, model: str, epsilon: float, colluders: int) -> list[float]:
    """Return the losses of private training in each split, in points of accuracy."""
    module = load_script("private_organisations", ACCURACY)
    runs, splits = load("private-tables/results.json"), load("tables/results.json")[f"{dataset}, {model}"]
    exact = [list(each["confined"].values()) for each in splits]
    private = [runs[module.run_name(dataset, model, epsilon, colluders, seed)] for seed in module.SEEDS]
    return list(module.losses(exact, private))


def private_adult() -> str:
    one, four = (private_losses("adult", "logistic regression", 1.0, t) for t in (1, 4))
    assert len(one) == 3
    return (
        f"On UCI Adult at ε = 1, the logistic models of five offices lose {mean(one):.2f} points of accuracy on "
        f"average if one of them may collude, and {mean(four):.2f} if all others may (`make private-table-results`)."
    )


def private_officers() -> str:
    rows = []
    for dataset, model, colluders in product(
        ("adult", "credit-default"), ("logistic regression", "one hidden layer of 32"), (1, 4)
    ):
        cells = [mean(private_losses(dataset, model, epsilon, colluders)) for epsilon in (0.5, 1.0, 3.0)]
        rows.append(f"| {dataset}, {model} | {colluders} | {' | '.join(f'{each:.2f}' for each in cells)} |")
    return " ".join(rows)


def private_auc() -> str:
    module, model = load_script("private_organisations", ACCURACY), "one hidden layer of 32"
    splits, runs = load("tables/results.json")[f"credit-default, {model}"], load("private-tables/results.json")
    exact = mean(each["auc"] for split in splits for each in split["confined"].values())
    names = [module.run_name("credit-default", model, 1.0, 1, seed) for seed in module.SEEDS]
    private = mean(each["auc"] for name in names for each in runs[name])
    return f"the AUC of the network on credit default, {exact:.3f} without noise, is {private:.3f} at ε = 1 and t = 1."


def needed_records() -> str:
    rows = []
    for epsilon, colluders in product((0.5, 1.0, 3.0), (1, 4)):
        setting = PrivateSetting(10_000, 20, 5, epsilon, 1e-6, colluders)
        cells = []
        for loss in (0.02, 0.01):
            signals = [each for each in needed_signals("logistic", loss).values() if each is not None]
            assert len(signals) == 6  # reached on all data sets
            ends = (setting.records_for(each) / 0.8 for each in (min(signals), max(signals)))
            cells.append(" to ".join(_round(each) for each in ends))
        rows.append(f"| {epsilon:g} | {colluders} | {' | '.join(cells)} |")
    return " ".join(rows)


def network_with_many_columns() -> str:
    (curve,) = (each for each in cost_table().of("mlp") if each.dataset == "synthetic-100")
    return (
        "A network with a hidden layer needs more, above all with many columns: with 100 of them, its loss was still "
        f"{100 * curve.points[-1].accuracy:.1f} points with the least noise that was measured."
    )


def meaning_of_epsilon() -> str:
    rows = []
    for epsilon in (0.1, 0.5, 1, 2, 3, 8):
        mu = mu_of(epsilon, 1e-6)
        factor = f"{float(f'{math.exp(epsilon):.3g}'):g}"
        sure = f"{100 * certainty(epsilon):.{3 if epsilon < 8 else 4}g} %"
        exceptions = f"{float(f'{1 / exceedance(mu, epsilon):.2g}'):,.0f}"
        right = f"{100 * NormalDist().cdf(mu / 2):.1f} %"
        rows.append(f"| {epsilon:g} | {factor} | {sure} | {exceptions} | {right} | {mu:.3f} |")
    return " ".join(rows)


def training_modes() -> str:
    module = load_script("training_modes", "benchmarks")
    return " ".join(module.table(load("training-modes.json")).split())


def reports_of_joining() -> str:
    rows = load("personalisation/results.json")
    cases = [each["log loss"] | {"said": each["report"]["together"]["value"] < 0}
             for found in rows.values() for each in found.values()]  # fmt: skip
    worse = [each for each in cases if each["together"] > each["alone"]]
    silent = [each["together"] - each["alone"] for each in worse if not each["said"]]
    return (
        f"Together was worse than alone in {len(worse)} of the {len(cases)} cases (a row in one split): the report "
        f"said so in {len(worse) - len(silent)} of them, and in the other {len(silent)} the difference was at most "
        f"{max(silent):.4f};"
    )


def rounds_of_tables() -> str:
    module = load_script("table_rounds", ACCURACY)
    return " ".join(module.row(dataset, load("tables/rounds.json")) for dataset in module.DATASETS)


def rounds_of_100() -> str:
    module = load_script("rounds", "benchmarks")
    (shown,) = (module.table(each) for each in module.stored(["mnist-100"]))
    rows = {row[:2]: dict(zip(shown.header, row, strict=True)) for row in shown.rows}
    paper, both = rows["δ 0.1", "CGD as in the paper"], rows["δ 0.1", "and both"]
    return (
        "On MNIST with 100 participants at δ 0.1, with local steps between the sums and momentum of the displacement, "
        f"the models that they keep reach 95 % after {both['rounds to 95 %']} rounds (FedAvg with momentum after "
        f"{rows['', 'FedAvg with momentum']['rounds to 95 %']}); as in the paper, the models are at "
        f"{float(paper['confined in %'].split()[0]):.1f} % after {paper['rounds']}."
    )


HOW = ("watching", "steering")
ACCURACY = "benchmarks/accuracy"
SENTENCES = {
    "docs/differential-privacy.md": [canaries, four_organisations],
    "README.md": [demo, adult, mnist, private_adult, rounds_of_100],
    "docs/index.md": [mnist],
    "docs/operations.md": [departure],
    "docs/simulation.md": [joint_grid, joint_records],
    "docs/privacy-officers.md": [
        meaning_of_epsilon,
        private_officers,
        private_auc,
        needed_records,
        network_with_many_columns,
    ],
    "docs/tables.md": [organisations, private_organisations, rounds_of_tables, reports_of_joining],
    "docs/threat-model.md": [detectable_gap, displacement_as_model, largest_auc, training_modes],
}


def text_of(page: str) -> str:
    """Return the prose of a page on one line, without code."""
    content = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    return " ".join(content.split())


@pytest.mark.parametrize(
    ("page", "sentence"), [(page, sentence) for page, sentences in SENTENCES.items() for sentence in sentences]
)
def test_sentence_has_the_figures_of_the_stored_results(page: str, sentence: Any) -> None:
    assert sentence() in text_of(page)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_every_figure_of_a_page_is_in_a_sentence_that_is_tested(page: str) -> None:
    tested = " ".join(sentence() for sentence in SENTENCES[page])
    figures = set(FIGURE.findall(text_of(page))) - NOT_MEASURED.keys()
    assert figures
    assert figures <= set(FIGURE.findall(tested)), "a figure without a stored result"


def test_the_example_of_a_cell_is_that_of_the_first_audit() -> None:
    verdict = next(verdicts_of("gram", "passive"))
    assert f"```text\n{verdict.word}\n{verdict.figures}\n```" in (ROOT / "docs/audit.md").read_text()


@pytest.mark.parametrize(
    ("words", "attack", "setting", "low", "high"),
    [
        ("about half of 200 records in 20 steps", "traps", "2 × 100 records, 20 rounds", 0.4, 0.6),
        ("a quarter of 800 in 30", "traps", "2 × 400 records, 30 rounds", 0.2, 0.3),
        ("Of a hundred each, it is still one or two", "records", "2 × 100 records", 0.005, 0.01),
        ("with a relative error of about a tenth", "dropout", "a step apart", 0.05, 0.15),
        ("a single later round gives records", "inversion", "round 41 alone, δ 0.02", 20, 60),
        ("three rounds give records", "inversion", "3 rounds, δ 0.1", 20, 60),
        ("nearly exactly by watching", "labels", "from biases", 0.0, 0.05),
        ("exactly by steering", "labels", "steered", 0.0, 0.0),
    ],
)
def test_words_of_the_threat_model_fit_the_audits(
    words: str, attack: str, setting: str, low: float, high: float
) -> None:
    """The median over all draws is in the range that the words mean."""
    assert words in text_of("docs/threat-model.md")
    assert low <= median(each.result.value for each in verdicts_of(attack, setting)) <= high


@pytest.mark.parametrize("scheme", EPSILONS)
@pytest.mark.parametrize("attack", ["records", "traps", "inversion", "dropout"])
def test_no_record_comes_out_with_differential_privacy(attack: str, scheme: str) -> None:
    """The threat model says so, of every ε and every setting, in five draws."""
    found = list(verdicts_of(attack, "", scheme))
    assert found
    assert not any(each.result.succeeds for each in found)
    assert "no record comes out at any of these ε" in text_of("docs/threat-model.md")


def test_membership_is_below_the_bound_of_epsilon() -> None:
    succeeding: dict[str, list[Verdict]] = {scheme: [] for scheme in EPSILONS}
    for scheme, found in succeeding.items():
        draws = list(verdicts_of("membership", "", scheme))
        assert len(draws) == 9 * 5
        found += [each for each in draws if each.result.succeeds]
        assert all(each.result.value < (each.result.allowed or 0) for each in found)
    assert {scheme: len(found) for scheme, found in succeeding.items()} == {"dp8": 1, "dp2": 0, "dp0.5": 0}
    assert "No attack on membership succeeds at ε = 2 or 0.5; at 8, one of nine did in one of five draws" in (
        text_of("docs/threat-model.md")
    )


@pytest.mark.parametrize(
    ("words", "attack", "setting", "scheme", "low", "high"),
    [
        ("the attack finds a part of them at ε = 8", "gram", "probe", "dp8", 0.1, 0.3),
        ("where the attack still succeeds", "labels", "from biases", "dp8", 0.0, 0.106),
        ("where it mostly fails", "labels", "from biases", "dp2", 0.1, 0.3),
        ("the gradient was not found", "dropout", "", "dp8", 0.9, 1.5),
    ],
)
def test_words_about_noise_fit_the_audits(
    words: str, attack: str, setting: str, scheme: str, low: float, high: float
) -> None:
    """As `test_words_of_the_threat_model_fit_the_audits`."""
    assert words in text_of("docs/threat-model.md")
    assert low <= median(each.result.value for each in verdicts_of(attack, setting, scheme)) <= high


@pytest.mark.slow
def test_demo_gives_the_stored_results_again() -> None:
    kept, found = load("demo.json"), run(DemoSettings()).as_json()
    for old, new in zip(kept["participants"], found["participants"], strict=True):
        for kind in ("alone", "confined"):
            assert new[kind]["accuracy"][-1] == pytest.approx(old[kind]["accuracy"][-1], abs=0.01)
    assert found["pooled"]["accuracy"][-1] == pytest.approx(kept["pooled"]["accuracy"][-1], abs=0.01)


@pytest.mark.slow
def test_table_in_the_package_and_the_page_are_those_of_the_stored_runs() -> None:
    module = load_script("privacy_costs", ACCURACY)
    runs = load_script("table_runs", ACCURACY).StoredRuns(RESULTS / "privacy" / "runs.json")
    stored = set(runs.results)
    rows = module.measure(runs)  # runs nothing
    assert set(runs.results) == stored
    assert json.loads(module.SHIPPED.read_text()) == module.shipped_table(rows)
    assert (RESULTS / "privacy" / "report.md").read_text() == module.page(rows, load("privacy/defaults.json"))


def test_table_of_sums_in_16_bits_has_the_stored_accuracies() -> None:
    module = load_script("ring_bits", "benchmarks")
    for row in module.rows(load("ring-bits.json")):
        assert "| " + " | ".join(row) + " |" in text_of("docs/performance.md")


def test_settings_of_private_trainings_are_the_best_candidate() -> None:
    module = load_script("private_defaults", ACCURACY)
    results = load("privacy/defaults.json")
    assert len(results) == (1 + len(module.CANDIDATES)) * len(module.SETTINGS) * len(module.MODELS) * len(module.SEEDS)
    assert next(iter(module.losses(results))) == module.describe(FOR_PRIVATE_TABLES)


def test_private_training_of_adult_is_as_good_as_it_must_be() -> None:
    """At ε = 1: within half a point of exact training if one may collude, within a point if all others may."""
    for model in ("logistic regression", "one hidden layer of 32"):
        assert max(private_losses("adult", model, 1.0, 1)) < 0.5
        assert max(private_losses("adult", model, 1.0, 4)) < 1.0


def test_smallest_office_is_better_with_noise_than_alone() -> None:
    module = load_script("private_organisations", ACCURACY)
    runs, exact = load("private-tables/results.json"), load("tables/results.json")
    for model, epsilon, colluders in product(module.MODELS, (1.0, 3.0), module.COLLUDERS):
        for seed, each in zip(module.SEEDS, exact[f"adult, {model}"], strict=True):
            own = runs[module.run_name("adult", model, epsilon, colluders, seed)][-1]
            alone = list(each["alone"].values())[-1]
            assert own["accuracy"] > alone["accuracy"]
            assert own["auc"] > alone["auc"]
