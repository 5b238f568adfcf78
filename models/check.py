"""Check the model of views, marks and keys with Spin: `make model`.

Every run is an exhaustive search within its bounds. The laws must hold in the runs of the protocol, and must break in
most of those that take a rule away. What a run leaves behind, with the trail to a violation, is in build/model/.
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
ONE_TOTAL = "law 1 is broken"
ONE_GROUP = "law 2 is broken"
REACHED = "it happens"


@dataclass(frozen=True)
class Run:
    """One run of Spin.

    Attributes:
        name: of the run.
        what: of what, in words.
        switches: of the model.
        expected: its outcome.
        long: whether it takes more than a few seconds.
    """

    name: str
    what: str
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
    Run("no-wedge", "no mark speaks for ever against what another has finished", "WEDGE KILLS=1 WIPES=1", HOLDS),
    Run(
        "removed-wedge",
        "there is one after a removal",
        "N=3 KILLS=0 FIRST=7 SECOND=3 THIRD=7 WEDGE",
        REACHED,
        long=True,
    ),
    Run("finishes", "a sum is finished by all", "REACH VIEWS=1 KILLS=0", REACHED),
    Run("takes-over", "a sum is taken over", "REACH_TAKEOVER", REACHED),
    Run("guest-takes", "a sum is taken over by one that was no member", f"REACH_GUEST {JOINS_AND_LEAVES}", REACHED),
    Run("runs-again", "a sum is finished after an earlier attempt was opened by the liar", "REACH_RERUN", REACHED),
    Run("finding2", "claims are believed without proof", "FINDING2", ONE_TOTAL),
    Run("late-takeover", "a sum is taken over that nobody claimed at first", "LATE_TAKEOVER", ONE_TOTAL),
    Run(
        "guest-new",
        "a new one takes over what others may run again",
        f"{JOINS_AND_LEAVES} NEW=4 GUEST_TAKEOVER",
        ONE_TOTAL,
    ),
    Run("guest-returns", "one that was away takes over the same", f"{JOINS_AND_LEAVES} GUEST_TAKEOVER", ONE_TOTAL),
    Run("later-epoch", "a sum of a later epoch is taken over", f"{JOINS_AND_LEAVES} LATER_EPOCH", ONE_TOTAL),
    Run("no-mark-members", "a mark does not bind members", "N=3 KILLS=0 FIRST=7 SECOND=3 NO_MARK_MEMBERS", ONE_GROUP),
    Run("no-marks", "others' marks are ignored", "NO_MARK_COMPARISON GUEST_TAKEOVER WIPES=1", ONE_TOTAL),
    Run("no-comparison", "others' marks of other attempts are ignored", "NO_MARK_COMPARISON WIPES=1", HOLDS),
    Run("comparison-wedge", "the same: a mark speaks for ever", "NO_MARK_COMPARISON WEDGE", REACHED),
    Run(
        "no-own",
        "one's own mark of another attempt is ignored, too",
        "NO_MARK_COMPARISON NO_OWN_COMPARISON VIEWS=4 WIPES=1",
        HOLDS,
        long=True,
    ),
    Run("no-gathered", "reports may differ and be old", "NO_GATHERED VIEWS=4 WIPES=1", HOLDS, long=True),
    Run("gathered-wedge", "the same: a mark speaks for ever", "NO_GATHERED WEDGE", REACHED),
    Run("all-lose-total", "all who took part lose everything", "KILLS=0 WIPES=2", ONE_TOTAL),
    Run("all-lose-group", "the same, and one is removed", "N=3 KILLS=0 WIPES=2 FIRST=7 SECOND=3", ONE_GROUP),
)


@dataclass(frozen=True)
class Result:
    """What a run has found.

    Attributes:
        outcome: one of the words above, or what went wrong.
        states: how many different states were visited.
        depth: the longest path.
        megabytes: of memory.
        seconds: that it took, without making it.
    """

    outcome: str
    states: int = 0
    depth: int = 0
    megabytes: int = 0
    seconds: float = 0.0


def missing_tools() -> list[str]:
    """The programs that are needed and not here."""
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def execute(run: Run, out: Path = OUT) -> Result:
    """Make the verifier of a run and run it."""
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
    """Run all, print a table, and tell whether all is as expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave out the runs that take more than a few seconds")
    quick = parser.parse_args().quick
    if missing := missing_tools():
        print(f"{' and '.join(missing)} not found; on Debian and Ubuntu: apt-get install spin gcc", file=sys.stderr)
        return 2
    print(f"{'run':<18}{'states':>10}{'depth':>7}{'MB':>6}{'s':>7}  {'outcome':<17}  what")
    wrong = 0
    for run in RUNS:
        if quick and run.long:
            continue
        found = execute(run)
        verdict = found.outcome
        if verdict != run.expected:
            wrong += 1
            verdict = f"{verdict} (expected: {run.expected})"
        figures = f"{found.states:>10,}{found.depth:>7}{found.megabytes:>6}{found.seconds:>7.1f}"
        print(f"{run.name:<18}{figures}  {verdict:<17}  {run.what}", flush=True)
    if wrong:
        print(f"{wrong} not as expected; see {OUT}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
