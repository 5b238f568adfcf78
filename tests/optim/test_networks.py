"""Confined transformers and CNNs learn what torch learns: `results/networks.json`, partly measured again."""

from __future__ import annotations

import json
from statistics import fmean

import pytest

from support.pages import load_script

networks = load_script("networks", "benchmarks")
STORED: dict[str, list[float]] = json.loads(networks.FILE.read_text())


def accuracies(network: str, training: str) -> list[float]:
    """Return the stored accuracies of all members and seeds."""
    return [each for seed in range(networks.SEEDS) for each in STORED[f"{network}, {training}, seed {seed}"]]


@pytest.mark.parametrize("network", networks.NETWORKS)
def test_confined_network_is_within_two_points_of_torch(network: str) -> None:
    plain = fmean(accuracies(network, "not confined"))
    for delta in (0.05, 0.02):
        assert fmean(accuracies(network, f"model, δ {delta}")) > plain - 0.02


def test_decision_record_has_the_stored_figures() -> None:
    page = " ".join((networks.FILE.parent.parent / "docs" / "decisions" / "0042-public-start.md").read_text().split())
    zeros, start, plain = (
        f"{fmean(accuracies('transformer', training)):.1%}".replace("%", " %")
        for training in ("zeros, δ 0.05", "model, δ 0.05", "not confined")
    )
    assert f"reaches {zeros} at δ 0.05 from zero, {start} from the public start, and {plain} without" in page


@pytest.mark.parametrize("network", networks.NETWORKS)
def test_page_of_rounds_has_the_stored_figures(network: str) -> None:
    page = (networks.FILE.parent.parent / "docs" / "rounds.md").read_text()
    starts = {"model": "public start", "zeros": "start of zeros"}
    names = {f"{start}, δ {delta:g}": f"{starts[start]}, δ {delta:g}" for start, delta in networks.CONFINED}
    for name, shown in {"not confined": "not confined", **names}.items():
        found = accuracies(network, name)
        assert f"| {network} | {shown} | {100 * fmean(found):.1f} % | {100 * min(found):.1f} % |\n" in page


def test_transformer_needs_the_public_start() -> None:
    """Around zero, the scales of layer norms are noise."""
    assert fmean(accuracies("transformer", "zeros, δ 0.05")) < fmean(accuracies("transformer", "not confined")) - 0.05


@pytest.mark.slow
@pytest.mark.parametrize("network", networks.NETWORKS)
def test_stored_accuracies_come_out(network: str) -> None:
    """Sums of floats may differ between processors, so a few of the 397 held-out digits may, too."""
    task = networks.Task(network, seed=0)
    assert task.plain() == pytest.approx(STORED[f"{network}, not confined, seed 0"], abs=0.02)
    assert task.confined("model", 0.05) == pytest.approx(STORED[f"{network}, model, δ 0.05, seed 0"], abs=0.02)
