"""An audit of a recorded run: the plan, the results, and the confidential page."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cgd.audit import report, results
from cgd.audit.registry import attacks_on_views
from cgd.audit.runner import run as run_plan
from cgd.audit.sources import plan_for
from cgd.audit.trace_source import TracePart
from cgd.errors import InputError
from cgd.federation.data_schema import Column, Data
from cgd.federation.model_section import Model
from support.audits import Progress, assemble
from support.tabular import table, tabular_settings
from support.traces import BATCHED, SETTINGS, run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

NAMES = ("ada", "bob", "cleo")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The traces of one run, which are only read."""
    there = tmp_path_factory.mktemp("traces")
    run(SETTINGS["regression"], there, names=NAMES, tables=[table(60, 1), table(40, 2), table(30, 3)])
    return there


def test_recorded_run_is_attacked_and_its_page_is_confidential(traces: Path, tmp_path: Path) -> None:
    plan = plan_for([traces / name for name in NAMES], ("ada", "cleo"))
    assert plan.attacks == attacks_on_views()
    audit = assemble(plan, run_plan(plan, seed=0, jobs=2, progress=Progress()))
    page = report.write(tmp_path, audit).read_text()
    found = {each.id: each for each in results.load(tmp_path).attacks}
    assert found["gram"].findings  # the model is linear
    assert found["labels"].inapplicable  # and has no classes
    assert not audit.failed
    assert audit.schemes == {"cgd": "CGD"}
    assert audit.command is not None
    assert audit.command.endswith("--coalition ada,cleo --seed 0")
    for text in ("Confidential", "a run of trial", "ada, cleo pool their views and attack bob", "does not apply"):
        assert text in page


def test_plan_has_a_part_for_each_attack_on_views(traces: Path) -> None:
    plan = plan_for([traces / "bob"])
    assert plan.parts == tuple(TracePart((str(traces / "bob"),), (), each.id) for each in attacks_on_views())
    assert all(part.run(0) for part in plan.parts)
    assert "the worst case for bob: all others collude" in plan.source.about


SUMMED = {
    "batches": (
        "A round sums gradients of one of 2 batches of each participant's records. With no other honest participant, "
        "the gradient of bob is open in every step"
    ),
    "local epochs": (
        "A round sums updates of local steps, which the attackers divide by their size. With no other honest "
        "participant, the update of bob is open in every step"
    ),
}


@pytest.mark.parametrize("name", BATCHED)
def test_recorded_batches_and_local_epochs_are_attacked(name: str, tmp_path: Path) -> None:
    run(BATCHED[name], tmp_path, names=NAMES, tables=[table(60, 1), table(40, 2), table(30, 3)])
    for folders, coalition in (([tmp_path / "bob"], ()), ([tmp_path / each for each in NAMES], ("ada", "cleo"))):
        plan = plan_for(folders, coalition)
        assert SUMMED[name] in plan.source.about
        assert all(part.run(0) for part in plan.parts)


def numbers(rows: int, seed: int) -> dict[str, list[Any]]:
    """Return a table of eight numbers and a class."""
    values = np.random.default_rng(seed).normal(50, 10, (rows, 8))
    classes = ["ill" if first > 50 else "well" for first in values[:, 0]]
    return {f"value {place}": values[:, place].tolist() for place in range(8)} | {"outcome": classes}


def test_recovered_records_of_the_participant_are_listed_with_their_rows(tmp_path: Path) -> None:
    """All others collude against a participant with four training records, whose rows are those of its table."""
    few = numbers(11, 1)
    few["outcome"][1] = None  # is left out
    data = Data("outcome", tuple(Column(f"value {place}", "number") for place in range(8)), validation=0.6, rare=1)
    settings = tabular_settings(data, Model("mlp", (32,)), optimizer="sgd", lr=0.5, steps=4)
    run(settings, tmp_path, names=NAMES, tables=[few, numbers(40, 2), numbers(30, 3)])
    [part] = [each for each in plan_for([tmp_path / "ada"]).parts if each.attack == "records"]
    [found] = part.run(0)
    assert isinstance(found, results.AttackResult)
    shown = found.recovered
    assert shown is not None
    assert shown.columns == list(data.names)
    assert 0 < shown.total == len(shown.records) <= 4
    places = [each.place for each in shown.records]
    assert "ada, row 2" not in places
    for each in shown.records:
        row = int(each.place.removeprefix("ada, row ")) - 1
        real = [few[name][row] for name in data.names]
        assert [float(value) for value in each.real] == pytest.approx(real, abs=1e-3)
        assert [float(value) for value in each.guess] == pytest.approx(real, abs=1)


def test_trace_of_a_former_version_has_no_list(traces: Path, tmp_path: Path) -> None:
    given = shutil.copytree(traces / "bob", tmp_path / "bob")
    content = json.loads((given / "recording.json").read_text())
    assert content.pop("preparation")["columns"]
    (given / "recording.json").write_text(json.dumps(content))
    assert all(part.run(0) for part in plan_for([given]).parts)
    content["preparation"] = {"format": "cgd preparation 1", "columns": [], "target": {"mean": 0.0, "deviation": 1.0}}
    (given / "recording.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="is damaged"):
        plan_for([given])


def test_incomplete_traces_are_rejected_before_the_work(traces: Path) -> None:
    with pytest.raises(InputError, match="cleo"):
        plan_for([traces / "ada", traces / "bob"], ("ada",))
    with pytest.raises(InputError, match="recording.json"):
        plan_for([traces])


def test_function_in_a_trace_is_imported_only_if_the_user_names_it(
    traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a rehearsal, one person gets the folders of all participants."""
    monkeypatch.chdir(tmp_path)
    source = "from pathlib import Path\nfrom torch.nn import Linear as network\nPath('imported').touch()\n"
    (tmp_path / "audited_network.py").write_text(source)
    given = shutil.copytree(traces / "bob", tmp_path / "bob")
    content = json.loads((given / "recording.json").read_text())
    content["model"] |= {"kind": "custom", "function": "audited_network:network"}
    (given / "recording.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"names the function 'audited_network:network' .*--function audited_network:"):
        plan_for([given])
    assert not (tmp_path / "imported").exists()
    plan = plan_for([given], function="audited_network:network")
    assert plan.command(0).endswith("--function audited_network:network --seed 0")
    assert plan.parts[0].run(0)
    with pytest.raises(InputError, match="--function is 'json:dumps'; it is for recorded runs"):
        plan_for([], function="json:dumps")
