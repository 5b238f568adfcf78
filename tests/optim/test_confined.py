"""The model stays at home: what travels and what is left with the members hold no origin, weights or gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional

from cgd import ConfinedAdam, ConfinedSGD, FixedPoint, confine
from cgd.optim.recovery import common_state
from cgd.peers import SumSettings
from cgd.transport.memory import connect
from support.transports import MEMBERS, BentTransport, custom_peers

if TYPE_CHECKING:
    from cgd import Peers
    from cgd.transport.base import Transport

STEPS = 4
RUN = 3  # numbers in a row; by chance they turn up once in 2⁹⁶


@pytest.mark.parametrize("kind", [ConfinedSGD, ConfinedAdam])
def test_no_origin_no_weights_and_no_gradient_leave_their_owner(kind: type[ConfinedSGD | ConfinedAdam]) -> None:
    tap: list[bytes] = []
    left: list[bytes] = []
    secrets: list[torch.Tensor] = []
    public: list[torch.Tensor] = []

    def keep(frame: bytes) -> bytes:
        tap.append(frame)
        return frame

    def train(peers: Peers, number: int) -> None:
        random = torch.Generator().manual_seed(number)
        x, y = torch.randn(9, 20, generator=random), torch.randn(9, 2, generator=random)
        model = torch.nn.Linear(20, 2)
        confine(model, 0.1, bytes([number]) * 32)
        optimizer = kind(model.parameters(), lr=0.1, peers=peers, samples=len(x))
        for _ in range(STEPS):
            secrets.append(model.weight.detach().clone())
            optimizer.zero_grad()
            functional.mse_loss(model(x), y).backward()
            assert model.weight.grad is not None
            secrets.extend([model.weight.grad.clone(), model.weight.grad / len(MEMBERS)])
            optimizer.step()
        secrets.append(optimizer.state[model.weight]["origin"])
        public.append(optimizer.displacement())
        parameters = list(model.parameters())
        left.append(common_state(parameters, optimizer.state, [1, 0]))

    transports: list[Transport] = [BentTransport(transport, keep) for transport in connect(MEMBERS)]
    with custom_peers(transports, [SumSettings()] * len(MEMBERS)) as colony:
        colony.run(train, range(len(MEMBERS)))
    assert len(secrets) == len(MEMBERS) * (3 * STEPS + 1)
    assert len(set(left)) == 1  # what is left with the members is the same for all
    fixed_point = FixedPoint.for_weighted_sum(addends=len(MEMBERS), bound=16.0)
    for secret in secrets:
        vector = secret.reshape(-1).numpy()
        for trace in (vector, vector.astype("f8"), fixed_point.encode(vector)):
            pieces = [trace[i : i + RUN].tobytes() for i in range(len(trace) - RUN + 1)]
            assert not any(piece in message for message in (*tap, *left) for piece in pieces)
    # The search does find what is there.
    assert public[0][3 : 3 + RUN].numpy().tobytes() in left[0]
