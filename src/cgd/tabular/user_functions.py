"""Functions that a user names as `MODULE:FUNCTION`."""

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
    """The function at `MODULE:FUNCTION`, from the current folder or what is installed.

    Args:
        place: where it is.
        what: how an error calls it, such as `--run`.
        arguments: what it will be called with, in words.

    Raises:
        InputError: there is none, it cannot be imported, or cannot be called so.
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
        print_users_part(error)
        raise InputError(f"module {module} cannot be imported: {error}") from None
    if not callable(function):
        raise InputError(f"module {module} has no function {name!r}; {what} is MODULE:FUNCTION")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        count = {1: "one argument", 2: "two arguments"}[len(arguments)]
        raise InputError(f"{place} is called with {count}, {' and '.join(arguments)}, and cannot be: {error}") from None
    except ValueError:  # of some functions Python does not know what they take
        pass
    return function  # type: ignore[no-any-return]


def check_named(found: str, named: str | None, file: Path) -> None:
    """Refuse a function that a file names and the user does not, before anything of it is imported.

    A folder of a run may come from somebody else, and whoever wrote it would choose what is run here.

    Args:
        found: what the file names; empty if it names none.
        named: what the user named, if anything.
        file: which file it is, for the message.

    Raises:
        InputError: the user named none, or another one.
    """
    if found == (named or ""):
        return
    if not found:
        raise InputError(f"{file} names no function, and {named!r} was named; leave --function (function=) out")
    if named is not None:
        raise InputError(f"{file} names the function {found!r}, and {named!r} was named; name that of the file")
    raise InputError(
        f"{file} names the function {found!r} for its network, and to use it, module {_origin(found)} would be "
        "imported and run; if you know what it does, name it: "
        f"--function {shlex.quote(found)}, or function={found!r} in Python"
    )


def _origin(place: str) -> str:
    """Tell which file a function is in, without importing anything."""
    top = place.partition(":")[0].partition(".")[0]
    spec = importlib.machinery.PathFinder.find_spec(top, [str(Path.cwd()), *sys.path]) if top else None
    where = "which is not here" if spec is None else spec.origin or ", ".join(spec.submodule_search_locations or ())
    return f"{top!r} ({where})"


def print_users_part(error: Exception) -> None:
    """The traceback from where the user's code begins."""
    trace = error.__traceback__
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


def _is_ours(filename: str) -> bool:
    here = Path(__file__).parent.parent
    ours = Path(filename).is_relative_to(here) or filename == importlib.__file__
    return ours or filename.startswith("<frozen importlib")
