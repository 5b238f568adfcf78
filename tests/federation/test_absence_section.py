"""The section [absence] of the federation file: the quorum, the patience and the acceptance."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from cgd import InputError
from cgd.federation.absence_section import ABSENCE_REVEALS_GRADIENTS, MIN_PATIENCE, Absence
from cgd.federation.config import Federation, HubSite, Training
from cgd.federation.config_edit import add_participant, create_federation, remove_participant
from cgd.tabular.settings import TabularSettings
from cgd.transport.link import SILENT_SECONDS
from support.federation_files import KEYS, block, grid, participant, participants, rejection, text, write
from support.private_tables import PRIVATE_SCHEMA

if TYPE_CHECKING:
    from pathlib import Path

FIVE = ("ada", "bob", "cleo", "dan", "eve")
FIVE_BLOCKS = "\n".join(block(i, name) for i, name in enumerate(FIVE))
ACCEPT = f'accept = "{ABSENCE_REVEALS_GRADIENTS}"'
SECTION = f"[absence]\nquorum = 4\npatience = 60\n{ACCEPT}\n"
ACCEPTED = Absence(4, 60.0, ABSENCE_REVEALS_GRADIENTS)


def five(section: str = SECTION, training: str = "", blocks: str = FIVE_BLOCKS) -> str:
    return text(training, blocks=f"{section}\n{blocks}")


def test_quorum_and_patience_come_from_the_file(tmp_path: Path) -> None:
    federation = Federation.load(write(tmp_path, five()))
    assert federation.absence == ACCEPTED
    assert (federation.quorum, federation.patience) == (4, 60.0)
    assert federation.federation_spec("1.2").quorum == 4


def test_without_the_section_nothing_changes(tmp_path: Path) -> None:
    federation = Federation.load(write(tmp_path, five("")))
    assert (federation.absence, federation.quorum, federation.patience) == (None, None, math.inf)
    assert federation.federation_spec("1.2").quorum is None
    assert federation.sections().keys() == {"federation", "training", "participants"}


def test_members_compare_the_section(tmp_path: Path) -> None:
    one = Federation.load(write(tmp_path, five()))
    for changed in (replace(ACCEPTED, quorum=3), replace(ACCEPTED, patience=61.0), None):
        other = replace(one, absence=changed)
        differing = {
            name
            for name in one.sections().keys() | other.sections()
            if one.sections().get(name) != other.sections().get(name)
        }
        assert differing == {"absence"}
    assert replace(one, absence=replace(ACCEPTED, patience=60)).sections() == one.sections()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("quorum = 2\npatience = 60", "quorum is 2; a sum over fewer than 3 members hides nothing, raise it"),
        ("quorum = -4\npatience = 60", "quorum is -4; a sum over fewer than 3"),
        ("quorum = 4.0\npatience = 60", "quorum is 4.0; it must be a whole number"),
        ("quorum = true\npatience = 60", "quorum is True; it must be a whole number"),
        ("quorum = '4'\npatience = 60", "quorum is '4'; it must be a whole number"),
        ("quorum = 5\npatience = 60", "quorum is 5, and there are 5 participants: no sum could go on without one of "),
        ("quorum = 6\npatience = 60", "quorum is 6, and there are 5 participants: no sum could go on without one of "),
        ("quorum = 4", "patience is missing; add it"),
        ("patience = 60", "quorum is missing; add it"),
        ("quorum = 4\npatience = 0", "patience is 0.0; it is a finite number of seconds, at least 5, because silence "),
        ("quorum = 4\npatience = -60", "patience is -60.0; it is a finite number of seconds"),
        ("quorum = 4\npatience = inf", "patience is inf; it is a finite number of seconds"),
        ("quorum = 4\npatience = nan", "patience is nan; it is a finite number of seconds"),
        ("quorum = 4\npatience = 4.9", "patience is 4.9; it is a finite number of seconds, at least 5"),
        ("quorum = 4\npatience = '1 min'", "patience is '1 min'; it must be a number"),
        ("quorum = 4\npatience = 60", "from the sums before and after a member's absence its gradient is estimated"),
        ("quorum = 4\npatience = 60\naccept = ''", "from the sums before and after a member's absence its gradient"),
        ("quorum = 4\npatience = 60\naccept = true", "accept is True; it must be a text"),
        ("quorum = 4\npatience = 60\naccept = 'yes'", "accept is 'yes'; it must be exactly 'absence reveals gradie"),
        ("quorum = 4\npatience = 60\nwait = 1", "there is no 'wait'; choose one of quorum, patience, accept"),
    ],
)  # fmt: skip
def test_invalid_section_is_rejected(tmp_path: Path, section: str, message: str) -> None:
    assert rejection(tmp_path, five(f"[absence]\n{section}\n")).startswith(f": [absence] {message}")


def test_error_names_the_line(tmp_path: Path) -> None:
    path = write(tmp_path, five().replace("patience = 60", "patience = 0"))
    line = 1 + path.read_text().splitlines().index("patience = 0")
    with pytest.raises(InputError, match=rf"federation\.toml, line {line}: \[absence\] patience is 0"):
        Federation.load(path)


@pytest.mark.parametrize(
    ("members", "allowed"), [(3, []), (4, [3]), (5, [3, 4]), (6, [4, 5]), (7, [4, 5, 6]), (8, [5, 6, 7])]
)
def test_quorum_is_more_than_half_and_not_all(tmp_path: Path, members: int, allowed: list[int]) -> None:
    everyone = Federation("trial", 1, Training(), participants("abcdefgh"[:members]), tmp_path)
    for quorum in range(3, 10):
        absence = replace(ACCEPTED, quorum=quorum)
        if quorum in allowed:
            assert replace(everyone, absence=absence).quorum == quorum
        else:
            with pytest.raises(InputError, match=rf"^\[absence\] quorum is {quorum}, and there are {members} partic"):
                replace(everyone, absence=absence)


def test_quorum_of_half_is_rejected_with_the_reason(tmp_path: Path) -> None:
    blocks = "\n".join(block(i, name) for i, name in enumerate("abcdefgh"))
    assert rejection(tmp_path, five(blocks=blocks)).startswith(
        ": [absence] quorum is 4, and there are 8 participants: two parts of the network could go on side by side, "
        "with two histories, unless it is more than half; choose 5 to 7"
    )


def test_quorum_below_the_minimum_is_rejected(tmp_path: Path) -> None:
    assert rejection(tmp_path, five(training="minimum = 5")).startswith(
        ": [absence] quorum is 4, and minimum in [training] is 5: no sum has fewer members"
    )


@pytest.mark.parametrize(
    ("content", "where"),
    [
        (text(head='name = "five"\nepoch = 1\nquorum = 4\n', blocks=FIVE_BLOCKS), "the head of the file"),
        (five("", training="quorum = 4"), "[training]"),
    ],
)
def test_quorum_elsewhere_is_rejected_with_its_place(tmp_path: Path, content: str, where: str) -> None:
    message = f": there is a quorum in {where}; write it in a section [absence], with quorum, patience and accept"
    assert rejection(tmp_path, content).startswith(message)


def test_quorum_is_refused_where_it_cannot_be(tmp_path: Path) -> None:
    plain = Federation("trial", 1, Training(), participants(FIVE), tmp_path, absence=ACCEPTED)
    with pytest.raises(InputError, match=r"\[absence\] quorum is 7, and the participants form a grid: the others of a"):
        replace(plain, participants=grid(4, 2), absence=replace(ACCEPTED, quorum=7))
    with pytest.raises(InputError, match=r"opening in \[training\] is 'aggregator': sums are added by one of the memb"):
        replace(plain, training=Training(opening="aggregator", aggregator="ada"))
    with pytest.raises(InputError, match=r"delay in \[training\] is 2: several steps have the gradients of one model"):
        replace(plain, training=Training(delay=2))
    with pytest.raises(InputError, match="epoch is 8388608; with a quorum, it is at most 8388607"):
        replace(plain, epoch=1 << 23)
    hub = HubSite("tcp://hub.example:7000", KEYS[9])
    with pytest.raises(InputError, match=r"opening in \[training\] is 'hub': sums are added by the hub, which waits"):
        replace(plain, training=Training(opening="hub"), hub=hub)
    assert replace(plain, hub=hub).quorum == 4  # a hub that only relays


def test_noise_takes_the_place_of_the_acceptance(tmp_path: Path) -> None:
    path = write(tmp_path, five("[absence]\nquorum = 4\npatience = 60\n" + PRIVATE_SCHEMA))
    federation = Federation.load(path)
    assert federation.privacy is not None
    assert federation.quorum == 4
    with pytest.raises(InputError, match="accept is 'no'"):
        replace(federation, absence=Absence(4, 60, "no"))
    with pytest.raises(InputError, match="from the sums before and after"):
        replace(federation, privacy=None)


def test_noise_of_a_quorum_protects_from_colluders(tmp_path: Path) -> None:
    """A sum may have the quorum only: if all of it but nobody else colluded, no noise would be left."""
    private = PRIVATE_SCHEMA.replace("[privacy]", "[privacy]\ncolluders = 4")
    head = "[absence]\nquorum = 4\npatience = 60\n"
    assert Federation.load(write(tmp_path, five(private))).privacy is not None
    assert rejection(tmp_path, five(head + private)).startswith(
        ": [privacy] colluders is 4, and a sum may have only 4 members, the quorum; choose at most 3"
    )
    federation = Federation.load(write(tmp_path, five(head + private.replace("colluders = 4", "colluders = 3"))))
    settings = TabularSettings.from_federation(federation, "ada").privacy_settings()
    assert (settings.quorum, settings.colluders) == (4, 3)
    assert settings.step_encoding(5, 10, 1000, 64).noisy_members == 1


def test_least_patience_is_above_the_silence_that_links_notice() -> None:
    assert MIN_PATIENCE > SILENT_SECONDS
    assert Absence(3, MIN_PATIENCE).patience == MIN_PATIENCE


def test_new_file_has_the_section_with_comments(tmp_path: Path) -> None:
    made = create_federation(tmp_path / "new.toml", "five", participants(FIVE), absence=ACCEPTED)
    assert Federation.load(made.path) == made
    assert (
        "\n[absence]\n"
        "quorum = 4  # at least so many go on without the others\n"
        "patience = 60.0  # the seconds of silence before they do\n"
        f"{ACCEPT}\n\n"
    ) in made.path.read_text()


def test_changed_members_keep_the_section_and_check_it_again(tmp_path: Path) -> None:
    path = write(tmp_path, five())
    assert add_participant(path, participant(5, "fay")).absence == ACCEPTED
    assert remove_participant(path, "fay").absence == ACCEPTED
    before = path.read_text()
    with pytest.raises(InputError, match=r"unchanged, because without eve .*quorum is 4, and there are 4 participants"):
        remove_participant(path, "eve")
    assert path.read_text() == before
    after = remove_participant(path, "eve", quorum=3)
    assert after.absence == replace(ACCEPTED, quorum=3)
    assert "quorum = 3" in path.read_text()
    assert add_participant(path, participant(4, "eve"), quorum=4).quorum == 4
    assert Federation.load(path).quorum == 4


def test_quorum_of_a_file_without_one_is_not_changed(tmp_path: Path) -> None:
    path = write(tmp_path, five(""))
    before = path.read_text()
    with pytest.raises(InputError, match=r"it has no quorum to change; add an \[absence\] by hand, or omit --quorum"):
        add_participant(path, participant(5, "fay"), quorum=4)
    assert path.read_text() == before
