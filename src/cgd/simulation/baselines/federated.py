"""Federated SGD: everybody holds the same model, and the model moves by the weighted sum of all gradients.

In our terms it is a colony whose members have one common origin, so it is simulated by the same code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from cgd.simulation.baselines.setting import BaselineSettings
    from cgd.simulation.colony import SimulationResult
    from cgd.simulation.population import Mode


def federated_sgd(
    setting: BaselineSettings, *, secure: bool = False, mode: Mode = "towers", accept: str = ""
) -> SimulationResult:
    """Train one common model on everybody's data without moving the data.

    Args:
        setting: what to train.
        secure: whether gradients are summed by secret sharing, so that a server sees the sum only. Then they go through
            the fixed point of the ring; without it, the server sees everybody's own gradient.
        mode: how the members of a row go together, if there are several columns.
        accept: what `joint` needs, see `cgd.simulate`.

    Returns:
        A colony whose members all have the same model.
    """
    arithmetic: Literal["float", "ring"] = "ring" if secure else "float"
    # All have the same model, so one says it for all.
    return setting.colony(mode=mode, accept=accept, sample=1, arithmetic=arithmetic, common_origin=True)
