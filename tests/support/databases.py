"""Databases for tests: SQLite files, and a PostgreSQL server of Debian's package in a folder of its own."""

from __future__ import annotations

import os
import pwd
import shutil
import sqlite3
import subprocess
import tempfile
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

UNPRIVILEGED = "postgres"  # PostgreSQL refuses to run as root
OWNER, OWNER_PASSWORD = "owner", "of the owner"


def write_sqlite(path: Path, content: Mapping[str, Sequence[Any]], table: str = "records") -> Path:
    """Write a table into an SQLite file, in place of the one that it may have."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"DROP TABLE IF EXISTS {table}")
        connection.execute(f"CREATE TABLE {table} ({', '.join(content)})")
        places = ", ".join("?" * len(content))
        connection.executemany(f"INSERT INTO {table} VALUES ({places})", zip(*content.values(), strict=True))
    return path


@dataclass(frozen=True)
class Server:
    """A PostgreSQL server.

    Attributes:
        folder: the folder of its socket.
    """

    folder: Path

    def address(self, user: str) -> str:
        """Return the address of the database for a user."""
        return f"postgresql://{user}@/postgres?host={self.folder}"

    def run(self, *statements: str) -> list[Any]:
        """Run statements as the owner of the database, and return the rows of the last one, if it has any."""
        from adbc_driver_postgresql import dbapi

        address = self.address(OWNER).replace("@", f":{OWNER_PASSWORD.replace(' ', '%20')}@")
        with dbapi.connect(address, autocommit=True) as connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            return list(cursor.fetchall()) if cursor.description else []


@contextmanager
def postgresql() -> Iterator[Server]:
    """Start a server that listens on a socket only, and asks everybody for a password; stop it at the end."""
    pytest.importorskip("adbc_driver_postgresql")
    initdb, pg_ctl = _program("initdb"), _program("pg_ctl")
    folder = Path(tempfile.mkdtemp(prefix="cgd-"))  # of a short name: that of a socket has at most 107 bytes
    try:
        password = folder / "password"
        password.write_text(OWNER_PASSWORD)
        as_user = _as_user(folder)
        data = folder / "data"
        _call(
            *(*as_user, initdb, f"--pgdata={data}", f"--username={OWNER}", f"--pwfile={password}"),
            *("--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync"),
        )
        options = f"-c listen_addresses='' -c unix_socket_directories={folder} -c fsync=off"
        _call(*as_user, pg_ctl, f"--pgdata={data}", "--wait", f"--log={folder / 'log'}", f"-o {options}", "start")
        try:
            yield Server(folder)
        finally:
            _call(*as_user, pg_ctl, f"--pgdata={data}", "--wait", "--mode=immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _program(name: str) -> str:
    found = [*sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}")), *filter(None, [shutil.which(name)])]
    if not found:
        pytest.skip(f"PostgreSQL is not installed: there is no program {name}")
    return str(found[0])


def _as_user(folder: Path) -> Sequence[str]:
    """Give a folder to a user that is not root, and return the beginning of commands that run as this user."""
    if os.geteuid():
        return ()
    try:
        user = pwd.getpwnam(UNPRIVILEGED)
    except KeyError:
        pytest.skip(f"PostgreSQL does not run as root, and there is no user {UNPRIVILEGED}")
    for path in (folder, *folder.iterdir()):
        os.chown(path, user.pw_uid, user.pw_gid)
    return ("runuser", f"--user={UNPRIVILEGED}", "--")


def _call(*command: str) -> None:
    finished = subprocess.run(
        command, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd="/"
    )
    assert finished.returncode == 0, finished.stderr.decode(errors="replace")
