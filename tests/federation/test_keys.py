from __future__ import annotations

import hashlib
import hmac
import os
import stat
import tomllib
import traceback
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from cgd import InputError
from cgd.federation.keys import Keys, curve_key, decode_public_key, is_key, read_public_key
from cgd.federation.participants import Participant
from cgd.secagg.federation_spec import PublicKeys
from cgd.transport.addresses import host_and_port

if TYPE_CHECKING:
    from pathlib import Path

HALF = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
KEY = HALF + "E:!C>wS>:V1.-<Cv$(&Wv1)^J)z]+7gT!pV+NNJ@"


@pytest.fixture(scope="module")
def keys() -> Keys:
    return Keys.generate("hospital-a")


def write(folder: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path = folder / "mine.key"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return path


def content(keys: Keys, **changes: str | None) -> str:
    """Return a key file with some lines replaced or left out; values are given as TOML."""
    lines: dict[str, str | None] = {
        "name": f'"{keys.name}"',
        "public": f'"{keys.public}"',
        "secret": f'"{keys.secret.decode()}"',
        "seed": f'"{keys.seed.hex()}"',
    }
    return "".join(f"{name} = {value}\n" for name, value in (lines | changes).items() if value is not None)


def shows_no_secret(keys: Keys, error: BaseException) -> bool:
    """Return whether the whole traceback contains neither the secret nor the seed."""
    text = "".join(traceback.format_exception(error))
    return not any(secret in text for secret in (keys.secret.decode(), keys.seed.hex(), repr(keys.seed)))


# Generating and saving


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


def test_key_file_without_signing_key_is_loaded(tmp_path: Path, keys: Keys) -> None:
    assert Keys.load(write(tmp_path, content(keys, public=f'"{keys.public[:40]}"'))) == keys


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
    assert "with this file alone, a participant that has lost everything else\n# recovers." in text
    assert tomllib.loads(text) == {
        "name": "hospital-a",
        "public": keys.public,
        "secret": keys.secret.decode(),
        "seed": keys.seed.hex(),
    }


def test_public_file_is_a_participant_without_an_address(tmp_path: Path, keys: Keys) -> None:
    text = keys.save(tmp_path)[1].read_text()
    assert text.startswith("# The public key of hospital-a, no secret.")
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


# Loading invalid files


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o666, 0o620, 0o660])
def test_key_file_accessible_to_others_is_rejected(tmp_path: Path, keys: Keys, mode: int) -> None:
    path = write(tmp_path, content(keys), mode)
    with pytest.raises(InputError) as error:
        Keys.load(path)
    assert str(error.value) == (
        f"{path} has mode {mode:04o}, so other users can access the secret in it; chmod 600 {path}"
    )
    path.chmod(0o600)
    assert Keys.load(path) == keys


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o700])
def test_key_file_of_its_owner_alone_is_loaded(tmp_path: Path, keys: Keys, mode: int) -> None:
    assert Keys.load(write(tmp_path, content(keys), mode)) == keys


def test_chmod_command_in_the_error_is_quoted_for_a_shell(tmp_path: Path, keys: Keys) -> None:
    folder = tmp_path / "my keys"
    folder.mkdir()
    with pytest.raises(InputError, match=r"chmod 600 '.*/my keys/mine\.key'$"):
        Keys.load(write(folder, content(keys), 0o644))


@pytest.mark.parametrize(("name", "message"), [("none.key", "No such file or directory"), ("", "Is a directory")])
def test_unreadable_key_file_is_rejected(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(InputError, match=rf"cannot be read \({message}\); name a key file"):
        Keys.load(tmp_path / name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": None}, "lacks seed; a key file has name, public, secret, seed: restore it from your copy"),
        ({"name": None, "secret": None}, "lacks name, secret; a key file has"),
        ({"more": "1", "still": "2"}, "has 2 unknown keys; a key file has name, public, secret, seed"),
        ({"name": "7"}, "the name is not a text in quotes; restore it"),
        ({"seed": "[1]"}, "the seed is not a text in quotes"),
        ({"name": '"a b"'}, "the name is invalid; it has 1 to 63 letters"),
        ({"public": '"short"'}, "the public key is invalid; it has 80 characters of Z85"),
        ({"public": f'"{"ä" * 20}"'}, "the public key is invalid; it has 80 characters of Z85"),
        ({"public": f'"{"ä" * 40}"'}, "the public key does not match the secret key; restore it from your copy"),
        ({"public": f'"{"#" * 80}"'}, "the public key is invalid; it has 80 characters of Z85"),
        ({"secret": f'"{"~" * 40}"'}, "the secret key is invalid; it has 40 characters of Z85"),
        ({"seed": '"00"'}, "the seed is invalid; it has 64 hexadecimal digits"),
        ({"seed": f'"{"0 " * 32}"'}, "the seed is invalid; it has 64 hexadecimal digits"),
        ({"seed": f'"{"x" * 64}"'}, "the seed is invalid; it has 64 hexadecimal digits"),
        ({"public": f'"{HALF}"'}, "the public key does not match the secret key; restore it from your copy"),
        ({"public": f'"{"#" * 40}"'}, "the public key does not match the secret key; restore it from your copy"),
        ({"public": f'"{KEY}"'}, "the public key does not match the secret key and the seed; restore it from"),
        ({"seed": f'"{"0" * 64}"'}, "the public key does not match the secret key and the seed; restore it from"),
    ],
)
def test_malformed_key_file_is_rejected(
    tmp_path: Path, keys: Keys, changes: dict[str, str | None], message: str
) -> None:
    path = write(tmp_path, content(keys, **changes))
    with pytest.raises(InputError) as error:
        Keys.load(path)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)
    assert shows_no_secret(keys, error.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text.replace('"', "", 2), "not TOML at line 1, column"),
        (lambda text: text.replace("secret = ", "secret "), "not TOML at line 3, column"),
        (lambda text: text.replace('secret = "', 'secret = "\\q'), "not TOML"),
        (lambda text: text[:-10], "not TOML"),
        (lambda text: text.encode() + b"\xff", "not TOML; restore"),
        (lambda text: text + "more = " + 10_000 * "[", "not TOML"),
        (lambda text: text + "more = " + 5_000 * "9", "not TOML"),
    ],
)
def test_damaged_key_file_is_rejected_without_quoting_it(
    tmp_path: Path, keys: Keys, damage: object, message: str
) -> None:
    assert callable(damage)
    path = write(tmp_path, damage(content(keys)))
    with pytest.raises(InputError, match=f"is not a key file of cgd: it is {message}") as error:
        Keys.load(path)
    assert shows_no_secret(keys, error.value)


@pytest.mark.parametrize("place", ["name", "public"])
def test_secret_in_the_wrong_line_is_not_shown(tmp_path: Path, keys: Keys, place: str) -> None:
    path = write(tmp_path, content(keys, **{place: f'"{keys.secret.decode()}"', "secret": f'"{keys.public}"'}))
    with pytest.raises(InputError, match="is not a key file of cgd") as error:
        Keys.load(path)
    assert shows_no_secret(keys, error.value)


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


# Public keys and participants


@pytest.mark.parametrize("text", ["", "a" * 40, "a" * 79, "a" * 81, "a" * 79 + " ", "a" * 79 + '"', "#" * 80, "ä" * 40])
def test_invalid_public_key_is_not_a_key(text: str) -> None:
    assert not is_key(text.encode())


def test_public_key_is_read_as_text_or_from_its_file(tmp_path: Path, keys: Keys) -> None:
    _, public = keys.save(tmp_path)
    assert read_public_key(str(public)) == read_public_key(keys.public) == keys.public


@pytest.mark.parametrize(
    "text", [None, "", "key = 1", "participants = 1", "participants = [1]", "[[participants]]\nkey=1", "?"]
)
def test_file_without_a_public_key_is_rejected_without_quoting_it(tmp_path: Path, keys: Keys, text: str | None) -> None:
    private, _ = keys.save(tmp_path)
    path = private if text is None else write(tmp_path, text)
    with pytest.raises(
        InputError, match=r"is neither a public key \(80 characters of Z85\) nor a file with one; give"
    ) as e:
        read_public_key(str(path))
    assert shows_no_secret(keys, e.value)


def test_public_key_file_of_another_participant_is_rejected(tmp_path: Path, keys: Keys) -> None:
    _, public = keys.save(tmp_path)
    assert read_public_key(str(public), "hospital-a") == read_public_key(keys.public, "dora") == keys.public
    message = (
        r"hospital-a\.pub has the public key of 'hospital-a', and the participant is 'dora'; give the \.pub of dora, or"
    )
    with pytest.raises(InputError, match=message):
        read_public_key(str(public), "dora")
    nameless = write(tmp_path, f'[[participants]]\nkey = "{keys.public}"\n')
    assert read_public_key(str(nameless), "dora") == keys.public


def test_missing_or_unreadable_public_key_file_is_rejected(tmp_path: Path) -> None:
    missing = tmp_path / "dora.pub"
    with pytest.raises(
        InputError, match=r"there is no file .*dora\.pub, and .* is not a public key .*; give the NAME\.pub that"
    ):
        read_public_key(str(missing))
    missing.mkdir()
    with pytest.raises(InputError, match=r"dora\.pub cannot be read \(Is a directory\); give the NAME\.pub that"):
        read_public_key(str(missing))


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


def test_public_key_without_signing_key_is_rejected(tmp_path: Path) -> None:
    keys = Keys.generate("ada")
    old = tmp_path / "ada.pub"
    old.write_text(f'[[participants]]\nname = "ada"\nkey = "{keys.curve.decode()}"\n')
    for text in (keys.curve.decode(), str(old)):
        with pytest.raises(InputError, match="from an older version of cgd, .* `cgd keygen NAME --public`"):
            read_public_key(text)
