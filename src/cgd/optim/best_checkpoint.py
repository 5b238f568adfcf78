"""The best model so far, kept while the training goes on: by the members together, so that nobody can lose it.

Early stopping wants the model of an earlier step back. What all members have in common of it, the displacement of that
step, is left with them as an optimiser's state is (`recovery.py`): a participant that was killed, or has lost all but
its key file, ends up with the same model as if nothing had happened.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import safetensors.torch
import torch

from cgd.errors import InputError
from cgd.optim.gradients import trainable

if TYPE_CHECKING:
    from cgd.optim.optimizer import ConfinedOptimizer
    from cgd.peers import Peers


class BestCheckpoint:
    """One earlier displacement of an optimiser, by the number of steps after which it was reached.

    Args:
        optimizer: whose displacement; make the keepsake before its first step, at every member.

    Examples:
        >>> import cgd, torch
        >>> from cgd.optim.best_checkpoint import BestCheckpoint
        >>> def train(peers):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     cgd.confine(model)
        ...     optimizer = cgd.ConfinedSGD(model.parameters(), lr=1.0, peers=peers, samples=1)
        ...     best = BestCheckpoint(optimizer)
        ...     for step in range(3):
        ...         optimizer.zero_grad()
        ...         model.weight.sum().backward()
        ...         optimizer.step()
        ...         if step == 1:
        ...             best.keep(step + 1)
        ...     best.restore()
        ...     return best.steps, (model.weight - optimizer.state[model.weight]["origin"]).round().item()
        >>> with cgd.local_peers(3) as colony:
        ...     colony.run(train)[0]
        (2, -2.0)
    """

    def __init__(self, optimizer: ConfinedOptimizer) -> None:
        self.steps = 0
        """After how many steps it was kept; 0 if nothing was."""
        self._optimizer = optimizer
        self._groups: list[tuple[Peers, int, list[torch.Tensor]]] = []
        for peers, groups in optimizer.groups_by_peers():
            parameters = [parameter for group in groups for parameter in trainable(group)]
            self._groups.append((peers, peers.next_slot(), parameters))
        self._kept: dict[torch.Tensor, torch.Tensor] = {}
        self._remembered = [peers.memory.recall(slot) for peers, slot, _ in self._groups]

    def keep(self, steps: int) -> None:
        """Keep the present displacement, which was reached after so many steps, in place of the one before.

        Who comes back passes over steps that were taken, with the newest displacement in place. What the members
        remember of such a step is what counts then.
        """
        self.steps = steps
        for place, (peers, slot, parameters) in enumerate(self._groups):
            remembered = self._remembered[place]
            if remembered is not None and remembered.steps >= steps:
                if remembered.steps == steps:
                    self._take(remembered.content(), parameters)
                continue
            displacements = [self._optimizer.state[each]["displacement"].clone() for each in parameters]
            self._kept |= dict(zip(parameters, displacements, strict=True))
            peers.memory.remember(slot, steps, partial(_content, displacements), fixed=True)

    @torch.no_grad()
    def restore(self) -> None:
        """Put the model that was kept in place. The optimiser is not touched: this is for after its last step."""
        for parameter, displacement in self._kept.items():
            parameter.copy_(self._optimizer.state[parameter]["origin"] + displacement)

    def _take(self, content: bytes, parameters: list[torch.Tensor]) -> None:
        tensors = safetensors.torch.load(content)
        for place, parameter in enumerate(parameters):
            displacement = tensors.get(str(place))
            if displacement is None or displacement.shape != parameter.shape:
                raise InputError(
                    "what the members remember of the best step does not fit this model; build the same one"
                )
            self._kept[parameter] = displacement.to(parameter.device)


def _content(displacements: list[torch.Tensor]) -> bytes:
    return safetensors.torch.save({str(place): each.cpu().contiguous() for place, each in enumerate(displacements)})
