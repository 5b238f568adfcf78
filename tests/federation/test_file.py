from __future__ import annotations

import os
import stat
import tomllib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from cgd import InputError
from cgd.errors import MembershipError
from cgd.federation import file
from cgd.federation.file import Federation, Participant, Training, new, with_participant, without
from cgd.learning.grid import Cell, Grid
from cgd.network.peers import SumSettings
from cgd.network.sockets import Contact
from cgd.protocol.members import check_members

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

KEYS = [
    zmq.curve_public(character * 40).decode()
    for character in (b"0", b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"8", b"9")
]
THREE = ("ada", "bob", "cleo")


def participant(number: int, name: str | None = None, cell: Sequence[int] | None = None) -> Participant:
    name = name or "abcdefghij"[number]
    return Participant(name, f"tcp://{name}.example:7001", KEYS[number], Cell(*cell) if cell is not None else None)


def participants(names: Sequence[str] = THREE, cells: Sequence[Sequence[int]] = ()) -> list[Participant]:
    return [participant(i, name, cells[i] if cells else None) for i, name in enumerate(names)]


def grid(rows: int, columns: int) -> list[Participant]:
    return participants("abcdefghij"[: rows * columns], Grid(rows, columns).cells)


def block(number: int, name: str, extra: str = "") -> str:
    return f'[[participants]]\nname = "{name}"\naddress = "tcp://{name}.example:7001"\nkey = "{KEYS[number]}"\n{extra}'


def text(training: str = "", head: str = 'name = "five"\nepoch = 1\n', blocks: Sequence[str] | None = None) -> str:
    blocks = [block(i, name) for i, name in enumerate(THREE)] if blocks is None else blocks
    return f"{head}\n[training]\n{training}\n\n" + "\n".join(blocks)


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "federation.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def cells(*places: str) -> list[str]:
    return [block(i, "abcdefghij"[i], f"cell = {place}\n" if place else "") for i, place in enumerate(places)]


def refused(folder: Path, content: str | bytes) -> str:
    """What the error says of a file, apart from the name of the file."""
    path = write(folder, content)
    with pytest.raises(InputError) as error:
        Federation.load(path)
    assert type(error.value) is InputError  # a MembershipError would end a running participant
    assert str(error.value).startswith(str(path))
    assert error.value.__suppress_context__
    return str(error.value).removeprefix(str(path))


# Reading


def test_a_file_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, text("lr = 1\nopening = 'aggregator'\naggregator = 'bob'  # why not\n"))
    federation = Federation.load(path)
    training = Training(lr=1.0, opening="aggregator", aggregator="bob")
    assert federation == Federation("five", 1, training, tuple(participants()), path)
    assert federation.path == path
    assert isinstance(federation.training.lr, float)
    assert Federation.load(str(path)) == federation


def test_training_is_optional(tmp_path: Path) -> None:
    federation = Federation.load(write(tmp_path, text().replace("[training]", "")))
    assert federation.training == Training()
    assert federation.training == Training(200, 0.5, 0.0, 16.0, 32, "expanded", "mesh", "", 3)


def test_participants_are_sorted(tmp_path: Path) -> None:
    blocks = [block(1, "bob"), block(2, "cleo"), block(0, "ada")]
    assert Federation.load(write(tmp_path, text(blocks=blocks))).names == THREE


def test_settings_and_contacts(tmp_path: Path) -> None:
    federation = Federation.load(write(tmp_path, text('bound = 2\nring_bits = 64\nsharing = "uniform"\n')))
    assert federation.settings == SumSettings(bound=2.0, ring_bits=64, sharing="uniform")
    assert federation.contacts["bob"] == Contact("tcp://bob.example:7001", KEYS[1].encode())
    assert tuple(federation.contacts) == THREE


def test_a_participant_by_name(tmp_path: Path) -> None:
    federation = Federation.load(write(tmp_path, text()))
    assert federation.participant("bob") == participant(1, "bob")
    with pytest.raises(MembershipError) as error:
        federation.participant("bop")
    assert str(error.value) == "'bop' is no participant of five (did you mean 'bob'?); name one of ada, bob, cleo"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("name = ", " is not TOML: Invalid value (at end of document); mend it there"),
        ("name = five\n", " is not TOML: Invalid value (at line 1, column 8); mend it there"),
        ("name = 'a'\nname = 'b'\n", " is not TOML: Cannot overwrite a value"),
        ("name = " + 10_000 * "[", " is not TOML: "),
        ("name = " + 5_000 * "9", " is not TOML: "),
        (b"name = '\xff'", " cannot be read ('utf-8' codec can't decode byte 0xff"),
        ("", ": name is missing; add it"),
    ],
)
def test_what_is_no_federation_file(tmp_path: Path, content: str | bytes, says: str) -> None:
    assert refused(tmp_path, content).startswith(says)


def test_a_file_that_is_not_there_or_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.toml cannot be read \(.*No such file.*\); name the federation file"):
        Federation.load(tmp_path / "none.toml")
    with pytest.raises(InputError, match=r"cannot be read \(.*Is a directory.*\); name the federation file"):
        Federation.load(tmp_path)


@pytest.mark.parametrize(
    ("head", "says"),
    [
        ('epoch = 1\nnam = "five"\n', ": there is no 'nam' (did you mean 'name'?); choose one of name, epoch, parti"),
        ("epoch = 1\n", ": name is missing; add it"),
        ('name = "five"\n', ": epoch is missing; add it"),
        ("name = 5\nepoch = 1\n", ": name is 5; choose 1 to 63 letters"),
        ('name = "five hospitals"\nepoch = 1\n', ": name is 'five hospitals'; choose 1 to 63 letters"),
        ('name = "-five"\nepoch = 1\n', ": name is '-five'; choose 1 to 63 letters"),
        (f'name = "{"a" * 64}"\nepoch = 1\n', f": name is '{'a' * 64}'; choose 1 to 63 letters"),
        ('name = "five"\nepoch = 0\n', ": epoch is 0; it counts the changes of this file, from 1"),
        ('name = "five"\nepoch = -1\n', ": epoch is -1; it counts"),
        ('name = "five"\nepoch = 1.0\n', ": epoch is 1.0; it is a whole number"),
        ('name = "five"\nepoch = true\n', ": epoch is True; it is a whole number"),
        ('name = "five"\nepoch = "1"\n', ": epoch is '1'; it is a whole number"),
        ('name = "five"\nepoch = 0x8000000000000000\n', ": a whole number is beyond 64 bits; write a smaller one"),
        (f"name = [{{a = 0x{'f' * 9999}}}]\nepoch = 1\n", ": a whole number is beyond 64 bits"),
    ],
)
def test_a_bad_head(tmp_path: Path, head: str, says: str) -> None:
    assert refused(tmp_path, text(head=head)).startswith(says)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("step = 3", "there is no 'step' (did you mean 'steps'?); choose one of steps, lr, mu, bound, ring_bits"),
        ("whatever = 3", "there is no 'whatever'; choose one of steps"),
        ("steps = 0", "steps is 0; train for at least 1"),
        ("steps = 1.5", "steps is 1.5; it is a whole number"),
        ("steps = true", "steps is True; it is a whole number"),
        ("lr = 0", "lr is 0.0; it must be a positive, finite number"),
        ("lr = -1", "lr is -1.0; it must be a positive, finite number"),
        ("lr = inf", "lr is inf; it must be a positive, finite number"),
        ("lr = nan", "lr is nan; it must be a positive, finite number"),
        ("lr = '1'", "lr is '1'; it is a number"),
        ("lr = true", "lr is True; it is a number"),
        ("mu = -0.1", "mu is -0.1; it must be a finite number, at least 0"),
        ("mu = inf", "mu is inf; it must be a finite number"),
        ("bound = 0", "bound is 0.0; it must be a positive, finite number"),
        ("bound = nan", "bound is nan; it must be a positive, finite number"),
        ("bound = 3e9", "1 addends of up to 3e+09 do not fit a ring of 32 bits; use ring_bits=64"),
        ("ring_bits = 16", "ring_bits is 16; choose 32 or 64"),
        ("ring_bits = 32.0", "ring_bits is 32.0; it is a whole number"),
        ("sharing = 'expand'", "sharing is 'expand'; choose one of expanded, uniform"),
        ("sharing = 1", "sharing is 1; it is a text, in quotes"),
        ("opening = 'star'", "opening is 'star'; choose one of mesh, aggregator"),
        ("opening = 'aggregator'", "opening is 'aggregator' and aggregator is ''; name one for the other"),
        ("aggregator = 'bob'", "opening is 'mesh' and aggregator is 'bob'; name one for the other"),
        ("minimum = 2", "minimum is 2; a sum over fewer than 3 members hides nothing, raise it"),
        ("minimum = 3.0", "minimum is 3.0; it is a whole number"),
    ],
)
def test_bad_training(tmp_path: Path, line: str, says: str) -> None:
    assert refused(tmp_path, text(line)).startswith(f": [training] {says}")


def test_training_that_is_no_table(tmp_path: Path) -> None:
    content = "training = 3\n" + text().replace("[training]", "")
    assert refused(tmp_path, content) == ": [training] is 3; it is a table, with KEY = VALUE in every line"


def test_training_that_does_not_fit_the_participants(tmp_path: Path) -> None:
    says = refused(tmp_path, text("opening = 'aggregator'\naggregator = 'bop'"))
    assert says == ": aggregator is 'bop' (did you mean 'bob'?), which is no participant; name one of ada, bob, cleo"
    says = refused(tmp_path, text("minimum = 5"))
    assert says == ": there are 3 participants, and at least 5 are needed (minimum in [training]); add 2"
    says = refused(tmp_path, text(f"bound = {2**31 - 3}"))  # fits one addend, and not three
    assert says.startswith(": 3 addends of up to 2.14748e+09 do not fit a ring of 32 bits; use ring_bits=64")


@pytest.mark.parametrize(
    ("old", "to", "says"),
    [
        (
            'name = "bob"',
            'nam = "bob"',
            "participant 2: there is no 'nam' (did you mean 'name'?); choose one of name, ad",
        ),
        (
            'name = "bob"',
            'name = "bob"\nport = 1',
            "participant 2 ('bob'): there is no 'port'; choose one of name, addr",
        ),
        ('name = "bob"\n', "", "participant 2: name is missing; add it"),
        ('address = "tcp://bob.example:7001"\n', "", "participant 2 ('bob'): address is missing; add it"),
        (f'key = "{KEYS[1]}"\n', "", "participant 2 ('bob'): key is missing; add it"),
        ('name = "bob"', "name = 2", "participant 2: name is 2; choose 1 to 63 letters"),
        ('name = "bob"', 'name = "b b"', "participant 2 ('b b'): name is 'b b'; choose 1 to 63 letters"),
        ('name = "bob"', 'name = "ada"', "two participants have the same name, 'ada'; every participant has its own"),
        (KEYS[1], KEYS[0], f"ada and bob have the same key, {KEYS[0]!r}; every participant has its own"),
        ("bob.ex", "ada.ex", "ada and bob have the same address, 'tcp://ada.example:7001'; every participant"),
        ("bob.ex", "ADA.ex", "ada and bob have the same address, 'tcp://ADA.example:7001'; every participant"),
        ('"tcp://bob.example:7001"', "7001", "participant 2 ('bob'): address is 7001; write where the others reach it"),
        ("tcp://bob.example:7001", "bob:7001", "participant 2 ('bob'): address is 'bob:7001'; write where the others"),
        ("bob.example:7001", "bob:0", "participant 2 ('bob'): address is 'tcp://bob:0'; write where the others reach"),
        (
            "bob.example:7001",
            "bob:65536",
            "participant 2 ('bob'): address is 'tcp://bob:65536'; write where the others",
        ),
        (f'"{KEYS[1]}"', "7", "participant 2 ('bob'): key is 7; a key is 40 characters of Z85: copy it from bob.pub"),
        (
            KEYS[1],
            "short",
            "participant 2 ('bob'): key is 'short'; a key is 40 characters of Z85: copy it from bob.pub",
        ),
        (KEYS[1], "#" * 40, f"participant 2 ('bob'): key is '{'#' * 40}'; a key is 40 characters of Z85"),
        (KEYS[1], "~" * 40, f"participant 2 ('bob'): key is '{'~' * 40}'; a key is 40 characters of Z85"),
    ],
)
def test_a_bad_participant(tmp_path: Path, old: str, to: str, says: str) -> None:
    assert old in text()
    assert refused(tmp_path, text().replace(old, to)).startswith(f": {says}")


def test_too_few_participants(tmp_path: Path) -> None:
    says = refused(tmp_path, text(blocks=[block(0, "ada"), block(1, "bob")]))
    assert says == ": there are 2 participants, and at least 3 are needed (a sum over fewer hides nothing); add 1"
    assert refused(tmp_path, "participants = []\n" + text(blocks=[])).startswith(": there are 0 participants")


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("", ": participants is missing; add it"),
        ("[participants]\n", ": participants is no list; write [[participants]] for each of them, in double brackets"),
        ("participants = 3\n", ": participants is no list; write [[participants]]"),
        ("participants = [3]\n", ": participant 1: is 3; it is a table, with KEY = VALUE in every line"),
    ],
)
def test_participants_that_are_no_list_of_tables(tmp_path: Path, written: str, says: str) -> None:
    assert refused(tmp_path, f'name = "five"\nepoch = 1\n{written}').startswith(says)


# Grids


@pytest.mark.parametrize(
    ("places", "says"),
    [
        (["[0, 0]", "[1, 0]", ""], "c has no cell and a has one; give one to all or to none"),
        (
            ["[0, 0]", "[1, 0]", "[1, 0]"],
            "b and c have the same cell, Cell(row=1, column=0); every participant has its",
        ),
        (
            ["[0, 0]", "[1, 0]", "[3, 0]"],
            "the cells make a grid of 4 × 1, with nobody at [2, 0]; the participants have",
        ),
        (
            ["[1, 0]", "[2, 0]", "[3, 0]"],
            "the cells make a grid of 4 × 1, with nobody at [0, 0]; the participants have",
        ),
        (
            ["[0, 0]", "[1, 0]", "[2, 1]"],
            "the cells make a grid of 3 × 2, with nobody at [0, 1]; the participants have",
        ),
        (
            ["[0, 0]", "[1, 0]", f"[{10**18}, {10**18}]"],
            f"the cells make a grid of {10**18 + 1} × {10**18 + 1}, with nob",
        ),
        (
            ["[0, 0]", "[0, 1]", "[0, 2]"],
            "the grid has 1 row(s), and a sum over a column of fewer than 3 hides nothing",
        ),
        (
            ["[0, 0]", "[0, 1]", "[1, 0]", "[1, 1]"],
            "the grid has 2 row(s), and a sum over a column of fewer than 3 hid",
        ),
        (["[0, 0]", "[1]", "[2, 0]"], "participant 2 ('b'): cell is [1]; write the row and the column, from 0"),
        (["[0, 0]", "[-1, 0]", "[2, 0]"], "participant 2 ('b'): cell is [-1, 0]; write the row and the column, from 0"),
        (["[0, 0]", "[1.0, 0]", "[2, 0]"], "participant 2 ('b'): cell is [1.0, 0]; write the row and the column"),
        (["[0, 0]", "[true, 0]", "[2, 0]"], "participant 2 ('b'): cell is [True, 0]; write the row and the column"),
        (["[0, 0]", "'1,0'", "[2, 0]"], "participant 2 ('b'): cell is '1,0'; write the row and the column"),
        (["[0, 0]", "1", "[2, 0]"], "participant 2 ('b'): cell is 1; write the row and the column"),
    ],
)
def test_a_bad_grid(tmp_path: Path, places: list[str], says: str) -> None:
    assert refused(tmp_path, text(blocks=cells(*places))).startswith(f": {says}")


def test_groups_without_a_grid(tmp_path: Path) -> None:
    federation = Federation.load(write(tmp_path, text()))
    assert federation.grid is None
    assert federation.groups() == {"everyone": THREE}


def test_groups_of_a_grid(tmp_path: Path) -> None:
    narrow = new(tmp_path / "narrow.toml", "narrow", grid(3, 2))
    assert narrow.grid == Grid(3, 2)
    assert narrow.groups() == {
        "everyone": ("a", "b", "c", "d", "e", "f"),
        "column-0": ("a", "c", "e"),
        "column-1": ("b", "d", "f"),
    }
    wide = new(tmp_path / "wide.toml", "wide", grid(3, 3))
    assert list(wide.groups()) == ["everyone", "column-0", "column-1", "column-2", "row-0", "row-1", "row-2"]
    assert wide.groups()["column-1"] == ("b", "e", "h")
    assert wide.groups()["row-1"] == ("d", "e", "f")


def test_cells_are_read_as_cells(tmp_path: Path) -> None:
    federation = Federation.load(write(tmp_path, text(blocks=cells("[0, 0]", "[1, 0]", "[2, 0]"))))
    assert [each.cell for each in federation.participants] == [Cell(0, 0), Cell(1, 0), Cell(2, 0)]
    assert all(isinstance(each.cell, Cell) for each in federation.participants)


# Digests


def test_comments_order_and_defaults_do_not_matter(tmp_path: Path) -> None:
    one = Federation.load(write(tmp_path, text("steps = 200\nlr = 2\nmu = -0.0\n")))
    other = Federation.load(
        write(
            tmp_path,
            "# another one\nepoch = 0x1\nname = 'five'\n"
            + "\n\n".join(f"# {name}\n{block(i, name)}" for i, name in reversed(list(enumerate(THREE))))
            + "\n[training]\nlr = 2.0 # fast\n",
        )
    )
    assert one == other
    assert one.sections() == other.sections()
    assert one.digest == other.digest


def test_digests_stay_what_they_are(tmp_path: Path) -> None:
    # Members of different versions compare them: a change here needs a new version of the protocol.
    federation = Federation.load(write(tmp_path, text()))
    assert federation.sections() == {
        "federation": "FEDERATION",
        "training": "TRAINING",
        "participants": "PARTICIPANTS",
    }
    assert federation.digest == "EVERYTHING"


@pytest.mark.parametrize(
    ("changes", "sections"),
    [
        ({"name": "other"}, {"federation"}),
        ({"epoch": 2}, set()),
        *(({"training": Training(**{key: value})}, {"training"}) for key, value in {  # type: ignore[arg-type]
            "steps": 201, "lr": 0.25, "mu": 0.1, "bound": 8.0, "ring_bits": 64, "sharing": "uniform",
        }.items()),
        ({"training": Training(opening="aggregator", aggregator="ada")}, {"training"}),
        ({"participants": participants(("ada", "bob", "dan"))}, {"participants"}),
        ({"participants": participants((*THREE, "dan"))}, {"participants"}),
        ({"participants": participants(THREE, ((0, 0), (1, 0), (2, 0)))}, {"participants"}),
        ({"participants": [*participants()[1:], replace(participant(0, "ada"), key=KEYS[9])]}, {"participants"}),
        ({"participants": [*participants()[1:], replace(participant(0, "ada"), address="tcp://x:1")]}, {"participants"}),
    ],
)  # fmt: skip
def test_what_a_change_changes(tmp_path: Path, changes: dict[str, Any], sections: set[str]) -> None:
    before = Federation("five", 1, Training(), tuple(participants()), tmp_path)
    after = replace(before, **changes)
    old, young = before.sections(), after.sections()
    assert {name for name in old if old[name] != young[name]} == sections
    assert after.digest != before.digest
    assert all(len(digest) == 16 and int(digest, 16) >= 0 for digest in (*young.values(), after.digest))


def test_the_path_does_not_matter(tmp_path: Path) -> None:
    one = Federation("five", 1, Training(), tuple(participants()), tmp_path / "one")
    other = replace(one, path=tmp_path / "other")
    assert one == other
    assert one.digest == other.digest


def test_a_charter_whose_groups_can_sum(tmp_path: Path) -> None:
    federation = new(tmp_path / "federation.toml", "nine", grid(3, 3))
    charter = federation.charter("1.2.3")
    assert (charter.federation, charter.epoch, charter.version) == ("nine", 1, "1.2.3")
    assert charter.members == federation.names
    assert charter.groups == federation.groups()
    assert charter.sections == federation.sections()
    assert len(charter.groups) == 7
    for members in charter.groups.values():
        check_members(members[0], members)


# Writing


def test_a_new_file_says_what_it_should(tmp_path: Path) -> None:
    path = tmp_path / "federation.toml"
    training = Training(
        steps=3, lr=1e-7, mu=0.125, bound=1e16, ring_bits=64, sharing="uniform", opening="aggregator", aggregator="b",
        minimum=4,
    )  # fmt: skip
    made = new(path, "six", reversed(grid(3, 2)), training)
    assert Federation.load(path) == made == Federation("six", 1, training, tuple(grid(3, 2)), path)
    assert stat.S_IMODE(path.stat().st_mode) & 0o600 == 0o600


def test_a_new_file_is_commented(tmp_path: Path) -> None:
    path = tmp_path / "federation.toml"
    new(path, "five", participants())
    assert (
        path.read_text()
        == f"""\
# The federation file. Every participant holds the same, and they compare it before they sum.
name = "five"
epoch = 1  # goes up by one with every change

[training]
steps = 200
lr = 0.5
mu = 0.0  # above 0, the step size shrinks
bound = 16.0  # the largest magnitude of a gradient coordinate
ring_bits = 32  # or 64
sharing = "expanded"  # or "uniform"
opening = "mesh"  # or "aggregator"
aggregator = ""  # the participant that adds up, if there is one
minimum = 3  # never fewer members than this

{block(0, "ada")}
{block(1, "bob")}
{block(2, "cleo")}"""
    )


def test_a_new_file_replaces_none(tmp_path: Path) -> None:
    path = write(tmp_path, "precious")
    with pytest.raises(InputError, match=r"federation\.toml exists and is never overwritten; choose another name"):
        new(path, "five", participants())
    assert path.read_text() == "precious"


def test_a_new_file_that_could_not_be_used_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "federation.toml"
    with pytest.raises(InputError, match=r"federation\.toml is not written: there are 2 participants, and at least 3"):
        new(path, "five", participants(("ada", "bob")))
    assert not path.exists()
    with pytest.raises(InputError, match=r"cannot be written \(No such file or directory\); name a folder"):
        new(tmp_path / "nowhere" / "federation.toml", "five", participants())


# Changing. Comments stay, and stay where they belong.

EDITED = f"""\
# Ours.
name = "five"
  epoch = 1   # goes up

[training]  # as agreed in May
steps = 7

# The north

# ada is the oldest
{block(0, "ada")}# (she was first)

# bob came
# with the boat
  [[participants]]  # bob

key = '{KEYS[1]}' # checked by telephone

name = "bob"
address = "tcp://bob.example:7001"

# The south
{block(2, "cleo")}
# The end

{block(3, "dan")}"""


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("ada", EDITED[EDITED.index("# ada is") : EDITED.index("# bob came")]),
        ("bob", EDITED[EDITED.index("# bob came") : EDITED.index("# The south")]),
        ("cleo", EDITED[EDITED.index("# The south") : EDITED.index("# The end")]),
        ("dan", EDITED[EDITED.index(block(3, "dan")) :]),
    ],
)
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_a_participant_is_taken_out(tmp_path: Path, name: str, gone: str, ending: str) -> None:
    path = write(tmp_path, EDITED.replace("\n", ending))
    after = without(path, name)
    assert path.read_bytes().decode().replace(ending, "\n") == EDITED.replace(gone, "").replace(
        "epoch = 1", "epoch = 2"
    )
    assert Federation.load(path) == after
    assert after.names == tuple(each for each in ("ada", "bob", "cleo", "dan") if each != name)
    assert (after.epoch, after.training) == (2, Training(steps=7))
    assert os.listdir(tmp_path) == ["federation.toml"]


@pytest.mark.parametrize("foot", ["", "\n# The foot\n", "\n# How\n[training]\nsteps = 7\n"])
@pytest.mark.parametrize("end", ["\n", "\n\n\n", ""])
def test_a_participant_is_added(tmp_path: Path, foot: str, end: str) -> None:
    content = text().replace("[training]", "") + foot
    path = write(tmp_path, content.rstrip("\n") + end)
    after = with_participant(path, participant(3, "dan"))
    expected = content.removesuffix(foot) if foot else content
    expected = f"{expected}\n{block(3, 'dan')}{foot}".replace("epoch = 1", "epoch = 2")
    assert path.read_text() == expected
    assert Federation.load(path) == after
    assert after.names == (*THREE, "dan")
    assert after.participant("dan") == participant(3, "dan")


def test_a_row_is_added_to_a_grid_of_one_column_and_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "federation.toml"
    before = new(path, "three", grid(3, 1))
    content = path.read_text()
    with_participant(path, participant(3, "d", (3, 0)))
    assert "cell = [3, 0]  # row and column\n" in path.read_text()
    after = without(path, "d")
    assert after == replace(before, epoch=3)
    assert path.read_text() == content.replace("epoch = 1", "epoch = 3") + "\n"


def test_what_was_added_goes_without_a_trace(tmp_path: Path) -> None:
    path = write(tmp_path, EDITED)
    with_participant(path, participant(4, "eve"))
    without(path, "eve")
    assert path.read_text().rstrip("\n") == EDITED.replace("epoch = 1", "epoch = 3").rstrip("\n")


@pytest.mark.parametrize(
    ("content", "name", "says"),
    [
        (
            text(),
            "bob",
            " stays as it is, for without bob it could not be used: there are 2 participants, and at least 3",
        ),
        (EDITED, "bop", ": 'bop' is no participant of five (did you mean 'bob'?); name one of ada, bob, cleo, dan"),
        (
            EDITED.replace("steps = 7", "minimum = 4"),
            "bob",
            " stays as it is, for without bob it could not be used: there",
        ),
        (
            EDITED.replace("steps = 7", "opening = 'aggregator'\naggregator = 'bob'"),
            "bob",
            " stays as it is, for without bob it could not be used: aggregator is 'bob', which is no participant; name",
        ),
        (
            text(blocks=cells(*(f"[{row}, {column}]" for row in range(4) for column in range(2)))),
            "c",
            " stays as it is, for without c it could not be used: the cells make a grid of 4 × 2, with nobody at",
        ),
        (
            EDITED.replace("epoch = 1 ", f"epoch = {2**63 - 1} "),
            "bob",
            " stays as it is, for without bob it could not be u",
        ),
        ("nothing", "bob", " is not TOML: "),
    ],
)
def test_a_file_stays_if_nobody_can_be_taken_out(tmp_path: Path, content: str, name: str, says: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(InputError) as error:
        without(path, name)
    assert str(error.value).startswith(f"{path}{says}")
    assert path.read_text() == content
    assert os.listdir(tmp_path) == ["federation.toml"]


@pytest.mark.parametrize(
    ("added", "says"),
    [
        (participant(4, "bob"), "two participants have the same name, 'bob'; every participant has its own"),
        (participant(1, "eve"), f"bob and eve have the same key, {KEYS[1]!r}; every participant has its own"),
        (
            replace(participant(4, "eve"), address="tcp://bob.example:7001"),
            "bob and eve have the same address, 'tcp://bob",
        ),
        (participant(4, "eve", (0, 0)), "ada has no cell and eve has one; give one to all or to none"),
    ],
)
def test_a_file_stays_if_somebody_cannot_be_added(tmp_path: Path, added: Participant, says: str) -> None:
    path = write(tmp_path, EDITED)
    with pytest.raises(InputError) as error:
        with_participant(path, added)
    assert str(error.value).startswith(f"{path} stays as it is, for with {added.name} it could not be used: {says}")
    assert path.read_text() == EDITED


def test_a_file_of_another_layout_stays_as_it_is(tmp_path: Path) -> None:
    tables = [
        f'{{name = "{each.name}", address = "{each.address}", key = "{each.key}"}}'
        for each in participants((*THREE, "dan"))
    ]
    content = f'name = "five"\nepoch = 1\nparticipants = [{", ".join(tables)}]\n'
    path = write(tmp_path, content)
    says = r"stays as it is, for it is not laid out as cgd writes it; write \[\[participants\]\] above each participant"
    with pytest.raises(InputError, match=rf"{says}, or change it by hand: without bob, epoch = 2$"):
        without(path, "bob")
    with pytest.raises(InputError, match=rf"{says}, or change it by hand: with eve, epoch = 2$"):
        with_participant(path, participant(4, "eve"))
    assert path.read_text() == content


def test_a_key_that_a_comment_elsewhere_quotes_takes_nobody_else_out(tmp_path: Path) -> None:
    content = EDITED.replace("# ada is the oldest", f"# not to be taken for {KEYS[1]}")
    path = write(tmp_path, content)
    with pytest.raises(InputError, match="is not laid out as cgd writes it"):
        without(path, "bob")
    assert path.read_text() == content


def test_participants_in_two_places(tmp_path: Path) -> None:
    content = (
        f'name = "five"\nepoch = 1\n\n{block(0, "ada")}\n{block(1, "bob")}\n[training]\nsteps = 7\n\n{block(2, "cleo")}'
    )
    path = write(tmp_path, content)
    try:
        after = with_participant(path, participant(3, "dan"))
    except InputError as error:
        assert "is not laid out as cgd writes it" in str(error)
        assert path.read_text() == content
    else:
        assert Federation.load(path) == after
        assert after.names == (*THREE, "dan")


def test_a_change_keeps_the_mode_and_the_link(tmp_path: Path) -> None:
    path = write(tmp_path, EDITED)
    path.chmod(0o640)
    link = tmp_path / "link.toml"
    link.symlink_to(path)
    without(link, "bob")
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert tomllib.loads(path.read_text())["epoch"] == 2


def test_a_file_is_replaced_all_at_once_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    path = write(tmp_path, EDITED)
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(
        InputError, match=r"federation\.toml cannot be written \(No space left on device\); see whether"
    ):
        without(path, "bob")
    assert path.read_text() == EDITED
    assert os.listdir(tmp_path) == ["federation.toml"]


def test_the_package_gives_the_same_names() -> None:
    from cgd import federation

    assert set(file.__all__) <= set(federation.__all__)
    assert all(getattr(federation, name) is getattr(file, name) for name in file.__all__)
