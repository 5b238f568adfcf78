"""The number of samples of all members: counted by a secure sum before the first step, and checked after a restart.

A weight n_l/n is right only while n_l is the number that was counted. If a member restarted with other samples and took
part in a sum, the total would be wrong for everyone; and after the step were repeated with the right number, the
difference of the two totals would be that member's own gradient. Therefore each member adds a commitment to the count:
a digest of its number of samples, and optionally of their content, keyed with its seed. All members store the opened
commitments, but only its owner can recompute one. A restarted member checks its own before it takes part in a sum.

For the same reason, the commitment of a member of a federation covers a digest of its private origin: with another one,
for example because a program calls `cgd.confine` without `seed=peers.seed`, the gradient of a repeated step would be
another one, too.

With differential privacy there are no weights, and every attempt at a step has its own noise and charge. Then a
commitment is made only if there is a digest of the content, which contains statistics with noise: a commitment to the
number alone would be the same again exactly if the number is, which all members could see. If there is a quorum, the
number is not counted again when members are absent or come back, because every count is charged. All divide by the
number of all members' records in the epoch, and a sum is only smaller without some of them (`is_valid`).
"""

from __future__ import annotations

import hmac
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import CGDError, InputError, MembersChangedError, WeightError
from cgd.secagg.attendance import epoch_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from cgd.optim.privacy import Privacy
    from cgd.peers import Peers
    from cgd.secagg.journal_entry import Step

# The result of a count, as a parameter group stores it. The commitments are called "pledges" in stored states.
NOT_COUNTED: dict[str, Any] = {"samples": None, "total_samples": None, "members": None, "epoch": None, "pledges": None}
COMMITMENT_BYTES = 5  # so that a secure sum of commitments is exact


class SampleCountMismatchError(InputError):
    """A restarted member has other samples than those counted.

    The other members keep waiting for it: it may restart with the right ones.
    """


@contextmanager
def abort_on_error(all_peers: Iterable[Peers]) -> Iterator[None]:
    """Abort the next sum with each of these peers if the block raises, so that no peer waits for this member."""
    try:
        yield
    except SampleCountMismatchError:  # the members wait: this participant may restart with the right samples
        raise
    except BaseException:
        abort_sums(all_peers)
        raise


def abort_sums(all_peers: Iterable[Peers]) -> None:
    """Abort the next sum with each of these peers, so that no peer waits for this member."""
    for peers in all_peers:
        with suppress(CGDError):  # a closed connection: the members know
            peers.abort_sum()


def discard(group: dict[str, Any]) -> None:
    """Discard a count, but not its commitments: our samples must be the same if the step may have been revealed."""
    group.update({**NOT_COUNTED, "epoch": group["epoch"], "pledges": group["pledges"]})


def keep_commitments(groups: Iterable[dict[str, Any]], counted: dict[str, Any]) -> None:
    """Keep the commitments of a count of an earlier epoch: the next step may have been revealed after it."""
    for group in groups:
        group.update(epoch=counted["epoch"], pledges=counted["pledges"])


def count_for_groups(
    peers: Peers,
    groups: Sequence[dict[str, Any]],
    samples: int,
    step: Step,
    epoch: int,
    addends: int,
    records_digest: bytes,
    origin: bytes,
    privacy: Privacy | None,
    *,
    was_counted: bool,
    took_part: bool,
) -> None:
    """Count the samples of all members as `count` does, and store the count in these groups.

    If the epoch ends meanwhile, the commitments are kept if this member `was_counted`.

    Raises:
        MembersChangedError: the epoch is over.
        WeightError: a member entered a value that is not a number of samples.
    """
    counted = count(peers, samples, step, epoch, addends, records_digest, origin, privacy, took_part=took_part)
    if (current := peers.next_round()[0]) != epoch:  # no step was finished with this count
        keep_commitments(groups if was_counted else (), counted)
        raise MembersChangedError(epoch, current, peers.members)
    for group in groups:
        group.update(counted)


def count(
    peers: Peers,
    samples: int,
    step: Step,
    epoch: int,
    addends: int,
    records_digest: bytes = b"",
    origin: bytes = b"",
    privacy: Privacy | None = None,
    *,
    took_part: bool = True,
) -> dict[str, Any]:
    """Count the samples of all members of an epoch; commit also to their content and to our origin, given digests.

    With `privacy`, the number is opened with noise, in a sum of its own, because an exact one depends on every record.

    If it is a replayed count in which this member did not take part, the total need not fit our samples.

    Raises:
        MembersChangedError: the epoch is over.
        WeightError: a member entered a value that is not a number of samples.
    """
    members = peers.members
    addend = np.zeros(1 + addends, dtype=np.int64)
    addend[0] = samples if privacy is None else 0
    # In a replayed epoch the members may be others; its total is in the journal, and the addend is not used.
    place = members.index(peers.me) if len(members) == addends else 0
    addend[1 + place] = _commitment(peers.seed, samples, epoch, records_digest + origin, private=privacy is not None)
    context = "" if privacy is None else privacy.settings.describe()
    total, *commitments = peers.sum(addend, context=context, step=step, epoch=epoch).tolist()
    if privacy is not None:
        total = privacy.open_count(peers, samples, step, epoch, addends)
    elif took_part:
        _check_total(total, samples, addends)
    counted = {"total_samples": total, "epoch": epoch, "pledges": commitments}
    return {"samples": samples, "members": list(members), **counted}


def check(
    peers: Peers,
    samples: int,
    groups: Sequence[dict[str, Any]],
    epoch: int,
    records_digest: bytes = b"",
    origin: bytes = b"",
    *,
    revealed: bool = False,
    took_part: bool = True,
    exact: bool = True,
) -> None:
    """Check that the count is still valid; discard it if a new epoch of a federation has begun.

    If the gradient sum of this step may have been `revealed`, our samples and our origin must be those of the count
    before, also after `recount`: else the difference of two sums of one step would be that of our two gradients. A
    member that replays a sum in which it did not take part was not counted for it.

    Raises:
        InputError: the members, or this member's samples, are not those that were counted.
        WeightError: the total is not a number of samples.
    """
    digests = records_digest, origin
    for group in groups:
        if epoch > 0 and revealed and took_part and group["epoch"] is not None:
            check_commitment(peers, samples, group["pledges"], group["epoch"], *digests, private=not exact)
        if epoch > 0 and not is_valid(peers, group, epoch, exact=exact):
            discard(group)
        if group["total_samples"] is None or not took_part:
            continue
        if group["samples"] != samples:
            raise InputError(
                f"samples is {samples} and was {group['samples']} when n was counted: the weights would not "
                "sum to one; give samples= as it was, or call recount() at every member"
            )
        if exact:  # a number with noise may be below ours
            _check_total(group["total_samples"], samples, len(group["pledges"]))  # a restored one may be forged
        if epoch > 0:
            check_commitment(peers, samples, group["pledges"], group["epoch"], *digests, private=not exact)
        if epoch == 0 and group["members"] != list(peers.members):
            raise InputError(
                f"n was counted with {', '.join(group['members'])} and the members are {', '.join(peers.members)}; "
                "repeating a step with other members would reveal a member's gradient. If the step after the last "
                "finished one is next, call recount() at every member; otherwise start a new training"
            )


def is_valid(peers: Peers, counted: Mapping[str, Any], epoch: int, *, exact: bool) -> bool:
    """Return whether a count is that of the sums of an epoch, or of a period if there is a quorum.

    One that is not exact is that of all periods of its epoch, if all members were counted.
    """
    if counted["epoch"] == epoch:
        return True
    if exact or peers.quorum is None or counted["epoch"] is None:
        return False
    return epoch_of(counted["epoch"]) == epoch_of(epoch) and len(counted["pledges"]) == peers.recovery.size_in(epoch)


def _check_total(total: int, samples: int, addends: int) -> None:
    if total < samples + addends - 1:
        raise WeightError(
            f"the {addends} members have {total} samples in total, but this member alone has {samples}: a member "
            "entered a value that is not a number of samples, so no step is taken"
        )


def check_commitment(
    peers: Peers,
    samples: int,
    commitments: Sequence[int],
    epoch: int,
    records_digest: bytes = b"",
    origin: bytes = b"",
    *,
    private: bool = False,
) -> None:
    """Check that this member's samples and origin are those that it had when this epoch of a federation was counted.

    Raises:
        SampleCountMismatchError: its commitment is not among those of the count.
    """
    if _commitment(peers.seed, samples, epoch, records_digest + origin, private=private) not in commitments:
        fact = f"samples is {samples}, and {peers.me} was counted with another number"
        fact += ", or with another origin of its model" if origin else ""
        more = ": the origin follows from seed=peers.seed, delta and the start of cgd.confine" if origin else ""
        if records_digest:
            more = ": the data, and with a table also [model], δ and the kind of --device"
            fact = f"our {samples} samples are not those that {peers.me} was counted with, in number or in content"
        raise SampleCountMismatchError(
            f"{fact}, so the sum of a step would not be the one that was begun. Restart with what was counted{more}; "
            "or remove this participant and add it again, after which all samples are counted again"
        )


def _commitment(seed: bytes, samples: int, epoch: int, records_digest: bytes = b"", *, private: bool = False) -> int:
    """Return our commitment; with differential privacy and without a digest of the content none, which is 0."""
    if private and not records_digest:
        return 0
    digest = hmac.digest(seed, f"cgd: {samples} samples in epoch {epoch}".encode() + records_digest, "sha256")
    return int.from_bytes(digest[:COMMITMENT_BYTES], "little")
