"""Measure the cost of a secure sum for one member: `make bench`.

Times are ratios of two functions that alternate in the same run, the best of several, because the machine may be busy.
The floor of a masking is the cost of its random bits alone: AES-CTR (pairwise) or the generator of the operating system
(uniform), once over the vector for each peer.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from rich.console import Console
from rich.table import Table

from cgd import FixedPoint
from cgd.secagg.codec import Frame, to_bytes
from cgd.secagg.masking import KEY_BYTES, PairwiseMasks, add_self_mask, remove_self_masks, uniform_words
from cgd.secagg.messages import (
    MASKINGS,
    SELF_MASK_KEY_BYTES,
    Confirm,
    Ready,
    RevealKey,
    Share,
    Subtotal,
    SumSpec,
    Total,
)
from cgd.secagg.reduction import parts, slices
from cgd.secagg.secure_sum import SecureSum
from cgd.secagg.states import State

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from cgd.secagg.messages import Masking

MEMBERS = (3, 10, 30, 100)
MAX_WORK, MAX_BYTES = 2.0, 2.2  # the promised limits: pairwise masks, 10 members


class Member:
    """One of `count` members, with its gradient; the messages of the others are simulated."""

    def __init__(self, count: int, gradient: npt.NDArray[Any], masking: Masking) -> None:
        self.count, self.gradient, self.masking = count, gradient, masking
        self.names = [f"p{i:03d}" for i in range(count)]
        self.zeros = memoryview(bytes(gradient.nbytes))  # the messages of the others, and the plaintext of AES-CTR
        self.buffer = bytearray(gradient.nbytes + 16)
        self.opened = np.zeros(gradient.size, dtype=np.uint32)

    def encode(self) -> npt.NDArray[Any]:
        """Encode the gradient in the ring."""
        fixed_point = FixedPoint.for_weighted_sum(addends=self.count, bound=16.0)
        return fixed_point.encode(self.gradient, weight=1 / self.count)

    def shares(self) -> PairwiseMasks:
        """Return the pairwise keys of this member."""
        me, *others = self.names
        return PairwiseMasks(me, {peer: i.to_bytes(KEY_BYTES, "big") for i, peer in enumerate(others)})

    def work(self) -> None:
        """Do the work of a member before it sends: encode, mask, add the self-mask."""
        words = self.encode()
        if self.masking == "pairwise":
            self.shares().add_to(words, position=1)
        else:
            for _ in range(self.count - 1):
                np.subtract(words, uniform_words(words.size, words.dtype), out=words)
        add_self_mask(words, bytes(SELF_MASK_KEY_BYTES))

    def opening(self) -> None:
        """Do the work at the end: remove the self-masks of all members."""
        remove_self_masks(self.opened, [i.to_bytes(SELF_MASK_KEY_BYTES, "big") for i in range(self.count)])

    def floor(self) -> None:
        """Generate the random bits of the masks, and nothing else."""
        for _ in range(self.count - 1):
            if self.masking == "pairwise":
                stream = Cipher(algorithms.AES(bytes(KEY_BYTES)), modes.CTR(bytes(16))).encryptor()
                stream.update_into(self.zeros, self.buffer)
            else:
                os.urandom(self.gradient.nbytes)

    def whole_sum(self) -> int:
        """Run a whole sum; return the bytes of all frames sent."""
        me, *others = self.names
        spec = SumSpec(self.gradient.shape, "float32", 32, 26, self.masking, "mesh")
        member_parts = parts(spec, self.names)
        member = SecureSum(me, self.names, 1, self.shares())
        digests: set[bytes] = set()

        def receive(kind: type[Share | Subtotal | Total], part: slice, peer: str) -> None:
            for each in slices(part):
                member.receive(peer, kind(each.start, self.zeros[: 4 * (each.stop - each.start)]))

        def send_all() -> int:
            count = 0
            while (outgoing := member.next_outgoing()) is not None:
                if isinstance(outgoing[1], Confirm):
                    digests.add(outgoing[1].digest)
                count += len(to_bytes(Frame(bytes(16), 1, outgoing[1])))
            return count

        member.start(spec, self.encode())
        total = send_all()
        key = bytes(SELF_MASK_KEY_BYTES)
        for peer in others:
            member.receive(peer, Ready(spec, hashlib.sha256(key).digest()))
        total += send_all()
        for peer in others:
            if self.masking == "uniform":
                receive(Share, slice(0, spec.size), peer)
        total += send_all()
        for peer in others:
            receive(Subtotal, member_parts[me], peer)
        total += send_all()
        for peer in others:
            receive(Total, member_parts[peer], peer)
        total += send_all()
        (digest,) = digests
        for peer in others:
            member.receive(peer, Confirm(digest))
        total += send_all()
        for peer in others:
            member.receive(peer, RevealKey(key))
        assert member.state is State.FINISHED
        FixedPoint(fraction_bits=26, bound=16.0).decode(member.total, np.float32)
        return total

    def peak_memory(self) -> int:
        """Return the peak of allocated bytes during a whole sum."""
        tracemalloc.start()
        self.whole_sum()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak


def best_of(repeats: int, *functions: Callable[[], object]) -> list[float]:
    """Return the shortest time of each function; the functions alternate, so that the load is the same for all."""
    shortest = [float("inf")] * len(functions)
    for _ in range(repeats):
        for i, function in enumerate(functions):
            started = time.perf_counter()
            function()
            shortest[i] = min(shortest[i], time.perf_counter() - started)
    return shortest


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    gradient = np.random.default_rng(0).normal(0, 0.01, options.elements).astype(np.float32)

    table = Table(title=f"One member's cost of one sum of {options.elements:,} floats, opening by mesh")
    for heading in (
        "masking",
        "members",
        "work / floor",
        "opening / floor",
        "bytes sent / vector",
        "peak memory / vector",
    ):
        table.add_column(heading, justify="right")
    for masking in MASKINGS:
        for count in MEMBERS:
            member = Member(count, gradient, masking)
            repeats = options.repeats if count < 100 else 3
            work, opening, floor = best_of(repeats, member.work, member.opening, member.floor)
            nbytes, memory = member.whole_sum(), member.peak_memory()
            figures = (work / floor, opening / floor, nbytes / gradient.nbytes, memory / gradient.nbytes)
            table.add_row(masking, str(count), *(f"{figure:.2f}" for figure in figures))
            if (masking, count) == ("pairwise", 10):
                pairwise = figures
    console = Console()
    console.print(table)
    verdicts = [
        f"{what} {figure:.2f}, limit {most}: {'met' if figure <= most else 'MISSED'}"
        for what, figure, most in (("work", pairwise[0], MAX_WORK), ("bytes", pairwise[2], MAX_BYTES))
    ]
    console.print(f"Pairwise masks, 10 members: {'; '.join(verdicts)}.", highlight=False)
    if options.elements == parser.get_default("elements") and any("MISSED" in verdict for verdict in verdicts):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
