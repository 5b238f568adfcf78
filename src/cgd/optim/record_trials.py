"""Trial runs of a model with made-up records, before its first step.

An error of one member is visible to the others, so it must not depend on records. For this reason, a model is not
checked with records, but with random numbers of the same shapes and types, always the same ones. A batch of them, and
some of them one by one, are passed forward and backward: every module must have the same inputs and outputs, and
receive the same gradients, and the sum of the records' gradients must be that of autograd.

Some models do not accept random numbers, such as a model that needs sorted times. They are checked with the records
of the first batch. A model that handles each record by itself fails such a check only by extreme rounding.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from cgd.errors import InputError
from cgd.optim.record_checks import draws_numbers, first_tensor
from cgd.optim.record_norms import Pass, Unit, Use, clipped_sums, has_records
from cgd.optim.structures import leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn
    from torch.nn import Parameter

    from cgd.optim.record_norms import PassSums

MADE_UP_RECORDS = 61
"""Largest number in a batch, so that little memory is needed; a number that is rarely another dimension."""
CHECKED_RECORDS = 3
TOLERANCE = 1e-3
"""Largest difference between a record in a batch and the same record alone, relative to the largest value. Rounding
makes about 1e-6."""
SUM_TOLERANCE = 5e-3
"""Largest difference between our sum and that of autograd, relative to the sum of the records' norms. Rounding makes
about 1e-6 in float32, and 5e-4 with the short floats of some graphics processors."""
ROUNDING = 1e-5
"""Gradients smaller than this part of those of the whole model may be rounding only: that of a bias before a
normalisation is zero, for example, and so are the differences that matter."""


def check_model(model: nn.Module, units: Sequence[Unit], args: Any, kwargs: Any) -> None:
    """Check that a model computes every record by itself, forward and backward.

    Args:
        model: the model.
        units: its modules with trainable parameters, from `find_units`.
        args: its positional arguments, with the records of a batch.
        kwargs: its other arguments.

    Raises:
        InputError: a value or gradient depends on other records, or gradients cannot be separated by records.
    """
    with _repeatable(model):
        run = partial(_Trial, model, units)
        inputs, batch = _made_up_batch(run, (args, kwargs), len(first_tensor(args, kwargs)))
        records = len(first_tensor(*inputs))
        generator = torch.Generator().manual_seed(1)
        probes = {
            number: _random(leaf, records, generator)
            for number, leaf in enumerate(batch.output)
            if has_records(leaf, records) and leaf.requires_grad and leaf.is_floating_point()
        }
        expected = batch.differentiate(probes)
        for index in sorted({round(i * (records - 1) / (CHECKED_RECORDS - 1)) for i in range(CHECKED_RECORDS)}):
            rows = slice(index, index + 1)
            own = pytree.tree_map(lambda leaf, rows=rows: leaf[rows] if has_records(leaf, records) else leaf, inputs)
            try:
                alone = run(own)
            except Exception as error:
                raise InputError(
                    f"the model fails with one record alone, but not with {records}: {error}. Write its forward pass "
                    "so that it accepts any number of records"
                ) from error
            _compare_values(batch, alone, index, records)
            alone.differentiate({number: each[rows] for number, each in probes.items()})
            _compare_gradients(batch, alone, index, records)
        source = first_tensor(*inputs)
        finished = Pass(records, weakref.ref(source), source._version, uses=[use for use, _ in batch.calls])
        check_sums(expected, clipped_sums(finished, 1.0, 1.0, plain=True))


@contextmanager
def _repeatable(model: nn.Module) -> Iterator[None]:
    """Disable dropout, and leave the states of random number generators as they are."""
    random = [each for each in model.modules() if draws_numbers(each) and each.training]
    devices = {each.device for each in model.parameters() if each.device.type == "cuda"}
    try:
        for module in random:
            module.training = False
        with torch.random.fork_rng(devices=sorted(devices, key=str)):
            yield
    finally:
        for module in random:
            module.training = True


# Made-up records.


def _made_up_batch(run: Callable[[Any], _Trial], inputs: Any, records: int) -> tuple[Any, _Trial]:
    """Return the first arguments that the model accepts, with finite outputs, and their trial."""
    for draw in (torch.randn, torch.rand):  # the latter for models with logarithms, roots or numbers of categories
        generator = torch.Generator().manual_seed(0)
        made_up = pytree.tree_map(
            lambda leaf, draw=draw, generator=generator: (
                _random(leaf, min(records, MADE_UP_RECORDS), generator, draw) if has_records(leaf, records) else leaf
            ),
            inputs,
        )
        try:
            trial = run(made_up)
        except Exception:  # noqa: S112 - any error of the model's own code
            continue
        if all(bool(each.isfinite().all()) for each in trial.output if isinstance(each, torch.Tensor)):
            return made_up, trial
    own = pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, inputs)
    return own, run(own)


def _random(leaf: torch.Tensor, records: int, generator: torch.Generator, draw: Any = torch.randn) -> torch.Tensor:
    """Return random numbers of the type of a tensor, and of its shape but for the number of records."""
    shape = (records, *leaf.shape[1:])
    if leaf.is_floating_point() or leaf.is_complex():
        drawn = draw(shape, generator=generator, dtype=torch.complex128 if leaf.is_complex() else torch.float64)
    else:  # every table has places 0 and 1; integers of other types are never places
        high = 2 if leaf.dtype in (torch.bool, torch.int32, torch.int64) else 128
        drawn = torch.randint(0, high, shape, generator=generator)
    return drawn.to(leaf.device, leaf.dtype)  # type: ignore[no-any-return]


# One trial.


class _Trial:
    """One call of the model, with the calls of its modules.

    Attributes:
        calls: of each module with trainable parameters, with the leaves of its output.
        output: the leaves of the model's output.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], inputs: Any) -> None:
        self._model = model
        self.calls: list[tuple[Use, list[Any]]] = []
        args, kwargs = inputs
        handles = [unit.module.register_forward_hook(partial(self._record, unit), with_kwargs=True) for unit in units]
        try:
            with torch.enable_grad():
                self.output = leaves(model(*args, **kwargs))
        finally:
            for handle in handles:
                handle.remove()

    def _record(self, unit: Unit, _module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        outputs = leaves(output)
        use = Use.of(unit, args, kwargs, len(outputs))
        # Copies: a later operation may change an output in place.
        kept = [each.detach().clone() if isinstance(each, torch.Tensor) else each for each in outputs]
        self.calls.append((use, kept))
        for number, each in enumerate(outputs):
            if isinstance(each, torch.Tensor) and each.requires_grad:
                each.register_hook(partial(use.gradients.__setitem__, number))

    def differentiate(self, probes: Mapping[int, torch.Tensor]) -> dict[str, tuple[Parameter, torch.Tensor | None]]:
        """Differentiate some outputs, multiplied by `probes`; return the gradient of each trainable parameter."""
        parameters = {name: each for name, each in self._model.named_parameters() if each.requires_grad}
        gradients: Sequence[torch.Tensor | None] = [None] * len(parameters)
        if probes:
            with torch.enable_grad():  # a scalar: with gradients of outputs, torch would import sympy
                total = torch.stack([(self.output[number] * probe).sum() for number, probe in probes.items()]).sum()
            gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
        return {name: (parameter, each) for (name, parameter), each in zip(parameters.items(), gradients, strict=True)}


# Comparisons.


def _compare_values(batch: _Trial, alone: _Trial, index: int, records: int) -> None:
    if [use.unit for use, _ in batch.calls] != [use.unit for use, _ in alone.calls]:
        raise InputError(
            f"a batch of {records} records calls other modules than one record does; call the same modules with all "
            "records of a batch"
        )
    for (use, outputs), (own_use, own_outputs) in zip(batch.calls, alone.calls, strict=True):
        _check_same(use.unit.name, zip(use.inputs, own_use.inputs, strict=False), index, records)
        # A gradient of an output without records, such as the state of a recurrent network, is refused when it arrives.
        _check_same(use.unit.name, _with_records(outputs, own_outputs, records), index, records)
    _check_same("the model itself", _with_records(batch.output, alone.output, records), index, records)


def _with_records(in_batch: Sequence[Any], alone: Sequence[Any], records: int) -> Iterator[tuple[Any, Any]]:
    return (pair for pair in zip(in_batch, alone, strict=False) if has_records(pair[0], records))


def _check_same(name: str, pairs: Any, index: int, records: int) -> None:
    if not all(_same(in_batch, alone, index, records) for in_batch, alone in pairs):
        raise InputError(
            f"a record has other inputs or outputs of module {name} in a batch of {records} than alone: the model "
            "mixes records, does not have them in the first dimension, or draws random numbers. Compute each record by "
            "itself; use nn.Dropout, not its function"
        )


def _same(in_batch: object, alone: object, index: int, records: int, rounding: float = 0.0) -> bool:
    if not isinstance(in_batch, torch.Tensor) or not isinstance(alone, torch.Tensor):
        return isinstance(in_batch, torch.Tensor) == isinstance(alone, torch.Tensor)
    row = in_batch[index : index + 1] if has_records(in_batch, records) else in_batch
    if row.shape != alone.shape:
        return False
    if row.is_complex():
        row, alone, in_batch = (torch.view_as_real(each) for each in (row, alone, in_batch))
    return torch.allclose(
        row.double(), alone.double(), rtol=0.0, atol=TOLERANCE * _largest(in_batch) + rounding, equal_nan=True
    )


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest finite absolute value."""
    return float(tensor.detach().nan_to_num(0.0, 0.0, 0.0).abs().max()) if tensor.numel() else 0.0


def _compare_gradients(batch: _Trial, alone: _Trial, index: int, records: int) -> None:
    arrived = [each for use, _ in batch.calls for each in use.gradients if each is not None]
    rounding = ROUNDING * max(map(_largest, arrived), default=0.0)
    for (use, _), (own_use, _) in zip(batch.calls, alone.calls, strict=True):
        for in_batch, own in zip(use.gradients, own_use.gradients, strict=False):
            if has_records(in_batch, records) and not _same(in_batch, own, index, records, rounding):
                raise InputError(
                    f"the output of module {use.unit.name} receives another gradient for a record in a batch of "
                    f"{records} than alone: a backward hook, or a backward function, of the model mixes records. "
                    "Remove it, or let it handle each record by itself"
                )


def check_sums(expected: Mapping[str, tuple[Parameter, torch.Tensor | None]], sums: PassSums) -> None:
    """Check that the sum of the records' gradients is what autograd computes.

    Args:
        expected: all trainable parameters by name, with the gradients of autograd.
        sums: the sums over records.

    Raises:
        InputError: a parameter has another gradient.
    """
    rounding = ROUNDING * sum(sums.spread.values())
    for name, (parameter, gradient) in expected.items():
        total = sums.plain.get(parameter, torch.zeros(1, dtype=torch.float64)).reshape(-1).cpu()
        actual = torch.zeros(parameter.numel()) if gradient is None else gradient.reshape(-1).cpu()
        difference = float(torch.linalg.vector_norm(actual.double() - total))
        if sums.finite and difference > max(SUM_TOLERANCE * sums.spread.get(parameter, 0.0), rounding):
            raise InputError(
                f"the gradient of parameter {name} differs by {difference:.2g} from the sum over its records: the "
                "parameter is used outside of its module's forward pass, or the module draws random numbers. Call the "
                "modules, and use random numbers outside of them"
            )
