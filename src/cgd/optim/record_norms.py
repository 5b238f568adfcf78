"""Gradients of single records from the inputs of modules and the gradients of their outputs.

`RecordGradients` (`record_gradients.py`) keeps one `Use` for every call of a module with trainable parameters. After
the backward pass `clipped_sums` computes the norm of every record's gradient over all parameters together, and the sum
of the clipped gradients:

- A linear layer that is called once with one row per record: the gradient of a record is d·aᵀ, its norm ‖d‖·‖a‖. The
  sum is one matrix product with rescaled rows, and no record's gradient is stored.
- Every other module: `torch.func` differentiates the module's own forward pass for 64 records at a time. The last
  chunk is padded with zeros, so the shapes, and with them the order of operations, do not depend on the number of
  records. If a parameter is used several times, its gradients are added before the norm is computed.

Norms, factors and sums are in float64; the matrix product of linear layers is in the type of the model for 64 records
at a time, which takes two thirds of the time of float64. A record whose gradient is not finite counts as zero.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from cgd.errors import InputError
from cgd.optim.structures import leaves

if TYPE_CHECKING:
    import weakref
    from collections.abc import Iterable, Sequence

    from torch.nn import Parameter

CHUNK_RECORDS = 64
BLOCK_ROWS = 256
"""Rows of a linear layer that are converted at a time, so that they fit into the processor's cache."""
MAX_NORM = 1e15
"""A record with larger inputs or output gradients of a linear layer counts as zero: no product of the others overflows,
or is so small that rounding matters, in float32."""
MARGIN = 5e-4
"""Gradients are clipped to C·(1 − MARGIN), so that rounding does not let one record change the sum by more than C.

In a product of 64 records in float32 (u = 2⁻²⁴), in any order, each element is wrong by at most 64·u·Σ|terms|, hence
the block by at most 64·u·64·C. Another record in the block changes only this block, by C and at most two such errors:
2·64²·u = 4.9e-4. Blocks are added in float64. The records of one person, which have weights, may be in many blocks;
then products are in float64, too, and the errors of 10⁶ blocks are below 10⁻⁶·C."""


@dataclass(frozen=True, eq=False)
class Unit:
    """A module whose calls are recorded, with the trainable parameters that its forward pass reads by itself.

    Attributes:
        name: the module's name in the model, for messages.
        parameters: by the names that `torch.func.functional_call` needs.
        linear: True if the parameters are those of `nn.Linear`, and no other module has them.
    """

    name: str
    module: nn.Module
    parameters: dict[str, Parameter]
    linear: bool


@dataclass(eq=False)
class Use:
    """One call of a module.

    Attributes:
        inputs: the leaves of its arguments; tensors are detached, and still share memory with the originals.
        structure: how `inputs` form the arguments.
        gradients: those of the leaves of its output; None until the backward pass reaches them.
        versions: of the tensors in `inputs`, to notice that one was overwritten.
    """

    unit: Unit
    inputs: list[Any]
    structure: pytree.TreeSpec
    gradients: list[torch.Tensor | None]
    versions: list[int]

    @classmethod
    def of(cls, unit: Unit, args: Any, kwargs: Any, outputs: int) -> Use:
        """Return a call whose output has this number of leaves."""
        flat, structure = pytree.tree_flatten((args, kwargs))
        inputs = [each.detach() if isinstance(each, torch.Tensor) else each for each in flat]
        versions = [each._version for each in inputs if isinstance(each, torch.Tensor)]
        return cls(unit, inputs, structure, [None] * outputs, versions)


@dataclass(eq=False)
class Pass:
    """One call of the whole model.

    Attributes:
        records: their number.
        source: the tensor that holds them, unless the program has released it.
        version: that of `source`, which changes if it is overwritten.
        weights: by which each record's clipped gradient is multiplied; None: 1.
        uses: the calls of its modules.
        loss_checked: True if the loss that was computed from it was checked.
        settled: True if the gradients were added.
    """

    records: int
    source: weakref.ref[torch.Tensor]
    version: int
    weights: torch.Tensor | None = None
    uses: list[Use] = field(default_factory=list)
    loss_checked: bool = False
    settled: bool = False

    def settle(self) -> None:
        """Release all tensors. The program may keep the loss, and with it the graph and the hooks in the graph."""
        self.settled = True
        for use in self.uses:
            use.inputs, use.gradients = [], [None] * len(use.gradients)
        self.uses.clear()


@dataclass(frozen=True)
class PassSums:
    """The result of one pass.

    Attributes:
        clipped: the sum of clipped gradients, for each parameter a tensor of its shape in float64.
        plain: the sum of the gradients as the backward pass made them, not clipped; empty unless asked for.
        spread: the sum of the norms of the records' gradients, for each parameter; empty unless asked for.
        finite: True if no record was counted as zero.
    """

    clipped: dict[Parameter, torch.Tensor]
    plain: dict[Parameter, torch.Tensor]
    spread: dict[Parameter, float]
    finite: bool


@torch.no_grad()
def clipped_sums(finished: Pass, clip: float, scale: float, *, plain: bool) -> PassSums:
    """Return the sum of the clipped gradients of a pass.

    Args:
        finished: a pass whose gradients have all arrived.
        clip: C, the largest norm of a record's gradient in the sum.
        scale: the factor from the gradients of the pass to those of records: their number for a mean loss, else 1.
        plain: also return the sums without clipping, to compare them with `Parameter.grad`.

    Raises:
        InputError: the gradients of a module cannot be separated by records.
    """
    uses = [use for use in finished.uses if any(each is not None for each in use.gradients)]
    for use in uses:
        _check_use(use, finished.records)
    calls = Counter(use.unit for use in uses)
    linear = [use for use in uses if use.unit.linear and calls[use.unit] == 1 and use.inputs[0].dim() == 2]
    general = [use for use in uses if use not in linear]
    total = _Sums(finished.records, clip, scale, finished.weights, plain)
    for use in linear:
        total.add_norms(_linear_norms(use), 0)
    for start in range(0, finished.records, CHUNK_RECORDS):
        stop = min(start + CHUNK_RECORDS, finished.records)
        gradients: dict[Parameter, torch.Tensor] = {}
        for use in general:
            for parameter, each in _chunk_gradients(use, finished.records, start, stop):
                gradients[parameter] = gradients[parameter] + each if parameter in gradients else each
        norms = {key: torch.linalg.vector_norm(_float64(each), dim=1) for key, each in gradients.items()}
        total.add_norms(norms, start)
        for parameter, each in gradients.items():
            total.add_product(parameter, each, None, start, stop)
    for use in linear:
        for start in range(0, finished.records, BLOCK_ROWS):
            _add_linear(total, use, start, min(start + BLOCK_ROWS, finished.records))
    return total.result()


class _Sums:
    """Norms of all records of a pass, and weighted sums of their gradients for each parameter."""

    def __init__(self, records: int, clip: float, scale: float, weights: torch.Tensor | None, plain: bool) -> None:
        self._weights = weights
        self._squares = torch.zeros(records, dtype=torch.float64)
        self._bound, self._scale = clip * (1 - MARGIN), scale
        self._clipped: dict[Parameter, torch.Tensor] = {}
        self._unclipped: dict[Parameter, torch.Tensor] | None = {} if plain else None
        self._norms: list[tuple[Parameter, int, torch.Tensor]] = []

    def add_norms(self, norms: dict[Parameter, torch.Tensor], start: int) -> None:
        """Add the norms of some parameters' gradients, of records from `start` on."""
        for parameter, norm in norms.items():
            self._squares[start : start + len(norm)] += norm.cpu().square()
            if self._unclipped is not None:
                self._norms.append((parameter, start, norm.cpu()))

    def add_product(
        self, parameter: Parameter, left: torch.Tensor, right: torch.Tensor | None, start: int, stop: int
    ) -> None:
        """Add Σ factor·left·rightᵀ over records; their norms must be complete. Without `right`, Σ factor·left."""
        squares = self._squares[start:stop]
        finite = torch.isfinite(squares)
        left, right = _zero_rows(left, finite), None if right is None else _zero_rows(right, finite)
        # min(1, C/(scale·norm))·scale; C/0 is infinite, and the minimum is right.
        factors = torch.clamp(self._bound / squares.sqrt(), max=self._scale).where(finite, 0.0)
        if self._weights is not None:
            factors = factors * self._weights[start:stop]
            right = None if right is None else _float64(right)
        _add_weighted(self._clipped, parameter, left, right, factors)
        if self._unclipped is not None:
            _add_weighted(self._unclipped, parameter, left, right, torch.ones_like(factors))

    def result(self) -> PassSums:
        """Return what was added."""
        finite, spread = torch.isfinite(self._squares), dict[Any, float]()
        for parameter, start, norm in self._norms:
            own = norm[finite[start : start + len(norm)]]
            spread[parameter] = spread.get(parameter, 0.0) + float(own.sum())
        return PassSums(self._clipped, self._unclipped or {}, spread, bool(finite.all()))


def _add_weighted(
    sums: dict[Parameter, torch.Tensor],
    parameter: Parameter,
    left: torch.Tensor,
    right: torch.Tensor | None,
    weights: torch.Tensor,
) -> None:
    left, weights = _float64(left), weights.to(_float64_device(left))
    if parameter not in sums:
        sums[parameter] = torch.zeros(parameter.shape, dtype=torch.float64, device=left.device)
    total = sums[parameter]
    if right is None:
        total.view(-1).addmv_(left.T, weights)
        return
    left = left * weights[:, None]
    if left.device.type == "cpu" and _multiplies_exactly():
        left = left.to(right.dtype)
    else:
        right = _float64(right)
    product = torch.empty(total.shape, dtype=left.dtype, device=left.device)
    for x, y in zip(left.split(CHUNK_RECORDS), right.split(CHUNK_RECORDS), strict=True):
        total += torch.mm(x.T, y, out=product)


def _multiplies_exactly() -> bool:
    """Return whether products on the processor have all bits of float32. Some settings of torch reduce them."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # a setting that this function cannot express, such as torch.backends.fp32_precision
        return False


def _zero_rows(rows: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
    """Return rows with zeros for records that are not finite: a factor of zero would leave NaN."""
    return rows if bool(finite.all()) else rows.where(finite.to(rows.device)[:, None], 0.0)


def _linear_norms(use: Use) -> dict[Parameter, torch.Tensor]:
    """Return the norm of each record's gradient of the weight and the bias of a linear layer."""
    norms = [
        torch.cat([torch.linalg.vector_norm(_float64(block), dim=1) for block in each.split(BLOCK_ROWS)])
        for each in (use.inputs[0], *use.gradients)
        if each is not None
    ]
    usable = (norms[0] <= MAX_NORM) & (norms[1] <= MAX_NORM)  # False for NaN
    by_name = {"weight": norms[0] * norms[1], "bias": norms[1]}
    return {parameter: by_name[name].where(usable, torch.inf) for name, parameter in use.unit.parameters.items()}


def _add_linear(total: _Sums, use: Use, start: int, stop: int) -> None:
    for name, parameter in use.unit.parameters.items():
        for gradient in use.gradients:
            if gradient is not None:
                inputs = use.inputs[0][start:stop] if name == "weight" else None
                total.add_product(parameter, gradient[start:stop], inputs, start, stop)


def _chunk_gradients(use: Use, records: int, start: int, stop: int) -> Iterable[tuple[Parameter, torch.Tensor]]:
    """Return the gradients of records from `start` to `stop`, one row per record, for each parameter of a module."""
    module, names = use.unit.module, use.unit.parameters
    values = {name: parameter.detach() for name, parameter in names.items()}
    per_record = [has_records(each, records) for each in use.inputs]
    wanted = [each is not None for each in use.gradients]

    def forward(parameters: dict[str, torch.Tensor], rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs for one record, as a batch of one, that have gradients."""
        batches = iter(rows)
        inputs = [next(batches)[None] if own else each for each, own in zip(use.inputs, per_record, strict=True)]
        args, kwargs = pytree.tree_unflatten(inputs, use.structure)
        outputs = leaves(torch.func.functional_call(module, parameters, args, kwargs))
        return [leaf for leaf, keep in zip(outputs, wanted, strict=True) if keep]

    def gradients(rows: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        pullback = torch.func.vjp(lambda parameters: forward(parameters, rows), values)[1]
        return pullback([each[None] for each in cotangents])[0]  # type: ignore[no-any-return]

    def single(rows: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the same by autograd, which also differentiates nn.LSTM."""
        parameters = {name: each.clone().requires_grad_() for name, each in values.items()}
        with torch.enable_grad():
            outputs = forward(parameters, rows)
        found = torch.autograd.grad(
            outputs, list(parameters.values()), [each[None] for each in cotangents], materialize_grads=True
        )
        return dict(zip(parameters, found, strict=True))

    rows = [_chunk(each, start, stop) for each, own in zip(use.inputs, per_record, strict=True) if own]
    cotangents = [_chunk(each, start, stop) for each in use.gradients if each is not None]
    result = None
    if not isinstance(module, nn.RNNBase):  # vmap is not faster for these, and warns
        # Other kernels of attention have no rule for vmap, and other modules operations that it does not support.
        with sdpa_kernel(SDPBackend.MATH), suppress(RuntimeError):
            result = torch.func.vmap(gradients)(rows, cotangents)
    if result is None:
        singles = [single([x[i] for x in rows], [d[i] for d in cotangents]) for i in range(stop - start)]
        result = {name: torch.stack([each[name] for each in singles]) for name in names}
    return [(parameter, result[name][: stop - start].flatten(1)) for name, parameter in names.items()]


def _chunk(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    rows = tensor[start:stop]
    return torch.cat([rows, rows.new_zeros(CHUNK_RECORDS - len(rows), *rows.shape[1:])])


def has_records(value: object, records: int) -> bool:
    """Return whether an argument or output is a tensor whose first dimension is that of the records."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == records


def _check_use(use: Use, records: int) -> None:
    title = use.unit.name
    if not any(has_records(each, records) for each in use.inputs):
        shapes = [tuple(each.shape) for each in use.inputs if isinstance(each, torch.Tensor)]
        raise InputError(
            f"module {title} received inputs of shapes {shapes} for {records} records; the first dimension of an input "
            "must be the records, so that their gradients can be separated. Reshape or expand the input"
        )
    for gradient in use.gradients:
        if gradient is not None and not has_records(gradient, records):
            raise InputError(
                f"an output of module {title} has the shape {tuple(gradient.shape)} for {records} records; the first "
                "dimension must be the records. Of a recurrent network, use the output, not the last state"
            )
    tensors = [each for each in use.inputs if isinstance(each, torch.Tensor)]
    for each in (*tensors, *(gradient for gradient in use.gradients if gradient is not None)):
        if each.is_floating_point() and each.dtype not in (torch.float32, torch.float64):
            raise InputError(
                f"an input or gradient of module {title} is of type {each.dtype}; gradients of records need float32 or "
                "float64. Leave autocast out, also inside the model, and convert inputs with float()"
            )
    if [each._version for each in tensors] != use.versions:
        raise InputError(
            f"an input of module {title} was overwritten after the forward pass; use a new tensor for each batch"
        )


def _float64(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(_float64_device(tensor), torch.float64)


def _float64_device(tensor: torch.Tensor) -> torch.device:
    """Return the device of a tensor, or the processor if the device has no float64."""
    return torch.device("cpu") if tensor.device.type == "mps" else tensor.device
