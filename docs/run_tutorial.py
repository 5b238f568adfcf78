"""Run the commands of docs/tables.md as a reader would, and compare their output with the page: `make tutorial`.

`python docs/run_tutorial.py audit` runs those of docs/audit.md. A page is the only source. Between `<!-- run: NAME -->`
and `<!-- end -->` every `sh` and `python` block runs in a fresh folder, in order. Blocks with a title run in terminals
of their own: adjacent blocks with titles run in parallel, those with the same title one after the other. Ports are
replaced by free ones.

A `text` block is the output of the block above it. In it

- an integer must be printed exactly, unless a comment above the block states the range that it may have:
  `<!-- varies: 148 (60-400), 80 (10-300) -->`. Origins are random, so training may stop at another step;
- a decimal number must be printed within a fifth of its value, or within 0.05;
- `…` stands for any text, `…` on a line of its own for any lines, and a digest for any digest.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # tests load this file by its path
from ports import free_ports  # noqa: E402

PAGE, AUDIT_PAGE, PICTURES = HERE / "tables.md", HERE / "audit.md", HERE / "images"
CLINICS_PAGE = HERE / "real-tables.md"

PART = re.compile(r"^<!-- run: (\w+) -->$(.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(
    r'(?:^<!-- varies: ([\d, ()-]+) -->\n\n?)?^```(sh|python|text)(?: title="([^"]*)")?\n(.*?)^```$',
    re.MULTILINE | re.DOTALL,
)
PORT = re.compile(r"(?<=127\.0\.0\.1:)\d+")
# The parts of an expected output that are not compared as text.
DECIMAL, DIGEST, INTEGER = r"-?\d[\d,]*\.\d+", r"[0-9a-f]+", r"\d[\d,]*"
VARYING = re.compile(rf"(…|\b[0-9a-f]{{12,}}\b|{DECIMAL}(?![\d.])|\b{INTEGER}\b)")
MAX_RELATIVE_DIFFERENCE, MAX_ABSOLUTE_DIFFERENCE = 0.2, 0.05  # of a decimal number
RANGE = re.compile(r"(\d+) \((\d+)-(\d+)\)")  # of an integer that varies
SECONDS = 600  # timeout of one block
LINES_SHOWN = 4  # of the output of a block, in the progress messages


@dataclass(frozen=True)
class Picture:
    """A picture of a page in Chromium, in `PICTURES`.

    Attributes:
        name: the name of its file.
        page: the page, in the folder of a part; with "#", where it begins.
        element: the id of the element to show; empty for the window.
        width: the width of the window.
        height: its height.
        dark: true for a dark theme.
    """

    name: str
    page: str
    width: int = 1280
    height: int = 980
    dark: bool = False
    element: str = ""


PARTS = {
    "tutorial": [
        Picture("report.png", "runs/hospital-a/report.html", height=1060),
        Picture("report-validation.png", "runs/hospital-a/report.html", height=1500, element="validation"),
        Picture("report-narrow.png", "runs/hospital-a/report.html", 400, 2600, dark=True, element="comparison"),
    ],
    "audit": [
        Picture("audit-records.png", "cgd-audit/audit.html#traps", height=1060),
        Picture("audit-dark.png", "cgd-audit/audit.html", dark=True),
        Picture("audit-narrow.png", "cgd-audit/audit.html#traps", 400, 1160, dark=True),
    ],
}
"""The pictures of each part that has some."""


@dataclass(frozen=True)
class Block:
    """A block of commands.

    Attributes:
        language: "sh" or "python".
        code: the commands.
        terminal: the title of its terminal; empty if it has none.
        expected: the output on the page; None if the page has none.
        varies: the integers of that output that differ between runs, with the range that each may have.
    """

    language: str
    code: str
    terminal: str = ""
    expected: str | None = None
    varies: Mapping[str, tuple[int, int]] = field(default_factory=dict)


class TutorialError(Exception):
    """A command failed, or its output differs from the page."""


def blocks(page: str, part: str) -> list[Block]:
    """Return the blocks of a part of the page."""
    parts = dict(PART.findall(page))
    if part not in parts:
        raise TutorialError(f"the page has no part {part!r}; it has {', '.join(parts)}")
    found: list[Block] = []
    for varies, language, terminal, code in FENCE.findall(parts[part]):
        if language != "text":
            found.append(Block(language, code, terminal))
        elif found and found[-1].expected is None:
            numbers = {number: (int(low), int(high)) for number, low, high in RANGE.findall(varies)}
            if missing := sorted(number for number in numbers if not re.search(rf"\b{number}\b", code)):
                raise TutorialError(f"the output does not contain {', '.join(missing)}, listed as varying:\n{code}")
            found[-1] = replace(found[-1], expected=code, varies=numbers)
        else:
            raise TutorialError(f"no block is above this output, or it has one already:\n{code}")
    return found


def matches(output: str, expected: str, varies: Mapping[str, tuple[int, int]] = MappingProxyType({})) -> bool:
    """Return whether an output agrees with the one on the page; see the rules above."""
    numbers: list[str] = []
    found = re.fullmatch("".join(_line(line, varies, numbers) for line in expected.splitlines()), output)
    return found is not None and all(_agree(*pair, varies) for pair in zip(numbers, found.groups(), strict=True))


def _line(line: str, varies: Mapping[str, tuple[int, int]], numbers: list[str]) -> str:
    """Return the regular expression of one line; each of its groups is a number, which is added to `numbers`."""
    if line.strip() == "…":
        return r"(?:.*\n)*?"
    parts = VARYING.split(line.rstrip())
    regex = ""
    for text, piece in zip(parts[::2], [*parts[1::2], None], strict=True):
        regex += re.escape(text)
        if piece == "…":
            regex += ".*"
        elif piece is None or (re.fullmatch(INTEGER, piece) and piece not in varies):
            regex += re.escape(piece or "")
        elif re.fullmatch(INTEGER, piece) or re.fullmatch(DECIMAL, piece):
            numbers.append(piece)
            regex += f"({INTEGER if piece in varies else DECIMAL})"
        else:
            regex += DIGEST
    return regex + r"[ ]*\n"


def _agree(expected: str, actual: str, varies: Mapping[str, tuple[int, int]]) -> bool:
    one, other = (float(each.replace(",", "")) for each in (expected, actual))
    if expected in varies:
        low, high = varies[expected]
        return low <= other <= high
    return abs(one - other) <= max(MAX_ABSOLUTE_DIFFERENCE, MAX_RELATIVE_DIFFERENCE * abs(one))


def with_free_ports(found: Sequence[Block]) -> list[Block]:
    """Return the same blocks with ports on which no process listens."""
    named = sorted({port for block in found for port in PORT.findall(block.code)})
    free = dict(zip(named, free_ports(len(named)), strict=True))

    def replaced(text: str) -> str:
        return PORT.sub(lambda match: str(free.get(match[0], match[0])), text)

    return [
        replace(block, code=replaced(block.code), expected=block.expected and replaced(block.expected))
        for block in found
    ]


def run(part: str, folder: Path, show_message: Callable[[str], None] = print) -> None:
    """Run a part of the page in a folder.

    Raises:
        TutorialError: a block failed, or printed something else than the page shows.
    """
    begun = time.monotonic()
    page = {"audit": AUDIT_PAGE, "clinics": CLINICS_PAGE}.get(part, PAGE)
    found = with_free_ports(blocks(page.read_text(encoding="utf-8"), part))
    with tempfile.TemporaryDirectory(prefix="cgd-tutorial-bin-") as shims:
        runner = _Runner(folder, _environment(Path(shims)), show_message)
        for together, group in groupby(found, key=lambda block: bool(block.terminal)):
            if together:
                runner.at_the_same_time(list(group))
            else:
                for block in group:
                    runner.one(block)
    show_message(
        f"{len(found)} blocks of {part!r} ran with the output on the page, in {time.monotonic() - begun:.0f} s"
    )


def _environment(shims: Path) -> dict[str, str]:
    """Return the environment of the commands, in which `cgd` is that of the running Python."""
    command = shims / "cgd"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m cgd "$@"\n')
    command.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "CGD_DATA"}
    # Five processes on one computer: a thread for each is enough.
    more = {"PATH": f"{shims}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    return environment | more


class _Runner:
    def __init__(self, folder: Path, environment: dict[str, str], show_message: Callable[[str], None]) -> None:
        self._folder, self._environment, self._show = folder, environment, show_message
        self._processes: list[subprocess.Popen[str]] = []
        self._stopped = False

    def one(self, block: Block) -> None:
        """Run a block, and check that its output agrees with the page."""
        begun = time.monotonic()
        self._show("\n".join(f"{'>>>' if block.language == 'python' else '$'} {line}" for line in _commands(block)))
        code, output = self._finish(block)
        if self._stopped:
            return
        if code:
            raise TutorialError(f"exit code {code}:\n{block.code}\n{output}")
        if block.expected is not None and not matches(output, block.expected, block.varies):
            raise TutorialError(f"{block.code}\nshould print\n\n{block.expected}\nand printed\n\n{output}")
        where = f"{block.terminal}, " if block.terminal else ""
        seconds = f"({where}{time.monotonic() - begun:.1f} s)"
        self._show("\n".join(f"    {line}" for line in (*output.splitlines()[-LINES_SHOWN:], seconds)))

    def at_the_same_time(self, found: Sequence[Block]) -> None:
        """Run blocks in parallel terminals; if one fails, kill the others, which would wait for it forever."""
        faults: list[TutorialError] = []

        def work(terminal: str) -> None:
            try:
                for block in found:
                    if block.terminal == terminal and not self._stopped:
                        self.one(block)
            except TutorialError as error:
                faults.append(error)
                self._stop()

        threads = [threading.Thread(target=work, args=(name,)) for name in dict.fromkeys(_terminals(found))]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:
            self._stop()
        self._stopped = False
        if faults:
            raise faults[0]

    def _finish(self, block: Block) -> tuple[int, str]:
        command = ["sh", "-e", "-c", block.code] if block.language == "sh" else [sys.executable, "-c", block.code]
        # Standard output and standard error are one stream, as in a terminal.
        process = subprocess.Popen(  # noqa: S603 - the page's own commands
            command,
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )
        self._processes.append(process)
        if self._stopped:  # `_stop` was called while the process started
            _kill(process)
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            _kill(process)
            raise TutorialError(f"no end after {SECONDS} s:\n{block.code}\n{process.communicate()[0]}") from None
        return process.returncode, output

    def _stop(self) -> None:
        self._stopped = True
        for process in self._processes:
            if process.poll() is None:
                _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a block with its child processes, which are in the same session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _terminals(found: Sequence[Block]) -> Iterator[str]:
    return (block.terminal for block in found)


def _commands(block: Block) -> list[str]:
    return block.code.rstrip("\n").splitlines()


def photograph(folder: Path, picture: Picture) -> None:
    """Take a picture in Chromium, given the folder of the part."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    width, height = picture.width, picture.height
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={width},{height}"):
        options.add_argument(flag)
    browser = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )
        theme = {"name": "prefers-color-scheme", "value": "dark" if picture.dark else "light"}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [theme]})
        page, _, place = picture.page.partition("#")
        browser.get(f"{(folder / page).resolve().as_uri()}#{place}")
        path = str(PICTURES / picture.name)
        if picture.element:
            browser.find_element("id", picture.element).screenshot(path)
        else:
            browser.save_screenshot(path)
    finally:
        browser.quit()


def main() -> None:
    """Run a part of the page, and with --picture update its pictures."""
    parser = argparse.ArgumentParser(description=run.__doc__, usage="%(prog)s [PART] [--picture]")
    parser.add_argument("part", nargs="?", default="tutorial")
    parser.add_argument("--picture", action="store_true", help="update the pictures of the part in docs/images")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cgd-tutorial-") as folder:
        try:
            run(options.part, Path(folder))
        except TutorialError as error:
            sys.exit(f"\nThe page and the program differ. {error}")
        for picture in PARTS.get(options.part, []) if options.picture else []:
            photograph(Path(folder), picture)


if __name__ == "__main__":
    main()
