"""One participant that sums with nobody: the same program as in a federation, on data that are all in one place."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from cgd.errors import ClosedError
from cgd.network.driver import Forgetful, Traffic
from cgd.network.peers import Peers, SumSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from cgd.protocol.ledger import Step
    from cgd.protocol.messages import PeerId, Reason, SumSpec


def solo_peers(seed: bytes | None = None, name: PeerId = "alone", **settings: Any) -> Peers:
    """Peers without anybody else: a sum is the own value, rounded by the fixed point as in a federation.

    For comparisons only: nothing is hidden, because there is nobody to hide it from.

    Args:
        seed: 32 bytes for the origin.
        name: of the only participant.
        settings: those of `SumSettings`.

    Examples:
        >>> import numpy as np
        >>> solo_peers().sum(np.array([0.5, 0.25]))
        array([0.5 , 0.25])
    """
    return Peers(_Solo(name), SumSettings(**settings), seed=seed)


class _Solo(Forgetful):
    """Drives sums of one addend; see `cgd.network.driver.Driver`."""

    def __init__(self, me: PeerId) -> None:
        self.me, self.members = me, (me,)
        self.traffic = Traffic()
        self.session = bytes(16)
        self.number = 0
        self._closed = False

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext()

    def total(
        self,
        spec: SumSpec,  # noqa: ARG002
        encode: Callable[[], npt.NDArray[Any]],
        epoch: int,  # noqa: ARG002
        step: Step | None,  # noqa: ARG002
    ) -> npt.NDArray[Any]:
        if self._closed:
            raise ClosedError(f"the connection of {self.me} is closed; make new peers for further sums")
        self.number += 1
        self.traffic.sums += 1
        return encode()

    def refuse(self, reason: Reason) -> None:  # noqa: ARG002
        self.number += 1

    def close(self, *, done: bool) -> None:  # noqa: ARG002
        self._closed = True

    def outlook(self) -> tuple[int, int]:
        return 0, 1
