"""Fuzz the members of a sum: an input is a schedule with a dishonest member in it.

Two honest members and a dishonest one make one sum, with ideal cryptography. The bytes of an input decide who is heard
next, who is killed and comes back, and what the dishonest member says instead of what it should say. The laws of
`tests/support/dishonest.py` must hold.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING
from unittest.mock import patch

from support import dishonest
from support.dishonest import LIAR, World
from support.ideal import ideal_cryptography
from support.liar import Liar, Outgoing

if TYPE_CHECKING:
    from cgd.secagg.membership import Membership

STEPS = 300
MAX_INPUT_BYTES = 1 << 12
BENT = 0.1
"""How much of what the dishonest member sends is bent byte by byte, besides what `Liar` does."""


class Drawn(random.Random):
    """Draw from the bytes of an input; when they are used up, whatever lets the members be honest and go on."""

    def __init__(self, data: bytes) -> None:
        super().__init__(0)
        self._data, self._at = data, 0

    @property
    def used_up(self) -> bool:
        """Whether all bytes were drawn."""
        return self._at >= len(self._data)

    def random(self) -> float:
        """Draw a number of 256 possible ones."""
        return self._next(1)[0] / 256 if not self.used_up else 0.999

    def getrandbits(self, k: int, /) -> int:
        """Draw an integer; all other methods of a `random.Random` go by this one."""
        return int.from_bytes(self._next((k + 7) // 8), "little") & ((1 << k) - 1)

    def _next(self, count: int) -> bytes:
        drawn = self._data[self._at : self._at + count]
        self._at += count
        return drawn.ljust(count, b"\0")


class Bender(Liar):
    """Lie as `Liar` does, and bend some frames byte by byte."""

    def says(self, to: str, data: bytes, membership: Membership) -> list[Outgoing]:
        """What goes out in place of a frame for a member."""
        said = super().says(to, data, membership)
        return [
            (name, self._bent(frame)) if self.rng.random() < BENT * self.rate else (name, frame) for name, frame in said
        ]

    def _bent(self, frame: bytes) -> bytes:
        at, count = self.rng.randrange(len(frame) + 1), self.rng.randrange(9)
        match self.rng.randrange(3):
            case 0:  # other bytes
                return frame[:at] + self.rng.randbytes(count) + frame[at + count :]
            case 1:  # more bytes
                bent = frame[:at] + self.rng.randbytes(count) + frame[at:]
            case _:  # fewer bytes
                bent = frame[:at] + frame[at + count :]
        length = max(0, len(bent) - 48)  # the length of the body is made right, or nothing behind it would be reached
        return bent[:40] + length.to_bytes(8, "little") + bent[48:] if len(bent) >= 48 else bent


def one_input(data: bytes) -> None:
    """Run one schedule; raise a `LawBrokenError` if a law is broken."""
    stream = random.Random(0)
    with ideal_cryptography(), patch("os.urandom", stream.randbytes):
        dishonest._identity.cache_clear()
        try:
            run(Drawn(data[:MAX_INPUT_BYTES]))
        finally:
            dishonest._identity.cache_clear()


def run(drawn: Drawn) -> None:
    """Let the members speak until nothing is left to happen, then check the laws."""
    world = World(drawn, honest=2, sums=1)
    world.liar = Bender(LIAR, world.liar.identity, drawn)
    world.liar.rate = drawn.choice([0.0, 0.1, 0.5, 1.0])
    with world.observations.watching():
        for me in world.federation_spec.members:
            world.let_speak(me)
        for _ in range(STEPS):
            if world.over or (drawn.used_up and not any(world.wires.values())):
                break
            world.step()
    world.check_laws()
