"""How the federation file is written and changed: comments stay, and every change is the next epoch."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgd.errors import InputError
from cgd.federation.config import Federation, HubSite, Participant, Training
from cgd.federation.data_schema import parse_schema
from cgd.federation.toml_validation import at
from cgd.files import read_text, replace_text, write_new

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

COMMENTS = {
    "epoch": "goes up by one with every change",
    "mu": "above 0, the step size shrinks",
    "bound": "the largest magnitude of a gradient coordinate",
    "ring_bits": "or 64",
    "sharing": 'or "uniform"',
    "opening": '"mesh", "aggregator" or "hub"',
    "aggregator": "the participant that adds up, if there is one",
    "minimum": "no sum has fewer members than this",
    "optimizer": '"sgd" or "adam"',
    "validate_every": "with tables: steps between two looks at the validation loss",
    "patience": "with tables: stop after so many looks without a better one; 0 never does",
    "cell": "row and column",
}
# One participant in the text: the comments right above, the header, its keys, the comments right below.
EPOCH = re.compile(r"^(\s*epoch\s*=\s*)\d+", re.MULTILINE)
BLOCK = re.compile(
    r"""^(?:[ \t]*\#.*\n)*[ \t]*\[\[[ \t]*participants[ \t]*\]\].*\n
        (?:(?:[ \t]*(?:\#.*)?\r?\n)*[ \t]*[^\s\#\[].*\n)*
        (?:(?!(?:[ \t]*\#.*\n)+[ \t]*\[)[ \t]*\#.*\n)*""",
    re.MULTILINE | re.VERBOSE,
)


def new(
    path: str | os.PathLike[str],
    name: str,
    participants: Iterable[Participant],
    training: Training | None = None,
    hub: HubSite | None = None,
    schema: str | None = None,
) -> Federation:
    """Write the first file of a federation, with comments; `schema` is the text of `[data]` and `[model]`, if any.

    Raises:
        InputError: it exists, cannot be written, or could not be used.
    """
    path = Path(path)
    with at(f"{path} is not written: "):
        data, model = (None, None) if schema is None else parse_schema(schema)
        made = Federation(name, 1, training or Training(), tuple(participants), path, hub, data, model)
    head = "# The federation file. Every participant holds the same, and they compare it before they sum."
    settings = _lines(asdict(made.training))
    if hub is not None:
        settings += f"\n[hub]\n{_lines(asdict(hub))}"
    blocks = "".join(f"\n{_block(each)}" for each in made.participants)
    tables = "" if schema is None else f"\n{schema.strip()}\n"
    text = f"{head}\n{_lines({'name': name, 'epoch': 1})}\n[training]\n{settings}{tables}{blocks}"
    if not _says(text, made):
        raise InputError(
            f"{path} is not written, for the schema would mean something else in it; write [data], [data.columns] and "
            "[model] above their keys, as `cgd schema` does"
        )
    write_new(path, text, 0o644)
    return made


def without(path: str | os.PathLike[str], name: str) -> Federation:
    """Take a participant out of the file. The epoch goes up by one, and comments stay.

    Raises:
        InputError: there is no such participant, or the rest could not be used; the file is as it was.
    """
    text = read_text(Path(path))
    before = Federation.parse(text, Path(path))
    with at(f"{path}: "):
        gone = before.participant(name)
    for block in BLOCK.finditer(text):
        if gone.key in block[0]:
            text = text[: block.start()] + text[block.end() :].removeprefix("\r").removeprefix("\n")
            break
    rest = tuple(each for each in before.participants if each != gone)
    return _rewrite(before, rest, f"without {name}", text)


def with_participant(path: str | os.PathLike[str], participant: Participant) -> Federation:
    """Add a participant to the file, after the others. The epoch goes up by one, and comments stay.

    Raises:
        InputError: the whole could not be used, such as with a second one of that name; the file is as it was.
    """
    text = read_text(Path(path)).rstrip("\n") + "\n"
    before = Federation.parse(text, Path(path))
    end = max((block.end() for block in BLOCK.finditer(text)), default=0)
    text = f"{text[:end]}\n{_block(participant)}{text[end:]}"
    return _rewrite(before, (*before.participants, participant), f"with {participant.name}", text)


def _rewrite(before: Federation, participants: tuple[Participant, ...], change: str, text: str) -> Federation:
    """Write the changed text with a new epoch, if it then says what it should."""
    path = before.path
    with at(f"{path} stays as it is, for {change} it could not be used: "):
        after = replace(before, epoch=before.epoch + 1, participants=participants)
    text = EPOCH.sub(rf"\g<1>{after.epoch}", text, count=1)
    if not _says(text, after):
        raise InputError(
            f"{path} stays as it is, for it is not laid out as cgd writes it; write [[participants]] above each "
            f"participant, or change it by hand: {change}, epoch = {after.epoch}"
        )
    replace_text(path, text)
    return after


def _says(text: str, federation: Federation) -> bool:
    """Tell whether a text of a federation file says just this."""
    try:
        return Federation.parse(text, federation.path) == federation
    except InputError:
        return False


def _block(participant: Participant) -> str:
    return "[[participants]]\n" + _lines(
        {key: value for key, value in asdict(participant).items() if value not in (None, "")}
    )


def _lines(table: dict[str, Any]) -> str:
    # TOML writes these values as JSON does.
    comments = {key: f"  # {comment}" for key, comment in COMMENTS.items()}
    return "".join(f"{key} = {json.dumps(value)}{comments.get(key, '')}\n" for key, value in table.items())
