"""Train in five processes that are killed, paused or lose their state at random: `make soak`.

All participants must end with the bits of an undisturbed run.
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
    """Return the digest of the same training, with the same keys, in one process."""
    training = runpy.run_path(str(folder / "training.py"))

    def work(peers: Any) -> Any:
        peers.seed = Keys.load(folder / f"{peers.me}.key").federation_seed("trial")
        return training["train"](peers, steps=steps)[0]

    with local_peers(NAMES) as members:
        digests = {hashlib.sha256(each.numpy().tobytes()).hexdigest() for each in members.run(work)}
    (digest,) = digests
    return digest


def disturb(federation: ProcessFederation, rng: random.Random) -> str:
    """Kill a participant, with or without its state, or pause it; return the kind of disturbance."""
    name = rng.choice(NAMES)
    kind = rng.choice(["kill", "kill", "wipe", "stop"])
    if kind == "stop":
        federation.processes[name].send_signal(signal.SIGSTOP)
        time.sleep(rng.uniform(0, 1))
        federation.processes[name].send_signal(signal.SIGCONT)
    else:
        federation.kill(name, lose_state=kind == "wipe")
        federation.start(name, PAUSE="0.05", LOOP="steps")
    return kind


def main() -> None:
    """Disturb a training run and compare its result with an undisturbed one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--disturbances", type=int, default=150)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="cgd-soak-") as name:
        federation = ProcessFederation(Path(name), steps=arguments.steps)
        try:
            federation.start_all(PAUSE="0.05", LOOP="steps")
            while sum(counts.values()) < arguments.disturbances:
                time.sleep(rng.uniform(0, 2))
                if any(process.poll() is not None for process in federation.processes.values()):
                    sys.exit(
                        f"a participant has finished after {counts}: give more --steps\n" + federation.output(NAMES[0])
                    )
                kind = disturb(federation, rng)
                counts[kind] = counts.get(kind, 0) + 1
            codes = federation.wait(seconds=1200)
            bits = set(federation.bits().values())
        finally:
            federation.close()
        expected = undisturbed(federation.folder, arguments.steps)
        if set(codes.values()) != {0} or bits != {expected}:
            sys.exit(f"after {counts}: exit codes {codes}, bits {bits}, undisturbed {expected}")
    print(f"{sum(counts.values())} disturbances ({counts}), {arguments.steps} steps: the bits of an undisturbed run")


if __name__ == "__main__":
    main()
