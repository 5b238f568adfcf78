"""Measure the structure of the package: `make structure`.

`python docs/structure.py walks` runs four programs and lists the modules of `cgd` whose functions each of them calls,
in the order of the first call. `modules` counts modules and lines, and lists the modules that at most one other module
imports. `all` does both. `coverage FILE` reads the output of `coverage json`. Each command prints tables, with the
figures of docs/structure-before.json for comparison; `--json FILE` also writes the figures to a file.

A module belongs to a walk if at least one of its functions is called, including functions that `dataclass` generates.
Code that runs while a module is imported does not count. The walks use public names and commands only, so that they can
be compared across changes of the implementation.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from types import FrameType

    from cgd import Peers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))  # tests load this file by its path
from ports import free_ports  # noqa: E402

SOURCE = ROOT / "src" / "cgd"
KEPT = ROOT / "docs" / "structure-before.json"
LONG = 400  # lines; longer modules are listed
NAMES = ("hospital-a", "hospital-b", "hospital-c")  # the names of the tables that `cgd sample` writes
STEPS = 20  # recorded steps; a module counts if every step calls one of its functions
TRAINING_STEPS = 20  # of the walk "record"
ATTACKS = ("labels",)
SECONDS = 600  # timeout of one process

WALKS = {
    "process": "a gradient in one process: optimizer.step() of ConfinedSGD among local_peers",
    "network": "a gradient over ZeroMQ: optimizer.step() of ConfinedSGD among members that cgd.join connects",
    "record": "a record of a CSV file: cgd join --data, to the model and the report",
    "attack": f"an attack: cgd audit --only {' --only '.join(ATTACKS)}, to the page",
}
COUNTED = ("modules", "lines", "lines of __init__")  # figures of a package
COVERED = (("covered_lines", "num_statements"), ("covered_branches", "num_branches"))
Figures = dict[str, Any]


class StructureError(Exception):
    """A measured program failed, or a source file cannot be analysed."""


class CallRecorder:
    """Record the modules of the package whose functions are called, in this thread and in threads started later.

    Args:
        log: a file to which the path of each module is appended at its first call; None for no file.
    """

    def __init__(self, log: Path | None = None) -> None:
        self._log = None if log is None else os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._entered: dict[str, None] = {}
        self._known: set[object] = set()  # names of modules that are recorded already, or not part of the package
        self._on = False

    def install(self) -> None:
        """Install the profiler in this thread and in all later threads.

        `threading.setprofile_all_threads` needs Python 3.12.
        """
        sys.setprofile(self._called)
        threading.setprofile(self._called)

    def begin(self) -> None:
        """Delete the recorded modules and start recording."""
        self._entered, self._known, self._on = {}, set(), True

    def end(self) -> list[str]:
        """Stop recording, and return the recorded files in the order of their first calls."""
        self._on = False
        return [relative(file) for file in self._entered]

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        if not self._on or event != "call":
            return
        name = frame.f_globals.get("__name__")
        if name in self._known:
            return
        if not _in_package(name):
            self._known.add(name)
        elif frame.f_code.co_flags & inspect.CO_OPTIMIZED and not _importing(frame):  # not a module body
            self._known.add(name)
            file = frame.f_globals["__file__"]
            self._entered[file] = None
            if self._log is not None:
                os.write(self._log, f"{file}\n".encode())


def _in_package(name: object) -> bool:
    return isinstance(name, str) and (name == "cgd" or name.startswith("cgd."))


def _importing(frame: FrameType | None) -> bool:
    """Return whether this call happens while a module of the package is imported."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and _in_package(frame.f_globals.get("__name__")):
            return True
        frame = frame.f_back
    return False


def relative(file: str | os.PathLike[str]) -> str:
    """Return the path of a file relative to the package."""
    return Path(file).resolve().relative_to(SOURCE).as_posix()


def record_process(log: str) -> None:
    """Record this process from now on. A generated `sitecustomize.py` calls this function."""
    recorder = CallRecorder(Path(log))
    recorder.install()
    recorder.begin()


# The walks.


def walk(name: str) -> list[str]:
    """Return the files of one walk, in the order of their first calls.

    Raises:
        StructureError: one of its commands failed.
    """
    with tempfile.TemporaryDirectory(prefix="cgd-structure-") as temporary:
        folder = Path(temporary)
        if name == "record":
            return _record(folder)
        if name == "attack":
            chosen = [word for attack in ATTACKS for word in ("--only", attack)]
            return _traced(folder, ["audit", *chosen, "--jobs", "1"])
        with _started(folder, "steps", [str(Path(__file__).resolve()), "steps", name, "steps.json"], {}) as process:
            _finish(folder, "steps", process)
        found: list[str] = json.loads((folder / "steps.json").read_text())
        return found


def _record(folder: Path) -> list[str]:
    """Train on small tables with one process per participant, and trace one of them."""
    _command(folder, "sample", "tables")
    (folder / "schema.toml").write_text(_command(folder, "schema", "tables/hospital-a.csv", "--label", "diagnosis"))
    federation(folder, "--schema", "schema.toml", "--steps", str(TRAINING_STEPS))
    joins = {name: ["join", "federation.toml", "--as", name, "--data", f"tables/{name}.csv"] for name in NAMES}
    first, second, third = NAMES
    with (
        _started(folder, second, ["-m", "cgd", *joins[second]], {}),
        _started(folder, third, ["-m", "cgd", *joins[third]], {}),
    ):
        return _traced(folder, joins[first])


def _traced(folder: Path, arguments: Sequence[str]) -> list[str]:
    """Run a command of `cgd`, and return the files that it and its child processes call."""
    site, log = folder / "site", folder / "entered.log"
    site.mkdir()
    (site / "sitecustomize.py").write_text(f"import structure\n\nstructure.record_process({str(log)!r})\n")
    # The profiler does not see calls of compiled functions.
    more = {"PYTHONPATH": os.pathsep.join(map(str, (site, ROOT / "docs", ROOT / "src"))), "NUMBA_DISABLE_JIT": "1"}
    with _started(folder, "traced", ["-m", "cgd", *arguments], more) as process:
        _finish(folder, "traced", process)
    return [relative(file) for file in dict.fromkeys(log.read_text().splitlines())]


@contextmanager
def _started(
    folder: Path, name: str, arguments: Sequence[str], more: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run Python in a folder with the package of this tree; kill the process at the end if it is still running."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **more}
    with (folder / f"{name}.out").open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - our own command
            [sys.executable, *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _finish(folder: Path, name: str, process: subprocess.Popen[bytes]) -> None:
    try:
        code = process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        code = -1
    if code:
        output = "\n".join(f"--- {file.name}\n{file.read_text()}" for file in sorted(folder.glob("*.out")))
        raise StructureError(f"{name} ended with {code}, or not at all:\n{output}")


def _command(folder: Path, *arguments: str) -> str:
    """Run a command of `cgd`, and return its output."""
    with _started(folder, "command", ["-m", "cgd", *arguments], {}) as process:
        _finish(folder, "command", process)
    return (folder / "command.out").read_text()


def federation(folder: Path, *options: str) -> None:
    """Write a federation file with loopback addresses, and the key files of its participants."""
    listed = []
    for name, port in zip(NAMES, free_ports(len(NAMES)), strict=True):
        _command(folder, "keygen", name)
        listed += ["--participant", f"{name}=tcp://127.0.0.1:{port}={name}.pub"]
    _command(folder, "federation", "new", "federation.toml", *options, *listed)


def steps(name: str) -> list[str]:
    """Return the files that every step of an optimiser calls after the first step, in all threads of all participants.

    Periodic work, such as checking the federation file every second, is not part of every step and does not count.
    """
    recorder = CallRecorder()
    recorder.install()  # before any thread starts
    import cgd

    if name == "process":
        return _common(_train(recorder, cgd.local_peers(NAMES)))
    federation(Path())
    return _common(_train(recorder, [cgd.join("federation.toml", each) for each in NAMES]))


def _train(recorder: CallRecorder, members: Sequence[Peers]) -> list[list[str]]:
    """Return the files that each step calls, between two barriers of all members."""
    import torch

    import cgd

    rounds: list[list[str]] = []
    begin = threading.Barrier(len(members), recorder.begin)
    end = threading.Barrier(len(members), lambda: rounds.append(recorder.end()))

    def train(peers: Peers) -> None:
        with cgd.public_seed(0):
            model = torch.nn.Linear(2, 1)
        x = torch.randn(50, 2)
        try:
            with peers:
                cgd.confine(model, delta=0.1, seed=peers.seed)
                optimizer = cgd.ConfinedSGD(model.parameters(), lr=0.1, peers=peers, samples=len(x))
                for _ in range(1 + STEPS):
                    optimizer.zero_grad()
                    torch.nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True)).backward()
                    begin.wait()
                    optimizer.step()
                    end.wait()
        except BaseException:
            begin.abort()
            end.abort()
            raise

    with ThreadPoolExecutor(len(members)) as threads:
        for future in [threads.submit(train, peers) for peers in members]:
            future.result()
    return rounds[1:]


def _common(rounds: Sequence[Sequence[str]]) -> list[str]:
    count = Counter(file for entered in rounds for file in entered)
    return [file for file in count if count[file] == len(rounds)]  # in the order of their first calls


# Modules.


def modules() -> Figures:
    """Return the number of modules and lines of each package, and the lines and importers of each module."""
    files = sorted(SOURCE.rglob("*.py"))
    dotted = {_dotted(file): relative(file) for file in files}
    every: dict[str, set[str]] = defaultdict(set)
    running: dict[str, set[str]] = defaultdict(set)
    lines = {}
    for file in files:
        text, here = file.read_text(encoding="utf-8"), relative(file)
        lines[here] = len(text.splitlines())
        # `cgd/__init__.py` declares its names for the type checker and imports them lazily, at first use.
        lazy = here == "__init__.py"
        for target, for_types in _imports(ast.parse(text), dotted):
            if dotted[target] != here:
                every[dotted[target]].add(here)
                if lazy or not for_types:
                    running[dotted[target]].add(here)
    own = [file for file in lines if not file.endswith("__init__.py")]
    return {
        "packages": {package: _package(package, own, lines) for package in sorted({_folder(file) for file in lines})},
        "modules": {
            file: {
                "lines": lines[file],
                "importers": sorted(every[file]),
                "importers at run time": sorted(running[file]),
            }
            for file in own
        },
    }


def _package(package: str, own: Sequence[str], lines: Mapping[str, int]) -> Figures:
    inside = [file for file in own if _folder(file) == package]
    init = "__init__.py" if package == "." else f"{package}/__init__.py"
    return {"modules": len(inside), "lines": sum(lines[file] for file in inside), "lines of __init__": lines[init]}


def _dotted(file: Path) -> str:
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _folder(file: str) -> str:
    return Path(file).parent.as_posix()


def _imports(node: ast.AST, known: Mapping[str, str], for_types: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield the modules of the package imported below a node, each with whether it is for type checking only."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, for_types) for alias in node.names if alias.name in known)
    elif isinstance(node, ast.ImportFrom):
        if node.level:
            raise StructureError(f"line {node.lineno}: relative imports are not supported; import from cgd")
        for alias in node.names:
            yield from (
                (name, for_types) for name in (f"{node.module}.{alias.name}", str(node.module)) if name in known
            )
    elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        for child in node.body:
            yield from _imports(child, known, True)
        for child in node.orelse:
            yield from _imports(child, known, for_types)
    else:
        for inner in ast.iter_child_nodes(node):
            yield from _imports(inner, known, for_types)


# Coverage.


def coverage(report: Path) -> Figures:
    """Return the covered lines and branches of each package from the output of `coverage json`."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for file, content in json.loads(report.read_text())["files"].items():
        for what in ("num_statements", "covered_lines", "num_branches", "covered_branches"):
            found[_folder(relative(ROOT / file))][what] += content["summary"][what]
    return {package: dict(found[package]) for package in sorted(found)}


# Tables.


def show_walks(walks: Mapping[str, Sequence[str]], before: Figures) -> None:
    """Print the files of each walk."""
    for name, files in walks.items():
        was = f" (before: {len(before['walks'][name])})" if name in before.get("walks", {}) else ""
        print(f"{name}: {len(files)} files{was}; {WALKS[name]}")
        print("".join(f"    {file}\n" for file in files))


def show_modules(found: Figures, before: Figures) -> None:
    """Print the packages, the modules that at most one other module imports, and the long modules."""
    then = before.get("modules", {"packages": {}, "modules": {}})
    names = [*found["packages"], *(each for each in then["packages"] if each not in found["packages"])]
    heads = ("package", "modules", "before", "lines", "before", "lines of __init__", "before")
    rows = []
    for name in names:
        new, old = found["packages"].get(name, {}), then["packages"].get(name, {})
        counts = ((new.get(what), old.get(what)) for what in COUNTED)
        rows.append([name, *("–" if each is None else f"{each:,}" for pair in counts for each in pair)])
    now, was = _summary(found), _summary(then)
    rows.append(["all", *(f"{each[what]:,}" if each else "–" for what in COUNTED for each in (now, was))])
    _table(heads, rows)
    figures = {
        "mean lines of a module": "mean",
        "modules imported by at most one module": "fewest",
        "the same, without imports for type checking": "fewest at run time",
        f"modules of more than {LONG} lines": "long",
    }
    _table(
        ("", "now", "before"), [[text, *(_number(each, key) for each in (now, was))] for text, key in figures.items()]
    )
    for text, key in list(figures.items())[1:]:
        print(f"{text}:")
        print("".join(f"    {file}\n" for file in now[key]) or "    none\n")


def _number(summary: Figures, key: str) -> str:
    if not summary:
        return "–"
    return f"{summary[key]:.0f}" if isinstance(summary[key], float) else str(len(summary[key]))


def _summary(found: Figures) -> Figures:
    packages, own = found["packages"].values(), found["modules"]
    if not own:
        return {}
    importable = {file: each for file, each in own.items() if file != "__main__.py"}
    return {what: sum(each[what] for each in packages) for what in COUNTED} | {
        "mean": sum(each["lines"] for each in own.values()) / len(own),
        "fewest": [file for file, each in importable.items() if len(each["importers"]) <= 1],
        "fewest at run time": [file for file, each in importable.items() if len(each["importers at run time"]) <= 1],
        "long": [file for file, each in own.items() if each["lines"] > LONG],
    }


def show_coverage(found: Figures, before: Figures) -> None:
    """Print the covered share of the lines and branches of each package."""
    then = before.get("coverage", {})
    both = [
        {**each, "all": dict(sum(map(Counter, each.values()), Counter()))} if each else {} for each in (found, then)
    ]
    rows = []
    for name in dict.fromkeys([*found, *then, "all"]):
        cells = [_part(each.get(name, {}), *what) for what in COVERED for each in both]
        rows.append([name, *cells])
    _table(("package", "lines", "before", "branches", "before"), rows)


def _part(counted: Mapping[str, int], covered: str, number: str) -> str:
    return f"{100 * counted.get(covered, 0) / counted[number]:.1f} %" if counted.get(number) else "–"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    lines = [heads, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *others in lines:
        cells = (each.rjust(width) for each, width in zip(others, widths[1:], strict=True))
        print("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    print()


def main() -> None:
    """Measure, print, and with `--json` write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("walks", "modules", "all", "coverage", "steps"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"walks: {', '.join(WALKS)} (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the figures to this file")
    options = parser.parse_args()
    if options.what == "steps":  # `walk` starts this in a process of its own
        name, file = options.names
        with redirect_stdout(sys.stderr):
            found = steps(name)
        Path(file).write_text(json.dumps(found))
        return
    before: Figures = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    figures: Figures = {}
    try:
        if options.what in ("walks", "all"):
            figures["walks"] = {name: walk(name) for name in options.names or WALKS}
            show_walks(figures["walks"], before)
        if options.what in ("modules", "all"):
            figures["modules"] = modules()
            show_modules(figures["modules"], before)
        if options.what == "coverage":
            figures["coverage"] = coverage(Path(options.names[0]))
            show_coverage(figures["coverage"], before)
    except StructureError as error:
        sys.exit(str(error))
    if options.json is not None:
        known = json.loads(options.json.read_text()) if options.json.exists() else {}
        about = {"python": platform.python_version()}
        options.json.write_text(json.dumps({**known, **about, **figures}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
