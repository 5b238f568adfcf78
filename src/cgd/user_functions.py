"""Import functions that a user names as `MODULE:FUNCTION`."""

from __future__ import annotations

import importlib
import importlib.machinery
import inspect
import shlex
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable


def load_function(place: str, what: str, arguments: tuple[str, ...]) -> Callable[..., Any]:
    """Import the function at `MODULE:FUNCTION`, from the current folder or an installed package.

    Args:
        place: the module and the function.
        what: the name of the option in messages, such as `--run`.
        arguments: the function's arguments, in words.

    Raises:
        InputError: it does not exist, cannot be imported, or does not take these arguments.
    """
    module, _, name = place.partition(":")
    if not module or not name:
        raise InputError(f"{what} is {place!r}; it is MODULE:FUNCTION, such as train:main for main in train.py")
    if module.endswith(".py"):
        raise InputError(f"{what} is {place!r}; name the module without .py: {module.removesuffix('.py')}:{name}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module), name, None)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module:
            raise InputError(f"there is no module {module!r} here or installed; {what} is MODULE:FUNCTION") from None
        print_user_traceback(error)
        raise InputError(f"module {module} cannot be imported: {error}") from None
    if not callable(function):
        raise InputError(f"module {module} has no function {name!r}; {what} is MODULE:FUNCTION")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        count = {1: "one argument", 2: "two arguments"}[len(arguments)]
        raise InputError(
            f"{place} is called with {count}, {' and '.join(arguments)}, and does not accept that: {error}"
        ) from None
    except ValueError:  # some built-in functions have no signature
        pass
    return function  # type: ignore[no-any-return]


def check_function_named(found: str, named: str | None, file: Path) -> None:
    """Raise InputError unless the user named the same function as a file, before anything is imported.

    A run's folder, or a federation file, may come from another person, who must not be able to choose the code that
    runs here.

    Args:
        found: the function in the file; empty if it has none.
        named: the function that the user named, if any.
        file: the file, for the message.

    Raises:
        InputError: the user named no function, or another one.
    """
    if found == (named or ""):
        return
    if not found:
        raise InputError(f"{file} names no function, but {named!r} was given; leave --function (function=) out")
    if named is not None:
        raise InputError(f"{file} names the function {found!r}, but {named!r} was given; give the function of the file")
    raise InputError(
        f"{file} names the function {found!r} for its network; using it imports and runs the module "
        f"{_origin(found)}. If you trust that module, name the function: "
        f"--function {shlex.quote(found)}, or function={found!r} in Python"
    )


def _origin(place: str) -> str:
    """Return the top module of a function and its file, without importing anything."""
    top = place.partition(":")[0].partition(".")[0]
    spec = importlib.machinery.PathFinder.find_spec(top, [str(Path.cwd()), *sys.path]) if top else None
    where = "not found here" if spec is None else spec.origin or ", ".join(spec.submodule_search_locations or ())
    return f"{top!r} ({where})"


def print_user_traceback(error: Exception) -> None:
    """Print the traceback from the first frame of the user's code."""
    trace = error.__traceback__
    while trace is not None and _is_own_code(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


def _is_own_code(filename: str) -> bool:
    package = Path(__file__).parent
    own = Path(filename).is_relative_to(package) or filename == importlib.__file__
    return own or filename.startswith("<frozen importlib")
