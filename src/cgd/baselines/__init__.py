"""Layer 6, what CGD is compared with: plain functions on the same data, models and measures."""

from cgd.baselines.federated import federated_sgd
from cgd.baselines.plain import centralised, local
from cgd.baselines.private import PrivatelyTrained, dp_sgd
from cgd.baselines.setting import Setting, Trained

__all__ = ["PrivatelyTrained", "Setting", "Trained", "centralised", "dp_sgd", "federated_sgd", "local"]
