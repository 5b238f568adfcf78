"""Print the digests of the golden runs, or write them to tests/golden.json with --write: `python tests/golden.py`.

Write them only if results are meant to change, and state in the commit which ones and why.
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

from support.golden import GOLDEN_FILE, PROCESS_RUNS, RUNS  # noqa: E402


def main() -> None:
    """Run all golden runs, or the named ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="rewrite tests/golden.json")
    parser.add_argument("names", nargs="*", metavar="RUN", help="only these runs (default: all)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    all_runs = RUNS | PROCESS_RUNS
    unknown = set(arguments.names) - all_runs.keys()
    if unknown:
        parser.error(f"there is no run {', '.join(sorted(unknown))}; choose from: {'; '.join(all_runs)}")
    stored = json.loads(GOLDEN_FILE.read_text()) if GOLDEN_FILE.exists() else {}
    found = {name: digests for name, digests in stored.items() if name in all_runs}
    for name in arguments.names or all_runs:
        started = time.monotonic()
        found[name] = all_runs[name]()
        changed = sorted(
            key
            for key in stored.get(name, {}).keys() | found[name]
            if stored.get(name, {}).get(key) != found[name].get(key)
        )
        status = f"changed: {', '.join(changed)}" if changed else "unchanged"
        print(f"{name} ({time.monotonic() - started:.1f} s; {status})")
        for key, digest in found[name].items():
            print(f"  {digest}  {key}")
    if arguments.write:
        GOLDEN_FILE.write_text(json.dumps({name: found[name] for name in all_runs if name in found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
