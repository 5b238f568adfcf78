"""The model that a participant keeps: the one of its own that suits its own records best. Nothing of this is sent.

After the training, everybody knows the displacement D. So a participant may keep start + D + c·origin for any part c of
its origin: c = 1 is the model as it was trained; at c = 0 it is a model that all members have, with the same bits,
because it is computed from D: the trained weights minus the origin would contain the rounding of their sum. The origin
was noise for the protection of the training, and is not needed to predict. From there, the participant may adapt the
model to its own records (`cgd.tabular.adaptation`).

**The choice** is made on our own validation records by their mean loss: first c, then an adaptation and its number of
steps. Another model is taken only if its loss is lower by more than the standard error of the difference: with few
records, the lowest loss of many models is low by chance. For the same reason, the loss counts an error that few records
do not show (`careful_losses`).

**What the choice brought** is measured on records that did not make it, because the best of many models looks better on
the records that chose it than on new ones. The validation records are divided into five parts; for each, the same
choice is made on the other four, and its predictions are scored on this one (cross-fitting). So all validation records
take part in both, none of them in both at once, and no model is trained on any of them. The model that is kept is
chosen on all of them, and so on more records than those that were scored. If its choice did not lower the loss on
records that did not make it, the model is kept as it was trained. All of them took part in choosing the step at which
the training stopped, so all scores are slightly too good on them (`cgd.reporting.kept_text.describe_selection`).
"""

from __future__ import annotations

import hmac
import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from torch.nn import functional

from cgd.errors import InputError
from cgd.tabular.adaptation import METHODS, adapt
from cgd.tabular.models import build_start
from cgd.tabular.training import build_confined
from cgd.tabular.training_loop import EncodedDataset, forward

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt
    import torch
    from torch import nn

    from cgd.tabular.model import ConfinedModel
    from cgd.tabular.preprocessing import Preprocessing
    from cgd.tabular.settings import TabularSettings
    from cgd.tabular.training import SplitRecords

    Floats = npt.NDArray[np.float64]
    Integers = npt.NDArray[np.int64]

Keep = Literal["confined", "scaled", "personalised"]
KEEP: tuple[Keep, ...] = get_args(Keep)
PARTS = (1.0, 0.75, 0.5, 0.25, 0.0)
FOLDS = 5
MIN_RECORDS = 20
"""With fewer validation records there is no choice."""
MIN_STANDARD_ERRORS = 1.0
MIN_SECONDS = 600.0
"""Adaptations take this long at most, or as long as the training together."""


@dataclass(frozen=True)
class Choice:
    """A model that may be kept.

    Attributes:
        part: c, the part of the origin.
        method: how it is adapted to our records, a name of `METHODS`; None if it is not.
        steps: the number of steps of the adaptation.
    """

    part: float = 1.0
    method: str | None = None
    steps: int = 0


AS_TRAINED = Choice()


@dataclass(frozen=True)
class KeptModel:
    """The result of the choice.

    Attributes:
        model: the model to keep.
        outputs: outputs for our validation records, each of a model that the other parts of them chose; None if there
            was no choice.
        summary: the part `kept` of run.json.
    """

    model: ConfinedModel
    outputs: Floats | None
    summary: dict[str, Any]


def check_keep(keep: str | None, *, private: bool, vertical: bool) -> Keep:
    """Return what to keep; by default the personalised model, and with [privacy] the scaled one.

    Raises:
        InputError: there is no such model.
    """
    if vertical:
        if keep not in (None, "confined"):
            raise InputError(
                f"keep is {keep!r}; in a grid with several columns the members of a row predict together, with their "
                "models as they were trained: choose 'confined'"
            )
        return "confined"
    if keep is None:
        return "scaled" if private else "personalised"
    for each in KEEP:
        if keep == each:
            return each
    raise InputError(f"keep is {keep!r}; choose one of {', '.join(KEEP)}")


def choose_model(
    settings: TabularSettings,
    model: ConfinedModel,
    trained: SplitRecords,
    seed: bytes,
    *,
    keep: Keep,
    delta: float | None = None,
) -> KeptModel:
    """Choose the model to keep. No failure here is an error, because the run is finished.

    Args:
        settings: those of the training.
        model: the confined model, as it was trained.
        trained: our records.
        seed: our seed, from which the origin was drawn.
        keep: "scaled" to choose the part of the origin only, "personalised" for adaptations, too.
        delta: our own δ, if not that of the federation file.
    """
    count = trained.validation.rows
    summary: dict[str, Any] = {"keep": keep, "records": count, "models": []}
    if count < MIN_RECORDS:
        reason = f"we have {count} validation records, and {MIN_RECORDS} are needed to choose on"
        return KeptModel(model, None, summary | {"unavailable": reason})
    try:
        candidates = _Candidates(settings, model, trained, seed, delta, adaptations=keep == "personalised")
        chosen, outputs = candidates.choose(np.arange(count)), candidates.cross_fit()
        if outputs is None:
            chosen, outputs = AS_TRAINED, candidates.outputs(AS_TRAINED)
        found = [candidates.describe(name, each) for name, each in _stages(chosen)]
        kept = replace(model, network=candidates.network(chosen).cpu())
    except Exception as error:  # whatever it is, for example in a network of the user's own
        return KeptModel(model, None, summary | {"unavailable": f"the choice failed: {error}"})
    if not np.isfinite(outputs).all():
        return KeptModel(model, None, summary | {"unavailable": "a model predicts values that are not finite"})
    choice = {"part": chosen.part, "method": chosen.method, "steps": chosen.steps}
    return KeptModel(model if chosen == AS_TRAINED else kept, outputs, summary | choice | {"models": found})


class _Candidates:
    """All models that may be kept, with their losses on our validation records, computed when they are needed."""

    def __init__(
        self,
        settings: TabularSettings,
        model: ConfinedModel,
        trained: SplitRecords,
        seed: bytes,
        delta: float | None,
        *,
        adaptations: bool,
    ) -> None:
        preprocessing = trained.preprocessing
        self._model, self._adaptations, self._seed = model, adaptations, seed
        self._settings, self._preprocessing, self._delta = settings, preprocessing, delta
        self._training = EncodedDataset.encode(trained.own, preprocessing, settings).to(settings.device)
        validation = EncodedDataset.encode(trained.validation, preprocessing, settings)
        self._validation = validation.with_features_on(settings.device)
        self._folds = divide(trained.validation.rows, trained.validation.units, seed)
        self._end = time.monotonic() + max(MIN_SECONDS, trained.seconds)
        self._displacement = trained.displacement
        # Without D, the model at c = 0 would have something of our origin, by rounding.
        self._parts = PARTS if trained.displacement is not None else tuple(each for each in PARTS if each)
        self._known: dict[Choice, Floats] = {}
        self._adapted: dict[float, list[Choice]] = {}

    def choose(self, places: Integers) -> Choice:
        """Return the choice of some of the validation records."""
        chosen = self._best(AS_TRAINED, [Choice(part) for part in self._parts], places)
        return self._best(chosen, self._adaptations_from(chosen.part), places) if self._adaptations else chosen

    def cross_fit(self) -> Floats | None:
        """Return the outputs for each part of the validation records of the model that the other parts choose.

        None if these models together do not have a lower loss than the model as it was trained.
        """
        choices = [self.choose(np.flatnonzero(self._folds != fold)) for fold in range(FOLDS)]
        outputs = {each: self.outputs(each) for each in set(choices)}
        losses, found = np.empty(len(self._folds)), np.empty_like(outputs[choices[0]])
        for fold, each in enumerate(choices):
            places = self._folds == fold
            losses[places], found[places] = self._losses(each)[places], outputs[each][places]
        return found if losses.mean() < self._losses(AS_TRAINED).mean() else None

    def outputs(self, choice: Choice) -> Floats:
        """Return the outputs for all validation records, decoded."""
        return self._model.decode(self.raw_outputs(choice))

    def describe(self, name: str, choice: Choice) -> dict[str, Any]:
        """Return the loss, as in training, and accuracy or R² on all validation records, for run.json."""
        outputs = self.raw_outputs(choice)
        loss = float(self._validation.losses(outputs).double().mean())
        return {"name": name, "loss": loss, "score": self._validation.score(outputs)}

    def raw_outputs(self, choice: Choice) -> torch.Tensor:
        """Return the network's outputs for all validation records."""
        return forward(self.network(choice), self._validation.x)

    def network(self, choice: Choice) -> nn.Module:
        """Return the network of a choice, built anew on the device; an adaptation is repeated."""
        network = self._scaled(choice.part)
        if choice.method is not None:
            for _ in adapt(network, self._training, METHODS[choice.method], self._seed, steps=choice.steps):
                pass
        return network.eval()

    def _scaled(self, part: float) -> nn.Module:
        trained = self._model.network
        network = scaled_network(
            self._settings, trained, self._preprocessing, self._seed, part, self._delta, self._displacement
        )
        return network.to(self._settings.device)

    def _losses(self, choice: Choice) -> Floats:
        if choice not in self._known:
            self._known[choice] = self._measure(self.network(choice))
        return self._known[choice]

    def _measure(self, network: nn.Module) -> Floats:
        losses = careful_losses(forward(network, self._validation.x), self._validation)
        return np.nan_to_num(losses, nan=np.inf, posinf=np.inf)

    def _adaptations_from(self, part: float) -> list[Choice]:
        """Return all adaptations of the model with a part of the origin, with known losses."""
        if part not in self._adapted:
            found = self._adapted[part] = []
            for name, method in METHODS.items():
                network = self._scaled(part)
                for steps in adapt(network, self._training, method, self._seed, end=self._end):
                    found.append(Choice(part, name, steps))
                    self._known[found[-1]] = self._measure(network)
        return self._adapted[part]

    def _best(self, base: Choice, options: Sequence[Choice], places: Integers) -> Choice:
        losses = [self._losses(each)[places] for each in options]
        best = clearly_best(self._losses(base)[places], losses)
        return base if best is None else options[best]


def careful_losses(outputs: torch.Tensor, data: EncodedDataset) -> Floats:
    """Return the losses of records by which a model is chosen.

    In a classification, a label counts as if each class had occurred once more among the n records: as (n + 1)/(n + K)
    for its own class and 1/(n + K) for every other of K classes, by Laplace's rule. Otherwise n records without an
    error would choose the model that is most certain, for which the first error is the most expensive.
    """
    if data.y.is_floating_point():
        losses = data.losses(outputs)
    else:
        classes = outputs.shape[1]
        smoothing = classes / (len(data) + classes)
        losses = functional.cross_entropy(outputs, data.y, reduction="none", label_smoothing=smoothing) * data.weight
    found: Floats = losses.double().numpy()
    return found


def clearly_best(base: Floats, options: Sequence[Floats]) -> int | None:
    """Return the place of the option with the lowest mean loss; None if it is not clearly lower than that of the base.

    Args:
        base: the losses of some records with the present model.
        options: their losses with other models.
    """
    if not options:
        return None
    best = min(range(len(options)), key=lambda place: float(options[place].mean()))
    with np.errstate(invalid="ignore"):  # of infinite losses
        gains = base - options[best]
        error = float(gains.std(ddof=1)) / math.sqrt(len(gains))
    return best if gains.mean() > MIN_STANDARD_ERRORS * error else None


def scaled_network(
    settings: TabularSettings,
    trained: nn.Module,
    preprocessing: Preprocessing,
    seed: bytes,
    part: float,
    delta: float | None = None,
    displacement: Mapping[str, torch.Tensor] | None = None,
) -> nn.Module:
    """Return a new network, start + D + c·origin.

    Args:
        settings: those of the training.
        trained: the confined network.
        preprocessing: the encoding of its records.
        seed: our seed, from which the origin was drawn.
        part: c.
        delta: our own δ, if not that of the federation file.
        displacement: D by the names of parameters; if it is None, (1 - c)·origin is subtracted from the trained one.
    """
    network, origin = build_confined(settings, preprocessing, seed, delta)
    weights = dict(trained.state_dict())
    if part != 1.0:
        inputs, outputs, model = len(preprocessing.features), preprocessing.outputs, settings.model
        start = build_start(model, inputs, outputs, vertical=settings.vertical).state_dict()
        for name, numbers in origin.draw():
            if displacement is None:
                exact = weights[name].double() - (1 - part) * numbers
            else:
                common = displacement[name].double()
                common = common if model.start == "zeros" else common + start[name].double()
                exact = common + part * numbers
            weights[name] = exact.to(weights[name].dtype)
    network.load_state_dict(weights)
    return network.eval()


def divide(rows: int, units: Iterable[str] | None, seed: bytes) -> Integers:
    """Return the number of the part, from 0 to 4, of each validation record; all records of a unit are in one part."""
    names = np.arange(rows) if units is None else np.unique(list(units), return_inverse=True)[1]
    key = hmac.digest(seed, b"cgd kept model", "sha256")
    order = np.random.default_rng(int.from_bytes(key, "little")).permutation(int(names.max()) + 1)
    found: Integers = (order % FOLDS)[names]
    return found


def _stages(chosen: Choice) -> list[tuple[str, Choice]]:
    """Return the models from the trained to the chosen one: as trained, with another part of the origin, adapted."""
    found = [("trained", AS_TRAINED)]
    if chosen.part != AS_TRAINED.part:
        found.append(("scaled", Choice(chosen.part)))
    return [*found, ("adapted", chosen)] if chosen.method else found
