"""The keys of a participant: the private key file, and public keys.

All secrets of a participant are in one small file. The origin of its model is drawn from the seed in that file, and the
displacement is known to all members, so a participant that keeps this file and loses everything else recovers its
model.

A public key consists of a CURVE key (X25519), which encrypts connections and yields pairwise secrets, and a signing key
(Ed25519, with its secret half derived from the seed): 40 characters of Z85 each, one after the other.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import shlex
import stat
import struct
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from zmq.utils import z85

from cgd.errors import InputError
from cgd.federation.toml_validation import NAME, check_name
from cgd.files import PRIVATE, create_text, parse_toml, replace_text
from cgd.secagg.federation_spec import Identity, PublicKeys

SEED_BYTES = 32
HALF_CHARACTERS = 40
KEY_CHARACTERS = 2 * HALF_CHARACTERS

FIELDS = ("name", "public", "secret", "seed")
OLD_KEY = (
    "is from an older version of cgd, in which keys could not sign; ask its owner to run `cgd keygen NAME --public`, "
    f"and use the {KEY_CHARACTERS} characters in the new NAME.pub"
)
GIVE_KEY = "give the NAME.pub that `cgd keygen` wrote"
# The texts of both files are part of the stored format, which tests/golden.json pins.
PRIVATE_FILE = """\
# The private keys of {name}. Anybody who has this file can impersonate {name} and draw the origins of its models.
# Do not show it to anybody. Keep a copy in a safe place: with this file alone, a participant that has lost everything
# else can recover.
name = "{name}"
public = "{public}"
secret = "{secret}"
seed = "{seed}"
"""
PUBLIC_FILE = """\
# The public key of {name}, which is not secret. Paste it into the federation file, and add the address there.
[[participants]]
name = "{name}"
key = "{public}"
"""


@dataclass(frozen=True)
class Keys:
    """The keys of one participant. Malformed keys, or keys that do not match, raise an `InputError`.

    Attributes:
        name: the participant's name.
        public: its CURVE key and its signing key, 80 characters of Z85, as in the federation file.
        secret: the secret half of the CURVE key, 40 characters; not shown by `repr`.
        seed: 32 secret bytes from which its signing key and the origins of its models are derived; not shown by `repr`.

    Examples:
        >>> keys = Keys.generate("hospital-a")
        >>> len(keys.public), len(keys.secret), len(keys.seed)
        (80, 40, 32)
        >>> keys.federation_seed("five-hospitals") == keys.federation_seed("all-hospitals")
        False
    """

    name: str
    public: str
    secret: bytes = field(repr=False)
    seed: bytes = field(repr=False)

    def __post_init__(self) -> None:
        # No error shows a value, not even a public one: in a file with mixed-up lines it may be the secret.
        if not NAME.fullmatch(self.name):
            raise InputError("the name is invalid; it has 1 to 63 letters, digits, dots, underscores and hyphens")
        for which, key, size in (
            ("public", self.public.encode(), KEY_CHARACTERS),
            ("secret", self.secret, HALF_CHARACTERS),
        ):
            if not _is_z85(key, size):
                raise InputError(f"the {which} key is invalid; it has {size} characters of Z85")
        if len(self.seed) != SEED_BYTES:
            raise InputError(f"the seed has {len(self.seed)} bytes; it must have {SEED_BYTES}")
        if derive_public(self.secret, self.seed) != self.public:
            raise InputError("the public key does not match the secret key and the seed")

    @classmethod
    def generate(cls, name: str) -> Keys:
        """Return new keys from the operating system's random generator.

        Raises:
            InputError: the name is not valid.
        """
        check_name("the participant's name", name)
        _, secret = zmq.curve_keypair()
        seed = secrets.token_bytes(SEED_BYTES)
        return cls(name, derive_public(secret, seed), secret, seed)

    @property
    def identity(self) -> Identity:
        """The secret keys in the protocol's representation."""
        return Identity(z85.decode(self.secret), _signing_secret(self.seed))

    @property
    def curve(self) -> bytes:
        """The public CURVE key."""
        return curve_key(self.public)

    def save(self, folder: str | os.PathLike[str]) -> tuple[Path, Path]:
        """Write `NAME.key`, readable by its owner alone, and `NAME.pub`, for the federation file.

        Returns:
            The paths of both files.

        Raises:
            InputError: one of them exists, or cannot be written; then neither is left behind.
        """
        private, content = Path(folder) / f"{self.name}.key", {"name": self.name, "public": self.public}
        text = PRIVATE_FILE.format(**content, secret=self.secret.decode(), seed=self.seed.hex())
        create_text(private, text, PRIVATE)
        try:
            return private, self.save_public(folder)
        except BaseException:
            private.unlink()
            raise

    def save_public(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write `NAME.pub`, for the federation file, and return its path.

        Raises:
            InputError: it exists and `overwrite` is not set, or it cannot be written.
        """
        public, text = Path(folder) / f"{self.name}.pub", PUBLIC_FILE.format(name=self.name, public=self.public)
        if overwrite and public.exists():
            replace_text(public, text)
        else:
            create_text(public, text, 0o644)
        return public

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Keys:
        """Read a file that `save` wrote.

        Raises:
            InputError: it cannot be read, other users can access it, or it is not a key file.
        """
        content = _read_private_file(path)
        missing = [name for name in FIELDS if name not in content]
        if missing or len(content) != len(FIELDS):
            fault = f"lacks {', '.join(missing)}" if missing else f"has {len(content) - len(FIELDS)} unknown keys"
            raise InputError(f"{path} {fault}; a key file has {', '.join(FIELDS)}: restore it from your copy")
        texts = {name: value for name, value in content.items() if isinstance(value, str)}
        try:
            for name in FIELDS:
                if name not in texts:
                    raise InputError(f"the {name} is not a text in quotes")
            if not re.fullmatch(rf"[0-9a-fA-F]{{{2 * SEED_BYTES}}}", texts["seed"]):
                raise InputError(f"the seed is invalid; it has {2 * SEED_BYTES} hexadecimal digits")
            secret, seed = texts["secret"].encode(), bytes.fromhex(texts["seed"])
            public = texts["public"]
            if len(public) == HALF_CHARACTERS and _is_z85(secret, HALF_CHARACTERS):  # from before signing keys existed
                if zmq.curve_public(secret) != public.encode():
                    raise InputError("the public key does not match the secret key")
                public = derive_public(secret, seed)
            return cls(texts["name"], public, secret, seed)
        except InputError as error:
            raise InputError(f"{path} is not a key file of cgd: {error}; restore it from your copy") from None

    def federation_seed(self, federation: str) -> bytes:
        """Return the seed for one federation, 32 bytes; the seeds for different federations are independent.

        Raises:
            InputError: the name of the federation is not valid.
        """
        check_name("the federation's name", federation)
        return hmac.digest(self.seed, f"cgd federation {federation}".encode(), "sha256")


def curve_key(key: str) -> bytes:
    """Return the CURVE key in a public key."""
    return key[:HALF_CHARACTERS].encode()


def decode_public_key(key: str) -> PublicKeys:
    """Return a public key in the protocol's representation."""
    return PublicKeys(z85.decode(key[:HALF_CHARACTERS].encode()), z85.decode(key[HALF_CHARACTERS:].encode()))


def derive_public(secret: bytes, seed: bytes) -> str:
    """Return the public key that belongs to a secret CURVE key and a seed."""
    signing = Ed25519PrivateKey.from_private_bytes(_signing_secret(seed)).public_key().public_bytes_raw()
    return (zmq.curve_public(secret) + z85.encode(signing)).decode()


def _signing_secret(seed: bytes) -> bytes:
    return hmac.digest(seed, b"cgd signing key", "sha256")


def read_public_key(text: str, name: str | None = None) -> str:
    """Return a public key that is given as such or by the path of its `NAME.pub`.

    Args:
        text: the key, or the path of the file.
        name: the participant that the key is for; the file of another participant is rejected.

    Raises:
        InputError: it is neither a key nor a public key file, or belongs to another participant.
    """
    if is_key(text.encode()):
        return text
    _reject_old_key(text, text)
    # Errors about a file that is not a public key file do not quote it: it may be a private key file.
    try:
        content = parse_toml(Path(text).read_bytes().decode())["participants"][0]
        key, owner = content["key"], content.get("name", name)
    except FileNotFoundError:
        raise InputError(
            f"there is no file {text}, and it is not a public key ({KEY_CHARACTERS} characters of Z85); {GIVE_KEY}"
        ) from None
    except OSError as error:
        raise InputError(f"{text} cannot be read ({error.strerror}); {GIVE_KEY}") from None
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        key, owner = None, name
    _reject_old_key(key, text)
    if not isinstance(key, str) or not is_key(key.encode()):
        raise InputError(
            f"{text} is neither a public key ({KEY_CHARACTERS} characters of Z85) nor a file with one; {GIVE_KEY}"
        )
    if name is not None and owner != name:
        raise InputError(
            f"{text} has the public key of {owner!r}, and the participant is {name!r}; give the .pub of {name}, or "
            f"use the name in the file. If {name} does use this key, change the name in {text}"
        )
    return key


def _reject_old_key(key: object, source: str) -> None:
    if isinstance(key, str) and _is_z85(key.encode(), HALF_CHARACTERS):
        raise InputError(f"the key in {source} {OLD_KEY}")


def check_key(key: object, source: str) -> None:
    """Check a public key; `source` is the place to copy it from, for the error.

    Raises:
        InputError: it is not a public key.
    """
    if isinstance(key, str) and _is_z85(key.encode(), HALF_CHARACTERS):
        raise InputError(f"key is {key!r}, which {OLD_KEY}")
    if not isinstance(key, str) or not is_key(key.encode()):
        raise InputError(f"key is {key!r}; a key has {KEY_CHARACTERS} characters of Z85: copy it from {source}")


def is_key(text: bytes) -> bool:
    """Return whether this is a public key: 80 characters of Z85.

    Examples:
        >>> is_key(b"0" * 80), is_key(b"0" * 79), is_key(b"#" * 80)
        (True, False, False)
    """
    return _is_z85(text, KEY_CHARACTERS)


def _is_z85(text: bytes, characters: int) -> bool:
    try:
        return len(text) == characters and bool(z85.decode(text))
    except (KeyError, struct.error):  # not a character of Z85; five characters that exceed 32 bits
        return False


def find_key(path: Path, name: str) -> Path:
    """Return the private key file of a participant or of the hub: next to the federation file, or in this folder.

    Raises:
        InputError: it is in neither place.
    """
    places = [path.parent / f"{name}.key", Path(f"{name}.key")]
    for place in places:
        if place.exists():
            return place
    raise InputError(
        f"there is no key file of {name} at {' or '.join(map(str, dict.fromkeys(places)))}; "
        f"name it (key=, --key), or make one with `cgd keygen {name}`"
    )


def _read_private_file(path: str | os.PathLike[str]) -> dict[str, object]:
    try:
        with open(path, "rb") as file:
            if str(path).endswith(".pub"):
                raise InputError(f"{path} is a public key; name the private key file, NAME.key")
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            # On systems without POSIX modes, every file seems to be accessible to all users.
            if mode & 0o077 and os.name == "posix":
                raise InputError(
                    f"{path} has mode {mode:04o}, so other users can access the secret in it; "
                    f"chmod 600 {shlex.quote(str(path))}"
                )
            raw = file.read()
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); name a key file of cgd, or restore it from your copy"
        ) from None
    try:
        return parse_toml(raw.decode())
    except (ValueError, RecursionError) as error:
        # The location only: the parser's message may quote the secret.
        location = re.search(r"line \d+, column \d+", str(error))
        at = f" at {location[0]}" if location else ""
        raise InputError(f"{path} is not a key file of cgd: it is not TOML{at}; restore it from your copy") from None
