"""An audit of a run that was recorded: the plan, the findings, and what the page says about whose they are."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

import cgd
from cgd.audit import folder, results
from cgd.audit.examination import EXAMINED
from cgd.audit.runner import run
from cgd.audit.sources import RecordingPart, plan_for
from cgd.errors import InputError
from cgd.federation.data_schema import Model
from cgd.tabular.trace_writer import TraceWriter
from cgd.tabular.training import train
from support.audits import WHEN, ProgressListener
from support.practice import NUMBER, records, setting, table

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.tabular.training import TrainingResult

pytestmark = pytest.mark.slow

NAMES = ("ada", "bob", "cleo")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of one run, not to be written to."""
    there = tmp_path_factory.mktemp("recorded")
    what = setting(NUMBER, Model("linear"), optimizer="sgd", lr=0.1, steps=12, validate_every=4)

    def one(peers: cgd.Peers, content: dict[str, list[Any]]) -> TrainingResult:
        return train(peers, what, records(content, what.data), recorder=recorders[peers.me])

    with ExitStack() as open_files:
        made = {name: TraceWriter(there / name, name, "trial") for name in NAMES}
        recorders = {name: open_files.enter_context(each) for name, each in made.items()}
        with cgd.local_peers(NAMES, sinks={name: each.frame for name, each in recorders.items()}) as colony:
            colony.run(one, [table(60, 1), table(40, 2), table(30, 3)])
    return there


def test_a_recorded_run_is_attacked_and_the_page_is_confidential(recorded: Path, tmp_path: Path) -> None:
    plan = plan_for([recorded / name for name in NAMES], ("ada", "cleo"))
    assert [each.id for each in plan.attacks] == list(EXAMINED)
    outcome = run(plan, seed=0, jobs=2, watch=ProgressListener())
    said, pictures = results.content(plan, outcome, 0, WHEN)
    page = folder.write(tmp_path, said, pictures).read_text()
    found = {each["id"]: each for each in results.load(tmp_path)["attacks"]}
    assert found["gram"]["findings"]  # the model is linear
    assert found["labels"]["inapplicable"]  # and has no classes
    assert not said["failed"]
    assert said["schemes"] == {"cgd": "CGD"}
    assert said["command"].endswith("--coalition ada,cleo --seed 0")
    for text in ("Confidential", "a run of trial", "ada, cleo pool what they saw of bob", "could not be tried"):
        assert text in page


def test_every_attack_that_is_examined_is_in_the_plan_and_no_other(recorded: Path) -> None:
    plan = plan_for([recorded / "bob"])
    assert plan.parts == tuple(RecordingPart((str(recorded / "bob"),), (), each) for each in EXAMINED)
    for part in plan.parts:
        assert tuple(part.run(0)) == (part.attack,)
    assert "the worst case for bob: everybody else pools what they saw" in plan.source.about
    assert plan.source.confidential


def test_recordings_that_do_not_fit_are_refused_before_the_work(recorded: Path) -> None:
    with pytest.raises(InputError, match="cleo"):
        plan_for([recorded / "ada", recorded / "bob"], ("ada",))
    with pytest.raises(InputError, match="recording.json"):
        plan_for([recorded])


def test_a_function_that_a_recording_names_is_not_imported_before_the_user_names_it(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a rehearsal, one person gets everybody's folders."""
    monkeypatch.chdir(tmp_path)
    source = "from pathlib import Path\nfrom torch.nn import Linear as network\nPath('imported').touch()\n"
    (tmp_path / "audited_network.py").write_text(source)
    given = shutil.copytree(recorded / "bob", tmp_path / "bob")
    content = json.loads((given / "recording.json").read_text())
    content["model"] |= {"kind": "custom", "function": "audited_network:network"}
    (given / "recording.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"names the function 'audited_network:network' .*--function audited_network:"):
        plan_for([given])
    assert not (tmp_path / "imported").exists()
    plan = plan_for([given], function="audited_network:network")
    assert plan.command(0).endswith("--function audited_network:network --seed 0")
    assert tuple(plan.parts[0].run(0)) == (EXAMINED[0],)
    with pytest.raises(InputError, match="--function is 'json:dumps'; it is for recorded runs"):
        plan_for([], function="json:dumps")
