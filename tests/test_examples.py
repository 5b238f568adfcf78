from __future__ import annotations

import ast
import copy
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cgd import ConfinedSGD, Peers, confine, local_peers
from support.ranks import train_on_ranks

if TYPE_CHECKING:
    from types import ModuleType

EXAMPLES = Path(__file__).parent.parent / "examples"
EXAMPLE_100_LINES = EXAMPLES / "cgd_in_100_lines.py"


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_example_runs(path: Path) -> None:
    finished = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr
    assert "held-out" in finished.stdout


def test_100_line_example_has_100_lines_and_does_not_import_cgd() -> None:
    source = EXAMPLE_100_LINES.read_text()
    assert len(source.splitlines()) <= 100
    imported = {
        alias.name.split(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in (node.names if isinstance(node, ast.Import) else [ast.alias(node.module or "")])
    }
    assert "cgd" not in imported


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_100_line_example_equals_the_package_bit_for_bit() -> None:
    example = load_module(EXAMPLE_100_LINES)
    generator = torch.Generator().manual_seed(0)
    blocks = [
        (torch.randn(samples, 6, generator=generator), torch.randint(3, (samples,), generator=generator))
        for samples in (30, 20, 7)
    ]
    models = [example.confined_model(6, 3) for _ in blocks]
    copies = copy.deepcopy(models)
    for model, model_copy in zip(models, copies, strict=True):
        confine(model, start="zeros").apply(model_copy)

    participants: list[Any] = [example.Participant(x, y, model) for (x, y), model in zip(blocks, models, strict=True)]
    example.train(participants, steps=20, lr=0.5)

    def train(peers: Peers, block: tuple[torch.Tensor, torch.Tensor], model: torch.nn.Module) -> torch.Tensor:
        optimizer = ConfinedSGD(model.parameters(), 0.5, peers=peers, samples=len(block[1]))
        for _ in range(20):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(block[0]), block[1]).backward()
            optimizer.step()
        return optimizer.displacement()

    with local_peers(3) as members:
        displacements = members.run(train, blocks, copies)
    for participant, model_copy, displacement in zip(participants, copies, displacements, strict=True):
        assert torch.equal(participant.displacement, displacement)
        for ours, theirs in zip(model_copy.parameters(), participant.model.parameters(), strict=True):
            assert torch.equal(ours, theirs)


def test_hospitals_of_one_and_of_several_ranks_train_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES / "federation")
    example = load_module(EXAMPLES / "federation/train_on_ranks.py")
    hospitals = ["hospital-a", "hospital-b", "hospital-c"]
    assert train_on_ranks([2, 1, 2], example.main, hospitals, lr=0.5, steps=20) == [[None, None], [None], [None, None]]
    results = [json.loads((tmp_path / f"{hospital}.json").read_text()) for hospital in hospitals]
    assert len({each["displacement"] for each in results}) == 1
    assert min(each["accuracy"] for each in results) > 0.85
