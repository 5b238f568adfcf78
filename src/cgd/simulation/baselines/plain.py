"""Ordinary training in one place: on everybody's data (centralised), or on one participant's (local)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cgd.optim.grid import Cell
from cgd.simulation.baselines.setting import BaselineResult, Learner, descend
from cgd.simulation.population import sample_of

if TYPE_CHECKING:
    from cgd.simulation.baselines.setting import BaselineSettings


def centralised(setting: BaselineSettings) -> BaselineResult:
    """Train one model on all samples with all features, the baseline of every comparison."""
    return descend(setting, {"centralised": Learner(setting.origin(), *setting.pooled())})


def local(setting: BaselineSettings, sample: int | None = None) -> BaselineResult:
    """Train participants' models on their own data alone, from the origins they have in CGD.

    Args:
        setting: what to train.
        sample: how many participants, drawn at random; all of them by default.
    """
    participants = setting.participants()
    cells = list(participants.grid.cells)
    if sample is not None:
        cells = sample_of(cells, sample, setting.seed)
    nowhere = torch.zeros(participants.layout.size, dtype=participants.dtype)
    learners = {}
    for cell in cells:
        end = sum(participants.blocks[Cell(0, column)].x.shape[1] for column in range(cell.column + 1))
        width = participants.blocks[cell].x.shape[1]
        features = slice(end - width, end) if participants.grid.columns > 1 else None
        learners[str(cell)] = Learner(participants.model(cell, nowhere), *participants.data(cell), features)
    return descend(setting, learners)
