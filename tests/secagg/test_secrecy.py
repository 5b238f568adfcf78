"""The messages that a coalition receives in one sum reveal nothing but the sum.

There are two kinds of evidence. The first is exact: for every run of the honest members with one input there is a run
with another input of the same sum and other random bits in which the coalition receives the same bytes. The map between
the two runs is a shift of uniform words, so both are equally likely, and the views have the same distribution. The
second is statistical: the output of the real generators is uniform, and has the same distribution for both inputs.
"""

from __future__ import annotations

import os
import random
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from scipy import stats

from cgd.secagg.codec import Frame, to_bytes
from cgd.secagg.masking import PairwiseMasks, remove_self_masks
from cgd.secagg.messages import MASKINGS, RevealKey, Share, Subtotal
from cgd.secagg.reduction import parts
from cgd.secagg.secure_sum import SecureSum
from cgd.secagg.states import State
from support.wire import MEMBER_OPENINGS, names, pair_keys, spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from cgd.secagg.messages import Masking, Message, Opening

Words = np.ndarray[Any, np.dtype[np.uint32]]

# p0 … p3 collude against p4 and p5: m − 2 of m = 6.
MEMBERS = names(6)
COALITION = frozenset(MEMBERS[:4])
HONEST = MEMBERS[4:]
SIZE = 12
FALSE_ALARM = 1e-6


class FixedMasks(PairwiseMasks):
    """Pairwise masks in which the masks of some pairs are given words instead of the output of AES."""

    def __init__(self, me: str, keys: dict[str, bytes], fixed: dict[frozenset[str], Words]) -> None:
        super().__init__(me, {peer: key for peer, key in keys.items() if frozenset({me, peer}) not in fixed})
        self._fixed = {(pair - {me}).copy(): words for pair, words in fixed.items() if me in pair}

    @property
    def peers(self) -> frozenset[str]:
        return super().peers.union(*self._fixed)

    def add_to(self, words: npt.NDArray[Any], position: int) -> None:
        super().add_to(words, position)
        for pair, mask in self._fixed.items():
            (peer,) = pair
            words += mask if self._me < peer else -mask


def exchange(
    members: dict[str, SecureSum], inputs: dict[str, Words], masking: Masking, opening: Opening
) -> Iterator[tuple[str, str, Message]]:
    """Run one sum in a fixed order; yield every message with its sender and recipient."""
    for name, each in members.items():
        each.start(spec(SIZE, masking, opening), inputs[name].copy())
    while not all(each.state is State.FINISHED for each in members.values()):
        for sender, each in members.items():
            while (outgoing := each.next_outgoing()) is not None:
                to, message = outgoing
                yield sender, to, message
                members[to].receive(sender, message)


def view(members: dict[str, SecureSum], inputs: dict[str, Words], masking: Masking, opening: Opening) -> list[bytes]:
    """Return all bytes that the coalition receives."""
    return [
        f"{sender}>{to}".encode() + to_bytes(Frame(bytes(16), 1, message))
        for sender, to, message in exchange(members, inputs, masking, opening)
        if to in COALITION
    ]


def two_inputs_of_one_sum(rng: random.Random) -> tuple[dict[str, Words], dict[str, Words], Words]:
    def words() -> Words:
        return np.frombuffer(rng.randbytes(4 * SIZE), dtype="<u4").copy()

    one = {name: words() for name in MEMBERS}
    shift = words()
    other = one | {HONEST[0]: one[HONEST[0]] + shift, HONEST[1]: one[HONEST[1]] - shift}
    return one, other, shift


def reader_of(pieces: list[bytes]) -> Callable[[int], bytes]:
    remaining = iter(pieces)

    def read(count: int) -> bytes:
        piece = next(remaining)
        assert len(piece) == count
        return piece

    return read


@pytest.mark.parametrize("opening", MEMBER_OPENINGS)
def test_uniform_views_of_two_inputs_are_equal_under_a_shift_of_the_random_bits(opening: Opening) -> None:
    rng = random.Random(1)
    one, other, shift = two_inputs_of_one_sum(rng)
    random_bytes = {name: [rng.randbytes(16), *(rng.randbytes(4 * SIZE) for _ in MEMBERS[1:])] for name in MEMBERS}
    # Only p4's last share, which it sends to p5, absorbs the change of p4's input; p5 receives more, and its own input
    # is smaller by the same amount.
    shifted = {name: list(pieces) for name, pieces in random_bytes.items()}
    last = np.frombuffer(random_bytes["p4"][-1], dtype="<u4") + shift
    shifted["p4"][-1] = last.tobytes()

    def view_of(inputs: dict[str, Words], pieces: dict[str, list[bytes]]) -> list[bytes]:
        members = {me: SecureSum(me, MEMBERS, 1, random=reader_of(pieces[me])) for me in MEMBERS}
        return view(members, inputs, "uniform", opening)

    assert view_of(one, random_bytes) == view_of(other, shifted)
    assert view_of(one, random_bytes) != view_of(other, random_bytes)  # the comparison can fail


@pytest.mark.parametrize("opening", MEMBER_OPENINGS)
def test_pairwise_views_of_two_inputs_are_equal_under_a_shift_of_the_honest_pair_mask(opening: Opening) -> None:
    rng = random.Random(2)
    one, other, shift = two_inputs_of_one_sum(rng)
    keys = pair_keys(MEMBERS)
    mask = np.frombuffer(rng.randbytes(4 * SIZE), dtype="<u4")
    pair = frozenset(HONEST)
    self_mask_keys = {me: rng.randbytes(16) for me in MEMBERS}

    def view_of(inputs: dict[str, Words], pair_mask: Words) -> list[bytes]:
        members = {
            me: SecureSum(me, MEMBERS, 1, FixedMasks(me, keys[me], {pair: pair_mask}), reader_of([self_mask_keys[me]]))
            for me in MEMBERS
        }
        return view(members, inputs, "pairwise", opening)

    assert view_of(one, mask) == view_of(other, mask - shift)
    assert view_of(one, mask) != view_of(other, mask)  # the comparison can fail


def residue(inputs: dict[str, Words], masking: Masking, opening: Opening, *, broken: bool) -> Words:
    """Return p4's subtotal minus everything that the coalition knows.

    That is p4's secret plus the mask or share that only p4 and p5 know; `broken` omits the latter.
    """
    keys = pair_keys(MEMBERS)
    pair: dict[frozenset[str], Words] = {frozenset(HONEST): np.zeros(SIZE, dtype="<u4")} if broken else {}
    members = {
        me: SecureSum(me, MEMBERS, 1, FixedMasks(me, keys[me], pair), random=generator(zeros_at=6 if broken else 0))
        for me in MEMBERS
    }
    seen = np.zeros(SIZE, dtype="<u4")
    visible = np.zeros(SIZE, dtype=bool)
    part = parts(spec(SIZE, masking, opening), MEMBERS)
    for sender, to, message in exchange(members, inputs, masking, opening):
        if isinstance(message, Share) and sender == "p4" and to in COALITION:
            seen += np.frombuffer(message.words, dtype="<u4")
        elif isinstance(message, Share) and sender in COALITION and to == "p4":
            seen -= np.frombuffer(message.words, dtype="<u4")
        elif isinstance(message, Subtotal) and sender == "p4" and to in COALITION:
            seen[part[to]] += np.frombuffer(message.words, dtype="<u4")
            visible[part[to]] = True
        elif isinstance(message, RevealKey) and sender == "p4" and to == "p0":
            remove_self_masks(seen, [message.key])
    if masking == "pairwise":
        known = np.zeros(SIZE, dtype="<u4")
        PairwiseMasks("p4", {peer: key for peer, key in keys["p4"].items() if peer in COALITION}).add_to(known, 1)
        seen -= known
    return seen[visible]


def generator(zeros_at: int) -> Callable[[int], bytes]:
    """Return the operating system's generator, with zeros in one call: the share for the other honest member.

    The first call is for the self-mask key.
    """
    calls = count(1)
    return lambda size: bytes(size) if next(calls) == zeros_at else os.urandom(size)


@pytest.mark.parametrize("masking", MASKINGS)
@pytest.mark.parametrize("opening", ["aggregator", pytest.param("mesh", marks=pytest.mark.slow)])
def test_residue_is_uniform_and_has_the_same_distribution_for_two_inputs(masking: Masking, opening: Opening) -> None:
    """Chi-squared tests of the top four bits of every word: for uniformity, and for equality of two inputs."""
    one, other, _ = two_inputs_of_one_sum(random.Random(3))
    samples = [
        np.stack([residue(inputs, masking, opening, broken=False) for _ in range(400)]) for inputs in (one, other)
    ]
    assert samples[0].shape[1] >= 8
    p_values = []
    for column in range(samples[0].shape[1]):
        counts = [np.bincount(sample[:, column] >> 28, minlength=16) for sample in samples]
        p_values += [stats.chi2_contingency(counts).pvalue, *(stats.chisquare(each).pvalue for each in counts)]
    assert min(p_values) > FALSE_ALARM / len(p_values)
    # Without the mask or share of the two honest members, p4's secret itself remains, so the test can fail.
    bare = residue(one, masking, opening, broken=True)
    assert all(word in one["p4"] for word in bare)
