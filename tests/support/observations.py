"""The dishonest member's observations of honest members' addends, and a check that the addends stay hidden."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from cgd.secagg import secure_sum
from cgd.secagg.certificates import Terms
from cgd.secagg.masking import PairwiseMasks
from support.adversary import ADVERSARY

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    import numpy.typing as npt

    from cgd.secagg.secure_sum import SecureSum


class InvariantError(AssertionError):
    """An invariant does not hold."""


@dataclass
class Observation:
    """The contribution of an honest member to one attempt at a sum.

    Attributes:
        member: the name of the member.
        members: the members of the sum.
        sum: the step of a gradient sum, whatever its index in the journal; the index of any other sum.
        addend: the digest of its addend.
        masks: the key and position of the mask shared with each peer.
        revealed: whether it has revealed its self-mask key.
        commitment: its commitment to that key.
    """

    member: str
    members: tuple[str, ...]
    sum: tuple[str, int]
    addend: bytes
    masks: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    revealed: bool = False
    commitment: bytes = b""


class Observations:
    """The dishonest member's observations of honest members' addends; `check` proves that the addends stay hidden.

    An honest member h sends in an attempt x_h ± (one mask for each peer) + (its self-mask). The self-mask is secret
    until h reveals its key. Suppose that
    - masks that two honest members share are known to them alone,
    - each such mask is used by the two once, in one attempt, one of them adding and the other subtracting it, and
    - all attempts at one sum in which all honest members revealed their keys are over the same honest members with the
      same addends.
    Then for any other addends with the same sum there are other masks that give the same view: a pairwise mask is
    uniform to the dishonest member, and the pairs of one attempt connect all its honest members. `check` checks these
    suppositions on the masks that were really added.
    """

    def __init__(self, dishonest: Collection[str] = (ADVERSARY,)) -> None:
        self.dishonest = frozenset(dishonest)
        self.attempts: dict[tuple[bytes, int], dict[str, Observation]] = {}
        self.adversary_keys: set[bytes] = set()
        """The mask keys that the dishonest member has."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record every sum of honest members."""
        add_to, start, start_reduction, reveal = (
            PairwiseMasks.add_to,
            secure_sum.SecureSum.start,
            secure_sum.SecureSum._start_reduction,
            secure_sum.SecureSum._reveal,
        )
        current: list[Observation] = []

        def recorded_start(this: SecureSum, settings: Any, secret: npt.NDArray[Any], terms: bytes, *hooks: Any) -> None:
            if this.me not in self.dishonest and this._masks is not None:
                at = Terms.from_bytes(terms)
                which = ("step", at.step[1]) if settings.weighted and at.step is not None else ("index", at.index)
                digest = sha256(secret.data).digest()
                commitment = sha256(this._key).digest()
                found = Observation(this.me, this.members, which, digest, commitment=commitment)
                this.observation = found  # type: ignore[attr-defined]
            start(this, settings, secret, terms, *hooks)

        def recorded_reduction(this: SecureSum) -> None:
            observation = getattr(this, "observation", None)
            if observation is not None:
                attempt = this.agreement._statement_signer.slot(0), this.number
                self.attempts.setdefault(attempt, {})[this.me] = observation
                current[:] = [observation]
            start_reduction(this)
            current.clear()

        def recorded_add(this: PairwiseMasks, words: npt.NDArray[Any], position: int) -> None:
            if this._me in self.dishonest:
                self.adversary_keys |= set(this._keys.values())
            if current:
                current[0].masks = {peer: (key, position) for peer, key in this._keys.items()}
            add_to(this, words, position)

        def recorded_reveal(this: SecureSum) -> None:
            observation = getattr(this, "observation", None)
            if observation is not None:
                observation.revealed = True
            reveal(this)

        with (
            patch.object(PairwiseMasks, "add_to", recorded_add),
            patch.object(secure_sum.SecureSum, "start", recorded_start),
            patch.object(secure_sum.SecureSum, "_start_reduction", recorded_reduction),
            patch.object(secure_sum.SecureSum, "_reveal", recorded_reveal),
        ):
            yield

    def any_revealed(self) -> bool:
        """Return whether an honest member has revealed its key in any attempt."""
        return any(each.revealed for attempt in self.attempts.values() for each in attempt.values())

    def check(self) -> None:
        """Check the suppositions of the proof.

        Raises:
            InvariantError: one does not hold.
        """
        used: dict[tuple[bytes, int], list[tuple[tuple[bytes, int], str, str]]] = {}
        revealed: dict[tuple[str, int], set[tuple[tuple[str, bytes], ...]]] = {}
        for attempt, observations in self.attempts.items():
            for each in observations.values():
                if len(set(each.masks.values())) != len(each.members) - 1:
                    raise InvariantError(f"{each.member} used one mask for two peers, or omitted one")
                for peer, mask in each.masks.items():
                    used.setdefault(mask, []).append((attempt, each.member, peer))
                    if peer not in self.dishonest and mask[0] in self.adversary_keys:
                        raise InvariantError(f"the dishonest member has the mask of {each.member} and {peer}")
            honest = {name for each in observations.values() for name in each.members} - self.dishonest
            if honest <= observations.keys() and all(observations[name].revealed for name in honest):
                which = next(iter(observations.values())).sum
                addends = tuple(sorted((name, observations[name].addend) for name in honest))
                revealed.setdefault(which, set()).add(addends)
        for mask, uses in used.items():
            if len({attempt for attempt, _, _ in uses}) > 1 or len({frozenset(pair) for _, *pair in uses}) > 1:
                raise InvariantError(f"the mask {mask[0].hex()} was used more than once: {uses}")
        for (kind, number), sets in revealed.items():
            if len(sets) > 1:
                raise InvariantError(
                    f"the sum of {kind} {number} was revealed over different honest members or addends: {sets}"
                )
