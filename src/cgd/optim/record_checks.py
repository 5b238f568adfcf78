"""Checks that the gradients of a model can be separated by records.

Before training, `find_units` refuses modules that mix records. At the first step, `RecordGradients` runs a few records
one by one (`check_single_records`), differentiates the loss twice (`CheckedOutput`) and compares its sums with
`Parameter.grad` (`check_sums`).
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import batchnorm, dropout, instancenorm
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from cgd.errors import InputError
from cgd.optim.record_norms import Unit, has_records

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.nn import Parameter

    Call = tuple[str, list[Any], list[Any]]
    """The name of a module, the leaves of its arguments, and the leaves of its output."""

CHECKED_RECORDS = 3
OUTPUT_TOLERANCE = 1e-3
"""Largest difference between a record in a batch and the same record alone, relative to the largest value. Rounding
makes about 1e-6."""
SUM_TOLERANCE = 5e-3
"""Largest difference between our sum and `Parameter.grad`, relative to the sum of the records' norms. Rounding makes
about 1e-6 in float32, and 5e-4 with the short floats of some graphics processors."""

RECORDS_KEY = "cgd: records"


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
    title = f"module {name or 'the model itself'} ({type(module).__name__})"
    if any(is_lazy(parameter) for parameter in module.parameters(recurse=False)):
        raise InputError(f"{title} has no shapes yet; pass one batch through the model first")
    if isinstance(module, batchnorm._BatchNorm):
        raise InputError(
            f"{title} normalises each record by the others of its batch, so no gradient belongs to one record; use "
            "nn.GroupNorm or nn.LayerNorm"
        )
    if isinstance(module, instancenorm._InstanceNorm) and module.track_running_stats:
        raise InputError(f"{title} keeps statistics of the records in buffers; set track_running_stats=False")
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
    random = [each for each in module.modules() if _draws_numbers(each)]
    if random:
        raise InputError(
            f"{title} has parameters of its own and draws random numbers ({type(random[0]).__name__}), so its forward "
            "pass cannot be repeated; move these parameters, or the dropout, to a module of its own"
        )


def _draws_numbers(module: nn.Module) -> bool:
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


@contextmanager
def _repeatable(model: nn.Module) -> Iterator[None]:
    """Disable dropout, and leave the states of random number generators as they are."""
    random = [each for each in model.modules() if _draws_numbers(each) and each.training]
    devices = {each.device for each in model.parameters() if each.device.type == "cuda"}
    try:
        for module in random:
            module.training = False
        with torch.random.fork_rng(devices=sorted(devices, key=str)), torch.no_grad():
            yield
    finally:
        for module in random:
            module.training = True


def check_single_records(model: nn.Module, args: Any, kwargs: Any, run: Callable[[Any, Any], list[Call]]) -> None:
    """Check that some records give the same values one by one as in their batch, at every recorded module.

    Args:
        model: the model.
        args: its positional arguments, with the records of a batch.
        kwargs: its other arguments.
        run: a function that calls the model with such arguments, and returns the calls of its modules and its own.

    Raises:
        InputError: a value depends on the other records.
    """
    records = len(first_tensor(args, kwargs))
    with _repeatable(model):
        batch = run(args, kwargs)
        for index in sorted({round(i * (records - 1) / (CHECKED_RECORDS - 1)) for i in range(CHECKED_RECORDS)}):
            own = pytree.tree_map(
                lambda leaf, i=index: leaf[i : i + 1] if has_records(leaf, records) else leaf, (args, kwargs)
            )
            alone = run(*own)
            if [name for name, _, _ in alone] != [name for name, _, _ in batch]:
                raise InputError(
                    f"a batch of {records} records calls other modules than one record does; call the same modules "
                    "with all records of a batch"
                )
            for in_batch, by_itself in zip(batch, alone, strict=True):
                if not _same_call(in_batch, by_itself, index, records):
                    raise InputError(
                        f"a record has other inputs or outputs of module {in_batch[0]} in a batch of {records} than "
                        "alone: the model mixes records, does not have them in the first dimension, or draws random "
                        "numbers. Compute each record by itself; use nn.Dropout, not its function"
                    )


def _same_call(in_batch: Call, alone: Call, index: int, records: int) -> bool:
    # A gradient of an output without records, such as the state of a recurrent network, is refused when it arrives.
    pairs = list(zip(in_batch[1], alone[1], strict=False))
    pairs += [each for each in zip(in_batch[2], alone[2], strict=False) if has_records(each[0], records)]
    return all(_same(*pair, index, records) for pair in pairs)


def _same(in_batch: object, alone: object, index: int, records: int) -> bool:
    if not isinstance(in_batch, torch.Tensor) or not isinstance(alone, torch.Tensor):
        return isinstance(in_batch, torch.Tensor) == isinstance(alone, torch.Tensor)
    largest = in_batch.detach().nan_to_num(0.0, 0.0, 0.0).abs().max() if in_batch.numel() else 0.0
    row = in_batch[index : index + 1] if has_records(in_batch, records) else in_batch
    return row.shape == alone.shape and torch.allclose(
        row.double(), alone.double(), rtol=0.0, atol=OUTPUT_TOLERANCE * float(largest), equal_nan=True
    )


# At the first backward pass.


class CheckedOutput(torch.Tensor):
    """The output of a model before its first step: `backward` of a loss computed from it checks the loss first.

    A tensor computed from it is of the same class, and so is the loss. `torch.autograd.backward` does not check it.
    """

    @classmethod
    def of(cls, output: Any, records: int) -> Any:
        """Return an output, a tensor or a structure of tensors, with its tensors of this class."""

        def convert(leaf: Any) -> Any:
            if not (has_records(leaf, records) and leaf.requires_grad and leaf.is_floating_point()):
                return leaf
            checked = leaf.as_subclass(cls)
            checked.grad_fn.metadata[RECORDS_KEY] = records
            return checked

        return pytree.tree_map(convert, output)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Check a loss before its backward pass."""
        if func is torch.Tensor.backward:
            check_loss(args[0])
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def check_loss(loss: torch.Tensor) -> None:
    """Check that a loss is a sum of terms that each depend on one record's output.

    Then the derivative of a record's output gradient by the output of another record is zero. All pairs of records are
    covered by differentiating the gradients of one half of the records, for each bit of their numbers. What depends on
    labels only, such as a division by the number of positive labels, cannot be found this way; a mean with class
    weights is found by its name. A loss that cannot be differentiated twice is not checked.

    Raises:
        InputError: it mixes records.
    """
    outputs = list(_checked_outputs(loss))
    if not outputs or loss.dim() > 0:
        return
    edges = [torch.autograd.graph.GradientEdge(node, 0) for node, _ in outputs]
    records = outputs[0][1]
    with torch.enable_grad():
        try:
            gradients = torch.autograd.grad(loss, edges, create_graph=True, allow_unused=True)
            for bit in range((records - 1).bit_length()):
                half = (torch.arange(records) >> bit) % 2 == 1
                if _depends(gradients, edges, half):
                    raise InputError(
                        f"the loss of a record depends on the outputs of others in its batch of {records}; use a mean "
                        "of the records' own losses, without contrasts, ranks or statistics over the batch"
                    )
        except RuntimeError:  # not differentiable twice
            return


def _depends(gradients: Sequence[torch.Tensor | None], edges: Sequence[Any], half: torch.Tensor) -> bool:
    """Return whether the output gradients of the records in `half` depend on the outputs of the others."""
    probes = []
    for each in gradients:
        if each is not None and each.requires_grad:
            weights = torch.linspace(0.5, 1.5, each.numel(), dtype=each.dtype, device=each.device)  # arbitrary
            probes.append((each * weights.reshape(each.shape))[half.to(each.device)].sum())
    if not probes:
        return False
    derivatives = torch.autograd.grad(sum(probes), edges, retain_graph=True, allow_unused=True)  # type: ignore[arg-type]
    for each in derivatives:
        if each is not None:
            own, other = (float(each[rows.to(each.device)].abs().max()) for rows in (half, ~half))
            if other > 1e-6 * own:  # False for NaN
                return True
    return False


def _checked_outputs(loss: torch.Tensor) -> Iterator[tuple[Any, int]]:
    """Yield the nodes of the model's outputs in the graph of a loss, and their numbers of records."""
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if RECORDS_KEY in node.metadata:
            yield node, node.metadata[RECORDS_KEY]
            continue
        if node.name().startswith("NllLoss") and node._saved_reduction == 1 and node._saved_weight is not None:
            raise InputError(
                "the loss divides by the sum of the class weights of a batch, so that records change each other's "
                "weight; use reduction='sum' with these weights, and divide by the number of records"
            )
        waiting += [each for each, _ in node.next_functions]


# At the first step.


def check_sums(
    parameters: Mapping[str, Parameter], plain: Mapping[Parameter, torch.Tensor], spread: Mapping[Parameter, float]
) -> None:
    """Check that the sum of the records' gradients is what the backward pass added to `Parameter.grad`.

    Args:
        parameters: all trainable parameters by name.
        plain: the sum of the records' gradients, not clipped.
        spread: the sum of their norms.

    Raises:
        InputError: a parameter has another gradient.
    """
    for name, parameter in parameters.items():
        total = plain.get(parameter, torch.zeros(1, dtype=torch.float64)).reshape(-1).cpu()
        actual = torch.zeros(parameter.numel()) if parameter.grad is None else parameter.grad.detach().reshape(-1).cpu()
        difference = float(torch.linalg.vector_norm(actual.double() - total))
        if difference > SUM_TOLERANCE * spread.get(parameter, 0.0):  # False for NaN
            raise InputError(
                f"the gradient of parameter {name} differs by {difference:.2g} from the sum over its records: the "
                "parameter is used outside of its module's forward pass, the module draws random numbers, or gradients "
                "were changed or not cleared. Call the modules, and zero_grad() before the first backward"
            )
