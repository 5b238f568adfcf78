"""Adam on opened sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from cgd.optim.displacement import AdamRule, check_betas, check_lr, reject_weight_decay
from cgd.optim.optimizer import ConfinedOptimizer
from cgd.optim.option_checks import check_flag, check_number

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

    from cgd.optim.displacement import UpdateRule
    from cgd.optim.privacy import Privacy
    from cgd.peers import Peers


class ConfinedAdam(ConfinedOptimizer):
    """Adam on the opened sums: every member receives the same sums, so every member takes the same step.

    Args:
        params: parameters or parameter groups, as in torch.
        lr: the learning rate.
        peers: the members of the sum.
        samples: n_l, the number of this participant's samples; the other members learn only the total.
        betas: the decay rates of the two moments.
        eps: added to the denominator. Gradients below the resolution of the sum (`Peers.resolution`) count as zero; for
            gradients that small, use peers with ring_bits=64.
        amsgrad: True for AMSGrad, which divides by the largest second moment so far.
        max_norm: the largest norm of an opened sum, over all parameters that are summed with the same peers; a larger
            one is scaled down to it.
        weight_decay: rejected unless it is 0, because it reads the private weights.
        privacy: differential privacy of every record, see `cgd.Privacy`.
        delay: the number of steps after which the displacement moves by a sum, so that sums run while the program
            computes; see `cgd.optim.delayed_steps`. Loop over `steps`, or call `drain` after the last step.
    """

    LATER_OPTIONS: ClassVar[dict[str, Any]] = {"amsgrad": False}

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        peers: Peers,
        samples: int,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        amsgrad: bool = False,
        weight_decay: float = 0.0,
        max_norm: float | None = None,
        privacy: Privacy | None = None,
        delay: int = 0,
    ) -> None:
        reject_weight_decay(weight_decay)
        options = {"lr": lr, "betas": betas, "eps": eps, "amsgrad": amsgrad}
        super().__init__(params, options, peers=peers, samples=samples, privacy=privacy, max_norm=max_norm, delay=delay)

    def _rule(self, group: dict[str, Any]) -> UpdateRule:
        options = check_lr(group["lr"]), check_betas(group["betas"]), check_number("eps", group["eps"])
        return AdamRule(*options, amsgrad=check_flag("amsgrad", group["amsgrad"]))
