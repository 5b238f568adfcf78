"""What a coalition sees of one sum says nothing but the sum.

Two kinds of evidence. The first is exact: for every run of the honest members with one input there is a run with
another input of the same sum, under other random bits, in which the coalition sees the same frames, byte for byte. The
map between the two is a shift of uniform words, so both runs are equally likely, and the views are the same in law.
The second is statistical: what the real generators make looks uniform and looks the same for both inputs.
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
from cgd.secagg.masking import PairwiseMasks, unseal
from cgd.secagg.messages import SHARINGS, RevealKey, Share, Subtotal
from cgd.secagg.partition import parts
from cgd.secagg.secure_sum import SecureSum
from cgd.secagg.states import State
from support.wire import MEMBER_OPENINGS, names, pair_keys, spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from cgd.secagg.messages import Message, Opening, Sharing

Words = np.ndarray[Any, np.dtype[np.uint32]]

# p0 … p3 conspire against p4 and p5: m − 2 of m = 6.
MEMBERS = names(6)
COALITION = frozenset(MEMBERS[:4])
HONEST = MEMBERS[4:]
SIZE = 12
FALSE_ALARM = 1e-6


class TapeShares(PairwiseMasks):
    """Expanded shares with the stream of some pairs read from a tape instead of from AES."""

    def __init__(self, me: str, keys: dict[str, bytes], tape: dict[frozenset[str], Words]) -> None:
        super().__init__(me, {peer: key for peer, key in keys.items() if frozenset({me, peer}) not in tape})
        self._tape = {(pair - {me}).copy(): words for pair, words in tape.items() if me in pair}

    @property
    def peers(self) -> frozenset[str]:
        return super().peers.union(*self._tape)

    def add_to(self, words: npt.NDArray[Any], position: int) -> None:
        super().add_to(words, position)
        for pair, stream in self._tape.items():
            (peer,) = pair
            words += stream if self._me < peer else -stream


def exchange(
    members: dict[str, SecureSum], inputs: dict[str, Words], sharing: Sharing, opening: Opening
) -> Iterator[tuple[str, str, Message]]:
    """Run one sum in a fixed order; every message with its sender and recipient."""
    for name, each in members.items():
        each.start(spec(SIZE, sharing, opening), inputs[name].copy())
    while not all(each.state is State.FINISHED for each in members.values()):
        for sender, each in members.items():
            while (outgoing := each.next_outgoing()) is not None:
                to, message = outgoing
                yield sender, to, message
                members[to].receive(sender, message)


def view(members: dict[str, SecureSum], inputs: dict[str, Words], sharing: Sharing, opening: Opening) -> list[bytes]:
    """Everything the coalition receives."""
    return [
        f"{sender}>{to}".encode() + to_bytes(Frame(bytes(16), 1, message))
        for sender, to, message in exchange(members, inputs, sharing, opening)
        if to in COALITION
    ]


def two_inputs_of_one_sum(rng: random.Random) -> tuple[dict[str, Words], dict[str, Words], Words]:
    def words() -> Words:
        return np.frombuffer(rng.randbytes(4 * SIZE), dtype="<u4").copy()

    one = {name: words() for name in MEMBERS}
    shift = words()
    other = one | {HONEST[0]: one[HONEST[0]] + shift, HONEST[1]: one[HONEST[1]] - shift}
    return one, other, shift


def tape_reader(tape: list[bytes]) -> Callable[[int], bytes]:
    remaining = iter(tape)

    def read(count: int) -> bytes:
        piece = next(remaining)
        assert len(piece) == count
        return piece

    return read


@pytest.mark.parametrize("opening", MEMBER_OPENINGS)
def test_uniform_views_of_two_inputs_are_the_same_under_a_shift_of_the_random_bits(opening: Opening) -> None:
    rng = random.Random(1)
    one, other, shift = two_inputs_of_one_sum(rng)
    tapes = {name: [rng.randbytes(16), *(rng.randbytes(4 * SIZE) for _ in MEMBERS[1:])] for name in MEMBERS}
    # p4's last share goes to p5: there, and only there, is the change of p4's input taken up. p5 holds one more and
    # its own input has one less.
    shifted = {name: list(tape) for name, tape in tapes.items()}
    last = np.frombuffer(tapes["p4"][-1], dtype="<u4") + shift
    shifted["p4"][-1] = last.tobytes()

    def view_of(inputs: dict[str, Words], tape: dict[str, list[bytes]]) -> list[bytes]:
        members = {me: SecureSum(me, MEMBERS, 1, random=tape_reader(tape[me])) for me in MEMBERS}
        return view(members, inputs, "uniform", opening)

    assert view_of(one, tapes) == view_of(other, shifted)
    assert view_of(one, tapes) != view_of(other, tapes)  # the comparison can fail


@pytest.mark.parametrize("opening", MEMBER_OPENINGS)
def test_expanded_views_of_two_inputs_are_the_same_under_a_shift_of_the_honest_pairs_stream(opening: Opening) -> None:
    rng = random.Random(2)
    one, other, shift = two_inputs_of_one_sum(rng)
    keys = pair_keys(MEMBERS)
    stream = np.frombuffer(rng.randbytes(4 * SIZE), dtype="<u4")
    pair = frozenset(HONEST)
    seals = {me: rng.randbytes(16) for me in MEMBERS}

    def view_of(inputs: dict[str, Words], tape: Words) -> list[bytes]:
        members = {
            me: SecureSum(me, MEMBERS, 1, TapeShares(me, keys[me], {pair: tape}), tape_reader([seals[me]]))
            for me in MEMBERS
        }
        return view(members, inputs, "expanded", opening)

    assert view_of(one, stream) == view_of(other, stream - shift)
    assert view_of(one, stream) != view_of(other, stream)  # the comparison can fail


def residue(inputs: dict[str, Words], sharing: Sharing, opening: Opening, *, broken: bool) -> Words:
    """What is left of p4's subtotal when the coalition takes away all that it knows.

    That is p4's secret and what it has in common with p5 alone; `broken` leaves that out.
    """
    keys = pair_keys(MEMBERS)
    pair: dict[frozenset[str], Words] = {frozenset(HONEST): np.zeros(SIZE, dtype="<u4")} if broken else {}
    members = {
        me: SecureSum(me, MEMBERS, 1, TapeShares(me, keys[me], pair), random=source(silent_at=6 if broken else 0))
        for me in MEMBERS
    }
    seen = np.zeros(SIZE, dtype="<u4")
    visible = np.zeros(SIZE, dtype=bool)
    cut = parts(spec(SIZE, sharing, opening), MEMBERS)
    for sender, to, message in exchange(members, inputs, sharing, opening):
        if isinstance(message, Share) and sender == "p4" and to in COALITION:
            seen += np.frombuffer(message.words, dtype="<u4")
        elif isinstance(message, Share) and sender in COALITION and to == "p4":
            seen -= np.frombuffer(message.words, dtype="<u4")
        elif isinstance(message, Subtotal) and sender == "p4" and to in COALITION:
            seen[cut[to]] += np.frombuffer(message.words, dtype="<u4")
            visible[cut[to]] = True
        elif isinstance(message, RevealKey) and sender == "p4" and to == "p0":
            unseal(seen, [message.key])
    if sharing == "expanded":
        known = np.zeros(SIZE, dtype="<u4")
        PairwiseMasks("p4", {peer: key for peer, key in keys["p4"].items() if peer in COALITION}).add_to(known, 1)
        seen -= known
    return seen[visible]


def source(silent_at: int) -> Callable[[int], bytes]:
    """The operating system's generator, but for one call that gives zeros: the share for the other honest member.

    The first call is for the key of the seal.
    """
    calls = count(1)
    return lambda size: bytes(size) if next(calls) == silent_at else os.urandom(size)


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("opening", MEMBER_OPENINGS)
def test_what_the_coalition_cannot_explain_is_uniform_and_the_same_for_two_inputs(
    sharing: Sharing, opening: Opening
) -> None:
    """Chi-squared tests over the top four bits of every word: against uniform, and of two inputs with one sum."""
    one, other, _ = two_inputs_of_one_sum(random.Random(3))
    samples = [
        np.stack([residue(inputs, sharing, opening, broken=False) for _ in range(400)]) for inputs in (one, other)
    ]
    assert samples[0].shape[1] >= 8
    p_values = []
    for column in range(samples[0].shape[1]):
        counts = [np.bincount(sample[:, column] >> 28, minlength=16) for sample in samples]
        p_values += [stats.chi2_contingency(counts).pvalue, *(stats.chisquare(each).pvalue for each in counts)]
    assert min(p_values) > FALSE_ALARM / len(p_values)
    # Without what the two honest members have in common, p4's secret itself is left: the test would notice.
    bare = residue(one, sharing, opening, broken=True)
    assert all(word in one["p4"] for word in bare)
