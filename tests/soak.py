"""Five processes train while they are killed, stopped and lose their state at random: `make soak`.

In the end everybody must have the bits of an undisturbed run.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import runpy
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])

from cgd import local_peers  # noqa: E402
from cgd.federation.keys import Keys  # noqa: E402
from support.federations import NAMES, ProcessFederation  # noqa: E402


def undisturbed(folder: Path, steps: int) -> str:
    """What the same participants, with the same keys, come to inside one process."""
    training = runpy.run_path(str(folder / "training.py"))

    def work(peers: Any) -> Any:
        peers.seed = Keys.load(folder / f"{peers.me}.key").federation_seed("trial")
        return training["train"](peers, steps=steps)[0]

    with local_peers(NAMES) as peers:
        digests = {hashlib.sha256(each.numpy().tobytes()).hexdigest() for each in peers.run(work)}
    (digest,) = digests
    return digest


def disturb(federation_of_processes: ProcessFederation, rng: random.Random) -> str:
    """Kill a participant, with or without its state, or stop it for a while; says which."""
    victim = rng.choice(NAMES)
    kind = rng.choice(["kill", "kill", "wipe", "stop"])
    if kind == "stop":
        federation_of_processes.processes[victim].send_signal(signal.SIGSTOP)
        time.sleep(rng.uniform(0, 1))
        federation_of_processes.processes[victim].send_signal(signal.SIGCONT)
    else:
        federation_of_processes.kill(victim, lose_state=kind == "wipe")
        federation_of_processes.start(victim, PAUSE="0.05", LOOP="steps")
    return kind


def main() -> None:
    """Disturb a training so many times, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--disturbances", type=int, default=150)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="cgd-soak-") as name:
        federation_of_processes = ProcessFederation(Path(name), steps=arguments.steps)
        try:
            federation_of_processes.start_all(PAUSE="0.05", LOOP="steps")
            while sum(counts.values()) < arguments.disturbances:
                time.sleep(rng.uniform(0, 2))
                if any(process.poll() is not None for process in federation_of_processes.processes.values()):
                    sys.exit(
                        f"somebody has ended after {counts}: give more --steps\n"
                        + federation_of_processes.said(NAMES[0])
                    )
                kind = disturb(federation_of_processes, rng)
                counts[kind] = counts.get(kind, 0) + 1
            codes = federation_of_processes.wait(seconds=1200)
            bits = set(federation_of_processes.bits().values())
        finally:
            federation_of_processes.close()
        expected = undisturbed(federation_of_processes.folder, arguments.steps)
        if set(codes.values()) != {0} or bits != {expected}:
            sys.exit(f"after {counts}: exit codes {codes}, bits {bits}, undisturbed {expected}")
    print(f"{sum(counts.values())} disturbances ({counts}), {arguments.steps} steps: the bits of an undisturbed run")


if __name__ == "__main__":
    main()
