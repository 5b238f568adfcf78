"""What CGD is compared with: plain functions on the same data, models and measures."""

from cgd.simulation.baselines.dp_sgd import PrivatelyTrained, dp_sgd
from cgd.simulation.baselines.federated import federated_sgd
from cgd.simulation.baselines.plain import centralised, local
from cgd.simulation.baselines.setting import BaselineResult, BaselineSettings

__all__ = ["BaselineResult", "BaselineSettings", "PrivatelyTrained", "centralised", "dp_sgd", "federated_sgd", "local"]
