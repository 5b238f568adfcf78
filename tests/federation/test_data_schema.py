"""The sections `[data]` and `[model]` of the federation file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cgd.errors import InputError
from cgd.federation import config_edit, member
from cgd.federation.config import Federation, Training
from cgd.federation.data_schema import MISSING, Column, Data
from cgd.federation.keys import Keys
from cgd.federation.model_section import Model
from cgd.federation.participants import Participant
from cgd.federation.privacy_section import PrivacySection
from cgd.optim.grid import Cell
from cgd.tabular.settings import TabularSettings

KEYS = [Keys.generate(f"p{number}").public for number in range(9)]
TARGET = 'target = "y"\n'
COLUMNS = 'age = "number"\nward = "category"\nsex = ["f", "m"]\n'
MODEL = '[model]\nkind = "mlp"\nlayers = [8, 4]\n'


def text(data: str, columns: str, model: str = MODEL, cells: tuple[int, int] | None = None) -> str:
    participants = ""
    for number in range(9 if cells else 3):
        cell = f"cell = [{number // cells[1]}, {number % cells[1]}]\n" if cells else ""
        participants += f'[[participants]]\nname = "p{number}"\naddress = "tcp://p{number}.example:7001"\n'
        participants += f'key = "{KEYS[number]}"\n{cell}'
    return f'name = "t"\nepoch = 1\n[data]\n{data}[data.columns]\n{columns}{model}{participants}'


def parse(data: str = TARGET, columns: str = COLUMNS, model: str = MODEL) -> Federation:
    return Federation.parse(text(data, columns, model), Path("f.toml"))


def test_sections_are_parsed() -> None:
    federation = parse(data='target = "y"\ntask = "classification"\nclasses = ["no", "yes"]\nvalidation = 0\n')
    columns = (Column("age", "number"), Column("ward", "category"), Column("sex", "category", ("f", "m")))
    assert federation.data == Data("y", columns, classes=("no", "yes"), validation=0.0)
    assert federation.model == Model("mlp", (8, 4))
    assert federation.data.missing == MISSING
    assert {"data", "model"} <= federation.sections().keys()


def test_file_without_tables_has_no_schema_digests() -> None:
    participants = tuple(Participant(f"p{i}", f"tcp://p{i}.example:7001", KEYS[i]) for i in range(3))
    assert Federation("t", 1, Training(), participants, Path("f.toml")).sections().keys() == {
        *("federation", "training", "participants"),
    }


@pytest.mark.parametrize(
    ("parts", "section"),
    [
        ({"columns": COLUMNS + 'dose = "number"\n'}, "data"),
        ({"data": 'target = "y"\nvalidation = 0.3\n'}, "data"),
        ({"model": MODEL + "delta = 0.1\n"}, "model"),
    ],
)
def test_schema_change_alters_the_digest_of_its_section(parts: dict[str, str], section: str) -> None:
    before, after = parse().sections(), parse(**parts).sections()
    assert {name for name in before if before[name] != after[name]} == {section}


def test_defaults_of_rare_values_do_not_change_the_digest() -> None:
    """Files of earlier versions, and files in which nothing is learned, keep their digest."""
    default = parse(data='target = "y"\nrare = 5\nother = true\n')
    assert default.sections() == parse(data='target = "y"\n').sections()
    assert default.data is not None
    assert not {"rare", "other"} & default.data.as_stored().keys()
    changed = parse(data='target = "y"\nrare = 3\nother = false\n', columns='x = { type = "category", rare = 9 }\n')
    assert changed.data is not None
    assert changed.data.as_stored()["rare"] == 3
    assert changed.data.as_stored()["other"] is False
    assert changed.data.rare_of(changed.data.columns[0]) == changed.data.as_stored()["columns"][0]["rare"] == 9


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"data": ""}, r"\[data\] target is missing"),
        ({"data": 'target = ""\n'}, "target is empty"),
        ({"data": "target = 3\n"}, "target is 3; it must be a text"),
        ({"data": 'target = "y"\ntargets = "z"\n'}, r"there is no 'targets' \(did you mean 'target'\?\)"),
        ({"data": 'target = "age"\n'}, "'age' is the target and a column to predict from"),
        ({"data": 'target = "y"\nid = "age"\n'}, "'age' is the id and a column"),
        ({"data": 'target = "y"\nid = "y"\n'}, "both the target and the id"),
        ({"data": 'target = "y"\ntask = "guess"\n'}, "task is 'guess'; choose one of classification, regression"),
        ({"data": 'target = "y"\nclasses = ["a"]\n'}, "there must be two or more"),
        ({"data": 'target = "y"\nclasses = ["a", "a"]\n'}, "has 'a' twice"),
        ({"data": 'target = "y"\nclasses = [1, 2]\n'}, "it must be a list of texts, in quotes"),
        ({"data": 'target = "y"\ntask = "regression"\nclasses = ["a", "b"]\n'}, "a regression has no classes"),
        ({"data": 'target = "y"\nclass_weights = "some"\n'}, "choose one of none, balanced"),
        ({"data": 'target = "y"\nvalidation = 1\n'}, "validation is 1.0; it is a fraction of the records"),
        ({"data": 'target = "y"\nrare = 0\n'}, "rare is 0; it is a number of records from 1 to 1,000,000, such as 5"),
        ({"data": 'target = "y"\nrare = true\n'}, "rare is True; it is a number of records"),
        ({"data": 'target = "y"\nother = "yes"\n'}, "other is 'yes'; it must be true or false"),
        ({"columns": 'age = { type = "number", rare = 3 }\n'}, "rare is for categories that are learned; remove it"),
        ({"columns": 'x = { type = "category", categories = ["a"], rare = 3 }\n'}, "rare is for categories that are"),
        ({"columns": 'x = { type = "category", rare = 1.5 }\n'}, "column 'x': rare is 1.5"),
        ({"columns": ""}, "there are no columns to predict from"),
        ({"columns": 'age = "integer"\n'}, "column 'age': type is 'integer'; choose one of number, category"),
        ({"columns": "age = 3\n"}, "column 'age': 3 is not a table"),
        ({"columns": "age = []\n"}, "column 'age': its list of categories is empty"),
        ({"columns": 'age = { type = "number", categories = ["a"] }\n'}, "it is a number and has categories"),
        ({"columns": 'age = { type = "number", held_by = 0 }\n'}, "age has held_by, and there is no grid"),
        ({"columns": 'age = { type = "number", held_by = -1 }\n'}, "held_by is -1"),
        ({"columns": f'age = ["{"x" * 91}"]\n'}, "of more than 90 bytes; shorten it"),
        ({"model": ""}, r"\[data\] and \[model\] belong together"),
        ({"model": '[model]\nkind = "forest"\n'}, "kind is 'forest'; choose one of linear, logistic, mlp, custom"),
        ({"model": '[model]\nkind = "mlp"\n'}, "layers is empty"),
        ({"model": '[model]\nkind = "linear"\nlayers = [3]\n'}, "a linear model has no hidden layers"),
        ({"model": "[model]\nlayers = [0]\n"}, "use up to 32 layers of 1 to 65536 units"),
        ({"model": "[model]\nlayers = 3\n"}, "it must be a list of whole numbers"),
        ({"model": MODEL + "delta = 0\n"}, "delta is 0.0"),
        ({"model": MODEL + 'function = "a:b"\n'}, "kind is 'mlp' and function is 'a:b'"),
        ({"model": '[model]\nfunction = "a"\n'}, "write MODULE:FUNCTION"),
        ({"model": MODEL + 'activation = "step"\n'}, "choose one of relu, tanh, gelu, sigmoid"),
    ],
)
def test_invalid_schema_is_rejected(parts: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=rf"^f\.toml(, line \d+)?: .*{message}"):
        parse(**parts)


HELD = 'age = { type = "number", held_by = 0 }\nward = { type = "category", held_by = 1 }\n'
THIRD = 'sex = { type = "category", categories = ["f", "m"], held_by = 2 }\n'


def test_participant_of_a_grid_has_its_own_columns() -> None:
    federation = Federation.parse(text('target = "y"\nid = "no"\n', HELD + THIRD, cells=(3, 3)), Path("f.toml"))
    setting = TabularSettings.from_federation(federation, "p4")
    assert (setting.column, setting.columns) == (1, 3)
    assert setting.own_columns == (Column("ward", "category", held_by=1),)


@pytest.mark.parametrize(
    ("data", "columns", "message"),
    [
        ('target = "y"\nid = "no"\n', HELD, "column 2 of the grid holds nothing; give it a column with held_by = 2"),
        ('target = "y"\n', HELD + THIRD, "name the id column that joins them"),
        ('target = "y"\nid = "no"\n', HELD + THIRD.replace("2 }", "3 }"), "is held by column 3, and the grid has 3"),
        ('target = "y"\nid = "no"\n', HELD + THIRD + 'bp = "number"\n', "bp does not name the column of the grid"),
    ],
)
def test_invalid_assignment_of_columns_is_rejected(data: str, columns: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Federation.parse(text(data, columns, cells=(3, 3)), Path("f.toml"))


def test_grid_of_two_columns_is_rejected_for_tables(tmp_path: Path) -> None:
    participants = [
        Participant(f"p{number}", f"tcp://p{number}.example:7001", KEYS[number], Cell(number // 2, number % 2))
        for number in range(6)
    ]
    schema = f'[data]\ntarget = "y"\nid = "no"\n[data.columns]\n{HELD}{MODEL}'
    federation = config_edit.create_federation(tmp_path / "f.toml", "t", participants, schema=schema)
    with pytest.raises(InputError, match=r"the grid has 2 columns; .* a sum over fewer than 3 hides nothing"):
        TabularSettings.from_federation(federation, "p0")


def test_invalid_schema_is_not_written(tmp_path: Path) -> None:
    participants = [Participant(f"p{number}", f"tcp://p{number}.example:7001", KEYS[number]) for number in range(3)]
    with pytest.raises(InputError, match="target is missing"):
        config_edit.create_federation(
            tmp_path / "f.toml", "t", participants, schema="[data]\n[data.columns]\nx = 'number'\n[model]\n"
        )
    assert not (tmp_path / "f.toml").exists()


@pytest.mark.parametrize("section", ["data", "model", "privacy"])
def test_running_participant_rejects_a_changed_schema(section: str) -> None:
    before = parse('target = "y"\nclasses = ["no", "yes"]\n', 'age = { type = "number", range = [0, 120] }\n')
    assert before.data is not None
    assert before.model is not None
    changed = {
        "data": replace(before.data, validation=0.5),
        "model": replace(before.model, delta=0.5),
        "privacy": PrivacySection(epsilon=1.0, delta=1e-6, unit="patient"),
    }[section]
    running = object.__new__(member.FederationMember)
    running.federation, running.me, running._file_rejected = before, "p0", False
    with pytest.raises(InputError, match=rf"its \[{section}\] has changed, which running participants cannot adopt"):
        running._adopt(replace(before, epoch=2, **{section: changed}))  # type: ignore[arg-type]
