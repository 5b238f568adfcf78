"""The random numbers of a network (dropout), drawn from a seed, on the device where it computes."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def own_random_numbers(seed: int, device: torch.device) -> Iterator[None]:
    """Draw the random numbers of networks on the CPU and on a device from a seed; the generators are restored after it.

    Args:
        seed: any number from 0 to 2⁶³ − 1.
        device: where the network computes; generators of other devices do not change.

    Examples:
        >>> import torch
        >>> with own_random_numbers(7, torch.device("cpu")):
        ...     first = torch.nn.functional.dropout(torch.ones(20))
        >>> with own_random_numbers(7, torch.device("cpu")):
        ...     second = torch.nn.functional.dropout(torch.ones(20))
        >>> torch.equal(first, second)
        True
    """
    module: Any = getattr(torch, device.type, None)  # torch.cuda, torch.mps, torch.xpu
    with torch.random.fork_rng(devices=[]):  # the state of the CPU
        torch.default_generator.manual_seed(seed)
        if not hasattr(module, "set_rng_state"):  # the CPU
            yield
            return
        where = () if device.type == "mps" else (device,)  # there is one
        before = module.get_rng_state(*where)
        module.set_rng_state(torch.Generator(device).manual_seed(seed).get_state(), *where)
        try:
            yield
        finally:
            module.set_rng_state(before, *where)
