"""Draw the results of attacks with and without noise, for privacy officers: `make privacy-picture`.

The pictures above are made by running two attacks on handwritten digits, `records` and `inversion`, under CGD without
noise and at ε = 8, 2 and 0.5. The chart below has the figures of the stored audits (`results/audit`), with five draws
each.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import torch

from cgd.audit import results
from cgd.audit.attacks import inversion, records
from cgd.audit.embedded import digit_scenario
from cgd.audit.matching import match, value_range
from cgd.audit.schemes import observe
from cgd.audit.view import SCHEMES

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

    from cgd.audit.results import AttackResult, Audit
    from cgd.audit.view import Scheme

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "results" / "audit"
PICTURE = ROOT / "docs" / "images" / "privacy-before-after.png"
SHOWN: dict[Scheme, str] = {"cgd": "without noise", "dp8": "ε = 8", "dp2": "ε = 2", "dp0.5": "ε = 0.5"}
COLOURS = {"cgd": "#b3261e", "dp8": "#e08a00", "dp2": "#1f6f54", "dp0.5": "#2b5c9e"}
# Of each attack, a variant and a setting, and how to call it.
CHART = (
    ("records", "", "2 × 4 records", "whole records, few of them"),
    ("traps", "", "2 × 100 records", "whole records, by steering"),
    ("membership", "span", "64 pixels", "membership, few records"),
    ("membership", "leverage", "2 × 20 records of 30", "membership, more records"),
    ("membership", "gradient of", "2 × 20 records of 30", "membership, by gradients"),
    ("dropout", "", "a step apart", "gradient of one that leaves"),
    ("gram", "XᵀX", "probe", "covariances of all records"),
    ("labels", "", "from biases", "numbers of records by class"),
)


def advantage(result: AttackResult) -> float:
    """Return the part of the way from guessing (0) to the exact answer (1), not below 0."""
    best = 1.0 if result.metric in ("records recovered", "AUC") else 0.0
    return max(0.0, (result.value - result.chance) / (best - result.chance))


def advantages(found: list[Audit], attack: str, variant: str, setting: str, scheme: Scheme) -> list[float]:
    """Return the advantage in each of the stored audits."""
    values = []
    for audit in found:
        (findings,) = (each.findings for each in audit.attacks if each.id == attack)
        (result,) = (
            each
            for each in findings
            if each.scheme == scheme and not each.control and variant in each.attack and setting in each.setting
        )
        values.append(advantage(result))
    return values


def recovered_by_records(scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Return eight real records, and what `records` recovers of them."""
    view, truth = observe(digit_scenario(4, rounds=3), scheme)
    return _matched(records.recover(view), truth.all_x, value_range(view))


def recovered_by_inversion(scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Return four real records, and what `inversion` recovers of them."""
    view, truth = observe(digit_scenario(2, rounds=3, hidden=16, smooth=True, lr=0.5), scheme)
    return _matched(inversion.invert(view, "unknown"), truth.all_x, value_range(view))


def _matched(guesses: torch.Tensor, real: torch.Tensor, peak: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the real records in their order, and the most similar guess for each."""
    found = [match(guesses, each[None], peak).guess[0] for each in real]
    return real, torch.stack(found)


def draw_records(figure: SubFigure) -> None:
    """Draw the real and the recovered records of both attacks, a row for each scheme."""
    blocks = [[attack(scheme) for scheme in SHOWN] for attack in (recovered_by_records, recovered_by_inversion)]
    titles = ("Records computed from the sums", "Records found by a search")
    sizes = [len(block[0][0]) for block in blocks]
    widths = [1.0] * sizes[0] + [0.6] + [1.0] * sizes[1]  # with a gap between the attacks
    axes = figure.subplots(len(SHOWN) + 1, len(widths), width_ratios=widths)
    for each in axes.flat:
        each.axis("off")
    for block, first in zip(blocks, (0, sizes[0] + 1), strict=True):
        for row, images in enumerate([block[0][0], *(found for _, found in block)]):
            for column, image in enumerate(images):
                axes[row, first + column].imshow(image.reshape(8, 8), cmap="gray_r", vmin=0, vmax=1)
    for row, text in enumerate(("real", *SHOWN.values())):
        weight = "bold" if row else "normal"
        axes[row, 0].text(-0.35, 0.5, text, transform=axes[row, 0].transAxes, ha="right", va="center", weight=weight)
    for title, first, size in zip(titles, (0, sizes[0] + 1), sizes, strict=True):
        axes[0, first + size // 2].set_title(title, fontsize=11, loc="center", x=0.0, pad=8)
    note = (
        "For each record, the most similar guess. Against noise, the search ends at the mean of the attacker's records."
    )
    figure.text(0.14, 0.025, note, fontsize=8.5, color="#555555")


def draw_chart(figure: SubFigure, found: list[Audit]) -> None:
    """Draw the advantage of each attack by scheme: the median, and a line from the lowest to the highest draw."""
    axes = figure.subplots()
    height = 0.18
    for row, (attack, variant, setting, name) in enumerate(CHART):
        for place, scheme in enumerate(SHOWN):
            values = advantages(found, attack, variant, setting, scheme)
            y = row + (place - 1.5) * height
            axes.plot([min(values), max(values)], [y, y], color=COLOURS[scheme], linewidth=1.5, alpha=0.6)
            axes.plot(
                median(values), y, "o", color=COLOURS[scheme], markersize=6, label=SHOWN[scheme] if row == 0 else None
            )
        axes.text(-0.03, row, name, ha="right", va="center")
    axes.set_ylim(len(CHART) - 0.4, -0.6)
    axes.set_xlim(-0.02, 1.02)
    axes.set_yticks([])
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["guessing", "", "half way", "", "exact"])
    axes.grid(axis="x", color="#dddddd")
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_title("What attacks obtain: from guessing to the exact answer", fontsize=11, loc="left", pad=26)
    note = "Median of five draws, and a line from the lowest to the highest. Membership of 40 records varies by chance."
    figure.text(0.25, 0.015, note, fontsize=8.5, color="#555555")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, frameon=False, borderaxespad=0.2)


def draw(found: list[Audit]) -> Figure:
    """Return the picture."""
    from matplotlib import pyplot as plt

    mpl.rcParams.update({"font.size": 10, "font.family": "DejaVu Sans"})
    figure = plt.figure(figsize=(9.6, 9.6), dpi=120)
    parts: Any = figure.subfigures(2, 1, height_ratios=[1, 1.1])
    above, below = parts
    draw_records(above)
    above.subplots_adjust(left=0.14, right=0.98, top=0.92, bottom=0.06, wspace=0.12, hspace=0.12)
    draw_chart(below, found)
    below.subplots_adjust(left=0.25, right=0.97, top=0.86, bottom=0.1)
    return figure


if __name__ == "__main__":
    mpl.use("agg")
    assert set(SHOWN) <= set(SCHEMES)  # noqa: S101 - a script
    audits = [results.load(folder) for folder in sorted(FOLDER.iterdir())]
    draw(audits).savefig(PICTURE, metadata={"Software": None})
