"""No frame shows a member's number of samples, neither in the count nor in the training that is weighted by it.

The frames are those that members really send. The argument has three parts. No frame contains the number in any usual
encoding. A member that receives frames for two numbers, made from the same random bits, sees a difference in masked
words only, and none at all if the mask that it does not know differs, too. And what it cannot remove from the masked
words is uniform.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import cgd
from cgd.optim import sample_count
from cgd.peers import Peers, SumSettings
from cgd.secagg import secure_sum, session
from cgd.secagg.codec import from_bytes
from cgd.secagg.journal_entry import Step
from cgd.secagg.masking import PairwiseMasks, remove_self_masks
from cgd.secagg.messages import Buffer, RevealKey, Subtotal
from cgd.secagg.secure_sum import SecureSum
from cgd.secagg.session import Session
from cgd.transport.driver import SessionDriver
from cgd.transport.memory import connect
from cgd.transport.tap import TappedTransport
from support.transports import MEMBERS
from support.uniformity import p_values
from support.wire import pair_keys

if TYPE_CHECKING:
    import numpy.typing as npt

    from cgd.secagg.codec import Frame
    from cgd.transport.base import Transport

    Words = npt.NDArray[Any]

# The numbers add up to 2^26, so that all weights and all weighted gradients of 1 are exact in the ring.
NUMBERS = {"a": 12_345_678, "b": 31_306_397, "c": 23_456_789}
# Other numbers of b and c with the same sum: a must not notice the difference.
OTHER_NUMBERS = {"a": 12_345_678, "b": 20_195_295, "c": 34_567_891}
EQUAL_NUMBERS = dict.fromkeys(MEMBERS, 23_456_789)
STEPS = 2
COUNTS = 200
CONTROL_COUNTS = 50
FALSE_ALARM_RATE = 1e-6
KEYS = {me: {peer: "".join(sorted(me + peer)).encode() * 8 for peer in MEMBERS if peer != me} for me in MEMBERS}
SESSION = b"s" * 16


@dataclass
class Recording:
    """Everything that members send, and what only they know.

    Attributes:
        frames: the frames, by sender, recipient, number of the sum, and kind of message.
        addends: the unmasked addends, by member and number of the sum.
        opened: the opened sum of all numbers of samples, and the opened commitments.
    """

    frames: dict[tuple[str, str, int, str], bytes] = field(default_factory=dict)
    addends: dict[tuple[str, int], Words] = field(default_factory=dict)
    opened: list[int] = field(default_factory=list)

    def from_one_to(self, sender: str, to: str) -> dict[tuple[int, str], bytes]:
        """Return the frames of one sender to one recipient."""
        return {key[2:]: data for key, data in self.frames.items() if key[:2] == (sender, to)}

    def messages(self, sender: str, to: str, kind: str) -> dict[int, Any]:
        """Return the messages of one kind from one sender to one recipient, by the number of the sum."""
        found = self.from_one_to(sender, to).items()
        return {number: from_bytes(data, sender).message for (number, name), data in found if name == kind}


class RecordedTransport(TappedTransport):
    """A transport that records every frame it sends."""

    def __init__(self, inner: Transport, recording: Recording) -> None:
        super().__init__(inner, lambda _sender, _frame: None)
        self._recording = recording

    def send(self, to: str, frame: Buffer) -> bool:
        sent = super().send(to, frame)
        if sent:
            content = from_bytes(frame, self.me)
            key = self.me, to, content.number, type(content.message).__name__
            assert key not in self._recording.frames
            self._recording.frames[key] = bytes(frame)
        return sent


class RecordedMasks(PairwiseMasks):
    """Pairwise masks that record the addends, and to which given words are added."""

    def __init__(self, me: str, keys: dict[str, bytes], recording: Recording, shifts: dict[int, Words]) -> None:
        super().__init__(me, keys, SESSION)
        self._recording, self._shifts = recording, shifts

    def add_to(self, words: Words, position: int) -> None:
        self._recording.addends[self._me, position] = words.copy()
        super().add_to(words, position)
        words += self._shifts.get(position, np.zeros_like(words))


def members_of(
    recording: Recording, keys: dict[str, dict[str, bytes]], shifts: dict[str, dict[int, Words]]
) -> cgd.LocalPeers:
    """Connect three members that record what they send."""
    members = []
    for transport in connect(MEMBERS):
        me = transport.me
        own = Session(me, MEMBERS, SESSION, keys[me])
        own._masks = RecordedMasks(me, keys[me], recording, shifts.get(me, {}))
        driver = SessionDriver(RecordedTransport(transport, recording), own, timeout=60)
        members.append(Peers(driver, SumSettings(), seed=me.encode() * 32))
    return cgd.LocalPeers(members)


def trained(numbers: dict[str, int], shifts: dict[str, dict[int, Words]] | None = None) -> Recording:
    """Count and train with fixed keys."""
    recording = Recording()

    def train(peers: Peers) -> list[int]:
        parameter = nn.Parameter(torch.zeros(3))
        optimizer = cgd.ConfinedSGD([parameter], 0.5, peers=peers, samples=numbers[peers.me])
        for _ in range(STEPS):
            parameter.grad = torch.ones(3)
            optimizer.step()
        group = optimizer.param_groups[0]
        return [group["total_samples"], *group["pledges"]]

    with members_of(recording, KEYS, shifts or {}) as members:
        recording.opened, *others = members.run(train)
    assert all(each == recording.opened for each in others)
    return recording


@pytest.fixture
def _replayed_random_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the keys of self-masks depend only on the member and the number of the sum."""

    def replayed(me: str, members: tuple[str, ...], number: int, masks: PairwiseMasks, **options: Any) -> SecureSum:
        return SecureSum(me, members, number, masks, random.Random(f"{me} {number}").randbytes, **options)

    monkeypatch.setattr(session, "SecureSum", replayed)


def without_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove all masks."""
    monkeypatch.setattr(PairwiseMasks, "add_to", lambda _self, _words, _position: None)
    monkeypatch.setattr(secure_sum, "add_self_mask", lambda _words, _key: None)
    monkeypatch.setattr(secure_sum, "remove_self_masks", lambda _words, _keys: None)


# No frame contains the number.


def encodings(number: int, total: int) -> set[bytes]:
    """Return the usual encodings of a number of samples, and of the weight in which it is contained."""
    weight = number / total
    texts = (str(number), f"{number:,}", f"{number:x}", repr(weight))
    integers = (number.to_bytes(size, order) for size in (4, 8) for order in ("little", "big"))
    floats = (struct.pack(order + size, value) for value in (number, weight) for size in "fd" for order in "<>")
    fixed = (
        cgd.FixedPoint.for_integers(addends=3).encode(np.array([number])),
        cgd.FixedPoint.for_sum(addends=3, bound=1.0).encode(np.array([weight])),
        cgd.FixedPoint.for_weighted_sum(addends=3, bound=16.0).encode(np.ones(1), weight),
    )
    return {*(text.encode() for text in texts), *integers, *floats, *(words.tobytes() for words in fixed)}


def sums_that_show(recording: Recording, numbers: dict[str, int]) -> dict[str, set[int]]:
    """Return the sums whose frames contain the number of each member in any encoding; all frames of all members."""
    total = sum(numbers.values())
    return {
        me: {key[2] for key, data in recording.frames.items() for each in encodings(number, total) if each in data}
        for me, number in numbers.items()
    }


@pytest.mark.usefixtures("_replayed_random_bits")
@pytest.mark.parametrize("numbers", [NUMBERS, EQUAL_NUMBERS], ids=["different", "equal"])
def test_number_of_samples_is_not_sent(numbers: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in no frame, nor in what is opened; commitments to equal numbers differ.

    With equal numbers, a number in the settings that members compare would not end the training. All keys are fixed, so
    no number is found by chance.
    """
    recording = trained(numbers)
    kinds = {key[3] for key in recording.frames}
    assert kinds == {"Ready", "Subtotal", "Total", "Confirm", "RevealKey", "Leave"}
    assert {key[2] for key in recording.frames} == {1, 2, 3}  # the count, and two steps
    assert sums_that_show(recording, numbers) == {me: set() for me in MEMBERS}
    total, *commitments = recording.opened
    assert total == sum(numbers.values())
    assert len({*commitments, *numbers.values()}) == 3 + len(set(numbers.values()))
    # The search finds the numbers if they are not masked; only a need not send its own in the count, as it adds them.
    without_masks(monkeypatch)
    found = sums_that_show(trained(numbers), numbers)
    assert found["b"] == found["c"] == {1, 2, 3}
    assert found["a"] >= {2, 3}


# Frames for two numbers are the same, except for words under a mask.


def without_words(data: bytes, sender: str) -> tuple[Frame, int]:
    """Return a frame without its masked words, and their length."""
    frame = from_bytes(data, sender)
    if not isinstance(frame.message, Subtotal):
        return frame, 0
    return replace(frame, message=replace(frame.message, words=b"")), len(frame.message.words)


@pytest.mark.usefixtures("_replayed_random_bits")
def test_frames_for_two_numbers_differ_only_by_the_mask_that_the_recipient_does_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a receives is the same for two numbers of c, byte for byte, if the mask of b and c differs by a shift.

    That mask is uniform to a, so both numbers are equally likely. A commitment depends on the number as an HMAC with a
    secret key does: here it has the same value for both numbers, as if the secret key were another one.
    """
    monkeypatch.setattr(sample_count, "_commitment", lambda seed, *_, **__: seed[0])
    one, other = trained(NUMBERS), trained(OTHER_NUMBERS)
    assert one.opened == other.opened
    for sender in ("b", "c"):
        sent, sent_other = one.from_one_to(sender, "a"), other.from_one_to(sender, "a")
        assert sent.keys() == sent_other.keys()
        assert {key[1] for key in sent if sent[key] != sent_other[key]} == {"Subtotal"}
        for key, data in sent.items():
            assert without_words(data, sender) == without_words(sent_other[key], sender)
    shifts = {
        me: {number: one.addends[me, number] - other.addends[me, number] for number in range(1, STEPS + 2)}
        for me in ("b", "c")
    }
    assert all(not (shifts["b"][number] + shifts["c"][number]).any() for number in shifts["b"])  # a shift of their mask
    assert all(shifts["c"][number].any() for number in shifts["c"])
    shifted = trained(OTHER_NUMBERS, shifts)
    for sender in ("b", "c"):
        assert shifted.from_one_to(sender, "a") == one.from_one_to(sender, "a")


# The words under the mask are uniform.


def words_of_counts(numbers: dict[str, int], counts: int = COUNTS) -> list[Words]:
    """Count many times with new keys; return c's number as a receives it, and after a has removed what it knows.

    a knows the key of c's self-mask, which c reveals, and the mask that the two share: first the one is removed, then
    the other, too.
    """
    recording, keys = Recording(), pair_keys(MEMBERS)

    def count(peers: Peers) -> None:
        for number in range(counts):
            sample_count.count(peers, numbers[peers.me], Step(0, number), 0, 3)

    with members_of(recording, keys, {}) as members:
        members.run(count)
    subtotals = recording.messages("c", "a", Subtotal.__name__)
    revealed = recording.messages("c", "a", RevealKey.__name__)
    assert subtotals.keys() == revealed.keys() == set(range(1, counts + 1))
    known = PairwiseMasks("c", {"a": keys["c"]["a"]}, SESSION)
    views = []
    for number in sorted(subtotals):
        assert subtotals[number].start == 0
        words = np.frombuffer(subtotals[number].words, dtype="<u8").copy()
        received = words[0]
        remove_self_masks(words, [revealed[number].key])
        mask = np.zeros_like(words)
        known.add_to(mask, number)
        views.append([received, words[0], (words - mask)[0]])
    return list(np.array(views).T)


def smallest_p_value(samples: list[list[Words]]) -> float:
    """Return the smallest p-value, times their number: the words are uniform, and equally distributed for two numbers.

    It is below `FALSE_ALARM_RATE` with that probability if they are.
    """
    found = [each for sample in samples for words in sample for each in p_values(words)]
    for one, other in zip(*samples, strict=True):
        counts = np.array([np.bincount((words >> 60).astype(np.int64), minlength=16) for words in (one, other)])
        found.append(float(stats.chi2_contingency(counts + 1).pvalue))  # one more of each: no frequency may be zero
    return min(found) * len(found)


def test_masked_words_of_the_count_are_uniform(monkeypatch: pytest.MonkeyPatch) -> None:
    """With real random bits; the rate of false alarms is 10^-6."""
    assert smallest_p_value([words_of_counts(numbers) for numbers in (NUMBERS, OTHER_NUMBERS)]) > FALSE_ALARM_RATE
    # The test detects that the only mask that a does not know is missing: then c's number itself remains.
    add_to = PairwiseMasks.add_to

    def add_only_masks_of_a(self: PairwiseMasks, words: Words, position: int) -> None:
        keys, self._keys = self._keys, {peer: key for peer, key in self._keys.items() if "a" in (self._me, peer)}
        add_to(self, words, position)
        self._keys = keys

    monkeypatch.setattr(PairwiseMasks, "add_to", add_only_masks_of_a)
    samples = [words_of_counts(numbers, CONTROL_COUNTS) for numbers in (NUMBERS, OTHER_NUMBERS)]
    assert [set(views[-1].tolist()) for views in samples] == [{NUMBERS["c"]}, {OTHER_NUMBERS["c"]}]
    assert smallest_p_value(samples) < FALSE_ALARM_RATE
    # It also detects that all masks are missing.
    without_masks(monkeypatch)
    samples = [words_of_counts(numbers, CONTROL_COUNTS) for numbers in (NUMBERS, OTHER_NUMBERS)]
    assert [set(views[0].tolist()) for views in samples] == [{NUMBERS["c"]}, {OTHER_NUMBERS["c"]}]
    assert smallest_p_value(samples) < FALSE_ALARM_RATE
