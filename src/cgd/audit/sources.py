"""The sources that `cgd audit` can attack, and the plan for the arguments of the command line.

Nothing at all: embedded data. A spec: a setting with a public data set. A table with a federation file: one's own
records, before joining. Folders: a recorded run.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cgd.audit import spec_source
from cgd.audit.embedded_source import embedded
from cgd.audit.spec_source import from_spec
from cgd.audit.table_source import from_table
from cgd.audit.trace_source import from_recording
from cgd.errors import InputError
from cgd.tabular.databases import is_address
from cgd.tabular.sources import parse_source
from cgd.tabular.trace_writer import FILE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cgd.audit.runner import Plan

SPEC_SUFFIX = ".toml"


def plan_for(
    what: Sequence[str | Path],
    coalition: Sequence[str] = (),
    *,
    sheet: str | None = None,
    query: str | None = None,
    federation: Path | None = None,
    target: str | None = None,
    decimal: str | None = None,
    label: str | None = None,
    rounds: int | None = None,
    honest: int | None = None,
    data_dir: Path | None = None,
    function: str | None = None,
) -> Plan:
    """Return the plan for the arguments of the command line.

    Args:
        what: nothing, a spec (.toml), a table or the address of a database, or the folders of a recorded run.
        coalition: the colluders of a recorded run; with one folder, none, and everybody else colludes.
        sheet: with a table, the sheet of the workbook.
        query: with a table, the query of the database.
        federation: with a table, the federation file.
        target: with a table, the name of its target, if it is not that of the federation file.
        decimal: with a table, the decimal sign of its numbers, a point (the default) or a comma.
        label: the run of a spec; the first that trains by cgd if not given.
        rounds: of a spec or a table, the number of rounds that the coalition sees; see each source for the default.
        honest: of a spec or a table, the number of honest participants; see each source for the default.
        data_dir: the folder to search first for data sets of a spec.
        function: the `module:function` that builds the network of a recorded run, or of the federation file of a table,
            if it is a custom one.

    Raises:
        InputError: the arguments do not fit together, or a file cannot be read.
    """
    if addresses := [str(each) for each in what if is_address(str(each))]:
        parse_source(addresses[0], sheet, query)  # first, so that no message repeats a password
        if federation is None:
            raise InputError("a database is audited with the federation file that it is for; name it with --federation")
    paths = [Path(each) for each in what]
    specs = [path for path in paths if path.suffix == SPEC_SUFFIX]
    recorded = bool(paths) and not specs and federation is None
    if coalition and not recorded:
        raise InputError(f"--coalition is {', '.join(coalition)}; it is for recorded runs: name their folders")
    if function is not None and not recorded and federation is None:
        raise InputError(
            f"--function is {function!r}; it is for recorded runs and tables: name the folders, or a table"
        )
    for option, value in (("--label", target), ("--decimal", decimal), ("--sheet", sheet), ("--query", query)):
        if federation is None and value is not None:
            raise InputError(
                f"{option} is {value!r}; it is for a table: name one, and its federation file (--federation)"
            )
    if not specs and (label, data_dir) != (None, None):
        raise InputError("--run and --data-dir are for a spec; name one (SPEC.toml)")
    if not specs and federation is None and (rounds, honest) != (None, None):
        raise InputError("--rounds and --honest are for a spec or a table; name one (SPEC.toml, or TABLE --federation)")
    if federation is not None:
        if len(paths) != 1 or specs:
            given = ", ".join(map(str, paths)) or "nothing"
            raise InputError(
                f"--federation is {federation}, and {given} is to be audited; name one table, a file or a database, "
                "or omit --federation"
            )
        return from_table(
            parse_source(str(what[0]), sheet, query),
            federation,
            target=target,
            decimal=decimal,
            rounds=rounds,
            honest=honest,
            function=function,
        )
    if not paths:
        return embedded()
    if specs:
        if len(paths) > 1:
            names = ", ".join(str(path) for path in paths)
            raise InputError(f"{names} cannot be audited together; name one spec, or the folders of one run")
        honest = spec_source.DEFAULT_HONEST if honest is None else honest
        return from_spec(specs[0], label, rounds or spec_source.DEFAULT_ROUNDS, honest, data_dir)
    for folder in paths:
        if not (folder / FILE).is_file():
            raise _not_a_source(folder)
    return from_recording(paths, coalition, function)


def _not_a_source(path: Path) -> InputError:
    if path.is_file():
        return InputError(
            f"{path} is a file; to audit a table, name the file of the federation that it is for: `cgd audit {path} "
            "--federation federation.toml`. Otherwise name a spec (.toml), or folders that `cgd join --record` wrote"
        )
    fact = f"has no {FILE}" if path.is_dir() else "does not exist"
    return InputError(
        f"{path} {fact}; name a spec (.toml), a table with --federation, or folders that `cgd join --record` wrote"
    )
