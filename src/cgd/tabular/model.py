"""A trained model with everything needed to use it: prediction, saving and loading.

A saved model is two files that only their owner can read: `model.safetensors` has the weights, `model.json` the rest
(preprocessing, architecture, provenance). Neither is ever evaluated as code. A network of the user's own is stored as
`module:function`, and is imported only if the user names the same function when loading.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import safetensors
import safetensors.torch
import torch

import cgd
from cgd.errors import InputError
from cgd.federation.data_schema import OPTIONAL, Column, Data
from cgd.federation.model_section import Model
from cgd.files import write_private
from cgd.json_files import convert_complete, damaged_file, read_json
from cgd.optim.vertical import fuse, log_probabilities
from cgd.tabular.alignment import align, row_key
from cgd.tabular.databases import Query
from cgd.tabular.dataset import TabularDataset, dataset_from_frame, read_dataset
from cgd.tabular.federated_stats import NumberStats
from cgd.tabular.metrics import classification_scores, regression_scores
from cgd.tabular.models import build, count_parameters
from cgd.tabular.preprocessing import Preprocessing
from cgd.tabular.training import forward
from cgd.tabular.unit_checks import compare_with_training
from cgd.tabular.workbooks import Sheet
from cgd.user_functions import check_function_named

if TYPE_CHECKING:
    import os

    import numpy.typing as npt

    from cgd.peers import Peers
    from cgd.tabular.settings import TabularSettings
    from cgd.tabular.training import TrainingResult

FORMAT = "cgd-model-1"
WEIGHTS_FILE, MODEL_FILE = "model.safetensors", "model.json"
REMEDY = "train again"
LOG_PROBABILITY_BOUND, NUMBER_BOUND = 128.0, 2.0**20


@dataclass(frozen=True, repr=False)
class ConfinedModel:
    """A participant's own model, with `predict` and `predict_proba` as in scikit-learn.

    `cgd.load_model` reads one from a run's folder.

    Attributes:
        data: the schema of the tables.
        model: the architecture.
        preprocessing: the encoding of tables and of the target.
        network: the torch module.
        columns: the columns of a table that the model uses.
        towers: number of models that predict together; 1 except in a grid with several columns.
        provenance: participant, federation, epoch, and digest of the federation file.
    """

    data: Data
    model: Model
    preprocessing: Preprocessing
    network: torch.nn.Module
    columns: tuple[Column, ...]
    towers: int
    provenance: dict[str, Any]

    @classmethod
    def from_training(
        cls, trained: TrainingResult, settings: TabularSettings, provenance: dict[str, Any]
    ) -> ConfinedModel:
        """Return the model of a finished training."""
        return cls(
            settings.data,
            settings.model,
            trained.preprocessing,
            trained.network,
            settings.own_columns,
            settings.columns,
            provenance,
        )

    def __repr__(self) -> str:
        owner = " of ".join(
            str(self.provenance[name]) for name in ("participant", "federation") if name in self.provenance
        )
        return f"ConfinedModel({self.data.target} from {len(self.columns)} columns, {self.model.kind}, {owner})"

    # Prediction.

    @property
    def classes_(self) -> npt.NDArray[Any]:
        """The classes, in the order of `predict_proba`'s columns."""
        self._refuse_regression("classes")
        return np.array(self.preprocessing.classes, dtype=object)

    @property
    def feature_names_in_(self) -> npt.NDArray[Any]:
        """The columns of a table that the model uses."""
        return np.array(list(dict.fromkeys(each.source for each in self.columns)), dtype=object)

    def predict(self, table: Any, row: Peers | None = None) -> npt.NDArray[Any]:
        """Return the predicted class, or number, of every record.

        Args:
            table: anything `pyarrow.table` accepts (a dictionary of columns, a pandas or polars frame, an Arrow table),
                the path of a CSV, Parquet or Excel file, another source of records, or a `TabularDataset`.
            row: in a grid with several columns, the members of the row, who predict the same records simultaneously.

        Raises:
            InputError: the table cannot be used, or `row` is missing.
        """
        outputs = self._predict_table(table, row)
        if self.data.task == "regression":
            return outputs[:, 0]
        predicted: npt.NDArray[Any] = self.classes_[outputs.argmax(axis=1)]
        return predicted

    def predict_proba(self, table: Any, row: Peers | None = None) -> npt.NDArray[np.float64]:
        """Return the probability of every class for every record; the arguments are those of `predict`."""
        self._refuse_regression("probabilities")
        return self._predict_table(table, row)

    def records(self, table: Any) -> TabularDataset:
        """Return the records of a table, as `predict` accepts it."""
        if isinstance(table, (str, Path, Sheet, Query)):
            return read_dataset(table, self.data, self.columns, target=False, ids=self.towers > 1)[0]
        if isinstance(table, TabularDataset):
            return table
        return dataset_from_frame(table, self.data, self.columns, target=False, ids=self.towers > 1)[0]

    def outputs(self, records: TabularDataset, row: Peers | None = None) -> npt.NDArray[np.float64]:
        """Return probabilities of all classes, or the predicted number in one column, in the order of the records."""
        if self.towers > 1:
            return self._joint_outputs(records, row)
        return self.decode(self._raw_outputs(records))

    def decode(self, raw: torch.Tensor) -> npt.NDArray[np.float64]:
        """Return the outputs of a network as probabilities, or as numbers in the unit of the target."""
        if self.data.task == "regression":
            return self.preprocessing.decode(raw.numpy()).reshape(-1, 1)
        return raw.double().softmax(dim=1).numpy()

    def scores(self, outputs: npt.NDArray[np.float64], records: TabularDataset) -> dict[str, Any]:
        """Score these outputs against the target of their records; see `metrics.py`."""
        if self.data.task == "regression":
            return regression_scores(outputs[:, 0], np.asarray(records.target))
        return classification_scores(outputs, self.preprocessing.encode_target(records), self.preprocessing.classes)

    def _predict_table(self, table: Any, row: Peers | None) -> npt.NDArray[np.float64]:
        """Return the outputs for a table, and warn about values that no training record had, or far from them."""
        records = self.records(table)
        unlike = compare_with_training(records, self.preprocessing)
        for note in (*self.preprocessing.transform(records)[1], *unlike):
            warnings.warn(note, stacklevel=3)
        return self.outputs(records, row)

    def _joint_outputs(self, records: TabularDataset, row: Peers | None) -> npt.NDArray[np.float64]:
        """Combine the outputs of the row's towers by late fusion: only their sum is opened."""
        if row is None:
            raise InputError(
                f"this model uses some of the columns only; the {self.towers} members of its row must predict "
                "together: run `cgd predict MODEL --data FILE --federation FEDERATION.toml` at all of them, or pass "
                "row= in Python"
            )
        records, order = _align_to_row(records, row)
        raw = self._raw_outputs(records)
        if self.data.task == "regression":
            total = row.sum(raw[:, :1], bound=NUMBER_BOUND, ring_bits=64, context="predictions")
            outputs = self.preprocessing.decode(total.numpy() / len(row)).reshape(-1, 1)
        else:
            addend = log_probabilities(raw, LOG_PROBABILITY_BOUND)
            total = row.sum(addend, bound=LOG_PROBABILITY_BOUND, context="late fusion")
            outputs = fuse([total]).double().exp().numpy()
        return outputs[order]

    def _raw_outputs(self, records: TabularDataset) -> torch.Tensor:
        x, _ = self.preprocessing.transform(records)
        return forward(self.network, torch.from_numpy(x))

    def _refuse_regression(self, what: str) -> None:
        if self.data.task == "regression":
            raise InputError(f"the model predicts a number ({self.data.target}), so it has no {what}; call predict")

    # Storage.

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the model into a folder, which is created if it does not exist.

        Raises:
            InputError: it cannot be written.
        """
        weights = safetensors.torch.save({name: each.contiguous() for name, each in self.network.state_dict().items()})
        document = {
            "format": FORMAT,
            "version": cgd.__version__,
            **self.provenance,
            "columns": [each.name for each in self.columns],
            "towers": self.towers,
            "data": self.data.as_stored(),
            "model": self.model.as_stored(),
            "preparation": self.preprocessing.to_dict(),
            "weights": {"file": WEIGHTS_FILE, "sha256": hashlib.sha256(weights).hexdigest()},
        }
        write_private(Path(folder) / WEIGHTS_FILE, weights)
        write_private(Path(folder) / MODEL_FILE, json.dumps(document, indent=1, ensure_ascii=False).encode())


def load_model(path: str | os.PathLike[str], *, function: str | None = None) -> ConfinedModel:
    """Load a model that `cgd join --data` saved.

    Args:
        path: the folder of the run.
        function: the `module:function` of a network of your own. The folder stores its name, too, but it is imported
            only if you name it here: the folder may come from another person.

    Raises:
        InputError: there is no model, it is damaged, its network cannot be built, or it names a function that you did
            not name.

    Examples:
        ```python
        model = cgd.load_model("runs/hospital-a")
        model.predict({"age": [63, 41], "sex": ["Female", "Male"]})
        ```
    """
    folder = Path(path)
    folder = folder.parent if folder.name in (WEIGHTS_FILE, MODEL_FILE) else folder
    document = _read_document(folder)
    data, model, preprocessing, columns = _check_document(document, folder)
    weights = _read_weights(folder / WEIGHTS_FILE, document.weights.sha256)
    check_function_named(model.function, function, folder / MODEL_FILE)
    _check_size(model, preprocessing, weights, folder)
    network = build(model, len(preprocessing.features), preprocessing.outputs)
    expected = {name: (each.shape, each.dtype) for name, each in network.state_dict().items()}
    if expected != {name: (each.shape, each.dtype) for name, each in weights.items()}:
        raise damaged_file(folder / WEIGHTS_FILE, f"its weights are not those of the network in {MODEL_FILE}", REMEDY)
    network.load_state_dict(weights)
    provenance = {name: getattr(document, name) for name in ("participant", "federation", "epoch", "digest")}
    return ConfinedModel(data, model, preprocessing, network.eval(), columns, document.towers, provenance)


class _Weights(msgspec.Struct):
    file: Literal["model.safetensors"]
    sha256: str


class _Document(msgspec.Struct):
    """The content of model.json."""

    format: str
    participant: str
    federation: str
    epoch: int
    digest: str
    columns: list[str]
    towers: int
    data: dict[str, Any]
    model: dict[str, Any]
    preparation: dict[str, Any]
    weights: _Weights


def _read_document(folder: Path) -> _Document:
    for name in (MODEL_FILE, WEIGHTS_FILE):
        if not (folder / name).exists():
            raise InputError(
                f"there is no model in {folder}: {name} is missing; name the folder of a run, as `cgd join --data` "
                "wrote it"
            )
    return read_json(folder / MODEL_FILE, _Document, version=FORMAT, written_by="cgd join --data", remedy=REMEDY)


def _check_document(document: _Document, folder: Path) -> tuple[Data, Model, Preprocessing, tuple[Column, ...]]:
    """Return the parts of the document, after checking that they are consistent."""
    try:
        data = convert_complete({**OPTIONAL, **document.data}, Data, "data")
        added = {"start": "zeros", "fresh_origins": False}  # which older files do not have
        model = convert_complete({**added, **document.model}, Model, "model")
        preprocessing = Preprocessing.from_dict(document.preparation)
        columns = tuple(each for each in data.input_columns if each.name in document.columns)
        types = ["number" if isinstance(each, NumberStats) else "category" for each in preprocessing.columns]
        encoded = [(each.name, kind) for each, kind in zip(preprocessing.columns, types, strict=True)]
        if [(each.name, each.type) for each in columns] != encoded:
            raise InputError("columns and preparation have different columns")
        classes = len(preprocessing.classes)
        if (data.task == "regression") != (classes == 0) or classes == 1:
            raise InputError(f"a {data.task} has {classes} classes")
        if document.towers < 1:
            raise InputError(f"towers is {document.towers}; it is at least 1")
    except InputError as error:
        raise damaged_file(folder / MODEL_FILE, str(error), REMEDY) from None
    return data, model, preprocessing, columns


def _read_weights(path: Path, digest: str) -> dict[str, torch.Tensor]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise damaged_file(path, f"it cannot be read ({error.strerror})", REMEDY) from None
    if hashlib.sha256(content).hexdigest() != digest:
        raise InputError(f"{path} does not belong to {path.with_name(MODEL_FILE)}; restore both from a copy")
    try:
        return safetensors.torch.load(content)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise damaged_file(path, f"it is not a file of tensors ({error})", REMEDY) from None


def _check_size(model: Model, preprocessing: Preprocessing, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Check the number of parameters before the network is built: a damaged file may describe a huge one."""
    expected = count_parameters(model, len(preprocessing.features), preprocessing.outputs)
    saved = sum(each.numel() for each in weights.values())
    if model.kind != "custom" and expected != saved:
        fact = f"its network has {expected} parameters, but {WEIGHTS_FILE} has {saved}"
        raise damaged_file(folder / MODEL_FILE, fact, REMEDY)


def _align_to_row(records: TabularDataset, row: Peers) -> tuple[TabularDataset, npt.NDArray[np.int64]]:
    """Return the records in the order of the row, and the indices that restore their original order."""
    ids = list(records.ids or ())
    aligned = align(records, row, row_key(row))
    position = {each: i for i, each in enumerate(aligned.ids or ())}
    return aligned, np.array([position[each] for each in ids], dtype=np.int64)
