"""The federation file: what is read from it, and the errors of invalid files."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import pytest

from cgd import InputError
from cgd.errors import MembershipError
from cgd.federation.config import Federation, Training
from cgd.federation.keys import decode_public_key
from cgd.optim.grid import Grid
from cgd.peers import SumSettings
from cgd.secagg.federation_spec import FederationSpec
from support.federation_files import KEYS, THREE, block, cells, grid, participant, participants, rejection, text, write

if TYPE_CHECKING:
    from pathlib import Path


def test_file_is_loaded(tmp_path: Path) -> None:
    path = write(tmp_path, text("lr = 1\nopening = 'aggregator'\naggregator = 'bob'  # why not\n"))
    federation = Federation.load(path)
    training = Training(lr=1.0, opening="aggregator", aggregator="bob")
    assert federation == Federation("five", 1, training, participants(), path) == Federation.load(str(path))
    assert federation.path == path
    assert isinstance(federation.training.lr, float)


def test_training_section_is_optional_and_participants_are_sorted(tmp_path: Path) -> None:
    blocks = "\n".join([block(1, "bob"), block(2, "cleo"), block(0, "ada")])
    federation = Federation.load(write(tmp_path, text(blocks=blocks).replace("[training]", "")))
    assert federation.training == Training(200, 0.5, 0.0, 16.0, 32, "pairwise", "mesh", "", 3)
    assert federation.names == THREE


def test_settings_contacts_and_participants_come_from_the_file(tmp_path: Path) -> None:
    federation = Federation.load(write(tmp_path, text('bound = 2\nring_bits = 64\nmasking = "uniform"\n')))
    assert federation.settings == SumSettings(bound=2.0, ring_bits=64, masking="uniform")
    assert tuple(federation.contacts) == THREE
    assert asdict(federation.contacts["bob"]) == {
        "address": "tcp://bob.example:7001",
        "public_key": KEYS[1][:40].encode(),
    }
    assert federation.participant("bob") == participant(1, "bob")
    with pytest.raises(MembershipError) as error:
        federation.participant("bop")
    assert str(error.value) == "'bop' is not a participant of five (did you mean 'bob'?); name one of ada, bob, cleo"


@pytest.mark.parametrize(("name", "message"), [("none.toml", "No such file or directory"), ("", "Is a directory")])
def test_unreadable_file_is_rejected(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(InputError, match=rf"cannot be read \(.*{message}.*\); name the federation file"):
        Federation.load(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("name = five\n", " is not TOML: Invalid value (at line 1, column 8); correct it there"),
        ("name = " + 10_000 * "[", " is not TOML: "),
        ("name = " + 5_000 * "9", " is not TOML: "),
        (b"name = '\xff'", " cannot be read ('utf-8' codec can't decode byte 0xff"),
        (text(head='nam = "five"'), ": there is no 'nam' (did you mean 'name'?); choose one of name, epoch, participa"),
        (text(head="epoch = 1"), ": name is missing; add it"),
        ('[data]\ntarget = "y"\n', ": this is a schema; make a federation file of it with `cgd federation new --sch"),
        (text(head='name = "five"'), ": epoch is missing; add it"),
        (text(head='name = "five hospitals"\nepoch = 1'), ": name is 'five hospitals'; choose 1 to 63 letters"),
        (text(head='name = "five"\nepoch = 0'), ": epoch is 0; it counts the versions of this file, from 1"),
        (text(head='name = "five"\nepoch = 1.0'), ": epoch is 1.0; it must be a whole number"),
        (text(head='name = "five"\nepoch = true'), ": epoch is True; it must be a whole number"),
        (text(head="a." * 40 + "a = 1"), ": tables and lists are nested more than 16 deep; write them flat"),
        (text(head="a." * 3000 + "a = 1"), " is not TOML: line 1 has a key of more than 64 parts; correct it there"),
        (text(head=f"name = [{{a = 0x{'f' * 9999}}}]\nepoch = 1"), ": a whole number has more than 64 bits; write a"),
        (text(head='name = "five"\nepoch = 1\ntraining = 3').replace("[training]", ""), ": [training] 3 is not a"),
        ('name = "five"\nepoch = 1\n', ": participants is missing; add it"),
        ('name = "five"\nepoch = 1\n[participants]\n', ": participants is not a list; write [[participants]], in doub"),
        ('name = "five"\nepoch = 1\nparticipants = [3]', ": participant 1: 3 is not a table; write its header, and"),
        ('name = "five"\nepoch = 1\nparticipants = []', ": there are 0 participants, and at least 3 are needed (a sum"),
        (text(blocks=block(0, "a") + block(1, "b")), ": there are 2 participants, and at least 3 are needed (a sum ov"),
        (text("minimum = 5"), ": there are 3 participants, and at least 5 are needed (minimum in [training]); add 2"),
        (text("opening = 'aggregator'\naggregator = 'bop'"), ": aggregator is 'bop' (did you mean 'bob'?), which is n"),
        (text(f"bound = {2**31 - 3}"), ": 3 addends of up to 2.14748e+09 do not fit a ring of 32 bits; use ring_bits="),
    ],
)  # fmt: skip
def test_invalid_file_is_rejected(tmp_path: Path, content: str | bytes, message: str) -> None:
    assert rejection(tmp_path, content).startswith(message)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("step = 3", "there is no 'step' (did you mean 'steps'?); choose one of steps, lr, mu, bound, ring_bits"),
        ("steps = 0", "steps is 0; train for at least 1"),
        ("steps = true", "steps is True; it must be a whole number"),
        ("lr = 0", "lr is 0.0; it must be a positive, finite number"),
        ("lr = inf", "lr is inf; it must be a positive, finite number"),
        ("lr = nan", "lr is nan; it must be a positive, finite number"),
        ("lr = true", "lr is True; it must be a number"),
        ("mu = -0.1", "mu is -0.1; it must be a finite number, at least 0"),
        ("bound = 0", "bound is 0.0; it must be a positive, finite number"),
        ("bound = 3e9", "1 addends of up to 3e+09 do not fit a ring of 32 bits; use ring_bits=64"),
        ("ring_bits = 8", "ring_bits is 8; choose 16, 32 or 64"),
        ("masking = 'pair'", "masking is 'pair'; choose one of pairwise, uniform"),
        ("opening = 'star'", "opening is 'star'; choose one of mesh, aggregator"),
        ("opening = 'aggregator'", "opening is 'aggregator' and aggregator is ''; name one for the other"),
        ("aggregator = 'bob'", "opening is 'mesh' and aggregator is 'bob'; name one for the other"),
        ("momentum = 1", "momentum is 1.0; it must be at least 0 and below 1"),
        (
            "momentum = 0.9\noptimizer = 'adam'",
            "momentum is 0.9, and optimizer is 'adam', which has a momentum of its own; write optimizer = 'sgd', or",
        ),
        ("minimum = 2", "minimum is 2; a sum over fewer than 3 members hides nothing, raise it"),
    ],
)
def test_invalid_training_section_is_rejected(tmp_path: Path, line: str, message: str) -> None:
    assert rejection(tmp_path, text(line)).startswith(f": [training] {message}")


@pytest.mark.parametrize(
    ("old", "to", "message"),
    [
        ('name = "bob"', 'nam = "bob"', "participant 2: there is no 'nam' (did you mean 'name'?); choose one of name"),
        ('name = "bob"', 'name = "bob"\nport = 1', "participant 2 ('bob'): there is no 'port'; choose one of name"),
        ('address = "tcp://bob.example:7001"\n', "", "bob has no address, and there is no hub"),
        ('name = "bob"', 'name = "b b"', "participant 2 ('b b'): name is 'b b'; choose 1 to 63 letters"),
        ('name = "bob"', 'name = "ada"', "two participants have the same name, 'ada'; every participant needs its own"),
        (KEYS[1], KEYS[0], f"ada and bob have the same key, {KEYS[0]!r}; every participant needs its own"),
        (
            KEYS[1][:40],
            KEYS[0][:40],
            f"ada and bob have the same key, {KEYS[0][:40] + KEYS[1][40:]!r}; every participant",
        ),
        (
            KEYS[1][40:],
            KEYS[0][40:],
            f"ada and bob have the same key, {KEYS[1][:40] + KEYS[0][40:]!r}; every participant",
        ),
        (KEYS[1], KEYS[1][:40], f"participant 2 ('bob'): key is {KEYS[1][:40]!r}, which is from an older version"),
        ("bob.ex", "ADA.ex", "ada and bob have the same address, 'tcp://ADA.example:7001'; every participant"),
        ("bob.example:7001", "bob:0", "participant 2 ('bob'): address is 'tcp://bob:0'; write where the others reach"),
        (f'"{KEYS[1]}"', "7", "participant 2 ('bob'): key is 7; a key has 80 characters of Z85: copy it from bob.pub"),
    ],
)
def test_invalid_participant_is_rejected(tmp_path: Path, old: str, to: str, message: str) -> None:
    assert old in text()
    assert rejection(tmp_path, text().replace(old, to)).startswith(f": {message}")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("[0,0] [1,0] -", "c has no cell and a has one; give one to all or to none"),
        ("[0,0] [1,0] [1,0]", "b and c have the same cell, Cell(row=1, column=0); every participant needs its own"),
        ("[0,0] [1,0] [3,0]", "the cells form a grid of 4 × 1, in which [2, 0] is empty; the participants must fill"),
        ("[0,0] [1,0] [2,1]", "the cells form a grid of 3 × 2, in which [0, 1] is empty; the participants must fill"),
        ("[0,0] [1,0] [999999999999,999999999999]", "the cells form a grid of 1000000000000 × 1000000000000, in which"),
        ("[0,0] [0,1] [0,2]", "the grid has 1 row(s), and a sum over a column of fewer than 3 hides nothing; add rows"),
        ("[0,0] [0,1] [1,0] [1,1]", "the grid has 2 row(s), and a sum over a column of fewer than 3 hides nothing; ad"),
        ("[0,0] [1] [2,0]", "participant 2 ('b'): cell is [1]; write the row and the column, from 0"),
    ],
)  # fmt: skip
def test_invalid_grid_is_rejected(tmp_path: Path, written: str, message: str) -> None:
    assert rejection(tmp_path, cells(written)).startswith(f": {message}")


def test_groups_are_everyone_columns_and_large_rows(tmp_path: Path) -> None:
    flat = Federation.load(write(tmp_path, text()))
    assert (flat.grid, flat.groups()) == (None, {"everyone": THREE})
    narrow = Federation.load(write(tmp_path, cells("[0,0] [0,1] [1,0] [1,1] [2,0] [2,1]")))
    wide = replace(flat, participants=grid(3, 3))
    assert (narrow.grid, wide.grid, narrow.participants) == (Grid(3, 2), Grid(3, 3), grid(3, 2))
    assert narrow.groups() == {"everyone": tuple("abcdef"), "column-0": tuple("ace"), "column-1": tuple("bdf")}
    assert list(wide.groups()) == ["everyone", "column-0", "column-1", "column-2", "row-0", "row-1", "row-2"]
    assert (wide.groups()["column-1"], wide.groups()["row-1"]) == (tuple("beh"), tuple("def"))


def test_federation_spec_has_members_groups_digests_and_keys(tmp_path: Path) -> None:
    nine = Federation("nine", 4, Training(), grid(3, 3), tmp_path)
    keys = {name: decode_public_key(key) for name, key in zip("abcdefghi", KEYS, strict=False)}
    sections = nine.sections()
    assert nine.federation_spec("1.2") == FederationSpec(
        "nine", 4, tuple("abcdefghi"), nine.groups(), sections, "1.2", keys
    )
