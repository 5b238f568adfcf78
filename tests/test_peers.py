"""`Peers.sum`: exact totals, rejected input, and errors that name the responsible member."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cgd import FixedPoint, InputError, Peers, RangeError, local_peers
from cgd.errors import (
    ClosedError,
    FrameError,
    MembersChangedError,
    MembershipError,
    PeerAbortedError,
    PeerLeftError,
    RemoteProtocolError,
    SettingsError,
    WeightError,
)
from cgd.local import solo_peers
from cgd.peers import SumSettings
from cgd.secagg.codec import from_bytes
from cgd.secagg.journal_entry import Step
from cgd.secagg.messages import MASKINGS, Subtotal, SumSpec
from cgd.sum_encoding import check_weights, encode, weight_encoding, weight_words
from cgd.transport.memory import connect
from support.transports import MEMBERS, TamperingTransport, custom_peers, outcomes
from support.wire import MEMBER_OPENINGS

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from cgd.secagg.messages import Masking, Opening
    from cgd.transport.base import Transport


def is_subtotal(frame: bytes) -> bool:
    return isinstance(from_bytes(frame, "us").message, Subtotal)


@given(
    hnp.arrays(np.float32, hnp.array_shapes(max_dims=3), elements=st.floats(-4, 4, width=32)),
    st.sampled_from(MASKINGS),
    st.sampled_from(MEMBER_OPENINGS),
    st.sampled_from([32, 64]),
)
def test_total_has_the_same_bits_at_every_member_and_the_type_of_its_input(
    values: npt.NDArray[Any], masking: Masking, opening: Opening, ring_bits: int
) -> None:
    fixed_point = FixedPoint.for_sum(addends=3, bound=4.0, ring_bits=ring_bits)
    words = [fixed_point.encode(values * scale) for scale in (1.0, 0.5, -0.25)]
    expected = fixed_point.decode(np.sum(words, axis=0, dtype=words[0].dtype), np.float32)
    with local_peers(3, bound=4.0, masking=masking, opening=opening, ring_bits=ring_bits) as members:
        inputs = [values, torch.from_numpy(values * np.float32(0.5)), torch.from_numpy(values * np.float32(-0.25))]
        first, second, third = members.run(lambda peers, own: peers.sum(own), inputs)
    assert isinstance(first, np.ndarray)
    assert isinstance(second, torch.Tensor)
    assert first.dtype == np.float32
    assert second.dtype == third.dtype == torch.float32
    assert first.tobytes() == second.numpy().tobytes() == third.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_total_has_the_float_type_of_the_input(dtype: torch.dtype) -> None:
    with local_peers(3) as members:
        totals = members.run(lambda peers: peers.sum(torch.full((2, 3), 0.5, dtype=dtype)))
    assert all(torch.equal(total, torch.full((2, 3), 1.5, dtype=dtype)) for total in totals)


@pytest.mark.parametrize("values", [np.array([2**60, -5]), np.array([True, False]), np.array(7, dtype=np.uint8)])
def test_sum_of_integers_is_exact(values: npt.NDArray[Any]) -> None:
    with local_peers(3) as members:
        totals = members.run(lambda peers: peers.sum(values))
    assert all(total.dtype == np.int64 and np.array_equal(total, 3 * values.astype(object)) for total in totals)


def test_weighted_sum_keeps_its_precision() -> None:
    with local_peers(4, bound=1.0) as members:
        totals = members.run(lambda peers, weight: peers.sum(np.array([1.0]), weight=weight), [0.1, 0.2, 0.3, 0.4])
    assert abs(totals[0][0] - 1.0) <= 4 * 2.0**-31


def test_bound_can_be_set_for_one_sum() -> None:
    with local_peers(3) as members:
        totals = members.run(lambda peers: peers.sum(np.array([1e9]), bound=1e10, ring_bits=64))
        assert [float(total[0]) for total in totals] == [3e9] * 3
        assert isinstance(outcomes(members, lambda peers: peers.sum(np.array([1e9])))[0], RangeError)


def test_sums_of_many_members_are_correct() -> None:
    def work(peers: Peers) -> list[float]:
        return [float(peers.sum(np.array([step / 10]))[0]) for step in range(20)]

    with local_peers(12) as members:
        results = members.run(work)
        assert all(peers.traffic.sums == 20 for peers in members)
    assert all(result == results[0] for result in results)
    assert results[0] == pytest.approx([1.2 * step for step in range(20)], abs=1e-6)


def test_mesh_sends_two_vectors() -> None:
    with local_peers(10) as members:
        members.run(lambda peers: peers.sum(np.ones(100_000, dtype=np.float32)))
        for peers in members:
            assert peers.traffic.bytes_sent <= 2.2 * 4 * 100_000


# Invalid input: the error names the member and the value, no member waits, and the next sum works.


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 17.0])
def test_value_out_of_range_is_shown_to_its_owner_only(bad: float) -> None:
    values = [np.ones(3), np.array([1.0, bad, 1.0]), np.ones(3)]
    with local_peers(MEMBERS) as members:
        own, offender, other = outcomes(members, lambda peers, value: peers.sum(value), values)
        assert isinstance(offender, RangeError)
        assert (offender.index, offender.bound) == ((1,), 16.0)
        for error in (own, other):
            assert isinstance(error, PeerAbortedError)
            assert error.peer == "b"
            assert "one of its values is not finite or beyond the bound" in str(error)
            assert str(bad) not in str(error)
        assert [float(total[0]) for total in members.run(lambda peers: peers.sum(np.ones(1)))] == [3.0] * 3


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (np.ones((3, 2), dtype=np.float32), r"shape \(3, 2\) instead of \(2, 3\)"),
        (np.ones((2, 3)), "dtype 'float64' instead of 'float32'"),
        (np.ones((2, 3), dtype=np.int32), "dtype 'int64'"),
    ],
)
def test_different_shape_or_type_raises_settings_error(odd: npt.NDArray[Any], message: str) -> None:
    even = np.ones((2, 3), dtype=np.float32)
    with local_peers(MEMBERS) as members:
        results = outcomes(members, lambda peers, value: peers.sum(value), [even, even, odd])
        for error in results:
            assert error.peer == "c"
            with pytest.raises(SettingsError, match=message):
                raise error
        assert [float(total[0]) for total in members.run(lambda peers: peers.sum(np.ones(1)))] == [3.0] * 3


@pytest.mark.parametrize(
    "odd",
    [
        SumSettings(bound=1.0),
        SumSettings(ring_bits=64),
        SumSettings(masking="uniform"),
        SumSettings(opening="aggregator", aggregator="a"),
    ],
)
def test_different_settings_raise_settings_error(odd: SumSettings) -> None:
    with custom_peers(connect(MEMBERS), [SumSettings(), odd, SumSettings()]) as members:
        results = outcomes(members, lambda peers: peers.sum(np.ones(4)))
    assert all(isinstance(error, SettingsError) and error.peer == "b" for error in results)


def test_different_context_raises_an_error() -> None:
    contexts = ["lr 0.5", "lr 0.1", "lr 0.5"]
    with local_peers(MEMBERS) as members:
        results = outcomes(members, lambda peers, text: peers.sum(np.ones(1), context=text), contexts)
    assert all("context 'lr 0.1' instead of 'lr 0.5'" in str(error) for error in results)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda frame: frame[:-1], "truncated"),
        (lambda frame: frame + b"x", "oversized"),
        (lambda frame: frame[:3] + b"\x09" + frame[4:], "uses protocol version 9"),
        (lambda frame: b"GET / HTTP/1.1" + frame, "not a frame of cgd"),
        (lambda frame: frame[:4] + b"\x63" + frame[5:], "unknown kind 99"),
        (lambda frame: frame[:8] + bytes(16) + frame[24:], "another session"),
    ],
)
def test_invalid_frame_raises_an_error_with_its_sender_at_once(change: Callable[[bytes], bytes], message: str) -> None:
    transports: list[Transport] = list(connect(MEMBERS))
    transports[1] = TamperingTransport(transports[1], lambda frame: change(frame) if is_subtotal(frame) else frame)
    started = time.monotonic()
    with custom_peers(transports, timeout=300) as members:
        results = outcomes(members, lambda peers: peers.sum(np.ones(9)))
    assert time.monotonic() - started < 200
    assert all(isinstance(error, RemoteProtocolError) for error in results)
    direct = [error for error in results if isinstance(error, FrameError)]
    assert direct
    assert all(error.peer == "b" and message in str(error) for error in direct)


def test_abort_sum_fails_the_sum_at_every_member_and_the_next_sum_works() -> None:
    def work(peers: Peers) -> Exception | float:
        try:
            if peers.me == "b":
                peers.abort_sum()
            else:
                peers.sum(np.ones(1))
        except PeerAbortedError as error:
            assert error.peer == "b"
        return float(peers.sum(np.ones(1))[0])

    with local_peers(MEMBERS) as members:
        assert members.run(work) == [3.0] * 3


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (0.3, 0.3, 0.3), (0.5, 0.3, 0.2001)])
def test_weights_that_do_not_sum_to_one_raise_weight_error_at_every_member(weights: tuple[float, ...]) -> None:
    with local_peers(MEMBERS) as members:
        results = outcomes(members, lambda peers, weight: peers.sum(np.full(2, 16.0), weight=weight), weights)
        assert all(isinstance(error, WeightError) for error in results)
        assert f"{sum(weights):.4g}" in str(results[0])
        assert [float(total[0]) for total in members.run(lambda peers: peers.sum(np.ones(1)))] == [3.0] * 3


@pytest.mark.parametrize(("count", "ring_bits"), [(3, 32), (7, 32), (1000, 32), (5000, 32), (3, 64), (100_000, 64)])
def test_check_weights_accepts_honest_weights_and_rejects_one_wrong_weight(count: int, ring_bits: int) -> None:
    """Equal weights are all rounded in the same direction, which is the worst case."""
    encoding = FixedPoint.for_sum(addends=count, bound=1.0, ring_bits=ring_bits)
    words = encoding.encode(np.full(count, 1 / count))
    honest = words.sum(dtype=words.dtype, keepdims=True)
    check_weights(honest, encoding, count)
    with pytest.raises(WeightError):
        check_weights(honest + encoding.encode(np.array([0.02])), encoding, count)


def test_weights_in_16_bits_are_checked_as_precisely_as_in_32() -> None:
    for count in (3, 1000, 4369):
        spec = SumSpec((1,), "float32", 16, 10, "pairwise", "mesh", weighted=True)
        fixed_point, values = FixedPoint.for_weighted_sum(addends=count, bound=16.0, ring_bits=16), np.zeros(1)
        assert spec.size == 9
        own = encode(values, fixed_point, spec, 1 / count, count)
        honest = np.sum([own] * count, axis=0, dtype=own.dtype)
        encoding = weight_encoding(spec, count)
        check_weights(weight_words(honest, spec), encoding, count)
        wrong = honest + encode(values, fixed_point, spec, 0.02, count)
        with pytest.raises(WeightError):
            check_weights(weight_words(wrong, spec), encoding, count)


def test_weighted_sums_in_16_bits_have_the_mean_of_the_exact_sum() -> None:
    rng, weights = np.random.default_rng(5), [0.5, 0.3, 0.2]
    values = [rng.normal(0, 1e-5, 100_000).astype(np.float32) for _ in weights]  # far below half a step of the ring
    with local_peers(3, bound=1.0, ring_bits=16) as members:
        resolution = members[0].resolution
        totals = members.run(lambda peers, own, w: peers.sum(own, weight=w), values, weights)
    exact = np.sum([own.astype(np.float64) * w for own, w in zip(values, weights, strict=True)], axis=0)
    assert all(np.array_equal(total, totals[0]) for total in totals)
    assert np.abs(totals[0] - exact).max() < 3 * resolution
    # The variance of each rounding error is below |x|·resolution: five standard deviations of the mean of all.
    size = sum(float(np.abs(own).mean()) * w for own, w in zip(values, weights, strict=True))
    assert abs((totals[0] - exact).mean()) < 5 * (size * resolution / exact.size) ** 0.5
    assert np.corrcoef(totals[0], exact)[0, 1] > 0.1


def test_sums_without_weights_have_32_bits_unless_16_are_asked_for() -> None:
    values = np.full(1000, 0.3)
    with local_peers(3, bound=1.0, ring_bits=16) as members:
        assert np.allclose(members.run(lambda peers: peers.sum(values))[0], 0.9, atol=1e-8)
        coarse = members.run(lambda peers: peers.sum(values, ring_bits=16))[0]
        assert members.run(lambda peers: peers.sum(np.array([3])))[0].tolist() == [9]
    assert 1e-5 < np.abs(coarse - 0.9).max() < 1e-3


@pytest.mark.parametrize("step", [None, Step(0, 7)])
def test_repeated_attempts_in_16_bits_enter_the_same_elements(step: Step | None) -> None:
    """The difference of the totals of two attempts would disclose roundings otherwise, also after a restart."""
    values = np.random.default_rng(1).normal(0, 1e-3, 1000)
    entered: list[bytes] = []

    def enter(seed: bytes, values: npt.NDArray[Any], step: Step | None) -> None:
        peers = solo_peers(seed, bound=1.0, ring_bits=16)
        run_sum = peers._driver.run_sum

        def attempts(spec: SumSpec, encode: Callable[[], npt.NDArray[Any]], *rest: Any) -> npt.NDArray[Any]:
            entered.extend(encode().tobytes() for _ in range(3))
            return run_sum(spec, encode, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(peers._driver, "run_sum", attempts)
            for _ in range(2):  # a second request of the program, which has another number
                peers.sum(values, weight=1.0, step=step)

    for _ in range(2):  # a restart of the process
        enter(b"s" * 32, values, step)
    assert len(entered) == 12
    assert len(set(entered)) == 1
    enter(b"t" * 32, values, step)
    enter(b"s" * 32, values * 1.001, step and Step(0, 8))
    assert len(set(entered)) == 3


def test_too_many_members_for_16_bits_are_rejected() -> None:
    assert FixedPoint.for_weighted_sum(addends=4369, bound=1.0, ring_bits=16).fraction_bits == 14
    with pytest.raises(InputError, match="4370 addends are too many for ring_bits=16, at most 4369; use 32"):
        FixedPoint.for_weighted_sum(addends=4370, bound=1.0, ring_bits=16)


def test_weight_at_some_members_only_raises_settings_error() -> None:
    with local_peers(MEMBERS) as members:
        results = outcomes(members, lambda peers, weight: peers.sum(np.ones(2), weight=weight), [0.5, 0.5, None])
    assert all(isinstance(error, SettingsError) and "weighted False instead of True" in str(error) for error in results)


@pytest.mark.parametrize("odd", [{"context": 3}, {"bound": "x"}, {"weight": "x"}])
def test_any_error_of_one_member_fails_the_sum_at_the_others(odd: dict[str, Any]) -> None:
    started = time.monotonic()
    with local_peers(MEMBERS) as members:
        options = [{}, odd, {}]
        results = outcomes(members, lambda peers, own: peers.sum(np.ones(1), **own), options)
    assert time.monotonic() - started < 20
    assert all(isinstance(results[i], PeerAbortedError) and results[i].peer == "b" for i in (0, 2))


@pytest.mark.parametrize("members", [3.0, "abc"])
def test_members_must_be_a_number_or_names(members: Any) -> None:
    with pytest.raises(InputError, match="a whole number, or a list of names"):
        local_peers(members)


@pytest.mark.parametrize("members", [0, 1, 2, [], ["a", "b"]])
def test_fewer_than_three_members_are_rejected(members: int | list[str]) -> None:
    with pytest.raises(MembershipError, match="at least 3"):
        local_peers(members)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bound": -1.0}, "bound is -1"),
        ({"bound": 1e10}, "use ring_bits=64"),
        ({"ring_bits": 8}, "choose 16, 32 or 64"),
        ({"masking": "shamir"}, "choose one of pairwise, uniform"),
        ({"opening": "tree"}, "choose one of mesh, aggregator, hub"),
        ({"opening": "hub"}, "there is no hub inside one process"),
        ({"opening": "aggregator", "aggregator": "z"}, "aggregator 'z' is not a member"),
        ({"aggregator": "a"}, "opening is 'mesh' and aggregator is 'a'"),
        ({"timeout": -1}, "timeout is -1"),
        ({"timeout": float("nan")}, "timeout is nan"),
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        local_peers(MEMBERS, **settings)


@pytest.mark.parametrize(
    "values",
    [
        [1.0, 2.0],
        np.array([1j]),
        np.array(["a"]),
        np.zeros(0),
        torch.eye(2).to_sparse(),
        torch.zeros(1, device="meta"),
    ],
)
def test_unsupported_values_are_rejected_and_fail_the_sum_at_the_others(values: Any) -> None:
    with local_peers(MEMBERS) as members:
        results = outcomes(members, lambda peers, value: peers.sum(value), [np.ones(1), values, np.ones(1)])
    assert isinstance(results[1], InputError)
    for error in (results[0], results[2]):
        assert isinstance(error, PeerAbortedError)
        assert error.peer == "b"
        assert "its values or settings cannot be summed" in str(error)


@pytest.mark.parametrize("weight", [None, 1 / 3])
def test_sum_is_repeated_when_the_members_change_unless_it_has_a_weight(weight: float | None) -> None:
    """Weights are computed for the earlier members, so the caller has to compute them again."""

    def change_members_once(peers: Peers) -> None:
        run_sum = peers._driver.run_sum
        errors = [MembersChangedError(1, 2, MEMBERS)]

        def run(*arguments: Any) -> npt.NDArray[Any]:
            if errors:
                raise errors.pop()
            return run_sum(*arguments)

        vars(peers._driver)["run_sum"] = run

    with local_peers(MEMBERS) as members:
        for peers in members:
            change_members_once(peers)
        results = outcomes(members, lambda peers: peers.sum(np.ones(2), weight=weight))
    if weight is None:
        assert [total.tolist() for total in results] == [[3.0, 3.0]] * 3
    else:
        assert all(isinstance(error, MembersChangedError) for error in results)


def test_values_that_were_weighted_for_another_epoch_are_not_summed() -> None:
    with local_peers(MEMBERS) as members:
        results = outcomes(members, lambda peers: peers.sum(np.ones(2), epoch=3))
    assert all(isinstance(error, MembersChangedError) for error in results)


def test_peers_are_shown_with_their_settings_and_without_secrets() -> None:
    with local_peers(MEMBERS, bound=4.0) as members:
        text = repr(members[1])
        seed = members[1].seed
    assert text.startswith("Peers(me='b', members=3, SumSettings(bound=4.0")
    assert "Traffic(" in text
    assert seed.hex() not in text
    assert repr(seed) not in text


def test_peers_are_closed_at_the_end_of_a_with_statement() -> None:
    members = local_peers(MEMBERS)
    with members[0] as entered:
        assert entered is members[0]
    closed, *others = outcomes(members, lambda peers: peers.sum(np.ones(1)))
    assert isinstance(closed, ClosedError)
    for error in others:
        assert isinstance(error, PeerLeftError)
        assert error.peer == "a"


@pytest.mark.parametrize("options", [{"weight": 0.5}, {"bound": 4.0}, {"ring_bits": 64}])
def test_options_of_floats_are_rejected_for_integers(options: dict[str, Any]) -> None:
    with local_peers(MEMBERS) as members:
        results = outcomes(members, lambda peers: peers.sum(np.ones(2, dtype=np.int64), **options))
        assert {str(error) for error in results} == {
            "integers are summed exactly, without weight, bound or ring_bits; pass floats"
        }
        assert [total.tolist() for total in members.run(lambda peers: peers.sum(np.array([2])))] == [[6]] * 3


def test_integers_of_any_size_are_summed_modulo() -> None:
    words = np.array([2**63 - 1, -(2**63) + 1, 5, 2**62], dtype=np.int64)
    with local_peers(MEMBERS) as members:
        totals = members.run(lambda peers: peers.sum(words, modular=True))
        for total in totals:
            assert np.array_equal(total, words * 3)  # int64 wraps
        assert all(isinstance(each, RangeError) for each in outcomes(members, lambda peers: peers.sum(words))[:1])
        for error in outcomes(members, lambda peers: peers.sum(np.ones(2), modular=True)):
            assert isinstance(error, InputError)
            assert "only integers are summed modulo 2⁶⁴" in str(error)


@pytest.mark.parametrize("context", ["two\nlines", "é" * 200])
def test_context_must_be_short_and_printable(context: str) -> None:
    with local_peers(MEMBERS) as members:
        results = outcomes(members, lambda peers: peers.sum(np.ones(2), context=context))
    for error in results:
        assert isinstance(error, InputError)
        assert "must be printable and of at most" in str(error)
