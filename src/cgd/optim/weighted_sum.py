"""The sum of all members' gradients, weighted by their numbers of samples, without noise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cgd.errors import RangeError
from cgd.optim.displacement import locate_range_error
from cgd.optim.privacy_warnings import RiskMonitor

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from cgd.optim.step_input import StepInput
    from cgd.peers import Peers
    from cgd.secagg.journal_entry import Step


class WeightedSums:
    """Opens the gradient sums of an optimiser, and warns of what they disclose.

    Attributes:
        risk_monitor: the privacy warnings.
    """

    def __init__(self) -> None:
        self.risk_monitor = RiskMonitor()
        self._used_weights: dict[Peers, float] = {}  # of finished sums since a count or a restored state

    def forget_weight(self, peers: Peers) -> None:
        """Check the weight again in the next sum: it comes from a new count, or from one that may be forged."""
        self._used_weights[peers] = 0.0

    def open(
        self,
        peers: Peers,
        groups: Sequence[dict[str, Any]],
        parameters: Sequence[torch.Tensor],
        gradient: torch.Tensor,
        samples: int,
        weight: float,
        context: str,
        step: Step,
        epoch: int,
        step_input: StepInput,
    ) -> torch.Tensor:
        """Return the weighted sum of all members' gradients or updates as one vector.

        Raises:
            RangeError: a gradient is NaN, infinite or beyond the bound; the error names the parameter.
            RemoteProtocolError, WeightError, PeerTimeoutError: see `Peers.sum`.
        """
        self.risk_monitor.before_sum(peers, groups[0], samples, parameters, step_input.parts)
        new = self._used_weights.get(peers, weight) != weight  # a weight of our own `state_dict` was used before
        try:
            total = peers.sum(gradient, weight=weight, new_weight=new, context=context, step=step, epoch=epoch)
        except RangeError as error:
            raise locate_range_error(error, groups, parameters, step_input.what) from None
        self._used_weights[peers] = weight
        self.risk_monitor.after_sum(peers, groups[0], parameters, gradient, total)
        return total
