"""How many samples all members have: counted by a secure sum before the first step, and held against each member.

A weight n_l/n is right only while n_l is what was counted. A member that is stopped and comes back with other samples
would spoil a total for everyone; and once the step is taken again with the right number, the difference of the two
totals is its own gradient. So each member puts a pledge into the count, which only it can read: a keyed digest of its
number of samples, and of what they are if its program says so. The pledges are part of what all members remember, and
who comes back looks for its own, before anything is summed.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import InputError, WeightError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cgd.peers import Peers
    from cgd.secagg.journal import Step

# What a parameter group keeps of a count.
NOT_COUNTED: dict[str, Any] = {"samples": None, "total_samples": None, "members": None, "epoch": None, "pledges": None}
PLEDGE_BYTES = 5  # the total of all members' pledges is exact


class SampleCountMismatchError(InputError):
    """A member of a federation has come back with other samples. The others wait: it may come with those it had."""


def count(peers: Peers, samples: int, step: Step, epoch: int, addends: int, records: bytes = b"") -> dict[str, Any]:
    """Count the samples of all members of an epoch; `records` is a digest of ours, if their content is pledged, too.

    Raises:
        MembersChangedError: the epoch is over.
        WeightError: some member entered what is no number of samples.
    """
    members = peers.members
    ballot = np.zeros(1 + addends, dtype=np.int64)
    ballot[0] = samples
    # If the epoch is one of the past, its total is known and our ballot is not cast.
    ballot[1 + (members.index(peers.me) if len(members) == addends else 0)] = _pledge(
        peers.seed, samples, epoch, records
    )
    total, *pledges = peers.sum(ballot, step=step, epoch=epoch).tolist()
    if total < samples + addends - 1:
        raise WeightError(
            f"the {addends} members counted {total} samples in all, and we alone have {samples}: some member entered "
            "what is no number of samples, so no step is taken"
        )
    counted = {"total_samples": total, "epoch": epoch, "pledges": pledges}
    return {"samples": samples, "members": list(members), **counted}


def check(peers: Peers, samples: int, groups: Sequence[dict[str, Any]], epoch: int, records: bytes = b"") -> None:
    """Refuse to go on from a count that no longer holds; a new epoch of a federation is counted anew.

    Raises:
        InputError: the members, or our samples, are not those that were counted.
    """
    for group in groups:
        if epoch > 0 and group["epoch"] != epoch:
            group.update(NOT_COUNTED)
        if group["total_samples"] is None:
            continue
        if group["samples"] != samples:
            raise InputError(
                f"samples is {samples} and was {group['samples']} when n was counted: the weights would not "
                "sum to one; give samples= as it was, or call recount() at every member"
            )
        if epoch > 0:
            check_pledge(peers, samples, group["pledges"], epoch, records)
        if epoch == 0 and group["members"] != list(peers.members):
            raise InputError(
                f"n was counted with {', '.join(group['members'])} and the members are {', '.join(peers.members)}; "
                "a step taken again with other members would show somebody's gradient. If the step after the last "
                "finished one is next, call recount() at every member; otherwise start anew"
            )


def check_pledge(peers: Peers, samples: int, pledges: Sequence[int], epoch: int, records: bytes = b"") -> None:
    """Refuse other samples than ours were when this epoch of a federation was counted.

    Raises:
        OtherSamplesError: our pledge is not there.
    """
    if _pledge(peers.seed, samples, epoch, records) not in pledges:
        fact = f"samples is {samples}, and {peers.me} was counted with another number: the weights would not sum to one"
        if records:
            fact = f"our {samples} samples are not those that {peers.me} was counted with, in number or in content"
        raise SampleCountMismatchError(
            f"{fact}. Come back with the data that you had; or remove and add this participant, which counts anew"
        )


def _pledge(seed: bytes, samples: int, epoch: int, records: bytes = b"") -> int:
    digest = hmac.digest(seed, f"cgd: {samples} samples in epoch {epoch}".encode() + records, "sha256")
    return int.from_bytes(digest[:PLEDGE_BYTES], "little")
