"""Participants of a federation file: names, addresses, keys and cells."""

from __future__ import annotations

from typing import Any

import pytest

from cgd import InputError
from cgd.federation.participants import Participant
from cgd.transport.addresses import host_and_port
from support.key_files import HALF, KEY


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("tcp://hospital-a.example:7001", ("hospital-a.example", 7001)),
        ("tcp://Hospital_A:1", ("hospital_a", 1)),
        ("tcp://localhost:65535", ("localhost", 65535)),
        ("tcp://127.0.0.1:7001", ("127.0.0.1", 7001)),
        ("tcp://[::1]:7001", ("::1", 7001)),
        ("tcp://[2001:DB8:0:0::1]:7001", ("2001:db8::1", 7001)),
    ],
)
def test_address_is_normalised(address: str, place: tuple[str, int]) -> None:
    assert host_and_port(address) == place
    assert Participant("a", address, KEY).endpoint == place


@pytest.mark.parametrize(
    "address",
    [
        *("", "hospital-a.example:7001", "http://a:7001", "TCP://a:7001", "tcp://a", "tcp://a:", "tcp://:7001"),
        *("tcp://a:0", "tcp://a:65536", "tcp://a:-1", "tcp://a:7001x", "tcp://a:٧", "tcp://a:07001", "tcp://a:7001\n"),
        *("tcp://*:7001", "tcp://0.0.0.0:7001", "tcp://[::]:7001", "tcp://1.2.3:7001", "tcp://300.1.1.1:7001"),
        *("tcp://::1:7001", "tcp://[a]:7001", "tcp://[]:7001", "tcp://[fe80::1%eth0]:7001", "tcp://[1.2.3.4]:7001"),
        *("tcp://a b:7001", "tcp://ä:7001", "tcp://-a:7001", "tcp://a-:7001", "tcp://a..b:7001", "tcp://a/b:7001"),
        *("tcp://eth0;a:7001", "ipc://a:7001", "tcp://a:7001/", f"tcp://{'a' * 64}:7001"),
    ],
)
def test_invalid_address_is_rejected(address: str) -> None:
    with pytest.raises(InputError) as error:
        host_and_port(address)
    assert str(error.value).startswith(f"address is {address!r}; write where the others reach it, tcp://HOST:PORT, ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "b b"}, "name is 'b b'; choose 1 to 63 letters (a to z), digits"),
        ({"address": 7001}, "address is 7001; write where the others reach it, tcp://HOST:PORT"),
        ({"key": "short"}, "key is 'short'; a key has 80 characters of Z85: copy it from bob.pub"),
        ({"key": "#" * 80}, f"key is '{'#' * 80}'; a key has 80 characters of Z85: copy it from bob.pub"),
        ({"key": KEY.encode()}, f"key is {KEY.encode()!r}; a key has 80 characters of Z85"),
        ({"key": HALF}, f"key is {HALF!r}, which is from an older version of cgd, in which keys could not sign; ask"),
        ({"cell": (1, 2, 3)}, "cell is (1, 2, 3); write the row and the column, from 0, such as cell = [0, 2]"),
        ({"cell": [-1, 0]}, "cell is [-1, 0]; write the row and the column, from 0"),
        ({"cell": [True, 0]}, "cell is [True, 0]; write the row and the column, from 0"),
        ({"cell": [1.0, 0]}, "cell is [1.0, 0]; write the row and the column, from 0"),
        ({"cell": "1,0"}, "cell is '1,0'; write the row and the column, from 0"),
    ],
)
def test_invalid_participant_is_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        Participant(**{"name": "bob", "address": "tcp://bob:7001", "key": KEY} | changes)
    assert str(error.value).startswith(message)
