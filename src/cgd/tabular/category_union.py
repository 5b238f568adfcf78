"""The union of all members' categories, by secure sums: those that two members have, without disclosing their owners.

Every member first claims its values (`cgd.tabular.claims`), which shows to each which of its own values others have,
too. Then the texts of these values, and of no others, are added up as sets (`cgd.tabular.lookup_table`). A text without
claims of two members is refused.

Disclosed to every member: the texts that two or more members entered, with the number of these members; the members'
numbers of distinct values, added up; and how many values only one member has. A member can test whether a value that it
guesses is among the values that others entered (`cgd.tabular.claims`). Values that a member does not enter are not
disclosed in any form: see `cgd.tabular.rare_values`, which leaves out those of few records. If all this is too much,
list the categories in the federation file: then only their numbers of records are summed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cgd.errors import InputError
from cgd.federation.data_schema import MAX_CATEGORY_BYTES
from cgd.tabular.claims import CLAIM_BYTES, Claims, make_claim, member_secret, salt
from cgd.tabular.columns import MAX_CATEGORIES
from cgd.tabular.lookup_table import Layout, sum_sets
from cgd.tabular.opened_counts import check_counts, is_included, refuse

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from cgd.peers import Peers

    Entry = tuple[int, str]  # the index of the column, the category

MAX_LEARNED = 5000  # of all columns together: one member must not exhaust the memory of the others
MAX_ENTRIES = 1 << 18  # a table of 107 MB
CLAIM_TABLE = Layout(CLAIM_BYTES)
TEXT_TABLE = Layout(2 + 1 + MAX_CATEGORY_BYTES)  # column, length, text


@dataclass(frozen=True)
class _Claimed:
    """The claims of all members; which of our values are shared; and how many values, of all members, are not."""

    claims: Claims
    shared: Sequence[Entry]
    alone: Sequence[Entry]
    total_shared: int
    total_alone: int


def learn_categories(
    peers: Peers,
    own: Mapping[str, Collection[str]],
    context: str,
    *,
    scope: Sequence[str] = (),
    limit: int | None = None,
    needs_two: bool = False,
) -> dict[str, tuple[str, ...]]:
    """Return the categories that two members or more have, by column, sorted.

    Args:
        peers: the members of the sum.
        own: this member's categories by column. All members have the same columns.
        context: a short text, the same at every member.
        scope: the columns of the table that these members hold, and in a grid no others.
        limit: the most categories of a column; as many as the members' tables may have in total by default.
        needs_two: stop, before any text is opened, if only one member has a category.

    Raises:
        InputError: a category is too long (the sum is aborted for all members); or there are too many in total, or
            of one column, or one that only one member has (all members raise this).
        ProtocolError: the tables cannot be decoded, or contradict our own part: a member entered wrong data.
    """
    columns = sorted(own)  # entries refer to columns by their index in this order
    try:
        entries = _entries([own[name] for name in columns])
    except InputError:
        peers.abort_sum()
        raise
    claimed = _claim(peers, entries, context, scope)
    if needs_two and claimed.total_alone:
        raise _only_one(_by_column(claimed.alone, columns), claimed)
    shared = _by_column(_open(peers, claimed, context, len(columns)), columns)
    _check_number(shared, MAX_CATEGORIES * len(peers) if limit is None else limit)
    if (total := sum(map(len, shared.values()))) > MAX_LEARNED:
        raise InputError(
            f"the members have {total:,} categories of all columns together, and the maximum is {MAX_LEARNED:,}, "
            "because each is a feature of every record; list them in the federation file, leave columns out, or find "
            "out which participant has so many"
        )
    return shared


def _claim(peers: Peers, entries: Sequence[Entry], context: str, scope: Sequence[str]) -> _Claimed:
    """Enter our claims, and return which values are shared."""
    total = _count(peers, len(entries), f"{context}: size", "different values")

    def salt_of(attempt: int) -> bytes:
        return salt(peers, scope, context, attempt)

    def ours(attempt: int) -> dict[bytes, int]:
        salted, secret = salt_of(attempt), member_secret(peers)
        return {make_claim(salted, secret, _key(entry)): 1 for entry in entries}

    def opened(attempt: int, found: Mapping[bytes, int]) -> tuple[int, Claims]:
        return attempt, Claims.opened(salt_of(attempt), found, len(peers))

    included = is_included(peers)
    attempt, claims = sum_sets(peers, CLAIM_TABLE, total, f"{context}: claims", ours, opened)
    if not included:  # the members that claimed their values decide what is opened
        entries = ()
    elif not all(map(claims.contain, ours(attempt))):
        raise refuse(peers, "our claim of a category was removed from the sum")
    shared = [entry for entry in entries if claims.is_shared(_key(entry))]
    alone = [entry for entry in entries if not claims.is_shared(_key(entry))]
    total_shared = _count(peers, len(shared), f"{context}: shared", "values that two participants have")
    total_alone = len(claims) - total_shared
    if included:
        check_counts(peers, "values that only one participant has", [total_alone], [len(alone)])
    return _Claimed(claims, shared, alone, total_shared, max(total_alone, 0))


def _count(peers: Peers, own: int, context: str, what: str) -> int:
    """Return the sum of the members' numbers of values, checked."""
    included = is_included(peers)
    total = int(peers.sum(np.array([own]), context=context)[0])
    check_counts(peers, what, [total], [own] if included else None)
    if total > MAX_ENTRIES:
        raise InputError(
            f"the members have {total:,} categories in total, and the maximum is {MAX_ENTRIES:,}; "
            "list the categories in the federation file, or leave out the columns with many categories"
        )
    return total


def _open(peers: Peers, claimed: _Claimed, context: str, columns: int) -> list[Entry]:
    """Open the texts of the values that are shared."""
    ours = {_key(entry): 1 for entry in claimed.shared}

    def opened(_: int, found: Mapping[bytes, int]) -> dict[bytes, Entry] | None:
        texts = {key: _entry(key, columns) for key in found}
        return None if None in texts.values() else {key: each for key, each in texts.items() if each is not None}

    included = is_included(peers)
    texts = sum_sets(peers, TEXT_TABLE, claimed.total_shared, f"{context}: table", lambda _: ours, opened)
    if not all(map(claimed.claims.is_shared, texts)):
        raise refuse(peers, "a text was opened that no two participants have claimed")
    if included and not ours.keys() <= texts.keys():
        raise refuse(peers, "a category that we have was removed from the sum")
    return list(texts.values())


def _only_one(ours: Mapping[str, tuple[str, ...]], claimed: _Claimed) -> InputError:
    """Return the error about values that only one participant has; it names ours, and only counts those of others."""
    found = [f"{', '.join(map(repr, texts))} of {name!r}" for name, texts in ours.items() if texts]
    others = claimed.total_alone - len(claimed.alone)
    facts = [f"only we have {' and '.join(found)}"] * bool(found)
    facts += [f"{others} {'value occurs' if others == 1 else 'values occur'} at one other participant only"] * (
        others > 0
    )
    return InputError(
        f"{', and '.join(facts)}. What is learned from the tables must occur at two participants. If it is "
        "another spelling (yes and no beside 1 and 0 are four classes), agree on one, or state in `values` what each "
        "means; if not, list the classes, or categories, in [data]. Then train anew under another federation name"
    )


def _check_number(shared: Mapping[str, Sequence[str]], limit: int) -> None:
    """Refuse a column with too many categories: each is a feature, or an output, of the model of every member."""
    for name, found in shared.items():
        if len(found) > limit:
            raise InputError(
                f"the members have {len(found):,} categories of {name!r} in total, and the maximum is {limit:,}; list "
                "them in the federation file, or find out which participant has so many"
            )


def _entries(own: Sequence[Collection[str]]) -> list[Entry]:
    for text in (text for categories in own for text in categories):
        if len(text.encode()) > MAX_CATEGORY_BYTES:
            raise InputError(f"the category {text[:20]!r}… has more than {MAX_CATEGORY_BYTES} bytes; shorten it")
    return [(column, text) for column, categories in enumerate(own) for text in categories]


def _by_column(entries: Collection[Entry], columns: Sequence[str]) -> dict[str, tuple[str, ...]]:
    return {
        name: tuple(sorted(text for column, text in entries if column == place)) for place, name in enumerate(columns)
    }


def _key(entry: Entry) -> bytes:
    column, text = entry[0], entry[1].encode()
    return column.to_bytes(2, "little") + bytes([len(text)]) + text.ljust(MAX_CATEGORY_BYTES, b"\0")


def _entry(key: bytes, columns: int) -> Entry | None:
    """Decode a key; return None if it is invalid, or not the only key of its text: nothing is to be opened twice."""
    column, length, text = int.from_bytes(key[:2], "little"), key[2], key[3:]
    try:
        entry = column, text[:length].decode()
    except UnicodeDecodeError:
        return None
    return entry if column < columns and _key(entry) == key else None
