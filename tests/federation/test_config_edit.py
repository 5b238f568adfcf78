"""New federation files, and edits that keep comments and layout."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from cgd import InputError
from cgd.federation.config import Federation, Participant, Training
from cgd.federation.config_edit import add_participant, create_federation, remove_participant
from cgd.optim.grid import Cell
from support.federation_files import BLOCKS, KEYS, THREE, block, cells, grid, participant, participants, text, write

if TYPE_CHECKING:
    from pathlib import Path

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
# The federation file. All participants hold the same file, and compare it before they sum.
name = "five"
epoch = 1  # increases by one with every change

[training]
steps = 200
lr = 0.5
mu = 0.0  # above 0: the step size decreases
bound = 16.0  # the largest magnitude of a gradient coordinate
ring_bits = 32  # or 64
masking = "pairwise"  # or "uniform"
opening = "mesh"  # "mesh", "aggregator" or "hub"
aggregator = ""  # the member that adds, if opening is "aggregator"
minimum = 3  # the minimum number of members of a sum
optimizer = "sgd"  # "sgd" or "adam"
momentum = 0.0
validate_every = 10  # with tables: the number of steps between two evaluations of the validation loss
patience = 5  # with tables: stop after this number of evaluations without a lower loss; 0: never

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
def test_comments_of_a_removed_participant_are_removed(
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
