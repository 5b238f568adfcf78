"""The recipients of `cgd join --notify`: a webhook, or a command."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

import cgd
from cgd.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

HTTP_TIMEOUT_SECONDS = 10.0
COMMAND_SECONDS = 20.0
REDIRECTIONS, SERVER_ERRORS, TOO_MANY_REQUESTS = range(300, 400), range(500, 600), 429
FORM = "write https://HOST/PATH"


@dataclass(frozen=True)
class Notification:
    """A message for somebody outside.

    Attributes:
        federation: the name of the federation.
        participant: the sender of the message.
        event: "missing", "back", "done", "failed" or "interrupted".
        member: the member that is missing or back; empty if the training has ended.
        time: the local time with its offset, in ISO format.
        text: a sentence.
        exit_code: the exit code, if the training has ended.
    """

    federation: str
    participant: str
    event: str
    member: str
    time: str
    text: str
    exit_code: int | None = None

    def fields(self) -> dict[str, str | int]:
        """Return the attributes that apply."""
        return {name: value for name, value in vars(self).items() if value not in ("", None)}

    def to_json(self) -> bytes:
        """Return a JSON object, in ASCII."""
        return json.dumps(self.fields()).encode()


class NotSentError(Exception):
    """A message could not be sent.

    Attributes:
        again: whether a second attempt may succeed.
    """

    def __init__(self, reason: str, *, again: bool = False) -> None:
        self.again = again
        super().__init__(reason)


class Target(Protocol):
    """A recipient of messages; its `str` is written to the log."""

    def send(self, message: Notification) -> None:
        """Send a message, or raise `NotSentError`."""


class Webhook:
    """A URL to which messages are posted as JSON.

    Redirections are not followed: they would turn the POST into a GET, and could lead to any place.

    Args:
        url: the URL; it may contain a secret, so only its host is shown.

    Raises:
        InputError: the URL cannot be used.
    """

    def __init__(self, url: str) -> None:
        if not url.isascii() or not url.isprintable() or " " in url:
            raise InputError(f"--notify is a URL with a space or a special character; encode it (%20), or {FORM}")
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
        except ValueError:  # its text may contain a secret
            raise InputError(f"--notify is a URL with a wrong host or port; {FORM}") from None
        if not host:
            raise InputError(f"--notify is a URL without a host; {FORM}")
        if parts.username is not None:
            raise InputError(f"--notify is a URL with a user or a password; {FORM}, or name a script that sends it")
        self._url = url
        self._host = f"{parts.scheme}://{host}"
        self._opener = urllib.request.OpenerDirector()  # not `build_opener`, which adds redirections, files and FTP
        for handler in (
            urllib.request.ProxyHandler,
            urllib.request.HTTPHandler,
            urllib.request.HTTPSHandler,
            urllib.request.HTTPErrorProcessor,
            urllib.request.HTTPDefaultErrorHandler,
        ):
            self._opener.add_handler(handler())

    def __str__(self) -> str:
        return self._host

    def send(self, message: Notification) -> None:
        """Post a message."""
        headers = {"Content-Type": "application/json", "User-Agent": f"cgd/{cgd.__version__}"}
        request = urllib.request.Request(self._url, message.to_json(), headers, method="POST")  # noqa: S310 - checked
        try:
            answer = self._opener.open(request, timeout=HTTP_TIMEOUT_SECONDS)
        except urllib.error.HTTPError as error:
            error.close()
            redirected = "; it redirects to another URL: use that one" if error.code in REDIRECTIONS else ""
            again = error.code in SERVER_ERRORS or error.code == TOO_MANY_REQUESTS
            raise NotSentError(f"HTTP status {error.code}{redirected}", again=again) from None
        except urllib.error.URLError as error:
            raise NotSentError(str(error.reason), again=True) from None
        except (OSError, HTTPException, ValueError) as error:
            raise NotSentError(f"{type(error).__name__}: {error}", again=True) from None
        if answer is not None:
            answer.close()


class Command:
    """A command that is run for each message, without a shell.

    The text is its last argument, one word. Its standard input is the JSON object, and each field is a variable of the
    environment, such as `CGD_EVENT`.

    Args:
        words: the command and its first arguments.

    Raises:
        InputError: there is no such command.
    """

    def __init__(self, words: Sequence[str]) -> None:
        found = shutil.which(words[0])
        if found is None:
            if Path(words[0]).is_file():
                raise InputError(f"--notify: {words[0]} is not executable; run `chmod +x {shlex.quote(words[0])}`")
            raise InputError(f"--notify: there is no command {_shown(words[0])!r}; give its path, or a URL (https://…)")
        self._words = [str(Path(found).absolute()), *words[1:]]

    def __str__(self) -> str:
        return Path(self._words[0]).name

    def send(self, message: Notification) -> None:
        """Run the command; its output is dropped."""
        fields = {f"CGD_{name.upper()}": str(value) for name, value in message.fields().items()}
        try:
            process = subprocess.Popen(  # noqa: S603 - the operator's own command
                [*self._words, message.text],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | fields,
                start_new_session=True,  # Ctrl-C in our terminal must not end the command that reports it
            )
        except OSError as error:
            raise NotSentError(error.strerror or str(error)) from None
        with process:
            try:
                process.communicate(message.to_json(), timeout=COMMAND_SECONDS)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):  # it has just ended
                    os.killpg(process.pid, signal.SIGKILL)  # with what it has started
                raise NotSentError(f"it did not end within {COMMAND_SECONDS:g} s, and was killed") from None
        if process.returncode != 0:
            raise NotSentError(f"exit code {process.returncode}")


def _shown(command: str) -> str:
    """Return a command, without the path and the query of what may be a URL without its scheme: they may be secret."""
    command, query, _ = command.partition("?")
    first, slash, _ = command.removeprefix("//").partition("/")
    if command.startswith("//") or (slash and first not in ("", ".", "..")):
        return f"{first}/…"
    return f"{command}?…" if query else command


def parse_target(text: str) -> Target:
    """Return the recipient that `--notify` names.

    Raises:
        InputError: it cannot be used.
    """
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", text)
    if scheme is not None:
        if scheme[1].lower() not in ("http", "https"):
            raise InputError(f"--notify is a URL with {scheme[1]}://; only http:// and https:// can be used")
        return Webhook(text)
    if incomplete := re.match(r"https?:", text, re.IGNORECASE):
        raise InputError(f"--notify is a URL without // after {incomplete[0]}; {FORM}")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InputError(f"--notify cannot be split into words ({error}); close its quotes") from None
    if not words or not words[0]:
        raise InputError("--notify is empty; give a URL (https://…) or a command")
    return Command(words)
