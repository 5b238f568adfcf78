"""A confined model with all that it takes to use it: on disk, and for predictions.

A saved model is two files, which only their owner can read: `model.safetensors` has the weights, `model.json` all else
(how the table is prepared, which network it is, where it comes from). Neither is ever evaluated as code. A network of
the user's own is named there as `module:function`, and is imported only if the user names the same function again.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.torch
import torch

import cgd
from cgd.errors import InputError
from cgd.files import write_private
from cgd.optim.vertical import fuse, log_probabilities
from cgd.tabular.alignment import align, row_key
from cgd.tabular.dataset import TabularDataset
from cgd.tabular.loading import from_frame, read
from cgd.tabular.metrics import classification_scores, regression_scores
from cgd.tabular.model_file import ABOUT, FORMAT, WEIGHTS, check_size, fill, read_model
from cgd.tabular.models import build
from cgd.tabular.training import outputs_of
from cgd.tabular.user_functions import check_named

if TYPE_CHECKING:
    import os

    import numpy.typing as npt

    from cgd.federation.data_schema import Column, Data, Model
    from cgd.peers import Peers
    from cgd.tabular.preprocessing import Preprocessing
    from cgd.tabular.settings import TabularSettings
    from cgd.tabular.training import TrainingResult

LOG_PROBABILITY_BOUND, NUMBER_BOUND = 128.0, 2.0**20


@dataclass(frozen=True, repr=False)
class ConfinedModel:
    """A participant's own model: `predict` and `predict_proba` as in scikit-learn.

    `cgd.load_model` reads one from a run's folder.

    Attributes:
        data: what the tables hold and what is predicted.
        model: which network it is.
        preparation: what makes features of a table, and values of what the network says.
        network: the torch module.
        columns: the columns of a table that it looks at.
        towers: how many models predict together; 1 unless it was trained in a grid with several columns.
        origin: whose it is: participant, federation, epoch, digest of the federation file.
    """

    data: Data
    model: Model
    preparation: Preprocessing
    network: torch.nn.Module
    columns: tuple[Column, ...]
    towers: int
    origin: dict[str, Any]

    @classmethod
    def of(cls, trained: TrainingResult, setting: TabularSettings, origin: dict[str, Any]) -> ConfinedModel:
        """The model that came out of a training."""
        return cls(
            setting.data,
            setting.model,
            trained.preparation,
            trained.network,
            setting.own_columns,
            setting.columns,
            origin,
        )

    def __repr__(self) -> str:
        whose = " of ".join(str(self.origin[name]) for name in ("participant", "federation") if name in self.origin)
        return f"ConfinedModel({self.data.target} from {len(self.columns)} columns, {self.model.kind}, {whose})"

    # For predictions.

    @property
    def classes_(self) -> npt.NDArray[Any]:
        """The classes, in the order of `predict_proba`'s columns."""
        self._refuse_regression("classes")
        return np.array(self.preparation.classes, dtype=object)

    @property
    def feature_names_in_(self) -> npt.NDArray[Any]:
        """The columns of a table that are looked at."""
        return np.array([each.name for each in self.columns], dtype=object)

    def predict(self, table: Any, row: Peers | None = None) -> npt.NDArray[Any]:
        """The class, or the number, that is predicted for every record.

        Args:
            table: what `pyarrow.table` takes (a dictionary of columns, a pandas or polars frame, an Arrow table), the
                path of a CSV or Parquet file, or `TabularDataset`.
            row: in a federation by columns, the row's members, who predict for the same records at the same time.

        Raises:
            InputError: the table cannot be used, or the row is missing.
        """
        outputs = self._asked(table, row)
        if self.data.task == "regression":
            return outputs[:, 0]
        named: npt.NDArray[Any] = self.classes_[outputs.argmax(axis=1)]
        return named

    def predict_proba(self, table: Any, row: Peers | None = None) -> npt.NDArray[np.float64]:
        """The probability of every class for every record; the arguments are those of `predict`."""
        self._refuse_regression("probabilities")
        return self._asked(table, row)

    def records(self, table: Any) -> TabularDataset:
        """The records of a table, as `predict` takes them."""
        if isinstance(table, (str, Path)):
            return read(table, self.data, self.columns, target=False, ids=self.towers > 1)[0]
        if isinstance(table, TabularDataset):
            return table
        return from_frame(table, self.data, self.columns, target=False, ids=self.towers > 1)[0]

    def outputs(self, records: TabularDataset, row: Peers | None = None) -> npt.NDArray[np.float64]:
        """Probabilities of all classes, or the predicted number in one column; in the order of the records."""
        if self.towers > 1:
            return self._joint_outputs(records, row)
        raw = self._raw(records)
        if self.data.task == "regression":
            return self.preparation.decode(raw.numpy()).reshape(-1, 1)
        return raw.double().softmax(dim=1).numpy()

    def scores(self, outputs: npt.NDArray[np.float64], records: TabularDataset) -> dict[str, Any]:
        """How good these outputs are, beside the target of their records; see `scores.py`."""
        if self.data.task == "regression":
            return regression_scores(outputs[:, 0], np.asarray(records.target))
        return classification_scores(outputs, self.preparation.encode_target(records), self.preparation.classes)

    def _asked(self, table: Any, row: Peers | None) -> npt.NDArray[np.float64]:
        """The outputs for a table, with a warning of what nobody had when the model was trained."""
        records = self.records(table)
        for note in self.preparation.transform(records)[1]:
            warnings.warn(note, stacklevel=3)
        return self.outputs(records, row)

    def _joint_outputs(self, records: TabularDataset, row: Peers | None) -> npt.NDArray[np.float64]:
        """Late fusion: the row adds up what its towers say, and opens the sum alone."""
        if row is None:
            raise InputError(
                f"this model has seen some columns only; the {self.towers} members of its row predict together: "
                "`cgd predict MODEL --data FILE --federation FEDERATION.toml` at all of them, or row= in Python"
            )
        records, back = _in_row_order(records, row)
        raw = self._raw(records)
        if self.data.task == "regression":
            total = row.sum(raw[:, :1], bound=NUMBER_BOUND, ring_bits=64, context="predictions")
            outputs = self.preparation.decode(total.numpy() / len(row)).reshape(-1, 1)
        else:
            said = log_probabilities(raw, LOG_PROBABILITY_BOUND)
            total = row.sum(said, bound=LOG_PROBABILITY_BOUND, context="late fusion")
            outputs = fuse([total]).double().exp().numpy()
        return outputs[back]

    def _raw(self, records: TabularDataset) -> torch.Tensor:
        x, _ = self.preparation.transform(records)
        return outputs_of(self.network, torch.from_numpy(x))

    def _refuse_regression(self, what: str) -> None:
        if self.data.task == "regression":
            raise InputError(f"the model predicts a number ({self.data.target}); there are no {what}, call predict")

    # On disk.

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the model into a folder, which is made if it does not exist.

        Raises:
            InputError: it cannot be written.
        """
        weights = safetensors.torch.save({name: each.contiguous() for name, each in self.network.state_dict().items()})
        about = {
            "format": FORMAT,
            "version": cgd.__version__,
            **self.origin,
            "columns": [each.name for each in self.columns],
            "towers": self.towers,
            "data": asdict(self.data),
            "model": asdict(self.model),
            "preparation": self.preparation.to_dict(),
            "weights": {"file": WEIGHTS, "sha256": hashlib.sha256(weights).hexdigest()},
        }
        write_private(Path(folder) / WEIGHTS, weights)
        write_private(Path(folder) / ABOUT, json.dumps(about, indent=1, ensure_ascii=False).encode())


def load_model(path: str | os.PathLike[str], *, function: str | None = None) -> ConfinedModel:
    """Return a model that `cgd join --data` saved, from the folder of its run.

    Args:
        path: the folder.
        function: of a network of your own, the `module:function` that makes it. The folder has its name, too, but what
            a folder names is not imported before you name it: the folder may come from somebody else.

    Raises:
        InputError: there is none, it is damaged, its network cannot be built here, or it names a function that you did
            not.

    Examples:
        ```python
        model = cgd.load_model("runs/hospital-a")
        model.predict({"age": [63, 41], "sex": ["Female", "Male"]})
        ```
    """
    folder = Path(path)
    folder = folder.parent if folder.name in (WEIGHTS, ABOUT) else folder
    found = read_model(folder)
    check_named(found.model.function, function, folder / ABOUT)
    check_size(found, folder)
    network = build(found.model, len(found.preparation.features), found.preparation.outputs)
    fill(network, found.weights, folder)
    return ConfinedModel(
        found.data, found.model, found.preparation, network.eval(), found.columns, found.towers, found.origin
    )


def _in_row_order(records: TabularDataset, row: Peers) -> tuple[TabularDataset, npt.NDArray[np.int64]]:
    """The records in the order of the row, and how to get back to ours."""
    ids = list(records.ids or ())
    aligned = align(records, row, row_key(row))
    place = {each: i for i, each in enumerate(aligned.ids or ())}
    return aligned, np.array([place[each] for each in ids], dtype=np.int64)
