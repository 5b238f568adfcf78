"""No sum has fewer than three members: flat groups, rows, columns, predictions, removals."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import cgd
from cgd.errors import InputError, MembershipError
from cgd.federation import member
from cgd.federation.config import Federation, Training
from cgd.federation.data_schema import Column, Data
from cgd.federation.hub_server import FederationHub
from cgd.federation.keys import Keys
from cgd.federation.model_section import Model
from cgd.federation.participants import Participant
from cgd.optim.grid import Cell, Grid
from cgd.optim.vertical import JOINT_REVEALS_RECORDS, JointFirstLayer, late_fusion
from cgd.secagg.federation_spec import FederationSpec
from cgd.secagg.group import Group
from cgd.secagg.journal import Journal
from cgd.secagg.membership import Membership
from cgd.secagg.positions import PositionReports
from cgd.secagg.statements import StatementLog, StatementSigner
from cgd.tabular.predict import row_federation
from cgd.tabular.settings import TabularSettings
from cgd.tabular.wide_sums import wide_sum
from support.identities import identity, public_keys
from support.in_process import InProcessFederation, new_federation

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from support.in_process import MemberProcess

TOO_FEW = "a secure sum needs at least 3"


def participants(grid: Grid, *, flat: bool = False) -> tuple[Participant, ...]:
    return tuple(
        Participant(str(cell), f"tcp://{cell}.example:7001", Keys.generate(str(cell)).public, None if flat else cell)
        for cell in grid.cells
    )


def make_federation(folder: Path, grid: Grid, minimum: int = 3, *, columns: bool = False) -> Federation:
    held = tuple(Column(f"x{place}", "number", held_by=place) for place in range(grid.columns))
    data = (Data("y", held, id="no"), Model("mlp", (4,))) if columns else (None, None)
    return Federation("t", 1, Training(minimum=minimum), participants(grid), folder / "federation.toml", None, *data)


# Inside one process.


@pytest.mark.parametrize("count", [1, 2])
def test_local_peers_reject_rows_and_columns_of_fewer_than_three(count: int) -> None:
    for cells in (Grid(count, 5).column_peers(Cell(0, 4)), Grid(5, count).row_peers(Cell(4, 0))):
        assert len(cells) == count
        with pytest.raises(MembershipError, match=TOO_FEW):
            cgd.local_peers([str(cell) for cell in cells])


def test_row_functions_sum_over_the_three_members_they_are_given() -> None:
    """Late fusion, joint pre-activations and wide sums sum over no other group."""

    def work(row: cgd.Peers) -> list[int]:
        before = row.traffic.sums
        late_fusion(torch.zeros(2, 2), row)
        JointFirstLayer(torch.nn.Linear(2, 2), row, accept=JOINT_REVEALS_RECORDS)(torch.zeros(2, 2))
        wide_sum(row, np.ones(2), "test")
        return [len(row), row.traffic.sums - before]

    with cgd.local_peers(3) as row:
        assert row.run(work) == [[3, 3]] * 3


# Groups and sessions.


@pytest.mark.parametrize("group", ["everyone", "column-0", "row-0"])
def test_membership_rejects_a_group_of_two_at_start_and_in_a_new_epoch(tmp_path: Path, group: str) -> None:
    whole = make_federation(tmp_path, Grid(3, 3)).federation_spec("1")
    two = {**whole.groups, group: whole.groups[group][:2]}
    me = two[group][0]
    with pytest.raises(MembershipError, match=TOO_FEW):
        Membership(me, identity(me), replace(whole, groups=two))
    running = Membership(me, identity(me), whole)
    with pytest.raises(MembershipError, match=TOO_FEW):
        running.adopt(replace(whole, epoch=2, groups=two))
    assert running.federation_spec == whole
    assert running.group(group).members == whole.groups[group]


def test_session_for_two_members_is_rejected() -> None:
    """A second line of defence: the sums of a group need a session."""
    two = ("a", "b")
    held = FederationSpec("trial", 1, two, {"row-0": two}, {}, "1.0", public_keys(two))
    statement_log = StatementLog("a", identity("a"), held.keys, bytes(32), lambda _: None)
    reports = PositionReports("a", held, {}, statement_log)
    with pytest.raises(MembershipError, match=TOO_FEW):
        Group("row-0", ("a", "b"), Journal()).enter_view("a", bytes(32), {"b": bytes(16)}, StatementSigner(), reports)


# Over a network.


def test_members_and_hub_reject_a_federation_of_two(tmp_path: Path) -> None:
    keys = [Keys.generate(name) for name in ("ada", "bob", "hub")]
    for each in keys:
        each.save(tmp_path)
    blocks = "".join(
        f'[[participants]]\nname = "{each.name}"\naddress = "tcp://{each.name}.example:7001"\nkey = "{each.public}"\n'
        for each in keys[:2]
    )
    hub = f'[hub]\naddress = "tcp://hub.example:7000"\nkey = "{keys[2].public}"\n'
    path = tmp_path / "federation.toml"
    path.write_text(f'name = "two"\nepoch = 1\n{hub}{blocks}')
    for begin in (lambda: cgd.join(path, "ada"), lambda: FederationHub(path)):
        with pytest.raises(InputError, match=r"there are 2 participants, and at least 3 are needed"):
            begin()
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("rows", [1, 2])
def test_grid_with_columns_of_fewer_than_three_is_rejected(tmp_path: Path, rows: int) -> None:
    with pytest.raises(InputError, match="a sum over a column of fewer than 3 hides nothing"):
        make_federation(tmp_path, Grid(rows, 4))


def test_rows_of_two_are_not_groups(tmp_path: Path) -> None:
    two = make_federation(tmp_path, Grid(3, 2), columns=True)
    assert set(two.groups()) == {"everyone", "column-0", "column-1"}
    with pytest.raises(InputError, match="a sum over fewer than 3 hides nothing"):
        TabularSettings.from_federation(two, "r0c0")
    with pytest.raises(InputError, match="there are 2 participants, and at least 3 are needed"):
        row_federation(two, "r0c0")


def test_configured_minimum_applies_to_rows_and_columns(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has 3 row\(s\), and a sum over a column of fewer than 4 is excluded by min"):
        make_federation(tmp_path, Grid(3, 4), minimum=4)
    narrow = make_federation(tmp_path, Grid(4, 3), minimum=4, columns=True)
    assert all(len(members) >= 4 for members in narrow.groups().values())
    with pytest.raises(InputError, match=r"a sum over fewer than 4 is excluded by minimum in \[training\]"):
        TabularSettings.from_federation(narrow, "r0c0")
    with pytest.raises(InputError, match="there are 3 participants, and at least 4 are needed"):
        row_federation(narrow, "r0c0")
    wide = make_federation(tmp_path, Grid(4, 4), minimum=4, columns=True)
    assert {len(members) for members in wide.groups().values()} == {4, 16}
    assert len(row_federation(wide, "r0c0").participants) == 4


def sum_twice(process: MemberProcess) -> tuple[float, ...]:
    totals = []
    for step in range(2):
        process.at_step(step)
        totals.append(process.peers.sum(np.ones(1)).item())
    return tuple(totals)


def test_running_members_reject_a_file_that_leaves_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Cleo is killed, and the file is edited by hand without cleo: ada and bob keep waiting for it."""
    monkeypatch.setattr(member, "WATCH_SECONDS", 0.02)
    names: Sequence[str] = ("ada", "bob", "cleo")
    with InProcessFederation(new_federation(tmp_path, names), tmp_path / "state") as federation:
        federation.start_all(sum_twice, pause_at=1)
        for process in federation:
            process.wait_for_step(1)
        federation.kill("cleo")
        text = federation.path.read_text()
        block = text[text.index('[[participants]]\nname = "cleo"') :]
        federation.path.write_text(text.replace(block, "").replace("epoch = 1", "epoch = 2"))
        for process in federation:
            process.resume()
        federation.wait_until(lambda: caplog.text.count("there are 2 participants, and at least 3 are needed") == 2)
        federation.wait_until(lambda: all(process.is_waiting_for("Ready", "cleo") for process in federation))
        assert [len(process.journal()) for process in federation] == [1, 1]
        assert all(process.member.federation.epoch == 1 for process in federation)
        federation.path.write_text(text)
        federation.start("cleo", sum_twice)
        assert federation.results() == dict.fromkeys(names, (3.0, 3.0))
