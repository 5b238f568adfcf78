"""The hub's whole recorded view: no gradient, no sum, no key in it, and nothing by which a guess could be confirmed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from scipy import stats

from cgd import FixedPoint
from cgd.peers import SumSettings
from cgd.secagg import secure_sum
from cgd.secagg.codec import Frame, from_bytes, to_bytes
from cgd.secagg.hub_aggregator import HubAggregator
from cgd.secagg.masking import PairwiseMasks, seal, unseal
from cgd.secagg.messages import HUB, SHARINGS, Deposit, SumSpec, Total
from cgd.secagg.reduction import HubKeys
from cgd.secagg.secure_sum import SecureSum
from cgd.secagg.states import State
from cgd.transport import link
from cgd.transport.link import DatagramKind
from support.hubs import EVERYONE, MEMBERS, Town
from support.wire import pair_keys, ring_total

if TYPE_CHECKING:
    import numpy.typing as npt

    from cgd.secagg.messages import Opening, Sharing

    Words = npt.NDArray[Any]

SIZE, SUMS = 2000, 10
FALSE_ALARM = 1e-6
GRADIENTS = {name: np.random.default_rng(ord(name)).normal(size=SIZE).astype(np.float32) for name in MEMBERS}


@dataclass
class Secrets:
    """What the members had, and the hub must not have."""

    subtotals: list[Words] = field(default_factory=list)
    sealed: list[Words] = field(default_factory=list)
    seal_keys: list[bytes] = field(default_factory=list)
    others: list[bytes] = field(default_factory=list)
    """Pair keys, as derived for the session, and the key that all members have."""


def watched(town: Town, monkeypatch: pytest.MonkeyPatch) -> Secrets:
    """Let everybody sum, and note all secrets."""
    secrets = Secrets()

    def noting(words: Words, key: bytes) -> None:
        secrets.subtotals.append(words.copy())
        secrets.seal_keys.append(key)
        seal(words, key)
        secrets.sealed.append(words.copy())

    monkeypatch.setattr(secure_sum, "seal", noting)
    town.start_hub()
    town.start()
    _, errors = town.sums(GRADIENTS, count=SUMS)
    assert not errors
    for life in town.lives.values():
        session = life.membership.group(EVERYONE).session
        assert session is not None
        assert session.hub is not None
        assert session._shares is not None
        secrets.others += [session.hub.key, *session._shares._keys.values()]
    return secrets


def said_to_the_hub(town: Town) -> tuple[dict[tuple[str, int], Words], dict[int, Words]]:
    """Everything that was deposited, by its member and sum, and the totals that the hub told."""
    deposits: dict[tuple[str, int], Words] = {}
    totals: dict[int, Words] = {}
    for inward, peer, name, payload in town.view.messages:
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


def encoded() -> dict[str, Words]:
    fixed_point = FixedPoint.for_sum(addends=3, bound=16.0)
    return {name: fixed_point.encode(gradient) for name, gradient in GRADIENTS.items()}


def pieces(words: Words) -> list[bytes]:
    """Three neighbours in a row, here and there: by chance they turn up once in 2^96."""
    return [words[i : i + 3].tobytes() for i in range(0, len(words) - 3, 97)]


def p_values(words: Words) -> list[float]:
    """Chi-squared tests of the upper and the lower four bits against uniform."""
    counts = [np.bincount(part, minlength=16) for part in (words >> 28, words & 15)]
    return [float(stats.chisquare(each).pvalue) for each in counts]


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("opening", ["hub", "mesh"])
def test_the_view_holds_no_gradient_no_sum_and_no_key(
    sharing: Sharing, opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Town(settings=SumSettings(sharing=sharing, opening=opening)) as town:
        secrets = watched(town, monkeypatch)
        total = ring_total(list(encoded().values()))
        hidden = [*GRADIENTS.values(), *encoded().values(), total, *secrets.subtotals]
        for words in hidden:
            assert not any(piece in town.view for piece in pieces(words))
        for key in {*secrets.seal_keys, *secrets.others}:
            assert key not in town.view
            assert key[:8] not in town.view
        # The search does find what is there: what was deposited, or, end to end, no more than the names of sessions.
        found = [all(piece in town.view for piece in pieces(words)) for words in secrets.sealed]
        assert len(found) == 3 * SUMS
        assert all(found) if opening == "hub" else not any(found)
        ends = [(life.transport._channels, name) for me, life in town.lives.items() for name in MEMBERS if name != me]
        channels = [sealing.with_peer(name) for sealing, name in ends]
        assert all(name in town.view for channel in channels for name in channel._sessions)
        assert all(channel._sessions for channel in channels)


@pytest.mark.parametrize("sharing", SHARINGS)
def test_what_is_deposited_and_told_is_uniform_and_confirms_no_sum(
    sharing: Sharing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever knows the true sum cannot tell by the view that it is the one.

    The difference is as uniform as that from any other vector. False alarms: 10^-6, for all p-values together.
    """
    with Town(settings=SumSettings(sharing=sharing, opening="hub")) as town:
        secrets = watched(town, monkeypatch)
        deposits, totals = said_to_the_hub(town)
    assert len(deposits) == 3 * SUMS
    assert len(totals) == SUMS
    total = ring_total(list(encoded().values()))
    wrong = np.roll(total, 1)
    views: list[Words] = [*deposits.values(), *totals.values()]
    views += [each[:SIZE] - guess for each in totals.values() for guess in (total, wrong)]
    views += [each[:SIZE] - encoded()[name] for (name, _), each in deposits.items()]
    everything = [np.concatenate(views[:40]), np.concatenate(views[40:]), *views]
    found = [p for words in everything for p in p_values(words)]
    assert min(found) > FALSE_ALARM / len(found)
    # Nor do several sums together say more: two of the same gradients have nothing in common.
    assert min(p_values(totals[1] - totals[2])) > FALSE_ALARM / len(found)
    # The test would notice: bare gradients, bare totals, or totals whose seals are known.
    assert max(p_values(total)[0], *(p_values(each)[0] for each in encoded().values())) < FALSE_ALARM / len(found)
    opened = totals[1][:SIZE].copy()
    first = [deposits[name, 1][:SIZE].tobytes() for name in MEMBERS]
    pairs = zip(secrets.seal_keys, secrets.sealed, strict=True)
    unseal(opened, [key for key, words in pairs if words.tobytes() in first])
    assert np.array_equal(opened, total)


def view_of(inputs: dict[str, Words], streams: dict[bytes, Words], monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """All that the hub gets and tells in one sum whose seals are read from a tape."""

    def add(words: Words, key: bytes) -> None:
        words += streams[key]

    def subtract(words: Words, keys: list[bytes]) -> None:
        for key in keys:
            words -= streams[key]

    monkeypatch.setattr(secure_sum, "seal", add)
    monkeypatch.setattr(secure_sum, "unseal", subtract)
    spec = SumSpec((8,), "float32", 32, 20, "expanded", "hub")
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
    adder = HubAggregator({EVERYONE: MEMBERS})
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
                told = adder.receive(name, seen[-1])
                if told is not None:
                    seen.append(told[1])
                    for member in MEMBERS:
                        sums[member].receive(HUB, from_bytes(told[1], HUB).message)
    expected = ring_total(list(inputs.values()))
    assert all(np.array_equal(each.total, expected) for each in sums.values())
    return seen


KEYS = pair_keys(MEMBERS)


def test_the_view_of_one_sum_is_that_of_any_other_under_a_shift_of_the_seals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly: whatever was summed, with other seals the hub would have seen the same bytes.

    To whoever lacks their keys seals are uniform, so the view says nothing, not even of the total.
    """
    rng = np.random.default_rng(1)
    one, other, streams = ({name: rng.integers(0, 2**32, 8, dtype=np.uint32) for name in MEMBERS} for _ in range(3))
    seals = {name.encode() * 16: streams[name] for name in MEMBERS}
    shifted = {name.encode() * 16: streams[name] + one[name] - other[name] for name in MEMBERS}
    assert view_of(one, seals, monkeypatch) == view_of(other, shifted, monkeypatch)
    assert view_of(one, seals, monkeypatch) != view_of(other, seals, monkeypatch)  # the comparison can fail
    assert len(view_of(one, seals, monkeypatch)) == 4
