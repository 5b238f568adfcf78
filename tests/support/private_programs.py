"""A private training for `MemberProcess`, and a record of everything that members reveal and charge meanwhile."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

import cgd
from cgd.dp.budget_file import BudgetFile
from cgd.dp.mechanism import NoisyEncoding
from cgd.secagg.messages import Ready, RevealKey
from cgd.secagg.session import Session
from support.training import Network, data

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from cgd.secagg.codec import Frame
    from cgd.secagg.messages import Message, SumSpec
    from support.in_process import InProcessFederation, MemberProcess

    Attempt = tuple[bytes, int]

SAMPLES = 12
STEPS = 4
FIRST_STEP = 3
"""The number of a session's first sum of gradients: before it, commitments and the number of records are summed."""


@dataclass(frozen=True)
class PrivateTraining:
    """A program that trains with differential privacy, and returns a digest of the displacement, and the openings.

    Attributes:
        folder: the folder of the budget files.
        reruns: how many openings besides the steps are affordable.
        samples: the number of its records.
    """

    folder: Path
    reruns: int = 5
    samples: int = SAMPLES

    def __call__(self, process: MemberProcess) -> tuple[str, int]:
        peers = process.peers
        with cgd.public_seed(0):
            model = Network()
        cgd.confine(model, delta=0.1, seed=peers.seed)
        x, y = data(sum(map(ord, peers.me)), self.samples)
        budget = budget_path(self.folder, peers.me)
        privacy = cgd.Privacy(model, epsilon=8.0, delta=1e-5, steps=STEPS, reruns=self.reruns, budget=budget)
        optimizer = cgd.ConfinedSGD(model.parameters(), 0.5, momentum=0.5, peers=peers, samples=len(x), privacy=privacy)
        for step in range(STEPS):
            process.at_step(step)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        digest = hashlib.sha256(optimizer.displacement().numpy().tobytes()).hexdigest()
        return digest[:16], privacy.spent().openings


def budget_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.budget"


def charges(folder: Path, name: str) -> int:
    """Return the number of charges on the disk."""
    path = budget_path(folder, name)
    return len(BudgetFile(path, 8.0, 1e-5).charges) if path.exists() else 0


def is_private(spec: SumSpec) -> bool:
    return spec.context.find("epsilon") >= 0 and spec.dtype == "float64"


def is_step(message: Message) -> bool:
    """Return whether a member is ready for a sum of private gradients."""
    return isinstance(message, Ready) and is_private(message.spec) and message.spec.shape != (1,)


@dataclass
class Watch:
    """What members reveal on the network, compared with what they have charged on the disk at that moment.

    Attributes:
        folder: the folder of the budget files.
        revealed: the attempts at private sums for which a member has sent its key, by member.
        missed: the keys that left before a charge was on the disk.
        secrets: the addends with which attempts at private sums were started.
        noises: the noise of every addend, in standard deviations.
    """

    folder: Path
    revealed: defaultdict[str, set[Attempt]] = field(default_factory=lambda: defaultdict(set))
    missed: list[tuple[str, Attempt]] = field(default_factory=list)
    secrets: list[bytes] = field(default_factory=list)
    noises: list[Any] = field(default_factory=list)
    _private: set[Attempt] = field(default_factory=set)

    def install(self, federation: InProcessFederation, patch: pytest.MonkeyPatch) -> Watch:
        """Watch the network of a federation, and all sums of this process."""
        federation.network.rewrite = self._see
        encode, start = NoisyEncoding.encode, Session.start
        watch = self

        def watched_encode(self: NoisyEncoding, values: Any) -> Any:
            words = encode(self, values)
            exact = values.reshape(-1) / self.denominator
            watch.noises.append((self.decode(words) - exact) / self.sigma_total * np.sqrt(self.members))
            return words

        def watched_start(self: Session, spec: SumSpec, secret: Any, *more: Any, **options: Any) -> None:
            if is_private(spec):
                watch.secrets.append(secret.tobytes())
            start(self, spec, secret, *more, **options)

        patch.setattr(NoisyEncoding, "encode", watched_encode)
        patch.setattr(Session, "start", watched_start)
        return self

    def _see(self, sender: str, _to: str, frame: Frame) -> Frame:
        attempt = frame.session, frame.number
        if isinstance(frame.message, Ready) and is_private(frame.message.spec):
            self._private.add(attempt)
        if isinstance(frame.message, RevealKey) and attempt in self._private:
            self.revealed[sender].add(attempt)
            if charges(self.folder, sender) < len(self.revealed[sender]):
                self.missed.append((sender, attempt))
        return frame

    def openings(self, *names: str) -> set[Attempt]:
        """Return the attempts that somebody can have opened: all these members have sent their keys."""
        return set.intersection(*(self.revealed[name] for name in names))

    def check(self, *names: str, kills: int) -> None:
        """Check noise and charges after a training of these members in which there were so many kills."""
        assert not self.missed
        opened = len(self.openings(*names))
        assert STEPS + 1 <= opened <= STEPS + 1 + kills
        for name in names:
            on_disk = charges(self.folder, name)
            assert opened <= len(self.revealed[name]) <= on_disk <= opened + kills, name
        # Every attempt has noise of its own, and all of it.
        assert len(set(self.secrets)) == len(self.secrets) >= len(names) * opened
        noises = np.concatenate(self.noises)
        assert abs(np.var(noises) - 1) < 8 * np.sqrt(2 / noises.size)
