"""`cgd join --notify`: what is sent, to whom, when, and what it never contains."""

from __future__ import annotations

import http.server
import json
import logging
import os
import re
import shlex
import signal
import stat
import threading
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import pytest
import typer

from cgd.cli import notify, notify_targets
from cgd.cli.base import exit_code
from cgd.cli.notify import MAX_MESSAGES, WINDOW_SECONDS, Absences, FailureLimit, Notifier
from cgd.cli.notify_targets import Notification, NotSentError, Webhook, parse_target
from cgd.errors import DivergenceError, InputError, PeerTimeoutError, RangeError
from cgd.transport.state_log import PeerReport, local_time
from support.federations import ProcessFederation
from support.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MESSAGE = Notification("trial", "ada", "missing", "bob", "2026-11-18T12:00:00+00:00", "cgd: trial: bob is missing")
FIELDS = {
    "federation": "trial",
    "participant": "ada",
    "event": "missing",
    "member": "bob",
    "time": "2026-11-18T12:00:00+00:00",
    "text": "cgd: trial: bob is missing",
}
DEADLINE_SECONDS = 60.0
PAGE = (Path(__file__).parent.parent / "docs" / "operations.md").read_text()


def eventually(condition: Callable[[], object], otherwise: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.02)


class Receiver:
    """A web server that stores what is posted to it.

    Attributes:
        requests: the method, the path, the headers and the body of each request.
        statuses: the statuses of the next answers; then 204.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.statuses: list[int] = []
        self.location = ""
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                receiver.requests.append((self.command, self.path, dict(self.headers), body))
                self.send_response(receiver.statuses.pop(0) if receiver.statuses else 204)
                if receiver.location:
                    self.send_header("Location", receiver.location)
                self.end_headers()

            do_GET = do_POST = answer  # noqa: N815 - the names of http.server

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook/secret"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, _, _, body in list(self.requests)]


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Receiver() as made:
        yield made


def script(folder: Path, lines: str, name: str = "notify") -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)
    return path


# Targets.


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("", "--notify is empty; give a URL"),
        ("''", "--notify is empty; give a URL"),
        ("ftp://host/path", "a URL with ftp://; only http:// and https:// can be used"),
        ("file:///etc/passwd", "a URL with file://; only http:// and https:// can be used"),
        ("https:///path", "a URL without a host; write https://HOST/PATH"),
        ("https://host:port/", "a URL with a wrong host or port; write https://HOST/PATH"),
        ("https://name:password/", "a URL with a wrong host or port; write https://HOST/PATH"),
        ("http://[::1/password", "a URL with a wrong host or port; write https://HOST/PATH"),
        ("https:/host/password", "a URL without // after https:; write https://HOST/PATH"),
        ("HTTP:host/password", "a URL without // after HTTP:; write https://HOST/PATH"),
        ("hooks.example/services/password", "there is no command 'hooks.example/…'; give its path, or a URL"),
        ("//hooks.example/services/password", "there is no command 'hooks.example/…'; give its path, or a URL"),
        ("hooks.example?token=password", "there is no command 'hooks.example?…'; give its path, or a URL"),
        ("https://user:password@host/", "a URL with a user or a password; write https://HOST/PATH"),
        ("https://host/a b", "a URL with a space or a special character"),
        ("https://host/\r\nX-Header:1", "a URL with a space or a special character"),
        ("no-such-command --option", "there is no command 'no-such-command'"),
        ("/no/such/command", "there is no command '/no/such/command'"),
        ("/tmp", "there is no command '/tmp'"),
        ('logger "open', "cannot be split into words"),
    ],
)
def test_target_that_cannot_be_used_is_an_error(target: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        parse_target(target)
    assert "password" not in str(caught.value).replace("or a password", "")


def test_command_that_is_not_executable_is_an_error(tmp_path: Path) -> None:
    path = script(tmp_path, "", "it's here")
    path.chmod(0o644)
    with pytest.raises(InputError, match=r"it's here is not executable; run `chmod \+x ") as caught:
        parse_target(shlex.quote(str(path)))
    remedy = re.search(r"`chmod \+x (.*)`", str(caught.value))
    assert remedy is not None
    assert shlex.split(remedy[1]) == [str(path)]


@pytest.mark.parametrize(
    ("after", "notified", "message"),
    [
        (5.0, None, "--notify-after needs --notify"),
        (0.0, "true", "--notify-after is 0; it is a number of seconds, at least 1"),
        (float("nan"), "true", "--notify-after is nan"),
        (float("inf"), "true", "--notify-after is inf"),
    ],
)
def test_options_that_cannot_be_used_are_errors(after: float, notified: str | None, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        Notifier.from_options(notified, after, 120.0)


def test_webhook_gets_a_post_of_json(receiver: Receiver) -> None:
    parse_target(receiver.url).send(MESSAGE)
    ((method, path, headers, body),) = receiver.requests
    assert (method, path, headers["Content-Type"]) == ("POST", "/hook/secret", "application/json")
    assert json.loads(body) == FIELDS
    assert "secret" not in str(parse_target(receiver.url))  # which is logged


@pytest.mark.parametrize("scheme", ["http", "file", "ftp"])
def test_redirection_is_not_followed(receiver: Receiver, scheme: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    receiver.location = receiver.url if scheme == "http" else f"{scheme}://{tmp_path}/file"
    for status in (301, 302, 303, 307, 308):
        receiver.statuses = [status]
        with pytest.raises(
            NotSentError, match=f"HTTP status {status}; it redirects to another URL: use that one"
        ) as caught:
            Webhook(receiver.url).send(MESSAGE)
        assert not caught.value.again
    assert len(receiver.requests) == 5


@pytest.mark.parametrize(("status", "again"), [(400, False), (404, False), (429, True), (500, True), (503, True)])
def test_webhook_is_tried_again_only_if_that_may_help(receiver: Receiver, status: int, again: bool) -> None:
    receiver.statuses = [status]
    with pytest.raises(NotSentError, match=f"HTTP status {status}") as caught:
        Webhook(receiver.url).send(MESSAGE)
    assert caught.value.again is again


def test_webhook_that_nobody_serves_can_be_tried_again() -> None:
    with pytest.raises(NotSentError, match="refused") as caught:
        Webhook(f"http://127.0.0.1:{free_port()}/").send(MESSAGE)
    assert caught.value.again


def test_command_gets_the_text_as_one_argument_and_the_fields(tmp_path: Path) -> None:
    path = script(tmp_path, f'{{ printf "%s\\n" "$#" "$1" "$2" "$CGD_EVENT/$CGD_MEMBER"; cat; }} > {tmp_path}/got')
    text = "cgd: -rf $(touch injected) `x`; 'a' \"b\" > c"
    message = Notification("trial", "ada", "missing", "bob", FIELDS["time"], text)
    parse_target(f"{path} --to").send(message)
    number, first, second, fields, content = (tmp_path / "got").read_text().splitlines()
    assert (number, first, second, fields) == ("2", "--to", text, "missing/bob")
    assert json.loads(content) == FIELDS | {"text": text}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["got", "notify"]


def test_script_of_the_page_sends_mail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (content,) = re.findall(r'^```sh title="cgd-mail"\n#!/bin/sh\n(.*?)^```$', PAGE, flags=re.MULTILINE | re.DOTALL)
    path = script(tmp_path, content)
    script(tmp_path, f'{{ printf "%s\\n" "$@"; cat; }} > {tmp_path}/got', "mail")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    parse_target(str(path)).send(MESSAGE)
    assert (tmp_path / "got").read_text().splitlines() == [
        "-s",
        "cgd: missing bob",
        "it@hospital-a.example",
        FIELDS["text"],
        FIELDS["time"],
    ]


def test_message_on_the_page_is_a_real_one() -> None:
    (line,) = re.findall(r'^\{"federation".*$', PAGE, flags=re.MULTILINE)
    fields = json.loads(line)
    noon = datetime.fromisoformat("2026-11-18T12:03:10+01:00")
    report = PeerReport("hospital-c", "missing", "x", since=noon, seen=True)
    text = f"cgd: five-hospitals: {notify.describe('missing', report, 'hospital-a')}"
    made = Notification("five-hospitals", "hospital-a", "missing", "hospital-c", fields["time"], text)
    assert made.to_json().decode() == line


def test_relative_command_is_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, f"touch {tmp_path}/called")
    monkeypatch.chdir(tmp_path)
    target = parse_target("./notify")
    monkeypatch.chdir("/")
    target.send(MESSAGE)
    assert (tmp_path / "called").exists()


def test_failing_command_is_reported(tmp_path: Path) -> None:
    with pytest.raises(NotSentError, match="exit code 7") as caught:
        parse_target(str(script(tmp_path, "exit 7"))).send(MESSAGE)
    assert not caught.value.again
    path = script(tmp_path, "")
    target = parse_target(str(path))
    path.unlink()
    with pytest.raises(NotSentError, match="No such file"):
        target.send(MESSAGE)


def test_command_that_does_not_end_is_killed_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify_targets, "COMMAND_SECONDS", 0.5)
    path = script(
        tmp_path, f"sleep 1000 & echo $! > {tmp_path}/child.new && mv {tmp_path}/child.new {tmp_path}/child; wait"
    )
    with pytest.raises(NotSentError, match=r"it did not end within 0.5 s, and was killed"):
        parse_target(str(path)).send(MESSAGE)
    if (tmp_path / "child").exists():  # unless the machine was too slow to start it
        child = int((tmp_path / "child").read_text())
        eventually(lambda: not running(child), lambda: child)


def running(process: int) -> bool:
    """Return whether a process runs; one that has ended and is not collected yet does not."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# Absences.


def report(state: str, note: str = "", name: str = "bob") -> PeerReport:
    return PeerReport(name, state, note)


class Seconds:
    """A clock that a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def events(absences: Absences, *states: str) -> list[str]:
    return [event for state in states for event, _, _ in absences.add([report(state)])]


def test_absence_has_one_message_and_its_end_another() -> None:
    clock = Seconds()
    absences = Absences(120.0, clock)
    assert events(absences, "missing") == []
    clock.now += 119
    assert events(absences, "refused", "left") == []  # absent all the time
    clock.now += 1
    assert events(absences, "missing", "missing", "left") == ["missing"]
    clock.now += 1e6
    assert events(absences, "missing") == []
    assert events(absences, "here", "here", "done") == ["back"]
    assert events(absences, "missing") == []


def test_short_absence_has_no_message() -> None:
    clock = Seconds()
    absences = Absences(120.0, clock)
    for _ in range(100):
        assert events(absences, "missing") == []
        clock.now += 100
        assert events(absences, "missing", "here") == []
        clock.now += 100


def test_member_that_comes_and_goes_cannot_flood() -> None:
    clock = Seconds()
    absences = Absences(1.0, clock)
    found: list[str] = []
    last: list[bool] = []
    for second in range(int(WINDOW_SECONDS)):
        clock.now += 1
        state = "here" if second % 4 == 3 else "missing"
        new = absences.add([report(state), report("missing", name="cleo")])
        found += [f"{event} {each.name}" for event, each, _ in new]
        last += [is_last for event, each, is_last in new if each.name == "bob" and event == "back"]
    assert found.count("missing cleo") == 1  # others are not affected
    assert found.count("missing bob") == found.count("back bob") == MAX_MESSAGES
    assert last == [False] * (MAX_MESSAGES - 1) + [True]
    assert events(absences, "missing") == []
    clock.now += 2  # it stays away: the message comes when it may
    assert events(absences, "missing") == ["missing"]


def test_process_that_fails_again_and_again_does_not_flood(tmp_path: Path) -> None:
    """A dishonest member can make our sums fail after every restart."""
    clock = Seconds()
    path = tmp_path / "state" / "notified"
    taken = []
    for _ in range(200):  # each is a process of its own
        taken.append(FailureLimit(path, clock).take())
        clock.now += 15
    assert taken[:MAX_MESSAGES] == [(True, False)] * (MAX_MESSAGES - 1) + [(True, True)]
    assert sum(allowed for allowed, _ in taken) == 2 * MAX_MESSAGES  # 3000 seconds
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for damaged in ("nonsense", "inf\n1e999\n-inf", "9e99\n" * 1000, "\xff"):
        path.write_text(damaged, encoding="latin-1")
        assert FailureLimit(path, clock).take() == (True, False)


# The notifier.


class Recorder:
    """A target that stores messages; it fails while `failures` are left."""

    def __init__(self, failures: int = 0) -> None:
        self.messages: list[Notification] = []
        self.failures = failures

    def __str__(self) -> str:
        return "recorder"

    def send(self, message: Notification) -> None:
        self.messages.append(message)
        if self.failures > 0:
            self.failures -= 1
            raise NotSentError("status 503", again=True)


def participant(folder: Path, reports: Sequence[PeerReport]) -> Any:
    """Return what the notifier needs of a `FederationMember`."""
    return SimpleNamespace(
        me="ada",
        federation=SimpleNamespace(name="trial"),
        state=SimpleNamespace(folder=folder),
        runtime=SimpleNamespace(report=lambda: list(reports)),
    )


@pytest.fixture
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "POLL_SECONDS", 0.005)
    monkeypatch.setattr(notify, "RETRY_SECONDS", (0.005, 0.005))


EVIL = "\x1b[2J --option; $(reboot) tcp://10.0.0.5:7001 loss 0.123"


@pytest.mark.usefixtures("_fast")
def test_messages_have_no_text_of_a_peer_and_no_address(tmp_path: Path) -> None:
    reports = [
        report("missing", EVIL),
        report("refused", EVIL, "cleo"),
        report("left", EVIL, "dan"),
        report("here", EVIL, "eve"),
    ]
    target = Recorder()
    with Notifier(target, 0.0) as notifier:
        notifier.watch(participant(tmp_path, reports))
        eventually(lambda: len(target.messages) >= 3, lambda: target.messages)
        reports[:] = [report("here", EVIL, each.name) for each in reports]
        eventually(lambda: len(target.messages) >= 6, lambda: target.messages)
    texts = [each.text for each in target.messages]
    assert texts == [
        "cgd: trial: bob is missing at ada: it has not been here yet",
        "cgd: trial: cleo is missing at ada: it is connected and refused, and the log of ada says why",
        "cgd: trial: dan is missing at ada: its program has stopped",
        *(f"cgd: trial: {name} is back at ada" for name in ("bob", "cleo", "dan")),
        "cgd: trial: ada is done with the training",
    ]
    assert [each.event for each in target.messages] == ["missing"] * 3 + ["back"] * 3 + ["done"]
    content = b"".join(each.to_json() for each in target.messages).decode()
    assert content.isascii()
    assert not any(word in content for word in ("option", "reboot", "tcp", "loss", "\\u001b"))


@pytest.mark.parametrize(
    ("error", "event", "code"),
    [
        (None, "done", 0),
        (RangeError(12345.678, (3,), 16.0), "failed", 1),
        (InputError("the record 12345.678 in line 7"), "failed", 2),
        (PeerTimeoutError({"bob"}, 3.0, "its hello", "start bob"), "failed", 3),
        (DivergenceError("the loss is 12345.678"), "failed", 1),
        (typer.Exit(130), "interrupted", 130),
        (KeyboardInterrupt(), "interrupted", 130),
        (SystemExit("12345.678"), "failed", 1),
        (SystemExit(0), "done", 0),
        (ZeroDivisionError("12345.678"), "failed", 1),
    ],
)
@pytest.mark.usefixtures("_fast")
def test_end_has_an_exit_code_and_no_reason(tmp_path: Path, error: BaseException | None, event: str, code: int) -> None:
    target = Recorder()
    assert exit_code(error) == code
    notifier = Notifier(target, 120.0)
    try:
        with notifier:
            notifier.watch(participant(tmp_path, []))
            if error is not None:
                raise error
    except BaseException as raised:
        assert raised is error
    notifier.end(1)  # once only
    (message,) = target.messages
    assert (message.event, message.exit_code, message.member) == (event, code, "")
    assert datetime.fromisoformat(message.time).tzinfo is not None
    assert not {"12345", "678", "line", "loss"} & set(re.split(r"\W", message.to_json().decode()))


@pytest.mark.usefixtures("_fast")
def test_message_that_cannot_be_sent_is_tried_again_and_then_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cgd")
    for failures, line in (
        (2, "notified recorder: ada is done with the training"),
        (9, "recorder was not notified (status 503): ada is done with the training"),
    ):
        target = Recorder(failures)
        with Notifier(target, 120.0) as notifier:
            notifier.watch(participant(tmp_path, []))
        assert len(target.messages) == 3
        assert caplog.messages[-1] == line


@pytest.mark.usefixtures("_fast")
def test_failing_report_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = Recorder()
    member = participant(tmp_path, [])
    member.runtime.report = lambda: 1 / 0
    with Notifier(target, 1.0) as notifier:
        notifier.watch(member)
        eventually(lambda: "a notification failed" in caplog.messages, lambda: caplog.messages)
    assert [each.event for each in target.messages] == ["done"]


@pytest.mark.usefixtures("_fast")
def test_end_does_not_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notify, "PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(notify, "END_SECONDS", 0.02)
    release = threading.Event()
    blocked = SimpleNamespace(send=lambda _: release.wait(DEADLINE_SECONDS))
    try:
        with Notifier(blocked, 120.0) as notifier:
            notifier.watch(participant(tmp_path, []))
        assert not release.is_set()
    finally:
        release.set()
    errors = capsys.readouterr().err
    assert "of the end (Ctrl-C leaves immediately)" in errors
    assert "cgd: no answer within 0.02 s; the last notification may not have arrived" in errors


def test_webhook_that_answers_in_time_gets_no_note(
    tmp_path: Path, receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    with Notifier(parse_target(receiver.url), 120.0) as notifier:
        notifier.watch(participant(tmp_path, []))
    assert [each["event"] for each in receiver.messages] == ["done"]
    assert "may not have arrived" not in capsys.readouterr().err


def test_without_a_target_or_before_a_connection_nothing_is_sent(tmp_path: Path) -> None:
    target = Recorder()
    with pytest.raises(InputError), Notifier(target, 120.0):
        raise InputError("the table cannot be read")
    with Notifier(None, 120.0) as notifier:
        notifier.watch(participant(tmp_path, [report("missing")]))
    assert target.messages == []


def test_absence_is_described_with_its_begin() -> None:
    now = local_time()
    text = notify.describe("missing", PeerReport("bob", "missing", "x", since=now, seen=True), "ada")
    (since,) = re.findall(r"^bob is missing at ada since (\S+): it was here before$", text)
    assert datetime.fromisoformat(since) == now.replace(microsecond=0)  # with its offset: they are comparable


# The command line.

TEXTS = {
    "missing": r"cgd: trial: (bob|cleo) is missing at ada since [\dT:-]+[+-]\d\d:\d\d: "
    r"(it has not been here yet|it was here before|its program has stopped)",
    "back": r"cgd: trial: (bob|cleo) is back at ada",
    "done": r"cgd: trial: ada is done with the training",
    "failed": r"cgd: trial: ada has ended with an error, exit code \d; its own output says which",
    "interrupted": r"cgd: trial: ada was interrupted; the same command continues the training",
}


def check_messages(messages: Sequence[dict[str, Any]]) -> list[str]:
    """Check that messages contain names, states and times only; return their events and members."""
    for each in messages:
        ended = each["event"] in ("done", "failed", "interrupted")
        expected = FIELDS.keys() - {"member"} | ({"exit_code"} if ended else {"member"})
        assert each.keys() == expected
        assert re.fullmatch(TEXTS[each["event"]], each["text"]), each["text"]
        assert (each["federation"], each["participant"]) == ("trial", "ada")
        assert each.get("member", "bob") in ("bob", "cleo")
        assert isinstance(each.get("exit_code", 0), int)
        datetime.fromisoformat(each["time"])
    return [f"{each['event']} {each['member']}" if "member" in each else each["event"] for each in messages]


@pytest.mark.slow
def test_participants_that_are_missing_and_return_are_reported(tmp_path: Path, receiver: Receiver) -> None:
    federation = ProcessFederation(tmp_path, ("ada", "bob", "cleo"))
    (tmp_path / "patient.py").write_text(
        "import pathlib, time\nimport numpy as np\n\ndef main(peers):\n    peers.sum(np.array(1))\n"
        "    while not pathlib.Path('end').exists():\n        time.sleep(0.05)\n    peers.sum(np.array(1))\n"
    )
    try:
        federation.start("ada", "--notify", receiver.url, "--notify-after", "1", run="patient:main")
        federation.start("bob", run="patient:main")
        eventually(lambda: "missing cleo" in check_messages(receiver.messages), lambda: federation.output("ada"))
        federation.start("cleo", run="patient:main")
        eventually(lambda: "back cleo" in check_messages(receiver.messages), lambda: federation.output("ada"))
        (tmp_path / "end").touch()
        assert set(federation.wait().values()) == {0}
    finally:
        federation.close()
    found = check_messages(receiver.messages)
    assert found[-1] == "done"
    for name in ("bob", "cleo"):  # on a slow machine a member may be missing more than once
        own = [each for each in found if each.endswith(name)]
        assert own == [f"{('missing', 'back')[number % 2]} {name}" for number in range(len(own))]
    output = federation.output("ada")
    assert "cgd: notified http://127.0.0.1: cleo is back at ada" in output
    assert "secret" not in output
    assert re.search(
        r"^cgd: waited [\d.]+ s for cleo: computing [\d.]+ s, summing [\d.]+ s, away [\d.]+ s", output, re.M
    )
    assert output.index("cgd: ada is done after") < output.index("cgd: notified http://127.0.0.1: ada is done")


@pytest.mark.slow
def test_error_is_reported_without_the_value_that_caused_it(tmp_path: Path, receiver: Receiver) -> None:
    federation = ProcessFederation(tmp_path, ("ada", "bob", "cleo"))
    (tmp_path / "large.py").write_text(
        "import numpy as np\n\ndef main(peers):\n    peers.sum(np.array([12345.678 if peers.me == 'ada' else 1.0]))\n"
    )
    try:
        for name in federation.names:
            federation.start(name, *(("--notify", receiver.url) if name == "ada" else ()), run="large:main")
        assert federation.wait() == {"ada": 2, "bob": 1, "cleo": 1}
    finally:
        federation.close()
    assert check_messages(receiver.messages) == ["failed"]
    assert receiver.messages[0]["exit_code"] == 2
    assert "12345" not in repr(receiver.requests)
    assert "12345.7" in federation.output("ada")


@pytest.mark.slow
def test_command_reports_that_it_was_interrupted_although_the_program_does_not_end(tmp_path: Path) -> None:
    federation = ProcessFederation(tmp_path, ("ada", "bob", "cleo"))
    path = script(tmp_path, f'printf "%s\\n" "$1" >> {tmp_path}/got')
    (tmp_path / "stubborn.py").write_text(
        "import pathlib\n\ndef main(peers):\n    pathlib.Path('started').touch()\n    while True:\n        try:\n"
        "            while True:\n                pass\n        except KeyboardInterrupt:\n            pass\n"
    )
    try:
        process = federation.start("ada", run="stubborn:main", CGD_NOTIFY=str(path))
        eventually((tmp_path / "started").exists, lambda: federation.output("ada"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_SECONDS) == 130
    finally:
        federation.close()
    assert (
        tmp_path / "got"
    ).read_text() == "cgd: trial: ada was interrupted; the same command continues the training\n"


@pytest.mark.slow
def test_bad_target_is_reported_before_anything_else(tmp_path: Path) -> None:
    federation = ProcessFederation(tmp_path, ("ada", "bob", "cleo"))
    try:
        assert federation.start("ada", "--notify", "htp://host", run="no:module").wait(60) == 2
    finally:
        federation.close()
    assert federation.output("ada") == "cgd: --notify is a URL with htp://; only http:// and https:// can be used\n"
    assert not os.path.exists(tmp_path / "state")
