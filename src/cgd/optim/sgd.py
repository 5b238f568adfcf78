"""Confined gradient descent, with optional momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from cgd.optim.displacement import SGDRule, check_lr, reject_weight_decay
from cgd.optim.optimizer import ConfinedOptimizer
from cgd.optim.option_checks import check_flag, check_number

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

    from cgd.optim.displacement import UpdateRule
    from cgd.optim.privacy import Privacy
    from cgd.peers import Peers


class ConfinedSGD(ConfinedOptimizer):
    """Confined gradient descent (paper, Alg. 1), with optional momentum.

    Args:
        params: parameters or parameter groups, as in torch.
        lr: α, the learning rate.
        peers: the members of the sum.
        samples: n_l, the number of this participant's samples; the other members learn only the total.
        momentum: the momentum factor.
        nesterov: True for Nesterov's momentum.
        max_norm: the largest norm of an opened sum, over all parameters that are summed with the same peers; a larger
            one is scaled down to it.
        weight_decay: rejected unless it is 0, because it reads the private weights.
        privacy: differential privacy of every record, see `cgd.Privacy`.
        delay: the number of steps after which the displacement moves by a sum, so that sums run while the program
            computes; see `cgd.optim.delayed_steps`. Loop over `steps`, or call `drain` after the last step.

    Examples:
        >>> import cgd, torch
        >>> def train(peers, x, y):
        ...     with cgd.public_seed(7):
        ...         model = torch.nn.Linear(1, 1, bias=False)
        ...     cgd.confine(model, delta=0.1)
        ...     optimizer = cgd.ConfinedSGD(model.parameters(), lr=0.5, peers=peers, samples=len(x))
        ...     for _ in range(30):
        ...         optimizer.zero_grad()
        ...         torch.nn.functional.mse_loss(model(x), y).backward()
        ...         optimizer.step()
        ...     return optimizer.displacement()
        >>> x = torch.tensor([[1.0], [-1.0]])
        >>> with cgd.local_peers(3) as members:
        ...     one, two, three = members.run(train, [x] * 3, [3 * x] * 3)
        >>> torch.equal(one, two) and torch.equal(two, three)
        True
    """

    LATER_OPTIONS: ClassVar[dict[str, Any]] = {"nesterov": False}

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        peers: Peers,
        samples: int,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        max_norm: float | None = None,
        privacy: Privacy | None = None,
        delay: int = 0,
    ) -> None:
        reject_weight_decay(weight_decay)
        options = {"lr": lr, "momentum": momentum, "nesterov": nesterov}
        super().__init__(params, options, peers=peers, samples=samples, privacy=privacy, max_norm=max_norm, delay=delay)

    def _rule(self, group: dict[str, Any]) -> UpdateRule:
        momentum, nesterov = check_number("momentum", group["momentum"]), check_flag("nesterov", group["nesterov"])
        return SGDRule(check_lr(group["lr"]), momentum, nesterov)
