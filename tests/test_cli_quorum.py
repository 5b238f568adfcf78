"""The commands of operators, for a federation with a quorum."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cgd.cli import app
from cgd.cli.absence import describe_quorum
from cgd.federation.config import Federation
from cgd.federation.keys import Keys

FIVE = ("ada", "bob", "cleo", "dan", "eve")
ACCEPT = ("--accept-absence", "absence reveals gradients")


@pytest.fixture
def participants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    options = []
    for place, name in enumerate(FIVE):
        Keys.generate(name).save(tmp_path)
        options += ["--participant", f"{name}=tcp://127.0.0.1:{7000 + place}={name}.pub"]
    return options


def cgd(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["federation", *arguments])
    if isinstance(result.exception, Exception) and not isinstance(result.exception, SystemExit):
        return 2, str(result.exception)
    return result.exit_code, " ".join(result.output.split())


def test_new_file_has_a_quorum_and_the_commands_say_what_it_means(participants: list[str]) -> None:
    code, said = cgd("new", "federation.toml", *participants, "--quorum", "4", "--patience", "60", *ACCEPT)
    meaning = (
        "Absence: after 60 seconds of silence of a member, at least 4 of 5 go on without it (absence reveals "
        "gradients); the promises hold against up to 2 members that collude or break the protocol. If each is here "
        "99 % of the time, 4 of 5 are 99.90 % of it, and all 95.10 %"
    )
    assert (code, meaning in said) == (0, True)
    assert meaning in cgd("show", "federation.toml")[1]
    federation = Federation.load("federation.toml")
    assert (federation.quorum, federation.patience) == (4, 60.0)
    assert describe_quorum(federation, 4).endswith("\n4 of 5 are here: a quorum")
    assert describe_quorum(federation, 2).endswith("\n2 of 5 are here: 2 more must answer before any sum")


def test_removed_participant_with_a_new_quorum(participants: list[str]) -> None:
    cgd("new", "federation.toml", *participants, "--quorum", "4", "--patience", "60", *ACCEPT)
    code, said = cgd("remove", "federation.toml", "eve")
    assert code == 2
    assert "quorum is 4, and there are 4 participants" in said
    assert cgd("remove", "federation.toml", "eve", "--quorum", "3")[0] == 0
    assert Federation.load("federation.toml").quorum == 3
    made = ("--public-key", "eve.pub", "--address", "tcp://127.0.0.1:7004", "--quorum", "4")
    assert cgd("add", "federation.toml", "eve", *made)[0] == 0
    assert Federation.load("federation.toml").quorum == 4


def test_hub_of_a_quorum_relays_only(participants: list[str]) -> None:
    Keys.generate("hub").save(Path())
    hub = ("--hub", "tcp://127.0.0.1:7009=hub.pub")
    cgd("new", "federation.toml", *participants, *hub, "--quorum", "4", "--patience", "60", *ACCEPT)
    assert Federation.load("federation.toml").training.opening == "mesh"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--quorum", "4"), "--quorum is 4, without --patience; add --patience SECONDS"),
        (("--patience", "60"), "there is --patience without --quorum; add --quorum NUMBER, or omit it"),
        (ACCEPT, "there is --accept-absence without --quorum"),
        (("--quorum", "4", "--patience", "60"), "from the sums before and after a member's absence its gradient is"),
        (("--quorum", "4", "--patience", "0", *ACCEPT), "patience is 0.0; it is a finite number of seconds"),
        (("--quorum", "2", "--patience", "60", *ACCEPT), "quorum is 2; a sum over fewer than 3 members hides nothing"),
        (("--quorum", "5", "--patience", "60", *ACCEPT), "quorum is 5, and there are 5 participants"),
    ],
)
def test_bad_options_are_refused(participants: list[str], options: tuple[str, ...], message: str) -> None:
    code, said = cgd("new", "federation.toml", *participants, *options)
    assert code == 2
    assert message in said
    assert not Path("federation.toml").exists()
