"""Create and edit the federation file: comments and layout are kept, and every change increases the epoch by one."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import AoT, Comment, Table, Whitespace

from cgd.errors import InputError
from cgd.federation.config import Federation, HubSite, Participant, Training
from cgd.federation.data_schema import parse_schema
from cgd.federation.privacy_section import check_reviewed
from cgd.federation.toml_validation import at
from cgd.files import create_text, read_text, replace_text

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from tomlkit import TOMLDocument
    from tomlkit.container import Container
    from tomlkit.items import Item, Key

    from cgd.federation.absence_section import Absence

    Body = list[tuple[Key | None, Item]]

# The text of a new file is part of the stored format, which tests/golden.json pins.
HEADER = "# The federation file. All participants hold the same file, and compare it before they sum."
COMMENTS = {
    "epoch": "increases by one with every change",
    "mu": "above 0: the step size decreases",
    "bound": "the largest magnitude of a gradient coordinate",
    "ring_bits": "or 64",
    "masking": 'or "uniform"',
    "opening": '"mesh", "aggregator" or "hub"',
    "aggregator": 'the member that adds, if opening is "aggregator"',
    "minimum": "the minimum number of members of a sum",
    "optimizer": '"sgd" or "adam"',
    "validate_every": "with tables: the number of steps between two evaluations of the validation loss",
    "patience": "with tables: stop after this number of evaluations without a lower loss; 0: never",
    "cell": "row and column",
}
ABSENCE_COMMENTS = {
    "quorum": "at least so many go on without the others",
    "patience": "the seconds of silence before they do",
}


def create_federation(
    path: str | os.PathLike[str],
    name: str,
    participants: Iterable[Participant],
    training: Training | None = None,
    hub: HubSite | None = None,
    schema: str | None = None,
    absence: Absence | None = None,
) -> Federation:
    """Write the first file of a federation, with comments; `schema` is the text of its sections about tables, if any.

    Raises:
        InputError: the file exists or cannot be written, or its content would not be valid.
    """
    path = Path(path)
    with at(f"{path} is not written: "):
        data, model, privacy = (None, None, None) if schema is None else parse_schema(schema)
        if schema is not None:
            check_reviewed(schema)
        made = Federation(
            name, 1, training or Training(), tuple(participants), path, hub, data, model, privacy, absence
        )
    settings = _lines(made.training.written())
    if absence is not None:
        settings += f"\n[absence]\n{_lines(absence.written(), ABSENCE_COMMENTS)}"
    if hub is not None:
        settings += f"\n[hub]\n{_lines(asdict(hub))}"
    entries = "".join(f"\n{_entry(each)}" for each in made.participants)
    tables = "" if schema is None else f"\n{schema.strip()}\n"
    text = f"{HEADER}\n{_lines({'name': name, 'epoch': 1})}\n[training]\n{settings}{tables}{entries}"
    if not _describes(text, made):
        raise InputError(
            f"{path} is not written, because the schema would have another meaning in it; write [data], [data.columns] "
            "and [model] above their keys, as `cgd schema` does"
        )
    create_text(path, text, 0o644)
    return made


def remove_participant(path: str | os.PathLike[str], name: str, quorum: int | None = None) -> Federation:
    """Remove a participant, with the comments directly above and below its entry; increase the epoch by one.

    `quorum` is the new quorum, if it is to change.

    Raises:
        InputError: there is no such participant, or the rest would not be valid; the file is unchanged.
    """
    before, document = _read(Path(path), read_text(Path(path)))
    with at(f"{path}: "):
        removed = before.participant(name)
    entries = document["participants"]
    if isinstance(entries, AoT):
        _remove_entry(document, entries, next(i for i, each in enumerate(entries) if each["name"] == name))
    rest = tuple(each for each in before.participants if each != removed)
    return _rewrite(before, rest, f"without {name}", document, quorum)


def add_participant(path: str | os.PathLike[str], participant: Participant, quorum: int | None = None) -> Federation:
    """Add a participant after the others; increase the epoch by one. `quorum` is as for `remove_participant`.

    Raises:
        InputError: the result would not be valid, for example with a second participant of that name; the file is
            unchanged.
    """
    before, document = _read(Path(path), read_text(Path(path)).rstrip("\n") + "\n")
    entries = document["participants"]
    if isinstance(entries, AoT):
        _add_entry(document, entries, participant)
    return _rewrite(before, (*before.participants, participant), f"with {participant.name}", document, quorum)


def _read(path: Path, text: str) -> tuple[Federation, TOMLDocument]:
    before = Federation.parse(text, path)
    try:
        return before, tomlkit.parse(text)
    except TOMLKitError as error:  # it is stricter than the parser of the standard library
        raise InputError(f"{path} is unchanged, because it cannot be edited ({error}); change it by hand") from None


def _rewrite(
    before: Federation,
    participants: tuple[Participant, ...],
    change: str,
    document: TOMLDocument,
    quorum: int | None,
) -> Federation:
    """Write the changed document with the next epoch, if it then has the expected content."""
    path, absence = before.path, before.absence
    if quorum is not None and absence is None:
        raise InputError(f"{path} is unchanged: it has no quorum to change; add an [absence] by hand, or omit --quorum")
    with at(f"{path} is unchanged, because {change} it would not be valid: "):
        if quorum is not None and absence is not None:
            absence = replace(absence, quorum=quorum)
        after = replace(before, epoch=before.epoch + 1, participants=participants, absence=absence)
    document["epoch"] = after.epoch
    if absence is not None and absence != before.absence:
        document["absence"]["quorum"] = absence.quorum
    text = tomlkit.dumps(document)
    if not _describes(text, after):
        raise InputError(
            f"{path} is unchanged, because it is not laid out as cgd writes it; write [[participants]] above each "
            f"participant, or change it by hand: {change}, epoch = {after.epoch}"
        )
    replace_text(path, text)
    return after


def _describes(text: str, federation: Federation) -> bool:
    """Return whether a text of a federation file has exactly this content."""
    try:
        return Federation.parse(text, federation.path) == federation
    except InputError:
        return False


# tomlkit attaches every comment and blank line to the table above it. Here, comments directly above a header belong to
# the entry below, and those directly below an entry to that entry.


def _remove_entry(document: TOMLDocument, entries: AoT, index: int) -> None:
    _, following = _split_tail(document, entries, index)
    position = next(i for i, (_, item) in enumerate(document.body) if item is entries)
    below = document.body[position:]
    del document.body[position:]
    above = entries.body[index - 1].value.body if index else _last_body(document)
    while above and isinstance(above[-1][1], Comment):
        above.pop()
    if following and isinstance(following[0][1], Whitespace):  # without the blank line before the next entry
        blank = following[0][1].as_string().removeprefix("\r").removeprefix("\n")
        following[0] = (None, Whitespace(blank))
    above.extend(following)
    del entries.body[index]
    document.body.extend(below)


def _add_entry(document: TOMLDocument, entries: AoT, participant: Participant) -> None:
    own, following = _split_tail(document, entries, len(entries) - 1)
    entries.body[-1].value.body.extend([*own, (None, Whitespace("\n"))])
    added = tomlkit.parse(_entry(participant))["participants"]
    assert isinstance(added, AoT)  # noqa: S101 - for the type checker
    added.body[0].value.body.extend(following)
    entries.body.append(added.body[0])


def _split_tail(document: TOMLDocument, entries: AoT, index: int) -> tuple[Body, Body]:
    """Cut the comments and blank lines off the end of an entry; return those that belong to it, and the others."""
    body = entries.body[index].value.body
    tail: Body = []
    while body and body[-1][0] is None:
        tail.insert(0, body.pop())
    own = list(takewhile(lambda each: isinstance(each[1], Comment), tail))
    header_follows = index + 1 < len(entries) or document.body[-1][1] is not entries
    if len(own) == len(tail) and header_follows:  # they are directly above the next header
        own = []
    return own, tail[len(own) :]


def _last_body(container: Container) -> Body:
    """Return the items of the last table in a container, which hold the comments at its end."""
    last = container.body[-1][1] if container.body else None
    if isinstance(last, AoT):
        last = last.body[-1]
    return _last_body(last.value) if isinstance(last, Table) else container.body


def _entry(participant: Participant) -> str:
    return "[[participants]]\n" + _lines(
        {key: value for key, value in asdict(participant).items() if value not in (None, "")}
    )


def _lines(table: dict[str, Any], explained: dict[str, str] = COMMENTS) -> str:
    # TOML writes these values as JSON does.
    comments = {key: f"  # {comment}" for key, comment in explained.items()}
    return "".join(f"{key} = {json.dumps(value)}{comments.get(key, '')}\n" for key, value in table.items())
