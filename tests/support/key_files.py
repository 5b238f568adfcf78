"""Valid and damaged key files, and a check that an error shows no secret."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.federation.keys import Keys

HALF = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
KEY = HALF + "E:!C>wS>:V1.-<Cv$(&Wv1)^J)z]+7gT!pV+NNJ@"


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
