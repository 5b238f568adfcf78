"""Files with private or public keys that are invalid: errors name the file and a remedy, and show no secret."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cgd import InputError
from cgd.federation.keys import Keys, is_key, read_public_key
from support.key_files import HALF, KEY, content, shows_no_secret, write

if TYPE_CHECKING:
    from pathlib import Path


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


def test_key_file_without_signing_key_is_loaded(tmp_path: Path, keys: Keys) -> None:
    assert Keys.load(write(tmp_path, content(keys, public=f'"{keys.public[:40]}"'))) == keys


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


# Public keys


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


def test_public_key_without_signing_key_is_rejected(tmp_path: Path) -> None:
    keys = Keys.generate("ada")
    old = tmp_path / "ada.pub"
    old.write_text(f'[[participants]]\nname = "ada"\nkey = "{keys.curve.decode()}"\n')
    for text in (keys.curve.decode(), str(old)):
        with pytest.raises(InputError, match="from an older version of cgd, .* `cgd keygen NAME --public`"):
            read_public_key(text)
