"""Trained models as estimators of scikit-learn, for its metrics, plots, calibration and ensembles.

`ConfinedModel` reads tables as `cgd predict` does: any order of columns, and more of them. These classes follow the
rules of scikit-learn instead: the columns of `feature_names_in_`, in this order, in a data frame or in an array.

An estimator has the path of a run as its parameter, and reads the model when it needs it. So `clone` copies a path, and
a file of pickle or joblib has the path, and not the model, which is secret.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_array
from sklearn.utils.validation import validate_data

from cgd.errors import InputError
from cgd.federation.value_map import canonical
from cgd.tabular.model import load_model

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

    from cgd.tabular.model import ConfinedModel


class _ConfinedEstimator(BaseEstimator):  # type: ignore[misc]
    """Base of the classifier and the regressor."""

    def __init__(self, run: str | Path, function: str | None = None) -> None:
        self.run = run
        self.function = function

    @property
    def model_(self) -> ConfinedModel:
        """The model, which is read once."""
        parameters = (self.run, self.function)
        found: tuple[Any, ConfinedModel] | None = self.__dict__.get("_loaded")
        if found is None or found[0] != parameters:
            found = parameters, load_model(self.run, function=self.function)
            self._check(found[1])
            self.__dict__["_loaded"] = found
        return found[1]

    @property
    def feature_names_in_(self) -> npt.NDArray[Any]:
        """The columns that the model uses, in the order of X."""
        return self.model_.feature_names_in_

    @property
    def n_features_in_(self) -> int:
        """The number of columns that the model uses."""
        return len(self.feature_names_in_)

    def fit(self, X: Any, y: Any = None) -> NoReturn:  # noqa: ARG002, N803 - scikit-learn's names
        """Refuse to train: a model is trained by `cgd join`, together with the others.

        Raises:
            InputError: always.
        """
        raise InputError(
            f"this {type(self).__name__} was trained by `cgd join`, and fit cannot train it; predict with it, or wrap "
            "it in sklearn.frozen.FrozenEstimator, whose fit changes nothing, for what fits its parts"
        )

    def __sklearn_is_fitted__(self) -> bool:
        """Return True: the model is trained."""
        return True

    def __sklearn_tags__(self) -> Any:
        """Return what scikit-learn may do with the estimator."""
        tags = super().__sklearn_tags__()
        tags.requires_fit = False
        tags.input_tags.allow_nan = tags.input_tags.categorical = tags.input_tags.string = True
        return tags

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickle stores: the parameters, without the model."""
        state: dict[str, Any] = dict(super().__getstate__())
        state.pop("_loaded", None)
        return state

    def _check(self, model: ConfinedModel) -> None:
        """Check that the model can be used here."""
        if model.towers > 1:
            raise InputError(
                f"this is one of {model.towers} models of a row that predict together, by a secure sum; it is no "
                "estimator of its own: use `cgd predict`"
            )

    def _table(self, X: Any) -> Any:  # noqa: N803
        """Return X as a table, after the checks of scikit-learn."""
        names = self.feature_names_in_
        if not all(isinstance(each, str) for each in getattr(X, "columns", [None])):  # by their places
            X = check_array(X, dtype=None, ensure_all_finite=False, estimator=self, input_name="X")  # noqa: N806
            validate_data(self, X, reset=False, skip_check_array=True)
            return {name: X[:, place] for place, name in enumerate(names)}
        validate_data(self, X, reset=False, skip_check_array=True)
        return X


class ConfinedClassifier(ClassifierMixin, _ConfinedEstimator):  # type: ignore[misc]
    """A trained classification model, as a classifier of scikit-learn.

    Args:
        run: the folder of a run, as for `cgd.load_model`.
        function: the `module:function` of a network of your own.
        classes: the classes as in your labels if these are no texts, such as `(0, 1)` for the classes "0" and "1".

    Raises:
        InputError: at the first use: there is no model, it is damaged, predicts a number, or has other classes.

    Examples:
        ```python
        model = ConfinedClassifier("runs/hospital-a")
        RocCurveDisplay.from_estimator(model, frame[model.feature_names_in_], frame["diagnosis"])
        ```
    """

    def __init__(self, run: str | Path, function: str | None = None, classes: Sequence[Any] | None = None) -> None:
        super().__init__(run, function)
        self.classes = classes

    @property
    def classes_(self) -> npt.NDArray[Any]:
        """The classes, in the order of the columns of `predict_proba`."""
        texts = [str(each) for each in self.model_.classes_]
        if self.classes is None:
            return np.array(texts)
        given = {canonical(each.item() if isinstance(each, np.generic) else each): each for each in self.classes}
        if given.keys() != {canonical(each) for each in texts} or len(self.classes) != len(texts):
            raise InputError(
                f"classes is {list(self.classes)!r}, and the model has {', '.join(map(repr, texts))}; name each once"
            )
        return np.array([given[canonical(each)] for each in texts])

    def predict_proba(self, X: Any) -> npt.NDArray[np.float64]:  # noqa: N803
        """Return the probability of each class for each record."""
        return self.model_.predict_proba(self._table(X))

    def predict(self, X: Any) -> npt.NDArray[Any]:  # noqa: N803
        """Return the class of each record."""
        predicted: npt.NDArray[Any] = self.classes_[self.predict_proba(X).argmax(axis=1)]
        return predicted

    def _check(self, model: ConfinedModel) -> None:
        super()._check(model)
        if model.data.task == "regression":
            raise InputError(f"the model predicts a number, {model.data.target!r}; use a ConfinedRegressor")


class ConfinedRegressor(RegressorMixin, _ConfinedEstimator):  # type: ignore[misc]
    """A trained regression model, as a regressor of scikit-learn.

    Args:
        run: the folder of a run, as for `cgd.load_model`.
        function: the `module:function` of a network of your own.

    Raises:
        InputError: at the first use: there is no model, it is damaged, or predicts classes.
    """

    def predict(self, X: Any) -> npt.NDArray[np.float64]:  # noqa: N803
        """Return the number for each record, in the unit of the target."""
        return self.model_.predict(self._table(X))

    def _check(self, model: ConfinedModel) -> None:
        super()._check(model)
        if model.data.task != "regression":
            raise InputError(f"the model predicts classes of {model.data.target!r}; use a ConfinedClassifier")
