"""Both implementations of the keystream have the same bits, whatever parts it is read in."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st

from cgd import aes

KEY = bytes(range(16))


@pytest.mark.parametrize("gcm", [False, True])
@given(
    position=st.sampled_from([0, 1, 2**63, 2**64 - 1]),
    sizes=st.lists(st.one_of(st.integers(0, 70), st.just(1 << 17)), max_size=5),
)
def test_keystream_is_that_of_the_counter_mode(gcm: bool, position: int, sizes: list[int]) -> None:
    expected = Cipher(algorithms.AES(KEY), modes.CTR(position.to_bytes(8, "big") + bytes(8))).encryptor()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aes, "gcm_is_faster", lambda: gcm)
        stream, into = aes.keystream(KEY, position), aes.keystream(KEY, position)
    for size in sizes:
        read, buffer = expected.update(bytes(size)), bytearray(size + aes.BLOCK_BYTES)
        assert stream.update(bytes(size)) == read
        assert into.update_into(memoryview(bytes(size)), buffer) == size
        assert buffer[:size] == read


def test_the_choice_is_made_once() -> None:
    assert aes.gcm_is_faster() is aes.gcm_is_faster()
