"""Trained models as estimators of scikit-learn, and scikit-learn's own checks of estimators.

The estimators predict with a model that was trained before, so `fit` refuses to train. Most of the checks fit first, on
data of their own: `ClassifierFitted` and `RegressorFitted` train a confined model alone in place of the refusal, and
these checks test everything else.
"""

from __future__ import annotations

import pickle
import tempfile
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pandas
import pytest
from sklearn.base import clone, is_classifier, is_regressor
from sklearn.calibration import CalibratedClassifierCV
from sklearn.frozen import FrozenEstimator
from sklearn.inspection import permutation_importance
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score
from sklearn.utils.estimator_checks import parametrize_with_checks
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, check_X_y

import cgd
from cgd.errors import InputError
from cgd.federation.data_schema import Column, Data
from cgd.federation.model_section import Model
from cgd.local import solo_peers
from cgd.tabular.dataset import dataset_from_frame
from cgd.tabular.estimator import ConfinedClassifier, ConfinedRegressor
from cgd.tabular.model import ConfinedModel
from cgd.tabular.training import train
from support.tabular import DATA, REGRESSION, records, table, tabular_settings

if TYPE_CHECKING:
    from pathlib import Path

PROVENANCE = {"participant": "ada", "federation": "trial", "epoch": 1, "digest": "ab"}
NAMES = ["age", "dose", "ward"]

pytestmark = pytest.mark.filterwarnings("ignore")  # notes of models about unusual values, and of scikit-learn


def save(data: Data, folder: Path, rows: int = 60, **classes: str) -> Path:
    config, content = tabular_settings(data, steps=10), table(rows, 1)
    content["outcome"] = [classes.get(each, each) for each in content["outcome"]]
    trained = train(solo_peers(b"s" * 32), config, records(content, data))
    ConfinedModel.from_training(trained, config, PROVENANCE).save(folder)
    return folder


def array(rows: int, seed: int) -> Any:
    content = table(rows, seed)
    return np.array([content[name] for name in NAMES], dtype=object).T


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(DATA, tmp_path_factory.mktemp("runs") / "classes")


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(REGRESSION, tmp_path_factory.mktemp("runs") / "numbers")


def test_predictions_are_those_of_the_model(run: Path, numbers: Path) -> None:
    x, content = array(30, 5), table(30, 5)
    model, estimator = cgd.load_model(run), ConfinedClassifier(run)
    assert np.array_equal(estimator.predict_proba(x), model.predict_proba(content))
    assert np.array_equal(estimator.predict(x), model.predict(content))
    assert list(estimator.classes_) == ["ill", "well"]
    assert (estimator.n_features_in_, list(estimator.feature_names_in_)) == (3, NAMES)
    assert estimator.score(x, content["outcome"]) == accuracy_score(content["outcome"], model.predict(content))
    regressor = ConfinedRegressor(numbers)
    assert np.array_equal(regressor.predict(x), cgd.load_model(numbers).predict(content))
    assert (is_classifier(estimator), is_regressor(estimator), is_regressor(regressor)) == (True, False, True)
    for each in (estimator, regressor):
        check_is_fitted(each)


def test_data_frames_are_read_by_their_columns(run: Path) -> None:
    content = table(30, 5)
    frame = pandas.DataFrame({name: content[name] for name in NAMES})
    frame.loc[:2, "ward"] = None
    estimator = ConfinedClassifier(run)
    expected = cgd.load_model(run).predict_proba({**content, "ward": [None] * 3 + content["ward"][3:]})
    assert np.array_equal(estimator.predict_proba(frame), expected)
    assert np.array_equal(estimator.predict_proba(frame.astype({"ward": "category"})), expected)
    with pytest.raises(ValueError, match="Feature names must be in the same order as they were in fit"):
        estimator.predict(frame[["dose", "age", "ward"]])
    with pytest.raises(ValueError, match=r"Feature names unseen at fit time:\n- outcome"):
        estimator.predict(frame.assign(outcome="ill"))
    with pytest.raises(ValueError, match="Feature names seen at fit time, yet now missing:\n- dose"):
        estimator.predict(frame[["age", "ward"]])


def test_tools_of_scikit_learn_accept_it(run: Path) -> None:
    x, labels = array(80, 6), table(80, 6)["outcome"]
    estimator = ConfinedClassifier(run)
    found = permutation_importance(estimator, x, labels, n_repeats=2, random_state=0)
    assert found.importances_mean.shape == (3,)
    calibrated = CalibratedClassifierCV(FrozenEstimator(estimator), method="sigmoid").fit(x, labels)
    assert log_loss(labels, calibrated.predict_proba(x)) < np.log(2)
    assert clone(estimator).get_params() == {"run": run, "function": None, "classes": None}
    assert np.array_equal(clone(estimator).predict(x), estimator.predict(x))


def test_pickle_has_the_path_and_not_the_model(run: Path) -> None:
    estimator = ConfinedClassifier(str(run))
    expected = estimator.predict(array(9, 7))
    content = pickle.dumps(estimator)
    assert len(content) < 1000
    assert str(run).encode() in content
    again = pickle.loads(content)
    assert np.array_equal(again.predict(array(9, 7)), expected)
    assert "model" not in repr(again)


def test_classes_may_have_other_types(tmp_path: Path) -> None:
    data = replace(DATA, classes=("1", "0"))
    run = save(data, tmp_path / "run", ill="1", well="0")
    labels = np.array([int(each == "ill") for each in table(60, 8)["outcome"]])
    x = array(60, 8)
    estimator = ConfinedClassifier(run, classes=(0, 1))
    assert list(estimator.classes_) == [1, 0]  # in the order of the model
    assert estimator.score(x, labels) == np.mean(ConfinedClassifier(run).predict(x) == labels.astype(str))
    assert roc_auc_score(labels, estimator.predict_proba(x)[:, 0]) > 0.5
    for wrong in ((0, 2), (0,), (0, 1, 1), (0, 1, 2), ("ill", "well")):
        with pytest.raises(InputError, match="and the model has '1', '0'; name each once"):
            ConfinedClassifier(run, classes=wrong).predict(x)


def test_wrong_tables_and_models_are_refused(run: Path, numbers: Path, tmp_path: Path) -> None:
    estimator, x = ConfinedClassifier(run), array(5, 1)
    with pytest.raises(ValueError, match="X has 2 features, but ConfinedClassifier is expecting 3 features as input"):
        estimator.predict(x[:, :2])
    with pytest.raises(ValueError, match="Expected 2D array, got 1D array instead"):
        estimator.predict(x[0])
    with pytest.raises(ValueError, match="Complex data not supported"):
        estimator.predict(np.ones((2, 3), dtype=complex))
    x[3, 1] = float("inf")
    with pytest.raises(InputError, match="row 4, column 'dose': inf is infinite"):
        estimator.predict(x)
    with pytest.raises(InputError, match="predicts a number, 'outcome'; use a ConfinedRegressor"):
        ConfinedClassifier(numbers).predict(array(5, 1))
    with pytest.raises(InputError, match="predicts classes of 'outcome'; use a ConfinedClassifier"):
        ConfinedRegressor(run).predict(array(5, 1))
    with pytest.raises(InputError, match="there is no model in"):
        _ = ConfinedRegressor(tmp_path).n_features_in_
    config, content = tabular_settings(DATA, steps=10), table(60, 1)
    trained = train(solo_peers(b"s" * 32), config, records(content))
    replace(ConfinedModel.from_training(trained, config, PROVENANCE), towers=3).save(tmp_path / "row")
    with pytest.raises(InputError, match=r"one of 3 models of a row .* use `cgd predict`"):
        ConfinedClassifier(tmp_path / "row").predict(array(5, 1))


def test_fit_does_not_pretend_to_train(run: Path) -> None:
    with pytest.raises(InputError, match=r"was trained by `cgd join`, and fit cannot train it; .*FrozenEstimator"):
        ConfinedClassifier(run).fit(array(5, 1), table(5, 1)["outcome"])


# The checks of scikit-learn.


REFUSES = "it calls fit, which refuses to train, because only the members of a federation can train this model together"
FIT_CHECKS = {
    *("check_fit_score_takes_y", "check_estimators_overwrite_params", "check_dont_overwrite_parameters"),
    *("check_estimators_fit_returns_self", "check_readonly_memmap_input", "check_n_features_in_after_fitting"),
    *("check_positive_only_tag_during_fit", "check_estimators_dtypes", "check_complex_data", "check_dtype_object"),
    *("check_estimators_empty_data_messages", "check_pipeline_consistency", "check_estimator_sparse_tag"),
    *("check_estimator_sparse_array", "check_estimator_sparse_matrix", "check_estimators_pickle"),
    *("check_f_contiguous_array_estimator", "check_classifier_data_not_an_array", "check_classifiers_one_label"),
    *("check_classifiers_classes", "check_classifiers_train", "check_classifiers_regression_target"),
    *("check_supervised_y_2d", "check_methods_sample_order_invariance", "check_methods_subset_invariance"),
    *("check_fit2d_1sample", "check_fit2d_1feature", "check_dict_unchanged", "check_fit_idempotent"),
    *("check_fit_check_is_fitted", "check_n_features_in", "check_fit2d_predict1d", "check_requires_y_none"),
    *("check_regressors_train", "check_regressor_data_not_an_array", "check_regressors_no_decision_function"),
    *("check_regressors_int", "check_class_weight_classifiers", "check_classifier_multioutput"),
}


def refused(estimator: Any) -> dict[str, str]:
    return dict.fromkeys(FIT_CHECKS, REFUSES)


@parametrize_with_checks(  # type: ignore[untyped-decorator]
    [ConfinedClassifier("run"), ConfinedRegressor("run")], expected_failed_checks=refused
)
def test_checks_of_scikit_learn(estimator: Any, check: Any) -> None:
    check(estimator)


class Fitted:
    """Trains a confined model alone, on columns of numbers."""

    home = ""
    task: Any = "classification"

    @property
    def model_(self) -> ConfinedModel:
        if not hasattr(self, "folder_"):
            raise AttributeError("not fitted")
        return cgd.load_model(self.folder_)

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "folder_")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()  # type: ignore[misc]
        tags.input_tags.categorical = tags.input_tags.string = False
        return tags

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803 - scikit-learn's name
        options: Any = {"dtype": np.float64, "ensure_all_finite": "allow-nan", "ensure_min_samples": 2}
        x, y = check_X_y(X, y, **options, y_numeric=self.task == "regression", estimator=self)
        if self.task == "classification":
            check_classification_targets(y)
            self.labels_ = np.unique(y)
            if len(self.labels_) < 2:
                raise ValueError("only 1 class")
        names = [f"x{place}" for place in range(x.shape[1])]
        data = Data("y", tuple(Column(name, "number") for name in names), self.task, rare=1)
        config = replace(tabular_settings(data, Model("mlp", (16,), "tanh"), steps=80, patience=0, lr=0.05))
        frame = {**dict(zip(names, x.T, strict=True)), "y": list(y) if self.task == "regression" else list(map(str, y))}
        loaded = dataset_from_frame(frame, data, data.columns, target=True)[0]
        made = train(solo_peers(b"s" * 32), config, loaded)
        self.folder_ = tempfile.mkdtemp(dir=self.home)
        ConfinedModel.from_training(made, config, PROVENANCE).save(self.folder_)
        return self


class ClassifierFitted(Fitted, ConfinedClassifier):  # type: ignore[misc]
    @property
    def classes_(self) -> Any:
        return self.labels_


class RegressorFitted(Fitted, ConfinedRegressor):  # type: ignore[misc]
    task = "regression"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fitted, "home", str(tmp_path))


@pytest.mark.slow
@pytest.mark.usefixtures("home")
@parametrize_with_checks([ClassifierFitted("run"), RegressorFitted("run")])  # type: ignore[untyped-decorator]
def test_checks_of_scikit_learn_that_fit(estimator: Any, check: Any) -> None:
    check(estimator)
