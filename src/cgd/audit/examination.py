"""All attacks that a view allows, on any view: of a user's own setting, or of a run that was recorded.

The settings of the catalogue are made so that each attack shows what it can do. Here the setting is given, and most
attacks will find little in a harmless one; what they find is what this coalition would have found. Where many rounds or
records would take long and tell nothing new, some are looked at: `MAX_ROWS` and the like. All attacks but that on who
drops out take n and the members to be the same in all rounds, so they are given those before the first change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cgd.audit.attacks import dropout, gram, inversion, labels, membership, records
from cgd.audit.first_layer import units
from cgd.audit.view import Inapplicable, Truth
from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from cgd.audit.schemes import Sample
    from cgd.audit.view import Finding, View

    Results = dict[str, list[Finding | Inapplicable]]

EXAMINED = ("gram", "membership", "records", "inversion", "labels", "dropout")
"""The attacks that can be tried on any view; the others need a setting of their own."""

# Rows of first-layer gradients that are compared with each other: units times rounds.
MAX_ROWS = 4096
# Candidates on each side, of which membership is asked.
MAX_CANDIDATES = 2000
MIN_CANDIDATES = 5
# A search finds no more records than this, and takes minutes with more parameters.
MAX_SEARCHED, MAX_PARAMETERS = 8, 20_000
ROUNDS_SEARCHED = 3


def examine(view: View, truth: Truth, fresh: Sample, attacks: Collection[str] = ()) -> Results:
    """Try attacks on gradient sums: what each came to, by its id in the catalogue, or why it does not apply.

    Args:
        view: what the coalition saw.
        truth: what the honest participants kept to themselves.
        fresh: records of the same kind that nobody trained on, for membership.
        attacks: which of `EXAMINED`; all of them if not given.
    """
    whole, everybody = view, truth
    view = _steady(whole)
    truth = _present(view, everybody)
    setting = described(view)
    tried: dict[str, list[Callable[[], list[Finding]]]] = {
        "gram": [lambda: list(gram.recover(view, truth, setting))],
        "membership": [lambda: _by_gradients(view, truth, fresh, setting), lambda: _by_loss(view, truth, fresh)],
        "records": [lambda: [records.analytic_recovery(_few_rows(view), truth, setting)]],
        "inversion": [lambda: _inversions(view, truth)],
        "labels": [lambda: [labels.count_labels(view, truth, setting)]],
        "dropout": [lambda: [dropout.difference(whole, everybody, described(whole))]],
    }
    return {name: _outcome(view, tried[name]) for name in attacks or EXAMINED}


def described(view: View) -> str:
    """A view in a few words."""
    honest, rounds = len(view.honest), len(view.rounds)
    return f"{honest} honest, {_count(view.honest_samples, 'record')}, {_count(rounds, 'round')}"


def _outcome(view: View, functions: list[Callable[[], list[Finding]]]) -> list[Finding | Inapplicable]:
    found: list[Finding | Inapplicable] = []
    for function in functions:
        try:
            found += function()
        except InputError as error:  # anything else is a failure, which the audit must show as one
            found.append(Inapplicable(view.scheme, str(error)))
    return found


def _steady(view: View) -> View:
    """The rounds before the first change of members."""
    changes = (number for number in range(1, len(view.rounds)) if not view.same_members(number))
    return view.until(next(changes, len(view.rounds)))


def _present(view: View, truth: Truth) -> Truth:
    """What those keep to themselves who are in a view's first round: who joined later is in none of its sums."""
    x, y, models = ({name: of[name] for name in view.honest} for of in (truth.x, truth.y, truth.models))
    return Truth(x, y, models)


def _by_gradients(view: View, truth: Truth, fresh: Sample, setting: str) -> list[Finding]:
    members, others = _candidates(truth, fresh)
    few = _few_rows(view)
    return [
        membership.span_membership(few, members, others, setting),
        membership.leverage_membership(few, members, others, setting),
    ]


def _by_loss(view: View, truth: Truth, fresh: Sample) -> list[Finding]:
    members, others = _candidates(truth, fresh)
    ways = [membership.loss_membership]
    if view.scheme == "cgd":
        ways.append(membership.displacement_membership)
    return [way(view, members, others, described(view)) for way in ways]


def _candidates(truth: Truth, fresh: Sample) -> tuple[Truth, Sample]:
    x, y = fresh
    if min(len(y), len(truth.all_y)) < MIN_CANDIDATES:
        raise InputError(
            f"there are {len(truth.all_y)} records and {len(y)} fresh ones to tell them from; membership needs at "
            f"least {MIN_CANDIDATES} of each"
        )
    members = Truth({"": truth.all_x[:MAX_CANDIDATES]}, {"": truth.all_y[:MAX_CANDIDATES]}, {})
    return members, (x[:MAX_CANDIDATES], y[:MAX_CANDIDATES])


def _few_rows(view: View) -> View:
    """As many of the first rounds as have `MAX_ROWS` units."""
    return view.until(max(1, MAX_ROWS // units(view.build_model())))


def _inversions(view: View, truth: Truth) -> list[Finding]:
    parameters = sum(each.numel() for each in view.build_model().parameters())
    if view.honest_samples > MAX_SEARCHED or parameters > MAX_PARAMETERS:
        raise InputError(
            f"{_count(view.honest_samples, 'record')} and {parameters:,} parameters; the search is tried with up to "
            f"{MAX_SEARCHED} records and {MAX_PARAMETERS:,} parameters"
        )
    first = view.until(1)
    if view.scheme != "cgd":
        return [inversion.inversion(first, truth, described(first))]
    several = view.until(ROUNDS_SEARCHED)
    return [inversion.inversion(each, truth, described(each)) for each in (first, several)]


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
