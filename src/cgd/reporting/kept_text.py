"""Sentences about the model that a participant keeps, and whether joining helped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cgd.reporting.html import decimals, figure
from cgd.reporting.score_tables import lack_of_records

if TYPE_CHECKING:
    from cgd.reporting.run_file import AnyRun
    from cgd.reporting.run_scores import ComparedModel, Estimate, Kept, KeptStage

ALONE, TOGETHER = "alone", "together"
DECISIVE = ("log_loss", "rmse", "auc", "accuracy")
"""The score that decides whether joining helped: the first of these that there is."""
METHODS = {"intercept": "its intercept", "weights": "all its weights"}


def describe_benefit(run: AnyRun) -> list[str]:
    """Return whether joining helped us, in plain words; empty without a model alone to compare with."""
    models = run.comparison.models if run.comparison else []
    if len(models) < 2 or models[0].name != ALONE:
        return []
    kept = models[-1]
    gain = _decisive_gain(kept)
    lack = lack_of_records(run)
    if lack or gain is None:
        reason = lack or "the difference between the two models has no interval on them"
        return [f"Our validation records cannot decide whether joining helped: {reason}."]
    verdicts = {
        1: "Joining helped: on our own records, the model that we keep is clearly better than one of our own alone.",
        0: "Our own records do not show whether joining helped: there is no clear difference between the model that we "
        "keep and one of our own records alone.",
        -1: "Joining did not help: on our own records, the model that we keep is clearly worse than one of our own "
        "records alone. Train one without the others, and predict with that.",
    }
    found = [verdicts[_sign(gain)]]
    together = _decisive_gain(models[1]) if len(models) > 2 else None
    if together is not None and together.value < 0:
        clearly = "clearly worse" if _sign(together) < 0 else "worse, if not clearly,"
        found.append(
            f"As it was trained, the model together is {clearly} for our records than one of our own alone: they may "
            "differ from those of the others."
        )
    return found


def describe_selection(run: AnyRun) -> list[str]:
    """Return a sentence if our validation records chose the step of the model: its scores on them are too good."""
    outcome, patience = run.outcome, (run.training or {}).get("patience")
    if run.validation is None or outcome is None or outcome.best_step is None:
        return []
    if not patience and outcome.best_step == outcome.steps:
        return []
    compared = [each.name for each in run.comparison.models if each.name != ALONE] if run.comparison else []
    names = " and ".join(compared) or "the model"
    found = "Our validation records, with those of the others, also chose the step at which the training stopped: so "
    return [f"{found}{names} may look slightly better on them than on new records."]


def describe_kept(run: AnyRun) -> list[str]:
    """Return what the model is that we keep, what the choice brought, and what it means."""
    kept = run.kept
    if kept is None:
        return []
    if kept.unavailable or not kept.models:
        return [f"We keep the confined model, as it was trained: {kept.unavailable or 'unknown'}."]
    records = f"our {kept.records:,} validation records"
    if len(kept.models) == 1:
        return [f"We keep the confined model, as it was trained: no other one is clearly better on {records}."]
    name = "accuracy" if run.data.task == "classification" else "R²"
    stages = "; ".join(_describe_stage(each, kept, name) for each in kept.models)
    found = f"{_describe_choice(kept)} On {records}, which chose it: {stages}."
    return [found, *_meaning(kept, private=run.privacy is not None)]


def describe_publication(run: AnyRun | None) -> list[str]:
    """Return what somebody learns who gets the model that we keep; without a run, it counts as the private one."""
    kept = None if run is None else run.kept
    if kept is not None and kept.models and kept.part == 0 and kept.method is None:
        whose = "It is the model without our origin, which all members have: it contains nothing of ours alone."
    else:
        part = 1.0 if kept is None else kept.part
        origin = {1.0: " with our whole origin", 0.0: ""}.get(part, f" with {part:g} of our origin")
        adapted = "" if kept is None or kept.method is None else ", adapted to our records, of which it says more"
        whose = (
            f"It is our private model{origin}{adapted}: keep it as secret as the folder of the run. A member of the "
            "federation that gets it may know our model at every step, which the training has kept from it."
        )
    shared = (
        "It was trained on the records of all members, and has means, deviations and categories of them: whoever gets "
        "it learns these. Give it to others only if all members agree."
    )
    return [whose, shared]


def _describe_choice(kept: Kept) -> str:
    part = {1.0: "with our whole origin", 0.0: "without our origin"}
    text = f"We keep the model {part.get(kept.part, f'with {kept.part:g} of our origin')}"
    if kept.method is None:
        return f"{text}."
    adapted = METHODS.get(kept.method, kept.method)
    return f"{text}, and {adapted} adapted to our own training records in {kept.steps} steps."


def _describe_stage(stage: KeptStage, kept: Kept, score: str) -> str:
    names = {"trained": "as trained", "scaled": f"with {kept.part:g} of the origin", "adapted": "adapted"}
    value = (
        "" if stage.score is None else f", {score.lower() if score == 'Accuracy' else score} {decimals(stage.score)}"
    )
    return f"{names.get(stage.name, stage.name)}, loss {figure(stage.loss)}{value}"


def _meaning(kept: Kept, *, private: bool) -> list[str]:
    found = []
    if kept.method is not None:
        found.append(
            "The adaptation used our own training records closely, and nothing protects them in this model: whoever "
            "gets it may learn more about them than from the confined one."
        )
        if private:
            found.append(
                "It used them without noise: the guarantee of ε does not cover this model, only what was sent."
            )
    elif kept.part == 0:
        found.append(
            "This is a model that all members have: they know what it predicts, and it contains nothing of ours."
        )
    if private and kept.method is None:
        found.append(
            "Which part was chosen depends on our validation records without noise; the guarantee of ε covers what was "
            "sent, and the model apart from this choice."
        )
    found.append("The confined model, as it was trained, is in the folder confined.")
    return found


def _decisive_gain(model: ComparedModel) -> Estimate | None:
    gains = model.gains or {}
    found = next((gains[name] for name in DECISIVE if name in gains), None)
    return None if found is None or found.low is None or found.high is None else found


def _sign(gain: Estimate) -> int:
    """Return 1 if a model is clearly better, -1 if it is clearly worse, and 0 if the interval contains 0."""
    low, high = gain.low or 0.0, gain.high or 0.0
    return 1 if low > 0 else -1 if high < 0 else 0
