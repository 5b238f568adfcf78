"""Local steps: a member trains its model for a while on its own records, and its *update* takes a gradient's place.

A *round* is one step of a confined optimiser. In it, each member starts from its own weights, origin + D, takes any
number of steps with an ordinary torch optimiser, and puts its weights back. The update is the difference of its weights
before and after: like a gradient, it points against the direction of descent. The updates are summed with the weights
n_l/n, and a rule moves D by their mean. With `ConfinedSGD(lr=1)` this is FedAvg, with momentum FedAvgM, and with
`ConfinedAdam` FedAdam (McMahan et al. 2017, Reddi et al. 2021), from private origins.

The local steps are a context and not a call after them, because the optimiser must know the weights at their beginning:
the first round's weights are the origin, and a restarted member is moved to the displacement of the others before it
trains.

What a program must do:

- **Create the local optimiser anew in every round.** Its momentum is private and not stored, so a restarted member
  could not repeat it.
- **Draw batches and dropout from `peers.seed` and the number of the round**, so that a round that is repeated after a
  restart has the same update.
- **Use local steps at all members in the same rounds.** Members compare this before they open anything. The number of
  local steps, their batches and their step size are each member's own choice.

- **Give all parameters that a local step moves to the confined optimiser.** Others are neither summed nor put back, and
  a restarted member does not have them, so its update would be another one: an error if they have a private origin.

A member that changes no weight enters a zero update, with a warning: with nothing left to learn this can be right, and
an error would stop all members. Buffers are not put back. `privacy=` is an error, because no bound per record is known
for updates; so is a `JointFirstLayer`, whose row sums in every forward pass. The towers of a grid work: each column
sums the updates of its first layer.

Examples:
    >>> import cgd, torch
    >>> def train(peers, x, y):
    ...     with cgd.public_seed(7):
    ...         model = torch.nn.Linear(1, 1, bias=False)
    ...     cgd.confine(model, delta=0.1)
    ...     optimizer = cgd.ConfinedSGD(model.parameters(), lr=1.0, peers=peers, samples=len(x))
    ...     for _ in optimizer.steps(5):
    ...         with optimizer.local_steps():
    ...             local = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    ...             for _ in range(4):
    ...                 local.zero_grad()
    ...                 torch.nn.functional.mse_loss(model(x), y).backward()
    ...                 local.step()
    ...     return optimizer.displacement()
    >>> x = torch.tensor([[1.0], [-1.0]])
    >>> with cgd.local_peers(3) as members:
    ...     one, two, three = members.run(train, [x] * 3, [3 * x] * 3)
    >>> torch.equal(one, two) and torch.equal(two, three)
    True
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from cgd.errors import InputError
from cgd.optim.displacement import trainable
from cgd.optim.flat_vectors import join, working_dtype
from cgd.optim.origin import warn_if_unconfined
from cgd.optim.program_checks import check_unwritten
from cgd.optim.sample_count import abort_on_error, abort_sums
from cgd.optim.vertical import is_joint

if TYPE_CHECKING:
    from types import TracebackType

    from cgd.optim.optimizer import ConfinedOptimizer


class LocalSteps:
    """The context of one round, which `ConfinedOptimizer.local_steps` returns.

    Attributes:
        updates: the update of each parameter, at the end of the block; None inside of it.
    """

    def __init__(self, optimizer: ConfinedOptimizer) -> None:
        self.updates: dict[torch.Tensor, torch.Tensor] | None = None
        self._optimizer = optimizer
        self._before: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def __enter__(self) -> None:
        optimizer = self._optimizer
        optimizer.step_input.failed = True  # until the step at the end of the block
        with abort_on_error(peers for peers, _ in optimizer.groups_by_peers()):
            parameters = trainable(*optimizer.param_groups)
            self._check(parameters)
            optimizer.check_mode()
            optimizer.step_input.check_outside_local_steps()
            optimizer.steps_taken()  # moves a restarted member to the newest displacement
            check_unwritten(optimizer.param_groups, optimizer.state)
            warn_if_unconfined([each for each in parameters if each not in optimizer.state], stacklevel=4)
        self._before = {parameter: parameter.detach().clone() for parameter in parameters}
        optimizer.step_input.local_steps = self

    @torch.no_grad()
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        optimizer = self._optimizer
        try:
            with abort_on_error(peers for peers, _ in optimizer.groups_by_peers()):
                try:
                    if error is None:
                        self.updates = self._take_updates()
                finally:
                    self._put_back()
            if error is None:
                optimizer.step()
            else:
                abort_sums(peers for peers, _ in optimizer.groups_by_peers())
        finally:
            optimizer.step_input.local_steps = None

    def _check(self, parameters: list[torch.Tensor]) -> None:
        if self._optimizer.privacy is not None:
            raise InputError(
                "the optimiser has privacy=, which bounds the gradient of each record; for updates of several local "
                "steps there is no such bound. Call step() with gradients, or train without privacy"
            )
        if any(is_joint(parameter) for parameter in parameters):
            raise InputError(
                "the model has a JointFirstLayer, whose row sums in every forward pass; local steps are taken alone. "
                "Call step() with gradients, or train towers"
            )

    def _take_updates(self) -> dict[torch.Tensor, torch.Tensor]:
        if set(trainable(*self._optimizer.param_groups)) != self._before.keys():
            raise InputError(
                "requires_grad of a parameter was changed inside local_steps(); change it between the rounds, at all "
                "members"
            )
        updates = {
            parameter: before.to(working_dtype(parameter)) - parameter.detach().to(working_dtype(parameter))
            for parameter, before in self._before.items()
        }
        if not join([update.any() for update in updates.values()]).any():
            warnings.warn(
                "no weight was changed inside local_steps(): this member takes part with a zero update. Is the local "
                "optimiser one of the parameters of this model?",
                stacklevel=4,
            )
        return updates

    def _put_back(self) -> None:
        for parameter, before in self._before.items():
            parameter.copy_(before)
            parameter.grad = None  # of the last local step
        self._before = {}
