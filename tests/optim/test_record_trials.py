from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from cgd.errors import InputError
from cgd.optim.record_gradients import RecordGradients
from support.record_models import Wrapped, X, Y, linear, step

if TYPE_CHECKING:
    from collections.abc import Callable

# Values.


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda m, x: m.layer(x - x.mean(0)), "mixes records"),
        (lambda m, x: m.layer(x) - m.layer(x).mean(0), "mixes records"),
        (lambda m, x: m.layer(x.flip(0)), "mixes records"),
        (lambda m, x: m.layer(nn.functional.dropout(x)), "draws random numbers"),
        (lambda m, x: m.layer(x[:2]).sum(0).expand(len(x), 3), "the model mixes records"),
        (lambda m, x: m.layer(x.repeat(2, 1))[: len(x)], "mixes records"),
        (lambda m, x: m.layer(torch.ones(4)) + x[:, :3], r"shapes \[\(4,\)\] for 6 records"),
        (lambda m, x: x @ m.layer.weight.T, "parameter layer.weight differs"),
        (lambda m, x: m.layer(x) + m.layer.bias, "parameter layer.bias differs"),
        (lambda m, x: m.layer(x) if len(x) > 1 else m.layer(m.layer.weight[:1] * 0 + x) + 0 * m.layer(x), "other mod"),
    ],
)
def test_refused_in_the_first_step(forward: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        step(Wrapped(forward, layer=nn.Linear(4, 3)))


def test_records_in_the_second_dimension_are_noticed_if_both_are_equally_long() -> None:
    model = Wrapped(lambda m, x: m.layer(x.transpose(0, 1)).sum(0), layer=nn.Linear(4, 3))
    with pytest.raises(InputError, match="does not have them in the first dimension"):
        step(model, torch.randn(6, 6, 4))


def test_state_of_a_recurrent_network() -> None:
    model = Wrapped(lambda m, x: m.layer(x)[1][0], layer=nn.GRU(4, 3, 1, batch_first=True))
    with pytest.raises(InputError, match="use the output, not the last state"):
        step(model, torch.randn(6, 5, 4))


def test_a_buffer_that_is_updated() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean += x.detach().mean(0)  # type: ignore[operator]
            return super().forward(x)

    with pytest.raises(InputError, match="changed a buffer"):
        step(Counting())


def test_a_module_that_cannot_be_repeated() -> None:
    class Noisy(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            type(self).calls += 1
            return super().forward(x * self.calls if torch.is_grad_enabled() else x)

    with pytest.raises(InputError, match="draws random numbers"):
        step(nn.Sequential(Noisy(4, 4), nn.Flatten(), nn.Linear(4, 3)), torch.randn(6, 1, 4))


def test_single_records_do_not_change_random_numbers_or_modes() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    RecordGradients(model, 1.0)
    torch.manual_seed(0)
    first = model(X)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    assert torch.equal(first, model(X))
    assert torch.equal(state, torch.get_rng_state())
    assert all(each.training for each in model.modules())


def test_without_a_tensor() -> None:
    model = Wrapped(lambda m, x: m.layer(torch.ones(1, 4)), layer=nn.Linear(4, 3))
    RecordGradients(model, 1.0)
    with pytest.raises(InputError, match="without a tensor"):
        model(3)


def test_an_error_of_the_model_is_passed_on() -> None:
    model = linear()
    clipping = RecordGradients(model, 1.0)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.randn(6, 9))
    nn.functional.cross_entropy(model(X), Y).backward()
    assert clipping.take().records == 6


def test_values_do_not_make_the_checks_fail() -> None:
    for value in (float("nan"), float("inf"), 1e38, 1e-45):
        x = X.clone()
        x[0] = value
        assert torch.isfinite(step(linear(), x)).all()
    assert not step(linear(), X * torch.nan).any()


# Gradients.


def hooked(hook: Callable[[torch.Tensor], torch.Tensor]) -> Wrapped:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(model.first(x))
        if hidden.requires_grad:
            hidden.register_hook(hook)
        return model.second(hidden)  # type: ignore[no-any-return]

    return Wrapped(forward, first=nn.Linear(4, 6), second=nn.Linear(6, 3))


class Scaled(torch.autograd.Function):
    """The identity, with a gradient that is divided by that of the whole batch."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: Any) -> Any:
        return gradient / gradient.norm()


scaled: Any = Scaled.apply


def test_backward_hooks_that_mix_records() -> None:
    with pytest.raises(InputError, match=r"module first \(Linear\) receives another gradient.* backward hook"):
        step(hooked(lambda g: g / g.norm()))
    with pytest.raises(InputError, match="receives another gradient"):
        step(Wrapped(lambda m, x: m.b(scaled(m.a(x))), a=nn.Linear(4, 6), b=nn.Linear(6, 3)))
    model = linear()
    model[1].register_full_backward_hook(lambda _m, grads, _o: (grads[0] - grads[0].mean(0),))  # type: ignore[index]
    with pytest.raises(InputError, match="receives another gradient"):
        step(model)
    assert step(hooked(lambda g: g / g.norm(dim=1, keepdim=True))).any()  # each record by itself


# Errors do not depend on records.


class Attention(nn.Module):
    """The gradient of the bias of `key` is zero, because softmax does not depend on it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(self.query(x) @ self.key(x).transpose(1, 2), -1)
        return (weights @ self.value(x)).mean(1)  # type: ignore[no-any-return]


class Normalised(nn.Module):
    """The gradient of the bias of `conv` is zero, because each channel is normalised; not so if ReLU cuts values."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv1d(4, 6, 3), nn.GroupNorm(6, 6), nn.Linear(6, 3)
        with torch.no_grad():
            self.conv.weight.abs_()
            self.conv.bias.abs_()  # type: ignore[union-attr]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(torch.relu(self.conv(x.transpose(1, 2)))).amax(2))  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [Attention, Normalised])
def test_gradients_of_zero_are_not_compared_by_their_rounding(make: Callable[[], nn.Module]) -> None:
    for seed in range(10):
        torch.manual_seed(seed)
        assert step(make(), torch.rand(6, 20, 4)).any()


def test_models_are_checked_with_the_same_made_up_records_whatever_the_records_are() -> None:
    seen: list[torch.Tensor] = []

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        seen.append(x.detach().clone())
        return model.layer(x)  # type: ignore[no-any-return]

    runs = []
    for x in (X, X * 0, X * float("nan"), X * 1e30):
        seen.clear()
        step(Wrapped(forward, layer=nn.Linear(4, 3)), x)
        runs.append([each for each in seen if each.isfinite().all() and each.abs().max() < 10 and each.any()])
        assert not any(torch.equal(each, x) for each in runs[-1][x is X :])
    for run in runs[1:]:
        assert len(run) == 4  # a batch and three single records
        assert all(torch.equal(*pair) for pair in zip(run, runs[1], strict=True))


@pytest.mark.parametrize(
    ("x", "forward"),
    [
        (X.abs(), lambda m, x: m.layer(x.log().clamp(-5, 5))),
        (Y[:, None].repeat(1, 4), lambda m, x: m.layer(m.table(x).sum(2))),
        (Y[:, None].repeat(1, 4).float(), lambda m, x: m.layer(m.table(x.long()).sum(2))),
        ((X * 50).to(torch.uint8), lambda m, x: m.layer(x / 255)),
        (X > 0, lambda m, x: m.layer(x.float())),
        (X.to(torch.complex64), lambda m, x: m.layer(x.abs())),
        (Y[:, None].repeat(1, 4) + 1990, lambda m, x: m.layer(m.table(x - 1990).sum(2))),  # checked with the records
    ],
)
def test_made_up_records_of_every_type(x: torch.Tensor, forward: Any) -> None:
    modules = {"layer": nn.Linear(4, 3), "table": nn.Embedding(3, 5)}
    assert step(Wrapped(forward, **modules), x).any()
    mixing = Wrapped(lambda m, x: forward(m, x) - forward(m, x).mean(0), **modules)
    with pytest.raises(InputError, match="mixes records"):
        step(mixing, x)


def test_large_batches_need_few_made_up_records() -> None:
    sizes: list[int] = []

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return model.layer(x)  # type: ignore[no-any-return]

    step(Wrapped(forward, layer=nn.Linear(4, 3)), X.repeat(50, 1), Y.repeat(50))
    assert sizes == [300, 61, 1, 1, 1]


def test_model_that_fails_with_one_record() -> None:
    model = Wrapped(lambda m, x: m.layer(x.squeeze().reshape(6, 4)), layer=nn.Linear(4, 3))
    with pytest.raises(InputError, match="fails with one record alone"):
        step(model)
