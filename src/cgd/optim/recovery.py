"""Save an optimiser's state after every step, and restore it in a restarted process.

The state is what all members have in common: the displacement, the update rule's buffers (momentum), and how the
samples were counted. The private origin is not part of it: a participant draws that again from its seed.

A participant that has lost its own copy gets the state from the others, who may be dishonest. So its content is
checked: only the names, shapes and types that an update rule stores are accepted, and never an origin.

Early stopping restores the model of an earlier step. `BestCheckpoint` stores the displacement of that step with the
members, like an optimiser's state: a participant that was killed, or has lost everything except its key file, ends with
the same model.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch

from cgd.errors import InputError
from cgd.optim.displacement import PRIVATE_STATES, RULE_STATES, place, trainable
from cgd.optim.flat_vectors import common_states_on_cpu, working_dtype
from cgd.optim.saved_state import to_device
from cgd.secagg.journal_entry import Step

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cgd.optim.optimizer import ConfinedOptimizer
    from cgd.peers import Peers
    from cgd.secagg.journal import OptimizerState

    Layout = Mapping[str, tuple[torch.dtype, torch.Size]]


_COUNTS, _DIGESTS = "counts", "digests"
_DIGEST_BYTES = 32
MAX_REASON_CHARACTERS = 200  # it may quote names of the file
MIN_COUNTS = 3  # the total, the epoch, and a commitment of each member


class OptimizerRecovery:
    """One optimiser's use of the recovery stores of its peers."""

    def __init__(self) -> None:
        self._slots: dict[Peers, int] = {}
        self._saved_steps: dict[Peers, int] = {}
        self._writers: dict[Peers, TensorWriter] = {}

    def register(self, peers: Peers) -> None:
        """Reserve a slot for this optimiser with these peers."""
        if peers not in self._slots:
            self._slots[peers] = peers.next_slot()
            self._writers[peers] = TensorWriter()

    def step_id(self, peers: Peers, number: int) -> Step:
        """Return the identifier of a step of this optimiser."""
        return Step(self._slots[peers], number)

    def is_loaded(self, peers: Peers) -> bool:
        """Return whether `load` was called for these peers."""
        return peers in self._saved_steps

    def load(self, peers: Peers) -> OptimizerState | None:
        """Return the state that the members have stored, if any."""
        state = peers.recovery.load(self._slots[peers])
        self._saved_steps[peers] = 0 if state is None else state.steps
        return state

    def is_overtaken(self, peers: Peers, number: int) -> bool:
        """Return whether the other members have taken this step without this one, which was absent."""
        return peers.recovery.is_overtaken(self._slots[peers], number)

    def has_taken(self, peers: Peers, number: int) -> bool:
        """Return whether a step is part of the loaded state: an earlier process of this participant took it."""
        return number < self._saved_steps[peers]

    def steps_taken(self) -> int:
        """Return the number of steps that are part of the loaded states of all groups."""
        return min(self._saved_steps.values(), default=0)

    def any_has_taken(self, number: int) -> bool:
        """Return whether a step is part of the loaded state of any group."""
        return any(number < steps for steps in self._saved_steps.values())

    def skip(self, peers: Peers, steps: int) -> None:
        """Skip the sums of the first `steps` steps."""
        peers.recovery.skip(self._slots[peers], steps)

    def save(
        self, peers: Peers, groups: Sequence[dict[str, Any]], state: Mapping[torch.Tensor, dict[str, Any]]
    ) -> None:
        """Store the state after a step, unless it is part of the loaded state."""
        if (steps := groups[0]["steps"]) and peers.recovery.keeps_states and not self.has_taken(peers, steps - 1):
            self.put(peers, steps, self.content(peers, groups, state))

    def content(
        self,
        peers: Peers,
        groups: Sequence[dict[str, Any]],
        state: Mapping[torch.Tensor, dict[str, Any]],
        digests: Sequence[bytes] = (),
    ) -> bytes:
        """Return the present state as bytes; with a delay, with digests of states before it."""
        parameters = trainable(*groups)
        counted = [groups[0]["total_samples"], groups[0]["epoch"], *groups[0]["pledges"]]
        tensors = common_state(parameters, common_states_on_cpu(parameters, state), counted)
        if digests:
            tensors[_DIGESTS] = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8).view(len(digests), -1)
        return self._writers[peers].to_bytes(tensors)

    def put(self, peers: Peers, steps: int, content: bytes) -> None:
        """Store a state that includes the sums of the first `steps` steps."""
        peers.recovery.save(self._slots[peers], steps, content)


class TensorWriter:
    """Serialises the same set of tensors again and again, with the bytes of `safetensors.torch.save`.

    The header depends on names, types and shapes only, so it is made once. That leaves one copy of the tensors, half
    of what `safetensors.torch.save` takes for large ones (`make bench`).

    Examples:
        >>> import safetensors.torch, torch
        >>> tensors = {"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.int64)}
        >>> TensorWriter().to_bytes(tensors) == safetensors.torch.save(tensors)
        True
    """

    def __init__(self) -> None:
        self._layout: list[tuple[str, torch.dtype, torch.Size]] = []
        self._header = b""
        self._order: list[str] = []

    def to_bytes(self, tensors: Mapping[str, torch.Tensor]) -> bytes:
        """Return the tensors in the safetensors format."""
        layout = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
        if layout != self._layout:
            self._make_header(tensors)
            self._layout = layout
        contents = (tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8) for name in self._order)
        return b"".join((self._header, *(content.numpy().data for content in contents)))

    def _make_header(self, tensors: Mapping[str, torch.Tensor]) -> None:
        # Zeros instead of the tensors: safetensors rejects tensors that are not contiguous or share memory.
        sample = safetensors.torch.save(
            {name: torch.zeros(each.shape, dtype=each.dtype) for name, each in tensors.items()}
        )
        (length,) = struct.unpack_from("<Q", sample)
        self._header = sample[: 8 + length]
        offsets = {name: entry["data_offsets"] for name, entry in json.loads(self._header[8:]).items()}
        self._order = sorted(offsets, key=lambda name: offsets[name])


def common_state(
    parameters: Sequence[torch.Tensor], state: Mapping[torch.Tensor, dict[str, Any]], counted: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Return the part of these parameters' state that is the same at every member."""
    tensors = {_COUNTS: torch.tensor(counted, dtype=torch.int64)}
    for index, parameter in enumerate(parameters):
        for key, value in state[parameter].items():
            if key not in PRIVATE_STATES:
                tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
                tensors[f"{index}.{key}"] = tensor
    return tensors


def restore(
    content: bytes,
    parameters: Sequence[torch.Tensor],
    state: Mapping[torch.Tensor, dict[str, Any]],
    layouts: Sequence[Layout | None] = (),
) -> dict[str, Any]:
    """Write a stored state into `state`, beside the origins; return how the samples were counted.

    `layouts` has the types and shapes of what the update rule of each parameter stores; None, also for all parameters,
    if it is one of `RULE_STATES`.

    Raises:
        InputError: it is not the state of an optimiser over these parameters.
    """
    tensors = _load_tensors(content)
    counts = tensors.pop(_COUNTS, torch.empty(0))
    tensors.pop(_DIGESTS, None)  # see `read_digests`
    by_index: dict[str, dict[str, torch.Tensor]] = {str(index): {} for index in range(len(parameters))}
    for name, tensor in tensors.items():
        index, _, key = name.partition(".")
        if index not in by_index and index.isdecimal() and key == "displacement":
            raise _other_layers(f"{name[:MAX_REASON_CHARACTERS]!r} belongs to no parameter of this optimiser")
        if index not in by_index:
            raise _not_a_state(f"{name!r} belongs to no parameter")
        by_index[index][key] = tensor
    found = list(by_index.values())
    if counts.dtype != torch.int64 or counts.dim() != 1 or len(counts) < MIN_COUNTS:
        raise _not_a_state("the count of the samples is missing or malformed")
    if not all("displacement" in each for each in found):
        if not any("displacement" in each for each in found):
            raise _not_a_state("a displacement is missing")
        raise _other_layers(f"a displacement is missing for one of the {len(found)} parameters of this optimiser")
    shapes = [tuple(each["displacement"].shape) for each in found]
    ours = [tuple(each.shape) for each in parameters]
    if shapes != ours:
        raise InputError(
            f"the members train parameters of shapes {shapes} and this model has {ours}; build the model that was "
            "trained before, with the same layers frozen as in the last step"
        )
    layouts = layouts or [None] * len(parameters)
    for parameter, each, layout in zip(parameters, found, layouts, strict=True):
        _check_layout(parameter, each, layout)
    for parameter, each, layout in zip(parameters, found, layouts, strict=True):
        for key, tensor in each.items():
            is_powers = key == "powers" and layout is None
            state[parameter][key] = tuple(tensor.tolist()) if is_powers else to_device(key, tensor, parameter.device)
    total_samples, epoch, *commitments = counts.tolist()
    return {"total_samples": total_samples, "epoch": epoch, "pledges": commitments}


def read_digests(content: bytes, delay: int) -> list[bytes]:
    """Return the digests in a stored state: of the states before the steps whose sums it does not include.

    Raises:
        InputError: there are more than the delay of the training allows, or they are malformed.
    """
    digests = _load_tensors(content).get(_DIGESTS, torch.zeros(0, _DIGEST_BYTES, dtype=torch.uint8))
    if digests.dtype != torch.uint8 or digests.dim() != 2 or digests.shape[1] != _DIGEST_BYTES:
        raise _not_a_state("the digests of earlier states are malformed")
    if len(digests) > delay:
        raise InputError(
            f"the members' stored state is of a training with a delay of at least {len(digests)}, and delay is "
            f"{delay}; continue with the delay that the training was begun with"
        )
    return [bytes(each.tolist()) for each in digests]


def _check_layout(parameter: torch.Tensor, stored: Mapping[str, torch.Tensor], layout: Layout | None) -> None:
    """Check the names, shapes and types of one parameter's stored tensors."""
    if layout is not None:
        expected = {"displacement": (working_dtype(parameter), parameter.shape), **layout}
        if {key: (tensor.dtype, tensor.shape) for key, tensor in stored.items()} != expected:
            raise _not_a_state(f"it stores {', '.join(sorted(map(repr, stored)))} of other names, types or shapes")
        return
    if stored.keys() - {"displacement"} not in RULE_STATES:  # an origin, above all, is not accepted
        raise _not_a_state(f"no update rule stores {', '.join(sorted(map(repr, stored)))}")
    for key, tensor in stored.items():
        if key == "powers":
            fits = (
                tensor.dtype == torch.float64 and tensor.shape == (2,) and bool(((tensor >= 0) & (tensor <= 1)).all())
            )
        else:
            fits = tensor.dtype == working_dtype(parameter) and tensor.shape == parameter.shape
        if not fits:
            raise _not_a_state(f"{key} has the type {tensor.dtype}, the shape {tuple(tensor.shape)}, or wrong values")


def _load_tensors(content: bytes) -> dict[str, torch.Tensor]:
    try:
        return safetensors.torch.load(content)
    except (safetensors.SafetensorError, KeyError, ValueError, RuntimeError) as error:  # or a type torch does not have
        raise _not_a_state(str(error)) from None


def _not_a_state(reason: str) -> InputError:
    return InputError(
        f"the members' stored state is not the state of an optimiser: {reason[:MAX_REASON_CHARACTERS]}; "
        "restore a state folder of this training, or start a new one"
    )


def _other_layers(fact: str) -> InputError:
    return InputError(
        f"the members' stored state is that of other layers: {fact}. Either this is another model, or the layers that "
        "train have changed since the optimiser was built (requires_grad, add_param_group), and a restarted program "
        "begins with those of its first step. Build the model that was trained before, with an optimiser of all layers "
        "that train at any time, from the beginning, and freeze none of them in between"
    )


class BestCheckpoint:
    """The displacement of one earlier step of an optimiser.

    Args:
        optimizer: the optimiser; create the checkpoint before its first step, at every member.

    Examples:
        >>> import cgd, torch
        >>> from cgd.optim.recovery import BestCheckpoint
        >>> def train(peers):
        ...     with cgd.public_seed(7):
        ...         model = torch.nn.Linear(1, 1, bias=False)
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

    def save(self, steps: int) -> None:
        """Save the current displacement, reached after `steps` steps, in place of the previous checkpoint.

        While a restarted participant skips steps that were taken before, its displacement is already the newest one.
        For such a step the checkpoint that the members have stored is used instead.
        """
        self.steps = steps
        for peers, slot, parameters in self._groups:
            stored = peers.recovery.load(slot)
            if stored is not None and stored.steps >= steps:
                if stored.steps == steps:
                    self._load(stored.content, parameters)
                continue
            peers.queue.wait()  # members compare the checkpoint before every sum
            displacements = [self._displacement(each) for each in parameters]
            self._displacements |= dict(zip(parameters, displacements, strict=True))
            peers.recovery.save(slot, steps, _to_bytes(displacements), fixed=True)

    @torch.no_grad()
    def restore(self) -> None:
        """Set the model to the checkpoint. The optimiser does not change: call it after the last step.

        With fresh origins, the optimiser is in evaluation mode afterwards.
        """
        self._optimizer.eval()
        for parameter, displacement in self._displacements.items():
            place(parameter, self._optimizer.state[parameter]["origin"], displacement)

    def displacement_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the displacement of a parameter in the checkpoint; before the first `save`, the present one."""
        found = self._displacements.get(parameter)
        state: torch.Tensor = self._optimizer.state[parameter]["displacement"]
        return state if found is None else found

    def _displacement(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a copy of the present displacement; with a delay, the first steps have not moved yet."""
        if (state := self._optimizer.state.get(parameter)) is None:
            return torch.zeros_like(parameter, dtype=working_dtype(parameter), requires_grad=False)
        displacement: torch.Tensor = state["displacement"]
        return displacement.clone()

    def _load(self, content: bytes, parameters: list[torch.Tensor]) -> None:
        tensors = _load_tensors(content)
        for number, parameter in enumerate(parameters):
            displacement = tensors.get(str(number))
            expected = parameter.shape, working_dtype(parameter)
            if displacement is None or (displacement.shape, displacement.dtype) != expected:
                raise InputError(
                    "the best checkpoint that the members have stored does not fit this model; build the model that "
                    "was trained before"
                )
            self._displacements[parameter] = displacement.to(parameter.device)


def _to_bytes(displacements: list[torch.Tensor]) -> bytes:
    return safetensors.torch.save({str(number): each.cpu().contiguous() for number, each in enumerate(displacements)})
