from __future__ import annotations

import hashlib
import json
import stat
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from cgd import InputError, Origin, confine, public_seed

if TYPE_CHECKING:
    from pathlib import Path

SEED = b"\xa7" * 32


class Network(nn.Module):
    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        with public_seed(0):
            self.first = nn.Linear(20, 30)
            self.norm = nn.BatchNorm1d(30).eval()
            self.last = nn.Linear(30, classes)


def bits(model: nn.Module) -> list[bytes]:
    return [parameter.detach().numpy().tobytes() for parameter in model.parameters()]


def test_origin_has_standard_deviation_delta() -> None:
    model = nn.Linear(300, 300)
    confine(model, delta=0.05, seed=SEED, start="zeros")
    values = model.weight.detach()
    assert abs(float(values.mean())) < 5 * 0.05 / 300
    assert float(values.std()) == pytest.approx(0.05, rel=0.01)


def test_seed_reproduces_the_same_bits() -> None:
    one, two = Network(), Network()
    origin = confine(one, seed=SEED)
    origin.apply(two)
    assert bits(one) == bits(two)
    again = Network()
    confine(again, seed=SEED)
    assert bits(again) == bits(one)


def test_origins_without_a_seed_differ() -> None:
    one, two = Network(), Network()
    first = confine(one)
    second = confine(two)
    assert first.seed != second.seed
    assert not set(bits(one)) & set(bits(two))


def test_frozen_parameters_and_buffers_do_not_change() -> None:
    model = Network()
    model.first.requires_grad_(False)
    frozen = model.first.weight.clone()
    origin = confine(model)
    assert torch.equal(model.first.weight, frozen)
    assert "first.weight" not in origin.shapes
    assert torch.equal(model.norm.get_buffer("running_var"), torch.ones(30))


def test_origin_of_a_parameter_does_not_depend_on_the_others() -> None:
    whole, head = Network(), Network()
    head.first.requires_grad_(False)
    confine(whole, seed=SEED)
    confine(head, seed=SEED)
    assert torch.equal(whole.last.weight, head.last.weight)


def test_parameters_have_different_origins() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    confine(model, seed=SEED, start="zeros")
    values = [parameter.detach().reshape(-1)[:8] for parameter in model.parameters()]
    assert not any(torch.equal(one, other) for i, one in enumerate(values) for other in values[i + 1 :])


def test_origin_of_a_seed_never_changes() -> None:
    """A participant may have only the seed left: a change of this digest is a change of format."""
    model = Network()
    confine(model, delta=0.1, seed=SEED, start="zeros")
    digest = hashlib.sha256(b"".join(bits(model))).hexdigest()
    assert digest == "4ea3dd694a0f77a271c11760800e771f96bfb410bb67b4e293857eef5e5112a4"


def test_saved_origin_is_reproduced(tmp_path: Path) -> None:
    model, other = Network(), Network()
    confine(model, delta=0.02).save(tmp_path / "origin.json")
    assert stat.S_IMODE((tmp_path / "origin.json").stat().st_mode) == 0o600
    Origin.load(tmp_path / "origin.json").apply(other)
    assert bits(model) == bits(other)


def test_save_does_not_overwrite_a_file(tmp_path: Path) -> None:
    path = tmp_path / "origin.json"
    confine(Network()).save(path)
    before = path.read_bytes()
    with pytest.raises(InputError, match="never overwritten"):
        confine(Network()).save(path)
    assert path.read_bytes() == before


def test_seed_is_not_shown() -> None:
    origin = confine(Network(), seed=SEED)
    for text in (repr(origin), str(origin)):
        assert SEED.hex() not in text
        assert repr(SEED) not in text
        assert "seed" not in text
    for wrong in (SEED[:-1], bytearray(SEED)):
        with pytest.raises(InputError) as caught:
            confine(Network(), seed=wrong)  # type: ignore[arg-type]
        assert "a7" not in str(caught.value)


def test_custom_distribution(tmp_path: Path) -> None:
    def rand(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
        return 2 * torch.rand(shape, generator=generator) - 1

    model, other = Network(), Network()
    origin = confine(model, delta=0.5, seed=SEED, rand=rand, start="zeros")
    assert float(model.first.weight.detach().abs().max()) <= 0.5
    origin.save(tmp_path / "origin.json")
    with pytest.raises(InputError, match="needs the rand= it was drawn with"):
        Origin.load(tmp_path / "origin.json")
    Origin.load(tmp_path / "origin.json", rand=rand).apply(other)
    assert bits(model) == bits(other)
    with pytest.raises(InputError, match=r"rand returned a tensor of shape \(1,\)"):
        confine(Network(), rand=lambda *_: torch.zeros(1))


@pytest.mark.parametrize("delta", [0, -0.1, float("nan"), float("inf"), 10**400, "0.1", True])
def test_delta_must_be_a_positive_number(delta: object) -> None:
    with pytest.raises(InputError, match="delta is"):
        confine(Network(), delta=delta)  # type: ignore[arg-type]


@pytest.mark.parametrize(("delta", "dtype"), [(1e39, torch.float32), (1e6, torch.float16)])
def test_delta_that_makes_weights_infinite_is_rejected(delta: float, dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match=r"delta is 1e\+\d\d, too large for .* of torch\.float\d\d; lower it"):
        confine(Network().to(dtype), delta=delta)


def test_seed_must_have_32_bytes() -> None:
    with pytest.raises(InputError, match="has 5 bytes; it must have 32"):
        confine(Network(), seed=b"short")
    with pytest.raises(InputError, match=r"of type int.*secrets.token_bytes"):
        confine(Network(), seed=42)  # type: ignore[arg-type]


def test_different_model_is_rejected_and_not_changed() -> None:
    origin = confine(Network())
    other = Network(classes=6)
    before = bits(other)
    with pytest.raises(InputError, match=r"last\.bias is \(6,\) in the model and \(5,\) in the origin"):
        origin.apply(other)
    assert bits(other) == before
    with pytest.raises(InputError, match="no trainable parameter"):
        confine(nn.ReLU())


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": "something"}', "\x00"])
def test_file_that_is_not_an_origin_is_rejected(tmp_path: Path, content: str) -> None:
    (tmp_path / "origin.json").write_text(content)
    with pytest.raises(InputError, match="is not an origin that cgd saved"):
        Origin.load(tmp_path / "origin.json")


def test_damaged_origin_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "origin.json"
    confine(Network()).save(path)
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"seed": content["seed"][:-2]}))
    with pytest.raises(InputError, match="is not an origin"):
        Origin.load(path)
