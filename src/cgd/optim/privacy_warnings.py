"""Privacy warnings: report, before a gradient is shared, a setting in which an attack of `cgd audit` succeeds.

A warning states a fact with the numbers of this run, the result of the attack in such a setting, and a remedy. The
results are constants in this module, which a test compares with those of the attacks. A warning depends on what a
participant knows: its records, its network, the number of members and, after the count, the total of records.

A warning is not a bound, and no warning is not a guarantee: only noise on the sums would bound what they reveal about a
record, and cgd adds none.
"""

from __future__ import annotations

import logging
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from cgd.secagg.reduction import MIN_MEMBERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

log = logging.getLogger("cgd.optim")

FIRST_LAYER = "_cgd_first_layer"
"""The attribute that marks the weights of a fully connected first layer, whose inputs are the records."""

MAX_RECOVERABLE_RECORDS = 4
"""Up to this number, all records of each honest participant are recovered."""

MIN_RECORDS_PER_INPUT = 4
"""With this number of records for each input and the bias, of each of two honest participants, the mean AUC of
membership inference by leverage is below 0.6, the audit's threshold of success, in all settings of
`results/leverage.json`. It is above 0.5 at every number of records that was measured: more records reduce the advantage
and do not remove it."""

SPAN_FIGURE = "AUC 1.000, with 8 units after 5 steps and with 2 after 50"
LINEAR_SPAN_FIGURE = "AUC 0.8 after 200 steps of a linear model with two outputs"
LEVERAGE_FIGURE = (
    "mean AUC 0.88 with 1.5 honest records for each input, 0.65 with 3, 0.56 with 6, 0.53 with 12, standard errors up "
    "to 0.004; on normally distributed records 0.59 with 8 and still 0.53 with 24, standard error 0.002"
)
LINEAR_LEVERAGE_FIGURE = (
    "mean AUC 0.65 with 1.5 honest records for each input, 0.58 with 3, 0.54 with 6, 0.52 with 12, standard errors up "
    "to 0.004, after 200 steps of a linear model with two outputs"
)
RECORDS_FIGURE = "all of 2 × 1 to 4 records with 256 units, fewer than half of 2 × 4 with 32"
RELU_FIGURE = (
    "one of four members read records of the others: on UCI Adult with 32 units, some of 72 in 7 of 10 trainings, of "
    "288 in 7, of 1,152 in 6, of 17,280 in 1 of 3, and up to 7 in one training; with 4 units in 4 of 30; on four other "
    "tables in 16 of 450; with tanh, GELU or sigmoid units or no hidden layer in 0 of 480"
)
GRAM_FIGURE = "relative error 0.08 from watching 60 steps, below 0.000001 with batches of its own choice"
DEPARTURE_FIGURE = "relative error 0.11 a step apart"
ABSENCE_FIGURE = (
    "mean relative error 0.09 after one absence of a round; with batches of 10 of 40 records 1.00 after one, 0.70 "
    "after 16 and 0.47 after 64"
)
STEERING_FIGURE = "49 % of 2 × 100 records in 20 steps, by one member and within the bound"

MAX_SUM_RATIO = 30
"""The largest plausible ratio of a first-layer sum to the largest gradient of this participant so far."""
MIN_RECORDS_TO_COMPARE = 5
"""With fewer records, this participant's gradient may be small for other reasons; it has a warning about them."""


@dataclass(frozen=True)
class PrivacyWarning:
    """One privacy warning.

    Attributes:
        kind: "relu units", "few records", "span", "leverage", "second moments", "departure", "absence" or
            "steering".
        fact: the risk in this run: its cause, the attacker and the attack.
        figure: the result of the audit's attack in such a setting.
        remedy: a change that removes or reduces the risk.
    """

    kind: str
    fact: str
    figure: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.fact} (measured by `cgd audit`: {self.figure}). {self.remedy}"


@dataclass(frozen=True)
class FirstLayer:
    """A fully connected layer whose inputs are the records.

    Attributes:
        inputs: the number of features of a record.
        units: the number of outputs of the layer.
        bias: True if it has a bias, which acts as an input that is always one.
        relu: True if ReLU units follow, or may follow.
        only_layer: True if the model has no other layer: it is linear.
    """

    inputs: int
    units: int
    bias: bool = True
    relu: bool = True
    only_layer: bool = False

    @property
    def rank(self) -> int:
        """The number of dimensions that its gradients can span, and of independent records that span them."""
        return self.inputs + self.bias

    @classmethod
    def from_model(cls, model: nn.Module) -> FirstLayer | None:
        """Return the first layer of a model; None if it is not fully connected, or is frozen.

        Examples:
            >>> FirstLayer.from_model(nn.Sequential(nn.Linear(30, 8), nn.Tanh(), nn.Linear(8, 2)))
            FirstLayer(inputs=30, units=8, bias=True, relu=False, only_layer=False)
            >>> FirstLayer.from_model(nn.Conv2d(1, 3, 5)) is None
            True
        """
        layers = [each for each in model.modules() if any(True for _ in each.parameters(recurse=False))]
        if not layers or not isinstance(first := layers[0], nn.Linear) or not first.weight.requires_grad:
            return None
        only_layer = len(layers) == 1
        # A custom module may call ReLU as a function, which cannot be seen here.
        has_relu = any(isinstance(each, nn.ReLU) for each in model.modules())
        relu = has_relu if isinstance(model, nn.Sequential) else not only_layer
        return cls(first.in_features, first.out_features, first.bias is not None, relu, only_layer)


def mark_first_layer(model: nn.Module) -> None:
    """Mark the weights of a fully connected first layer, so that an optimiser recognises them."""
    layer = FirstLayer.from_model(model)
    if layer is not None:
        # A plain tuple, so that the model can still be saved and copied.
        setattr(next(model.parameters()), FIRST_LAYER, astuple(layer))


def find_warnings(
    own_records: int,
    layer: FirstLayer | None,
    *,
    members: int = 0,
    total_records: int | None = None,
    batches: int = 1,
) -> tuple[PrivacyWarning, ...]:
    """Return the privacy warnings for a training.

    Args:
        own_records: the number of records that this participant trains on.
        layer: the first layer if it is fully connected; for other networks there are no warnings.
        members: the number of members, including this one; 0 if unknown.
        total_records: the number of records of all members, if they have been counted.
        batches: the number of batches in an epoch: a sum is about the records of one of them.

    Examples:
        >>> tanh, relu = FirstLayer(30, 8, relu=False), FirstLayer(30, 8)
        >>> print(*find_warnings(500, tanh, members=5, total_records=2000))
        <BLANKLINE>
        >>> [each.kind for each in find_warnings(20, tanh, members=5, total_records=2000)]
        ['span']
        >>> [each.kind for each in find_warnings(50, relu, members=5, total_records=2000)]
        ['relu units', 'leverage']
        >>> [each.kind for each in find_warnings(500, tanh, members=5, total_records=2000, batches=20)]
        ['span']
    """
    if layer is None:
        return ()
    found = [
        _relu_units_warning(layer),
        _few_records_warning(own_records, layer, members, batches),
        _membership_warning(own_records, layer, members, total_records, batches),
        _second_moments_warning(layer),
    ]
    total_records = None if total_records is None else total_records // batches
    kinds = {each.kind for each in found if each is not None}
    # Recovery of records implies membership inference, except that too few records in total concern every member.
    implied = "few records" in kinds and (total_records is None or total_records >= layer.rank)
    omitted = ("span", "leverage") if implied else ()
    return tuple(each for each in found if each is not None and each.kind not in omitted)


def _relu_units_warning(layer: FirstLayer) -> PrivacyWarning | None:
    """Return the warning of every such layer: records were read at all numbers of records and units measured."""
    if not layer.relu or not layer.bias:
        return None
    units = _count_text(layer.units, "ReLU unit")
    return PrivacyWarning(
        "relu units",
        f"the first layer has {units}; if a single record activates one of them, its sum is that record, and each "
        "member, alone and by watching, can read it, exact in every field",
        RELU_FIGURE,
        'Write activation = "tanh", "gelu" or "sigmoid" in [model], or train a model without a hidden layer; fewer '
        "units make it rarer, more records do not prevent it. Only [privacy] also bounds what a member that steers "
        "reads",
    )


def _few_records_warning(own_records: int, layer: FirstLayer, members: int, batches: int) -> PrivacyWarning | None:
    own_records = _batch_size(own_records, batches)
    if own_records > MAX_RECOVERABLE_RECORDS or not layer.relu or not layer.bias:
        return None
    return PrivacyWarning(
        "few records",
        f"this participant trains on {_count_text(own_records)}{_in_a_batch(batches)}; {_colluders(members)} can "
        "compute whole records from the sums of a layer of ReLU units, if the remaining member has as few",
        RECORDS_FIGURE,
        f"Train on at least {MIN_RECORDS_PER_INPUT * layer.rank} records of your own{_in_a_batch(batches)}, "
        f"{MIN_RECORDS_PER_INPUT} for each input and the bias, or merge them with another participant's before joining",
    )


def _membership_warning(
    own_records: int, layer: FirstLayer, members: int, total_records: int | None, batches: int
) -> PrivacyWarning | None:
    own_records, in_a_batch = _batch_size(own_records, batches), _in_a_batch(batches)
    total_records = None if total_records is None else total_records // batches
    inputs = f"{layer.inputs} inputs{' and a bias' if layer.bias else ''}"
    figure = LINEAR_SPAN_FIGURE if layer.only_layer else SPAN_FIGURE
    if total_records is not None and total_records < layer.rank:
        return PrivacyWarning(
            "span",
            f"all members together have {_count_text(total_records)}{in_a_batch} for a first layer with {inputs}; "
            "each member can tell whether a record that it knows is among those of the other members",
            figure,
            f"Train on at least {2 * MIN_RECORDS_PER_INPUT * layer.rank} records in total{in_a_batch}: add records or "
            "participants, or remove columns",
        )
    cause = f"this participant trains on {_count_text(own_records)}{in_a_batch} for a first layer with {inputs}; "
    cause += _colluders(members)
    attack = "whether a record that they know is among those of this participant and the remaining member"
    remedy = (
        f"Train on at least {MIN_RECORDS_PER_INPUT * layer.rank} records of your own{in_a_batch}, merge them with "
        "another participant's before joining, or remove columns"
    )
    if own_records < layer.rank:
        fact = f"{cause} can tell {attack}, if these are fewer than {layer.rank} together"
        return PrivacyWarning("span", fact, figure, remedy)
    if own_records < MIN_RECORDS_PER_INPUT * layer.rank:
        fact = f"{cause} can tell better than by chance {attack}, if that member has no more records"
        figure = LINEAR_LEVERAGE_FIGURE if layer.only_layer else LEVERAGE_FIGURE
        return PrivacyWarning("leverage", fact, figure, f"{remedy}; this reduces the advantage, and does not remove it")
    return None


def _second_moments_warning(layer: FirstLayer) -> PrivacyWarning | None:
    if not layer.only_layer or layer.units != 1:
        return None
    return PrivacyWarning(
        "second moments",
        "the model is linear with one output; with a squared error, colluding members, or a single one, can compute "
        "XᵀX of the other members' records, for any δ; Xᵀy is masked in proportion to δ",
        GRAM_FIGURE,
        "Train a network with a hidden layer instead; the fewer records there are, the more XᵀX reveals about each",
    )


def departure_warning(departed: Iterable[str]) -> PrivacyWarning:
    """Return the warning for members that left between two steps."""
    names = sorted(departed)
    estimate = "its gradient" if len(names) == 1 else "the sum of their gradients"
    return PrivacyWarning(
        "departure",
        f"{', '.join(names)} left between two steps; from the sums before and after, the other members can estimate "
        f"{estimate}",
        DEPARTURE_FIGURE,
        "Remove participants before the first step or after the last; or remove several at once, so that only the sum "
        "of their gradients can be estimated",
    )


def absence_warning(absent: Iterable[str]) -> PrivacyWarning:
    """Return the warning for members without which a quorum goes on."""
    names = sorted(absent)
    estimate = "its gradient" if len(names) == 1 else "the sum of their gradients"
    return PrivacyWarning(
        "absence",
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} absent since a step; from the sums before and after, "
        f"the other members can estimate {estimate}, and better with every absence if steps use batches; whoever can "
        "cut connections can choose who is absent, and when",
        ABSENCE_FIGURE,
        "Add a [privacy], whose noise covers it; or let the quorum wait longer: a higher patience in [absence]",
    )


def steering_warning(step: int, ratio: float) -> PrivacyWarning:
    """Return the warning for a sum that is much larger than this participant's gradients."""
    return PrivacyWarning(
        "steering",
        f"in step {step} the sum of all first-layer gradients is {ratio:,.0f} times as large as the largest gradient "
        "of this participant so far: a member enters extreme values, by mistake, or to steer the models until units "
        "respond to single records",
        STEERING_FIGURE,
        "Find out which member and why before you continue; a lower bound in [training] makes steering slower",
    )


def _count_text(count: int, what: str = "record") -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _batch_size(records: int, batches: int) -> int:
    """Return the number of records in the smallest batch."""
    return max(1, records // batches)


def _in_a_batch(batches: int) -> str:
    return " in a batch" if batches > 1 else ""


def _colluders(members: int) -> str:
    """Return the smallest coalition that the attacks need: all members but this one and one other."""
    if members == MIN_MEMBERS:
        return "each of the other two members, alone,"
    coalition = f"{members - 2} of the {members - 1}" if members else "all but one of the"
    return f"{coalition} other members together"


class RiskMonitor:
    """Logs the privacy warnings of an optimiser, each once, as soon as it applies.

    It is active in a federation only, whose epochs count from 1: in a single process no data is exchanged.

    Attributes:
        warnings: the warnings so far.
    """

    def __init__(self) -> None:
        self.warnings: list[PrivacyWarning] = []
        self._members: dict[Any, frozenset[str]] = {}
        self._records: dict[Any, int] = {}
        self._largest: dict[Any, float] = {}  # the largest first-layer gradient of this participant, by peers

    def before_sum(
        self, peers: Any, group: dict[str, Any], own_records: int, parameters: Sequence[Any], batches: int = 1
    ) -> None:
        """Check the setting before a sum with these peers; `group` contains the count of their records."""
        before, members = self._members.get(peers), frozenset(group["members"])
        if not group["epoch"] or before == members:
            return
        self._members[peers], self._records[peers] = members, _batch_size(own_records, batches)
        marks = [getattr(each, FIRST_LAYER) for each in parameters if hasattr(each, FIRST_LAYER)]
        layer = FirstLayer(*marks[0]) if marks else None
        total = group["total_samples"]
        self._add(*find_warnings(own_records, layer, members=len(members), total_records=total, batches=batches))
        if before is not None and before - members and group["steps"]:
            warn = departure_warning if peers.quorum is None else absence_warning
            self._add(warn(before - members))

    def after_sum(
        self, peers: Any, group: dict[str, Any], parameters: Sequence[torch.Tensor], own: Any, total: Any
    ) -> None:
        """Compare the first layer's part of a sum with the largest gradient of this participant so far."""
        sizes = [each.numel() for each in parameters]
        for parameter, ours, sums in zip(parameters, own.split(sizes), total.split(sizes), strict=True):
            few = self._records.get(peers, 0) < MIN_RECORDS_TO_COMPARE
            if not group["epoch"] or few or not hasattr(parameter, FIRST_LAYER):
                continue
            largest = self._largest[peers] = max(self._largest.get(peers, 0.0), float(ours.abs().max()))
            opened = float(sums.abs().max())
            if opened > MAX_SUM_RATIO * largest > 0 and not any(each.kind == "steering" for each in self.warnings):
                self._add(steering_warning(group["steps"] + 1, opened / largest))

    def _add(self, *warnings: PrivacyWarning) -> None:
        for warning in warnings:
            if warning not in self.warnings:
                self.warnings.append(warning)
                log.warning("privacy warning: %s", warning, extra={"event": "privacy warning"})
