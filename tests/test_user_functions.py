"""Functions that a user names as MODULE:FUNCTION: refused names, failing modules and readable tracebacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cgd.errors import InputError
from cgd.user_functions import load_function, print_user_traceback

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder; `sys.path` is restored after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("train", "--run is 'train'; it is MODULE:FUNCTION, such as train:main for main in train.py"),
        (":main", "it is MODULE:FUNCTION"),
        ("train:", "it is MODULE:FUNCTION"),
        ("train.py:main", "name the module without .py: train:main"),
        ("no_such_module_of_ours:main", "there is no module 'no_such_module_of_ours' here or installed"),
        ("json:no_such_function", "module json has no function 'no_such_function'"),
    ],
)
def test_name_that_is_not_a_function_is_refused_with_the_remedy(place: str, message: str, folder: Path) -> None:
    with pytest.raises(InputError) as caught:
        load_function(place, "--run", ("the peers",))
    assert message in str(caught.value)


def test_function_is_loaded_from_the_current_folder(folder: Path) -> None:
    (folder / "my_loaded_program.py").write_text("def main(peers):\n    return peers + 1\n")
    assert load_function("my_loaded_program:main", "--run", ("the peers",))(1) == 2


def test_function_with_other_arguments_is_refused(folder: Path) -> None:
    (folder / "my_eager_program.py").write_text("def main(peers, rate):\n    pass\n")
    with pytest.raises(InputError, match="called with one argument, the peers, .* missing a required argument: 'rate'"):
        load_function("my_eager_program:main", "--run", ("the peers",))


def test_built_in_function_without_a_signature_is_accepted(folder: Path) -> None:
    assert load_function("builtins:dir", "--run", ("the peers",)) is dir


def test_error_in_a_module_is_shown_from_the_first_line_of_the_module(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "my_failing_program.py").write_text("import no_such_library_of_ours\n")
    with pytest.raises(InputError, match="module my_failing_program cannot be imported: No module named"):
        load_function("my_failing_program:main", "--run", ("the peers",))
    shown = capsys.readouterr().err
    assert shown.count('File "') == 1
    assert f'File "{folder / "my_failing_program.py"}", line 1' in shown
    assert "ModuleNotFoundError: No module named 'no_such_library_of_ours'" in shown


def test_error_of_cgd_alone_is_shown_without_frames(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError) as caught:
        load_function("train", "--run", ("the peers",))
    caught.value.__traceback__ = caught.value.__traceback__ and caught.value.__traceback__.tb_next
    print_user_traceback(caught.value)
    shown = capsys.readouterr().err
    assert 'File "' not in shown
    assert "InputError: --run is 'train'" in shown
