"""Arrays and tensors in and out of a sum."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from cgd.errors import InputError

if TYPE_CHECKING:
    import numpy.typing as npt


def to_numpy(values: object) -> tuple[npt.NDArray[Any], str]:
    """The values as an array, and the name of the type in which their total comes back."""
    torch = sys.modules.get("torch")  # whoever holds a tensor has imported it; this layer need not
    if torch is not None and isinstance(values, torch.Tensor):
        dtype = str(values.dtype).removeprefix("torch.")
        try:
            tensor = values.detach().cpu()
            array = (tensor.float() if dtype == "bfloat16" else tensor).numpy()
        except (TypeError, RuntimeError) as error:  # sparse, meta, …: torch says which
            raise InputError(f"a tensor of {values.layout} {values.dtype} cannot be summed: {error}") from None
    elif isinstance(values, np.ndarray):
        array, dtype = values, values.dtype.name
    else:
        raise InputError(f"sum takes a numpy array or a torch tensor, not {type(values).__name__}; wrap it in one")
    if array.size == 0:
        raise InputError(f"an array of shape {array.shape} is empty; there is nothing to sum")
    if array.dtype.kind in "iub":
        return array, "int64"
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        raise InputError(f"values of type {dtype} cannot be summed; use floats of up to 64 bits, or integers")
    return array, dtype


def decoded_type(dtype: str) -> npt.DTypeLike:
    """The array type in which a total of this type is decoded."""
    return np.float32 if dtype == "bfloat16" else np.dtype(dtype)


def from_numpy(array: npt.NDArray[Any], like: Any) -> Any:
    """The array as whatever `like` is: an array, or a tensor on its device."""
    if isinstance(like, np.ndarray):
        return array
    torch = sys.modules["torch"]
    tensor = torch.from_numpy(array).to(like.device)
    return tensor.to(like.dtype) if like.is_floating_point() else tensor
