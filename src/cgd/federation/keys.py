"""Who a participant is: to the others (`Participant`), and to itself (`Keys`).

Everything secret that a participant has to keep is in one small file. The origin of its model is drawn from the seed in
it, and the displacement is known to all members: whoever has this file and has lost all else gets its model back.

A public key is two: a CURVE key (X25519) that encrypts connections and makes pairwise secrets, and a signing key
(Ed25519, its secret half derived from the seed), each 40 characters of Z85, one behind the other.
"""

from __future__ import annotations

import difflib
import hmac
import os
import re
import secrets
import shlex
import stat
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from zmq.utils import z85

from cgd.errors import InputError
from cgd.files import parse_toml, replace_text, write_new
from cgd.optim.grid import Cell
from cgd.secagg.identity import Identity, PublicKeys
from cgd.transport.addresses import host_and_port

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

SEED_BYTES = 32
HALF_CHARACTERS = 40
KEY_CHARACTERS = 2 * HALF_CHARACTERS
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

FIELDS = ("name", "public", "secret", "seed")
OLD_KEY = (
    "is from an older version of cgd, in which keys could not sign; ask its owner to run `cgd keygen NAME --public`, "
    f"and use the {KEY_CHARACTERS} characters in the new NAME.pub"
)
GIVE_KEY = "give the NAME.pub that `cgd keygen` wrote"
PRIVATE = """\
# The private keys of {name}. Whoever has this file can speak for {name} and draw the origins of its models.
# Show it to nobody, and keep a copy in a safe place: with this file alone, a participant that has lost everything else
# recovers.
name = "{name}"
public = "{public}"
secret = "{secret}"
seed = "{seed}"
"""
PUBLIC = """\
# The public key of {name}, no secret. Paste it into the federation file and add its address there.
[[participants]]
name = "{name}"
key = "{public}"
"""


@dataclass(frozen=True)
class Participant:
    """One participant, as all others know it. What it cannot be raises an `InputError`.

    Attributes:
        name: what it is called.
        address: where others reach it, such as `tcp://hospital-a.example:7001`; empty if it only dials out.
        key: its public key, 80 characters of Z85.
        cell: its place in the grid, if there is one.
    """

    name: str
    address: str
    key: str
    cell: Cell | None = None

    def __post_init__(self) -> None:
        check_name("name", self.name)
        if self.address != "":
            host_and_port(self.address)
        _check_key(self.key, f"{self.name}.pub")
        if self.cell is not None:
            cell: Any = self.cell
            whole = isinstance(cell, (list, tuple)) and all(type(each) is int and each >= 0 for each in cell)
            if not whole or len(cell) != 2:
                raise InputError(f"cell is {cell!r}; write the row and the column, from 0, such as cell = [0, 2]")
            object.__setattr__(self, "cell", Cell(*cell))

    @property
    def place(self) -> tuple[str, int]:
        """Where the address leads: the same for all ways of writing it."""
        return host_and_port(self.address)


@dataclass(frozen=True)
class HubSite:
    """Where the hub is and how it is known. What it cannot be raises an `InputError`.

    Attributes:
        address: where the participants reach it, such as `tcp://hub.example:7000`.
        key: its public key, 80 characters of Z85.
    """

    address: str
    key: str

    def __post_init__(self) -> None:
        host_and_port(self.address)
        _check_key(self.key, "the .pub that `cgd keygen hub` wrote")

    @property
    def place(self) -> tuple[str, int]:
        """Where the address leads."""
        return host_and_port(self.address)


@dataclass(frozen=True)
class Keys:
    """The keys of one participant. If they are malformed or do not belong together, that is an `InputError`.

    Attributes:
        name: of the participant.
        public: its CURVE key and its signing key, 80 characters of Z85; the others have it in the federation file.
        secret: the secret half of the CURVE key, 40 characters; not shown by `repr`.
        seed: 32 secret bytes from which its signing key and the origins of its models come; not shown by `repr`.

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
        # No value is shown here, not even a public one: who mixed up the lines of a file has put the secret there.
        if not NAME.fullmatch(self.name):
            raise InputError("the name is none; it is 1 to 63 letters, digits, dots, underscores and hyphens")
        for which, key, size in (
            ("public", self.public.encode(), KEY_CHARACTERS),
            ("secret", self.secret, HALF_CHARACTERS),
        ):
            if not _is_z85(key, size):
                raise InputError(f"the {which} key is none; it is {size} characters of Z85")
        if len(self.seed) != SEED_BYTES:
            raise InputError(f"the seed has {len(self.seed)} bytes; it must have {SEED_BYTES}")
        if _public(self.secret, self.seed) != self.public:
            raise InputError("the public key does not belong to the secret one and the seed")

    @classmethod
    def generate(cls, name: str) -> Keys:
        """New keys from the operating system's generator.

        Raises:
            InputError: the name cannot be one.
        """
        check_name("the participant's name", name)
        _, secret = zmq.curve_keypair()
        seed = secrets.token_bytes(SEED_BYTES)
        return cls(name, _public(secret, seed), secret, seed)

    @property
    def identity(self) -> Identity:
        """The keys as the protocol uses them."""
        return Identity(z85.decode(self.secret), _signing_secret(self.seed))

    @property
    def curve(self) -> bytes:
        """The public CURVE key."""
        return curve_key(self.public)

    def save(self, folder: str | os.PathLike[str]) -> tuple[Path, Path]:
        """Write `NAME.key`, which only its owner can read, and `NAME.pub`, for the federation file.

        Returns:
            The paths of the two.

        Raises:
            InputError: one of them exists, or cannot be written; then neither was written.
        """
        private, content = Path(folder) / f"{self.name}.key", {"name": self.name, "public": self.public}
        write_new(private, PRIVATE.format(**content, secret=self.secret.decode(), seed=self.seed.hex()), 0o600)
        try:
            return private, self.save_public(folder)
        except BaseException:
            private.unlink()
            raise

    def save_public(self, folder: str | os.PathLike[str], *, anew: bool = False) -> Path:
        """Write `NAME.pub`, for the federation file; `anew` replaces one that is there. Returns its path.

        Raises:
            InputError: it exists, or cannot be written.
        """
        public, text = Path(folder) / f"{self.name}.pub", PUBLIC.format(name=self.name, public=self.public)
        if anew and public.exists():
            replace_text(public, text)
        else:
            write_new(public, text, 0o644)
        return public

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Keys:
        """Read a file that `save` wrote.

        Raises:
            InputError: it cannot be read, others than its owner can get at it, or it is no key file.
        """
        content = _private_content(path)
        missing = [name for name in FIELDS if name not in content]
        if missing or len(content) != len(FIELDS):
            fault = f"lacks {', '.join(missing)}" if missing else f"holds {len(content) - len(FIELDS)} more than that"
            raise InputError(f"{path} {fault}; a key file has {', '.join(FIELDS)}: restore it from your copy")
        texts = {name: value for name, value in content.items() if isinstance(value, str)}
        try:
            for name in FIELDS:
                if name not in texts:
                    raise InputError(f"the {name} is no text in quotes")
            if not re.fullmatch(rf"[0-9a-fA-F]{{{2 * SEED_BYTES}}}", texts["seed"]):
                raise InputError(f"the seed is none; it is {2 * SEED_BYTES} hexadecimal digits")
            secret, seed = texts["secret"].encode(), bytes.fromhex(texts["seed"])
            public = texts["public"]
            if len(public) == HALF_CHARACTERS and _is_z85(secret, HALF_CHARACTERS):  # made before there were signatures
                if zmq.curve_public(secret) != public.encode():
                    raise InputError("the public key does not belong to the secret one")
                public = _public(secret, seed)
            return cls(texts["name"], public, secret, seed)
        except InputError as error:
            raise InputError(f"{path} is no key file that cgd wrote: {error}; restore it from your copy") from None

    def federation_seed(self, federation: str) -> bytes:
        """The seed for one federation, 32 bytes: one key file serves several, and their origins have nothing in common.

        Raises:
            InputError: the name of the federation cannot be one.
        """
        check_name("the federation's name", federation)
        return hmac.digest(self.seed, f"cgd federation {federation}".encode(), "sha256")


def curve_key(key: str) -> bytes:
    """The CURVE key in a public key."""
    return key[:HALF_CHARACTERS].encode()


def public_keys(key: str) -> PublicKeys:
    """A public key as the protocol uses it."""
    return PublicKeys(z85.decode(key[:HALF_CHARACTERS].encode()), z85.decode(key[HALF_CHARACTERS:].encode()))


def _public(secret: bytes, seed: bytes) -> str:
    signing = Ed25519PrivateKey.from_private_bytes(_signing_secret(seed)).public_key().public_bytes_raw()
    return (zmq.curve_public(secret) + z85.encode(signing)).decode()


def _signing_secret(seed: bytes) -> bytes:
    return hmac.digest(seed, b"cgd signing key", "sha256")


def public_key(text: str, name: str | None = None) -> str:
    """A public key, as such or from the `NAME.pub` that has it.

    Args:
        text: the key, or the path of the file.
        name: the participant that it is for; a file that was made for another one is refused.

    Raises:
        InputError: it is neither, or of another participant.
    """
    if is_key(text.encode()):
        return text
    _refuse_old_key(text, text)
    # Of a file that is none of ours nothing is shown: it may be a private key file that was taken for the public one.
    try:
        content = parse_toml(Path(text).read_bytes().decode())["participants"][0]
        key, owner = content["key"], content.get("name", name)
    except FileNotFoundError:
        raise InputError(
            f"there is no file {text}, and it is no public key ({KEY_CHARACTERS} characters of Z85) either; {GIVE_KEY}"
        ) from None
    except OSError as error:
        raise InputError(f"{text} cannot be read ({error.strerror}); {GIVE_KEY}") from None
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        key, owner = None, name
    _refuse_old_key(key, text)
    if not isinstance(key, str) or not is_key(key.encode()):
        raise InputError(
            f"{text} is neither a public key ({KEY_CHARACTERS} characters of Z85) nor a file with one; {GIVE_KEY}"
        )
    if name is not None and owner != name:
        raise InputError(
            f"{text} has the public key of {owner!r}, and the participant is {name!r}; give the .pub of {name}, or "
            f"name the participant as it is there. If {name} does use this key, change the name in {text}"
        )
    return key


def _refuse_old_key(key: object, source: str) -> None:
    if isinstance(key, str) and _is_z85(key.encode(), HALF_CHARACTERS):
        raise InputError(f"the key in {source} {OLD_KEY}")


def find_key(path: Path, name: str) -> Path:
    """The private key file of a participant or of the hub: beside the federation file, or here.

    Raises:
        InputError: it is in neither place.
    """
    places = [path.parent / f"{name}.key", Path(f"{name}.key")]
    for place in places:
        if place.exists():
            return place
    raise InputError(
        f"there is no key of {name}, in {' or '.join(map(str, dict.fromkeys(places)))}; "
        f"name it (key=, --key), or make one with `cgd keygen {name}`"
    )


def _check_key(key: object, source: str) -> None:
    if isinstance(key, str) and _is_z85(key.encode(), HALF_CHARACTERS):
        raise InputError(f"key is {key!r}, which {OLD_KEY}")
    if not isinstance(key, str) or not is_key(key.encode()):
        raise InputError(f"key is {key!r}; a key is {KEY_CHARACTERS} characters of Z85: copy it from {source}")


def check_name(what: str, name: object) -> str:
    """A name that can be used in files, on the wire and on the command line.

    Raises:
        InputError: it cannot.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InputError(
            f"{what} is {name!r}; choose 1 to 63 letters (a to z), digits, dots, underscores and hyphens, "
            "a letter or digit first"
        )
    return name


def check_unique(what: str, participants: Iterable[Participant], of: Callable[[Participant], Hashable]) -> None:
    """Refuse two participants that have the same of something.

    Raises:
        InputError: there are two.
    """
    seen: dict[Hashable, Participant] = {}
    for each in participants:
        other = seen.setdefault(of(each), each)
        if other is not each:
            who = "two participants" if what == "name" else f"{other.name} and {each.name}"
            raise InputError(f"{who} have the same {what}, {getattr(each, what)!r}; every participant has its own")


def similar(name: str, known: Iterable[str]) -> str:
    """What was probably meant, to be put behind a name that is not known; empty if there is no telling."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def is_key(text: bytes) -> bool:
    """Whether this is a public key: 80 characters of Z85.

    Examples:
        >>> is_key(b"0" * 80), is_key(b"0" * 79), is_key(b"#" * 80)
        (True, False, False)
    """
    return _is_z85(text, KEY_CHARACTERS)


def _is_z85(text: bytes, characters: int) -> bool:
    try:
        return len(text) == characters and bool(z85.decode(text))
    except (KeyError, struct.error):  # no character of Z85; five characters beyond 32 bits
        return False


def _private_content(path: str | os.PathLike[str]) -> dict[str, object]:
    try:
        with open(path, "rb") as file:
            if str(path).endswith(".pub"):
                raise InputError(f"{path} is a public key; name the private key file, NAME.key")
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            # Where there are no such modes, everything seems to be open to all.
            if mode & 0o077 and os.name == "posix":
                raise InputError(
                    f"{path} has mode {mode:04o}, so others than its owner can get at the secret in it; "
                    f"chmod 600 {shlex.quote(str(path))}"
                )
            raw = file.read()
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); name a key file that cgd wrote, or restore it from your copy"
        ) from None
    try:
        return parse_toml(raw.decode())
    except (ValueError, RecursionError) as error:
        # Only the place, for the error's own words may quote what stands there.
        place = re.search(r"line \d+, column \d+", str(error))
        at = f" at {place[0]}" if place else ""
        raise InputError(
            f"{path} is no key file that cgd wrote: it is not TOML{at}; restore it from your copy"
        ) from None
