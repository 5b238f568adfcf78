"""Optional dependencies: which packages need which extra of the distribution.

`local_peers`, `join` and the optimisers work with the base install. A package that needs more calls `require` when
it is imported, so that an error names the extra to install.
"""

from __future__ import annotations

from importlib.util import find_spec

from cgd.errors import MissingExtraError

# The modules that each extra provides, as in `[project.optional-dependencies]` of pyproject.toml.
EXTRAS = {
    "tables": ("jinja2", "msgspec", "pyarrow", "sklearn"),
    "simulate": ("matplotlib", "numba", "pooch", "sklearn", "threadpoolctl"),
    "audit": ("PIL", "scipy"),
    "psi": ("nacl",),
    "ray": ("grpc", "ray"),
    "xlsx": ("python_calamine",),
    "postgresql": ("adbc_driver_manager", "adbc_driver_postgresql"),
    "onnx": ("onnx",),
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow",),
}


def require(extra: str, purpose: str) -> None:
    """Raise an error that names the extra if one of its libraries is not installed.

    Args:
        extra: the name of the extra.
        purpose: what it is needed for, as the subject of a sentence.

    Raises:
        MissingExtraError: a library is missing.

    Examples:
        >>> require("tables", "training on tables")
    """
    missing = [module for module in EXTRAS[extra] if find_spec(module) is None]
    if missing:
        raise MissingExtraError(
            f"{purpose} needs {', '.join(missing)}, which is not installed; pip install 'cgd[{extra}]'", name=missing[0]
        )
