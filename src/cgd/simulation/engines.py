"""The choice of an engine: compiled kernels where they apply, otherwise torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from cgd.errors import InputError
from cgd.simulation.module_engine import ModuleEngine
from cgd.simulation.private_engine import PrivateEngine

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from cgd.dp.settings import PrivacySettings
    from cgd.simulation.local_training import Work
    from cgd.simulation.module_engine import Ring
    from cgd.simulation.population import Loss, Participants
    from cgd.simulation.ray_cluster import RayCluster, WorkerReport

ONLY_KERNELS = (
    "whose workers compute with compiled kernels only (docs/simulation.md lists what they need); leave Ray out"
)


class Engine(Protocol):
    """Computes the gradient sums of all participants."""

    name: str

    @property
    def workers(self) -> tuple[WorkerReport, ...]:
        """The reports of the cluster's workers after the last step; none without a cluster."""

    @property
    def summation_order(self) -> str:
        """The order in which gradients are added; the last bits depend on it, so a checkpoint records it."""

    def running(self) -> AbstractContextManager[object]:
        """Return the context in which sums can be computed: on a cluster, that of its workers."""

    def gradient_sum(self, displacement: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Return the gradient of Σ_l (n_l/n)·F_l(origin_l + D) with respect to D, and the value of that sum.

        With batches the gradient is an estimate; with a local training the sum of updates takes its place.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a step changes besides the displacement."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""


def choose_engine(
    participants: Participants,
    loss: Loss,
    ring: Ring | None,
    memory: float,
    *,
    work: Work,
    privacy: PrivacySettings | None,
    kernels: bool,
    cluster: RayCluster | None = None,
) -> Engine:
    """Return the engine of a simulation.

    Args:
        participants: simulated participants.
        loss: loss function of outputs and labels, a mean over the samples.
        ring: fixed-point settings of the sums; None for plain floats.
        memory: most bytes for origins in memory.
        work: the records that are used in each step, and the local training.
        privacy: settings of the mechanism, if the records are to be private.
        kernels: use compiled kernels, if they can compute this.
        cluster: Ray cluster that computes; None to compute in this process.

    Raises:
        InputError: there is a cluster, and compiled kernels cannot compute this.
    """
    if cluster is not None and (privacy is not None or ring is not None):
        what = "privacy is given" if privacy is not None else "the arithmetic is 'ring'"
        raise InputError(f"{what} and the engine is Ray, {ONLY_KERNELS}")
    if privacy is not None:
        return PrivateEngine(participants, loss, ring, memory, privacy)
    on_cpu = participants.device.type == "cpu"
    if ring is None and kernels and on_cpu and (work.is_full_gradient or participants.grid.columns == 1):
        from cgd.simulation.batch_engine import BatchEngine
        from cgd.simulation.fused_engine import FusedEngine, Network, kernel_loss

        network, loss_kind = Network.from_model(participants.models[0]), kernel_loss(loss)
        if network is not None and loss_kind is not None and next(iter(participants.blocks.values())).x.ndim == 2:
            if work.is_full_gradient:
                return FusedEngine(participants, network, loss_kind, memory, cluster)
            return BatchEngine(participants, network, loss_kind, memory, work, cluster)
    if cluster is not None:
        raise InputError(f"this model, loss or grid needs the engine 'modules', and the engine is Ray, {ONLY_KERNELS}")
    return ModuleEngine(participants, loss, ring, memory, work)
