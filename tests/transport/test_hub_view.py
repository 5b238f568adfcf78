"""The view of the hub contains no gradient, no sum and no key, and cannot confirm a guess of a sum."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from cgd import FixedPoint
from cgd.peers import SumSettings
from cgd.secagg import secure_sum
from cgd.secagg.codec import Frame, from_bytes, to_bytes
from cgd.secagg.hub_aggregator import HubAggregator
from cgd.secagg.masking import PairwiseMasks, add_self_mask, remove_self_masks
from cgd.secagg.messages import HUB, MASKINGS, Deposit, SumSpec, Total
from cgd.secagg.reduction import HubKeys
from cgd.secagg.secure_sum import SecureSum
from cgd.secagg.states import State
from cgd.transport import link
from cgd.transport.link import DatagramKind
from support.hubs import EVERYONE, HubFederation
from support.transports import MEMBERS
from support.uniformity import p_values
from support.wire import pair_keys, ring_total

if TYPE_CHECKING:
    import numpy.typing as npt

    from cgd.secagg.messages import Masking, Opening

    Words = npt.NDArray[Any]

SIZE, SUMS = 2000, 10
FALSE_ALARM_RATE = 1e-6
GRADIENTS = {name: np.random.default_rng(ord(name)).normal(size=SIZE).astype(np.float32) for name in MEMBERS}


@dataclass
class Secrets:
    """Secrets of the members that the hub must not learn."""

    subtotals: list[Words] = field(default_factory=list)
    masked: list[Words] = field(default_factory=list)
    mask_keys: list[bytes] = field(default_factory=list)
    others: list[bytes] = field(default_factory=list)
    """The pairwise keys of the session, and the key that all members have."""


def sum_and_collect_secrets(federation: HubFederation, monkeypatch: pytest.MonkeyPatch) -> Secrets:
    """Run the sums of all members, and return their secrets."""
    secrets = Secrets()

    def collect(words: Words, key: bytes) -> None:
        secrets.subtotals.append(words.copy())
        secrets.mask_keys.append(key)
        add_self_mask(words, key)
        secrets.masked.append(words.copy())

    monkeypatch.setattr(secure_sum, "add_self_mask", collect)
    federation.start_hub()
    federation.start()
    _, errors = federation.sums(GRADIENTS, count=SUMS)
    assert not errors
    for participant in federation.participants.values():
        session = participant.membership.group(EVERYONE).session
        assert session is not None
        assert session.hub is not None
        assert session._masks is not None
        secrets.others += [session.hub.key, *session._masks._keys.values()]
    return secrets


def deposits_and_totals(federation: HubFederation) -> tuple[dict[tuple[str, int], Words], dict[int, Words]]:
    """Return all deposits, by member and sum, and the totals that the hub sent."""
    deposits: dict[tuple[str, int], Words] = {}
    totals: dict[int, Words] = {}
    for inward, peer, name, payload in federation.view.messages:
        if name != b"":
            continue
        datagram = link.from_bytes(payload)
        if datagram.kind is not DatagramKind.DATA:
            continue
        frame = from_bytes(datagram.body, peer)
        if inward and isinstance(frame.message, Deposit):
            deposits[peer, frame.number] = np.frombuffer(frame.message.words, dtype="<u4")
        elif not inward and isinstance(frame.message, Total):
            totals[frame.number] = np.frombuffer(frame.message.words, dtype="<u4")
    return deposits, totals


def encoded_gradients() -> dict[str, Words]:
    fixed_point = FixedPoint.for_sum(addends=3, bound=16.0)
    return {name: fixed_point.encode(gradient) for name, gradient in GRADIENTS.items()}


def pieces(words: Words) -> list[bytes]:
    """Return some sequences of three neighbouring words; each occurs by chance with probability 2^-96."""
    return [words[i : i + 3].tobytes() for i in range(0, len(words) - 3, 97)]


@pytest.mark.parametrize("masking", MASKINGS)
@pytest.mark.parametrize("opening", ["hub", "mesh"])
def test_view_of_the_hub_contains_no_gradient_no_sum_and_no_key(
    masking: Masking, opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HubFederation(settings=SumSettings(masking=masking, opening=opening)) as federation:
        secrets = sum_and_collect_secrets(federation, monkeypatch)
        total = ring_total(list(encoded_gradients().values()))
        hidden = [*GRADIENTS.values(), *encoded_gradients().values(), total, *secrets.subtotals]
        for words in hidden:
            assert not any(piece in federation.view for piece in pieces(words))
        for key in {*secrets.mask_keys, *secrets.others}:
            assert key not in federation.view
            assert key[:8] not in federation.view
        # The search finds what the hub does see: the deposits or, end to end encrypted, only the names of sessions.
        found = [all(piece in federation.view for piece in pieces(words)) for words in secrets.masked]
        assert len(found) == 3 * SUMS
        assert all(found) if opening == "hub" else not any(found)
        channels = [
            participant.transport._channels.with_peer(peer)
            for name, participant in federation.participants.items()
            for peer in MEMBERS
            if peer != name
        ]
        assert all(name in federation.view for channel in channels for name in channel._sessions)
        assert all(channel._sessions for channel in channels)


@pytest.mark.parametrize("masking", MASKINGS)
def test_deposits_and_totals_are_uniform_and_confirm_no_sum(masking: Masking, monkeypatch: pytest.MonkeyPatch) -> None:
    """An observer that knows the true sum cannot confirm it from the view.

    The difference is as uniform as that from any other vector. The rate of false alarms is 10^-6 for all p-values.
    """
    with HubFederation(settings=SumSettings(masking=masking, opening="hub")) as federation:
        secrets = sum_and_collect_secrets(federation, monkeypatch)
        deposits, totals = deposits_and_totals(federation)
    assert len(deposits) == 3 * SUMS
    assert len(totals) == SUMS
    total = ring_total(list(encoded_gradients().values()))
    wrong = np.roll(total, 1)
    views: list[Words] = [*deposits.values(), *totals.values()]
    views += [each[:SIZE] - guess for each in totals.values() for guess in (total, wrong)]
    views += [each[:SIZE] - encoded_gradients()[name] for (name, _), each in deposits.items()]
    everything = [np.concatenate(views[:40]), np.concatenate(views[40:]), *views]
    found = [p for words in everything for p in p_values(words)]
    assert min(found) > FALSE_ALARM_RATE / len(found)
    # Nor do several sums together: the views of two sums of the same gradients are independent.
    assert min(p_values(totals[1] - totals[2])) > FALSE_ALARM_RATE / len(found)
    # The test does detect unmasked gradients, unmasked totals, and totals whose mask keys are known.
    assert max(
        p_values(total)[0], *(p_values(each)[0] for each in encoded_gradients().values())
    ) < FALSE_ALARM_RATE / len(found)
    opened = totals[1][:SIZE].copy()
    first = [deposits[name, 1][:SIZE].tobytes() for name in MEMBERS]
    pairs = zip(secrets.mask_keys, secrets.masked, strict=True)
    remove_self_masks(opened, [key for key, words in pairs if words.tobytes() in first])
    assert np.array_equal(opened, total)


def view_of(inputs: dict[str, Words], masks: dict[bytes, Words], monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return all messages of the hub in one sum whose self-masks are given."""

    def add(words: Words, key: bytes) -> None:
        words += masks[key]

    def subtract(words: Words, keys: list[bytes]) -> None:
        for key in keys:
            words -= masks[key]

    monkeypatch.setattr(secure_sum, "add_self_mask", add)
    monkeypatch.setattr(secure_sum, "remove_self_masks", subtract)
    spec = SumSpec((8,), "float32", 32, 20, "pairwise", "hub")
    sums = {
        name: SecureSum(
            name,
            MEMBERS,
            1,
            PairwiseMasks(name, KEYS[name]),
            lambda size, name=name: name.encode() * size,  # type: ignore[misc]
            HubKeys(EVERYONE, b"t" * 16),
        )
        for name in MEMBERS
    }
    aggregator = HubAggregator({EVERYONE: MEMBERS})
    seen: list[bytes] = []
    for name, each in sums.items():
        each.start(spec, inputs[name].copy())
    while not all(each.state is State.FINISHED for each in sums.values()):
        for name, each in sums.items():
            while (outgoing := each.next_outgoing()) is not None:
                to, message = outgoing
                if to != HUB:
                    sums[to].receive(name, message)
                    continue
                seen.append(to_bytes(Frame(bytes(16), 1, message)))
                finished = aggregator.receive(name, seen[-1])
                if finished is not None:
                    seen.append(bytes(finished[1]))
                    for member in MEMBERS:
                        sums[member].receive(HUB, from_bytes(finished[1], HUB).message)
    expected = ring_total(list(inputs.values()))
    assert all(np.array_equal(each.total, expected) for each in sums.values())
    return seen


KEYS = pair_keys(MEMBERS)


def test_view_of_a_sum_equals_that_of_any_other_with_shifted_self_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """For any inputs there are self-masks with which the hub sees exactly the same bytes.

    Self-masks are uniform without their keys, so the view reveals nothing, not even the total.
    """
    rng = np.random.default_rng(1)
    one, other, words = ({name: rng.integers(0, 2**32, 8, dtype=np.uint32) for name in MEMBERS} for _ in range(3))
    masks = {name.encode() * 16: words[name] for name in MEMBERS}
    shifted = {name.encode() * 16: words[name] + one[name] - other[name] for name in MEMBERS}
    assert view_of(one, masks, monkeypatch) == view_of(other, shifted, monkeypatch)
    assert view_of(one, masks, monkeypatch) != view_of(other, masks, monkeypatch)  # the comparison can fail
    assert len(view_of(one, masks, monkeypatch)) == 4
