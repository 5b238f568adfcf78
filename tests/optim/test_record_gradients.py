from __future__ import annotations

import copy
import gc
import io
import math
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cgd.optim.record_gradients import ClippedSum, RecordGradients
from cgd.optim.record_norms import MARGIN, Use

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Batch = tuple[nn.Module, torch.Tensor]


class Twice(nn.Module):
    """One module called twice, and a weight that is shared by two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.tied, self.out = nn.Linear(5, 5), nn.Linear(5, 5, bias=False), nn.Linear(5, 3)
        self.tied.weight = self.hidden.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.out(self.tied(self.hidden(self.hidden(x).tanh()).tanh()))


class Custom(nn.Module):
    """Parameters of its own, in a list too, around other modules; keyword arguments; several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shifts = nn.Parameter(torch.rand(4)), nn.ParameterList([torch.rand(4), torch.rand(4)])
        self.inner, self.out = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.inner(input=x * self.scale + self.shifts[0]).sigmoid() + self.shifts[1]
        return self.out(hidden) * hidden.sum(1, keepdim=True)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(11, 6), nn.Embedding(7, 6)
        self.attention = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.recurrent, self.out = nn.GRU(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> Any:
        positions = torch.arange(x.shape[1]).expand(x.shape)
        return self.out(self.recurrent(self.attention(self.words(x) + self.positions(positions)))[0])[:, -1]


class Memory(nn.Module):
    """torch.func cannot differentiate nn.LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.out = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.out(self.memory(x)[0][:, -1])


class Branching(nn.Module):
    """A forward pass that vmap does not support."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.rand(4)), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> Any:
        rows = [row * self.weight if row.sum().item() > 0 else row - self.weight for row in x]
        return self.out(torch.stack(rows))


def mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3)
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.LayerNorm(36), nn.Linear(36, 3)
    )


def again() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, 3))


def frozen() -> nn.Module:
    model = mlp()
    model[0].bias.requires_grad_(False)
    model[4].weight.requires_grad_(False)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "mlp": (mlp, lambda n: torch.randn(n, 4)),
    "cnn": (cnn, lambda n: torch.randn(n, 1, 8, 8)),
    "frozen": (frozen, lambda n: torch.randn(n, 4)),
    "one layer": (lambda: nn.Linear(4, 3), lambda n: torch.randn(n, 4)),
    "again": (again, lambda n: torch.randn(n, 4)),
    "twice": (Twice, lambda n: torch.randn(n, 5)),
    "custom": (Custom, lambda n: torch.randn(n, 4)),
    "words": (Words, lambda n: torch.randint(11, (n, 7))),
    "memory": (Memory, lambda n: torch.randn(n, 6, 4)),
    "branching": (Branching, lambda n: torch.randn(n, 4)),
    "sequence": (lambda: nn.Sequential(nn.Linear(4, 1), nn.Flatten(), nn.Linear(9, 3)), lambda n: torch.randn(n, 9, 4)),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(11, 3), nn.Flatten(), nn.Linear(12, 3)),
        lambda n: torch.randint(11, (n, 4)),
    ),
}
everything = pytest.mark.parametrize("name", MODELS)


def build(name: str, records: int, seed: int = 0) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    model, inputs = MODELS[name]
    return model(), inputs(records), torch.randint(3, (records,))


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y)


def taken(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, clip: float = 1.0, *, batches: int = 1, **options: Any
) -> ClippedSum:
    model.zero_grad()
    clipping = RecordGradients(model, clip, **options)
    for part in torch.arange(len(x)).chunk(batches):
        loss(model, x[part], y[part]).backward()
    try:
        return clipping.take()
    finally:
        clipping.remove()


def one_by_one(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the gradients of single records in float64, one row per record."""
    model = copy.deepcopy(model).double()
    x = x.double() if x.is_floating_point() else x
    parameters = [each for each in model.parameters() if each.requires_grad]
    rows = []
    for i in range(len(x)):
        gradients = torch.autograd.grad(loss(model, x[i : i + 1], y[i : i + 1]), parameters)
        rows.append(torch.cat([each.reshape(-1) for each in gradients]))
    return torch.stack(rows)


def clipped(rows: torch.Tensor, clip: float) -> torch.Tensor:
    norms = rows.norm(dim=1, keepdim=True)
    result: torch.Tensor = (rows * (clip * (1 - MARGIN) / norms).clamp(max=1.0)).sum(0)
    return result


@everything
@pytest.mark.parametrize("records", [1, 5, 64, 67])
def test_equal_to_one_record_at_a_time(name: str, records: int) -> None:
    model, x, y = build(name, records)
    rows = one_by_one(model, x, y)
    clip = float(rows.norm(dim=1).median())  # some are clipped and some are not
    result = taken(model, x, y, clip)
    assert result.records == records
    assert result.gradient.dtype == torch.float64
    # The model computes in float32: 24 bits, some ten operations deep, over `records` records.
    torch.testing.assert_close(result.gradient, clipped(rows, clip), rtol=0, atol=3e-6 * clip * records)


@everything
def test_equal_to_one_record_at_a_time_in_float64(name: str) -> None:
    model, x, y = build(name, 6)
    model, x = model.double(), x.double() if x.is_floating_point() else x
    rows = one_by_one(model, x, y)
    clip = float(rows.norm(dim=1).median())
    torch.testing.assert_close(taken(model, x, y, clip).gradient, clipped(rows, clip), rtol=0, atol=1e-13)


@everything
def test_each_record_is_clipped_to_the_bound(name: str) -> None:
    model, x, y = build(name, 3)
    for i in range(3):
        norm = float(taken(model, x[i : i + 1], y[i : i + 1], 1e-3).gradient.norm())
        assert 1e-3 * (1 - 1.01 * MARGIN) <= norm <= 1e-3


@everything
def test_virtual_batches_equal_one_batch(name: str) -> None:
    model, x, y = build(name, 13)
    once, parts = taken(model, x, y), taken(model, x, y, batches=4)
    assert once.records == parts.records == 13
    torch.testing.assert_close(once.gradient, parts.gradient, rtol=0, atol=1e-5)


def test_sum_loss() -> None:
    model, x, y = build("mlp", 5)
    expected = taken(model, x, y, 0.5).gradient
    clipping = RecordGradients(model, 0.5, reduction="sum")
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
    torch.testing.assert_close(clipping.take().gradient, expected, rtol=0, atol=1e-6)


def test_settings_of_torch_with_fewer_bits() -> None:
    model, x, y = build("mlp", 70)
    expected, precision = taken(model, x, y, 0.1).gradient, torch.get_float32_matmul_precision()
    clipping = RecordGradients(model, 0.1)
    model.zero_grad()
    loss(model, x, y).backward()
    torch.set_float32_matmul_precision("medium")
    try:
        torch.testing.assert_close(clipping.take().gradient, expected, rtol=0, atol=1e-6)
    finally:
        torch.set_float32_matmul_precision(precision)


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="a setting of newer versions of torch")
def test_settings_of_torch_that_the_older_function_cannot_express() -> None:
    model, x, y = build("mlp", 70)
    expected, matmul = taken(model, x, y, 0.1).gradient, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    clipping, precision = RecordGradients(model, 0.1), matmul.fp32_precision
    model.zero_grad()
    loss(model, x, y).backward()
    matmul.fp32_precision = "bf16"
    try:
        torch.testing.assert_close(clipping.take().gradient, expected, rtol=0, atol=1e-6)
    finally:
        matmul.fp32_precision = precision


def test_weight_of_records() -> None:
    model, x, y = build("mlp", 6)
    clipping = RecordGradients(model, 1.0)
    clipping.weigh_records(torch.tensor([0.5, 0.25, 0.0]))
    loss(model, x[:3], y[:3]).backward()
    loss(model, x[3:], y[3:]).backward()
    result = clipping.take()
    assert (result.records, result.weight) == (6, 3.75)
    assert clipping.take().weight == 0


def test_order_of_parameters() -> None:
    model, x, y = build("mlp", 5)
    expected = taken(model, x, y).gradient
    parameters = list(model.parameters())
    clipping = RecordGradients(model, 1.0)
    model.zero_grad()
    loss(model, x, y).backward()
    backwards = clipping.take(parameters[::-1]).gradient
    pieces = torch.split(expected, [each.numel() for each in parameters])
    assert torch.equal(backwards, torch.cat(pieces[::-1]))


# The bound: one record more or less changes the sum by at most C.


@given(
    st.sampled_from(sorted(MODELS)), st.integers(2, 6), st.integers(0, 1000), st.sampled_from([1e-3, 0.1, 1.0, 1e3]),
    st.sampled_from([1.0, 1e-20, 1e10, 1e18, 1e38, float("nan"), float("inf")]),
)  # fmt: skip
@settings(max_examples=40)
def test_one_record_changes_the_sum_by_at_most_the_bound(
    name: str, records: int, seed: int, clip: float, size: float
) -> None:
    model, x, y = build(name, records, seed)
    if x.is_floating_point():
        x[0] *= size
    with_record = taken(model, x, y, clip)
    without = taken(model, x[1:], y[1:], clip)
    assert with_record.records == without.records + 1
    # 1e-6 of each of the others: their number changed, and with it the last bits of their gradients in float32.
    assert float((with_record.gradient - without.gradient).norm()) <= clip * (1 + 1e-6 * records)


@pytest.mark.slow
@given(st.integers(0, 1000), st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=4, max_size=4))
@settings(max_examples=40)
def test_one_record_in_place_of_a_null_record_changes_the_sum_by_at_most_the_bound(seed: int, record: Any) -> None:
    """With the same number of records, no tolerance is needed: the others keep their bits."""
    model, x, y = build("mlp", 9, seed)
    x[4] = torch.tensor(record)
    with_record = taken(model, x, y, 1e-2)
    x[4] = torch.nan
    assert float((with_record.gradient - taken(model, x, y, 1e-2).gradient).norm()) <= 1e-2


def test_a_search_for_the_record_that_changes_the_sum_most_stays_below_the_bound() -> None:
    model, x, y = build("mlp", 8)
    without = taken(model, x[1:], y[1:], 0.1).gradient
    best = torch.zeros(4)
    largest = 0.0
    generator = torch.Generator().manual_seed(0)
    for trial in range(60):
        x[0] = best + torch.randn(4, generator=generator) * 10.0 ** (trial % 7 - 3)
        change = float((taken(model, x, y, 0.1).gradient - without).norm())
        if change > largest:
            largest, best = change, x[0].clone()
    assert 0.09 < largest <= 0.1 * (1 + 8e-6)


def test_opposite_gradients_in_one_layer_do_not_hide_those_of_another() -> None:
    """The norm is over all parameters: clipping each layer alone to C would allow more."""
    model, x, y = build("mlp", 1)
    x *= 1e4
    assert float(taken(model, x, y, 0.5).gradient.norm()) <= 0.5


# Values of records.


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38, 3e38])
@pytest.mark.parametrize("name", ["mlp", "cnn", "twice", "custom", "sequence"])
def test_a_record_that_is_not_finite_counts_as_zero(name: str, value: float) -> None:
    model, x, y = build(name, 70)
    rows = clipped(torch.cat([one_by_one(model, x[:3], y[:3]), one_by_one(model, x[4:], y[4:])]), 0.1)
    x[3] = value
    result = taken(model, x, y, 0.1)
    assert result.records == 70
    assert torch.isfinite(result.gradient).all()
    if not math.isfinite(value):
        torch.testing.assert_close(result.gradient, rows, rtol=0, atol=1e-5)


def test_only_records_that_are_not_finite() -> None:
    model, x, y = build("cnn", 3)
    assert not taken(model, x * torch.nan, y).gradient.any()


def test_values_beyond_the_squares_of_float64() -> None:
    model = nn.Linear(2, 1, bias=False).double()
    clipping = RecordGradients(model, 1.0, reduction="sum")
    for large, small in ((1e160, 1e-165), (1e-165, 1e160), (1e155, 1e155), (1e300, 1e300), (1e90, 1e-80)):
        x = torch.full((1, 2), large, dtype=torch.float64)
        model.zero_grad()
        (model(x) * small).sum().backward()
        assert float(clipping.take().gradient.norm()) <= 1.0


def test_values_whose_product_with_the_number_of_records_is_beyond_float32() -> None:
    model = nn.Linear(2, 1, bias=False)
    clipping = RecordGradients(model, 1e10)
    (model(torch.full((4, 2), 1e-38)) * 3e38).sum().backward()
    assert torch.isfinite(clipping.take().gradient).all()


def test_gradients_of_zero_stay_zero() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Flatten())
    clipping = RecordGradients(model, 1.0)
    (model(torch.randn(5, 4)) * 0).mean().backward()
    assert not clipping.take().gradient.any()


@everything
def test_the_values_of_other_records_do_not_change_a_bit(name: str) -> None:
    """Only record 66 is left if all others count as zero; otherwise their factors are what removes them."""
    model, x, y = build(name, 70)
    others = torch.arange(70) != 66
    results = []
    for seed in range(3):
        torch.manual_seed(seed)
        x[others] = MODELS[name][1](69)
        clipping = RecordGradients(model, 0.1, reduction="sum")
        model.zero_grad()
        weights = (~others).double().to(torch.float32)
        (nn.functional.cross_entropy(model(x), y, reduction="none") * weights).sum().backward()
        results.append(clipping.take().gradient)
        clipping.remove()
    assert results[0].any()
    assert all(torch.equal(results[0], each) for each in results)


# What stays between steps.


def test_forward_passes_without_backward_leave_nothing() -> None:
    model, x, y = build("cnn", 5)
    clipping = RecordGradients(model, 1.0)
    with torch.no_grad():
        model(x)
    before = tensors()
    model(x)
    assert not tensors(before)
    assert clipping.records == 0
    loss(model, x, y).backward()
    with torch.no_grad():
        model(x)
    model.eval()
    model(x)
    assert clipping.records == 5
    assert clipping.take().records == 5
    result = clipping.take()
    assert result.records == 0
    assert not result.gradient.any()


def tensors(known: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
    """Return the tensors that exist, except known ones: other tests may have left some that disappear at any time."""
    gc.collect()
    found = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    identities = {id(each) for each in known}
    return [each for each in found if id(each) not in identities]


@pytest.mark.slow
def test_memory_does_not_grow() -> None:
    model, x, y = build("words", 5)
    clipping = RecordGradients(model, 1.0)
    counts, before = [], tensors()
    for _ in range(3):
        model.zero_grad()
        value = loss(model, x, y)
        value.backward()  # the program keeps the loss, and with it the graph
        clipping.take()
        counts.append(len(tensors(before)))
    assert counts[1] == counts[2]
    modules = set(model.modules())
    uses = [each for each in gc.get_objects() if type(each) is Use and each.unit.module in modules]
    assert uses
    assert not any(each.inputs or any(gradient is not None for gradient in each.gradients) for each in uses)
    del value


def test_zero_grad_discards() -> None:
    model, x, y = build("mlp", 6)
    expected = taken(model, x[3:], y[3:])
    clipping = RecordGradients(model, 1.0)
    model.zero_grad()
    loss(model, x[:3], y[:3]).backward()
    model.zero_grad()
    loss(model, x[3:], y[3:]).backward()
    result = clipping.take()
    assert result.records == 3
    assert torch.equal(result.gradient, expected.gradient)


def test_without_zero_grad_the_next_step_is_the_same() -> None:
    model, x, y = build("mlp", 6)
    clipping = RecordGradients(model, 1.0)
    loss(model, x, y).backward()
    first = clipping.take()
    loss(model, x, y).backward()
    assert torch.equal(clipping.take().gradient, first.gradient)


def test_reset() -> None:
    model, x, y = build("mlp", 6)
    clipping = RecordGradients(model, 1.0)
    loss(model, x, y).backward()
    clipping.reset()
    assert clipping.records == 0


def test_no_records() -> None:
    model, x, _ = build("cnn", 1)
    clipping = RecordGradients(model, 1.0)
    (model(x[:0]).sum() * 1.0).backward()
    assert clipping.take().records == 0


def test_the_model_computes_the_same_with_and_without() -> None:
    """Weights, gradients and random numbers of a program do not change."""

    def train(clip: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3))
        clipping = RecordGradients(model, 1.0) if clip else None
        x, y = torch.randn(8, 4), torch.randint(3, (8,))
        for _ in range(3):
            model.zero_grad()
            loss(model, x, y).backward()
            if clipping:
                clipping.take()
        return [each.grad for each in model.parameters() if each.grad is not None]

    assert all(map(torch.equal, train(True), train(False)))


def test_dropout_between_modules() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3))
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    result = taken(model, x, y, 1e6).gradient  # nothing is clipped, so the mean is the gradient
    gradients = torch.cat([each.grad.reshape(-1) for each in model.parameters() if each.grad is not None])
    torch.testing.assert_close(result / 8, gradients.double(), rtol=0, atol=1e-6)


def test_copies_and_saved_models_have_no_hooks_that_act() -> None:
    model, x, y = build("mlp", 5)
    clipping = RecordGradients(model, 1.0)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    for each in copies:
        loss(each, x, y).backward()
        pickle.loads(pickle.dumps(each))
    assert clipping.records == 0
    loss(model, x, y).backward()
    assert clipping.records == 5


def test_remove() -> None:
    model, x, y = build("cnn", 5)
    clipping = RecordGradients(model, 1.0)
    clipping.remove()
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())
    loss(model, x, y).backward()
    assert clipping.records == 0
    assert not clipping.take().gradient.any()


def test_another_object_for_the_same_model_changes_nothing() -> None:
    model, x, y = build("cnn", 5)
    expected = taken(model, x, y).gradient
    old, new = RecordGradients(model, 1.0), RecordGradients(model, 1.0)
    for _ in range(2):
        model.zero_grad()
        loss(model, x, y).backward()
        assert torch.equal(new.take().gradient, expected)
    assert torch.equal(old.take().gradient, expected)
