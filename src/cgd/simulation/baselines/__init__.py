"""Baselines for CGD, with the same data, models and metrics: centralised, local, federated and private training."""

from cgd.simulation.baselines.dp_sgd import DPSGDResult, dp_sgd
from cgd.simulation.baselines.plain import centralised, federated_averaging, federated_sgd, local
from cgd.simulation.baselines.private import private_centralised
from cgd.simulation.baselines.settings import BaselineResult, BaselineSettings

__all__ = [
    "BaselineResult",
    "BaselineSettings",
    "DPSGDResult",
    "centralised",
    "dp_sgd",
    "federated_averaging",
    "federated_sgd",
    "local",
    "private_centralised",
]
