"""Keys of participants: generated, saved, and used for signatures and seeds."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import tomllib
from typing import TYPE_CHECKING

import pytest
import zmq

from cgd import InputError
from cgd.federation.keys import Keys, curve_key, decode_public_key
from cgd.secagg.federation_spec import PublicKeys
from support.key_files import shows_no_secret

if TYPE_CHECKING:
    from pathlib import Path


def test_generated_keys_are_a_pair_and_differ_each_time(keys: Keys) -> None:
    assert zmq.curve_public(keys.secret) == keys.curve == keys.public[:40].encode()
    other = Keys.generate("hospital-a")
    assert len({keys.public, other.public}) == len({keys.secret, other.secret}) == len({keys.seed, other.seed}) == 2


def test_signing_key_is_derived_from_the_seed_and_the_curve_key_is_not(keys: Keys) -> None:
    other = Keys.generate("hospital-a")
    mixed = other.public[:40] + keys.public[40:]
    assert Keys("hospital-a", mixed, other.secret, keys.seed).identity.public.signing == keys.identity.public.signing
    with pytest.raises(InputError, match="the public key does not match the secret key and the seed"):
        Keys("hospital-a", other.public, other.secret, keys.seed)


def test_protocol_keys_sign_and_verify(keys: Keys) -> None:
    assert decode_public_key(keys.public) == keys.identity.public
    assert curve_key(keys.public) == keys.curve
    assert decode_public_key(keys.public).verify(b"said", keys.identity.sign(b"said"))
    assert not decode_public_key(Keys.generate("b").public).verify(b"said", keys.identity.sign(b"said"))
    assert not decode_public_key(keys.public).verify(b"other", keys.identity.sign(b"said"))
    assert not decode_public_key(keys.public).verify(b"said", b"short")


def test_invalid_signing_key_verifies_nothing(keys: Keys) -> None:
    for signing in (b"", bytes(31), bytes(33), b"\xff" * 32):
        assert not PublicKeys(keys.identity.public.agreement, signing).verify(b"said", keys.identity.sign(b"said"))


def test_public_file_is_overwritten_on_request(tmp_path: Path, keys: Keys) -> None:
    _, public = keys.save(tmp_path)
    before = public.read_text()
    with pytest.raises(InputError, match=r"hospital-a\.pub exists and is never overwritten"):
        keys.save_public(tmp_path)
    for damage in (lambda: public.write_text("of before"), public.unlink):
        damage()
        assert keys.save_public(tmp_path, overwrite=True) == public
        assert public.read_text() == before


def test_repr_contains_no_secret(keys: Keys) -> None:
    assert repr(keys) == f"Keys(name='hospital-a', public={keys.public!r})"


def test_saved_keys_are_loaded(tmp_path: Path, keys: Keys) -> None:
    private, public = keys.save(tmp_path)
    assert (private, public) == (tmp_path / "hospital-a.key", tmp_path / "hospital-a.pub")
    assert Keys.load(private) == keys
    assert Keys.load(str(private)) == keys


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_private_file_has_mode_0600_for_every_umask(tmp_path: Path, keys: Keys, umask: int) -> None:
    before = os.umask(umask)
    try:
        private, public = keys.save(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert stat.S_IMODE(public.stat().st_mode) == 0o644 & ~umask


def test_private_file_describes_itself(tmp_path: Path, keys: Keys) -> None:
    text = keys.save(tmp_path)[0].read_text()
    assert text.startswith("# The private keys of hospital-a.")
    assert "with this file alone, a participant that has lost everything\n# else can recover." in text
    assert tomllib.loads(text) == {
        "name": "hospital-a",
        "public": keys.public,
        "secret": keys.secret.decode(),
        "seed": keys.seed.hex(),
    }


def test_public_file_is_a_participant_without_an_address(tmp_path: Path, keys: Keys) -> None:
    text = keys.save(tmp_path)[1].read_text()
    assert text.startswith("# The public key of hospital-a, which is not secret.")
    assert tomllib.loads(text) == {"participants": [{"name": "hospital-a", "key": keys.public}]}
    assert keys.secret.decode() not in text
    assert keys.seed.hex() not in text


@pytest.mark.parametrize("suffix", ["key", "pub"])
def test_save_overwrites_nothing_and_leaves_no_partial_files(tmp_path: Path, keys: Keys, suffix: str) -> None:
    there = tmp_path / f"hospital-a.{suffix}"
    there.write_text("precious")
    with pytest.raises(InputError, match=rf"hospital-a\.{suffix} exists and is never overwritten; choose another") as e:
        keys.save(tmp_path)
    assert there.read_text() == "precious"
    assert os.listdir(tmp_path) == [there.name]
    assert shows_no_secret(keys, e.value)


def test_save_to_a_missing_folder_is_rejected(tmp_path: Path, keys: Keys) -> None:
    with pytest.raises(
        InputError, match=r"hospital-a\.key cannot be written \(No such file or directory\); name a fold"
    ):
        keys.save(tmp_path / "nowhere")


def test_full_disk_leaves_no_files(tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        InputError,
        match=r"cannot be written \(No space left on device\); name a folder that exists, is yours and has room",
    ):
        keys.save(tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["", "a b", "../a", "-a", ".a", "ä", "a\n", "a" * 64, "a/b"])
def test_invalid_name_is_rejected(name: str) -> None:
    with pytest.raises(InputError) as error:
        Keys.generate(name)
    assert str(error.value).startswith(f"the participant's name is {name!r}; choose 1 to 63 letters (a to z), digits")


@pytest.mark.parametrize("name", ["a", "7", "A.b_c-d", "a" * 63])
def test_valid_name_is_accepted(name: str) -> None:
    assert Keys.generate(name).name == name


# Seeds


def test_federation_seed_is_an_hmac(keys: Keys) -> None:
    expected = hmac.new(keys.seed, b"cgd federation five-hospitals", hashlib.sha256).digest()
    assert keys.federation_seed("five-hospitals") == expected
    assert len(expected) == 32


def test_federation_seed_depends_on_federation_and_keys(keys: Keys) -> None:
    seeds = [each.federation_seed(name) for each in (keys, Keys.generate("hospital-a")) for name in ("one", "two")]
    assert len({keys.seed, *seeds}) == 5


def test_federation_seed_rejects_an_invalid_name(keys: Keys) -> None:
    with pytest.raises(InputError, match="the federation's name is 'a b'; choose 1 to 63 letters"):
        keys.federation_seed("a b")
