"""What an audit tries: every attack, what it asks, when it counts, what helps against it, and where it is shown.

The texts are for a privacy officer. They claim nothing that a finding does not show: figures come from the findings.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from cgd.audit.attacks import (
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
from cgd.audit.view import SCHEMES
from cgd.errors import InputError

if TYPE_CHECKING:
    from cgd.audit.view import Finding, Inapplicable, Scheme

EVERY_SCHEME: tuple[Scheme, ...] = tuple(SCHEMES)


class Demonstrations(Protocol):
    """A module that shows an attack: where it is tried, and where it must fail (or, for a protection, must succeed)."""

    def attacks(self, scheme: Scheme, seed: int = 0) -> list[Finding]:
        """The findings under a scheme."""

    def controls(self, scheme: Scheme, seed: int = 0) -> list[Finding]:
        """The controls under a scheme."""


@dataclass(frozen=True)
class Attack:
    """One attack, or one protection that is tried.

    Attributes:
        id: its short name.
        title: its name.
        question: what a privacy officer wants to know.
        about: how it works.
        rule: when it counts as a success.
        remedy: what helps.
        shown_by: where it is shown on embedded data.
        schemes: which schemes it makes sense for.
        controlled: under which schemes its controls are run; the same if not given.
    """

    id: str
    title: str
    question: str
    about: str
    rule: str
    remedy: str
    shown_by: Demonstrations
    schemes: tuple[Scheme, ...] = EVERY_SCHEME
    controlled: tuple[Scheme, ...] = ()


CATALOGUE: tuple[Attack, ...] = (
    Attack(
        "gram",
        "Second moments of a linear regression",
        "Do the others learn how our measurements vary together, and with what is to be predicted?",
        "With a squared error, the honest participants' part of a sum is a linear function of the displacement, which "
        "everybody knows. Sums at different displacements give XᵀX, the origins drop out; they mask only Xᵀy, in "
        "proportion to δ. The displacements are what training makes them (passive), or a colluder moves them by a few "
        "of its own records at a time or by a vector of its own (probe).",
        "the relative error is at most half of that of guessing from one's own records",
        "Do not take a linear model with a squared error for data whose covariances are a secret. Noise on the sum "
        "bounds it; confinement does not.",
        gram,
    ),
    Attack(
        "membership",
        "Membership of a known record",
        "Can the others tell whether a record that they hold is among ours?",
        "The gradient of a fully-connected first layer is a combination of the records, whatever the weights are: "
        "while honest records are fewer than inputs, a record lies in what the gradients span or it does not. With "
        "a few times more, members are still more like the gradients than others (leverage). Besides, a "
        "trained model's loss is lower on the records it was trained on; in CGD the displacement by "
        "itself serves as such a model.",
        "the AUC is at least 0.6 and 3 standard deviations above 0.5",
        "Bring several times as many records as the first layer has inputs, more if some inputs are rarely used. "
        "Noise on the sum bounds it.",
        membership,
    ),
    Attack(
        "records",
        "Whole records from a layer of ReLU units",
        "Can the others read our records off the sums when we bring few?",
        "A unit's gradient holds only the records that activate it. With few records, some units see one alone, and "
        "the others are taken apart by algebra. No model has to be known, so confinement changes nothing.",
        "a record correlates with a guess by 0.99, and more do than by chance",
        "Never join with a handful of records: pool them with a neighbour's first. Noise on the sum prevents it.",
        records,
    ),
    Attack(
        "traps",
        "Records by steering the model",
        "Can a participant that enters vectors of its own read our records, even if we bring many?",
        "All models move by the same sum, so whoever adds a vector to its gradient moves them all. A curious "
        "participant moves the first layer until each ReLU unit is activated by about one in all honest records; the "
        "unit's gradient then is that record. Every number that it enters is within the bound of the sum, and nobody "
        "sees who entered what.",
        "a record correlates with a guess by 0.99, and more do than by chance",
        "Train only with participants that you trust not to do this. Sums much larger than your own gradient give it "
        "away, and cgd cautions you of them; a lower bound of the sums makes it slow. Noise on the sum prevents it.",
        traps,
    ),
    Attack(
        "inversion",
        "Records by searching for what explains the sums",
        "Can the others find records that would have made the sums they saw?",
        "Records, labels and, in CGD, the origins are changed step by step until their gradients explain the opened "
        "sums. Where the model is known, one round is enough. In CGD a guessed origin fails in the first rounds, while "
        "the displacement is small beside the origins; a later round alone gives records away. And each further "
        "round adds equations and no unknowns, so several rounds together can succeed.",
        "the mean PSNR is at least 3 dB above that of guessing",
        "Bring more records than a search can tell apart; keep δ as large as accuracy allows. Do not count on "
        "confinement alone: a coalition sees every round. Noise on the sum prevents it.",
        inversion,
    ),
    Attack(
        "labels",
        "Histogram of labels",
        "Do the others learn how many of our records are of each class?",
        "The last layer's gradient is what the models predict less what is there, added up. At the start the "
        "predictions are known in FedSGD, and roughly known in CGD unless δ is large. A participant that enters a "
        "vector of its own moves all models until they predict one class for everything, whatever δ is (steered).",
        "at most half as many labels are wrong as by guessing",
        "Take it as known to the others how many records of each class the honest participants have together.",
        labels,
    ),
    Attack(
        "dropout",
        "The gradient of one who drops out",
        "When we leave, do the sums before and after show our own gradient?",
        "The same step summed with and without a participant would show its gradient exactly; cgd never sums a step "
        "twice. But training is smooth, so the sums before the departure foretell the next one, and what is missing "
        "from it is the leaver's.",
        "the relative error is at most half of that of guessing",
        "Leave together with others. Minibatches that differ from round to round hide it from who sees one round only.",
        dropout,
    ),
    Attack(
        "joint",
        "Records from joint columns",
        "In a federation by columns, can the others read our columns?",
        "In `joint`, a row opens its pre-activations. From one round to the next they change by the records times a "
        "known change of the first layer: a system of linear equations. In `towers` nothing of that kind is opened.",
        "at least one record comes out with every feature within 0.01",
        'Use mode "towers". `joint` is refused without an acknowledgement, and is for reproducing the paper.',
        joint,
        ("cgd",),
    ),
    Attack(
        "reducer",
        "A reducer that lies about a total",
        "Can a member that adds up tell us another total than the rest, to split us and learn from the difference?",
        "Members compare a digest of the sealed total before anybody shows a key. A liar changes one member's part, "
        "and makes its own digests fit what it told. One and the same wrong total for everybody cannot be caught: any "
        "member can have as much by entering a wrong value.",
        "an honest member opens a total that is not the right one",
        "Nothing has to be done: sums that do not agree are given up before they are opened.",
        reducer,
        ("cgd",),
    ),
    Attack(
        "simulator",
        "Theorem 2: anything beyond the sum",
        "Does a coalition see anything of our addend but the honest participants' sum?",
        "A simulator that knows the coalition's inputs and the honest sum, and nothing else, makes up what the "
        "coalition would see. The real and the made-up views are compared word by word over hundreds of runs.",
        "some measurement differs by more than chance allows (one false alarm in a million)",
        "Nothing has to be done. Mind that the sum itself is open to all members, every round.",
        simulator,
        ("cgd",),
    ),
    Attack(
        "theorem3",
        "Theorem 3: the gradient at a known model",
        "Do the others know at which model our gradients were computed?",
        "z₁ is the honest participants' opened sum; z₂ is the gradient of their records at a model that the coalition "
        "knows. Where both are the same, gradients can be turned into statements about records directly. In CGD it "
        "takes the displacement for the model, which is near enough where origins are small beside it.",
        "z₂ is off by less than half",
        "This is what confinement is for, and all it is for: the other attacks say what remains. It needs a large δ.",
        theorem3,
        ("plain", "secure", "cgd"),
        controlled=("dp",),
    ),
)


@dataclass(frozen=True)
class Demonstration:
    """A part of the audit on embedded data: one attack under one scheme, or its controls there.

    Attributes:
        attack: the attack's id.
        scheme: the scheme.
        control: whether the controls are run.
    """

    attack: str
    scheme: Scheme
    control: bool

    @property
    def label(self) -> str:
        """What it is called while it runs."""
        return f"{get(self.attack).title}, {self.scheme}{', controls' * self.control}"

    def run(self, seed: int = 0) -> dict[str, list[Finding | Inapplicable]]:
        """The findings, by the attack's id."""
        shown_by = get(self.attack).shown_by
        if self.control:
            return {self.attack: [replace(each, control=True) for each in shown_by.controls(self.scheme, seed)]}
        return {self.attack: [*shown_by.attacks(self.scheme, seed)]}


def get(name: str) -> Attack:
    """An attack by its id.

    Raises:
        InputError: there is none of this name.
    """
    found = next((each for each in CATALOGUE if each.id == name), None)
    if found is None:
        raise InputError(f"there is no attack {name!r}; choose one of {', '.join(each.id for each in CATALOGUE)}")
    return found


def parts() -> list[Demonstration]:
    """All parts of the audit on embedded data."""
    return [
        Demonstration(attack.id, scheme, control)
        for attack in CATALOGUE
        for control in (False, True)
        for scheme in (attack.controlled if control and attack.controlled else attack.schemes)
    ]
