"""Files of every kind, damaged in many ways: a CGDError names the file, or the file is accepted."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cgd
from cgd.audit import results
from cgd.audit.report import render_page
from cgd.audit.trace_view import load, view_of
from cgd.errors import CGDError
from cgd.experiments import cifar, idx
from cgd.experiments.runner import RunResult
from cgd.federation.config import Federation
from cgd.federation.keys import Keys, read_public_key
from cgd.federation.state import StateFolder
from cgd.local import solo_peers
from cgd.reporting.run_file import load_run
from cgd.reporting.training_report import render
from cgd.secagg.journal import Journal
from cgd.simulation import checkpoint
from cgd.tabular.model import ConfinedModel, load_model
from cgd.tabular.predict import load_inputs, predict
from cgd.tabular.run_folder import RunFolder
from cgd.tabular.trace_writer import TraceWriter
from cgd.tabular.training import train
from support import audits, runs
from support.tabular import records, table, tabular_settings, write_csv, write_federation
from support.wire import spec

if TYPE_CHECKING:
    from collections.abc import Callable

NAMES = ("ada", "bob", "cleo")
PROVENANCE = {"participant": "ada", "federation": "trial", "epoch": 1, "digest": "ab"}
CHECKPOINT = {"lr": "0.5"}
DEEP: Any = []
for _ in range(400):
    DEEP = [DEEP]
ODD_VALUES = [
    *(None, True, False, 0, -1, 1, 7, 2**31, 2**63, 2**70, -(2**70), 1e300, -1e300, 5e-324, 0.5),
    *(float("nan"), float("inf"), float("-inf"), "", "x", "\ud800", "a" * 10_000, "../x", "0"),
    *([], {}, [[]], [None], [1], ["x"], {"x": 1}, {"": None}, DEEP),
]
FILE_CONTENTS: list[bytes] = [
    *(b"", b"\x00", b"\xff\xfe", b"{}", b"[]", b"null", b"0", b'"x"', b"NaN", b"{", b"[" * 100_000, b'{"a":' * 100_000),
    *(
        b"1" * 5_000,
        b"\x1f\x8b\x08\x00",
        b"PK\x03\x04",
        b"a" + b".a" * 5_000 + b" = 1",
        b"\n" * 1000,
        bytes(range(256)),
    ),
    *(
        b"[" + b"a." * 5_000 + b"a]",
        b"a = " + b"[" * 3_000,
        b"\x80\x04\x95",
        b"\xff" * 64,
        (2**62).to_bytes(8, "little") * 4,
    ),
]


@dataclass(frozen=True)
class Kind:
    """A kind of files.

    Attributes:
        files: the files to damage, relative to the folder.
        use: reads and uses them.
    """

    files: tuple[str, ...]
    use: Callable[[Path], object]


def use_model(folder: Path) -> None:
    model = load_model(folder)
    model.predict(table(5, 3))
    predictions = predict(model, load_inputs(model, folder.parent / "inputs.csv"))
    with (folder / "predictions").open("w", encoding="utf-8") as file:
        predictions.write(file, model.data.target)


def use_run(folder: Path) -> None:
    render(load_run(folder)).encode()


def use_trace(folder: Path) -> None:
    trace = load(folder)
    list(trace.frames())
    view_of([trace])


def use_history(folder: Path) -> None:
    RunFolder(folder, Federation.load(folder.parent / "federation" / "federation.toml"), "ada")


def use_audit(folder: Path) -> None:
    render_page(results.load_with_pictures(folder))


def use_keys(folder: Path) -> None:
    Keys.load(folder / "ada.key")


def use_public_key(folder: Path) -> None:
    read_public_key(str(folder / "ada.pub"))


KINDS = {
    "model": Kind(("model.json", "model.safetensors"), use_model),
    "run": Kind(("run.json",), use_run),
    "recording": Kind(
        (
            *("recording.json", "data.safetensors", "frames", "steps/000001.own.safetensors"),
            *("steps/000001.total.safetensors", "steps/000002.state.safetensors"),
        ),
        use_trace,
    ),
    "history": Kind(("history.jsonl",), use_history),
    "federation": Kind(("federation.toml",), lambda folder: Federation.load(folder / "federation.toml")),
    "keys": Kind(("ada.key",), use_keys),
    "public key": Kind(("ada.pub",), use_public_key),
    "audit": Kind(("audit.json",), use_audit),
    "checkpoint": Kind(("run.pt",), lambda folder: checkpoint.load(folder / "run.pt", CHECKPOINT)),
    "result": Kind(("result.json",), lambda folder: RunResult.read(folder / "result.json")),
    "data set": Kind(("idx",), lambda folder: idx.parse((folder / "idx").read_bytes(), folder / "idx")),
    "features": Kind(("features.safetensors",), lambda folder: cifar.read_cache(folder / "features.safetensors")),
    "state": Kind(
        ("trial+everyone.ledger", "trial+everyone.2.entries"),
        lambda folder: StateFolder(folder, "trial").load(),
    ),
}


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each kind, with undamaged files; read only."""
    folder = tmp_path_factory.mktemp("undamaged")
    config = tabular_settings(steps=4, validate_every=2)
    trained = train(solo_peers(b"s" * 32), config, records(table(40, 1)))
    ConfinedModel.from_training(trained, config, PROVENANCE).save(folder / "model")
    write_csv(folder / "inputs.csv", table(6, 5))
    runs.write(runs.classification(), folder / "run")
    record(folder / "recordings")
    shutil.copytree(folder / "recordings" / "ada", folder / "recording")
    for name in ("federation", "history", "state", "checkpoint", "data set", "features", "result", "audit"):
        (folder / name).mkdir()
    path = write_federation(folder / "federation", NAMES)
    for name in ("keys", "public key"):
        shutil.copytree(folder / "federation", folder / name)
    RunFolder(folder / "history", Federation.load(path), "ada").add(trained.evaluations[0])
    audits.write(folder / "audit", audits.example())
    checkpoint.save(folder / "checkpoint" / "run.pt", CHECKPOINT, {"displacement": torch.zeros(3), "history": {}})
    shutil.copy(next(RESULTS.glob("iris-*.json")), folder / "result" / "result.json")
    (folder / "data set" / "idx").write_bytes(bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3]) + bytes(6))
    images, labels = torch.ones(5, 64), torch.arange(5)
    cifar.write_cache(
        folder / "features" / "features.safetensors", cifar.Features(images, labels, images + 1, labels + 1)
    )
    journal = Journal()
    state = StateFolder(folder / "state", "trial")
    for place in range(4):
        journal.append(spec(2), np.full(2, place, dtype="<u4"), epoch=1)
        if place == 1:
            state.save("everyone", 2, journal.to_bytes())
        if place > 1:
            state.append("everyone", place, journal.entry_record(place))
    state.close()
    return folder


RESULTS = Path(__file__).parent.parent.parent / "results" / "paper"


def record(folder: Path) -> None:
    """Record a run, with the state of a restart before step 2."""
    config = tabular_settings(optimizer="sgd", lr=0.5, steps=4, validate_every=2)

    def member(peers: cgd.Peers, content: dict[str, list[Any]]) -> None:
        train(peers, config, records(content), trace_writer=trace_writers[peers.me])

    with ExitStack() as open_files:
        trace_writers = {name: open_files.enter_context(TraceWriter(folder / name, name, "trial")) for name in NAMES}
        sinks = {name: each.frame for name, each in trace_writers.items()}
        with cgd.local_peers(NAMES, sinks=sinks) as group:
            group.run(member, [table(20, 1), table(20, 2), table(20, 3)])
    state = safetensors.numpy.save({"displacement": load(folder / "ada").displacements()[2].numpy()})
    (folder / "ada" / "steps" / "000002.state.safetensors").write_bytes(state)


def use(name: str, folder: Path) -> str:
    """Use a folder of this kind; return the message of the error, or an empty text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            KINDS[name].use(folder)
        except CGDError as error:
            assert str(folder) in str(error), error
            return str(error)
    return ""


def test_undamaged_files_are_accepted(undamaged: Path) -> None:
    for name in KINDS:
        assert use(name, undamaged / name) == "", name


@pytest.fixture
def damaged(undamaged: Path, tmp_path: Path) -> Path:
    """Copies of all folders, to be damaged."""
    shutil.copytree(undamaged, tmp_path / "all")
    return tmp_path / "all"


def update_digest(folder: Path) -> None:
    """Store the digest of the weights in model.json, as an attacker can."""
    about, weights = folder / "model.json", folder / "model.safetensors"
    try:
        content = json.loads(about.read_bytes())
        content["weights"]["sha256"] = hashlib.sha256(weights.read_bytes()).hexdigest()
        about.write_text(json.dumps(content))
    except (ValueError, RecursionError, KeyError, TypeError, OSError):
        pass


EACH_FILE = [(name, file) for name, kind in KINDS.items() for file in kind.files]


@pytest.mark.parametrize(("name", "file"), EACH_FILE)
def test_replaced_file_raises_no_unexpected_error(name: str, file: str, damaged: Path) -> None:
    path = damaged / name / file
    for content in FILE_CONTENTS:
        path.write_bytes(content)
        use(name, damaged / name)
        update_digest(damaged / name)
        use(name, damaged / name)
    path.unlink()
    path.mkdir()
    if name not in ("data set",):
        assert use(name, damaged / name)


@pytest.mark.parametrize(("name", "file"), EACH_FILE)
@given(data=st.data())
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_changed_bytes_raise_no_unexpected_error(
    name: str, file: str, damaged: Path, undamaged: Path, data: st.DataObject
) -> None:
    content = bytearray((undamaged / name / file).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(0, len(content) - 1)))
        end = data.draw(st.integers(at, min(len(content), at + 30)))
        content[at:end] = data.draw(st.binary(max_size=12))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    (damaged / name / file).write_bytes(content)
    if name == "model":
        shutil.copy(undamaged / name / ("model.json" if file != "model.json" else "model.safetensors"), damaged / name)
        update_digest(damaged / name)
    use(name, damaged / name)


def paths(content: Any) -> list[tuple[Any, ...]]:
    """Return the paths of all values in a JSON document."""
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [path for key, each in inner for path in ((key,), *((key, *rest) for rest in paths(each)))]


JSON_FILES = [(name, file) for name, file in EACH_FILE if file.endswith(".json")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "file"), JSON_FILES)
@given(data=st.data())
@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_replaced_json_values_raise_no_unexpected_error(
    name: str, file: str, damaged: Path, undamaged: Path, data: st.DataObject
) -> None:
    content = json.loads((undamaged / name / file).read_bytes())
    for _ in range(data.draw(st.integers(1, 2))):
        *path, last = data.draw(st.sampled_from(paths(content)))
        place = content
        for key in path:
            place = place[key]
        change = data.draw(st.sampled_from(["replace", "remove", "duplicate"]))
        if change == "replace":
            place[last] = copy.deepcopy(data.draw(st.sampled_from(ODD_VALUES)))
        elif change == "remove":
            del place[last]
        elif isinstance(place, list):
            place.append(copy.deepcopy(place[last]))
        else:
            place[data.draw(st.sampled_from(["more", "", "name"]))] = copy.deepcopy(place[last])
    (damaged / name / file).write_text(json.dumps(content))
    use(name, damaged / name)


TOML_VALUES = (
    *("", "1", "-1", "0.5", "nan", "-inf", "1e400", "true", '"x"', '""', '"\\u0000"', "[]", "{}", "[[]]", "[1, 'x']"),
    *("{ x = 1 }", "1979-05-27", "07:32:00", str(2**63), "9" * 5000, "[" * 200 + "]" * 200, '"' + "a" * 9999 + '"'),
)


@pytest.mark.parametrize(("name", "file"), [("federation", "federation.toml"), ("keys", "ada.key")])
def test_replaced_toml_values_raise_no_unexpected_error(name: str, file: str, damaged: Path) -> None:
    path = damaged / name / file
    lines = path.read_text().splitlines()
    for place, line in enumerate(lines):
        key, equals, _ = line.partition(" = ")
        for value in TOML_VALUES if equals else ("", "[x]", "[[x]]", "[training]", "x = 1"):
            changed = f"{key} = {value}" if equals else value
            path.write_text("\n".join([*lines[:place], changed, *lines[place + 1 :]]))
            use(name, damaged / name)


TENSOR_FILES = [(name, file) for name, file in EACH_FILE if file.endswith(".safetensors")]
CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda array: array[:0],
    "a row less": lambda array: array[:-1],
    "a row more": lambda array: np.concatenate([array, array[-1:]]),
    "a dimension more": lambda array: array[None],
    "flat": lambda array: array.reshape(-1),
    "a number": lambda array: array.reshape(-1)[0],
    "doubles": lambda array: array.astype(np.float64),
    "halves": lambda array: array.astype(np.float16),
    "whole numbers": lambda array: array.astype(np.int64),
    "bytes": lambda array: array.astype(np.uint8),
    "truth values": lambda array: array.astype(np.bool_),
    "large": lambda array: np.full_like(array, 2**30),
    "negative": lambda array: np.full_like(array, -3),
    "no numbers": lambda array: np.full_like(array, np.nan) if array.dtype.kind == "f" else array,
}


@pytest.mark.parametrize(("name", "file"), TENSOR_FILES)
@pytest.mark.parametrize("change", [*CHANGES, "gone", "another name"])
def test_replaced_tensors_raise_no_unexpected_error(name: str, file: str, change: str, damaged: Path) -> None:
    path = damaged / name / file
    with safetensors.safe_open(path, "np") as opened:
        tensors, metadata = {key: opened.get_tensor(key) for key in opened.keys()}, opened.metadata()  # noqa: SIM118
    for key, array in tensors.items():
        changed = {other: each for other, each in tensors.items() if other != key}
        if change == "another name":
            changed[f"{key}s"] = array
        elif change != "gone":
            with np.errstate(invalid="ignore"):
                changed[key] = np.ascontiguousarray(CHANGES[change](array))
        path.write_bytes(safetensors.numpy.save(changed, metadata))
        update_digest(damaged / name)
        use(name, damaged / name)
