"""Train on small public tables as four members do with the default settings of tables, and keep what one of them sees.

Some records of a public table are drawn and divided among four members, whose parts are 40, 30, 20 and 10 %. Every
step is that of `cgd join`: each member has an origin of its own and computes its gradient there, the addends are
rounded and added in the ring of the protocol, and Adam moves the displacement by the sum. The validation loss stops the
training early. All members are in one process and nothing is masked, because only the opened sums matter here. Unlike
in `cgd join`, values and features of few records are neither folded nor merged (`cgd.tabular.few_records`), so attacks
have more to work with.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import r2_score, roc_auc_score
from torch import nn
from torch.nn import functional

from cgd.audit.view import Colluder, Round, Truth, View, flat
from cgd.experiments.organisations import SOURCES, SourceTable
from cgd.federation.config import FOR_TABLES
from cgd.federation.data_schema import Column, Data
from cgd.local import solo_peers
from cgd.optim.displacement import AdamRule
from cgd.optim.origin import Origin
from cgd.secagg.fixed_point import WORD_TYPES, FixedPoint
from cgd.tabular.alignment import validation_split
from cgd.tabular.dataset import dataset_from_frame
from cgd.tabular.models import build
from cgd.tabular.preprocessing import fit
from cgd.tabular.training_loop import MIN_IMPROVEMENT

if TYPE_CHECKING:
    from collections.abc import Callable

    from cgd.federation.model_section import Model
    from cgd.tabular.dataset import TabularDataset

    Probe = Callable[[int, torch.Tensor], torch.Tensor]

PARTS = {"north": 0.4, "east": 0.3, "south": 0.2, "west": 0.1}
ATTACKER = "west"
MAX_TEST_RECORDS = 4000


@cache
def load(name: str) -> tuple[Data, TabularDataset, TabularDataset]:
    """Return the schema of a public table, its records for training, and some for the test.

    Raises:
        InputError: it has to be in the folder CGD_DATA, and is not.
    """
    source = _digits() if name == "digits" else SOURCES[name]()

    def read(cells: Any) -> TabularDataset:
        frame = {each: cells[:, place].tolist() for place, each in enumerate((*source.data.names, source.data.target))}
        return dataset_from_frame(frame, source.data, source.data.columns, target=True)[0]

    return source.data, read(source.training), read(source.held_out[:MAX_TEST_RECORDS])


def _digits() -> SourceTable:
    """Return handwritten digits of 8 × 8 pixels: is the digit even or odd?"""
    bunch = load_digits()
    columns = tuple(Column(f"pixel-{place}", "number") for place in range(bunch.data.shape[1]))
    labels = np.where(bunch.target % 2 == 0, "even", "odd")
    cells = np.column_stack([bunch.data.astype(str), labels])
    order = np.random.default_rng(0).permutation(len(cells))
    return SourceTable(
        "digits", Data("parity", columns, classes=("even", "odd")), cells[order[300:]], cells[order[:300]]
    )


@dataclass(frozen=True, repr=False)
class Members:
    """The encoded records of four members, padded to the same number with records of weight zero.

    Attributes:
        names: the members.
        x: features, by member and record.
        y: targets.
        weight: 1 for a record, 0 for padding.
        validation_x: features of the validation splits.
        validation_y: their targets.
        validation_weight: as above.
        test_x: features of the records for the test.
        test_y: their targets.
        outputs: the number of a model's outputs.
        classes: the classes; empty in a regression.
        records: the number of all members' records, with the validation splits.
    """

    names: tuple[str, ...]
    x: torch.Tensor
    y: torch.Tensor
    weight: torch.Tensor
    validation_x: torch.Tensor
    validation_y: torch.Tensor
    validation_weight: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor
    outputs: int
    classes: tuple[str, ...]
    records: int

    @property
    def features(self) -> int:
        """The number of features."""
        return self.x.shape[2]

    def own(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the training records of a member."""
        place = self.names.index(name)
        real = self.weight[place] > 0
        return self.x[place][real], self.y[place][real]

    def truth(self) -> Truth:
        """Return the training records of all members but the attacker."""
        records = {name: self.own(name) for name in self.names if name != ATTACKER}
        return Truth({name: x for name, (x, _) in records.items()}, {name: y for name, (_, y) in records.items()}, {})


@lru_cache(maxsize=2)
def draw(table: str, records: int, seed: int) -> Members:
    """Draw some records of a table, and divide them among the members."""
    data, training, held_out = load(table)
    chosen = np.random.default_rng(seed).permutation(training.rows)[:records]
    mask = np.zeros(training.rows, dtype=np.bool_)
    mask[chosen] = True
    drawn = training.take(mask)
    preprocessing = fit(drawn, data, data.columns, solo_peers())
    x, _ = preprocessing.transform(drawn)
    y = preprocessing.encode_target(drawn)
    order = np.random.default_rng(seed + 1_000_000).permutation(records)
    ends = np.cumsum([round(part * records) for part in PARTS.values()])[:-1]
    parts = np.split(order, ends)
    splits = [
        validation_split(len(part), data.validation, _seed(name, seed)) for name, part in zip(PARTS, parts, strict=True)
    ]
    kept = [_pad(x, y, [part[side(split)] for part, split in zip(parts, splits, strict=True)])
            for side in (np.logical_not, np.asarray)]  # fmt: skip
    test_x, _ = preprocessing.transform(held_out)
    test_y = preprocessing.encode_target(held_out)
    test = torch.from_numpy(test_x), torch.from_numpy(test_y)
    return Members(tuple(PARTS), *kept[0], *kept[1], *test, preprocessing.outputs, preprocessing.classes, records)


def _pad(x: Any, y: Any, parts: list[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    most = max(1, *map(len, parts))
    places = torch.from_numpy(np.stack([np.pad(part, (0, most - len(part))) for part in parts]).astype(np.int64))
    weight = torch.stack([(torch.arange(most) < len(part)).float() for part in parts])
    return torch.from_numpy(x)[places], torch.from_numpy(y)[places], weight


def _seed(name: str, seed: int) -> bytes:
    return hashlib.sha256(f"{name} {seed}".encode()).digest()


def _outputs(network: nn.Module, weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the outputs of several networks, whose weights are flat rows, each for its own records."""
    start = 0
    for layer in network.children():
        if isinstance(layer, nn.Linear):
            size, units = layer.weight.numel(), layer.out_features
            weight = weights[:, start : start + size].unflatten(1, layer.weight.shape)
            bias = weights[:, start + size : start + size + units]
            x = torch.baddbmm(bias[:, None], x, weight.transpose(1, 2))
            start += size + units
        else:
            x = layer(x)
    return x


def _losses(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the loss of every record."""
    if y.is_floating_point():
        return (outputs[..., 0] - y).square()
    return functional.cross_entropy(outputs.flatten(0, -2), y.flatten(), reduction="none").reshape(y.shape)


@dataclass(frozen=True, repr=False)
class Trained:
    """A finished training.

    Attributes:
        view: what the attacker saw.
        truth: the records of the others.
        score: the mean AUC of the four models on the test records; in a regression, R².
    """

    view: View
    truth: Truth
    score: float


def train(
    members: Members, model: Model, seed: int, *, steps: int | None = None, probe: Probe | None = None
) -> Trained:
    """Train with the default settings of tables.

    Args:
        members: their records.
        model: the section `[model]`.
        seed: the seed of the origins.
        steps: take so many steps, and do not stop early; the first steps are the same.
        probe: returns the vector that the attacker adds to its addend, given the step and the displacement.
    """
    network = build(model, members.features, members.outputs)
    shapes = {name: tuple(each.shape) for name, each in network.named_parameters()}
    origins = torch.stack(
        [flat(dict(Origin(model.delta, shapes, _seed(name, seed)).draw())).float() for name in members.names]
    )
    attacker = members.names.index(ATTACKER)
    displacement = torch.zeros(origins.shape[1])
    rule, state = AdamRule(FOR_TABLES.lr), dict[str, Any]()
    rounds: list[Round] = []
    own: list[torch.Tensor] = []
    lowest, best, best_step = float("inf"), displacement, 0
    for step in range(1, (steps or FOR_TABLES.steps) + 1):
        addends = _gradients(network, origins + displacement, members)
        if probe is not None:
            addends[attacker] += probe(step - 1, displacement)
        own.append(addends[attacker].clone())
        rounds.append(Round(members.names, displacement.clone(), _add(addends)))
        rule.move(displacement, rounds[-1].gradient_sum, state)
        if step % FOR_TABLES.validate_every == 0:
            loss = _validation_loss(network, origins + displacement, members)
            if loss < lowest * (1 - MIN_IMPROVEMENT):
                lowest, best, best_step = loss, displacement.clone(), step
            if steps is None and step - best_step >= FOR_TABLES.patience * FOR_TABLES.validate_every:
                break
    with torch.no_grad():
        outputs = _outputs(network, origins + best, members.test_x.expand(len(origins), -1, -1))
    view = View(
        "cgd",
        partial(build, model, members.features, members.outputs),
        lambda outputs, y: _losses(outputs, y).mean(),
        int(members.weight.sum()),
        FOR_TABLES.lr,
        model.delta,
        {ATTACKER: Colluder(*members.own(ATTACKER), tuple(own), origins[attacker])},
        tuple(rounds),
        final=displacement,
    )
    return Trained(view, members.truth(), float(np.mean([_score(each, members) for each in outputs])))


def _gradients(network: nn.Module, weights: torch.Tensor, members: Members) -> torch.Tensor:
    """Return the members' addends: the gradients of the mean loss over all members' records, each of its own."""
    weights = weights.requires_grad_()
    losses = _losses(_outputs(network, weights, members.x), members.y) * members.weight
    (losses.sum() / members.weight.sum()).backward()
    assert weights.grad is not None
    return weights.grad


def _validation_loss(network: nn.Module, weights: torch.Tensor, members: Members) -> float:
    with torch.no_grad():
        losses = _losses(_outputs(network, weights, members.validation_x), members.validation_y)
    return float((losses * members.validation_weight).sum() / members.validation_weight.sum())


def _add(addends: torch.Tensor) -> torch.Tensor:
    """Add in the ring of the protocol, with its rounding."""
    fixed_point = FixedPoint.for_weighted_sum(addends=len(addends), bound=FOR_TABLES.bound)
    words = np.zeros(addends.shape[1], dtype=WORD_TYPES[fixed_point.ring_bits])
    for each in addends:
        words += fixed_point.encode(each.numpy())
    return torch.from_numpy(fixed_point.decode(words, np.dtype(np.float32)))


def _score(outputs: torch.Tensor, members: Members) -> float:
    """Return the AUC of two classes, or R²."""
    if members.classes:
        return float(roc_auc_score(members.test_y.numpy(), (outputs[:, 1] - outputs[:, 0]).numpy()))
    return float(r2_score(members.test_y.numpy(), outputs[:, 0].numpy()))
