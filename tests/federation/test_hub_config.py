"""The hub in the federation file: what is written and loaded, and what is rejected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from cgd import Cell
from cgd.errors import InputError
from cgd.federation import Federation, HubSite, Keys, Participant, Training, config_edit, member
from cgd.secagg.messages import HUB
from support.federations import ProcessFederation

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("ada", "bob", "cleo")
KEYS = [Keys.generate("x").public for _ in range(4)]
SITE = HubSite("tcp://hub.example:7000", KEYS[3])


def participants(*without_address: str) -> list[Participant]:
    return [
        Participant(name, "" if name in without_address else f"tcp://{name}.example:7001", key)
        for name, key in zip(NAMES, KEYS, strict=False)
    ]


def test_file_with_a_hub_is_written_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "federation.toml"
    made = config_edit.create_federation(path, "trial", participants("ada", "bob"), Training(opening="hub"), SITE)
    read = Federation.load(path)
    assert read == made
    assert read.hub == SITE
    assert read.participant("ada").address == ""
    assert "address" not in path.read_text().split("[[participants]]")[1]
    assert set(read.sections()) == {"federation", "training", "participants", "hub"}
    assert read.contacts_and_hub[HUB].address == SITE.address
    assert HUB not in read.contacts
    keys = Keys.generate("dan")
    assert config_edit.add_participant(path, Participant("dan", "", keys.public)).hub == SITE
    assert config_edit.remove_participant(path, "bob").hub == SITE


def test_file_without_a_hub_has_no_hub_section(tmp_path: Path) -> None:
    made = config_edit.create_federation(tmp_path / "federation.toml", "trial", participants())
    assert set(made.sections()) == {"federation", "training", "participants"}
    assert "[hub]" not in (tmp_path / "federation.toml").read_text()


@pytest.mark.parametrize(
    ("without_address", "opening", "site", "message"),
    [
        (("bob",), "mesh", None, r"bob has no address, and there is no hub .* add a \[hub\]"),
        ((), "hub", None, r'opening in \[training\] is "hub", and there is no hub; add a \[hub\]'),
        ((), "mesh", HubSite("tcp://x:1", KEYS[1]), "the hub has the key of bob; it needs one of its own"),
        ((), "mesh", HubSite("tcp://x:1", KEYS[1][:40] + KEYS[3][40:]), "the hub has the key of bob; it needs one of"),
        ((), "mesh", HubSite("tcp://bob.example:7001", KEYS[3]), "the hub and bob have the same address"),
    ],
)
def test_invalid_combination_of_hub_and_participants_is_rejected(
    tmp_path: Path, without_address: tuple[str, ...], opening: Any, site: HubSite | None, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        config_edit.create_federation(
            tmp_path / "federation.toml", "trial", participants(*without_address), Training(opening=opening), site
        )
    assert not (tmp_path / "federation.toml").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[hub]\n", r"\[hub\] address is missing; add it"),
        ('[hub]\naddress = "tcp://x:1"\n', r"\[hub\] key is missing; add it"),
        ('[hub]\naddress = "x"\nkey = "y"\n', r"\[hub\] address is 'x'; write where the others reach it"),
        ('[hub]\naddress = "tcp://x:1"\nkey = "y"\n', r"\[hub\] key is 'y'; a key has 80 characters"),
        ('[hub]\naddress = "tcp://x:1"\nkeys = "y"\n', r"\[hub\] there is no 'keys' \(did you mean 'key'\?\)"),
        ("hub = 3\n", r"\[hub\] 3 is not a table"),
    ],
)
def test_invalid_hub_section_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "federation.toml"
    config_edit.create_federation(path, "trial", participants())
    path.write_text(text + path.read_text() if text.startswith("hub") else f"{path.read_text()}\n{text}")
    with pytest.raises(InputError, match=message):
        Federation.load(path)


@pytest.mark.slow
def test_smaller_groups_of_a_grid_also_sum_through_the_hub(tmp_path: Path) -> None:
    federation = ProcessFederation(
        tmp_path, [f"r{i}" for i in range(3)], [Cell(i, 0) for i in range(3)], ["r0"], opening="hub"
    )
    membership = member.FederationMember(federation.path, "r0")
    try:
        assert membership.peers.settings.opening == "hub"
        assert membership.peers.groups["column"].settings.opening == "hub"
    finally:
        membership.peers.close()
