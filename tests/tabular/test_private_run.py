"""Complete runs with differential privacy: the budget, the report, refusals before anything is sent, kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from cgd.cli import app
from cgd.dp.budget_file import BudgetFile
from cgd.errors import InputError
from cgd.federation.config import Federation
from cgd.federation.member import FederationMember
from cgd.optim.privacy_ledger import PrivacyLedger
from cgd.reporting.run_file import load_run
from cgd.secagg.messages import Message, Ready, RevealKey
from cgd.tabular.disclosure import early_privacy_warnings
from cgd.tabular.run import TabularRun
from cgd.tabular.training import EvalRecord, TrainingResult, train
from support.in_process import InProcessFederation, MemberProcess, new_federation
from support.private_tables import PRIVATE_DATA, PRIVATE_SCHEMA, private_settings
from support.tabular import records, run_in_threads, table, write_csv, write_federation

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cgd.reporting.run_file import AnyRun

NAMES = ("ada", "bob", "cleo")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    for place, name in enumerate(NAMES):
        write_csv(tmp_path / f"{name}.csv", table(200, place))
    return write_federation(tmp_path, NAMES, schema=PRIVATE_SCHEMA, steps=6, patience=0)


def run_all(path: Path, folder: str = "runs") -> dict[str, AnyRun]:
    federation = Federation.load(path)

    def run(name: str) -> AnyRun:
        made = TabularRun.prepare(federation, name, path.parent / f"{name}.csv", path.parent / folder / name)
        with FederationMember(path, name, state=path.parent / folder / f"{name}-state", linger=10.0).peers as peers:
            return made.run(peers)

    return run_in_threads(run, NAMES)


def test_run_charges_the_budget_of_the_records_and_reports_the_guarantee(path: Path) -> None:
    results = run_all(path)
    for name, run in results.items():
        assert run.privacy is not None
        assert (run.privacy.epsilon, run.privacy.delta, run.privacy.colluders) == (8.0, 1e-5, 1)
        assert {each.what: each.openings for each in run.privacy.spent or ()} == {
            "statistics": 1,
            "the number of records": 1,
            "a step": 6,
            "the validation loss": 1,
        }
        shares = [each.share for each in run.privacy.spent or () if each.records == "training"]
        assert sum(shares) < 1
        assert shares[0] == pytest.approx(0.05, rel=0.05)  # the other half is for a second attempt
        budget = BudgetFile(path.parent / f"{name}.csv.budget", 1.0, 1e-5)
        assert (budget.unused, budget.epsilon, len(budget.charges)) == (False, 8.0, 9)
        assert run.privacy.budget is not None
        assert run.privacy.budget.spent == budget.epsilon_spent < 8.0
        assert any(f"{name}.csv.budget has no charges yet" in note for note in run.notes or ())
        assert run.outcome is not None
        assert run.outcome.best_step is None  # nothing was selected
        assert all("with noise" in each.what for each in run.revealed or ())
        page = (path.parent / "runs" / name / "report.html").read_text()
        promised = ("What is promised", "e^ε = 2.98e+03", "one of 28,000 cases", "Against every single participant")
        assert all(text in page for text in promised)
        assert "If they are published, nothing is promised about them." in " ".join(page.split())
        assert "no noise is added" not in page
        assert '<a href="#privacy">' in page
        assert run.privacy.cost is not None
        assert str(run.privacy.cost.unknown).startswith("this training has hidden layers of [8] (relu), steps = 6")
        assert "There are no measurements to compare with" in page


@pytest.mark.slow
def test_outputs_that_overflow_do_not_end_a_run(path: Path, tmp_path: Path) -> None:
    """An error of one member after the last step would show the others that its own records overflow."""
    folder = tmp_path / "diverging"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.csv").write_bytes((tmp_path / f"{name}.csv").read_bytes())
    diverging = write_federation(folder, NAMES, schema=PRIVATE_SCHEMA, steps=6, patience=0, lr=1e30)
    for run in run_all(diverging).values():
        assert run.validation is None
        assert any("are not finite, so there are no scores" in note for note in run.notes or ())


@pytest.mark.slow
def test_spent_budget_is_refused_before_connecting(path: Path, tmp_path: Path) -> None:
    run_all(path)
    other = tmp_path / "other"
    other.mkdir()
    again = write_federation(other, NAMES, schema=PRIVATE_SCHEMA, steps=6)
    again.write_text(again.read_text().replace('name = "trial"', 'name = "second"'))
    with pytest.raises(InputError) as error:
        TabularRun.prepare(Federation.load(again), "ada", tmp_path / "ada.csv", other / "runs")
    assert "the privacy budget of these records" in str(error.value)
    assert "by trial (9 openings)" in str(error.value)
    # A copy of the table has a budget of its own; its owner has to name the right one.
    budget = tmp_path / "ada.csv.budget"
    with pytest.raises(InputError, match="by trial"):
        copy = write_csv(tmp_path / "copy.csv", table(200, 0))
        TabularRun.prepare(Federation.load(again), "ada", copy, other / "runs", budget=budget)
    BudgetFile(budget, 8.0, 1e-5).raise_limit(20.0)
    assert TabularRun.prepare(Federation.load(again), "ada", copy, other / "runs", budget=budget).ledger is not None
    # The finished training itself may be joined again, for members that have to recover.
    TabularRun.prepare(Federation.load(path), "ada", tmp_path / "ada.csv", path.parent / "runs" / "ada")


def test_own_checks_before_connecting(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(schema: str, **options: Any) -> str:
        folder = tmp_path / "refused"
        folder.mkdir(exist_ok=True)
        (folder / "federation.toml").unlink(missing_ok=True)
        for key in folder.glob("*.key"):
            key.unlink()
        for key in folder.glob("*.pub"):
            key.unlink()
        federation = Federation.load(write_federation(folder, NAMES, schema=schema))
        with pytest.raises(InputError) as error:
            TabularRun.prepare(federation, "ada", tmp_path / "ada.csv", folder / "runs", **options)
        assert not (tmp_path / "ada.csv.budget").exists()
        return str(error.value)

    large = PRIVATE_SCHEMA.replace("1e-5", "0.005")
    assert "delta in [privacy] is 0.005, and we alone have 200 records" in (message := refusal(large))
    assert "such as 1e-06" in message
    plain = PRIVATE_SCHEMA.partition("[privacy]")[0]
    assert "--budget is for differential privacy, and" in refusal(plain, budget=tmp_path / "x")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mixing.py").write_text(
        "from torch import nn\n"
        "def norm(features, outputs):\n"
        "    layer = nn.BatchNorm1d(8, track_running_stats=False)\n"
        "    return nn.Sequential(nn.Linear(features, 8), layer, nn.Linear(8, outputs))\n"
    )
    (tmp_path / "wrong.py").write_text(
        "from torch import nn\n"
        "class Centred(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x - x.mean(0))\n"
        "def centred(features, outputs):\n"
        "    return Centred(features, outputs)\n"
    )
    mixing = PRIVATE_SCHEMA.replace('kind = "mlp"\nlayers = [8]', 'function = "wrong:centred"')
    assert "in a batch of 2 than alone" in refusal(mixing, function="wrong:centred")
    custom = PRIVATE_SCHEMA.replace('kind = "mlp"\nlayers = [8]', 'function = "mixing:norm"')
    assert "normalises each record by the others of its batch" in refusal(custom, function="mixing:norm")


def test_values_outside_of_a_range_are_cut_and_noted_locally(path: Path, tmp_path: Path) -> None:
    content = table(200, 0)
    content["age"][:3] = [-5.0, 300.0, None]
    write_csv(tmp_path / "ada.csv", content)
    run = TabularRun.prepare(Federation.load(path), "ada", tmp_path / "ada.csv", tmp_path / "runs")
    assert run.records.numbers["age"][:2].tolist() == [0.0, 120.0]
    assert "column 'age': 2 values are outside of its range and cut to it: from -5 to 300" in run.notes
    assert early_privacy_warnings(run.federation, run.settings, run.records) == ()


@pytest.mark.slow
def test_model_with_ranges_is_loaded_and_cuts_values(path: Path, tmp_path: Path) -> None:
    import cgd

    run_all(path)
    model = cgd.load_model(tmp_path / "runs" / "ada")
    assert model.data == Federation.load(path).data
    # One by one: equal rows of one batch may differ in their last bits.
    first, second = (model.predict_proba({"age": [age], "dose": [0.0], "ward": ["A"]}) for age in (120.0, 900.0))
    assert first.tolist() == second.tolist()


def test_options_of_join(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["join", str(path), "--as", "ada", "--data", "ada.csv", "--budget", "nowhere/ada.budget"]
    result = CliRunner().invoke(app, arguments)
    assert "cannot be used (No such file or directory)" in str(result.exception)


# Kills.


@dataclass
class Program:
    """A program that trains on a private table, and charges a budget file.

    Attributes:
        folder: the folder of the budget files.
        evaluations: the evaluations so far.
    """

    folder: Path
    evaluations: list[EvalRecord] = field(default_factory=list)

    def __call__(self, process: MemberProcess) -> TrainingResult:
        settings = private_settings(steps=10, patience=9)  # a look after 5 steps, and after 10
        ledger = PrivacyLedger(settings.privacy_settings(), self.folder / f"{process.name}.budget")
        own = records(table(60, len(process.name)), PRIVATE_DATA)
        return train(process.peers, settings, own, progress=self.evaluations.append, ledger=ledger)


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[InProcessFederation]:
    with InProcessFederation(new_federation(tmp_path, NAMES), tmp_path / "state") as made:
        yield made


def charges(folder: Path, name: str) -> Counter[str]:
    return Counter(each.what for each in BudgetFile(folder / f"{name}.budget", 8.0, 1e-5).charges)


def openings(process: MemberProcess) -> int:
    """Return the number of sums of floats in the journal; the other ones, of integers, are of commitments."""
    return sum(each.description.startswith("float64") for each in process.journal().entries)


PLANNED = Counter({"statistics": 1, "the number of records": 1, "a step": 10, "the validation loss": 2})


@pytest.mark.slow
@pytest.mark.parametrize("lose_state", [False, True], ids=["state kept", "state lost"])
@pytest.mark.parametrize("kind", [Ready, RevealKey], ids=["before the sum", "before the key"])
def test_restart_after_a_kill_continues_and_charges_every_opening(
    federation: InProcessFederation, tmp_path: Path, kind: type[Message], lose_state: bool
) -> None:
    """Cleo is killed at the look after five steps, before it takes part or while its key is on its way."""
    programs = {name: Program(tmp_path) for name in NAMES}

    def is_look(message: Message) -> bool:
        return isinstance(message, kind) and charges(tmp_path, "ada")["a step"] == 5

    holds = [federation.network.hold("cleo", set(NAMES) - {"cleo"}, is_look)]
    for name in NAMES:
        federation.start(name, programs[name])
    federation.wait_until(lambda: all(len(hold.reached) == 2 for hold in holds))
    federation.kill("cleo", lose_state=lose_state)
    for hold in holds:
        federation.network.release(hold)
    federation.start("cleo", Program(tmp_path))
    results = federation.results()
    assert {each.steps for each in results.values()} == {10}
    assert len({each.evaluations[-1].everyone_validation_loss for each in results.values()}) == 1
    for name in NAMES:
        counted = charges(tmp_path, name)
        assert openings(federation[name]) == PLANNED.total()
        more = counted - PLANNED
        assert PLANNED - counted == Counter()  # no opening is missing
        assert more.total() <= (1 if kind is RevealKey else 0)
        assert results[name].ledger.spent().openings == counted.total()


def start(path: Path, name: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "cgd", "join", str(path), "--as", name, "--data", str(path.parent / f"{name}.csv")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
def test_killed_process_continues_and_its_budget_has_every_opening(tmp_path: Path) -> None:
    for place, name in enumerate(NAMES):
        write_csv(tmp_path / f"{name}.csv", table(100, place))
    path = write_federation(tmp_path, NAMES, schema=PRIVATE_SCHEMA, steps=40, patience=0)
    processes = {name: start(path, name) for name in NAMES}
    budget = tmp_path / "bob.csv.budget"
    deadline = time.monotonic() + 120
    while not budget.exists() or len(budget.read_bytes().splitlines()) < 10:
        assert time.monotonic() < deadline, processes["bob"].poll()
        time.sleep(0.005)
    processes["bob"].send_signal(signal.SIGKILL)
    processes["bob"].communicate()
    processes["bob"] = start(path, "bob")
    planned = Counter({"statistics": 1, "the number of records": 1, "a step": 40, "the validation loss": 1})
    for name, process in processes.items():
        _, errors = process.communicate(timeout=180)
        assert process.returncode == 0, errors
        counted = charges(tmp_path, f"{name}.csv")
        assert planned - counted == Counter()
        assert (counted - planned).total() <= 1  # if it was killed while its key was on its way
        spent = load_run(tmp_path / "runs" / name).privacy
        assert spent is not None
        assert {each.what: each.openings for each in spent.spent or ()} == counted
