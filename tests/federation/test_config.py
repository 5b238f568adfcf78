from __future__ import annotations

import hashlib
import os
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from cgd import InputError
from cgd.errors import MembershipError
from cgd.federation.config import Federation, Participant, Training
from cgd.federation.config_edit import new, with_participant, without
from cgd.federation.keys import public_keys
from cgd.optim.grid import Cell, Grid
from cgd.peers import SumSettings
from cgd.secagg.federation_spec import FederationSpec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

KEYS = [(zmq.curve_public(f"{digit}".encode() * 40) + f"{digit}".encode() * 40).decode() for digit in range(10)]
THREE = ("ada", "bob", "cleo")


def participant(number: int, name: str, cell: Cell | None = None) -> Participant:
    return Participant(name, f"tcp://{name}.example:7001", KEYS[number], cell)


def participants(names: Sequence[str] = THREE, cells: Sequence[Cell | None] = (None,) * 9) -> tuple[Participant, ...]:
    return tuple(participant(i, name, cells[i]) for i, name in enumerate(names))


def grid(rows: int, columns: int) -> tuple[Participant, ...]:
    return participants("abcdefghi"[: rows * columns], Grid(rows, columns).cells)


def block(number: int, name: str, extra: str = "") -> str:
    return f'[[participants]]\nname = "{name}"\naddress = "tcp://{name}.example:7001"\nkey = "{KEYS[number]}"\n{extra}'


BLOCKS = "\n".join(block(i, name) for i, name in enumerate(THREE))


def text(training: str = "", head: str = 'name = "five"\nepoch = 1\n', blocks: str = BLOCKS) -> str:
    return f"{head}\n[training]\n{training}\n\n{blocks}"


def cells(places: str) -> str:
    """A file whose participants have these cells, as they are written; "-" for none."""
    lines = ["" if place == "-" else f"cell = {place}\n" for place in places.split()]
    return text(blocks="\n".join(block(i, "abcdefghi"[i], line) for i, line in enumerate(lines)))


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "federation.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refused(folder: Path, content: str | bytes) -> str:
    """What the error says of a file, after the name of the file."""
    path = write(folder, content)
    with pytest.raises(InputError) as error:
        Federation.load(path)
    assert type(error.value) is InputError  # a MembershipError would end a running participant
    assert str(error.value).startswith(str(path))
    return str(error.value).removeprefix(str(path))


# Reading


def test_a_file_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, text("lr = 1\nopening = 'aggregator'\naggregator = 'bob'  # why not\n"))
    federation = Federation.load(path)
    training = Training(lr=1.0, opening="aggregator", aggregator="bob")
    assert federation == Federation("five", 1, training, participants(), path) == Federation.load(str(path))
    assert federation.path == path
    assert isinstance(federation.training.lr, float)


def test_training_is_optional_and_participants_are_sorted(tmp_path: Path) -> None:
    blocks = "\n".join([block(1, "bob"), block(2, "cleo"), block(0, "ada")])
    federation = Federation.load(write(tmp_path, text(blocks=blocks).replace("[training]", "")))
    assert federation.training == Training(200, 0.5, 0.0, 16.0, 32, "expanded", "mesh", "", 3)
    assert federation.names == THREE


def test_settings_contacts_and_participants(tmp_path: Path) -> None:
    federation = Federation.load(write(tmp_path, text('bound = 2\nring_bits = 64\nsharing = "uniform"\n')))
    assert federation.settings == SumSettings(bound=2.0, ring_bits=64, sharing="uniform")
    assert tuple(federation.contacts) == THREE
    assert asdict(federation.contacts["bob"]) == {
        "address": "tcp://bob.example:7001",
        "public_key": KEYS[1][:40].encode(),
    }
    assert federation.participant("bob") == participant(1, "bob")
    with pytest.raises(MembershipError) as error:
        federation.participant("bop")
    assert str(error.value) == "'bop' is no participant of five (did you mean 'bob'?); name one of ada, bob, cleo"


@pytest.mark.parametrize(("name", "says"), [("none.toml", "No such file or directory"), ("", "Is a directory")])
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(InputError, match=rf"cannot be read \(.*{says}.*\); name the federation file"):
        Federation.load(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("name = five\n", " is not TOML: Invalid value (at line 1, column 8); mend it there"),
        ("name = " + 10_000 * "[", " is not TOML: "),
        ("name = " + 5_000 * "9", " is not TOML: "),
        (b"name = '\xff'", " cannot be read ('utf-8' codec can't decode byte 0xff"),
        (text(head='nam = "five"'), ": there is no 'nam' (did you mean 'name'?); choose one of name, epoch, participa"),
        (text(head="epoch = 1"), ": name is missing; add it"),
        (text(head='name = "five"'), ": epoch is missing; add it"),
        (text(head='name = "five hospitals"\nepoch = 1'), ": name is 'five hospitals'; choose 1 to 63 letters"),
        (text(head='name = "five"\nepoch = 0'), ": epoch is 0; it counts the changes of this file, from 1"),
        (text(head='name = "five"\nepoch = 1.0'), ": epoch is 1.0; it is a whole number"),
        (text(head='name = "five"\nepoch = true'), ": epoch is True; it is a whole number"),
        (text(head="a." * 40 + "a = 1"), ": tables and lists are nested more than 16 deep; write them flat"),
        (text(head="a." * 3000 + "a = 1"), " is not TOML: line 1 has a key of more than 64 parts; mend it there"),
        (text(head=f"name = [{{a = 0x{'f' * 9999}}}]\nepoch = 1"), ": a whole number is beyond 64 bits; write a small"),
        (text(head='name = "five"\nepoch = 1\ntraining = 3').replace("[training]", ""), ": [training] 3 is no table"),
        ('name = "five"\nepoch = 1\n', ": participants is missing; add it"),
        ('name = "five"\nepoch = 1\n[participants]\n', ": participants is no list; write [[participants]] for each of"),
        ('name = "five"\nepoch = 1\nparticipants = [3]', ": participant 1: 3 is no table; write its header, and KEY"),
        ('name = "five"\nepoch = 1\nparticipants = []', ": there are 0 participants, and at least 3 are needed (a sum"),
        (text(blocks=block(0, "a") + block(1, "b")), ": there are 2 participants, and at least 3 are needed (a sum ov"),
        (text("minimum = 5"), ": there are 3 participants, and at least 5 are needed (minimum in [training]); add 2"),
        (text("opening = 'aggregator'\naggregator = 'bop'"), ": aggregator is 'bop' (did you mean 'bob'?), which is n"),
        (text(f"bound = {2**31 - 3}"), ": 3 addends of up to 2.14748e+09 do not fit a ring of 32 bits; use ring_bits="),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used(tmp_path: Path, content: str | bytes, says: str) -> None:
    assert refused(tmp_path, content).startswith(says)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("step = 3", "there is no 'step' (did you mean 'steps'?); choose one of steps, lr, mu, bound, ring_bits"),
        ("steps = 0", "steps is 0; train for at least 1"),
        ("steps = true", "steps is True; it is a whole number"),
        ("lr = 0", "lr is 0.0; it must be a positive, finite number"),
        ("lr = inf", "lr is inf; it must be a positive, finite number"),
        ("lr = nan", "lr is nan; it must be a positive, finite number"),
        ("lr = true", "lr is True; it is a number"),
        ("mu = -0.1", "mu is -0.1; it must be a finite number, at least 0"),
        ("bound = 0", "bound is 0.0; it must be a positive, finite number"),
        ("bound = 3e9", "1 addends of up to 3e+09 do not fit a ring of 32 bits; use ring_bits=64"),
        ("ring_bits = 16", "ring_bits is 16; choose 32 or 64"),
        ("sharing = 'expand'", "sharing is 'expand'; choose one of expanded, uniform"),
        ("opening = 'star'", "opening is 'star'; choose one of mesh, aggregator"),
        ("opening = 'aggregator'", "opening is 'aggregator' and aggregator is ''; name one for the other"),
        ("aggregator = 'bob'", "opening is 'mesh' and aggregator is 'bob'; name one for the other"),
        ("minimum = 2", "minimum is 2; a sum over fewer than 3 members hides nothing, raise it"),
    ],
)
def test_bad_training(tmp_path: Path, line: str, says: str) -> None:
    assert refused(tmp_path, text(line)).startswith(f": [training] {says}")


@pytest.mark.parametrize(
    ("old", "to", "says"),
    [
        ('name = "bob"', 'nam = "bob"', "participant 2: there is no 'nam' (did you mean 'name'?); choose one of name"),
        ('name = "bob"', 'name = "bob"\nport = 1', "participant 2 ('bob'): there is no 'port'; choose one of name"),
        ('address = "tcp://bob.example:7001"\n', "", "bob has no address, and there is no hub"),
        ('name = "bob"', 'name = "b b"', "participant 2 ('b b'): name is 'b b'; choose 1 to 63 letters"),
        ('name = "bob"', 'name = "ada"', "two participants have the same name, 'ada'; every participant has its own"),
        (KEYS[1], KEYS[0], f"ada and bob have the same key, {KEYS[0]!r}; every participant has its own"),
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
        (f'"{KEYS[1]}"', "7", "participant 2 ('bob'): key is 7; a key is 80 characters of Z85: copy it from bob.pub"),
    ],
)
def test_a_bad_participant(tmp_path: Path, old: str, to: str, says: str) -> None:
    assert old in text()
    assert refused(tmp_path, text().replace(old, to)).startswith(f": {says}")


@pytest.mark.parametrize(
    ("places", "says"),
    [
        ("[0,0] [1,0] -", "c has no cell and a has one; give one to all or to none"),
        ("[0,0] [1,0] [1,0]", "b and c have the same cell, Cell(row=1, column=0); every participant has its own"),
        ("[0,0] [1,0] [3,0]", "the cells make a grid of 4 × 1, with nobody at [2, 0]; the participants have to fill i"),
        ("[0,0] [1,0] [2,1]", "the cells make a grid of 3 × 2, with nobody at [0, 1]; the participants have to fill i"),
        ("[0,0] [1,0] [999999999999,999999999999]", "the cells make a grid of 1000000000000 × 1000000000000, with nob"),
        ("[0,0] [0,1] [0,2]", "the grid has 1 row(s), and a sum over a column of fewer than 3 hides nothing; add rows"),
        ("[0,0] [0,1] [1,0] [1,1]", "the grid has 2 row(s), and a sum over a column of fewer than 3 hides nothing; ad"),
        ("[0,0] [1] [2,0]", "participant 2 ('b'): cell is [1]; write the row and the column, from 0"),
    ],
)  # fmt: skip
def test_a_bad_grid(tmp_path: Path, places: str, says: str) -> None:
    assert refused(tmp_path, cells(places)).startswith(f": {says}")


def test_groups(tmp_path: Path) -> None:
    flat = Federation.load(write(tmp_path, text()))
    assert (flat.grid, flat.groups()) == (None, {"everyone": THREE})
    narrow = Federation.load(write(tmp_path, cells("[0,0] [0,1] [1,0] [1,1] [2,0] [2,1]")))
    wide = replace(flat, participants=grid(3, 3))
    assert (narrow.grid, wide.grid, narrow.participants) == (Grid(3, 2), Grid(3, 3), grid(3, 2))
    assert narrow.groups() == {"everyone": tuple("abcdef"), "column-0": tuple("ace"), "column-1": tuple("bdf")}
    assert list(wide.groups()) == ["everyone", "column-0", "column-1", "column-2", "row-0", "row-1", "row-2"]
    assert (wide.groups()["column-1"], wide.groups()["row-1"]) == (tuple("beh"), tuple("def"))


def test_comments_order_defaults_and_the_path_do_not_matter(tmp_path: Path) -> None:
    one = Federation.load(write(tmp_path, text("steps = 200\nlr = 2\nmu = -0.0\n")))
    blocks = "\n\n".join(f"# {name}\n{block(i, name)}" for i, name in reversed(list(enumerate(THREE))))
    content = f"# another one\nepoch = 0x1\nname = 'five'\n{blocks}\n[training]\nlr = 2.0 # fast\n"
    other = replace(Federation.load(write(tmp_path, content)), path=tmp_path)
    assert one == other
    assert one.sections() == other.sections()
    assert one.digest == other.digest


def test_digests_are_of_canonical_json(tmp_path: Path) -> None:
    def digest(content: str) -> str:
        return hashlib.sha256(content.encode()).hexdigest()  # whole: a shorter one could be met on purpose

    federation = Federation.load(write(tmp_path, text()))
    training = '{"aggregator":"","bound":16.0,"lr":0.5,"minimum":3,"momentum":0.0,"mu":0.0,"opening":"mesh",'
    training += '"optimizer":"sgd","patience":5,"ring_bits":32,"sharing":"expanded","steps":200,"validate_every":10}'
    everyone = ",".join(
        f'{{"address":"tcp://{name}.example:7001","cell":null,"key":"{KEYS[i]}","name":"{name}"}}'
        for i, name in enumerate(THREE)
    )
    name, settings, members = digest('"five"'), digest(training), digest(f"[{everyone}]")
    assert federation.sections() == {"federation": name, "training": settings, "participants": members}
    whole = f'[1,{{"federation":"{name}","participants":"{members}","training":"{settings}"}}]'
    assert federation.digest == digest(whole)


@pytest.mark.parametrize(
    ("changes", "sections"),
    [
        ({"name": "other"}, {"federation"}),
        ({"epoch": 2}, set()),
        ({"training": Training(steps=201)}, {"training"}),
        ({"training": Training(opening="aggregator", aggregator="ada")}, {"training"}),
        ({"participants": participants((*THREE, "dan"))}, {"participants"}),
        ({"participants": participants(THREE, Grid(3).cells)}, {"participants"}),
        ({"participants": (*participants()[1:], participant(9, "ada"))}, {"participants"}),
        ({"participants": (*participants()[1:], Participant("ada", "tcp://x:1", KEYS[0]))}, {"participants"}),
    ],
)
def test_what_a_change_changes(tmp_path: Path, changes: dict[str, Any], sections: set[str]) -> None:
    before = Federation("five", 1, Training(), participants(), tmp_path)
    after = replace(before, **changes)
    assert {name for name, digest in before.sections().items() if digest != after.sections()[name]} == sections
    assert after.digest != before.digest


def test_the_charter(tmp_path: Path) -> None:
    nine = Federation("nine", 4, Training(), grid(3, 3), tmp_path)
    keys = {name: public_keys(key) for name, key in zip("abcdefghi", KEYS, strict=False)}
    sections = nine.sections()
    assert nine.federation_spec("1.2") == FederationSpec(
        "nine", 4, tuple("abcdefghi"), nine.groups(), sections, "1.2", keys
    )


# Writing. Comments stay, and stay where they belong.

EDITED = f"""\
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
NEW = f"""\
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
opening = "mesh"  # "mesh", "aggregator" or "hub"
aggregator = ""  # the participant that adds up, if there is one
minimum = 3  # no sum has fewer members than this
optimizer = "sgd"  # "sgd" or "adam"
momentum = 0.0
validate_every = 10  # with tables: steps between two looks at the validation loss
patience = 5  # with tables: stop after so many looks without a better one; 0 never does

{BLOCKS}"""


def test_a_new_file_says_what_it_should(tmp_path: Path) -> None:
    path = tmp_path / "federation.toml"
    training = Training(3, 1e-7, 0.125, 1e16, 64, "uniform", "aggregator", "b", 4)
    made = new(path, "eight", reversed(grid(4, 2)), training)
    assert Federation.load(path) == made == Federation("eight", 1, training, grid(4, 2), path)
    assert new(tmp_path / "other.toml", "five", participants()).path.read_text() == NEW


def test_a_new_file_that_is_not_written(tmp_path: Path) -> None:
    path = write(tmp_path, "precious")
    with pytest.raises(InputError, match=r"federation\.toml exists and is never overwritten; choose another name"):
        new(path, "five", participants())
    assert path.read_text() == "precious"
    with pytest.raises(InputError, match=r"other\.toml is not written: there are 2 participants, and at least 3"):
        new(tmp_path / "other.toml", "five", participants(("ada", "bob")))
    assert os.listdir(tmp_path) == ["federation.toml"]


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("name", "start", "end"),
    [("ada", "# ada", "# bob came"), ("bob", "# bob", "# The south"), ("cleo", "# The south", "# The end")],
)
def test_a_participant_is_taken_out(tmp_path: Path, name: str, start: str, end: str, ending: str) -> None:
    path = write(tmp_path, EDITED.replace("\n", ending))
    after = without(path, name)
    rest = EDITED[: EDITED.index(start)] + EDITED[EDITED.index(end) :]
    assert path.read_bytes().decode().replace(ending, "\n") == rest.replace("epoch = 1", "epoch = 2")
    assert Federation.load(path) == after
    assert after.names == tuple(each for each in ("ada", "bob", "cleo", "dan") if each != name)
    assert (after.epoch, after.training) == (2, Training(steps=7))


@pytest.mark.parametrize("foot", ["", "\n# The foot\n", "\n# How\n[training]\nsteps = 7\n"])
@pytest.mark.parametrize("end", ["\n", "\n\n\n", ""])
def test_a_participant_is_added(tmp_path: Path, foot: str, end: str) -> None:
    content = f'name = "five"\nepoch = 1 # now\n\n{BLOCKS}'
    path = write(tmp_path, (content + foot).rstrip("\n") + end)
    after = with_participant(path, participant(3, "dan"))
    assert path.read_text() == f"{content}\n{block(3, 'dan')}{foot}".replace("epoch = 1", "epoch = 2")
    assert Federation.load(path) == after
    assert after.participants == (*participants(), participant(3, "dan"))


def test_what_was_added_goes_without_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "federation.toml"
    before = new(path, "three", grid(3, 1))
    content = path.read_text()
    with_participant(path, participant(3, "d", Cell(3, 0)))
    assert "cell = [3, 0]  # row and column\n" in path.read_text()
    assert without(path, "d") == replace(before, epoch=3)
    assert path.read_text().rstrip() == content.replace("epoch = 1", "epoch = 3").rstrip()


def test_participants_in_two_places(tmp_path: Path) -> None:
    blocks = [block(0, "ada"), block(1, "bob"), "# How\n[training]\nsteps = 7\n", block(2, "cleo")]
    path = write(tmp_path, 'name = "five"\nepoch = 1\n\n' + "\n".join(blocks))
    after = with_participant(path, participant(3, "dan"))
    assert Federation.load(path) == after == Federation("five", 2, Training(7), participants((*THREE, "dan")), path)
    assert "# How\n" in path.read_text()


INLINE = ", ".join(
    f'{{name = "{each.name}", address = "{each.address}", key = "{each.key}"}}'
    for each in participants((*THREE, "dan"))
)
LAYOUT = " stays as it is, for it is not laid out as cgd writes it; write [[participants]] above each participant, or "


@pytest.mark.parametrize(
    ("content", "change", "says"),
    [
        (text(), "bob", " stays as it is, for without bob it could not be used: there are 2 participants, and at leas"),
        (EDITED, "bop", ": 'bop' is no participant of five (did you mean 'bob'?); name one of ada, bob, cleo, dan"),
        (EDITED.replace("steps = 7", "minimum = 4"), "bob", " stays as it is, for without bob it could not be used: t"),
        (cells("[0,0] [0,1] [1,0] [1,1] [2,0] [2,1]"), "c", " stays as it is, for without c it could not be used: the"),
        (f'name = "five"\nepoch = 1\nparticipants = [{INLINE}]\n', "bob", f"{LAYOUT}change it by hand: without bob, e"),
        (f'name = "five"\nepoch = 1\nparticipants = [{INLINE}]\n', participant(4, "eve"), f"{LAYOUT}change it by hand"),
        (EDITED.replace("# ada is", f"# not {KEYS[1]}"), "bob", LAYOUT),  # would take out ada
        (EDITED, participant(4, "bob"), " stays as it is, for with bob it could not be used: two participants have th"),
        (EDITED, participant(1, "eve"), " stays as it is, for with eve it could not be used: bob and eve have the sam"),
        (EDITED, participant(4, "eve", Cell(0, 0)), " stays as it is, for with eve it could not be used: ada has no c"),
    ],
)  # fmt: skip
def test_a_file_stays_as_it_is(tmp_path: Path, content: str, change: str | Participant, says: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(InputError) as error:
        without(path, change) if isinstance(change, str) else with_participant(path, change)
    assert str(error.value).startswith(f"{path}{says}")
    assert path.read_text() == content
    assert os.listdir(tmp_path) == ["federation.toml"]
