"""Measure the cost of a secure sum for one member: `make bench`.

Times are ratios of functions that alternate in the same run, in processor time and the best of several, because the
machine may be busy. The floor of a masking is the cost of its random bits alone: AES in the counter mode (pairwise) or
the generator of the operating system (uniform), once over the vector for each peer. Keystreams are generated faster
than this floor where `cgd.aes` finds a faster implementation.

A second table compares all arithmetic of one member, from its floats to the total as floats, with what cannot be left
out: its keystreams, as fast as `cgd.aes` generates them, and one digest of the total.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
import tracemalloc
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from rich.console import Console
from rich.table import Table

from cgd import FixedPoint
from cgd.aes import BLOCK_BYTES, gcm_is_faster, keystream
from cgd.secagg.codec import Frame, to_bytes
from cgd.secagg.fixed_point import CHUNK_ELEMENTS
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
MAX_WORK = {3: 2.2, 10: 1.6}  # the promised limits, with pairwise masks, by the number of members
MAX_BYTES = 2.2  # 10 members
MAX_ARITHMETIC = 2.0
ARITHMETIC_MEMBERS, ARITHMETIC_ELEMENTS = 5, 10_000_000


class Member:
    """One of `count` members, with its gradient; the messages of the others are simulated."""

    def __init__(self, count: int, gradient: npt.NDArray[Any], masking: Masking) -> None:
        self.count, self.gradient, self.masking = count, gradient, masking
        self.names = [f"p{i:03d}" for i in range(count)]
        self.zeros = memoryview(bytes(gradient.nbytes))  # the messages of the others, and the plaintext of AES-CTR
        self.buffer = bytearray(gradient.nbytes + BLOCK_BYTES)
        self.opened = np.zeros(gradient.size, dtype=np.uint32)
        self.masks, self.position = self.shares(), 0  # of one session, which has many sums

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
            self.position += 1
            self.masks.add_to(words, self.position)
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

    def streams_and_digest(self) -> None:
        """Generate the keystreams of a sum, the masks of the peers and the self-masks of all, and digest a total."""
        zeros, buffer = self.zeros[: 4 * CHUNK_ELEMENTS], bytearray(4 * CHUNK_ELEMENTS + BLOCK_BYTES)
        for i in range(2 * self.count):
            stream = keystream(i.to_bytes(KEY_BYTES, "big"), 1)
            for start in range(0, self.gradient.nbytes, len(zeros)):
                stream.update_into(zeros[: self.gradient.nbytes - start], buffer)
        hashlib.sha256(self.opened.data).digest()

    def whole_sum(self, *, in_frames: bool = True) -> int:
        """Run a whole sum, with or without encoding messages as frames; return the bytes of all frames sent."""
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
                if in_frames:
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
    """Return the shortest processor time of each function; they alternate, so that the load is the same for all."""
    shortest = [float("inf")] * len(functions)
    for _ in range(repeats):
        for i, function in enumerate(functions):
            started = time.process_time()
            function()
            shortest[i] = min(shortest[i], time.process_time() - started)
    return shortest


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=1_000_000)
    parser.add_argument("--arithmetic-elements", type=int, default=ARITHMETIC_ELEMENTS)
    parser.add_argument("--repeats", type=int, default=25)
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
    work: dict[int, float] = {}
    for masking in MASKINGS:
        for count in MEMBERS:
            member = Member(count, gradient, masking)
            repeats = options.repeats if count < 100 else 3
            before, opening, floor = best_of(repeats, member.work, member.opening, member.floor)
            nbytes, memory = member.whole_sum(), member.peak_memory()
            figures = (before / floor, opening / floor, nbytes / gradient.nbytes, memory / gradient.nbytes)
            table.add_row(masking, str(count), *(f"{figure:.2f}" for figure in figures))
            if masking == "pairwise":
                work[count] = before / floor
                if count == 10:
                    nbytes_of_10 = figures[2]
    console = Console()
    console.print(table)
    gradient = np.resize(gradient, options.arithmetic_elements)
    member = Member(ARITHMETIC_MEMBERS, gradient, "pairwise")
    whole, needed = best_of(options.repeats, partial(member.whole_sum, in_frames=False), member.streams_and_digest)
    console.print(
        f"All arithmetic of one of {ARITHMETIC_MEMBERS} members, {gradient.size:,} floats: {whole / needed:.2f} times "
        f"its keystreams (by {'GCM' if gcm_is_faster() else 'the counter mode'}) and digest alone.",
        highlight=False,
    )
    limits = [
        *((f"work of {count} members", work[count], most) for count, most in MAX_WORK.items()),
        ("bytes of 10 members", nbytes_of_10, MAX_BYTES),
        ("arithmetic", whole / needed, MAX_ARITHMETIC),
    ]
    verdicts = [
        f"{what} {ratio:.2f}, limit {most}: {'met' if ratio <= most else 'MISSED'}" for what, ratio, most in limits
    ]
    console.print(f"Pairwise masks: {'; '.join(verdicts)}.", highlight=False)
    sizes = options.elements, options.arithmetic_elements
    full = sizes == (parser.get_default("elements"), parser.get_default("arithmetic_elements"))
    if full and any("MISSED" in verdict for verdict in verdicts):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
