"""Trainings on tables with another origin in each step."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cgd.errors import InputError
from cgd.federation.config import Federation, Training
from cgd.federation.model_section import Model, parse_model
from cgd.tabular.kept_model import scaled_network
from cgd.tabular.trace_writer import check_recordable
from cgd.tabular.training import TrainingResult, build_confined, train
from cgd.tabular.training_loop import TrainingLoop, _network_digest
from support.federation_files import participants
from support.tabular import DATA, records, run_members, table, tabular_settings

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.peers import Peers

FRESH = Model("mlp", (8,), "tanh", delta=0.1, fresh_origins=True)


@pytest.mark.parametrize("patience", [0, 2])
def test_the_result_and_validations_are_of_the_confined_model(patience: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The confined model has the constant origin that a training without fresh ones would use."""
    settings = tabular_settings(model=FRESH, steps=12, patience=patience, validate_every=2)
    constant = replace(settings, model=replace(FRESH, fresh_origins=False))
    evaluate, compared = TrainingLoop._evaluate, []

    def check(loop: TrainingLoop, *args: Any) -> Any:
        evaluation = evaluate(loop, *args)
        network = scaled_at(loop.peers.seed, {
            name: loop.optimizer.state[each]["displacement"] for name, each in loop.network.named_parameters()
        })  # fmt: skip
        losses = loop.validation.losses(network(loop.validation.x))
        assert evaluation.validation_loss == pytest.approx(losses.double().mean().item(), rel=1e-9)
        compared.append(loop.step)
        return evaluation

    def scaled_at(seed: bytes, displacement: dict[str, torch.Tensor]) -> torch.nn.Module:
        network, _ = build_confined(constant, preparation[0], seed, None)
        with torch.no_grad():
            for name, each in network.named_parameters():
                each.add_(displacement[name])
        return network.eval()

    preparation: list[Any] = []

    def member(peers: Peers, place: int) -> TrainingResult:
        peers.seed = bytes([place + 1]) * 32
        return train(peers, settings, records(table(60, place)), fitted=preparation.append)

    monkeypatch.setattr(TrainingLoop, "_evaluate", check)
    results = run_members(member, range(3))
    assert len(compared) >= 3
    for place, trained in enumerate(results):
        seed, displacement = bytes([place + 1]) * 32, dict(trained.displacement or {})
        expected = scaled_at(seed, displacement)
        for one, other in zip(trained.network.parameters(), expected.parameters(), strict=True):
            assert torch.equal(one, other)
        whole, none = (
            scaled_network(settings, trained.network, trained.preprocessing, seed, part, displacement=displacement)
            for part in (1.0, 0.0)
        )
        for one, other in zip(trained.network.parameters(), whole.parameters(), strict=True):
            assert torch.equal(one, other)
        common = [each.detach().clone() for each in none.parameters()]
        if place == 0:
            first = common
        assert all(map(torch.equal, common, first))


def test_default_is_stored_and_compared_as_before(tmp_path: Path) -> None:
    assert "fresh_origins" not in Model("logistic").as_stored()
    assert FRESH.as_stored()["fresh_origins"] is True
    federations = [
        Federation("five", 1, Training(), participants(), tmp_path, data=DATA, model=replace(FRESH, fresh_origins=each))
        for each in (False, True)
    ]
    before = federations[0].sections()["model"]
    assert before != federations[1].sections()["model"]
    old = '{"activation":"tanh","delta":0.1,"function":"","kind":"mlp","layers":[8],"start":0}'
    assert before == hashlib.sha256(old.encode()).hexdigest()
    assert _network_digest(FRESH) != _network_digest(replace(FRESH, fresh_origins=False))
    assert parse_model({"kind": "logistic", "fresh_origins": True}).fresh_origins
    with pytest.raises(InputError, match="fresh_origins is 'yes'"):
        parse_model({"kind": "logistic", "fresh_origins": "yes"})


def test_trace_is_refused() -> None:
    check_recordable(tabular_settings(model=replace(FRESH, fresh_origins=False)))
    with pytest.raises(InputError, match="traces of origins that change are not supported yet"):
        check_recordable(tabular_settings(model=FRESH))
