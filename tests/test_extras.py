"""The base install trains; everything else names the extra that it needs."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from cgd.extras import EXTRAS

ROOT = Path(__file__).parent.parent
MODULES = sorted({module for modules in EXTRAS.values() for module in modules})
# Hides the modules of all extras, as on a machine where they are not installed.
WITHOUT_EXTRAS = f"""
import importlib.machinery

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in {MODULES} else super().find_spec(name, path, target)

import sys
sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Finder
"""
TRAINING = """
import cgd, torch

def train(peers):
    with cgd.public_seed(0):
        model = torch.nn.Linear(2, 1)
    cgd.confine(model, seed=peers.seed)
    optimizer = cgd.ConfinedSGD(model.parameters(), lr=0.1, peers=peers, samples=4)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 2)).mean().backward()
        optimizer.step()
    return optimizer.displacement()

with cgd.local_peers(3) as members:
    one, two, three = members.run(train)
assert torch.equal(one, two)
import cgd.federation.member, cgd.transport.zeromq
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS + program], capture_output=True, text=True, timeout=120, check=False
    )


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run(f"import sys; sys.argv = {['cgd', *arguments]!r}\nfrom cgd.cli import main\nmain()")


@pytest.mark.slow
def test_the_base_install_trains_and_joins() -> None:
    found = run(TRAINING)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(
    ("name", "extra"), [("load_model", "tables"), ("simulate", "simulate"), ("SimulationResult", "simulate")]
)
def test_a_public_name_reports_the_extra_it_needs(name: str, extra: str) -> None:
    found = run(f"import cgd\ntry:\n    cgd.{name}\nexcept cgd.MissingExtraError as error:\n    print(error)")
    assert found.returncode == 0, found.stderr
    assert f"pip install 'cgd[{extra}]'" in found.stdout


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (("demo",), "simulate"),
        (("reproduce", "list"), "simulate"),
        (("audit",), "audit"),
        (("schema", "README.md", "--label", "x"), "tables"),
        (("predict", "runs/x", "--data", "README.md"), "tables"),
        (("export", "runs/x", "--onnx", "x.onnx"), "tables"),
        (("predict", "runs/x", "--data", "postgresql://db.example/x", "--query", "SELECT 1"), "tables"),
    ],
)
def test_a_command_reports_the_extra_it_needs(arguments: tuple[str, ...], extra: str) -> None:
    found = command(*arguments)
    assert found.returncode == 2
    assert f"pip install 'cgd[{extra}]'" in " ".join(found.stderr.split())
    assert "Traceback" not in found.stderr


def test_private_set_intersection_reports_the_extra_it_needs() -> None:
    found = run("import cgd\ntry:\n    import cgd.psi.curve\nexcept cgd.MissingExtraError as error:\n    print(error)")
    assert found.returncode == 0, found.stderr
    assert "private set intersection needs nacl, which is not installed; pip install 'cgd[psi]'" in found.stdout


@pytest.mark.parametrize("arguments", [("--help",), ("keygen", "--help"), ("join", "--help"), ("hub", "--help")])
def test_the_commands_of_a_federation_need_no_extra(arguments: tuple[str, ...]) -> None:
    found = command(*arguments)
    assert found.returncode == 0, found.stderr


def test_extras_name_the_distributions_of_their_modules() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    distributions = packages_distributions()
    for extra, modules in EXTRAS.items():
        names = {re.split(r"[<>=;\[ ]", each)[0] for each in declared[extra]} - {"cgd"}
        assert names == {distributions[module][0].lower() for module in modules}
