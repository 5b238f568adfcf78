"""Checks that the gradients of a model can be separated by records.

Before training, `find_units` refuses modules that mix records. At the first call, the model is tried with made-up
records (`record_trials.py`). Before the first backward pass, the loss is differentiated twice (`CheckedOutput`).
"""

from __future__ import annotations

import math
import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import batchnorm, dropout
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from cgd.errors import InputError
from cgd.optim import running_statistics
from cgd.optim.record_norms import Unit, has_records
from cgd.optim.structures import leaves, map_leaves

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.nn import Parameter

    from cgd.optim.record_norms import Pass

METADATA_KEY = "cgd: pass"
DEFAULT_IGNORE_INDEX = -100
MAX_DEPENDENCE = 1e-6  # of a gradient on the outputs of other records, relative to that on its own; rounding is less
"""Of torch's losses. That a program uses it cannot be told without its labels."""


# Before training.


def find_units(model: nn.Module) -> list[Unit]:
    """Return the modules whose calls have to be recorded, with the trainable parameters of each.

    A parameter belongs to the module that holds it. If that module is not called itself (`nn.ParameterList`), or is
    part of `nn.MultiheadAttention`, which reads the weights of its parts, it belongs to the module around it.

    Raises:
        InputError: a module mixes records, or cannot be handled.
    """
    owned: dict[nn.Module, dict[str, Parameter]] = {}
    names: dict[nn.Module, str] = {}

    def visit(module: nn.Module, name: str, owner: nn.Module | None, path: str) -> None:
        _check_module(module, name)
        if owner is None or not (_is_container(module) or isinstance(owner, nn.MultiheadAttention)):
            owner, path = module, ""
        names[module] = name
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                _check_parameter(parameter, f"{name}.{key}")
                owned.setdefault(owner, {})[f"{path}{key}"] = parameter
        for key, child in module.named_children():
            visit(child, f"{name}.{key}" if name else key, owner, f"{path}{key}.")

    visit(model, "", None, "")
    if not owned:
        raise InputError("the model has no trainable parameters; set requires_grad of those to train")
    holders = [parameter for parameters in owned.values() for parameter in parameters.values()]
    units = []
    for module, parameters in owned.items():
        title = f"{names[module] or 'the model itself'} ({type(module).__name__})"
        _check_unit(module, title)
        alone = all(sum(each is other for other in holders) == 1 for each in parameters.values())
        linear = type(module).forward is nn.Linear.forward and parameters.keys() <= {"weight", "bias"}
        units.append(Unit(title, module, parameters, linear and alone))
    return units


def _is_container(module: nn.Module) -> bool:
    return type(module).forward is nn.Module.forward


def _check_parameter(parameter: Parameter, name: str) -> None:
    if parameter.dtype not in (torch.float32, torch.float64):
        raise InputError(
            f"parameter {name} is of type {parameter.dtype}; gradients of records need float32 or float64. Convert the "
            "model with float()"
        )


def _check_module(module: nn.Module, name: str) -> None:
    title = running_statistics.title(module, name)
    if any(is_lazy(parameter) for parameter in module.parameters(recurse=False)):
        raise InputError(f"{title} has no shapes yet; pass one batch through the model first")
    if isinstance(module, batchnorm._BatchNorm):
        raise InputError(
            f"{title} normalises each record by the others of its batch, so no gradient belongs to one record; use "
            "nn.GroupNorm or nn.LayerNorm"
        )
    if running_statistics.has_statistics(module):
        raise InputError(f"{title} stores statistics of records in buffers; create it with track_running_stats=False")
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and not module.batch_first:
        raise InputError(f"{title} expects records in the second dimension; create it with batch_first=True")
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option):
                raise InputError(
                    f"{title} has {option}={getattr(module, option)}, with which gradients cannot be separated by "
                    "records; leave this option out"
                )
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel, torch.jit.ScriptModule)):
        raise InputError(f"{title} hides the calls of its modules; use the module inside it, on one device")
    # torch.compile wraps a module; Module.compile changes it in place.
    if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
        raise InputError(
            f"{title} is compiled, and the calls of its modules are not seen; use the model as it was before"
        )
    if parametrize.is_parametrized(module):
        raise InputError(
            f"{title} computes its weights from other parameters, whose gradients have no records; remove the "
            "parametrization"
        )


def _check_unit(module: nn.Module, title: str) -> None:
    if _is_container(module):
        raise InputError(f"{title} has parameters, but no forward method; give it one")
    random = [each for each in module.modules() if draws_numbers(each)]
    if random:
        raise InputError(
            f"{title} has parameters of its own and draws random numbers ({type(random[0]).__name__}), so its forward "
            "pass cannot be repeated; move these parameters, or the dropout, to a module of its own"
        )


def draws_numbers(module: nn.Module) -> bool:
    """Return whether a module draws random numbers in its forward pass, when it is trained."""
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        return module.dropout > 0
    return isinstance(module, nn.RReLU) or (isinstance(module, dropout._DropoutNd) and module.p > 0)


# At the first call of the model.


def first_tensor(args: Any, kwargs: Any) -> torch.Tensor:
    """Return the first tensor in the arguments of a model; its first dimension is the records.

    Raises:
        InputError: there is no tensor.
    """
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return leaf
    raise InputError("the model was called without a tensor; pass a tensor whose first dimension is the records")


def check_output(output: Any, records: int) -> None:
    """Check that a model returns outputs of its records, from which the program computes the loss.

    Raises:
        InputError: there is no tensor, or no tensor has the records in its first dimension.
    """
    tensors = [each for each in leaves(output) if isinstance(each, torch.Tensor)]
    if not tensors:
        raise InputError(
            f"the model returned a {type(output).__name__}, in which no tensors are found; return a tensor, or a "
            "tuple, list, dict or dataclass of tensors, with the records in the first dimension"
        )
    trainable = [each for each in tensors if each.requires_grad]
    if trainable and not any(has_records(each, records) for each in trainable):
        shapes = [tuple(each.shape) for each in trainable]
        raise InputError(
            f"the model returned tensors of shapes {shapes} for {records} records, so its loss cannot be separated by "
            "records. Return the outputs with the records in the first dimension, and compute the loss outside of the "
            "model"
        )


# At the first backward pass.


class CheckedOutput(torch.Tensor):
    """The output of a model before its first step: `backward` of a loss computed from it checks the loss first.

    A tensor computed from it is of the same class, and so is the loss, unless it comes from compiled code. Then the
    pass stays unchecked, and `RecordGradients` refuses it.
    """

    @classmethod
    def of(cls, output: Any, current: Pass) -> Any:
        """Return the output of a pass, a tensor or a structure of tensors, with its tensors of this class."""

        def convert(leaf: Any) -> Any:
            if not (has_records(leaf, current.records) and leaf.requires_grad and leaf.is_floating_point()):
                return leaf
            checked: Any = leaf if isinstance(leaf, cls) else leaf.as_subclass(cls)
            # Several objects may observe the same model, for example one that a program has replaced.
            checked.grad_fn.metadata.setdefault(METADATA_KEY, []).append(current)
            return checked

        return map_leaves(convert, output)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Check a loss before its backward pass."""
        if func is torch.Tensor.backward:
            _check_losses(args[0], *args[1:2], **_picked(kwargs, "gradient"))
        elif func is torch.autograd.backward:  # in newer versions of torch; in others, the pass stays unchecked
            _check_losses(*args[:2], **_picked(kwargs, "grad_tensors"))
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def _picked(kwargs: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    return {"weights": kwargs[name]} if kwargs and name in kwargs else {}


def _check_losses(losses: Any, weights: Any = None) -> None:
    """Check tensors that are differentiated together, each multiplied by weights."""
    tensors = [losses] if isinstance(losses, torch.Tensor) else list(losses)
    factors = list(weights) if isinstance(weights, (tuple, list)) else [weights] * len(tensors)
    pairs = zip(tensors, factors, strict=True)
    check_loss({loss: torch.ones_like(loss) if factor is None else factor for loss, factor in pairs})


def check_loss(losses: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Check that a loss is a sum of terms that each depend on one record's output.

    Then the derivative of a record's output gradient by the output of another record is exactly zero, whatever the
    values are: such a loss is never refused. All pairs of records are covered by differentiating the gradients of one
    half of the records, for each bit of their numbers. What depends on labels or detached tensors only, such as a
    division by the number of positive labels, cannot be found this way; means with class weights or `ignore_index` are
    found by their names. A loss that cannot be differentiated twice is not checked; a warning says so.

    Args:
        losses: tensors that are differentiated together, with the weights of their elements. Weights are constants in
            the gradient, but may depend on outputs, as in `losses.backward(1 / losses.sum())`.

    Raises:
        InputError: it mixes records, or uses the model otherwise than by its output.
    """
    outputs = _checked_outputs((*losses, *losses.values()))
    if len({tuple(map(id, passes)) for _, passes in outputs}) != 1:
        return  # one backward through two calls of the model, which is refused when gradients arrive
    passes = outputs[0][1]
    records = passes[0].records
    edges = [torch.autograd.graph.GradientEdge(node, 0) for node, _ in outputs]
    with torch.enable_grad():
        try:
            gradients = torch.autograd.grad([*losses], edges, [*losses.values()], create_graph=True, allow_unused=True)
            found = [
                _dependence(gradients, edges, (torch.arange(records) >> bit) % 2 == 1)
                for bit in range((records - 1).bit_length())
            ]
        except RuntimeError:  # not differentiable twice
            gradients, found = (), [math.nan]
    if any(each > MAX_DEPENDENCE for each in found):
        raise InputError(
            f"the loss of a record depends on the outputs of others in its batch of {records}; use a mean of the "
            "records' own losses, without contrasts, ranks or statistics over the batch"
        )
    # A record whose gradient is not finite counts as zero, so it need not be checked.
    if any(map(math.isnan, found)) and all(each is None or each.isfinite().all() for each in gradients):
        warnings.warn(
            "the loss cannot be differentiated twice, so it was not checked whether it mixes records; make sure that "
            "it is a mean of the records' own losses",
            stacklevel=2,
        )
    for each in passes:
        each.loss_checked = True


def _dependence(gradients: Sequence[torch.Tensor | None], edges: Sequence[Any], half: torch.Tensor) -> float:
    """Return how much the output gradients of the records in `half` depend on the outputs of the others.

    It is relative to how much they depend on their own. NaN: no dependence was found, but some derivatives are not
    finite, such as that of √x at 0.
    """
    probes = []
    for each in gradients:
        if each is not None and each.requires_grad:
            weights = torch.linspace(0.5, 1.5, each.numel(), dtype=each.dtype, device=each.device)  # arbitrary
            probes.append((each * weights.reshape(each.shape))[half.to(each.device)].sum())
    if not probes:
        return 0.0
    derivatives = torch.autograd.grad(sum(probes), edges, retain_graph=True, allow_unused=True)  # type: ignore[arg-type]
    largest, finite = 0.0, True
    for each in derivatives:
        if each is not None:
            known = torch.where(each.isfinite(), each, 0).abs()
            own, other = (float(known[rows.to(each.device)].max()) for rows in (half, ~half))
            largest = max(largest, other / max(own, sys.float_info.min))
            finite = finite and bool(each.isfinite().all())
    return largest if finite or largest > MAX_DEPENDENCE else math.nan


def _checked_outputs(losses: Sequence[torch.Tensor]) -> list[tuple[Any, list[Pass]]]:
    """Return the nodes of the model's outputs in the graph of a loss and its weights, with their passes.

    Raises:
        InputError: another path leads from the loss to a parameter of the model, or a node divides by labels.
    """
    outputs: list[tuple[Any, list[Pass]]] = []
    variables: set[int] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [each.grad_fn for each in losses]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if METADATA_KEY in node.metadata:
            outputs.append((node, node.metadata[METADATA_KEY]))
            continue
        _check_mean(node)
        if hasattr(node, "variable"):
            variables.add(id(node.variable))
        waiting += [each for each, _ in node.next_functions]
    uses = [use for _, passes in outputs for each in passes for use in each.uses]
    if any(id(parameter) in variables for use in uses for parameter in use.unit.parameters.values()):
        raise InputError(
            "the loss uses parameters or values of the model besides the tensors that it returned with the records in "
            "the first dimension; return all that the loss needs in this way, and use no penalties on parameters and "
            "no gradients of gradients"
        )
    return outputs


def _check_mean(node: Any) -> None:
    """Check that a node is not a mean that divides by a number that depends on labels."""
    if not node.name().startswith("NllLoss") or node._saved_reduction != 1:
        return
    if node._saved_weight is not None:
        raise InputError(
            "the loss divides by the sum of the class weights of a batch, so that records change each other's "
            "weight; use reduction='sum' with these weights, and divide by the number of records"
        )
    if node._saved_ignore_index % 2**64 != DEFAULT_IGNORE_INDEX % 2**64:  # torch returns an unsigned number
        raise InputError(
            "the loss has an ignore_index, and divides by the number of labels that are not ignored, so that records "
            "change each other's weight; use reduction='sum' with it, and divide by the number of records"
        )
