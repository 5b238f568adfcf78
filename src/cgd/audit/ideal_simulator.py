"""The simulator of Theorem 2, and the real protocol, for a test of the simulation paradigm.

The theorem says that the view of a coalition depends only on its own inputs and on z, the honest participants' sum. The
proof is a simulator (the paper's appendix): it gives the honest participants dummy inputs that sum to z, runs the
protocol with these and with the coalition's true inputs, and returns the coalition's view. Both run the product's own
`SecureSum`: `run` with the true inputs, `simulate` with dummy inputs. `attacks/simulator.py` compares the views.

A view is every word that a member of the coalition receives (shares, subtotals, masked totals, digests, keys), the
total, and an honest member's subtotal without the parts that the coalition knows: shares that it sent or received,
pairwise masks from its keys, and the self-mask.

A sum that is not opened, because a member stopped before the self-mask keys were revealed, has no z, and its simulator
gets none. Self-masks protect this case, in which a protocol without them must be distinguishable.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cgd.errors import InputError
from cgd.secagg.masking import PairwiseMasks, remove_self_masks
from cgd.secagg.messages import Confirm, Ready, RevealKey, Share, Subtotal, SumSpec, Total
from cgd.secagg.reduction import parts
from cgd.secagg.secure_sum import SecureSum
from cgd.secagg.states import State

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from cgd.secagg.messages import Masking, Message, Opening

    Words = npt.NDArray[np.uint32]
    Random = Callable[[int], bytes]

Flaw = Literal["none", "no masks", "masks reused", "no self-masks"]
FLAWS: tuple[Flaw, ...] = ("none", "no masks", "masks reused", "no self-masks")

_KNOWN_KEY = bytes(16)
"""The key of self-masks in a protocol without them, which everybody knows."""


@dataclass(frozen=True)
class ProtocolSetup:
    """The members of the sums, and the protocol.

    Attributes:
        members: all members.
        coalition: the colluders; at most all but two.
        masking: the kind of masking.
        opening: the kind of opening.
        opened: true if the sums are opened; otherwise an honest member stops before self-mask keys are revealed.
        flaw: a deliberate flaw of the protocol, which the comparison must detect.
    """

    members: tuple[str, ...] = ("a", "b", "c", "d")
    coalition: frozenset[str] = frozenset({"a", "b"})
    masking: Masking = "pairwise"
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
        """The honest members."""
        return tuple(name for name in self.members if name not in self.coalition)

    def spec(self, size: int) -> SumSpec:
        """Return the settings of a sum of `size` words."""
        aggregator = self.members[0] if self.opening == "aggregator" else ""
        return SumSpec((size,), "float32", 32, 20, self.masking, self.opening, aggregator)


def run(setup: ProtocolSetup, inputs: Sequence[Mapping[str, Words]], random: Random) -> dict[str, Words]:
    """Run the real protocol, one sum per item of `inputs`, and return the words of the coalition's view by name."""
    keys = _pair_keys(setup, random)
    shares = {me: _pairwise_masks(setup, me, keys[me]) for me in setup.members}
    again = random(1 << 12)  # the seed of reused masks
    seen: dict[str, Words] = {}
    for number, each in enumerate(inputs, 1):
        sources = {me: _source(setup, random, again, place) for place, me in enumerate(setup.members)}
        coalition = _CoalitionView(setup, number, keys, each)
        sums = {me: SecureSum(me, setup.members, number, shares[me], sources[me]) for me in setup.members}
        _exchange(setup, sums, each, coalition)
        seen |= {f"sum {number}: {name}": words for name, words in coalition.words().items()}
    return seen


def simulate(
    setup: ProtocolSetup, own: Sequence[Mapping[str, Words]], z: Sequence[Words | None], random: Random
) -> dict[str, Words]:
    """Simulate the coalition's view from its own inputs and z (Theorem 2).

    Args:
        setup: the members and the protocol.
        own: the coalition's inputs to each sum.
        z: the honest participants' total of each sum; None for a sum that is not opened.
        random: the source of dummy inputs, shares and keys.
    """
    inputs = []
    for mine, total in zip(own, z, strict=True):
        size = len(next(iter(mine.values())))
        first, *others = setup.honest
        dummies = {name: _uniform(size, random) for name in others}
        if total is None:
            total = _uniform(size, random)
        dummies[first] = total - sum(dummies.values(), np.zeros(size, dtype=np.uint32))
        inputs.append({**mine, **dummies})
    return run(setup, inputs, random)


def stream(seed: int) -> Random:
    """Return a source of random bytes with a seed: a new block of SHAKE-128 for every call."""
    calls = 0

    def draw(count: int) -> bytes:
        nonlocal calls
        calls += 1
        return hashlib.shake_128(f"{seed} {calls}".encode()).digest(count)

    return draw


# The protocol, with or without a flaw.


class _CoalitionView:
    """Collects the words that the coalition receives in one sum, and subtracts those that it knows."""

    def __init__(
        self,
        setup: ProtocolSetup,
        number: int,
        keys: Mapping[str, Mapping[str, bytes]],
        inputs: Mapping[str, Words],
    ) -> None:
        size = len(next(iter(inputs.values())))
        self._setup = setup
        self._received: dict[str, Words] = {}
        self._cut = parts(setup.spec(size), setup.members)
        self._keys: dict[str, bytes] = {}
        self._residual = {name: np.zeros(size, dtype=np.uint32) for name in setup.honest}
        self.total: Words | None = None
        if setup.masking == "pairwise":
            for name, residual in self._residual.items():
                shared = {peer: key for peer, key in keys[name].items() if peer in setup.coalition}
                known = np.zeros(size, dtype=np.uint32)
                _pairwise_masks(setup, name, shared).add_to(known, number)  # the coalition knows the flaw, if any
                residual -= known

    def receive(self, sender: str, to: str, message: Message) -> None:
        """Process a message; the coalition knows only those that it sends or receives."""
        ours = self._setup.coalition
        if sender in ours and to not in ours and isinstance(message, Share):
            self._residual[to] -= _words(message.words)
        if to not in ours or sender in ours:
            return
        match message:
            case Ready(_, commitment):
                self._note("Ready", sender, to, _words(commitment))
            case Share(_, words):
                self._note("Share", sender, to, _words(words))
                self._residual[sender] += _words(words)
            case Subtotal(_, words):
                self._note("Subtotal", sender, to, _words(words))
                self._residual[sender][self._cut[to]] += _words(words)
            case Total(_, words):
                self._note("Total", sender, to, _words(words))
            case Confirm(digest):
                self._note("Confirm", sender, to, _words(digest))
            case RevealKey(key):
                self._note("RevealKey", sender, to, _words(key))
                self._keys[sender] = key

    def words(self) -> dict[str, Words]:
        """Return the view: received words, the unexplained rest, and the total if it was opened."""
        ours = [self._cut[name] for name in self._cut if name in self._setup.coalition]
        view = dict(self._received)
        everything = []
        for name, residual in self._residual.items():
            rest = residual.copy()
            remove_self_masks(rest, [self._keys.get(name, _KNOWN_KEY)])
            everything.append(np.concatenate([rest[place] for place in ours]))
            view[f"unexplained of {name}"] = everything[-1]
        view["unexplained of all"] = np.sum(everything, axis=0, dtype=np.uint32)
        if self.total is not None:
            view["total"] = self.total
        return view

    def _note(self, kind: str, sender: str, to: str, words: Words) -> None:
        once = kind in ("Ready", "Confirm", "RevealKey", "Total")  # the same for all members
        self._received[f"{kind} of {sender}" if once else f"{kind} of {sender} to {to}"] = words


def _exchange(
    setup: ProtocolSetup, sums: dict[str, SecureSum], inputs: Mapping[str, Words], coalition: _CoalitionView
) -> None:
    """Deliver the messages of one sum in a fixed order, until there are none."""
    stopped = None if setup.opened else setup.honest[-1]
    for name, each in sums.items():
        each.start(setup.spec(len(inputs[name])), inputs[name].copy())
    delivered = True
    while delivered:
        delivered = False
        for sender, each in sums.items():
            while (outgoing := each.next_outgoing()) is not None:
                to, message = outgoing
                if sender == stopped and isinstance(message, Confirm | RevealKey):
                    continue
                delivered = True
                coalition.receive(sender, to, message)
                sums[to].receive(sender, message)
    one = sums[min(setup.coalition)]
    if one.state is State.FINISHED:
        coalition.total = one.total.copy()


class _NoMasks(PairwiseMasks):
    def add_to(self, words: npt.NDArray[Any], position: int) -> None:
        """Add nothing."""


class _ReusedMasks(PairwiseMasks):
    def add_to(self, words: npt.NDArray[Any], position: int) -> None:
        """Add the masks of position 1, for any position."""
        self._last_position = -1
        super().add_to(words, min(position, 1))


def _pairwise_masks(setup: ProtocolSetup, me: str, keys: Mapping[str, bytes]) -> PairwiseMasks:
    kinds: dict[Flaw, type[PairwiseMasks]] = {"no masks": _NoMasks, "masks reused": _ReusedMasks}
    return kinds.get(setup.flaw, PairwiseMasks)(me, keys)


def _source(setup: ProtocolSetup, random: Random, again: bytes, place: int) -> Random:
    """Return a member's source of random bytes in one sum: first for its self-mask key, then for uniform shares."""
    calls = 0

    def draw(count: int) -> bytes:
        nonlocal calls
        calls += 1
        if calls == 1:
            return _KNOWN_KEY if setup.flaw == "no self-masks" else random(count)
        if setup.flaw == "no masks":
            return bytes(count)
        if setup.flaw == "masks reused":
            return hashlib.shake_128(again + bytes([place, calls])).digest(count)
        return random(count)

    return draw


def _pair_keys(setup: ProtocolSetup, random: Random) -> dict[str, dict[str, bytes]]:
    keys: dict[str, dict[str, bytes]] = {name: {} for name in setup.members}
    for one, other in combinations(setup.members, 2):
        keys[one][other] = keys[other][one] = random(16)
    return keys


def _uniform(size: int, random: Random) -> Words:
    return np.frombuffer(random(4 * size), dtype="<u4").copy()


def _words(data: bytes | memoryview) -> Words:
    return np.frombuffer(bytes(data), dtype="<u4").copy()
