"""Remove each protection from the code, and check that its tests fail: `make mutations`.

A test that passes without the protection proves nothing. `mutations.toml` has the lines to change for each promise of
the threat model. The change is made in a copy of the package, and the tests run on that copy.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PASSED, FAILED, HUNG = 0, 1, -1  # the exit codes of pytest, and our own code for a test that does not end


@dataclass(frozen=True)
class Mutation:
    """A change that removes one protection.

    Attributes:
        promise: the promise of the threat model.
        what: a description of the change.
        file: the file to change.
        before: the text to replace; it occurs once.
        after: the new text.
        tests: the tests that must all fail.
    """

    promise: str
    what: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


def mutations() -> list[Mutation]:
    content = tomllib.loads((ROOT / "tests" / "mutations.toml").read_text())
    return [Mutation(**{**each, "tests": tuple(each["tests"])}) for each in content["mutation"]]


def run(test: str, package: Path) -> int:
    """Return the exit code of a test on a copy of the package."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
    environment = {**os.environ, "PYTHONPATH": str(package)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            return process.wait(timeout=300)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with its child processes
            return HUNG


def survives(mutation: Mutation) -> list[str]:
    """Return the tests that do not fail without the protection."""
    with tempfile.TemporaryDirectory(prefix="cgd-mutation-") as folder:
        package = Path(folder) / "src"
        shutil.copytree(ROOT / "src", package, ignore=shutil.ignore_patterns("__pycache__"))
        path = Path(folder) / mutation.file
        text = path.read_text()
        assert text.count(mutation.before) == 1, f"{mutation.file} has changed: {mutation.before!r}"
        path.write_text(text.replace(mutation.before, mutation.after))
        return [test for test in mutation.tests if run(test, package) != FAILED]


def main() -> None:
    chosen = [each for each in mutations() if len(sys.argv) < 2 or each.promise in sys.argv[1:]]
    whole = sorted({test for each in chosen for test in each.tests})
    broken = [test for test in whole if run(test, ROOT / "src") != PASSED]
    unnoticed = 0
    for each in chosen:
        missed = survives(each)
        unnoticed += bool(missed)
        tests = len(each.tests)
        verdict = f"NOT DETECTED by {', '.join(missed)}" if missed else f"detected by {tests} test{'s' * (tests > 1)}"
        print(f"{each.promise:4} {each.what}: {verdict}", flush=True)
    print(f"{len(chosen) - unnoticed} of {len(chosen)} mutations are detected; {len(broken)} tests fail without any")
    sys.exit(bool(unnoticed or broken))


if __name__ == "__main__":
    main()
