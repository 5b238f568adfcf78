"""Settings of columns: markers of missing values, mappings of values, decimal commas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cgd import InputError
from cgd.federation.data_schema import Column, Data
from cgd.tabular.dataset import dataset_from_frame, read_dataset
from cgd.tabular.model import ConfinedModel, load_model
from cgd.tabular.predict import load_inputs, predict
from cgd.tabular.training import train
from support.private_tables import private_settings
from support.tabular import run_members, tabular_settings

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.peers import Peers
    from cgd.tabular.training import TrainingResult

NUM = Column("num", "category", values={"0": "no", "1-4": "yes", "9": ""})
CHOL, AGE = Column("chol", "number", missing=("0",)), Column("age", "number")
DATA = Data("outcome", (CHOL, AGE, NUM), values={"0": "well", "1-4": "ill"})
HEART = "age;chol;num;outcome\n63,5;233,25;0;0\n0;0;4.0;2\n41;1,2e2;9;1\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "heart.csv"
    path.write_text(text)
    return path


def read(folder: Path, text: str, data: Data = DATA, **options: Any) -> Any:
    return read_dataset(written(folder, text), data, data.columns, **options)[0]


def refused(folder: Path, text: str, data: Data = DATA, **options: Any) -> str:
    with pytest.raises(InputError) as error:
        read(folder, text, data, **options)
    return str(error.value).replace(str(folder / "heart.csv"), "FILE")


# The file of one of four hospitals: semicolons, decimal commas, 0 for a missing cholesterol, stages 0 to 4.


def test_file_with_decimal_commas_is_read(tmp_path: Path) -> None:
    records = read(tmp_path, HEART, decimal=",")
    assert records.numbers["age"].tolist() == [63.5, 0, 41]
    np.testing.assert_array_equal(records.numbers["chol"], [233.25, np.nan, 120])


def test_decimal_comma_without_the_option_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path, HEART) == (
        "FILE, line 2, column 'chol': '233,25' is not a number; write decimals with a point, as in 1.5, or add "
        "--decimal ','"
    )


@pytest.mark.parametrize("value", ["1.234", "1.234,5", "12.05"])
def test_point_in_a_file_with_decimal_commas_is_refused(tmp_path: Path, value: str) -> None:
    message = refused(tmp_path, HEART.replace("41;", f"{value};"), decimal=",")
    assert message.startswith(f"FILE, line 4, column 'age': '{value}' is not a number")


def test_two_commas_in_a_number_are_refused(tmp_path: Path) -> None:
    assert "'1,234,5' is not a number; correct it" in refused(tmp_path, HEART.replace("41", "1,234,5"), decimal=",")


def test_markers_of_missing_values_hold_with_decimal_commas(tmp_path: Path) -> None:
    data = Data("outcome", DATA.columns, missing=("-9,5", "n.d."), values=DATA.values)
    records = read(tmp_path, HEART.replace("63,5", "-9,5").replace("41;", "n.d.;"), data, decimal=",")
    np.testing.assert_array_equal(records.numbers["age"], [np.nan, 0, np.nan])


def test_other_decimal_sign_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path, HEART, decimal="·") == "the decimal sign is '·'; choose '.' or ','"


def test_missing_values_of_a_column_are_missing_in_it_alone(tmp_path: Path) -> None:
    records = read(tmp_path, HEART, decimal=",")
    assert np.isnan(records.numbers["chol"]).tolist() == [False, True, False]
    assert not np.isnan(records.numbers["age"]).any()


def test_missing_text_of_a_category_column(tmp_path: Path) -> None:
    ward = Column("ward", "category", missing=("unknown",))
    records = read(tmp_path, "ward,outcome\nunknown,0\nA,1\n", Data("outcome", (ward,)))
    assert records.categories["ward"].names == ("A",)
    assert records.categories["ward"].codes.tolist() == [-1, 0]


def test_values_are_mapped_to_categories_and_classes(tmp_path: Path) -> None:
    records = read(tmp_path, HEART, decimal=",")
    num, outcome = records.categories["num"], records.target
    assert [num.names[code] if code >= 0 else None for code in num.codes] == ["no", "yes", None]
    assert [outcome.names[code] for code in outcome.codes] == ["well", "ill", "ill"]


def test_numbers_of_a_frame_are_mapped_like_texts() -> None:
    frame = {"chol": [200.0, 210.0], "age": [50, 60], "num": [3.0, 0.0], "outcome": [1, 0]}
    records = dataset_from_frame(frame, DATA, DATA.columns, target=True)[0]
    assert records.categories["num"].codes.tolist() == [1, 0]


def test_unmapped_value_is_refused_with_its_place(tmp_path: Path) -> None:
    assert refused(tmp_path, HEART.replace(";4.0;", ";7;"), decimal=",") == (
        "FILE, line 3, column 'num': '7' is not in values of [data]; correct it, or add it there for all participants "
        "('*' is every other value, and \"\" makes it a missing one)"
    )


def test_unmapped_value_of_a_record_to_predict_can_be_left_empty(tmp_path: Path) -> None:
    """The federation file of a trained model cannot change."""
    assert refused(tmp_path, HEART.replace(";4.0;", ";7;"), decimal=",", target=False) == (
        "FILE, line 3, column 'num': '7' is not in values of [data]; correct it, or leave the field empty: then it "
        "counts as missing"
    )


def test_unmapped_class_is_refused_with_its_place_and_a_similar_one(tmp_path: Path) -> None:
    data = Data("outcome", (AGE,), values={"Healthy": "well", "Sick": "ill"})
    message = refused(tmp_path, "age,outcome\n1,Healthy\n2,sick\n", data)
    assert message.startswith("FILE, line 3, column 'outcome': 'sick' (did you mean 'Sick'?) is not in values of")


def test_marker_of_a_missing_value_is_not_mapped(tmp_path: Path) -> None:
    data = Data("outcome", (Column("num", "category", missing=("9",), values={"0": "no", "9": "yes"}),))
    assert refused(tmp_path, "num,outcome\n0,1\n", data).startswith("[data] has '9' in values of 'num'")


def test_unlisted_category_that_differs_by_case_is_noted(tmp_path: Path) -> None:
    data = Data("outcome", (Column("sex", "category", ("Female", "Male")),))
    path = written(tmp_path, "sex,outcome\nmale,0\nFemale,1\n")
    (note,) = read_dataset(path, data, data.columns)[1]
    assert note == (
        "column 'sex': 1 value is not among its listed categories and treated as missing: 'male' (did you mean 'Male'?)"
    )


def test_values_outside_of_a_range_are_noted_with_their_ends(tmp_path: Path) -> None:
    data = Data("outcome", (Column("age", "number", range=(0, 120)),))
    path = written(tmp_path, "age,outcome\n-9,0\n50,1\n999,1\n")
    assert read_dataset(path, data, data.columns)[1] == (
        "column 'age': 2 values are outside of its range and cut to it: from -9 to 999",
    )


def test_saved_model_maps_values_of_new_records(tmp_path: Path) -> None:
    columns = (Column("age", "number", missing=("0",)), Column("stage", "category", values={"0": "no", "1-4": "yes"}))
    data = Data("outcome", columns, values={"0": "well", "1-9": "ill"})
    settings = tabular_settings(data, steps=2)

    def program(peers: Peers, seed: int) -> TrainingResult:
        random = np.random.default_rng(seed)
        stage = random.integers(0, 5, 60)
        frame = {"age": [0, *random.normal(60, 9, 59)], "stage": stage, "outcome": stage}
        return train(peers, settings, dataset_from_frame(frame, data, columns, target=True)[0])

    provenance = {"participant": "ada", "federation": "trial", "epoch": 1, "digest": ""}
    ConfinedModel.from_training(run_members(program, range(3))[0], settings, provenance).save(tmp_path)
    model = load_model(tmp_path)
    assert model.data == data
    assert model.classes_.tolist() == ["ill", "well"]
    one, four, none = model.predict_proba({"age": [60, 60, 60], "stage": [1.0, 4.0, 0.0]})
    assert one.tolist() == four.tolist() != none.tolist()
    texts = model.predict_proba({"age": [60, 60], "stage": ["3", "0"]})
    assert texts.tolist() == [one.tolist(), none.tolist()]
    with pytest.raises(InputError, match="'7' is not in values of"):
        model.predict({"age": [60], "stage": [7]})
    path = written(tmp_path, "age;stage;outcome\n61,5;3;2\n44,5;0;0\n")
    predictions = predict(model, load_inputs(model, path, ","))
    assert predictions.scores is not None  # the classes of the file are mapped, too
    assert predictions.notes == ()


def test_training_with_noise_uses_mapped_values() -> None:
    stage = Column("stage", "category", values={"0": "no", "1-4": "yes"})
    data = Data("outcome", (stage,), values={"0": "well", "*": "ill"})
    settings = private_settings(data, steps=2)

    def program(peers: Peers, seed: int) -> tuple[str, ...]:
        frame = {"stage": np.random.default_rng(seed).integers(0, 5, 200), "outcome": [0, 1] * 100}
        records = dataset_from_frame(frame, data, data.columns, target=True)[0]
        return train(peers, settings, records).preprocessing.features

    assert run_members(program, range(3)) == [("stage=no", "stage=yes", "stage missing")] * 3
