"""Federated SGD: all participants hold the same model, which moves by the weighted sum of all gradients.

It is CGD with one common origin, so it is simulated by the same code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from cgd.simulation.baselines.settings import BaselineSettings
    from cgd.simulation.population import Mode
    from cgd.simulation.result import SimulationResult


def federated_sgd(
    settings: BaselineSettings, *, secure: bool = False, mode: Mode = "towers", accept: str = ""
) -> SimulationResult:
    """Train one common model on the data of all participants without moving the data.

    Args:
        settings: data, model and training settings.
        secure: sum gradients by secure aggregation, in the fixed point of the ring, so that a server sees the sum only;
            otherwise the server sees each participant's gradient.
        mode: "towers" or "joint" for grids with several columns, see `cgd.optim.vertical`.
        accept: `cgd.JOINT_REVEALS_RECORDS` if the mode is "joint", see `cgd.simulate`.

    Returns:
        The result of the simulation; all participants have the same model.
    """
    arithmetic: Literal["float", "ring"] = "ring" if secure else "float"
    # All participants have the same model, so evaluating one is enough.
    return settings.simulate(mode=mode, accept=accept, sample=1, arithmetic=arithmetic, common_origin=True)
