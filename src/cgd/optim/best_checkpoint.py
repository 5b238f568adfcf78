"""The best model so far, for early stopping; stored by all members, so that a restarted participant has it too.

Early stopping restores the model of an earlier step. The displacement of that step, which all members have in common,
is stored with the members like an optimiser's state (`recovery.py`): a participant that was killed, or has lost
everything except its key file, ends with the same model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import safetensors.torch
import torch

from cgd.errors import InputError
from cgd.optim.displacement import place
from cgd.optim.gradients import trainable

if TYPE_CHECKING:
    from cgd.optim.optimizer import ConfinedOptimizer
    from cgd.peers import Peers


class BestCheckpoint:
    """The displacement of one earlier step of an optimiser.

    Args:
        optimizer: the optimiser; create the checkpoint before its first step, at every member.

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
        ...             best.save(step + 1)
        ...     best.restore()
        ...     return best.steps, (model.weight - optimizer.state[model.weight]["origin"]).round().item()
        >>> with cgd.local_peers(3) as members:
        ...     members.run(train)[0]
        (2, -2.0)
    """

    def __init__(self, optimizer: ConfinedOptimizer) -> None:
        self.steps = 0
        """The number of steps after which the checkpoint was saved; 0 before the first `save`."""
        self._optimizer = optimizer
        self._groups: list[tuple[Peers, int, list[torch.Tensor]]] = [
            (peers, peers.next_slot(), trainable(*groups)) for peers, groups in optimizer.groups_by_peers()
        ]
        self._displacements: dict[torch.Tensor, torch.Tensor] = {}
        self._stored = [peers.recovery.load(slot) for peers, slot, _ in self._groups]

    def save(self, steps: int) -> None:
        """Save the current displacement, reached after `steps` steps, in place of the previous checkpoint.

        While a restarted participant skips steps that were taken before, its displacement is already the newest one.
        For such a step the checkpoint that the members have stored is used instead.
        """
        self.steps = steps
        for (peers, slot, parameters), stored in zip(self._groups, self._stored, strict=True):
            if stored is not None and stored.steps >= steps:
                if stored.steps == steps:
                    self._load(stored.content, parameters)
                continue
            displacements = [self._optimizer.state[each]["displacement"].clone() for each in parameters]
            self._displacements |= dict(zip(parameters, displacements, strict=True))
            peers.recovery.save(slot, steps, _to_bytes(displacements), fixed=True)

    @torch.no_grad()
    def restore(self) -> None:
        """Set the model to the checkpoint. The optimiser does not change: call it after the last step."""
        for parameter, displacement in self._displacements.items():
            place(parameter, self._optimizer.state[parameter]["origin"], displacement)

    def _load(self, content: bytes, parameters: list[torch.Tensor]) -> None:
        tensors = safetensors.torch.load(content)
        for number, parameter in enumerate(parameters):
            displacement = tensors.get(str(number))
            if displacement is None or displacement.shape != parameter.shape:
                raise InputError(
                    "the best checkpoint that the members have stored does not fit this model; build the model that "
                    "was trained before"
                )
            self._displacements[parameter] = displacement.to(parameter.device)


def _to_bytes(displacements: list[torch.Tensor]) -> bytes:
    return safetensors.torch.save({str(number): each.cpu().contiguous() for number, each in enumerate(displacements)})
