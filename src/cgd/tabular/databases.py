"""Records from a database: one query, which can only read, of a PostgreSQL server or an SQLite file.

The query is run once, in a transaction that can only read and sees one state of the database. Its result is written
batch by batch to a temporary file without a name, which only this process can read and which ends with it; all later
reads are of that file. So one batch is in memory, no transaction is open during a training, and the rows and their
order do not change while the process runs.

**What a query may do.** Both databases enforce it, besides our transaction:

- PostgreSQL: the query is a part of `SELECT * FROM (…)`, and is prepared by the server, so it is one statement without
  `INSERT`, `COPY`, `SELECT INTO` or a `WITH` that writes. The transaction is `READ ONLY` and is rolled back, which
  undoes what functions may still do in it. A superuser, and the roles that run programs or write files at the server,
  are refused: their functions are not bound by a transaction.
- SQLite: the file is opened read-only, and an authoriser permits nothing but `SELECT`: no `PRAGMA`, no `ATTACH`.

**Passwords.** A password in the address is refused, and no message repeats it. libpq finds it in `PGPASSWORD`,
`~/.pgpass`, the file in `PGPASSFILE`, or a service file.
"""

from __future__ import annotations

import mmap
import os
import re
import sqlite3
import tempfile
import uuid
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

import pyarrow

from cgd.errors import InputError
from cgd.extras import require
from cgd.tabular.arrow_tables import NumberedRows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

SQLITE_HEADER = b"SQLite format 3\0"
BATCH_ROWS, BATCH_BYTES = 1 << 14, 1 << 22
BATCH_OPTION = "adbc.postgresql.batch_size_hint_bytes"
POSTGRESQL, SQLITE = ("postgresql", "postgres"), "sqlite"
# Parameters of libpq in an address. None can hold a password; `passfile` and `service` name files that may.
PARAMETERS = frozenset(
    [
        "host",
        "hostaddr",
        "port",
        "dbname",
        "user",
        "passfile",
        "service",
        "servicefile",
        "sslmode",
        "sslcert",
        "sslkey",
        "sslrootcert",
        "sslcrl",
        "sslcrldir",
        "ssl_min_protocol_version",
        "ssl_max_protocol_version",
        "channel_binding",
        "require_auth",
        "gssencmode",
        "krbsrvname",
        "gsslib",
        "connect_timeout",
        "application_name",
        "options",
        "target_session_attrs",
        "load_balance_hosts",
        "keepalives",
        "keepalives_idle",
        "keepalives_interval",
        "keepalives_count",
        "tcp_user_timeout",
        "client_encoding",
    ]
)
BY_ENVIRONMENT = "PGPASSWORD in the environment, or a line in ~/.pgpass (or in the file that PGPASSFILE names)"
_POWERFUL = """
    SELECT bool_or(rolsuper OR rolname <> current_user) FROM pg_roles WHERE rolname = current_user
    OR (rolname IN ('pg_execute_server_program', 'pg_write_server_files') AND pg_has_role(current_user, oid, 'MEMBER'))
"""
CANCELLED = "canceling statement due to user request"
ONLY_READS = "a query can only read: write one SELECT"
_ADDRESS = re.compile(r"(?:jdbc:)?[A-Za-z][A-Za-z0-9+.-]*://")
_PASSWORD = re.compile(r"(?i)\b(?:ssl)?(?:password|passwd|pwd)\s*=")
_COMMENTS = re.compile(r"\s+|--[^\n]*(?:\n|$)|/\*.*?\*/", re.DOTALL)
_FIRST_WORD = re.compile(r"[(\s]*([A-Za-z]+)")
READING_WORDS = ("SELECT", "WITH", "VALUES", "TABLE")
# What SQLite's authoriser permits.
_PERMITTED = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
_REFUSED_FUNCTIONS = frozenset({"load_extension", "fts3_tokenizer", "writefile", "edit"})
_INSTRUCTIONS_PER_CHECK = 100_000  # of SQLite, after which Ctrl-C is noticed


def is_address(text: str) -> bool:
    """Return whether a text is the address of a database, and not the name of a file.

    Examples:
        >>> is_address("postgresql://reader@db.example/hospital"), is_address("records.csv")
        (True, False)
    """
    return _ADDRESS.match(text) is not None or (_PASSWORD.search(text) is not None and not Path(text).exists())


@dataclass(frozen=True)
class Query:
    """A query of a database, as a source of records.

    Attributes:
        address: `postgresql://USER@HOST:PORT/DATABASE` with parameters of libpq, or `sqlite:///FILE`. No password.
        sql: one SELECT.

    Raises:
        InputError: the address is not that of a supported database, or has a password; or the query does not read.

    Examples:
        >>> Query("postgresql://reader@db.example/hospital?sslmode=verify-full", "SELECT * FROM stays").title
        'postgresql://reader@db.example/hospital'
        >>> Query("postgresql://reader@db.example/hospital", "DELETE FROM stays")
        Traceback (most recent call last):
        cgd.errors.InputError: the query begins with DELETE; a query can only read: write one SELECT
    """

    address: str
    sql: str

    def __post_init__(self) -> None:
        _check_address(self.address)
        object.__setattr__(self, "sql", _one_statement(self.sql))

    def __getstate__(self) -> dict[str, str]:  # another process runs the query itself
        return {"address": self.address, "sql": self.sql}

    @property
    def title(self) -> str:
        """The address without parameters, or the file, for messages and reports."""
        parts = urlsplit(self.address)
        if parts.scheme == SQLITE:
            return str(sqlite_path(self.address))
        return urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))

    @cached_property
    def table(self) -> ResultTable:
        """The result; the query is run at the first use.

        Raises:
            InputError: the database cannot be reached, or refuses the query.
            MissingExtraError: a library is missing.
        """
        batches = _sqlite_batches(self) if urlsplit(self.address).scheme == SQLITE else _postgresql_batches(self)
        return ResultTable(self.title, batches)


class ResultTable(NumberedRows):
    """The result of a query, in a temporary file. See `cgd.tabular.readers.Table`.

    Args:
        title: the name in messages.
        batches: the result, batch by batch; not empty, because an empty batch has the names of the columns, too.
    """

    def __init__(self, title: str, batches: Iterable[Any]) -> None:
        self.title = f"the result of the query of {title}"
        rest = iter(batches)
        first = next(rest)
        self.names = tuple(name.strip() for name in first.schema.names)
        # By position, because columns may share a name.
        schema = pyarrow.schema([(str(place), each.type) for place, each in enumerate(first.schema)])
        rows = 0
        try:
            with tempfile.TemporaryFile(prefix="cgd-query-") as file:
                with pyarrow.ipc.new_stream(file, schema) as writer:
                    for batch in chain([first], rest):
                        writer.write_batch(pyarrow.record_batch(batch.columns, schema=schema))
                        rows += batch.num_rows
                file.flush()
                self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise InputError(
                f"{self.title} cannot be kept in {tempfile.gettempdir()} ({error.strerror or error}); free some disk "
                "space, or name another folder in the environment variable TMPDIR"
            ) from None
        if not rows:
            raise InputError(f"{self.title} has no rows; correct its conditions")

    def batches(self, positions: Sequence[int]) -> Iterator[list[Any]]:
        """See `Table`."""
        for batch in pyarrow.ipc.open_stream(pyarrow.py_buffer(self._content)):
            yield [batch.column(position) for position in positions]


def _check_address(address: str) -> None:
    """Refuse an address with a password, or of another database, without repeating it."""
    try:
        parts = urlsplit(address)
        user, password = parts.username, parts.password
        parameters = parse_qsl(parts.query, keep_blank_values=True)
        _ = parts.port
    except ValueError as error:
        raise InputError(
            f"the address of the database is not valid ({_without_quotes(error)}); write postgresql://USER@HOST/DATABASE"
        ) from None
    if password is not None or _PASSWORD.search(unquote(address)) or (user is not None and ":" in unquote(user)):
        raise InputError(
            "the address of the database has a password, which others on this machine see in the list of processes, "
            f"and which the history of the shell keeps: change the password, write postgresql://USER@HOST/DATABASE, "
            f"and state the new one as {BY_ENVIRONMENT}"
        )
    scheme = parts.scheme.lower()
    if scheme == SQLITE:
        if parts.netloc or not parts.path.strip("/") or parameters or parts.fragment:
            raise InputError("the address of an SQLite file is sqlite:///FILE, or sqlite:////FOLDER/FILE from the root")
        return
    if scheme not in POSTGRESQL:
        raise InputError(
            f"databases of the kind {scheme!r} are not supported, because only for PostgreSQL and SQLite it is known "
            "that a query can only read; export the result as CSV or Parquet, or write postgresql://USER@HOST/DATABASE "
            "or sqlite:///FILE"
        )
    unknown = sorted({name for name, _ in parameters if name not in PARAMETERS})
    if unknown or parts.fragment:
        what = f"the parameter {unknown[0]!r}" if unknown else "a part behind '#'"
        raise InputError(f"the address of the database has {what}, which is not supported; remove it")


def _one_statement(sql: str) -> str:
    """Return a query without the semicolon at its end.

    The databases refuse everything but a single query that reads; here are clear messages for the usual mistakes.
    """
    text = sql.strip()
    while text.endswith(";"):
        text = text[:-1].rstrip()
    rest = text
    while found := _COMMENTS.match(rest):
        rest = rest[found.end() :]
    word = _FIRST_WORD.match(rest)
    if not rest:
        raise InputError(f"the query is empty; {ONLY_READS}")
    if word is None or word[1].upper() not in READING_WORDS:
        begins = word[1].upper() if word else repr(rest[:10])
        raise InputError(f"the query begins with {begins}; {ONLY_READS}")
    if "\0" in text:
        raise InputError(f"the query has a null character; {ONLY_READS}")
    return text


# PostgreSQL.


def _postgresql_batches(query: Query) -> Iterator[Any]:
    """Run a query of a PostgreSQL server, and yield its result as record batches of plain types."""
    require("postgresql", "reading from PostgreSQL")
    from adbc_driver_manager import dbapi as adbc
    from adbc_driver_postgresql import dbapi

    title = query.title
    try:
        connection = dbapi.connect(_with_encryption(query.address), autocommit=True)
    except (adbc.Error, OSError) as error:
        raise InputError(
            f"{title} cannot be reached ({_reason(error)}); check the address, and that the password, if one is "
            f"needed, is stated as {BY_ENVIRONMENT}"
        ) from None
    with connection, connection.cursor() as cursor:
        try:
            cursor.execute("BEGIN TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            _refuse_powerful_account(cursor, title)
            cursor.adbc_statement.set_options(**{BATCH_OPTION: str(BATCH_BYTES)})
            # A part of another query: only one that reads can be. On lines of its own: it may end with a comment.
            cursor.execute(f"SELECT * FROM (\n{query.sql}\n) AS records")  # noqa: S608 - the user's own query
            reader = cursor.fetch_record_batch()
            names = reader.schema.names
            yield _plain_batch(names, [pyarrow.array([], each.type) for each in reader.schema])
            for batch in reader:
                yield _plain_batch(names, batch.columns)
        except (adbc.Error, pyarrow.ArrowException, OSError) as error:
            if CANCELLED in str(error):  # ADBC takes Ctrl-C for itself, and cancels the query
                raise KeyboardInterrupt from None
            raise InputError(f"{title} refuses the query ({_reason(error)}); {ONLY_READS}, and correct it") from None
        finally:
            cursor.execute("ROLLBACK")


def _refuse_powerful_account(cursor: Any, title: str) -> None:
    cursor.execute(_POWERFUL)
    if cursor.fetchone()[0]:
        raise InputError(
            f"the account for {title} is a superuser, or may run programs or write files at the server, and a query "
            "can do so by functions, also in a transaction that can only read. Create an account that may only read: "
            "CREATE ROLE reader LOGIN; GRANT SELECT ON the tables TO reader"
        )


def _with_encryption(address: str) -> str:
    """Return an address with which libpq refuses a connection over a network without TLS, unless it says otherwise."""
    parts = urlsplit(address)
    parameters = dict(parse_qsl(parts.query, keep_blank_values=True))
    host = unquote(parts.hostname or "") or parameters.get("host", "")
    addresses = [host, parameters.get("hostaddr", "")]
    local = all(not each or each.startswith(("/", "@", "127.")) or each in ("localhost", "::1") for each in addresses)
    stated = {"sslmode", "service"} & parameters.keys() or "PGSSLMODE" in os.environ or "PGSERVICE" in os.environ
    if not stated and not (local and (host or not os.environ.get("PGHOST"))):
        parameters["sslmode"] = "require"
    return urlunsplit((POSTGRESQL[0], parts.netloc, parts.path, urlencode(parameters, quote_via=quote), ""))


def _plain_batch(names: Sequence[str], columns: Sequence[Any]) -> Any:
    return pyarrow.record_batch([_plain(each) for each in columns], names=list(names))


def _plain(array: Any) -> Any:
    """Return an array without an extension type: exact decimals, JSON and UUIDs as text."""
    if not isinstance(array.type, pyarrow.BaseExtensionType):
        return array
    storage = array.storage
    if str(array.type) == "extension<arrow.uuid>":
        texts = [None if each is None else str(uuid.UUID(bytes=each)) for each in storage.to_pylist()]
        return pyarrow.array(texts, pyarrow.string())
    return storage


def _reason(error: Exception) -> str:
    """Return the message of a database without its own prefixes and the query."""
    text = str(error).partition("Query was:")[0].partition("SQLSTATE")[0]
    text = text.rpartition("ERROR:  ")[2].rpartition("FATAL:  ")[2]
    return " ".join(text.split("\n")[0].split()).removesuffix(".") or type(error).__name__


def _without_quotes(error: Exception) -> str:
    """Return a message of `urllib` without what it quotes, which may be a part of a password."""
    return re.sub(r"(['\"]).*\1|: .*", "", str(error)).strip()


# SQLite.


def sqlite_path(address: str) -> Path:
    """Return the file of an address.

    Examples:
        >>> sqlite_path("sqlite:///folder/records.db").as_posix(), sqlite_path("sqlite:////srv/records.db").as_posix()
        ('folder/records.db', '/srv/records.db')
    """
    return Path(unquote(urlsplit(address).path[1:]))


def _sqlite_batches(query: Query) -> Iterator[Any]:
    """Run a query of an SQLite file, and yield its result as record batches of texts."""
    path = sqlite_path(query.address)
    try:
        with path.open("rb") as file:
            head = file.read(len(SQLITE_HEADER))
    except OSError as error:
        fact = "is a folder" if path.is_dir() else f"cannot be read ({error.strerror})"
        raise InputError(f"{path} {fact}; name an SQLite file") from None
    if head != SQLITE_HEADER:
        raise InputError(f"{path} is not an SQLite file; a query (--query) is for a database")
    connection = None
    try:
        connection = sqlite3.connect(
            f"file:{quote(os.fsencode(path.absolute()))}?mode=ro", uri=True, isolation_level=None
        )
        connection.execute("PRAGMA query_only = ON")
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("BEGIN")
        connection.set_authorizer(_authorise)
        connection.set_progress_handler(lambda: 0, _INSTRUCTIONS_PER_CHECK)  # Python handles signals there
        cursor = connection.execute(query.sql)
        if cursor.description is None:
            raise sqlite3.ProgrammingError("it gives no rows")
        names = [each[0] for each in cursor.description]
        yield _text_batch(names, [])
        while rows := cursor.fetchmany(BATCH_ROWS):
            yield _text_batch(names, rows)
    except (sqlite3.Error, sqlite3.Warning, UnicodeDecodeError) as error:
        if "interrupted" in str(error):
            raise KeyboardInterrupt from None
        raise InputError(f"{path} refuses the query ({error}); {ONLY_READS}, and correct it") from None
    finally:
        if connection is not None:
            connection.close()


def _authorise(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    permitted = action in _PERMITTED and not (
        action == sqlite3.SQLITE_FUNCTION and (second or first or "").lower() in _REFUSED_FUNCTIONS
    )
    return sqlite3.SQLITE_OK if permitted else sqlite3.SQLITE_DENY


def _text_batch(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Any:
    """Return rows as texts: in SQLite, the values of a column may be of different types."""
    columns = zip(*rows, strict=True) if rows else ((),) * len(names)
    arrays = [pyarrow.array(list(map(_text, values)), pyarrow.string()) for values in columns]
    return pyarrow.record_batch(arrays, names=list(names))


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bytes):
        raise sqlite3.DataError("a value is a BLOB: select columns of numbers and texts only")
    return repr(value)
