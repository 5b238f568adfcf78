"""Fuzz the members of a sum: an input is a schedule with a dishonest member.

Two honest members and a dishonest one make one sum, with ideal cryptography. The bytes of an input decide which frame
is delivered next, which member is killed and restarted, and what the dishonest member sends instead of honest messages.
The invariants of `tests/support/dishonest.py` must hold.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING
from unittest.mock import patch

from support import summing_program
from support.adversary import ADVERSARY, Adversary, Outgoing
from support.dishonest import Simulation
from support.ideal import ideal_cryptography

if TYPE_CHECKING:
    from cgd.secagg.membership import Membership

STEPS = 300
MAX_INPUT_BYTES = 1 << 12
MUTATION_RATE = 0.1
"""The fraction of the dishonest member's altered frames whose bytes are mutated in addition."""


class InputRandom(random.Random):
    """Random numbers from the bytes of an input; once they are exhausted, numbers that let the sum finish."""

    def __init__(self, data: bytes) -> None:
        super().__init__(0)
        self._data, self._at = data, 0

    @property
    def exhausted(self) -> bool:
        """True if all bytes were drawn."""
        return self._at >= len(self._data)

    def random(self) -> float:
        """Draw a number of 256 possible ones."""
        return self._next(1)[0] / 256 if not self.exhausted else 0.999

    def getrandbits(self, k: int, /) -> int:
        """Draw an integer; all other methods of `random.Random` use this one."""
        return int.from_bytes(self._next((k + 7) // 8), "little") & ((1 << k) - 1)

    def _next(self, count: int) -> bytes:
        drawn = self._data[self._at : self._at + count]
        self._at += count
        return drawn.ljust(count, b"\0")


class MutatingAdversary(Adversary):
    """An adversary that also mutates the bytes of some frames."""

    def replace_frame(self, to: str, data: bytes, membership: Membership) -> list[Outgoing]:
        """Return the frames to send instead of this one."""
        return [
            (name, self._mutated(frame)) if self.rng.random() < MUTATION_RATE * self.rate else (name, frame)
            for name, frame in super().replace_frame(to, data, membership)
        ]

    def _mutated(self, frame: bytes) -> bytes:
        at, count = self.rng.randrange(len(frame) + 1), self.rng.randrange(9)
        match self.rng.randrange(3):
            case 0:  # other bytes
                return frame[:at] + self.rng.randbytes(count) + frame[at + count :]
            case 1:  # more bytes
                mutated = frame[:at] + self.rng.randbytes(count) + frame[at:]
            case _:  # fewer bytes
                mutated = frame[:at] + frame[at + count :]
        length = max(
            0, len(mutated) - 48
        )  # the length of the body is corrected, or the checks after it are not reached
        return mutated[:40] + length.to_bytes(8, "little") + mutated[48:] if len(mutated) >= 48 else mutated


def one_input(data: bytes) -> None:
    """Run one schedule; raise an `InvariantError` if an invariant does not hold."""
    stream = random.Random(0)
    with ideal_cryptography(), patch("os.urandom", stream.randbytes):
        summing_program._identity.cache_clear()
        try:
            run(InputRandom(data[:MAX_INPUT_BYTES]))
        finally:
            summing_program._identity.cache_clear()


def run(rng: InputRandom) -> None:
    """Run a simulation until nothing can happen any more, then check the invariants."""
    simulation = Simulation(rng, honest=2, sums=1)
    simulation.adversary = MutatingAdversary(ADVERSARY, simulation.adversary.identity, rng)
    simulation.adversary.rate = rng.choice([0.0, 0.1, 0.5, 1.0])
    with simulation.observations.recording():
        for me in simulation.federation_spec.members:
            simulation.advance(me)
        for _ in range(STEPS):
            if simulation.done or (rng.exhausted and not any(simulation.queues.values())):
                break
            simulation.step()
    simulation.check_invariants()
