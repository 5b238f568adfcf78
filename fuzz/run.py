"""Fuzz frames, the membership machine and files, guided by coverage: `make fuzz`.

Every target runs for SECONDS seconds. It starts with the inputs in tests/corpus/TARGET, and saves inputs that reach new
code in build/fuzz/TARGET for the next run. An input that crashes a target is saved in build/fuzz/TARGET.crashes, and
`python fuzz/run.py --replay TARGET FILE` runs it again, without atheris.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import logging
import re
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "tests")]

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TARGETS = ("frames", "membership", "files")
CORPUS = ROOT / "tests" / "corpus"
FUZZ_FOLDER = ROOT / "build" / "fuzz"
STATISTICS = ROOT / "results" / "fuzz.json"
MAX_INPUT_BYTES = 1 << 16
MAX_GROWTH_MEGABYTES = 50
"""The largest increase of peak memory by one input."""
DICTIONARY = Path(__file__).parent / "words.dict"
LIMITS = (
    f"-dict={DICTIONARY}",
    f"-max_len={MAX_INPUT_BYTES}",
    "-rss_limit_mb=2048",
    "-timeout=20",
    "-print_final_stats=1",
)


class MemoryGrowthError(AssertionError):
    """One input used too much memory."""


def load(target: str) -> Callable[[bytes], None]:
    """Import a target; returns its `one_input`."""
    one_input: Callable[[bytes], None] = importlib.import_module(f"fuzz.{target}").one_input
    return one_input


def seeds(target: str) -> list[Path]:
    """List the files that a target starts with."""
    return sorted((CORPUS / target).iterdir())


def with_memory_limit(one_input: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """Return a function that also checks that an input does not use too much memory."""

    def run(data: bytes) -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        one_input(data)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
        if grown > MAX_GROWTH_MEGABYTES:
            raise MemoryGrowthError(f"an input of {len(data)} bytes used {grown} MB")

    return run


def fuzz_here(target: str, arguments: Sequence[str]) -> None:
    """Fuzz a target in this process, which exits afterwards."""
    import atheris

    with atheris.instrument_imports(include=["cgd"], exclude=["cgd.simulation"]):
        one_input = load(target)
    for seed in seeds(target):  # so that imports and caches do not count as memory growth
        one_input(seed.read_bytes())
    logging.getLogger("cgd.federation").setLevel(logging.ERROR)  # a warning is logged for every damaged journal
    atheris.Setup([sys.argv[0], *arguments], with_memory_limit(one_input))
    atheris.Fuzz()


def fuzz(target: str, seconds: int) -> list[Path]:
    """Fuzz a target in a separate process, print statistics, and return the inputs that crashed it."""
    corpus, crashes = FUZZ_FOLDER / target, FUZZ_FOLDER / f"{target}.crashes"
    corpus.mkdir(parents=True, exist_ok=True)
    crashes.mkdir(exist_ok=True)
    options = [f"-max_total_time={seconds}", f"-artifact_prefix={crashes}/", *LIMITS]
    command = [sys.executable, str(Path(__file__)), "--here", target, *options, str(corpus), str(CORPUS / target)]
    begun = time.monotonic()
    with (FUZZ_FOLDER / f"{target}.log").open("w+", errors="replace") as log:
        ended = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)
        log.seek(0)
        text = log.read()
    report(target, text, time.monotonic() - begun)
    found = [Path(name) for name in re.findall(r"Test unit written to (.+)$", text, re.M)]
    if ended.returncode and not found:
        sys.exit(f"{target}: the fuzzer ended with {ended.returncode}; see {FUZZ_FOLDER / f'{target}.log'}")
    return found


def report(target: str, log: str, seconds: float) -> None:
    """Print the statistics of a target, and add them to those of earlier runs."""
    coverage = [int(number) for number in re.findall(r"cov: (\d+)", log)] or [0]
    initial = re.search(r"INITED cov: (\d+)", log)
    executions = _stat(log, "number_of_executed_units") or max(map(int, re.findall(r"^#(\d+)", log, re.M)), default=0)
    statistics = json.loads(STATISTICS.read_text()) if STATISTICS.exists() else {}
    own = statistics.setdefault(target, {"seconds": 0, "executions": 0})
    own["seconds"] += round(seconds)
    own["executions"] += executions
    STATISTICS.write_text(json.dumps(statistics, indent=1) + "\n")
    new = coverage[-1] - int(initial[1]) if initial else 0
    print(
        f"{target}: {executions:,} executions in {seconds:.0f} s; coverage {coverage[-1]:,} ({new:+,}); "
        f"in all {own['executions']:,} executions in {own['seconds']:,} s; peak memory {_stat(log, 'peak_rss_mb')} MB",
        flush=True,
    )


def _stat(log: str, name: str) -> int:
    found = re.search(rf"stat::{name}:\s*(\d+)", log)
    return int(found[1]) if found else 0


def main() -> None:
    """Fuzz all targets, or run one input again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=TARGETS, metavar="TARGET", help=f"one of {', '.join(TARGETS)}")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--replay", nargs=2, metavar=("TARGET", "FILE"), help="run one input again")
    if sys.argv[1:2] == ["--here"]:
        fuzz_here(sys.argv[2], sys.argv[3:])
        return
    arguments = parser.parse_args()
    if arguments.replay:
        target, file = arguments.replay
        load(target)(Path(file).read_bytes())
        return
    if unknown := set(arguments.targets) - set(TARGETS):
        parser.error(f"there is no target {', '.join(sorted(unknown))}; choose from {', '.join(TARGETS)}")
    if importlib.util.find_spec("atheris") is None:
        sys.exit("atheris is not installed here; it is for Linux on x86-64, Python 3.11 to 3.13")
    with contextlib.suppress(KeyboardInterrupt):
        crashes = {target: fuzz(target, arguments.seconds) for target in arguments.targets}
        commands = [
            shlex.join([sys.executable, "fuzz/run.py", "--replay", target, str(file.relative_to(ROOT))])
            for target, files in crashes.items()
            for file in files
        ]
        if commands:
            sys.exit("\n".join(["An input crashes a target. Run it again with:", *commands]))


if __name__ == "__main__":
    main()
