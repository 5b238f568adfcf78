"""Write the lock files: every package that `make` installs, with its version and the SHA-256 digests of its wheels.

`make lock` runs this after a change of pyproject.toml or constraints.txt. pip finds the versions, without installing
anything; the digests are those that PyPI states for all wheels of a version, so one file serves all systems and
versions of Python. torch, and the CUDA packages that it needs on some machines, are left out: pip may install a CPU
build, which has another digest.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import urlopen

HERE = Path(__file__).parent
PYPI = "https://pypi.org/simple"
LINK = re.compile(r'/([^/"]+\.whl)#sha256=([0-9a-f]{64})"')
OLDEST = (3, 11)  # of Python: newer versions can use the same packages
BUILD = ("hatchling", "editables")  # needed for an editable installation, so that pip downloads nothing else for it
LOCKS = {"run": ".[all]", "dev": ".[dev]", "docs": ".[all,docs]"}
LEFT_OUT = re.compile(r"cgd|torch|triton|nvidia-.*|cuda-.*")
HEAD = "# Written by `make lock`; CONTRIBUTING.md describes its purpose.\n"


def main() -> None:
    """Write all lock files."""
    if sys.version_info[:2] != OLDEST:
        sys.exit(
            f"the lock files are made with Python {OLDEST[0]}.{OLDEST[1]}, the oldest: make PYTHON=python3.11 lock"
        )
    for name, target in LOCKS.items():
        found = {package: version for package, version in resolve(target).items() if not LEFT_OUT.fullmatch(package)}
        with ThreadPoolExecutor(8) as threads:
            digests = list(threads.map(wheels, found, found.values()))
        entries = zip(found.items(), digests, strict=True)
        text = "".join(entry(package, version, each) for (package, version), each in sorted(entries))
        (HERE / f"{name}.lock").write_text(HEAD + text)
        print(f"{name}.lock: {len(found)} packages")


def resolve(target: str) -> dict[str, str]:
    """Return the versions that pip would install, by package."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = ("--dry-run", "--ignore-installed", "--constraint", "constraints.txt", "--report", str(report))
        subprocess.run([*pip, *options, target, *BUILD], cwd=HERE.parent, check=True)
        installed = json.loads(report.read_text())["install"]
    return {canonical(each["metadata"]["name"]): each["metadata"]["version"] for each in installed}


def wheels(package: str, version: str) -> list[str]:
    """Return the digests of all wheels of a version."""
    with urlopen(f"{PYPI}/{package}/", timeout=60) as response:
        files = LINK.findall(response.read().decode())
    digests = {digest for file, digest in files if file.split("-")[1] == version}
    if not digests:
        sys.exit(f"{package} {version} has no wheel; choose another version in constraints.txt")
    return sorted(digests)


def entry(package: str, version: str, digests: list[str]) -> str:
    """Return the lines of one package."""
    return " \\\n".join([f"{package}=={version}", *(f"    --hash=sha256:{each}" for each in digests)]) + "\n"


def canonical(name: str) -> str:
    """Return a package's name as PyPI writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
