from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from cgd.errors import InputError
from cgd.optim.record_gradients import RecordGradients
from support.record_models import Wrapped, X, Y, linear, step

if TYPE_CHECKING:
    from collections.abc import Callable

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
    (lambda out: nn.functional.cross_entropy(out, Y, ignore_index=0, reduction="sum") / 6, True),
    (lambda out: nn.functional.cross_entropy(out, Y, ignore_index=0), False),
    (lambda out: nn.functional.cross_entropy(out[:, :, None], Y[:, None], ignore_index=-1), False),
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
        with pytest.raises(InputError, match=r"depends on the outputs of others|change each other's weight"):
            value.backward()


WEIGHTS = torch.tensor([1.0, 1.0, 1000.0])


def weighted(out: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(out, Y.repeat_interleave(len(out) // len(Y)), weight=WEIGHTS)


@dataclass(frozen=True)
class Frozen:
    logits: torch.Tensor
    note: str = "a text"


@dataclass
class Fields(OrderedDict[str, Any]):
    """A dict whose items are its fields, as transformers has them."""

    logits: torch.Tensor

    def __post_init__(self) -> None:
        self["logits"] = self.logits

    def __reduce__(self) -> Any:
        return type(self), (self.logits,)


class Mapping(dict[str, Any]):
    """A dict that torch does not know."""


class Pair(NamedTuple):
    logits: torch.Tensor
    other: Any = None


CONTAINERS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "tensor": (lambda out: out, lambda result: result),
    "tuple": (lambda out: (out, None), lambda result: result[0]),
    "list": (lambda out: [3, out], lambda result: result[1]),
    "dict": (lambda out: {"logits": out}, lambda result: result["logits"]),
    "namedtuple": (Pair, lambda result: result.logits),
    "dataclass": (Frozen, lambda result: result.logits),
    "nested": (lambda out: (Frozen({"a": [out]}), 1), lambda result: result[0].logits["a"][0]),  # type: ignore[arg-type]
    "items that are fields": (Fields, lambda result: result["logits"]),
    "fields that are items": (Fields, lambda result: result.logits),
    "kind of dict": (lambda out: Mapping(logits=out), lambda result: result["logits"]),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_losses_are_checked_for_outputs_of_every_kind(name: str) -> None:
    pack, unpack = CONTAINERS[name]
    expected = step(inner := linear())
    model = Wrapped(lambda m, x: pack(m.inner(x)), inner=inner)
    clipping = RecordGradients(model, 1.0)
    with pytest.raises(InputError, match="sum of the class weights"):
        weighted(unpack(model(X))).backward()
    for _ in range(2):  # with the check, and without
        nn.functional.cross_entropy(unpack(model(X)), Y).backward()
        torch.testing.assert_close(clipping.take().gradient, expected, rtol=0, atol=1e-9)
    result = model(X)
    assert type(unpack(result)) is torch.Tensor
    assert type(result) is type(pack(X))


@pytest.mark.parametrize("name", CONTAINERS)
def test_module_with_parameters_may_return_every_container(name: str) -> None:
    pack, unpack = CONTAINERS[name]

    class Packed(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return pack(super().forward(x))

    packed = Packed(4, 3)
    plain = nn.Linear(4, 3)
    plain.load_state_dict(packed.state_dict())
    model = Wrapped(lambda m, x: unpack(m.inner(x)), inner=packed)
    torch.testing.assert_close(step(model), step(plain), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda m, x: weighted(m.layer(x)), r"shapes \[\(\)\] for 6 records.*compute the loss outside"),
        (lambda m, x: nn.functional.cross_entropy(m.layer(x), Y[: len(x)]), "compute the loss outside"),
        (lambda m, x: (m.layer(x) - m.layer(x).mean(0)).square().mean(), "compute the loss outside"),
        (lambda m, x: (weighted(m.layer(x)), m.layer(x).detach()), "compute the loss outside"),
        (lambda m, x: torch.cat([m.layer(x), m.layer(x)]), r"shapes \[\(12, 3\)\] for 6 records"),
        (lambda m, x: SimpleNamespace(logits=m.layer(x)), "a SimpleNamespace, in which no tensors are found"),
    ],
)
def test_outputs_without_records_are_refused(forward: Any, message: str) -> None:
    model = Wrapped(forward, layer=nn.Linear(4, 3))
    RecordGradients(model, 1.0)
    with pytest.raises(InputError, match=message):
        model(X)


@pytest.mark.parametrize("forward", [lambda m, x: (m.layer(x), m.layer(x).mean()), lambda m, x: m.keep(m.layer(x))])
def test_values_besides_the_outputs_of_records_may_not_be_in_the_loss(forward: Any) -> None:
    class Keeping(Wrapped):
        def keep(self, out: torch.Tensor) -> tuple[torch.Tensor, SimpleNamespace]:
            return out, SimpleNamespace(mean=out.mean())

    model = Keeping(forward, layer=nn.Linear(4, 3))
    clipping = RecordGradients(model, 1.0)
    out, other = model(X)
    with pytest.raises(InputError, match="besides the tensors that it returned"):
        (out.mean() + (other.mean if isinstance(other, SimpleNamespace) else other)).backward()
    clipping.reset()
    out, other = model(X)
    out.mean().backward()  # what is not used does no harm
    assert clipping.take().records == 6


def test_penalty_on_parameters() -> None:
    model = linear()
    RecordGradients(model, 1.0)
    penalty = sum(each.square().sum() for each in model.parameters())
    with pytest.raises(InputError, match="no penalties on parameters"):
        (nn.functional.cross_entropy(model(X), Y) + penalty).backward()


def test_every_way_to_backward_is_checked() -> None:
    ways: list[Callable[[torch.Tensor], None]] = [
        lambda loss: loss.backward(),
        torch.autograd.backward,
        lambda loss: torch.autograd.backward([loss]),
        lambda loss: torch.autograd.backward([loss], [torch.tensor(1.0)]),
        lambda loss: loss.backward(torch.tensor(1.0)),
        lambda loss: loss[None].backward(),
    ]
    for backward in ways:
        model = linear()
        clipping = RecordGradients(model, 1.0)
        with pytest.raises(InputError, match=r"sum of the class weights|could not be checked"):
            backward(weighted(model(X)))
            clipping.take()


def test_losses_of_records_with_a_gradient() -> None:
    model = linear()
    expected = step(model)
    clipping = RecordGradients(model, 1.0)
    nn.functional.cross_entropy(model(X), Y, reduction="none").backward(torch.full((6,), 1 / 6))
    torch.testing.assert_close(clipping.take().gradient, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_weights_of_losses_that_depend_on_other_records(seed: int) -> None:
    """The weighted sum is always 1, but the gradient is not 0: it takes the weights as constants."""
    torch.manual_seed(seed)
    other = RecordGradients(model := linear(), 1.0)
    losses = nn.functional.cross_entropy(model(X), Y, reduction="none")
    with pytest.raises(InputError, match="depends on the outputs of others"):
        losses.backward(1 / losses.sum() * torch.ones(6))
    other.remove()


def rectified() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU())


def test_infinite_second_derivatives_hide_no_other_record() -> None:
    """x**1.5 has no second derivative at 0, which is a frequent output of a ReLU."""
    RecordGradients(model := rectified(), 1.0)
    out = model(X)
    assert (out == 0).any()
    with pytest.raises(InputError, match="depends on the outputs of others"):
        (out.pow(1.5).mean() + (out.mean(0) - out).square().sum()).backward()


def test_loss_with_infinite_second_derivatives_is_accepted_with_a_warning() -> None:
    clipping = RecordGradients(model := rectified(), 1.0)
    with pytest.warns(UserWarning, match="cannot be differentiated twice"):
        model(X).pow(1.5).mean().backward()
    assert clipping.take().records == 6


def test_losses_that_cannot_be_checked() -> None:
    model = linear()
    clipping = RecordGradients(model, 1.0)
    torch.func.vmap(nn.functional.cross_entropy)(model(X), Y).mean().backward()
    with pytest.raises(InputError, match=r"could not be checked.* without torch.compile, torch.jit and torch.func"):
        clipping.take()


def test_loss_that_is_not_differentiable_twice_gives_a_warning() -> None:
    model = Wrapped(lambda m, x: m.layer(x).log_softmax(-1), layer=nn.Linear(4, 3))
    clipping = RecordGradients(model, 1.0, reduction="sum")
    out = model(torch.randn(6, 5, 4))
    lengths = torch.full((6,), 5), torch.full((6,), 2)
    loss = nn.functional.ctc_loss(out.transpose(0, 1), torch.ones(6, 2).long(), *lengths, reduction="sum")
    with pytest.warns(UserWarning, match="cannot be differentiated twice"):
        loss.backward()
    assert clipping.take().records == 6


def test_a_first_batch_of_one_record_is_not_the_last_that_is_checked() -> None:
    model = linear()
    clipping = RecordGradients(model, 1.0)
    model(X[:1]).std(0, correction=0).sum().backward()
    clipping.take()
    with pytest.raises(InputError, match="depends on the outputs of others"):
        model(X).std(0, correction=0).sum().backward()
    mixing = Wrapped(lambda m, x: m.layer(x) - m.layer(x).mean(0), layer=nn.Linear(4, 3))
    RecordGradients(mixing, 1.0)
    mixing(X[:1])
    with pytest.raises(InputError, match="mixes records"):
        mixing(X)


def test_hook_on_the_output_that_mixes_records() -> None:
    model = linear()
    RecordGradients(model, 1.0)
    out = model(X)
    out.register_hook(lambda g: g / g.norm())
    with pytest.raises(InputError, match="depends on the outputs of others"):
        nn.functional.cross_entropy(out, Y).backward()


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
    with pytest.raises(InputError, match="no gradients of gradients"):
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


def test_autocast_inside_the_model() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model.second(torch.relu(model.first(x))).float()  # type: ignore[no-any-return]

    model = Wrapped(forward, first=nn.Linear(4, 5), second=nn.Linear(5, 3))
    RecordGradients(model, 1.0)
    with pytest.raises(InputError, match=r"torch.bfloat16; .* Leave autocast out, also inside the model"):
        model(X)


def test_autocast_inside_the_model_in_a_later_step() -> None:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=len(x) > 6):
            return model.second(torch.relu(model.first(x))).float()  # type: ignore[no-any-return]

    model = Wrapped(forward, first=nn.Linear(4, 5), second=nn.Linear(5, 3))
    clipping = RecordGradients(model, 1.0)
    model(X).mean().backward()
    clipping.take()
    model(torch.cat([X, X])).mean().backward()
    with pytest.raises(InputError, match="Leave autocast out"):
        clipping.take()


def test_parameters_that_change() -> None:
    model = linear()
    RecordGradients(model, 1.0)
    next(model.parameters()).requires_grad_(False)
    with pytest.raises(InputError, match="other trainable parameters"):
        model(X)


def test_gradients_that_were_there_before_have_no_effect() -> None:
    model = linear()
    expected = step(model)
    assert torch.equal(step(model), expected)


def test_other_parameters() -> None:
    clipping = RecordGradients(linear(), 1.0)
    for parameters in (list(linear().parameters()), [], [torch.zeros(1)]):
        with pytest.raises(InputError, match="parameters were given"):
            clipping.take(parameters)


def test_after_an_error_nothing_is_left() -> None:
    model = linear()
    clipping = RecordGradients(model, 1.0)
    torch.autograd.grad(model(X).sum(), list(model.parameters()))
    with pytest.raises(InputError, match="could not be checked"):
        clipping.take()
    assert clipping.records == 0
