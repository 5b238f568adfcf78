"""Run very many random schedules of the dishonest member: `make schedules`.

A schedule is given by its number, so one that violates an invariant can be repeated: `python tests/schedules.py --only
NUMBER`. The number of schedules run with the present code is in results/schedules.json, and the next call continues
there. `--quorum` runs those of federations with a quorum instead, whose members also come and go (results/
quorum-schedules.json).
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import re
import sys
import time
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from support.dishonest import Simulation  # noqa: E402
from support.ideal import ideal_cryptography  # noqa: E402
from support.observations import InvariantError  # noqa: E402
from support.quorum import QuorumSimulation  # noqa: E402

RESULTS = ROOT / "results"
BLOCK, QUORUM_BLOCK = 500, 20
# Shorter schedules finish more sums in the same time, longer ones have more restarts.
STEPS = (100, 100, 100, 100, 100, 100, 150, 300)
NAME = re.compile(r"\w+")
# Honest members and sums. Most schedules have two and one: the smallest setting in which all faults can occur.
SETTINGS = ((2, 1), (2, 1), (2, 2), (3, 1), (2, 1), (2, 2), (3, 2), (4, 1))
# Members, the quorum, and the dishonest members. Without any, all must have one history in the end.
QUORUM_SETTINGS = ((5, 4, ""), (5, 4, "c"), (5, 4, "cd"), (5, 3, ""), (4, 3, ""), (4, 3, "c"), (7, 5, ""), (7, 5, "cd"))
QUORUM_STEPS = 1500


def run_with_quorum(number: int) -> str | None:
    """Run one schedule of a federation with a quorum; return the violated invariant, if any."""
    count, quorum, dishonest = QUORUM_SETTINGS[number % len(QUORUM_SETTINGS)]
    simulation = QuorumSimulation(number, count, quorum, dishonest=dishonest)
    try:
        simulation.run(QUORUM_STEPS)
        if not dishonest:
            simulation.settle()
            for me, program in simulation.programs.items():
                if program.stopped is not None:
                    raise InvariantError(f"{me} has stopped: {program.stopped}")
    except InvariantError as error:
        return f"schedule {number}: {error}"
    return None


def run(number: int) -> str | None:
    """Run one schedule; return the violated invariant, if any."""
    honest, sums = SETTINGS[number % len(SETTINGS)]
    steps = STEPS[number // len(SETTINGS) % len(STEPS)]
    try:
        Simulation(number, honest, sums).run(steps)
    except InvariantError as error:
        return f"schedule {number}: {error}"
    return None


def run_block(start: int) -> list[str]:
    """Run a block of schedules."""
    with ideal_cryptography():
        return [violation for number in range(start, start + BLOCK) if (violation := run(number)) is not None]


def run_quorum_block(start: int) -> list[str]:
    """Run a block of schedules with a quorum."""
    with ideal_cryptography():
        numbers = range(start, start + QUORUM_BLOCK)
        return [violation for number in numbers if (violation := run_with_quorum(number)) is not None]


def code_digest() -> str:
    """Return a digest of the code that the schedules run: all imported modules of this repository.

    Statements count, in which module they are does not; neither do docstrings, comments, imports, and exceptions that
    none of these modules names. So the count of schedules survives a change of prose, or a move of a class to another
    module, and no change of behaviour.
    """
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    paths = [Path(file) for file in files if file and Path(file).is_relative_to(ROOT)]
    paths = [path for path in paths if path.name != "__init__.py"]  # the public names of the package
    sources = {path: path.read_text() for path in paths if ".venv" not in path.parts}
    used = {name for path, source in sources.items() if path.name != "errors.py" for name in NAME.findall(source)}
    statements = {
        text
        for path, source in sources.items()
        for text in statements_of(source, used if path.name == "errors.py" else None)
    }
    return sha256("\n".join(sorted(statements)).encode()).hexdigest()


def statements_of(source: str, used: set[str] | None = None) -> list[str]:
    """Return the top-level statements of a module, without docstrings, comments, imports and classes not `used`."""
    module = ast.parse(source)
    if used is not None:
        module.body = [each for each in module.body if not isinstance(each, ast.ClassDef) or each.name in used]
    for node in ast.walk(module):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if _runs(each)] or [ast.Pass()]  # type: ignore[attr-defined]
    return [ast.unparse(statement) for statement in module.body]


def _runs(statement: ast.stmt) -> bool:
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return False
        case ast.Expr(value=ast.Constant(value=str())):
            return False
    return True


def main() -> None:
    """Run the schedules that are missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, help="default: a million, or 10,000 with --quorum")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", type=int)
    parser.add_argument("--quorum", action="store_true")
    arguments = parser.parse_args()
    if arguments.only is not None:
        with ideal_cryptography():
            sys.exit((run_with_quorum if arguments.quorum else run)(arguments.only))
    name, block, count = ("quorum-schedules", QUORUM_BLOCK, 10_000) if arguments.quorum else ("schedules", BLOCK, 10**6)
    count, path, code = arguments.count or count, RESULTS / f"{name}.json", code_digest()
    done = json.loads(path.read_text()).get(code, 0) if path.exists() else 0
    started = time.monotonic()
    RESULTS.mkdir(exist_ok=True)
    with multiprocessing.Pool(arguments.processes) as pool:
        results = pool.imap(run_quorum_block if arguments.quorum else run_block, range(done, count, block))
        for blocks, violations in enumerate(results, start=1):
            if violations:
                sys.exit("\n".join(violations))
            path.write_text(json.dumps({code: done + blocks * block}) + "\n")
            if blocks % 20 == 0:
                rate = blocks * block / (time.monotonic() - started)
                print(f"{done + blocks * block:,} schedules, no invariant violated ({rate:.1f} a second)", flush=True)
    print(f"{max(done, count):,} schedules, no invariant violated")


if __name__ == "__main__":
    main()
