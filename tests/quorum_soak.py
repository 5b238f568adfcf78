"""Stop, kill and cut off members of five processes with a quorum of four at random: `make quorum-soak`.

At the end all five must have the same displacement. It shows for how long the others waited: the time until each of
them has taken three more steps, in units of the patience of the federation file.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])

from cgd.federation.absence_section import MIN_PATIENCE  # noqa: E402
from support.cut_proxy import CutProxy  # noqa: E402
from support.federations import NAMES  # noqa: E402
from support.quorum_processes import FAULTS, QuorumProcesses  # noqa: E402


def main() -> None:
    """Disturb a training with a quorum, and compare the displacements of all members at its end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=19)
    arguments = parser.parse_args()
    rng, waits = random.Random(arguments.seed), {kind: list[float]() for kind in FAULTS}
    with tempfile.TemporaryDirectory() as folder:
        federation = QuorumProcesses(Path(folder), quorum=4)
        try:
            with CutProxy(federation.ports) as proxy:
                for name in NAMES:
                    federation.run(name)
                federation.advance(NAMES, 2)
                for number in range(arguments.faults):
                    kind = FAULTS[number % len(FAULTS)]
                    waits[kind].append(federation.fail_and_repair(kind, rng, proxy) / MIN_PATIENCE)
                    print(f"fault {number + 1}: {kind}, the others waited {waits[kind][-1]:.2f}", flush=True)
                steps = min(federation.step(name) for name in NAMES)
                federation.finish()
        finally:
            federation.close()
    for kind, found in waits.items():
        if found:
            median, largest = statistics.median(found), max(found)
            print(f"{kind}: {len(found)} times; in units of the patience, median {median:.2f}, largest {largest:.2f}")
    print(f"all five have the same displacement after at least {steps} steps")


if __name__ == "__main__":
    main()
