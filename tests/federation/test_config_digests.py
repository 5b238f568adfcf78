"""The digests of a federation file, and the old names of its keys, which are part of digests."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from cgd.federation import toml_validation
from cgd.federation.config import Federation, Participant, Training
from cgd.federation.config_edit import add_participant
from cgd.optim.grid import Grid
from support.federation_files import KEYS, THREE, block, participant, participants, rejection, text, write

if TYPE_CHECKING:
    from pathlib import Path


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
