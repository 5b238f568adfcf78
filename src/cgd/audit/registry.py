"""The registry of attacks: texts, success rule, remedy, demonstrations and controls of each, and where it applies.

The texts are for a privacy officer. They claim nothing that a result does not show; figures come from the results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cgd.audit.attacks import (
    canaries,
    dropout,
    gram,
    inversion,
    joint,
    labels,
    membership,
    records,
    reducer,
    simulator,
    theorem3,
    traps,
)
from cgd.audit.results import AttackResult, Inapplicable
from cgd.audit.scenario import Sample, Scenario
from cgd.audit.view import EPSILONS, SCHEMES, Scheme, Truth, View
from cgd.errors import InputError

Demonstration = Callable[[Scheme, int], list[AttackResult]]
OnView = Callable[[View, Truth, Sample], list[AttackResult]]
"""Runs an attack on any view, given the view, the truth and fresh records.

It raises InputError if the attack does not apply to the view; the audit then reports "not measured" with the reason.
The view may be of any scheme, and of a recorded run. There,

- `View.loss` may be weighted by class; the gradient of the last biases is then not predicted minus actual labels;
- `Colluder.sample_count`, its part of n, may differ from the number of its samples in the view;
- an addend is the mean gradient of a participant's samples, times n_l/n: times `View.samples`, it is their sum. With
  differential privacy (`View.is_private`), it is that of clipped gradients, with noise.

The setting of a result is `view.describe()`. Unless the attack has `on_changing_members`, the view ends before the
first change of members, and the models of the truth are those after its last round.
"""


ObserveTruth = Callable[[Scenario], tuple[View, Truth]]
OnScenario = Callable[[Scenario, Scheme, ObserveTruth], list[AttackResult]]
"""Runs an attack in a variant of any training, in which colluders steer, or a participant leaves.

It is given the training, its scheme, and a function that runs a scenario under that scheme. It raises InputError if the
attack does not apply.
"""


@dataclass(frozen=True, kw_only=True)
class Attack:
    """An attack.

    Attributes:
        id: its short name, an identifier, which is also the name of its module.
        title: its name.
        question: the question of a privacy officer that it answers.
        about: how it works.
        rule: when it counts as a success.
        remedy: what helps against it.
        demonstrate: runs it on embedded data, given the scheme and the seed.
        control: runs its controls, given the scheme and the seed.
        on_view: functions that run it on any view (`OnView`); empty if it needs a scenario of its own.
        on_scenario: functions that run it in a variant of any training (`OnScenario`); empty if it needs none.
        on_changing_members: true if `on_view` uses the rounds after a change of members.
        schemes: the schemes that it is demonstrated on.
        control_schemes: the schemes of its controls; those of the demonstrations if empty.
    """

    id: str
    title: str
    question: str
    about: str
    rule: str
    remedy: str
    demonstrate: Demonstration
    control: Demonstration
    on_view: tuple[OnView, ...] = ()
    on_scenario: tuple[OnScenario, ...] = ()
    on_changing_members: bool = False
    schemes: tuple[Scheme, ...] = tuple(SCHEMES)
    control_schemes: tuple[Scheme, ...] = ()

    def run_on(self, view: View, truth: Truth, fresh: Sample) -> list[AttackResult | Inapplicable]:
        """Run the attack on any view, and return its results, or the reasons why it does not apply.

        Args:
            view: the view of the coalition.
            truth: the secrets of the honest participants.
            fresh: records of the same kind that nobody trained on.
        """
        if not self.on_changing_members:
            view, truth = _before_change(view, truth)
        results: list[AttackResult | Inapplicable] = []
        for function in self.on_view:
            try:
                results += function(view, truth, fresh)
            except InputError as error:  # any other error is a failure of the attack, which must be reported as one
                results.append(Inapplicable(view.scheme, str(error)))
        return results

    def run_in(
        self, passive: Scenario, scheme: Scheme, observe_truth: ObserveTruth
    ) -> list[AttackResult | Inapplicable]:
        """Run the attack in a variant of any training, and return its results, or the reasons why it does not apply.

        Args:
            passive: the training.
            scheme: its scheme.
            observe_truth: runs a scenario under the scheme.
        """
        results: list[AttackResult | Inapplicable] = []
        for function in self.on_scenario:
            try:
                results += function(passive, scheme, observe_truth)
            except InputError as error:
                results.append(Inapplicable(scheme, str(error)))
        return results


ATTACKS: tuple[Attack, ...] = (
    Attack(
        id="gram",
        title="Second moments of a linear regression",
        question="Can the others compute how our measurements vary together, and with the value to predict?",
        about=(
            "With a squared error, the honest participants' part of a sum is a linear function of the displacement, "
            "which everybody knows. Sums at different displacements determine XᵀX, because the origins cancel; they "
            "mask only Xᵀy, in proportion to δ. The displacements follow from the training (passive), or a colluder "
            "changes them by entering one of its records at a time (own batches) or a vector of its choice (probe)."
        ),
        rule="the relative error is at most half of that of guessing from the coalition's own records",
        remedy=(
            "Do not train a linear model with a squared error on data whose covariances are secret. Differential "
            "privacy makes this harder, but ε does not bound statistics of many records; confinement does not help."
        ),
        demonstrate=gram.attacks,
        control=gram.controls,
        on_view=(gram.on_view,),
    ),
    Attack(
        id="membership",
        title="Membership of a known record",
        question="Can the others find out whether a record that they know is among ours?",
        about=(
            "The gradient of a fully-connected first layer is a linear combination of the records, for any weights. "
            "While there are fewer honest records than inputs, the gradients span a subspace that contains the members "
            "and no other record. With more records, members still have a lower leverage in the gradients than other "
            "records. Besides, the loss of a trained model is lower on the records it was trained on; in CGD the "
            "displacement itself serves as such a model. And the sum is more similar to the gradient of a member. With "
            "differential privacy, no attack has a larger AUC than Φ(μ), where μ follows from ε and δ."
        ),
        rule="the AUC is at least 0.6 and 3 standard deviations above 0.5",
        remedy=(
            "Train with differential privacy, or bring many times as many records as the first layer has inputs, and "
            "more if some inputs are rarely used. The advantage of the others shrinks slowly with the number of "
            "records; only noise bounds it."
        ),
        demonstrate=membership.attacks,
        control=membership.controls,
        on_view=(membership.gradients_on_view, membership.loss_on_view),
    ),
    Attack(
        id="records",
        title="Whole records from a layer of ReLU units",
        question="Can the others compute some of our records from the sums?",
        about=(
            "The gradient of a unit contains only the records that activate it. Some units are activated by a single "
            "record, and with few records the others are separated by linear algebra. No model has to be known, so "
            "confinement changes nothing."
        ),
        rule=(
            "a guess correlates with a record by at least 0.99, or, in a table, differs from it by at most a tenth of "
            "its distance from the average record; and this for more records than by chance"
        ),
        remedy=(
            "Train with differential privacy. Without it, use tanh, GELU or sigmoid units, or no hidden layer: more "
            "records do not prevent that some are read from ReLU units."
        ),
        demonstrate=records.attacks,
        control=records.controls,
        on_view=(records.on_view,),
    ),
    Attack(
        id="traps",
        title="Records by steering the model",
        question="Can a participant that enters manipulated gradients compute our records, even if we bring many?",
        about=(
            "All models move by the same sum, so a participant that adds a vector to its gradient moves all of them. "
            "It moves the first layer until about one of all honest records activates each ReLU unit; the gradient of "
            "the unit then is that record. Every number that it enters is within the bound of the sum, and nobody can "
            "see who entered it."
        ),
        rule=(
            "a guess correlates with a record by at least 0.99, or, in a table, differs from it by at most a tenth of "
            "its distance from the average record; and this for more records than by chance"
        ),
        remedy=(
            "Train with differential privacy, or only with participants that you trust not to do this. Sums much "
            "larger than your own gradient are a sign of it, and cgd warns about them; a lower bound of the sums slows "
            "it down."
        ),
        demonstrate=traps.attacks,
        control=traps.controls,
        on_scenario=(traps.on_scenario,),
    ),
    Attack(
        id="inversion",
        title="Records by gradient inversion",
        question="Can the others find records whose gradients would give the sums they saw?",
        about=(
            "Records, labels and, in CGD, the origins are optimised until their gradients match the opened sums. Where "
            "the model is known, one round is enough. In CGD a guessed origin fails in the first rounds, while the "
            "displacement is small compared with the origins; later, a single round reveals records. Every further "
            "round adds equations and no unknowns, so several rounds together can succeed as well."
        ),
        rule="the mean PSNR is at least 3 dB above that of guessing",
        remedy=(
            "Train with differential privacy, or bring more records than a search can separate, and choose δ as large "
            "as accuracy allows. Do not rely on confinement alone: a coalition sees every round."
        ),
        demonstrate=inversion.attacks,
        control=inversion.controls,
        on_view=(inversion.on_view,),
    ),
    Attack(
        id="labels",
        title="Histogram of labels",
        question="Can the others find out how many of our records are in each class?",
        about=(
            "The gradient of the last layer is the sum of predicted minus actual labels. At the start the predictions "
            "are known in FedSGD, and approximately known in CGD unless δ is large. A participant that adds a vector "
            "to its gradient can make all models predict one class for every record, whatever δ is (steered)."
        ),
        rule=(
            "at most half as many labels are wrong as by guessing, and errors as large as the estimate's own would "
            "improve a guess as much with a probability of at most 0.1 %"
        ),
        remedy=(
            "Assume that the others know how many records of each class the honest participants have together. "
            "Differential privacy makes the numbers uncertain by some records each; ε does not bound them."
        ),
        demonstrate=labels.attacks,
        control=labels.controls,
        on_view=(labels.on_view,),
        on_scenario=(labels.on_scenario,),
    ),
    Attack(
        id="dropout",
        title="Gradient of a participant that drops out",
        question="When we leave, do the sums before and after reveal our own gradient?",
        about=(
            "The same step, summed with and without a participant, would reveal its gradient exactly; cgd never sums a "
            "step twice. But training is smooth, so the sums before the dropout predict the next one, and the "
            "difference to the actual sum is the missing gradient."
        ),
        rule="the relative error is at most half of that of guessing",
        remedy=(
            "Leave together with others, or train with differential privacy. Without it, minibatches that change from "
            "round to round hide the gradient in a single round."
        ),
        demonstrate=dropout.attacks,
        control=dropout.controls,
        on_view=(dropout.on_view,),
        on_scenario=(dropout.on_scenario,),
        on_changing_members=True,
    ),
    Attack(
        id="joint",
        title="Records from joint columns",
        question="In a federation by columns, can the others compute our columns?",
        about=(
            "With `joint` columns, a row opens its pre-activations. From one round to the next they change by the "
            "records times a known change of the first layer: a system of linear equations. With `towers` no "
            "pre-activations are opened."
        ),
        rule="at least one record is recovered with every feature within 0.01",
        remedy='Use mode "towers". `joint` needs an acknowledgement, and is for reproducing the paper.',
        demonstrate=joint.attacks,
        control=joint.controls,
        schemes=("cgd",),
    ),
    Attack(
        id="reducer",
        title="A reducer that sends different totals",
        question="Can a member that reduces a sum send us another total than the rest, and learn from the difference?",
        about=(
            "Members compare a digest of the masked total before any of them reveals its self-mask key. The malicious "
            "reducer changes the total of its part for one member, and makes its own digests match. The same wrong "
            "total for everybody cannot be detected: any member can cause as much by entering a wrong value."
        ),
        rule="an honest member opens a wrong total",
        remedy="Nothing has to be done: sums whose digests differ are aborted before they are opened.",
        demonstrate=reducer.attacks,
        control=reducer.controls,
        schemes=("cgd",),
    ),
    Attack(
        id="simulator",
        title="Theorem 2: anything beyond the sum",
        question="Does a coalition learn anything about our addend beyond the honest participants' sum?",
        about=(
            "A simulator that knows only the coalition's inputs and the honest sum generates the coalition's view. "
            "Real and simulated views are compared word by word over hundreds of runs."
        ),
        rule="a measurement differs by more than chance allows (a false positive rate of one in a million)",
        remedy="Nothing has to be done. Note that the sum itself is open to all members in every round.",
        demonstrate=simulator.attacks,
        control=simulator.controls,
        schemes=("cgd",),
    ),
    Attack(
        id="canaries",
        title="The claimed ε, measured",
        question="With differential privacy: is ε as small as it is said to be?",
        about=(
            "Fake records, the canaries, are added to the training or not, each by a coin, and the coins are guessed "
            "from the opened totals. The more guesses are right, the larger ε must be. This is measured on the code of "
            "the product, from clipping to the opened total, with the noise that remains if t members leave theirs out."
        ),
        rule="the lower bound of ε, with a confidence of 99.99 %, is above the claimed ε",
        remedy="Nothing has to be done. A bound above the claim would be a defect; please report it.",
        demonstrate=canaries.attacks,
        control=canaries.controls,
        schemes=tuple(EPSILONS),
    ),
    Attack(
        id="theorem3",
        title="Theorem 3: the gradient at a known model",
        question="Do the others know the model at which our gradients were computed?",
        about=(
            "z₁ is the honest participants' opened sum; z₂ is the gradient of their records at a model that the "
            "coalition knows. Where both are equal, gradients can be turned into statements about records directly. In "
            "CGD the coalition uses the displacement as the model, which is close enough if origins are small compared "
            "with it."
        ),
        rule="the relative error of z₂ is less than half",
        remedy=(
            "Confinement is meant against this attack, and only against this one: the other attacks show what remains. "
            "It needs a large δ."
        ),
        demonstrate=theorem3.attacks,
        control=theorem3.controls,
        schemes=("plain", "secure", "cgd", "dp8", "dp2"),
        control_schemes=("dp0.5",),
    ),
)


def get(name: str) -> Attack:
    """Return the attack with an id.

    Raises:
        InputError: there is none.
    """
    found = next((each for each in ATTACKS if each.id == name), None)
    if found is None:
        raise InputError(f"there is no attack {name!r}; choose one of {', '.join(each.id for each in ATTACKS)}")
    return found


def attacks_on_views() -> tuple[Attack, ...]:
    """Return the attacks that can be run on any view; the others need a scenario of their own."""
    return tuple(each for each in ATTACKS if each.on_view)


def attacks_on_trainings() -> tuple[Attack, ...]:
    """Return the attacks that can be run on any simulated training: on its view, or in a variant of it."""
    return tuple(each for each in ATTACKS if each.on_view or each.on_scenario)


def _before_change(view: View, truth: Truth) -> tuple[View, Truth]:
    """Return the rounds before the first change of members, and the truth about their members after these rounds."""
    changes = (number for number in range(1, len(view.rounds)) if not view.same_members(number))
    end = view.final_displacement
    view = view.until(next(changes, len(view.rounds)))
    x, y, models = ({name: values[name] for name in view.honest} for values in (truth.x, truth.y, truth.models))
    # All models move alike, so these are the models after the last remaining round, up to rounding.
    moved = view.final_displacement - end
    return view, Truth(x, y, {name: weights + moved for name, weights in models.items()}, truth.table)
