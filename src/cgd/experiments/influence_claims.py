"""Claims of the paper about the range δ of origins, the step size parameter μ, and convergence."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from cgd.experiments import theory
from cgd.experiments.accuracy_claims import (
    MAX_REPRODUCTION_ERROR,
    baseline,
    command,
    is_confined,
    mean_loss,
    points,
    reproduced,
)
from cgd.experiments.claims import Claim, Finding, Judgement, every, not_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cgd.experiments.claims import Evidence
    from cgd.experiments.entry_result import EntryResult

LARGEST, MIDDLE, SMALL, SMALLEST = 0.1, 0.06, 0.01, 0.001
"""The values of δ in table 7."""
CLEAR_DIFFERENCE = 0.3
"""Two accuracies count as different from this difference on, in points: 30 of 10,000 images."""
MAX_GAPS = {"small": 1.0, "random": 2.0, "any": 1.0}
"""The points up to which grids count as close: to a centralised model with δ 0.01, with random δ, and to each other."""
SOONER = 0.1
"""A run counts as faster if it saves this part of the steps; the paper reports 0.15 and 0.17."""
MAX_EFFECT_OF_MU = 0.2
"""The largest effect of μ on accuracy that the paper reports, in points."""
DELTA, MU, CONVERGENCE = "The range δ of the origins", "The step size parameter μ", "Convergence"


def _by_delta(evidence: Evidence, *deltas: object) -> Iterator[tuple[str, dict[object, EntryResult]]]:
    """Yield the paper's grids of table 7, each with its results by δ, if all these δ have been run."""
    found = evidence.select("table-7", lambda entry: is_confined(entry) and _key(entry.run.delta) in deltas)
    for group in dict.fromkeys(each.entry.group for each in found):
        results = {_key(each.entry.run.delta): each for each in found if each.entry.group == group}
        if len(results) == len(deltas):
            yield group, results


def _key(delta: float | tuple[float, float]) -> object:
    return "random" if isinstance(delta, tuple) else delta


def _smaller_is_better(evidence: Evidence) -> Judgement:
    findings = []
    for group, results in _by_delta(evidence, LARGEST, MIDDLE, SMALL):
        accuracies = [points(results[delta]) for delta in (LARGEST, MIDDLE, SMALL)]
        figures = f"{group}: {', '.join(f'{each:.2f}' for each in accuracies)} %"
        findings.append(Finding(accuracies == sorted(accuracies), figures))
    return every(findings)


def _too_small_is_worse(evidence: Evidence) -> Judgement:
    findings = []
    for group, results in _by_delta(evidence, SMALL, SMALLEST):
        loss = points(results[SMALL]) - points(results[SMALLEST])
        paper = 100 * (results[SMALL].entry.reported["accuracy"] - results[SMALLEST].entry.reported["accuracy"])
        findings.append(Finding(loss >= CLEAR_DIFFERENCE, f"{group}: lower by {loss:.2f} (paper: {paper:.2f})"))
    return every(findings)


def _no_difference(evidence: Evidence) -> Judgement:
    findings = []
    for group, results in _by_delta(evidence, LARGEST, MIDDLE, SMALL):
        accuracies = [points(each) for each in results.values()]
        reported = [100 * each.entry.reported["accuracy"] for each in results.values()]
        apart, paper = (max(each) - min(each) for each in (accuracies, reported))
        findings.append(Finding(apart <= MAX_GAPS["any"], f"{group}: {apart:.2f} points apart (paper: {paper:.2f})"))
    return every(findings)


def _close_at(delta: object, base: float, limit: float) -> Callable[[Evidence], Judgement]:
    def judge(evidence: Evidence) -> Judgement:
        central = baseline(evidence, "table-7", base)
        findings = []
        for group, results in _by_delta(evidence, delta):
            if central is None:
                continue
            gap = points(central) - points(results[delta])
            figures = f"{group}: {points(results[delta]):.2f} %, loss {mean_loss(results[delta]):.3f}, gap {gap:.2f}"
            findings.append(Finding(gap <= limit, figures))
        return every(findings)

    return judge


def _steps_to(result: EntryResult, target: float) -> int:
    """Return the first evaluated step at which the accuracy reaches a target, which it does reach."""
    return next(step for step, accuracy in _curve(result) if accuracy >= target)


def _curve(result: EntryResult) -> Iterator[tuple[int, float]]:
    """Yield the evaluated steps, with the mean accuracy over the participants of all seeds."""
    for same in zip(*(each.history.evaluations for each in result.results), strict=True):
        yield same[0].step, fmean(accuracy for each in same for accuracy in each.accuracy)


def _faster(rows: int, is_large: Callable[[float], bool]) -> Callable[[Evidence], Judgement]:
    """Compare the steps that large and small μ need to the highest accuracy that all of them reach."""

    def judge(evidence: Evidence) -> Judgement:
        found = evidence.select("figure-8", lambda entry: entry.run.rows == rows and entry.run.mu > 0)
        large = [each for each in found if is_large(each.entry.run.mu)]
        small = [each for each in found if not is_large(each.entry.run.mu)]
        if not large or not small:
            return Judgement(holds=False, figures="")
        target = min(max(accuracy for _, accuracy in _curve(each)) for each in found)
        quick, slow = (min(_steps_to(each, target) for each in part) for part in (large, small))
        total = found[0].entry.run.steps
        figures = f"{100 * target:.2f} % after {quick} steps with the larger μ, {slow} with the smaller, of {total}"
        return Judgement(slow - quick >= SOONER * total, figures)

    return judge


def _small_effect(evidence: Evidence) -> Judgement:
    found = evidence.select("figure-8", lambda entry: entry.run.mu > 0)
    findings = []
    for group in dict.fromkeys(each.entry.group for each in found):
        accuracies = [points(each) for each in found if each.entry.group == group]
        apart = max(accuracies) - min(accuracies)
        if len(accuracies) > 1:
            figures = f"{group}: {min(accuracies):.2f} to {max(accuracies):.2f} %"
            findings.append(Finding(apart <= MAX_EFFECT_OF_MU, figures))
    return every(findings)


def _worst_cases(evidence: Evidence, experiment: str, group: str = "") -> list[tuple[EntryResult, theory.WorstCase]]:
    found = evidence.select(experiment, lambda entry: group in entry.group)
    return [(each, theory.WorstCase.of(each.results)) for each in found]


def _below_bound(evidence: Evidence) -> Judgement:
    ratios = [worst.regret[-1] / sum(worst.terms) for _, worst in _worst_cases(evidence, "theory")]
    figures = f"R is at most {max(ratios):.1%} of the bound, in {len(ratios)} runs" if ratios else ""
    return Judgement(all(ratio < 1 for ratio in ratios), figures)


def _falls_with_delta(experiment: str, *groups: str) -> Callable[[Evidence], Judgement]:
    def judge(evidence: Evidence) -> Judgement:
        findings = []
        for group in groups:
            cases = [worst for _, worst in _worst_cases(evidence, experiment, group)]
            gaps = [worst.gap for worst in sorted(cases, key=lambda worst: worst.epsilon)]
            power = theory.growth_with_epsilon(cases)
            growth = "" if power is None else f", growing like ε^{power:.1f} between the two largest δ"
            if gaps:
                findings.append(Finding(gaps == sorted(gaps), f"{group}: {gaps[0]:.3g} to {gaps[-1]:.3g}{growth}"))
        return every(findings)

    return judge


def _falls_with_steps_as_printed(evidence: Evidence) -> Judgement:
    cases = _worst_cases(evidence, "theory", "as printed")
    regrets = [worst.regret[-1] for _, worst in sorted(cases, key=lambda case: case[0].entry.run.steps)]
    runs = sorted(each.entry.run.steps for each, _ in cases)
    figures = "; ".join(f"R is {regret:.3g} for T = {steps}" for steps, regret in zip(runs, regrets, strict=True))
    return Judgement(len(regrets) > 1 and regrets[-1] < regrets[0], figures)


def _network_regret_falls(evidence: Evidence) -> Judgement:
    findings = []
    for each, worst in _worst_cases(evidence, "theory-network", "fixed step"):
        figures = f"{each.entry.name}: {worst.halfway_regret:.3g} to {worst.regret[-1]:.3g}"
        findings.append(Finding(worst.falls_with_steps, figures))
    return every(findings)


CLAIMS = (
    Claim(
        DELTA,
        "A smaller δ gives more accurate models, down to 0.01.",
        "§7.2.1, table 7",
        "in every grid, accuracy increases from δ 0.1 to 0.06 to 0.01",
        command("table-7"),
        _smaller_is_better,
    ),
    Claim(
        DELTA,
        "δ 0.001 is too small: accuracy is lower again.",
        "§7.2.1, table 7",
        f"in every grid, accuracy is at least {CLEAR_DIFFERENCE:g} points lower than with δ 0.01",
        command("table-7"),
        _too_small_is_worse,
    ),
    Claim(
        DELTA,
        "Between δ 0.1, 0.06 and 0.01 there is no significant difference.",
        "§7.2.1",
        f"in every grid, the three accuracies are at most {MAX_GAPS['any']:g} point apart",
        command("table-7"),
        _no_difference,
    ),
    Claim(
        DELTA,
        "With δ 0.01, confined models are close to a centralised model.",
        "§7.2.1, table 7",
        f"every grid is at most {MAX_GAPS['small']:g} point below the centralised model with the same δ",
        command("table-7"),
        _close_at(SMALL, SMALL, MAX_GAPS["small"]),
    ),
    Claim(
        DELTA,
        "Training is robust if every participant draws its own δ from a range of two orders of magnitude.",
        "§1, §7.2.1, table 7",
        f"with δ from 0.001 to 0.1, every grid is at most {MAX_GAPS['random']:g} points below the centralised model "
        "with δ 0.1",
        command("table-7"),
        _close_at("random", LARGEST, MAX_GAPS["random"]),
    ),
    Claim(
        DELTA,
        "The accuracies of CGD with these δ.",
        "table 7",
        f"ours differ by at most {MAX_REPRODUCTION_ERROR:g} point in every grid",
        command("table-7"),
        reproduced("cgd", "table-7"),
    ),
    Claim(
        MU,
        "With 100 rows, μ of at least 0.01 reaches the same accuracy sooner than a smaller one.",
        "§7.2.2, figure 8",
        f"it saves at least {SOONER:.0%} of all steps, to the highest accuracy that all runs with μ > 0 reach",
        command("figure-8"),
        _faster(100, lambda mu: mu >= 0.01),
    ),
    Claim(
        MU,
        "With 1,000 rows, μ above 0.05 reaches the same accuracy sooner than a smaller one.",
        "§7.2.2, figure 8",
        "the same",
        command("figure-8"),
        _faster(1000, lambda mu: mu > 0.05),
    ),
    Claim(
        MU,
        "The choice of μ has little effect on the final accuracy.",
        "§7.2.2, figure 8",
        f"in every grid, the accuracies with μ > 0 are at most {MAX_EFFECT_OF_MU:g} points apart",
        command("figure-8"),
        _small_effect,
    ),
    Claim(
        CONVERGENCE,
        "The regret of a confined model is bounded, if the loss is convex (Theorem 1).",
        "abstract, §1, theorem 1",
        "in every run of logistic regression, R is below the sum of the bound's terms, with the constants of the proof",
        command("theory"),
        _below_bound,
    ),
    not_checkable(
        CONVERGENCE,
        "The proof of Theorem 1 is right.",
        "§1, §4",
        "runs cannot prove a theorem; the row above is about its statement",
    ),
    Claim(
        CONVERGENCE,
        "The more steps, the closer to the optimum, with the decreasing step size of Theorem 1.",
        "§1, theorem 1",
        "with the step size as printed, R is lower for the larger T",
        command("theory"),
        _falls_with_steps_as_printed,
    ),
    Claim(
        CONVERGENCE,
        "The distance of origins, set by δ, decides how close confined models come to the optimum.",
        "§1, theorem 1",
        "with a fixed step and a convex loss, the final excess loss never falls as δ grows",
        command("theory"),
        _falls_with_delta("theory", "fixed step"),
    ),
    Claim(
        CONVERGENCE,
        "The same holds for networks. (Theorem 1 assumes a convex loss, so this is an observation.)",
        "§7.2.1",
        "with a fixed step, the final excess loss of a network never falls as δ grows",
        command("theory-network"),
        _falls_with_delta("theory-network", "tanh, fixed step", "ReLU, fixed step"),
    ),
    Claim(
        CONVERGENCE,
        "Networks converge, too. (An observation, as above.)",
        "§6, §7",
        "with a fixed step, R after all steps is below R after half of them, for every δ",
        command("theory-network"),
        _network_regret_falls,
    ),
)
"""The claims about δ, μ and convergence, in the order of the page."""
