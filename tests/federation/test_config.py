from __future__ import annotations

import hashlib
import os
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from cgd import InputError
from cgd.errors import MembershipError
from cgd.federation import toml_validation
from cgd.federation.config import Federation, Participant, Training
from cgd.federation.config_edit import add_participant, create_federation, remove_participant
from cgd.federation.keys import decode_public_key
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


def cells(written: str) -> str:
    """Return a file whose participants have these cells, as written in TOML; "-" for none."""
    lines = ["" if cell == "-" else f"cell = {cell}\n" for cell in written.split()]
    return text(blocks="\n".join(block(i, "abcdefghi"[i], line) for i, line in enumerate(lines)))


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "federation.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def rejection(folder: Path, content: str | bytes) -> str:
    """Return the error message for a file, without the file name."""
    path = write(folder, content)
    with pytest.raises(InputError) as error:
        Federation.load(path)
    assert type(error.value) is InputError  # a MembershipError would end a running participant
    assert str(error.value).startswith(str(path))
    return str(error.value).removeprefix(str(path))


# Reading


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
        ("ring_bits = 16", "ring_bits is 16; choose 32 or 64"),
        ("masking = 'pair'", "masking is 'pair'; choose one of pairwise, uniform"),
        ("opening = 'star'", "opening is 'star'; choose one of mesh, aggregator"),
        ("opening = 'aggregator'", "opening is 'aggregator' and aggregator is ''; name one for the other"),
        ("aggregator = 'bob'", "opening is 'mesh' and aggregator is 'bob'; name one for the other"),
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


def test_digests_ignore_comments_order_defaults_and_path(tmp_path: Path) -> None:
    one = Federation.load(write(tmp_path, text("steps = 200\nlr = 2\nmu = -0.0\n")))
    blocks = "\n\n".join(f"# {name}\n{block(i, name)}" for i, name in reversed(list(enumerate(THREE))))
    content = f"# another one\nepoch = 0x1\nname = 'five'\n{blocks}\n[training]\nlr = 2.0 # fast\n"
    other = replace(Federation.load(write(tmp_path, content)), path=tmp_path)
    assert one == other
    assert one.sections() == other.sections()
    assert one.digest == other.digest


def test_digests_are_sha256_of_canonical_json_with_the_old_keys(tmp_path: Path) -> None:
    def digest(content: str) -> str:
        return hashlib.sha256(content.encode()).hexdigest()

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
def test_change_alters_only_the_digest_of_its_section(
    tmp_path: Path, changes: dict[str, Any], sections: set[str]
) -> None:
    before = Federation("five", 1, Training(), participants(), tmp_path)
    after = replace(before, **changes)
    assert {name for name, digest in before.sections().items() if digest != after.sections()[name]} == sections
    assert after.digest != before.digest


def test_old_key_is_read_with_one_warning_and_the_same_digest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    toml_validation._warn_once.cache_clear()
    for value, masking in (("expanded", "pairwise"), ("uniform", "uniform")):
        new = Federation.load(write(tmp_path, text(f'masking = "{masking}"')))
        assert caplog.messages == []
        old = write(tmp_path, text(f'sharing = "{value}"'))
        assert Federation.load(old) == Federation.load(old) == new
        assert Federation.load(old).sections() == new.sections()
        assert caplog.messages == [
            f'[training] sharing is called masking now; `sharing = "{value}"` is `masking = "{masking}"`'
        ]
        caplog.clear()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("sharing = 'expanded'\nmasking = 'pairwise'", "sharing is called masking now, and the file has both; remove"),
        ("sharing = 'shamir'", "masking is 'shamir'; choose one of pairwise, uniform"),
        ("sharing = 3", "masking is 3; it must be a text, in quotes"),
    ],
)
def test_old_key_is_rejected_with_the_new_key_or_a_bad_value(tmp_path: Path, lines: str, message: str) -> None:
    assert rejection(tmp_path, text(lines)).startswith(f": [training] {message}")


def test_file_with_an_old_key_can_be_edited(tmp_path: Path) -> None:
    path = write(tmp_path, text('sharing = "expanded"  # as agreed'))
    assert add_participant(path, participant(3, "dan")).training == Training()
    assert 'sharing = "expanded"  # as agreed\n' in path.read_text()


def test_stored_training_has_the_old_keys_and_is_read_back() -> None:
    training = Training(masking="uniform", ring_bits=64)
    assert training.as_stored() | {"sharing": "uniform"} == training.as_stored()
    assert Training().as_stored()["sharing"] == "expanded"
    assert "masking" not in training.as_stored()
    assert Training.from_stored(training.as_stored() | {"unknown": 1}) == training


def test_federation_spec_has_members_groups_digests_and_keys(tmp_path: Path) -> None:
    nine = Federation("nine", 4, Training(), grid(3, 3), tmp_path)
    keys = {name: decode_public_key(key) for name, key in zip("abcdefghi", KEYS, strict=False)}
    sections = nine.sections()
    assert nine.federation_spec("1.2") == FederationSpec(
        "nine", 4, tuple("abcdefghi"), nine.groups(), sections, "1.2", keys
    )


# Writing

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
masking = "pairwise"  # or "uniform"
opening = "mesh"  # "mesh", "aggregator" or "hub"
aggregator = ""  # the participant that adds up, if there is one
minimum = 3  # no sum has fewer members than this
optimizer = "sgd"  # "sgd" or "adam"
momentum = 0.0
validate_every = 10  # with tables: steps between two looks at the validation loss
patience = 5  # with tables: stop after so many looks without a better one; 0 never does

{BLOCKS}"""


def test_new_file_has_the_expected_text_and_content(tmp_path: Path) -> None:
    path = tmp_path / "federation.toml"
    training = Training(3, 1e-7, 0.125, 1e16, 64, "uniform", "aggregator", "b", 4)
    made = create_federation(path, "eight", reversed(grid(4, 2)), training)
    assert Federation.load(path) == made == Federation("eight", 1, training, grid(4, 2), path)
    assert create_federation(tmp_path / "other.toml", "five", participants()).path.read_text() == NEW


def test_new_file_is_not_written_if_it_exists_or_is_invalid(tmp_path: Path) -> None:
    path = write(tmp_path, "precious")
    with pytest.raises(InputError, match=r"federation\.toml exists and is never overwritten; choose another name"):
        create_federation(path, "five", participants())
    assert path.read_text() == "precious"
    with pytest.raises(InputError, match=r"other\.toml is not written: there are 2 participants, and at least 3"):
        create_federation(tmp_path / "other.toml", "five", participants(("ada", "bob")))
    assert os.listdir(tmp_path) == ["federation.toml"]


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("name", "start", "end"),
    [("ada", "# ada", "# bob came"), ("bob", "# bob", "# The south"), ("cleo", "# The south", "# The end")],
)
def test_removed_participant_takes_its_comments_with_it(
    tmp_path: Path, name: str, start: str, end: str, ending: str
) -> None:
    path = write(tmp_path, EDITED.replace("\n", ending))
    after = remove_participant(path, name)
    rest = EDITED[: EDITED.index(start)] + EDITED[EDITED.index(end) :]
    assert path.read_bytes().decode().replace(ending, "\n") == rest.replace("epoch = 1", "epoch = 2")
    assert Federation.load(path) == after
    assert after.names == tuple(each for each in ("ada", "bob", "cleo", "dan") if each != name)
    assert (after.epoch, after.training) == (2, Training(steps=7))


@pytest.mark.parametrize("foot", ["", "\n# The foot\n", "\n# How\n[training]\nsteps = 7\n"])
@pytest.mark.parametrize("end", ["\n", "\n\n\n", ""])
def test_added_participant_comes_after_the_others(tmp_path: Path, foot: str, end: str) -> None:
    content = f'name = "five"\nepoch = 1 # now\n\n{BLOCKS}'
    path = write(tmp_path, (content + foot).rstrip("\n") + end)
    after = add_participant(path, participant(3, "dan"))
    assert path.read_text() == f"{content}\n{block(3, 'dan')}{foot}".replace("epoch = 1", "epoch = 2")
    assert Federation.load(path) == after
    assert after.participants == (*participants(), participant(3, "dan"))


def test_removal_is_not_confused_by_a_key_in_a_comment(tmp_path: Path) -> None:
    path = write(tmp_path, EDITED.replace("# ada is", f"# not {KEYS[1]}"))
    assert remove_participant(path, "bob").names == ("ada", "cleo", "dan")


def test_adding_and_removing_a_participant_restores_the_file(tmp_path: Path) -> None:
    path = tmp_path / "federation.toml"
    before = create_federation(path, "three", grid(3, 1))
    content = path.read_text()
    add_participant(path, participant(3, "d", Cell(3, 0)))
    assert "cell = [3, 0]  # row and column\n" in path.read_text()
    assert remove_participant(path, "d") == replace(before, epoch=3)
    assert path.read_text().rstrip() == content.replace("epoch = 1", "epoch = 3").rstrip()


def test_participant_is_added_if_entries_are_in_two_places(tmp_path: Path) -> None:
    blocks = [block(0, "ada"), block(1, "bob"), "# How\n[training]\nsteps = 7\n", block(2, "cleo")]
    path = write(tmp_path, 'name = "five"\nepoch = 1\n\n' + "\n".join(blocks))
    after = add_participant(path, participant(3, "dan"))
    assert Federation.load(path) == after == Federation("five", 2, Training(7), participants((*THREE, "dan")), path)
    assert "# How\n" in path.read_text()


INLINE = ", ".join(
    f'{{name = "{each.name}", address = "{each.address}", key = "{each.key}"}}'
    for each in participants((*THREE, "dan"))
)
LAYOUT = (
    " is unchanged, because it is not laid out as cgd writes it; write [[participants]] above each participant, or "
)


@pytest.mark.parametrize(
    ("content", "change", "message"),
    [
        (text(), "bob", " is unchanged, because without bob it would not be valid: there are 2 participants, and at"),
        (EDITED, "bop", ": 'bop' is not a participant of five (did you mean 'bob'?); name one of ada, bob, cleo, dan"),
        (EDITED.replace("steps = 7", "minimum = 4"), "bob", " is unchanged, because without bob it would not be valid"),
        (cells("[0,0] [0,1] [1,0] [1,1] [2,0] [2,1]"), "c", " is unchanged, because without c it would not be valid:"),
        (f'name = "five"\nepoch = 1\nparticipants = [{INLINE}]\n', "bob", f"{LAYOUT}change it by hand: without bob, e"),
        (f'name = "five"\nepoch = 1\nparticipants = [{INLINE}]\n', participant(4, "eve"), f"{LAYOUT}change it by hand"),
        (EDITED, participant(4, "bob"), " is unchanged, because with bob it would not be valid: two participants h"),
        (EDITED, participant(1, "eve"), " is unchanged, because with eve it would not be valid: bob and eve have t"),
        (EDITED, participant(4, "eve", Cell(0, 0)), " is unchanged, because with eve it would not be valid: ada has"),
    ],
)  # fmt: skip
def test_invalid_edit_leaves_the_file_unchanged(
    tmp_path: Path, content: str, change: str | Participant, message: str
) -> None:
    path = write(tmp_path, content)
    with pytest.raises(InputError) as error:
        remove_participant(path, change) if isinstance(change, str) else add_participant(path, change)
    assert str(error.value).startswith(f"{path}{message}")
    assert path.read_text() == content
    assert os.listdir(tmp_path) == ["federation.toml"]
