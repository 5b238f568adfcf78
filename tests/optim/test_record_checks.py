from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from cgd.errors import InputError
from cgd.optim.record_gradients import RecordGradients

if TYPE_CHECKING:
    from collections.abc import Callable

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1, 2])


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def step(model: nn.Module, x: torch.Tensor = X, y: torch.Tensor = Y) -> torch.Tensor:
    clipping = RecordGradients(model, 1.0)
    nn.functional.cross_entropy(model(x), y).backward()
    return clipping.take().gradient


class Wrapped(nn.Module):
    """A model whose forward pass is a function of its modules and the input."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], Any], **modules: Any) -> None:
        super().__init__()
        self.function = forward
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


# At construction.


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.BatchNorm1d(4), "BatchNorm1d.*nn.GroupNorm"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4)), "module 1 .SyncBatchNorm.*nn.GroupNorm"),
        (lambda: nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 4)), "BatchNorm1d.*nn.GroupNorm"),
        (lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True), "track_running_stats=False"),
        (lambda: nn.LazyLinear(4), "no shapes yet; pass one batch"),
        (lambda: nn.LSTM(4, 4), "batch_first=True"),
        (lambda: nn.MultiheadAttention(4, 2), "batch_first=True"),
        (lambda: nn.LSTM(4, 4, 2, batch_first=True, dropout=0.5), "draws random numbers"),
        (lambda: nn.MultiheadAttention(4, 2, batch_first=True, dropout=0.5), "draws random numbers"),
        (lambda: Wrapped(lambda m, x: m.drop(x), p=nn.Parameter(X), drop=nn.Dropout()), "draws random numbers"),
        (lambda: nn.Embedding(4, 4, sparse=True), "sparse=True"),
        (lambda: nn.Embedding(4, 4, max_norm=1.0), "max_norm=1.0"),
        (lambda: nn.Embedding(4, 4, scale_grad_by_freq=True), "scale_grad_by_freq=True"),
        (lambda: nn.DataParallel(linear()), "use the module inside it"),
        (lambda: torch.compile(linear(), backend="eager"), "is compiled"),
        (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), "remove the parametrization"),
        (lambda: linear().half(), "torch.float16; .* float32 or float64"),
        (lambda: linear().requires_grad_(False), "no trainable parameters"),
        (lambda: nn.ParameterList([X]), "no forward method"),
    ],
)
def test_refused_at_construction(model: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RecordGradients(model(), 1.0)


def test_compiled_in_place() -> None:
    model = linear()
    model.compile(backend="eager")
    with pytest.raises(InputError, match="is compiled"):
        RecordGradients(model, 1.0)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_scripted() -> None:
    with pytest.raises(InputError, match="hides the calls"):
        RecordGradients(torch.jit.script(linear()), 1.0)


@pytest.mark.parametrize("clip", [0, -1, float("nan"), float("inf"), 1e-11])
def test_invalid_clip(clip: float) -> None:
    with pytest.raises(InputError, match="clip is"):
        RecordGradients(linear(), clip)


def test_invalid_reduction() -> None:
    with pytest.raises(InputError, match="reduction is 'none'"):
        RecordGradients(linear(), 1.0, reduction="none")  # type: ignore[arg-type]


# The model.


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


# The loss.


LOSSES: list[tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = [
    (lambda out: nn.functional.cross_entropy(out, Y), True),
    (lambda out: nn.functional.cross_entropy(out, Y, label_smoothing=0.1), True),
    (lambda out: nn.functional.cross_entropy(out, Y, weight=torch.rand(3), reduction="sum") / 6, True),
    (lambda out: nn.functional.mse_loss(out, X[:, :3]), True),
    (lambda out: nn.functional.huber_loss(out, X[:, :3]), True),
    (lambda out: nn.functional.binary_cross_entropy_with_logits(out[:, 0], Y.clamp(max=1).float()), True),
    (lambda out: out.mean(), True),
    (lambda out: torch.stack([nn.functional.cross_entropy(out[i], Y[i]) for i in range(6)]).mean(), True),
    (lambda out: torch.func.vmap(nn.functional.cross_entropy)(out, Y).mean(), True),
    (lambda out: nn.functional.cross_entropy(out, Y, weight=torch.rand(3)), False),
    (lambda out: nn.functional.cross_entropy(out - out.mean(0), Y), False),
    (lambda out: nn.functional.cross_entropy(out @ out.T, torch.arange(6)), False),
    (lambda out: nn.functional.cross_entropy(out, Y).sqrt(), False),
    (lambda out: nn.functional.cross_entropy(out, Y) + (out[4] * out[5]).sum(), False),
    (lambda out: nn.functional.triplet_margin_loss(out[:2], out[2:4], out[4:]), False),
    (lambda out: out.std(0).sum(), False),
]


@pytest.mark.parametrize(("loss", "accepted"), LOSSES)
def test_losses_that_mix_records(loss: Callable[[torch.Tensor], torch.Tensor], accepted: bool) -> None:
    model = linear()
    clipping = RecordGradients(model, 1.0)
    value = loss(model(X))
    if accepted:
        value.backward()
        assert clipping.take().records == 6
        assert type(model(X)) is torch.Tensor  # nothing is left of the check
    else:
        with pytest.raises(InputError, match=r"depends on the outputs of others|sum of the class weights"):
            value.backward()


# The loop.


def test_second_backward() -> None:
    model = linear()
    clipping = RecordGradients(model, 1.0)
    output = model(X)
    output.mean().backward(retain_graph=True)
    with pytest.raises(InputError, match="second backward pass"):
        output.square().mean().backward()
    clipping.reset()
    model.zero_grad()
    output = model(X)
    output.mean().backward(retain_graph=True)
    clipping.take()
    with pytest.raises(InputError, match="second backward pass"):
        output.mean().backward()


def test_gradient_penalty() -> None:
    model = linear()
    RecordGradients(model, 1.0)
    x = X.clone().requires_grad_()
    output = model(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    with pytest.raises(InputError, match="second backward pass"):
        (output.mean() + gradient.square().mean()).backward()


def test_one_backward_through_two_calls() -> None:
    model = linear()
    RecordGradients(model, 1.0)
    with pytest.raises(InputError, match="two calls of the model"):
        (model(X) - model(X.flip(1))).abs().mean().backward()


def test_the_same_tensor_twice_in_a_step() -> None:
    model = linear()
    clipping = RecordGradients(model, 1.0)
    for _ in range(2):
        nn.functional.cross_entropy(model(X), Y).backward()
    with pytest.raises(InputError, match="same tensor of records"):
        clipping.take()
    x = X.clone()
    model.zero_grad()
    nn.functional.cross_entropy(model(x), Y).backward()
    x.copy_(X.flip(0))
    with pytest.raises(InputError, match="overwritten .* new tensor"):
        model(x)


def test_a_part_of_the_model_is_called() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    RecordGradients(model, 1.0)
    with pytest.raises(InputError, match="call the whole model"):
        model[0](X).mean().backward()


def test_autocast() -> None:
    model = linear()
    RecordGradients(model, 1.0)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match="Leave autocast out"):
        model(X)


def test_parameters_that_change() -> None:
    model = linear()
    RecordGradients(model, 1.0)
    next(model.parameters()).requires_grad_(False)
    with pytest.raises(InputError, match="other trainable parameters"):
        model(X)


def test_gradients_that_were_there_before() -> None:
    model = linear()
    model(X).mean().backward()
    with pytest.raises(InputError, match="zero_grad"):
        step(model)


def test_other_parameters() -> None:
    clipping = RecordGradients(linear(), 1.0)
    for parameters in (list(linear().parameters()), [], [torch.zeros(1)]):
        with pytest.raises(InputError, match="parameters were given"):
            clipping.take(parameters)


def test_after_an_error_nothing_is_left() -> None:
    model = Wrapped(lambda m, x: m.layer(x) + m.layer.bias, layer=nn.Linear(4, 3))
    clipping = RecordGradients(model, 1.0)
    nn.functional.cross_entropy(model(X), Y).backward()
    with pytest.raises(InputError, match="differs"):
        clipping.take()
    assert clipping.records == 0
