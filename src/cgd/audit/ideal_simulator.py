"""The simulation paradigm as a test: Theorem 2's simulator beside the real protocol.

The theorem says that a coalition sees nothing but what its own inputs and z, the honest participants' sum, determine.
The proof is a simulator. As the paper's appendix has it, it gives the honest participants dummy inputs that sum to z,
runs the protocol with them and with the coalition's true inputs, and hands over what the coalition sees. Here both run,
with the product's own `SecureSum`: `run` with the true inputs, `simulate` with dummies. `indistinguishable.py` asks
whether anything can tell the two apart.

The view is every word that a member of the coalition receives (shares, subtotals, sealed totals, digests, keys), the
total, and what is left of an honest member's subtotal when all is taken away that the coalition can explain: shares it
gave or was given, shares expanded from its pair keys, and the seal.

A sum that nobody opens, because somebody fell silent before the keys were shown, has no z: its simulator gets none.
Seals are for that case, so that is where a protocol without them is told from the real one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cgd.errors import InputError
from cgd.secagg.masking import PairwiseMasks, unseal
from cgd.secagg.messages import Confirm, Ready, RevealKey, Share, Subtotal, SumSpec, Total
from cgd.secagg.partition import parts
from cgd.secagg.secure_sum import SecureSum
from cgd.secagg.states import State

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from cgd.secagg.messages import Message, Opening, Sharing

    Words = npt.NDArray[np.uint32]
    Random = Callable[[int], bytes]

Flaw = Literal["none", "no masks", "shares reused", "seals left out"]
FLAWS: tuple[Flaw, ...] = ("none", "no masks", "shares reused", "seals left out")

_KNOWN_KEY = bytes(16)
"""What a protocol without seals uses for a key: everybody knows it."""


@dataclass(frozen=True)
class Arrangement:
    """Who sums, and how.

    Attributes:
        members: everybody.
        coalition: who colludes; at most all but two.
        sharing: of the sum.
        opening: of the sum.
        opened: whether the sums come to their end; otherwise an honest member falls silent before keys are shown.
        flaw: what is wrong with the protocol, to see whether it is noticed.
    """

    members: tuple[str, ...] = ("a", "b", "c", "d")
    coalition: frozenset[str] = frozenset({"a", "b"})
    sharing: Sharing = "expanded"
    opening: Opening = "mesh"
    opened: bool = True
    flaw: Flaw = "none"

    def __post_init__(self) -> None:
        if not self.coalition < set(self.members) or len(self.honest) < 2:
            raise InputError(
                f"{len(self.coalition)} of {len(self.members)} collude; Theorem 2 is about coalitions of up to m − 2"
            )

    @property
    def honest(self) -> tuple[str, ...]:
        """The others."""
        return tuple(name for name in self.members if name not in self.coalition)

    def spec(self, size: int) -> SumSpec:
        """The settings of a sum of so many words."""
        aggregator = self.members[0] if self.opening == "aggregator" else ""
        return SumSpec((size,), "float32", 32, 20, self.sharing, self.opening, aggregator)


def run(arrangement: Arrangement, inputs: Sequence[Mapping[str, Words]], random: Random) -> dict[str, Words]:
    """One run of the real protocol, a sum for each of `inputs`: the coalition's view, as words by what they are."""
    keys = _pair_keys(arrangement, random)
    shares = {me: _shares(arrangement, me, keys[me]) for me in arrangement.members}
    again = random(1 << 12)  # what a protocol that reuses its shares draws them from
    seen: dict[str, Words] = {}
    for number, each in enumerate(inputs, 1):
        sources = {me: _source(arrangement, random, again, place) for place, me in enumerate(arrangement.members)}
        coalition = _Coalition(arrangement, number, keys, each)
        sums = {me: SecureSum(me, arrangement.members, number, shares[me], sources[me]) for me in arrangement.members}
        _exchange(arrangement, sums, each, coalition)
        seen |= {f"sum {number}: {name}": words for name, words in coalition.words().items()}
    return seen


def simulate(
    arrangement: Arrangement, own: Sequence[Mapping[str, Words]], z: Sequence[Words | None], random: Random
) -> dict[str, Words]:
    """Theorem 2's simulator: the coalition's view from its own inputs and z alone.

    Args:
        arrangement: who sums, and how.
        own: the coalition's inputs to each sum.
        z: the honest participants' sum in each; None of a sum that is not opened.
        random: where dummies, shares and keys come from.
    """
    inputs = []
    for mine, total in zip(own, z, strict=True):
        size = len(next(iter(mine.values())))
        first, *others = arrangement.honest
        dummies = {name: _uniform(size, random) for name in others}
        if total is None:
            total = _uniform(size, random)
        dummies[first] = total - sum(dummies.values(), np.zeros(size, dtype=np.uint32))
        inputs.append({**mine, **dummies})
    return run(arrangement, inputs, random)


def stream(seed: int) -> Random:
    """Random bytes of a seed: a new block of SHAKE-128 for every call."""
    calls = 0

    def draw(count: int) -> bytes:
        nonlocal calls
        calls += 1
        return hashlib.shake_128(f"{seed} {calls}".encode()).digest(count)

    return draw


# The protocol, sound or with a flaw.


class _Coalition:
    """Collects what the members of the coalition receive in one sum, and takes away what they can explain."""

    def __init__(
        self,
        arrangement: Arrangement,
        number: int,
        keys: Mapping[str, Mapping[str, bytes]],
        inputs: Mapping[str, Words],
    ) -> None:
        size = len(next(iter(inputs.values())))
        self._arrangement = arrangement
        self._seen: dict[str, Words] = {}
        self._cut = parts(arrangement.spec(size), arrangement.members)
        self._unsealed: dict[str, bytes] = {}
        self._left = {name: np.zeros(size, dtype=np.uint32) for name in arrangement.honest}
        self.total: Words | None = None
        if arrangement.sharing == "expanded":
            for name, left in self._left.items():
                shared = {peer: key for peer, key in keys[name].items() if peer in arrangement.coalition}
                known = np.zeros(size, dtype=np.uint32)
                _shares(arrangement, name, shared).add_to(known, number)  # the coalition knows the flaw, if any
                left -= known

    def overhear(self, sender: str, to: str, message: Message) -> None:
        """Take in a message; only what the coalition sends or receives is known to it."""
        ours = self._arrangement.coalition
        if sender in ours and to not in ours and isinstance(message, Share):
            self._left[to] -= _words(message.words)
        if to not in ours or sender in ours:
            return
        match message:
            case Ready(_, seal):
                self._note("Ready", sender, to, _words(seal))
            case Share(_, words):
                self._note("Share", sender, to, _words(words))
                self._left[sender] += _words(words)
            case Subtotal(_, words):
                self._note("Subtotal", sender, to, _words(words))
                self._left[sender][self._cut[to]] += _words(words)
            case Total(_, words):
                self._note("Total", sender, to, _words(words))
            case Confirm(digest):
                self._note("Confirm", sender, to, _words(digest))
            case RevealKey(key):
                self._note("RevealKey", sender, to, _words(key))
                self._unsealed[sender] = key

    def words(self) -> dict[str, Words]:
        """The view: everything received, what is left unexplained, and the total if it was opened."""
        ours = [self._cut[name] for name in self._cut if name in self._arrangement.coalition]
        view = dict(self._seen)
        everything = []
        for name, left in self._left.items():
            rest = left.copy()
            unseal(rest, [self._unsealed.get(name, _KNOWN_KEY)])
            everything.append(np.concatenate([rest[place] for place in ours]))
            view[f"unexplained of {name}"] = everything[-1]
        view["unexplained of all"] = np.sum(everything, axis=0, dtype=np.uint32)
        if self.total is not None:
            view["total"] = self.total
        return view

    def _note(self, kind: str, sender: str, to: str, words: Words) -> None:
        once = kind in ("Ready", "Confirm", "RevealKey", "Total")  # all members are told the same
        self._seen[f"{kind} of {sender}" if once else f"{kind} of {sender} to {to}"] = words


def _exchange(
    arrangement: Arrangement, sums: dict[str, SecureSum], inputs: Mapping[str, Words], coalition: _Coalition
) -> None:
    """Let the messages of one sum fly, in a fixed order, until it is over or nothing flies any more."""
    silent = None if arrangement.opened else arrangement.honest[-1]
    for name, each in sums.items():
        each.start(arrangement.spec(len(inputs[name])), inputs[name].copy())
    moved = True
    while moved:
        moved = False
        for sender, each in sums.items():
            while (outgoing := each.next_outgoing()) is not None:
                to, message = outgoing
                if sender == silent and isinstance(message, Confirm | RevealKey):
                    continue
                moved = True
                coalition.overhear(sender, to, message)
                sums[to].receive(sender, message)
    one = sums[min(arrangement.coalition)]
    if one.state is State.FINISHED:
        coalition.total = one.total.copy()


class _NoMasks(PairwiseMasks):
    def add_to(self, words: npt.NDArray[Any], position: int) -> None:
        """Add nothing."""


class _SameMasks(PairwiseMasks):
    def add_to(self, words: npt.NDArray[Any], position: int) -> None:
        """Add the shares of position 1, whatever the position is."""
        self._last_position = -1
        super().add_to(words, min(position, 1))


def _shares(arrangement: Arrangement, me: str, keys: Mapping[str, bytes]) -> PairwiseMasks:
    kinds: dict[Flaw, type[PairwiseMasks]] = {"no masks": _NoMasks, "shares reused": _SameMasks}
    return kinds.get(arrangement.flaw, PairwiseMasks)(me, keys)


def _source(arrangement: Arrangement, random: Random, again: bytes, place: int) -> Random:
    """What a member draws from in one sum: first the key of its seal, then uniform shares."""
    calls = 0

    def draw(count: int) -> bytes:
        nonlocal calls
        calls += 1
        if calls == 1:
            return _KNOWN_KEY if arrangement.flaw == "seals left out" else random(count)
        if arrangement.flaw == "no masks":
            return bytes(count)
        if arrangement.flaw == "shares reused":
            return hashlib.shake_128(again + bytes([place, calls])).digest(count)
        return random(count)

    return draw


def _pair_keys(arrangement: Arrangement, random: Random) -> dict[str, dict[str, bytes]]:
    keys: dict[str, dict[str, bytes]] = {name: {} for name in arrangement.members}
    for one, other in combinations(arrangement.members, 2):
        keys[one][other] = keys[other][one] = random(16)
    return keys


def _uniform(size: int, random: Random) -> Words:
    return np.frombuffer(random(4 * size), dtype="<u4").copy()


def _words(data: bytes | memoryview) -> Words:
    return np.frombuffer(bytes(data), dtype="<u4").copy()
