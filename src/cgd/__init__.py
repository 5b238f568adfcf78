"""Confined Gradient Descent: federated learning in which no participant shares its data or its model.

Every participant keeps a private model. Gradients are summed by secure aggregation: participants send masked gradients
and learn the sum only.

Names are imported on first use, so that `import cgd` and `cgd --help` are fast.
"""

from __future__ import annotations

from importlib import import_module
from threading import RLock
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from cgd.errors import BudgetSpentError as BudgetSpentError
    from cgd.errors import CGDError as CGDError
    from cgd.errors import ClosedError as ClosedError
    from cgd.errors import ClusterError as ClusterError
    from cgd.errors import DisagreementError as DisagreementError
    from cgd.errors import DivergenceError as DivergenceError
    from cgd.errors import FrameError as FrameError
    from cgd.errors import HubError as HubError
    from cgd.errors import InputError as InputError
    from cgd.errors import IntegrityError as IntegrityError
    from cgd.errors import LocalProtocolError as LocalProtocolError
    from cgd.errors import MembersChangedError as MembersChangedError
    from cgd.errors import MembershipError as MembershipError
    from cgd.errors import MissingExtraError as MissingExtraError
    from cgd.errors import PeerAbortedError as PeerAbortedError
    from cgd.errors import PeerLeftError as PeerLeftError
    from cgd.errors import PeerTimeoutError as PeerTimeoutError
    from cgd.errors import ProtocolError as ProtocolError
    from cgd.errors import RangeError as RangeError
    from cgd.errors import RemoteProtocolError as RemoteProtocolError
    from cgd.errors import RevealError as RevealError
    from cgd.errors import SettingsError as SettingsError
    from cgd.errors import TransportError as TransportError
    from cgd.errors import UnconfinedWarning as UnconfinedWarning
    from cgd.errors import WeightError as WeightError
    from cgd.federation.member import join as join
    from cgd.local import LocalPeers as LocalPeers
    from cgd.local import local_peers as local_peers
    from cgd.optim.adam import ConfinedAdam as ConfinedAdam
    from cgd.optim.grid import Block as Block
    from cgd.optim.grid import Cell as Cell
    from cgd.optim.grid import Grid as Grid
    from cgd.optim.lr_scheduler import InverseSquareLR as InverseSquareLR
    from cgd.optim.minibatches import BatchSampler as BatchSampler
    from cgd.optim.optimizer import ConfinedOptimizer as ConfinedOptimizer
    from cgd.optim.origin import Origin as Origin
    from cgd.optim.origin import confine as confine
    from cgd.optim.privacy import Privacy as Privacy
    from cgd.optim.public_start import public_seed as public_seed
    from cgd.optim.sgd import ConfinedSGD as ConfinedSGD
    from cgd.optim.skew import Skew as Skew
    from cgd.optim.torch_optimizer import ConfinedTorchOptimizer as ConfinedTorchOptimizer
    from cgd.optim.vertical import JOINT_REVEALS_RECORDS as JOINT_REVEALS_RECORDS
    from cgd.peers import Peers as Peers
    from cgd.secagg.fixed_point import FixedPoint as FixedPoint
    from cgd.secagg.masking import reconstruct as reconstruct
    from cgd.secagg.masking import split as split
    from cgd.simulation.local_training import LocalTraining as LocalTraining
    from cgd.simulation.module_engine import Ring as Ring
    from cgd.simulation.population import participant_seed as participant_seed
    from cgd.simulation.ray_cluster import RayCluster as RayCluster
    from cgd.simulation.ray_cluster import WorkerReport as WorkerReport
    from cgd.simulation.result import Evaluation as Evaluation
    from cgd.simulation.result import History as History
    from cgd.simulation.result import SimulationResult as SimulationResult
    from cgd.simulation.result import Spread as Spread
    from cgd.simulation.simulate import simulate as simulate
    from cgd.tabular.estimator import ConfinedClassifier as ConfinedClassifier
    from cgd.tabular.estimator import ConfinedRegressor as ConfinedRegressor
    from cgd.tabular.model import ConfinedModel as ConfinedModel
    from cgd.tabular.model import load_model as load_model
    from cgd.tabular.onnx_export import export_onnx as export_onnx

_NAMES = {
    "errors": (
        "BudgetSpentError",
        "CGDError",
        "ClosedError",
        "ClusterError",
        "DisagreementError",
        "DivergenceError",
        "FrameError",
        "HubError",
        "InputError",
        "IntegrityError",
        "LocalProtocolError",
        "MembersChangedError",
        "MembershipError",
        "MissingExtraError",
        "PeerAbortedError",
        "PeerLeftError",
        "PeerTimeoutError",
        "ProtocolError",
        "RangeError",
        "RemoteProtocolError",
        "RevealError",
        "SettingsError",
        "TransportError",
        "UnconfinedWarning",
        "WeightError",
    ),
    "federation.member": ("join",),
    "optim.origin": ("Origin", "confine"),
    "optim.grid": ("Block", "Cell", "Grid"),
    "optim.skew": ("Skew",),
    "optim.adam": ("ConfinedAdam",),
    "optim.optimizer": ("ConfinedOptimizer",),
    "optim.sgd": ("ConfinedSGD",),
    "optim.lr_scheduler": ("InverseSquareLR",),
    "optim.minibatches": ("BatchSampler",),
    "optim.privacy": ("Privacy",),
    "optim.public_start": ("public_seed",),
    "optim.torch_optimizer": ("ConfinedTorchOptimizer",),
    "optim.vertical": ("JOINT_REVEALS_RECORDS",),
    "local": ("LocalPeers", "local_peers"),
    "peers": ("Peers",),
    "tabular.estimator": ("ConfinedClassifier", "ConfinedRegressor"),
    "tabular.model": ("ConfinedModel", "load_model"),
    "tabular.onnx_export": ("export_onnx",),
    "secagg.fixed_point": ("FixedPoint",),
    "secagg.masking": ("reconstruct", "split"),
    "simulation.result": ("Evaluation", "History", "SimulationResult", "Spread"),
    "simulation.module_engine": ("Ring",),
    "simulation.local_training": ("LocalTraining",),
    "simulation.population": ("participant_seed",),
    "simulation.ray_cluster": ("RayCluster", "WorkerReport"),
    "simulation.simulate": ("simulate",),
}
_MODULE_OF = {name: f"cgd.{module}" for module, names in _NAMES.items() for name in names}

__all__ = ["__version__", *sorted(_MODULE_OF)]


_import_lock = RLock()  # threads that import modules of one package at the same time may see partially imported ones


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'cgd' has no attribute {name!r}")
    with _import_lock:
        value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
