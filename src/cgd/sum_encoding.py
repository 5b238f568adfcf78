"""The conversion of a member's values to ring elements, and of a total back to values.

A sum is one of three kinds. Plain: values in fixed point. Weighted: with the weight as one more element, so that all
members can check that the weights sum to one; in 16 bits, with the digits of the weight in 32 bits. Private: clipped
sums with this member's share of the noise, drawn anew for every attempt.
"""

from __future__ import annotations

import hmac
import sys
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.aes import keystream
from cgd.errors import InputError, RevealError, WeightError
from cgd.secagg.fixed_point import WORD_TYPES, FixedPoint
from cgd.secagg.masking import KEY_BYTES
from cgd.secagg.messages import WEIGHT_DIGIT_BITS

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from cgd.dp.mechanism import NoisyEncoding
    from cgd.secagg.journal_entry import Step
    from cgd.secagg.messages import SumSpec

DIGIT_MASK = np.uint32((1 << WEIGHT_DIGIT_BITS) - 1)
# The rounding error of a weight n_l/n in double precision.
QUOTIENT_ROUNDING = 2.0**-52
# Weights below this fraction of an equal share are checked: the member's values must not round to zero in the ring.
SMALL_SHARE = 1 / 8
# The smallest ratio of the weighted values to their rounding error (both as Euclidean norms).
MIN_PRECISION = 8.0


def to_numpy(values: object) -> tuple[npt.NDArray[Any], str]:
    """Return the values as an array, and the name of their total's type."""
    torch = sys.modules.get("torch")  # a caller that has a tensor has imported torch; this layer must not
    if torch is not None and isinstance(values, torch.Tensor):
        dtype = str(values.dtype).removeprefix("torch.")
        try:
            tensor = values.detach().cpu()
            array = (tensor.float() if dtype == "bfloat16" else tensor).numpy()
        except (TypeError, RuntimeError) as error:  # sparse, meta, …: the error of torch says which
            raise InputError(f"a tensor of {values.layout} {values.dtype} cannot be summed: {error}") from None
    elif isinstance(values, np.ndarray):
        array, dtype = values, values.dtype.name
    else:
        raise InputError(f"sum takes a numpy array or a torch tensor, not {type(values).__name__}; wrap it in one")
    if array.size == 0:
        raise InputError(f"an array of shape {array.shape} is empty; there is nothing to sum")
    if array.dtype.kind in "iub":
        return array, "int64"
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        raise InputError(f"values of type {dtype} cannot be summed; use floats of up to 64 bits, or integers")
    return array, dtype


def from_numpy(array: npt.NDArray[Any], like: Any) -> Any:
    """Return the array as an array or as a tensor on the same device, as `like` is."""
    if isinstance(like, np.ndarray):
        return array
    tensor = sys.modules["torch"].from_numpy(array).to(like.device)
    return tensor.to(like.dtype) if like.is_floating_point() else tensor


def encode(
    array: npt.NDArray[Any],
    fixed_point: FixedPoint,
    spec: SumSpec,
    weight: float | None,
    addends: int,
    noise: NoisyEncoding | None = None,
    key: bytes | None = None,
) -> npt.NDArray[Any]:
    """Return the ring elements of the values and, of a weighted sum, those of the weight.

    Args:
        array: the values.
        fixed_point: their encoding.
        spec: the settings of the sum.
        weight: the weight, in a weighted sum.
        addends: the number of members.
        noise: the encoding of a sum with noise.
        key: the key by which values are rounded at random, if wanted.
    """
    if noise is not None:
        return noise.encode(array).reshape(-1)
    words = np.empty(spec.size, dtype=WORD_TYPES[spec.ring_bits])
    rounding = None if key is None else keystream(key, 0)
    fixed_point.encode(array, 1.0 if weight is None else weight, out=words[: array.size], rounding=rounding)
    if weight is not None:
        own = weight_encoding(spec, addends).encode(np.array([weight]))
        words[array.size :] = own if spec.weight_elements == 1 else own >> _digit_shifts(spec) & DIGIT_MASK
    return words


def rounding_key(seed: bytes, array: npt.NDArray[Any], step: Step | None) -> bytes:
    """Return the key of the stream by which a member rounds at random in 16 bits.

    It depends on the member's seed and on the step or, if there is none, on the values: another attempt, also after a
    restart, enters the same elements of the same values.
    """
    if step is None:
        what = b"values " + sha256(np.ascontiguousarray(array).reshape(-1).data).digest()
    else:
        what = f"step {step.slot} {step.number}".encode()
    return hmac.digest(seed, b"cgd rounding of " + what, "sha256")[:KEY_BYTES]


def weight_encoding(spec: SumSpec, addends: int) -> FixedPoint:
    """Return the fixed point of the weights: up to 1 from each member, without wrap-around."""
    return FixedPoint.for_sum(addends=addends, bound=1.0, ring_bits=max(32, spec.ring_bits))


def weight_words(total: npt.NDArray[Any], spec: SumSpec) -> npt.NDArray[Any]:
    """Return the element of the sum of the weights, from the total of a weighted sum."""
    words = total[-spec.weight_elements :]
    if spec.weight_elements == 1:
        return words
    carried: npt.NDArray[Any] = (words.astype(np.uint32) << _digit_shifts(spec)).sum(dtype=np.uint32, keepdims=True)
    return carried


def _digit_shifts(spec: SumSpec) -> npt.NDArray[np.uint32]:
    return np.arange(spec.weight_elements, dtype=np.uint32) * np.uint32(WEIGHT_DIGIT_BITS)


def check_weights(words: npt.NDArray[Any], encoding: FixedPoint, addends: int) -> None:
    """Check that the weights of all members sum to one.

    Raises:
        WeightError: they do not.
    """
    total = encoding.decode(words).item()
    # The error of each weight is at most half a step of the ring, plus the rounding of a quotient.
    if abs(total - 1.0) > addends * (encoding.resolution / 2 + QUOTIENT_ROUNDING):
        raise WeightError(
            f"the members' weights sum to {total:.6g} instead of 1, so the weighted sum is not used; in training, some "
            "member's samples are not those that were counted: call recount() on every optimiser, or, in a federation, "
            "where a step is summed once, train anew under another federation name"
        )


def check_precision(array: npt.NDArray[Any], weight: float, fixed_point: FixedPoint, addends: int) -> None:
    """Reject a weight with which all our values round to zero: the total would show the other members' values alone.

    A member can report any number of samples, and so make all other weights small. Later sums with an accepted weight
    are not checked: near a minimum, a small member's gradient may round to zero although all counts are true.

    Raises:
        InputError: the weight is too small for these values, and an equal share would not be.
    """
    largest, norm = float(np.abs(array).max()), float(np.linalg.norm(array.astype(np.float64, copy=False)))
    needed = MIN_PRECISION * float(np.sqrt(np.count_nonzero(array))) * fixed_point.rounding_error
    vanish = largest * weight <= fixed_point.resolution / 2 < largest / addends
    if vanish or (weight * addends < SMALL_SHARE and norm * weight < needed <= norm / addends):
        raise InputError(
            f"our weight in this sum is {weight:.3g}, so small that all our values round to zero in "
            f"{fixed_point.ring_bits} bits: the total would contain the other members' values alone, and reveal them. "
            "In training, a member reported a wrong number of samples, or ours is too small in comparison: find out "
            f"which, or let every member use ring_bits={min(64, 2 * fixed_point.ring_bits)}"
        )


def charged(charge: Callable[[], None]) -> Callable[[], None]:
    """Return a function that charges before our key leaves. Whatever it raises is a `RevealError`: no key is sent."""

    def before_reveal() -> None:
        try:
            charge()
        except RevealError:
            raise
        except Exception as error:
            raise RevealError(f"an opening could not be charged, and is not made: {error!r}") from error

    return before_reveal
