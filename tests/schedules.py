"""Run very many random schedules of the dishonest member: `make schedules`.

Each is given by its number, so one that breaks a law can be run again: `python tests/schedules.py --only NUMBER`. How
far the numbers were run is kept in results/schedules.json for this state of the code, and the next call goes on from
there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from support.dishonest import LawBrokenError, World  # noqa: E402
from support.ideal import ideal_cryptography  # noqa: E402

KEPT = ROOT / "results" / "schedules.json"
BLOCK = 500
# Shorter schedules finish more sums in a minute of computing, longer ones have more restarts.
STEPS = (100, 100, 100, 100, 100, 100, 150, 300)
# Most schedules have two honest members and one sum, the smallest setting in which everything can go wrong.
SETTINGS = ((2, 1), (2, 1), (2, 2), (3, 1), (2, 1), (2, 2), (3, 2), (4, 1))


def run(number: int) -> str | None:
    """Run one schedule; returns which law it breaks, if it does."""
    honest, sums = SETTINGS[number % len(SETTINGS)]
    steps = STEPS[number // len(SETTINGS) % len(STEPS)]
    try:
        World(number, honest, sums).run(steps)
    except LawBrokenError as error:
        return f"schedule {number}: {error}"
    return None


def run_block(start: int) -> list[str]:
    """Run a block of schedules."""
    with ideal_cryptography():
        return [broken for number in range(start, start + BLOCK) if (broken := run(number)) is not None]


def state_of_the_code() -> str:
    """Digest everything of ours that a schedule depends on: what this program has loaded."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    digest = sha256()
    for path in sorted(Path(file) for file in files if file and Path(file).is_relative_to(ROOT)):
        if ".venv" not in path.parts:
            digest.update(path.read_bytes())
    return digest.hexdigest()


def main() -> None:
    """Run the schedules that are missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", type=int)
    arguments = parser.parse_args()
    if arguments.only is not None:
        with ideal_cryptography():
            sys.exit(run(arguments.only))
    code = state_of_the_code()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    done = kept.get(code, 0)
    begun = time.monotonic()
    KEPT.parent.mkdir(exist_ok=True)
    with multiprocessing.Pool(arguments.processes) as pool:
        for place, broken in enumerate(pool.imap(run_block, range(done, arguments.count, BLOCK)), start=1):
            if broken:
                sys.exit("\n".join(broken))
            KEPT.write_text(json.dumps({code: done + place * BLOCK}) + "\n")
            if place % 20 == 0:
                rate = place * BLOCK / (time.monotonic() - begun)
                print(f"{done + place * BLOCK:,} schedules, no law broken ({rate:.0f} a second)", flush=True)
    print(f"{max(done, arguments.count):,} schedules, no law broken")


if __name__ == "__main__":
    main()
