"""docs/tables.md: its examples are valid, and its messages are those of the commands."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cgd.cli import app
from cgd.errors import CGDError, InputError
from cgd.federation.config import FOR_PRIVATE_TABLES, FOR_TABLES, Federation
from cgd.federation.intersection_section import EACH_LEARNS_WHO, Intersection
from cgd.federation.model_section import Model
from cgd.federation.privacy_section import PrivacySection
from cgd.tabular.intersection import intersect, read_salt
from cgd.tabular.models import build
from cgd.tabular.shared_ids import check_ids, normalize_ids
from cgd.tabular.training import train
from support.intersections import DATA, records_of
from support.pages import load_script
from support.tabular import REGRESSION, records, run_members, table, tabular_settings, write_federation

PAGE = Path(__file__).parent.parent / "docs" / "tables.md"
SCHEMA = """
[data]
target = "outcome"
classes = ["well", "ill"]
[data.columns]
age = "number"
ward = "category"
[model]
kind = "mlp"
layers = [8]
"""
GOOD = "age,ward,outcome\n63,A,ill\n41,B,well\n"
EXCEL, LATIN = b"\xd0\xcf\x11\xe0 and so on", "age,ward,outcome\n63,Köln,ill\n".encode("latin-1")
MANY = "age,ward,outcome\n" + "".join(f"63,W{number},ill\n" for number in range(1001))
LONG = f"age,ward,outcome\n63,{'a long history of ' * 6},ill\n"

# Faulty files.
FILES: dict[str, str | bytes | None] = {
    "nowhere.csv": None,
    "empty.csv": "",
    "no-rows.csv": "age,ward,outcome\n",
    "book.xls": EXCEL,
    "latin.csv": LATIN,
    "other-name.csv": GOOD.replace("age", "Age", 1),
    "other-label.csv": GOOD.replace("outcome", "Outcome"),
    "twice.csv": "age,age,ward,outcome\n63,64,A,ill\n",
    "comma.csv": GOOD.replace("63", '"63,5"'),
    "thousands.csv": GOOD.replace("63", "1'063"),
    "percent.csv": GOOD.replace("63", "63 %"),
    "unit.csv": GOOD.replace("63", "63 years"),
    "limit.csv": GOOD.replace("63", ">90"),
    "total.csv": GOOD.replace("41,B,well", "Total,,"),
    "ends.csv": GOOD.replace("ill", "ill,").replace("well", "well,"),
    "text.csv": GOOD.replace("63", "unknown"),
    "infinite.csv": GOOD.replace("63", "inf"),
    "fields.csv": GOOD.replace("63", "63,5"),
    "open-quote.csv": GOOD.replace("63", '"63'),
    "other-class.csv": GOOD.replace("ill", "Ill"),
    "no-label.csv": "age,ward,outcome\n63,A,\n",
    "many.csv": MANY,
    "long.csv": LONG,
}


def documented_errors() -> list[str]:
    section = PAGE.read_text().partition("## Errors you may meet")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+(?:``[^`]+)*)` \|", section, flags=re.MULTILINE)


def error_of(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert isinstance(result.exception, InputError), (arguments, result.exception, result.output)
    return str(result.exception)


def join_error(path: str, data: str, *options: str) -> str:
    return error_of("join", path, "--as", "ada", "--data", data, *options)


def own_errors(folder: Path) -> list[str]:
    """Return the messages about one participant's own file, options and folders."""
    for name, content in FILES.items():
        if content is not None:
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    (folder / "good.csv").write_text(GOOD)
    file = write_federation(folder, ("ada", "bob", "cleo"), schema=SCHEMA).name
    messages = [join_error(file, name) for name in FILES]
    plain = write_federation(folder / "plain", ("ada", "bob", "cleo"), schema=None)
    (folder / "plain.toml").write_text(plain.read_text())
    messages.append(join_error("plain.toml", "good.csv"))
    strict = SCHEMA.replace("[data.columns]", "other = false\n[data.columns]")
    (folder / "strict").mkdir()
    path = write_federation(folder / "strict", ("ada", "bob", "cleo"), schema=strict)
    messages.append(join_error(str(path), "good.csv"))
    messages.append(error_of("join", file, "--as", "ada"))
    messages.append(error_of("join", file, "--as", "dora", "--data", "good.csv"))
    runs = folder / "runs" / "ada"
    runs.mkdir(parents=True)
    (runs / "history.jsonl").write_text('{"participant": "ada", "federation": "last-year"}\n')
    messages.append(join_error(file, "good.csv"))
    messages.append(error_of("predict", "runs/nowhere", "--data", "good.csv"))
    (folder / "ada.key").chmod(0o644)
    messages.append(join_error(file, "good.csv", "--out", "new"))
    return messages


def common_errors() -> list[str]:
    """Return the messages that all participants get."""

    def member(peers: Any, own: Any) -> str:
        with pytest.raises(InputError) as error:
            train(peers, tabular_settings(), own)
        return str(error.value)

    well, digits, words = (
        records({**table(8, 1), "outcome": outcomes * 4}) for outcomes in (["well"] * 2, ["0", "1"], ["yes", "no"])
    )
    return [run_members(member, [well] * 3)[0], run_members(member, [digits, digits, words])[2]]


def statistics_errors() -> list[str]:
    """Return the messages of a participant with other values than all others, and of one with a dishonest member."""

    def member(peers: Any, place: int, dishonest: bool) -> str:
        own, honest_sum = table(8 if place == 0 else 800, place), peers.sum
        own["dose"] = [1000.0 if place == 0 else 0.0 for _ in own["dose"]]
        if dishonest and place == 2:
            peers.sum = lambda values, **options: honest_sum(
                values - 790 * (options.get("context") == "count targets"), **options
            )
            own = table(2, place)
        try:
            train(peers, tabular_settings(REGRESSION), records(own, REGRESSION))
        except CGDError as error:
            return str(error)
        return ""

    far, wrong = (run_members(member, [0, 1, 2], [dishonest] * 3) for dishonest in (False, True))
    return [far[0], wrong[1]]


def id_errors() -> list[str]:
    """Return the messages about the IDs of an intersection, and about its salt."""
    plain, salted = (Intersection(5, 50_000, EACH_LEARNS_WHO, salt=salt, normalize=("case",)) for salt in (False, True))
    errors = []
    for call in (
        lambda: check_ids([f"{number}" for number in (10_000, 99_999, *range(20_000, 30_000))], plain, "patient"),
        lambda: normalize_ids(["A1", "a1"], plain),
        lambda: read_salt(None, salted),
    ):
        with pytest.raises(InputError) as error:
            call()
        errors.append(str(error.value))
    return errors


def intersection_errors() -> list[str]:
    """Return the messages about another salt, and about too few people in common."""

    def member(row: Any, numbers: range, settings: Intersection, salt: bytes) -> str:
        data = replace(DATA, intersection=settings)
        with pytest.raises(InputError) as error:
            intersect(records_of(numbers, data), row, data, salt)
        text = str(error.value)
        for place, name in enumerate(("archive-a", "clinic-a", "lab-a"), start=1):
            text = text.replace(f"participant-{place}", name)
        return text

    plain, salted = (Intersection(20, 2000, EACH_LEARNS_WHO, salt=salt) for salt in (False, True))
    sets, right, wrong = [range(40), range(37, 80), range(100)], b"a secret of the row", b"another secret of a row"
    few = run_members(member, sets, [plain] * 3, [b""] * 3)
    return [few[0], run_members(member, sets, [salted] * 3, [right, right, wrong])[0]]


def test_messages_of_the_page_are_the_real_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").mkdir()
    messages = own_errors(tmp_path) + common_errors() + statistics_errors()
    messages += id_errors() + intersection_errors()
    matches = load_script("run_tutorial").matches
    documented = documented_errors()
    assert len(documented) > 20
    for message in documented:
        assert any(matches(f"{each}\n", message) for each in messages), f"no error has this text: {message}"
    for each in messages:
        assert any(matches(f"{each}\n", message) for message in documented), f"not on the page: {each}"


def test_sections_of_the_page_are_valid(tmp_path: Path) -> None:
    sections = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(sections) == 4
    head = write_federation(tmp_path, ("ada", "bob", "cleo"), schema=None).read_text()
    complete = Federation.parse(f"{head}\n{sections[0]}", tmp_path / "complete.toml")
    assert complete.data is not None
    assert complete.data.missing == ("", "NA", "-9")
    data = sections[0].partition("[model]")[0]
    dates = Federation.parse(
        f"{head}\n[data]\ntarget = 'y'\n{sections[1]}[model]\nkind = 'logistic'\n", tmp_path / "d.toml"
    )
    assert dates.data is not None
    assert [each.name for each in dates.data.input_columns] == [
        "born days",
        *("seen days", "seen month", "seen weekday"),
    ]
    own = Federation.parse(f"{head}\n{data}\n{sections[2]}", tmp_path / "own.toml")
    assert own.model is not None
    assert (own.model.kind, own.model.function) == ("custom", "networks:deep")
    private = Federation.parse(f"{head}\n{sections[3]}", tmp_path / "private.toml")
    assert private.privacy == PrivacySection(1.0, 1e-6)
    steps, lr, patience = FOR_PRIVATE_TABLES.steps, FOR_PRIVATE_TABLES.lr, FOR_PRIVATE_TABLES.patience
    assert f"writes {steps} steps with `lr = {lr}` and `patience = {patience}`" in PAGE.read_text()


def test_custom_network_of_the_page_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "networks.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    network = build(Model(function="networks:deep"), features=7, outputs=3)
    assert network(torch.zeros(2, 7)).shape == (2, 3)
    sys.modules.pop("networks", None)


def test_training_defaults_of_the_page_are_the_real_ones() -> None:
    section = PAGE.read_text().partition("## The `[training]` section")[2].partition("\n## ")[0]
    stated = dict(re.findall(r"^\| `(\w+)` \| `?\"?([\w.]+)\"?`? \|", section, flags=re.MULTILINE))
    assert {"steps", "lr", "optimizer", "patience"} <= stated.keys()
    for name, value in stated.items():
        assert str(getattr(FOR_TABLES, name)) == value, name
