"""What an optimiser leaves with the members after every step, so that one that comes back can go on.

It is what all members have anyway: the displacement, what the rule remembers (momentum), and how n was counted. The
private origin is not in it: a participant draws that again from its seed.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch

from cgd.errors import InputError
from cgd.optim.gradients import trainable
from cgd.secagg.journal import Step

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from cgd.peers import Peers
    from cgd.secagg.journal import OptimizerState

_COUNTS = "counts"


class Memory:
    """One optimiser's dealings with what its peers remember."""

    def __init__(self) -> None:
        self._slots: dict[Peers, int] = {}
        self._remembered: dict[Peers, int] = {}

    def add(self, peers: Peers) -> None:
        """The optimiser sums with these peers."""
        if peers not in self._slots:
            self._slots[peers] = peers.next_slot()

    def step(self, peers: Peers, number: int) -> Step:
        """How the peers know a step of this optimiser."""
        return Step(self._slots[peers], number)

    def asked(self, peers: Peers) -> bool:
        """Whether the peers were asked what they remember."""
        return peers in self._remembered

    def recall(self, peers: Peers) -> OptimizerState | None:
        """Ask them."""
        state = peers.memory.recall(self._slots[peers])
        self._remembered[peers] = 0 if state is None else state.steps
        return state

    def remembers(self, peers: Peers, number: int) -> bool:
        """Whether a step was taken already, in an earlier life of this program."""
        return number < self._remembered[peers]

    def taken(self) -> int:
        """How many steps all of the optimiser's peers remember."""
        return min(self._remembered.values(), default=0)

    def taken_with_others(self, number: int) -> bool:
        """Whether any of the optimiser's peers remember this step."""
        return any(number < steps for steps in self._remembered.values())

    def skip(self, peers: Peers, steps: int) -> None:
        """Do without the sums of the first `steps` steps."""
        peers.memory.skip(self._slots[peers], steps)

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Held while the optimiser's state changes."""
        with ExitStack() as held:
            for peers in self._slots:
                held.enter_context(peers.memory.moving())
            yield

    def leave(
        self, peers: Peers, groups: Sequence[dict[str, Any]], state: Mapping[torch.Tensor, dict[str, Any]]
    ) -> None:
        """Leave the state after a step with the peers, if it is news to them; its bytes are made when one asks."""
        steps = groups[0]["steps"]
        if self.remembers(peers, steps - 1):
            return
        parameters = [parameter for group in groups for parameter in trainable(group)]
        counted = [groups[0]["total_samples"], groups[0]["epoch"], *groups[0]["pledges"]]
        peers.memory.remember(self._slots[peers], steps, partial(common_state, parameters, state, counted))


def common_state(
    parameters: Sequence[torch.Tensor], state: Mapping[torch.Tensor, dict[str, Any]], counted: Sequence[int]
) -> bytes:
    """The state of these parameters that is the same at every member."""
    tensors = {_COUNTS: torch.tensor(counted, dtype=torch.int64)}
    for place, parameter in enumerate(parameters):
        for key, value in state[parameter].items():
            if key != "origin":
                tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
                tensors[f"{place}.{key}"] = tensor.detach().cpu().contiguous()
    return safetensors.torch.save(tensors)


def restore(
    content: bytes, parameters: Sequence[torch.Tensor], state: Mapping[torch.Tensor, dict[str, Any]]
) -> dict[str, Any]:
    """Put a common state into place, beside the origins; returns what a parameter group keeps of the count.

    Raises:
        InputError: it is not the state of an optimiser over these parameters.
    """
    try:
        tensors = safetensors.torch.load(content)
        total_samples, epoch, *pledges = tensors.pop(_COUNTS).tolist()
        found: list[dict[str, Any]] = [{} for _ in parameters]
        for name, tensor in tensors.items():
            place, key = name.split(".", 1)
            found[int(place)][key] = tensor
        shapes = [(tuple(each["displacement"].shape), each["displacement"].dtype) for each in found]
    except (safetensors.SafetensorError, KeyError, IndexError, ValueError) as error:
        raise InputError(f"what the members remember is not the state of an optimiser: {error}") from None
    ours = [(tuple(state[each]["origin"].shape), state[each]["origin"].dtype) for each in parameters]
    if shapes != ours:
        raise InputError(
            f"the members train parameters of shapes {[shape for shape, _ in shapes]} and this model has "
            f"{[shape for shape, _ in ours]}; build the model that was trained before"
        )
    for parameter, each in zip(parameters, found, strict=True):
        for key, tensor in each.items():
            tuple_like = tensor.dtype == torch.float64 and key == "powers"
            state[parameter][key] = tuple(tensor.tolist()) if tuple_like else tensor.to(parameter.device)
    return {"total_samples": total_samples, "epoch": epoch, "pledges": pledges}
