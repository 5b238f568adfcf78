"""Print the digests of the golden runs, or with --write put them into tests/golden.json: `python tests/golden.py`.

Write them anew only if results are meant to change, and say in the commit which ones and why.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])

import torch  # noqa: E402

from support.golden import KEPT, OF_PROCESSES, RUNS  # noqa: E402


def main() -> None:
    """Run everything, or what is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="rewrite tests/golden.json")
    parser.add_argument("names", nargs="*", metavar="RUN", help="only these runs (default: all)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    every = RUNS | OF_PROCESSES
    unknown = set(arguments.names) - every.keys()
    if unknown:
        parser.error(f"no run is called {', '.join(sorted(unknown))}; there are: {'; '.join(every)}")
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    found = {name: digests for name, digests in kept.items() if name in every}
    for name in arguments.names or every:
        begun = time.monotonic()
        found[name] = every[name]()
        changed = sorted(
            key
            for key in kept.get(name, {}).keys() | found[name]
            if kept.get(name, {}).get(key) != found[name].get(key)
        )
        said = f"changed: {', '.join(changed)}" if changed else "as kept"
        print(f"{name} ({time.monotonic() - begun:.1f} s; {said})")
        for key, digest in found[name].items():
            print(f"  {digest}  {key}")
    if arguments.write:
        KEPT.write_text(json.dumps({name: found[name] for name in every if name in found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
