"""What a participant should know of its own setting before it shares a gradient: where the audit shows that it leaks.

A caution states a fact with the figures of this very run, what the audit measured in such a setting, and what to do
about it. The figures are constants here, and a test runs the attacks of `cgd.audit` and holds the texts to what
comes out. Everything rests on what a participant knows by itself: its own records, its network, how many members there
are, and, after the first count, how many records all have together.

A caution is no bound, and to get none is no promise: only noise on the sums would bound what a record reveals, and
none is added.
"""

from __future__ import annotations

import logging
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from cgd.secagg.partition import MIN_MEMBERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

log = logging.getLogger("cgd.optim")

FIRST_LAYER = "_cgd_first_layer"
"""The attribute by which an optimiser knows the weights that see the records themselves."""

FEW_RECORDS = 4
"""Up to so many records of each honest participant come out whole."""

PLENTY = 3
"""So many records for each input, of us and of another, left the attack on membership with nothing on tumours; where
inputs are rarely used it may find more."""

SPAN = "AUC 1.000, with 8 units after 5 steps and with 2 after 50"
LINEAR_SPAN = "AUC 0.8 after 200 steps of a linear model with two outputs"
LEVERAGE = "AUC 0.96 with 1.3 honest records for each input, 0.66 with 2.6, 0.51 with 6"
LINEAR_LEVERAGE = "AUC 0.61 with 1.3 honest records for each input after 200 steps of a linear model with two outputs"
RECORDS = "all of 2 × 1 to 4 records with 256 units, fewer than half of 2 × 4 with 32"
GRAM = "relative error 0.08 from watching 60 steps, below 0.000001 with batches of its own choice"
DEPARTURE = "relative error 0.11 a step apart"
STEERING = "49 % of 2 × 100 records in 20 steps, by one member and within the bound"

EXTRAORDINARY = 30
"""A sum of the first layer that is so many times larger than our gradient ever was is not of gradients like it."""


@dataclass(frozen=True)
class PrivacyWarning:
    """One thing to know.

    Attributes:
        kind: "few records", "span", "leverage", "second moments", "departure" or "steering".
        fact: what is so in this run, and who could do what with it.
        figure: how well that went when the audit's attack was tried on such a setting.
        remedy: what to do.
    """

    kind: str
    fact: str
    figure: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.fact} (the attack of `cgd audit` came to: {self.figure}). {self.remedy}"


@dataclass(frozen=True)
class FirstLayer:
    """A fully-connected layer that sees the records themselves.

    Attributes:
        inputs: how many features a record has.
        units: how many outputs the layer has.
        bias: whether it has a bias: to its gradients, an input that is always one.
        relu: whether ReLU units follow, as far as we can tell.
        alone: whether it is all there is: a linear model.
    """

    inputs: int
    units: int
    bias: bool = True
    relu: bool = True
    alone: bool = False

    @property
    def rank(self) -> int:
        """How many dimensions its gradients can span; so many independent records span all of them."""
        return self.inputs + self.bias

    @classmethod
    def of(cls, model: nn.Module) -> FirstLayer | None:
        """The first layer of a model, if it is a fully-connected one that is trained.

        Examples:
            >>> FirstLayer.of(nn.Sequential(nn.Linear(30, 8), nn.Tanh(), nn.Linear(8, 2)))
            FirstLayer(inputs=30, units=8, bias=True, relu=False, alone=False)
            >>> FirstLayer.of(nn.Conv2d(1, 3, 5)) is None
            True
        """
        layers = [each for each in model.modules() if any(True for _ in each.parameters(recurse=False))]
        if not layers or not isinstance(first := layers[0], nn.Linear) or not first.weight.requires_grad:
            return None
        alone = len(layers) == 1
        # What a module of the user's own does between its layers cannot be seen: it may well be ReLU.
        seen = any(isinstance(each, nn.ReLU) for each in model.modules())
        relu = seen if isinstance(model, nn.Sequential) else not alone
        return cls(first.in_features, first.out_features, first.bias is not None, relu, alone)


def mark(model: nn.Module) -> None:
    """Let an optimiser over the model's parameters know which of them see the records."""
    layer = FirstLayer.of(model)
    if layer is not None:
        setattr(next(model.parameters()), FIRST_LAYER, astuple(layer))  # plain, so that it can be saved and copied


def cautions(
    own: int, layer: FirstLayer | None, *, members: int = 0, everyone: int | None = None
) -> tuple[PrivacyWarning, ...]:
    """What to know of a setting.

    Args:
        own: how many records this participant trains on.
        layer: what sees them, if it is fully connected; of other networks the audit says nothing.
        members: how many there are, this one included; 0 if that is not known.
        everyone: how many records all members have together, if they have been counted.

    Examples:
        >>> print(*cautions(500, FirstLayer(30, 8), members=5, everyone=2000))
        <BLANKLINE>
        >>> [each.kind for each in cautions(20, FirstLayer(30, 8), members=5, everyone=2000)]
        ['span']
        >>> [each.kind for each in cautions(50, FirstLayer(30, 8), members=5, everyone=2000)]
        ['leverage']
    """
    if layer is None:
        return ()
    found = [_of_few_records(own, layer, members), _of_the_span(own, layer, members, everyone), _of_moments(layer)]
    kinds = {each.kind for each in found if each is not None}
    # To have the records is to know who is among them; but that all of them are few is another matter.
    covered = "few records" in kinds and (everyone is None or everyone >= layer.rank)
    hidden = ("span", "leverage") if covered else ()
    return tuple(each for each in found if each is not None and each.kind not in hidden)


def _of_few_records(own: int, layer: FirstLayer, members: int) -> PrivacyWarning | None:
    if own > FEW_RECORDS or not layer.relu or not layer.bias:
        return None
    return PrivacyWarning(
        "few records",
        f"we bring {_counted(own)}; {_colluders(members)} can compute whole records from the sums of a layer of ReLU "
        "units, if the remaining member has as few",
        RECORDS,
        f"Bring at least {PLENTY * layer.rank} records, {PLENTY} for each input and the bias, or merge with a "
        "neighbour before you join",
    )


def _of_the_span(own: int, layer: FirstLayer, members: int, everyone: int | None) -> PrivacyWarning | None:
    inputs = f"{layer.inputs} inputs{' and a bias' if layer.bias else ''}"
    figure = LINEAR_SPAN if layer.alone else SPAN
    if everyone is not None and everyone < layer.rank:
        return PrivacyWarning(
            "span",
            f"all members together have {_counted(everyone)} for a first layer with {inputs}; each of them can tell "
            "whether a record that it knows is among the others'",
            figure,
            f"Train on at least {2 * PLENTY * layer.rank} records together: find more records or participants, or "
            "leave out columns",
        )
    bring = f"we bring {_counted(own)} for a first layer with {inputs}; {_colluders(members)}"
    more = f"Bring at least {PLENTY * layer.rank} records, merge with a neighbour before you join, or leave out columns"
    if own < layer.rank:
        what = f"among ours and the remaining member's, if those are fewer than {layer.rank}"
        return PrivacyWarning("span", f"{bring} can tell whether a record that they know is {what}", figure, more)
    if own < PLENTY * layer.rank:
        what = "among ours and the remaining member's, if that one has no more"
        fact = f"{bring} can tell better than by chance whether a record that they know is {what}"
        return PrivacyWarning("leverage", fact, LINEAR_LEVERAGE if layer.alone else LEVERAGE, more)
    return None


def _of_moments(layer: FirstLayer) -> PrivacyWarning | None:
    if not layer.alone or layer.units != 1:
        return None
    return PrivacyWarning(
        "second moments",
        "the model is linear with one output; with a squared error, members that collude, or one alone, can compute "
        "XᵀX of the others' records, whatever δ is; Xᵀy is masked in proportion to δ",
        GRAM,
        "Train a network with a hidden layer instead; the fewer records there are, the more XᵀX says of each",
    )


def of_departure(gone: Iterable[str]) -> PrivacyWarning:
    """Somebody has left between two steps."""
    names = sorted(gone)
    whose = "its gradient" if len(names) == 1 else "the sum of their gradients"
    return PrivacyWarning(
        "departure",
        f"{', '.join(names)} left between two steps; from the sums before and after, the others can estimate {whose}",
        DEPARTURE,
        "Remove participants before the first step or after the last, or several at once, who hide each other",
    )


def of_steering(step: int, times: float) -> PrivacyWarning:
    """A sum is far larger than gradients like ours would make it."""
    return PrivacyWarning(
        "steering",
        f"in step {step} the sum of all first-layer gradients is {times:,.0f} times as large as ours ever was: "
        "somebody enters extraordinary values, by mistake or to steer all models until units see single records",
        STEERING,
        "Find out who and why before you go on; a lower bound in [training] makes steering slower",
    )


def _counted(records: int) -> str:
    return f"{records:,} record{'' if records == 1 else 's'}"


def _colluders(members: int) -> str:
    """Who it takes: all but us and one other, or fewer."""
    if members == MIN_MEMBERS:
        return "each of the other two members, alone,"
    others = f"{members - 2} of the {members - 1} others" if members else "the others, all but one,"
    return f"{others} together"


class RiskMonitor:
    """Gives an optimiser's cautions, each once, at the moment from which they hold.

    Attributes:
        given: those so far.
    """

    def __init__(self) -> None:
        self.given: list[PrivacyWarning] = []
        self._members: dict[Any, frozenset[str]] = {}
        self._largest: dict[Any, float] = {}  # first-layer gradient of ours, by its peers

    def look(self, peers: Any, group: dict[str, Any], own: int, parameters: Sequence[Any]) -> None:
        """Before a sum with these peers, whose records `group` has counted.

        In a federation only, whose epochs count from 1: inside one process nothing leaves.
        """
        before, members = self._members.get(peers), frozenset(group["members"])
        if not group["epoch"] or before == members:
            return
        self._members[peers] = members
        marks = [getattr(each, FIRST_LAYER) for each in parameters if hasattr(each, FIRST_LAYER)]
        layer = FirstLayer(*marks[0]) if marks else None
        self._give(*cautions(own, layer, members=len(members), everyone=group["total_samples"]))
        if before is not None and before - members and group["steps"]:
            self._give(of_departure(before - members))

    def compare(
        self, peers: Any, group: dict[str, Any], parameters: Sequence[torch.Tensor], own: Any, total: Any
    ) -> None:
        """After a sum: whether it is one of gradients like ours, as far as the first layer tells."""
        sizes = [each.numel() for each in parameters]
        for parameter, ours, sums in zip(parameters, own.split(sizes), total.split(sizes), strict=True):
            if not group["epoch"] or not hasattr(parameter, FIRST_LAYER):
                continue
            largest = self._largest[peers] = max(self._largest.get(peers, 0.0), float(ours.abs().max()))
            seen = float(sums.abs().max())
            if seen > EXTRAORDINARY * largest > 0 and not any(each.kind == "steering" for each in self.given):
                self._give(of_steering(group["steps"] + 1, seen / largest))

    def _give(self, *found: PrivacyWarning) -> None:
        for caution in found:
            if caution not in self.given:
                self.given.append(caution)
                log.warning("caution: %s", caution, extra={"event": "caution"})
