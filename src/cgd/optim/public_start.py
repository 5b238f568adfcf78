"""The public start of a confined model: weights that all members have in common, below each member's private origin.

A confined model is start + origin + displacement. All members build the same start: inside `public_seed`, with the
same seed and the same program, or from the same pretrained weights. Before they share anything, they compare a digest
of it, so a member that has another start, for example a model that it trained alone, is stopped at its first step. They
also compare a digest of what is not trained: frozen parameters, and buffers that a saved model contains.
"""

from __future__ import annotations

import hashlib
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    Start = Literal["model", "zeros"]

ZEROS = "zeros"
STARTS = ("model", ZEROS)
CONFINED = "_cgd_confined"
"""The attribute of a parameter with a private origin: the digest of its start; see `mark_confined`."""
DIGEST_BYTES = 32
_WRITTEN = "_cgd_written"
"""The attribute of a parameter that `cgd.confine` has written, until its first step; see `remember_written`."""
_NARROWER = (torch.float32, torch.float16, torch.bfloat16)
"""Types that a program may convert a confined model to, with a loss of digits."""


SHARDED = (
    "{} is divided among the ranks of a job (a DTensor, or FSDP): each rank would have another part of the model, and "
    "origins, digests and sums are of whole models. Use DistributedDataParallel, or no wrapper at all"
)


def is_sharded(parameter: object) -> bool:
    """Return whether a parameter is divided among several processes: by `fully_shard`, FSDP, or as a DTensor."""
    tensors = sys.modules.get("torch.distributed.tensor")  # who has made a DTensor has imported it
    return hasattr(parameter, "_fsdp_flattened") or (tensors is not None and isinstance(parameter, tensors.DTensor))


@contextmanager
def public_seed(seed: int) -> Iterator[None]:
    """Draw all random numbers of torch from a public seed, so that every member builds the same model.

    Modules initialise their parameters as usual. Only the present thread is affected, and torch's global generator does
    not change. Build the model on the CPU, then move it.

    Args:
        seed: any whole number; it is public, every member uses the same.

    Raises:
        InputError: the model is not built on the CPU, or by an operation that cannot be seeded.

    Examples:
        >>> import cgd, torch
        >>> with cgd.public_seed(7):
        ...     model = torch.nn.Linear(2, 1)
        >>> with cgd.public_seed(7):
        ...     other = torch.nn.Linear(2, 1)
        >>> torch.equal(model.weight, other.weight)
        True
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InputError(f"the seed is {seed!r}; it must be a whole number that all members use")
    with _SeededOperations(seed):
        yield


class _SeededOperations(TorchDispatchMode):
    """Passes one generator to every random operation of this thread."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator().manual_seed(seed % 2**63)

    def __torch_dispatch__(
        self, func: Any, types: Collection[Any], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        devices = {each.device.type for each in tensors} | {torch.device(kwargs.get("device") or "cpu").type}
        if devices != {"cpu"}:
            raise InputError(
                f"a model is built on {', '.join(sorted(devices - {'cpu'}))} inside public_seed, where members may "
                "draw other numbers; build it on the CPU, then move it with model.to(device)"
            )
        return _with_generator(func)(*args, **kwargs, generator=self._generator)


def _with_generator(func: Any) -> Any:
    """Return the form of a random operation that takes a generator."""
    if any(each.name == "generator" for each in func._schema.arguments):
        return func
    name = "generator" if func._overloadname == "default" else f"{func._overloadname}_generator"
    if name not in func.overloadpacket.overloads():
        raise InputError(
            f"{func} cannot be seeded; inside public_seed, use torch.rand, torch.randn, or the functions of "
            "torch.nn.init"
        )
    return getattr(func.overloadpacket, name)


def check_start(start: Any) -> None:
    """Check the name of a start.

    Raises:
        InputError: it is none of STARTS.
    """
    if start not in STARTS:
        raise InputError(
            f"start is {start!r}; choose 'model' for the values that the model has, or 'zeros' for the paper's way"
        )


def digest_of(parameter: torch.Tensor) -> bytes:
    """Return a digest of the values of a parameter."""
    digest = hashlib.sha256(f"{tuple(parameter.shape)} {parameter.dtype}".encode())
    values = parameter.detach().cpu()
    values = values if values.layout == torch.strided else values.to_dense()
    digest.update(values.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def mark_confined(model: torch.nn.Module, parameters: Iterable[torch.Tensor]) -> None:
    """Mark the trained parameters of a model, which have the values of the start, with the digests that are compared.

    Only the first one has the digest of what is not trained. In a grid it belongs to the first layer, which is summed
    within its column: members of a column have the same layers, and those of different columns need not.
    """
    frozen = frozen_digest(model)
    for parameter in parameters:
        setattr(parameter, CONFINED, digest_of(parameter) + frozen)
        frozen = b""


def frozen_digest(model: torch.nn.Module) -> bytes:
    """Return a digest of the frozen parameters and the persistent buffers of a model; empty if it has none.

    It does not depend on names: a member may use its model inside another module.
    """
    values = [digest_of(each) for each in model.parameters() if not each.requires_grad]
    for module in model.modules():
        temporary = module._non_persistent_buffers_set
        values += [digest_of(each) for name, each in module.named_buffers(recurse=False) if name not in temporary]
    return hashlib.sha256(b"".join(values)).digest() if values else b""


def value_digests(values: torch.Tensor) -> dict[str, bytes]:
    """Return digests of values as they are, and rounded to each narrower type, for `has_values`."""
    narrower = [each for each in _NARROWER if values.is_floating_point() and each.itemsize < values.dtype.itemsize]
    return {str(each): digest_of(values.detach().to(each)) for each in (values.dtype, *narrower)}


def has_values(values: torch.Tensor, digests: Mapping[str, bytes]) -> bool:
    """Return whether a tensor has the values of these `value_digests`, on any device and in any type.

    Values that were rounded once, by a conversion to a narrower type, count as the same.

    Examples:
        >>> digests = value_digests(torch.tensor([0.1, 0.2]))
        >>> has_values(torch.tensor([0.1, 0.2]).double(), digests), has_values(torch.tensor([0.1, 0.2]).half(), digests)
        (True, True)
        >>> has_values(torch.tensor([0.1, 0.3]), digests)
        False
    """
    for name, digest in digests.items():
        converted = values.detach().to(getattr(torch, name.removeprefix("torch.")))
        # A wider type must have no more digits than the one that the digest is of.
        same_type = converted.dtype == values.dtype
        if digest_of(converted) == digest and (same_type or torch.equal(converted.to(values.dtype), values)):
            return True
    return False


def remember_written(parameters: Iterable[torch.Tensor]) -> None:
    """Remember a digest of start + origin, so that other weights are noticed before the first step.

    The digest stays with the parameter and is never sent: it is of private values.
    """
    for parameter in parameters:
        setattr(parameter, _WRITTEN, value_digests(parameter))


def forget_written(parameter: torch.Tensor) -> None:
    """Forget the digest of start + origin: a step moves the parameter, and another optimiser may continue there."""
    parameter.__dict__.pop(_WRITTEN, None)


def is_as_written(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is still start + origin; True if it has no origin, or has been moved by a step."""
    digests = getattr(parameter, _WRITTEN, None)
    return digests is None or has_values(parameter, digests)


def was_moved(parameter: torch.Tensor) -> bool:
    """Return whether a step has moved a parameter, given that it has a private origin."""
    return _WRITTEN not in parameter.__dict__


def start_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the digests of a parameter with a private origin, as a tensor; empty without an origin."""
    return torch.tensor(list(getattr(parameter, CONFINED, b"")), dtype=torch.uint8)


def start_digest(parameters: Mapping[str, torch.Tensor]) -> str:
    """Return a digest of the values of several parameters; ZEROS if there are none."""
    if not parameters:
        return ZEROS
    text = "".join(f"{name} {digest_of(each).hex()}\n" for name, each in sorted(parameters.items()))
    return hashlib.sha256(text.encode()).hexdigest()
