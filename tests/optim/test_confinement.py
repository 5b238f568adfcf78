"""Frames and stored states contain no origin, no weights and no gradient of a member."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional

from cgd import ConfinedAdam, ConfinedSGD, FixedPoint, confine, public_seed
from cgd.optim.recovery import TensorWriter, common_state
from cgd.transport.memory import connect
from support.transports import MEMBERS, TamperingTransport, custom_peers

if TYPE_CHECKING:
    from cgd import Peers
    from cgd.transport.base import Transport

STEPS = 4
RUN = 3  # consecutive numbers; a random match has probability 2⁻⁹⁶


@pytest.mark.parametrize("kind", [ConfinedSGD, ConfinedAdam])
def test_origin_weights_and_gradients_are_not_sent(kind: type[ConfinedSGD | ConfinedAdam]) -> None:
    frames: list[bytes] = []
    stored: list[bytes] = []
    secrets: list[torch.Tensor] = []
    public: list[torch.Tensor] = []

    def record(frame: bytes) -> bytes:
        frames.append(frame)
        return frame

    def train(peers: Peers, number: int) -> None:
        random = torch.Generator().manual_seed(number)
        x, y = torch.randn(9, 20, generator=random), torch.randn(9, 2, generator=random)
        with public_seed(0):
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
        stored.append(TensorWriter().to_bytes(common_state(parameters, optimizer.state, [1, 0])))

    transports: list[Transport] = [TamperingTransport(transport, record) for transport in connect(MEMBERS)]
    with custom_peers(transports) as members:
        members.run(train, range(len(MEMBERS)))
    assert len(secrets) == len(MEMBERS) * (3 * STEPS + 1)
    assert len(set(stored)) == 1  # the stored state is the same at every member
    fixed_point = FixedPoint.for_weighted_sum(addends=len(MEMBERS), bound=16.0)
    for secret in secrets:
        vector = secret.reshape(-1).numpy()
        for encoded in (vector, vector.astype("f8"), fixed_point.encode(vector)):
            pieces = [encoded[i : i + RUN].tobytes() for i in range(len(encoded) - RUN + 1)]
            assert not any(piece in message for message in (*frames, *stored) for piece in pieces)
    # The search finds a value that is contained.
    assert public[0][3 : 3 + RUN].numpy().tobytes() in stored[0]
