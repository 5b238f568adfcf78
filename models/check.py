"""Check the model of views, pending reveals and keys with Spin: `make model`.

Every run is an exhaustive search within its bounds. The invariants must hold in the runs of the protocol, and must fail
in most of those without a rule. The output of a run, with the trail to a violation, is in build/model/.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODEL = Path(__file__).parent / "views.pml"
OUT = ROOT / "build" / "model"
TOOLS = ("spin", "gcc")
MEGABYTES = 4000
DEPTH = 100_000
TIMEOUT_SECONDS = 600

HOLDS = "no violation"
ONE_TOTAL = "invariant 1 fails"
ONE_GROUP = "invariant 2 fails"
REACHED = "reached"


@dataclass(frozen=True)
class Run:
    """One run of Spin.

    Attributes:
        name: the name of the run.
        description: the setting, or the removed rule.
        switches: the switches of the model.
        expected: the expected outcome.
        long: whether it takes more than a few seconds.
    """

    name: str
    description: str
    switches: str
    expected: str
    long: bool = False


JOINS_AND_LEAVES = "N=3 KILLS=0 FIRST=3 SECOND=7 THIRD=3"
RUNS = (
    Run("two", "two honest members", "KILLS=1 WIPES=1", HOLDS),
    Run("two-long", "two honest members, four views", "VIEWS=4 KILLS=1 WIPES=1", HOLDS, long=True),
    Run("three", "three honest members", "N=3 KILLS=1 WIPES=1", HOLDS, long=True),
    Run("removed", "one of three is removed, and comes back", "N=3 KILLS=0 FIRST=7 SECOND=3 THIRD=7", HOLDS, long=True),
    Run("removed-killed", "one of three is removed; one is killed", "N=3 KILLS=1 FIRST=7 SECOND=3", HOLDS, long=True),
    Run("joins", "a new one joins two, and leaves again", f"{JOINS_AND_LEAVES} NEW=4", HOLDS, long=True),
    Run("joins-first", "the same, and the sum is the first one", f"{JOINS_AND_LEAVES} PLACE=0", HOLDS, long=True),
    Run("returns", "one comes back to two, and leaves again", JOINS_AND_LEAVES, HOLDS, long=True),
    Run("replaced", "one is replaced by another, and comes back", "N=3 KILLS=0 FIRST=5 SECOND=6 THIRD=5", HOLDS),
    Run("no-wedge", "no pending reveal objects forever to a finished sum", "WEDGE KILLS=1 WIPES=1", HOLDS),
    Run(
        "removed-wedge",
        "one does after a removal",
        "N=3 KILLS=0 FIRST=7 SECOND=3 THIRD=7 WEDGE",
        REACHED,
        long=True,
    ),
    Run("finishes", "a sum is finished by all", "REACH VIEWS=1 KILLS=0", REACHED),
    Run("takes-over", "a sum is transferred", "REACH_TAKEOVER", REACHED),
    Run(
        "guest-takes",
        "a sum is transferred to a member that did not take part",
        f"REACH_GUEST {JOINS_AND_LEAVES}",
        REACHED,
    ),
    Run("runs-again", "a sum is finished after the adversary revealed an earlier attempt", "REACH_RERUN", REACHED),
    Run("finding2", "claims are accepted without proof", "FINDING2", ONE_TOTAL),
    Run("late-takeover", "a sum is transferred that no first report claimed", "LATE_TAKEOVER", ONE_TOTAL),
    Run(
        "guest-new",
        "a new member accepts a sum that others may repeat",
        f"{JOINS_AND_LEAVES} NEW=4 GUEST_TAKEOVER",
        ONE_TOTAL,
    ),
    Run("guest-returns", "a former member accepts such a sum", f"{JOINS_AND_LEAVES} GUEST_TAKEOVER", ONE_TOTAL),
    Run("later-epoch", "a sum of a later epoch is transferred", f"{JOINS_AND_LEAVES} LATER_EPOCH", ONE_TOTAL),
    Run(
        "no-mark-members",
        "a pending reveal does not restrict the members",
        "N=3 KILLS=0 FIRST=7 SECOND=3 NO_MARK_MEMBERS",
        ONE_GROUP,
    ),
    Run("no-marks", "others' pending reveals are ignored", "NO_MARK_COMPARISON GUEST_TAKEOVER WIPES=1", ONE_TOTAL),
    Run("no-comparison", "others' pending reveals of other attempts are ignored", "NO_MARK_COMPARISON WIPES=1", HOLDS),
    Run("comparison-wedge", "the same: a pending reveal objects forever", "NO_MARK_COMPARISON WEDGE", REACHED),
    Run(
        "no-own",
        "the own pending reveal of another attempt is ignored, too",
        "NO_MARK_COMPARISON NO_OWN_COMPARISON VIEWS=4 WIPES=1",
        HOLDS,
        long=True,
    ),
    Run("no-gathered", "reports may differ and be old", "NO_GATHERED VIEWS=4 WIPES=1", HOLDS, long=True),
    Run("gathered-wedge", "the same: a pending reveal objects forever", "NO_GATHERED WEDGE", REACHED),
    Run("all-lose-total", "all members that took part lose their state", "KILLS=0 WIPES=2", ONE_TOTAL),
    Run("all-lose-group", "the same, and one is removed", "N=3 KILLS=0 WIPES=2 FIRST=7 SECOND=3", ONE_GROUP),
)


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        outcome: one of the outcomes above, or the failure.
        states: the number of visited states.
        depth: the length of the longest path.
        megabytes: the memory used.
        seconds: the run time, without compilation.
    """

    outcome: str
    states: int = 0
    depth: int = 0
    megabytes: int = 0
    seconds: float = 0.0


def missing_tools() -> list[str]:
    """Return the required programs that are not installed."""
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def execute(run: Run, out: Path = OUT) -> Result:
    """Compile and run the verifier of a run."""
    folder = out / run.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(MODEL, folder)
    try:
        _call(folder, "spin", *(f"-D{switch}" for switch in run.switches.split()), "-a", MODEL.name)
        _call(folder, "gcc", "-O2", "-w", "-DSAFETY", "-DCOLLAPSE", f"-DMEMLIM={MEGABYTES}", "-o", "pan", "pan.c")
        began = time.monotonic()
        text = _call(folder, "./pan", f"-m{DEPTH}", "-n", "-E")
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        return Result(f"failed: {error}")
    (folder / "pan.txt").write_text(text)
    return _read(text, time.monotonic() - began)


def _call(folder: Path, *command: str) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=TIMEOUT_SECONDS,
    )
    return done.stdout


def _read(text: str, seconds: float) -> Result:
    def number(pattern: str) -> float:
        found = re.search(pattern, text)
        return float(found[1]) if found else 0.0

    violated = re.search(r"assertion violated (.*)", text)
    if violated is not None:
        outcome = REACHED
        if "members!=" in violated[1]:
            outcome = ONE_GROUP
        elif re.search(r"done\[\d\]!=done\[\d\]", violated[1]):
            outcome = ONE_TOTAL
    elif "errors: 0" not in text or re.search(r"max search depth too small|Search not completed|out of memory", text):
        outcome = "failed: the search is not complete"
    else:
        outcome = HOLDS
    states, depth = number(r"(\S+) states, stored"), number(r"depth reached (\d+)")
    return Result(outcome, int(states), int(depth), round(number(r"(\S+)\s+total actual memory usage")), seconds)


def main() -> int:
    """Execute all runs, print a table, and return 1 if an outcome is unexpected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="skip the runs that take more than a few seconds")
    quick = parser.parse_args().quick
    if missing := missing_tools():
        print(f"{' and '.join(missing)} not found; on Debian and Ubuntu: apt-get install spin gcc", file=sys.stderr)
        return 2
    print(f"{'run':<18}{'states':>10}{'depth':>7}{'MB':>6}{'s':>7}  {'outcome':<17}  description")
    unexpected = 0
    for run in RUNS:
        if quick and run.long:
            continue
        found = execute(run)
        verdict = found.outcome
        if verdict != run.expected:
            unexpected += 1
            verdict = f"{verdict} (expected: {run.expected})"
        figures = f"{found.states:>10,}{found.depth:>7}{found.megabytes:>6}{found.seconds:>7.1f}"
        print(f"{run.name:<18}{figures}  {verdict:<17}  {run.description}", flush=True)
    if unexpected:
        print(f"{unexpected} runs have an unexpected outcome; see {OUT}", file=sys.stderr)
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
