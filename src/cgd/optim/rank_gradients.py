"""The gradients of a participant that is a job of several ranks: their mean, weighted by the ranks' samples.

Each rank has a part of the participant's records, the same confined model, and an optimiser of its own. Before the sum
with the peers, the ranks compare a digest of their models, add up their numbers of samples, and compute the mean of
their gradients; so the participant has one gradient and one weight, like a single process with all of its records.

If the program has averaged the gradients itself, as `DistributedDataParallel` does in `backward()`, all ranks have the
same bits. Their mean would be the same again: they are used as they are. But an average in which each rank counts
equally is only right if all have the same number of samples, so anything else is an error then.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from cgd.errors import InputError
from cgd.optim.flat_vectors import join
from cgd.optim.public_start import digest_of
from cgd.transport.ranks import check_same

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cgd.peers import Peers

SAME_MODEL = (
    "all ranks of a job have the same confined model: build it inside cgd.public_seed, give seed=peers.seed and the "
    "same delta to cgd.confine, and load the same state on all ranks"
)


class RankGradients:
    """Exchanges numbers of samples and gradients among the ranks of a job before each sum; with one rank, nothing."""

    def __init__(self) -> None:
        self._compared: set[Peers] = set()

    def forget(self) -> None:
        """Compare the models again in the next step: the program has loaded a state."""
        self._compared.clear()

    @staticmethod
    def all_samples(peers: Peers, samples: int, records_digest: bytes) -> tuple[int, bytes]:
        """Return this participant's number of samples, on all of its ranks, and a digest of their content."""
        if peers.ranks.size == 1:
            return samples, records_digest
        found = peers.ranks.exchange("number of samples", samples=samples, digest=records_digest.hex())
        digests = "".join(f"{each['digest']}\n" for each in found)
        digest = hashlib.sha256(digests.encode()).digest() if digests.strip() else b""
        return sum(each["samples"] for each in found), digest

    def mean(
        self, peers: Peers, vector: torch.Tensor, samples: int, parameters: Sequence[torch.Tensor], what: str
    ) -> torch.Tensor:
        """Return the mean of the ranks' gradients or updates, weighted by their samples; the same bits on all ranks.

        Args:
            peers: the peers of the sum.
            vector: the gradients or updates of this rank.
            samples: the number of samples of this rank.
            parameters: the parameters, which must be the same on all ranks.
            what: "gradient" or "update".

        Raises:
            RankError: another rank failed, or has another model.
            InputError: the program has averaged the gradients of ranks with different numbers of samples.
        """
        ranks = peers.ranks
        if ranks.size == 1:
            return vector
        own = hashlib.sha256()
        if peers not in self._compared:
            own.update(digest_of(join([each.detach() for each in parameters])))
        found = ranks.exchange(
            f"mean {what} of the ranks",
            shape=[str(vector.dtype), vector.numel()],
            model=own.hexdigest(),
            vector=digest_of(vector).hex(),
            samples=samples,
        )
        check_same(found, "shape", "gradients of {} values", SAME_MODEL)
        check_same(found, "model", "a model with the digest {:.8}", SAME_MODEL)
        self._compared.add(peers)
        counts = [each["samples"] for each in found]
        if len({each["vector"] for each in found}) == 1:
            if len(set(counts)) > 1 and bool(vector.any()):
                raise InputError(
                    f"the {what}s of all {ranks.size} ranks are the same, so they were averaged before step(), as "
                    f"DistributedDataParallel does, but the ranks have {', '.join(map(str, counts))} samples, which "
                    "must not count equally. Do not wrap the model: the optimiser itself averages over the ranks, "
                    "weighted by samples; or give all ranks the same number of samples"
                )
            return vector
        return torch.from_numpy(ranks.add(vector.numpy(), [count / sum(counts) for count in counts]))
