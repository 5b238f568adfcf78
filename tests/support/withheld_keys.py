"""Four members that train; a dishonest one withholds its key, and so is the first to open a step."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

import cgd
from cgd.secagg.messages import RevealKey

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from cgd.secagg.journal import Journal
    from support.in_memory_network import HeldFrames
    from support.in_process import InProcessFederation, MemberProcess

DISHONEST = "cleo"
HONEST = ("ada", "bob", "dan")
PARTICIPANT = "[[participants]]"
NAMES = ("ada", "bob", "cleo", "dan")
SAMPLES = {"ada": 2, "bob": 3, "cleo": 1, "dan": 4}


def train(process: MemberProcess, steps: int, samples: Mapping[str, int] = SAMPLES) -> None:
    peers = process.peers
    parameter, optimizer = make_optimizer(peers, samples[peers.me])
    for step in range(steps):
        process.at_step(step)
        parameter.grad = torch.full((4,), samples[peers.me] / 8)
        optimizer.step()


def make_optimizer(peers: cgd.Peers, samples: int) -> tuple[torch.nn.Parameter, cgd.ConfinedSGD]:
    """Return a parameter and its optimiser."""
    parameter = torch.nn.Parameter(torch.zeros(4))
    return parameter, cgd.ConfinedSGD([parameter], lr=0.5, peers=peers, samples=samples)


def take_two_steps(process: MemberProcess) -> None:
    train(process, 2)


def gradient_sums(journal: Journal) -> list[Any]:
    """Return the steps whose gradient sums are in a journal."""
    return [entry.step for entry in journal.entries if entry.description.startswith("weighted")]


def withhold_third_key(federation: InProcessFederation) -> HeldFrames:
    """Hold back the dishonest member's key for the second step; those for the count and the first step are sent."""
    sent = itertools.count()
    return federation.network.hold(DISHONEST, HONEST, lambda m: isinstance(m, RevealKey) and next(sent) >= 6)


def wait_until_opened_alone(federation: InProcessFederation) -> None:
    """Wait until the dishonest member alone has opened the second step, and the others have revealed their keys."""
    federation.wait_until(lambda: len(federation[DISHONEST].journal()) == 3)
    assert all(federation[name].journal().pending_reveal is not None for name in HONEST)


def replace_file(path: Path, text: str) -> None:
    """Replace the federation file, so that no member reads a part of it."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def without(text: str, *names: str) -> str:
    """Return the text of a federation file without these participants."""
    head, *entries = text.split(PARTICIPANT)
    return PARTICIPANT.join([head, *(each for each in entries if not any(f'"{name}"' in each for name in names))])


def in_epoch(text: str, epoch: int) -> str:
    """Return the text of a federation file of epoch 1 in another epoch."""
    assert "epoch = 1 " in text
    return text.replace("epoch = 1 ", f"epoch = {epoch} ")


def all_in_epoch(federation: InProcessFederation, epoch: int, *names: str) -> bool:
    """Return whether the processes of these participants, or of all, have adopted this epoch."""
    chosen = names or tuple(federation.processes)
    return all(federation[name].member.federation.epoch == epoch for name in chosen)
