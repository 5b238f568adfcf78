"""Clipping of each record's gradient in an ordinary training loop.

For a bound on what one record changes, the gradient of every record, over all parameters together, is clipped to the
norm C before gradients are added. `RecordGradients` collects what it needs while the loop calls `backward`.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from cgd.errors import InputError
from cgd.optim.record_checks import CheckedOutput, check_output, find_units, first_tensor
from cgd.optim.record_norms import Pass, Use, clipped_sums
from cgd.optim.record_trials import check_model
from cgd.optim.structures import leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn
    from torch.nn import Parameter

    from cgd.optim.record_norms import Unit

MIN_CLIP, MAX_CLIP = 1e-10, 1e10


class ClippedSum(NamedTuple):
    """A sum of clipped gradients, not divided by anything.

    Attributes:
        gradient: one vector in float64, on the processor.
        records: the number of records in it.
        weight: the sum of their weights; without `weigh_records`, their number.
    """

    gradient: torch.Tensor
    records: int
    weight: float


class RecordGradients:
    """Clip the gradient of each record of a training loop, and add the clipped gradients.

    The loop stays as it is: `zero_grad()`, a mean loss, `backward()`; before the optimiser's step, `take()` returns the
    sum. One record, in place of one that counts as zero, changes the sum by at most C, because each record's gradient
    is computed from its own row of inputs and output gradients. `Parameter.grad` is not used.

    Several forward and backward passes before `take` are virtual batches: each loss is the mean over the records of its
    own batch, and the sums are added. A record may be in one of them only. `zero_grad()` between them, which sets the
    gradients to None, discards what was added, as it does in torch. A forward pass without `backward` leaves nothing.

    The first dimension of the model's first tensor is the records. Nothing raises because of the values of records: if
    a gradient has NaN, infinities or numbers above 1e15, the record counts as zero. The model is checked with made-up
    records before the first step (`record_trials.py`); only if it does not accept random numbers, with its own. A loss
    that handles each record by itself is never refused, whatever the outputs are.

    Rounding: gradients are clipped to C·(1 − 5e-4), which covers all rounding in the sum (`MARGIN` in
    `record_norms.py`). It does not cover this: torch computes the rows of a batch with operations that depend on the
    number of rows, not on the values of others. So the gradient of a record has the same bits whatever the values of
    the other records are (tested on x86-64), but with another *number* of records, all gradients may change by about
    1e-7 of their norm in float32, also by the division of a mean loss. Batches of constant size with `reduction="sum"`
    avoid this; fill the last one with records whose loss is multiplied by zero.

    Refused at construction: batch normalisation, instance normalisation with running statistics, recurrent networks and
    attention with records in the second dimension, dropout inside of modules with parameters, sparse or renormalised
    embeddings, parametrizations, lazy, compiled, scripted and data-parallel modules, half precision.

    Refused in the first step: a model that mixes records, also in backward hooks, or updates buffers; an output without
    records in the first dimension, such as a loss that the model computes itself; a loss that mixes outputs
    (contrastive losses), is a mean with class weights or `ignore_index`, uses parameters or other values of the model
    besides its output, or is computed by compiled functions; parameters that are read outside of their modules. Refused
    in every step: a second backward through one forward pass (gradient penalties, two losses), one backward through two
    calls of the model, the same tensor twice in one step, autocast and half precision, also inside the model, other
    trainable parameters than at construction.

    Not noticed, and then the bound does not hold: a loss divided by a number that depends on labels, such as the number
    of positive labels, or of labels that are not −100; a loss that reads other records' outputs detached, or in a
    `torch.autograd.Function` that hides it; a loss that cannot be differentiated twice (a warning says so); a model or
    a loss that begins to mix records after the first step, or does it for some values only.

    Not noticed, and harmless: copies of a record in other tensors (`records` counts them); a loss divided by the number
    of virtual batches, which makes the gradients smaller; changes of `Parameter.grad`, or a missing `zero_grad`, which
    have no effect; a loader with `drop_last`, which leaves records out.

    Args:
        model: the whole model; the loop must call it, not its parts.
        clip: C, the largest norm of a record's gradient over all trainable parameters.
        reduction: "mean" if the loss is the mean over the records of a batch, "sum" if it is their sum.

    Raises:
        InputError: an option is invalid, or the gradients of this model cannot be separated by records.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> clipping = RecordGradients(model, clip=1.0)
        >>> x, y = torch.tensor([[3.0, 4.0], [0.0, 0.5]]), torch.tensor([[100.0], [100.0]])
        >>> (model(x) - y).abs().mean().backward()
        >>> gradient, records, _ = clipping.take()
        >>> gradient.round(decimals=3).tolist(), records  # the first has norm 5, and was clipped to norm 1
        ([-0.6, -1.3], 2)
        >>> clipping.remove()
    """

    def __init__(self, model: nn.Module, clip: float, *, reduction: Literal["mean", "sum"] = "mean") -> None:
        if not MIN_CLIP <= clip <= MAX_CLIP:  # also NaN
            raise InputError(f"clip is {clip}; it must be a number from {MIN_CLIP} to {MAX_CLIP}")
        if reduction not in ("mean", "sum"):
            raise InputError(f"reduction is {reduction!r}; it must be 'mean' or 'sum'")
        self.clip, self.reduction = float(clip), reduction
        self._model = model
        self._units = find_units(model)
        self._parameters = _trainable(model)
        self._checked_records = 0  # in the batch with which the model was checked
        self._loss_checked = False
        self._weights: torch.Tensor | None = None  # of the next pass
        self._current: Pass | None = None  # of the forward pass that is running
        self._buffers: list[tuple[int, int]] = []
        self.reset()
        self._handles = [
            unit.module.register_forward_hook(_Hook(partial(self._record_call, unit)), with_kwargs=True)
            for unit in self._units
        ]
        self._handles += [
            model.register_forward_pre_hook(_Hook(self._begin_pass), with_kwargs=True, prepend=True),
            model.register_forward_hook(_Hook(self._end_pass), with_kwargs=True, always_call=True),
        ]

    def weigh_records(self, weights: torch.Tensor) -> None:
        """Multiply the clipped gradients of the records of the next pass by these weights, from 0 to 1.

        Raises:
            InputError: a weight is below 0, above 1, or not a number.
        """
        own = weights.detach().to("cpu", torch.float64)
        if own.dim() != 1 or not bool(((own >= 0) & (own <= 1)).all()):
            raise InputError("the weights of records must be one dimension of numbers from 0 to 1")
        self._weights = own

    @property
    def records(self) -> int:
        """The number of records whose gradients were added since the last `take` or `reset`."""
        self._settle()
        return self._records

    def take(self, parameters: Sequence[torch.Tensor] | None = None) -> ClippedSum:
        """Return the sum of the clipped gradients since the last call, and start again.

        Args:
            parameters: the order of the parameters in the vector; by default, that of `model.parameters()`.

        Raises:
            InputError: these are not all trainable parameters of the model, or the loss of the first step could not be
                checked.
        """
        own = list(self._parameters.values())
        order = own if parameters is None else list(parameters)
        if len(order) != len(own) or {id(each) for each in order} != {id(each) for each in own}:
            raise InputError(
                f"{len(order)} parameters were given, which are not the {len(own)} trainable ones of the model whose "
                "gradients are clipped; create RecordGradients with the model that the optimiser trains"
            )
        try:
            self._settle()
            self._loss_checked |= self._finite and self._largest_batch > 1  # one record has nothing to mix with
            parts = [
                self._sums[each].reshape(-1).cpu()
                if each in self._sums
                else torch.zeros(each.numel(), dtype=torch.float64)
                for each in order
            ]
            return ClippedSum(torch.cat(parts), self._records, self._weight)
        finally:
            self.reset()

    def reset(self) -> None:
        """Discard everything since the last `take`."""
        self._records, self._weight, self._largest_batch, self._finite = 0, 0.0, 0, True
        self._sums: dict[Any, Any] = {}
        self._sources: list[tuple[weakref.ref[torch.Tensor], int]] = []  # the inputs of passes, with versions
        self._pending: Pass | None = None  # of which gradients have arrived

    def remove(self) -> None:
        """Detach from the model. What `take` has not returned is discarded."""
        for handle in self._handles:
            handle.remove()
        self.reset()

    # Forward passes. A pass is referenced only by hooks in its graph: without a backward pass it disappears with them.

    def _begin_pass(self, _model: nn.Module, args: Any, kwargs: Any) -> None:
        if _ours.running or not torch.is_grad_enabled():
            return
        self._current = None
        self._settle()
        if any(torch.is_autocast_enabled(each) for each in {each.device.type for each in self._parameters.values()}):
            raise InputError("autocast is on; records' gradients need full precision. Leave autocast out")
        if [id(each) for each in _trainable(self._model).values()] != [id(each) for each in self._parameters.values()]:
            raise InputError(
                "the model has other trainable parameters than before; call remove(), and create RecordGradients again"
            )
        source = first_tensor(args, kwargs)
        weights, self._weights = self._weights, None
        if weights is not None and len(weights) != len(source):
            raise InputError(
                f"{len(weights)} weights were given for a batch of {len(source)} records; give one for each"
            )
        self._current = Pass(len(source), weakref.ref(source), source._version, weights)
        self._buffers = _versions(self._model)

    def _end_pass(self, _model: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if _ours.running:
            return None
        current, self._current = self._current, None
        if current is None or output is None:  # None if the forward pass raised an error
            return None
        if self._checked_records < min(current.records, 2):  # a batch of one record shows no mixing
            self._check_model(args, kwargs, output, current.records)
        return None if self._loss_checked else CheckedOutput.of(output, current)

    def _check_model(self, args: Any, kwargs: Any, output: Any, records: int) -> None:
        if _versions(self._model) != self._buffers:
            raise InputError(
                "the forward pass changed a buffer of the model, through which records affect each other; use a "
                "model without such buffers"
            )
        check_output(output, records)
        with _own_calls():
            check_model(self._model, self._units, args, kwargs)
        self._checked_records = records

    def _record_call(self, unit: Unit, _module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.is_grad_enabled() and not _ours.running:
            outputs = leaves(output)
            use = Use.of(unit, args, kwargs, len(outputs))
            if self._current is not None:
                self._current.uses.append(use)
            for number, each in enumerate(outputs):
                if isinstance(each, torch.Tensor) and each.requires_grad:
                    # At once: a later operation may change the output in place, and the hook is for the value now.
                    each.register_hook(partial(self._receive, self._current, use, number))

    # Backward passes.

    def _receive(self, current: Pass | None, use: Use, number: int, gradient: torch.Tensor) -> None:
        if current is None:
            raise InputError(
                f"module {use.unit.name} was called by itself, and the number of its records is not known; call the "
                "whole model"
            )
        if current.settled or use.gradients[number] is not None:
            raise InputError(
                "a second backward pass went through one forward pass, which would count its records twice; add the "
                "losses before backward(), and use no gradients of gradients"
            )
        if self._pending is None:
            if self._records and all(each.grad is None for each in self._parameters.values()):
                self.reset()  # zero_grad was called
            self._pending = current
        elif self._pending is not current:
            raise InputError(
                "gradients of two calls of the model arrived without a step or a forward pass between them, so a "
                "record may be in both; call backward() after each call of the model"
            )
        use.gradients[number] = gradient

    def _settle(self) -> None:
        """Add the gradients of the last backward pass. Later than in `backward`, where no hook is known to be last."""
        current, self._pending = self._pending, None
        if current is None:
            return
        try:
            with _own_calls():
                self._add(current)
        except BaseException:
            self.reset()
            raise
        finally:
            current.settle()

    def _add(self, current: Pass) -> None:
        if not (self._loss_checked or current.loss_checked):
            raise InputError(
                "the loss of the first step could not be checked, because it did not pass through functions of torch "
                "from the model's output to loss.backward(). Call loss.backward(), and compute the loss without "
                "torch.compile, torch.jit and torch.func"
            )
        source = current.source()
        if source is not None and any(ref() is source and version == current.version for ref, version in self._sources):
            raise InputError(
                "the same tensor of records was used in two backward passes of one step; use each record once per step"
            )
        self._sources.append((current.source, current.version))
        scale = current.records if self.reduction == "mean" else 1
        added = clipped_sums(current, self.clip, scale, plain=False)
        for parameter, each in added.clipped.items():
            self._sums[parameter] = self._sums[parameter] + each if parameter in self._sums else each
        self._records += current.records
        self._weight += current.records if current.weights is None else float(current.weights.sum())
        self._largest_batch = max(self._largest_batch, current.records)
        self._finite &= added.finite


class _Ours(threading.local):
    """A flag: this thread calls modules for a check or a sum; no object of the class records such calls."""

    running = False


_ours = _Ours()


@contextmanager
def _own_calls() -> Iterator[None]:
    _ours.running = True
    try:
        yield
    finally:
        _ours.running = False


class _Hook:
    """A hook that a copy of the model, or a saved one, does not take along."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __reduce__(self) -> tuple[type[_NoHook], tuple[()]]:
        return _NoHook, ()


class _NoHook:
    """A hook without effect, for copies of the model."""

    def __call__(self, *args: Any) -> None:
        """Do nothing."""


def _trainable(model: nn.Module) -> dict[str, Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _versions(model: nn.Module) -> list[tuple[int, int]]:
    """Return what changes if a buffer is replaced or overwritten."""
    return [(id(each), each._version) for each in model.buffers()]
