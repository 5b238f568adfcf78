"""Parts of run.json about the federation and the target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cgd.federation.config import Federation
    from cgd.tabular.training import TrainingResult


def federation_info(federation: Federation, participant: str) -> dict[str, Any]:
    """Return the part of run.json about the federation."""
    grid, cell = federation.grid, federation.participant(participant).cell
    return {
        "name": federation.name,
        "epoch": federation.epoch,
        "digest": federation.digest,
        "participants": list(federation.names),
        "grid": {"rows": grid.rows, "columns": grid.columns, "cell": list(cell)} if grid and cell else None,
        "hub": federation.hub is not None,
    }


def target_summary(trained: TrainingResult) -> dict[str, Any]:
    """Return the statistics of the target over all members' records."""
    target = trained.preprocessing.target
    if target.classes:
        return {"classes": dict(zip(target.classes, target.counts, strict=True))}
    return {"mean": target.mean, "deviation": target.deviation}
