"""audit.json and its folder: written audits are read back, damaged ones are rejected."""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cgd.audit import report, results
from cgd.audit.report import render_page
from cgd.audit.runner import PartResult
from cgd.errors import InputError
from support import audits

KEPT = sorted((Path(__file__).parents[2] / "results" / "audit").iterdir())


def json_paths(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All places in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here] * bool(here) + [each for key, inner in items for each in json_paths(inner, (*here, key))]


def test_written_audit_is_read_back(tmp_path: Path) -> None:
    audit = audits.example()
    page = report.write(tmp_path / "there", audit)
    assert results.load_with_pictures(tmp_path / "there") == audit
    assert page.name == "audit.html"
    files = [path for path in (tmp_path / "there").rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert sorted(path.name for path in files) == [
        *("audit.html", "audit.json", "records-1-real.png", "records-1-recovered.png"),
        *("records-2-real.png", "records-2-recovered.png"),
    ]
    assert audit.complete
    assert list(audit.schemes) == ["secure", "cgd", "dp2"]  # those that were attacked, in the order of the report


@pytest.mark.parametrize("kept", KEPT, ids=lambda path: path.name)
def test_stored_audit_is_written_with_the_same_bytes(kept: Path) -> None:
    """Pictures are not stored in the repository, so their addresses are used as their content."""
    stored = (kept / results.FILE).read_bytes()
    audit = results.load(kept).map_pictures(lambda _, path: results.to_data_uri(path.encode()))
    files = results.to_files(audit)
    assert files.pop(results.FILE) == stored
    assert all(content.decode() == path for path, content in files.items())


def test_order_of_results_is_that_of_the_plan() -> None:
    plan = audits.plan(*(audits.Part(name) for name in "abc"))
    finished = {place: PartResult((audits.result(name, "cgd", 0.5, False),)) for place, name in enumerate("abc")}
    assert audits.assemble(plan, finished) == audits.assemble(plan, dict(reversed(finished.items())))


def test_non_finite_numbers_are_stored_as_texts(tmp_path: Path) -> None:
    values = (math.inf, -math.inf, math.nan, 1e-300)
    part = PartResult(tuple(audits.result("a", "cgd", value, False) for value in values))
    audit = audits.assemble(audits.plan(audits.Part("a")), {0: part})
    stored = results.to_files(audit)[results.FILE]
    json.loads(stored, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    read = results.load(audits.write(tmp_path, audit))
    assert [repr(each.value) for each in read.attacks[0].findings] == [repr(value) for value in values]


def test_interrupted_audit_lists_unfinished_parts() -> None:
    audit = audits.example(complete=False)
    assert not audit.complete
    assert audit.unfinished[0].label == "records, cgd"
    assert audit.attacks[0].findings


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_file_is_rejected_or_rendered(data: st.DataObject, tmp_path: Path) -> None:
    """With any value in any place, there is an InputError that names the folder, or a page can be made."""
    audit = audits.example()
    content = audits.to_json(audit)
    *parents, last = data.draw(st.sampled_from(json_paths(content)))
    place = content
    for each in parents:
        place = place[each]
    place[last] = data.draw(st.sampled_from([None, True, -1, 1e300, 2**70, "", "../x", "<b>", [], {}, [1], {"a": 1}]))
    audits.write(tmp_path, audit, content)
    try:
        read = results.load_with_pictures(tmp_path)
    except InputError as error:
        assert str(tmp_path) in str(error)
    else:
        assert render_page(read).startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "it cannot be read as JSON"),
        (b"\xff", "it cannot be read as JSON"),
        (b"[]", "expected `object`, got `array`"),
        (b"{}", "format is missing"),
        (b'{"format": "cgd-audit 9"}', "use the version of cgd that wrote it"),
        (b"[" * 100_000, "it cannot be read as JSON"),
    ],
)
def test_other_file_is_rejected(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "audit.json").write_bytes(content)
    with pytest.raises(InputError) as caught:
        results.load(tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content["attacks"][0].update(id='x" onclick="'), "must be an identifier"),
        (lambda content: content["attacks"][0].update(id="two-words"), "must be an identifier"),
        (lambda content: content["attacks"][1].update(id="moments"), "two attacks"),
        (
            lambda content: content["attacks"][1]["findings"][0]["pictures"].update(real="pictures/../../secret.png"),
            "outside",
        ),
        (lambda content: content["attacks"][1]["findings"][0]["pictures"].update(real="/etc/passwd"), "outside"),
        (lambda content: content["schemes"].pop("dp2"), "not among the schemes"),
    ],
)
def test_invalid_names_and_paths_are_rejected(change: Any, message: str, tmp_path: Path) -> None:
    audit = audits.example()
    content = audits.to_json(audit)
    change(content)
    with pytest.raises(InputError, match=message):
        results.load(audits.write(tmp_path, audit, content))


def test_missing_or_invalid_picture_is_rejected(tmp_path: Path) -> None:
    audits.write(tmp_path, audits.example())
    first = "pictures/records-1-recovered.png"
    (tmp_path / first).write_text("GIF89a")
    with pytest.raises(InputError, match="not a PNG"):
        report.write_page(tmp_path)
    (tmp_path / first).unlink()
    with pytest.raises(InputError, match=f"{first} is damaged: it cannot be read"):
        report.write_page(tmp_path)


def test_data_uri_in_the_file_is_rejected(tmp_path: Path) -> None:
    """Only files of the folder are pictures of a stored audit."""
    audit = audits.example()
    content = audits.to_json(audit)
    content["attacks"][1]["findings"][0]["pictures"]["real"] = "data:image/png;base64,AAAA"
    audits.write(tmp_path, audit, content)
    with pytest.raises(InputError, match="is damaged: it cannot be read"):
        results.load_with_pictures(tmp_path)
    report.write(tmp_path, audit)
    assert results.load_with_pictures(tmp_path) == audit


def test_only_an_audit_is_replaced(tmp_path: Path) -> None:
    there = tmp_path / "there"
    report.write(there, audits.example())
    (there / "notes.txt").write_text("mine")
    audit = audits.example(complete=False)
    report.write(there, audit)
    assert results.load_with_pictures(there) == audit
    # The pictures of the former audit are removed, the user's own file is not.
    assert sorted(path.name for path in (there / "pictures").iterdir()) == [
        "records-1-real.png",
        "records-1-recovered.png",
    ]
    assert (there / "notes.txt").read_text() == "mine"
    for foreign in ("notes.txt", "audit.json"):
        other = tmp_path / foreign.replace(".", "-")
        other.mkdir()
        (other / foreign).write_text("{}")
        with pytest.raises(InputError, match="holds no audit"):
            report.check(other)
        with pytest.raises(InputError, match="holds no audit"):
            report.write(other, audit)
        assert [path.name for path in other.iterdir()] == [foreign]


def test_check_of_the_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    report.check(tmp_path / "deep" / "down")
    (tmp_path / "empty").mkdir()
    report.check(tmp_path / "empty")
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        report.check(tmp_path / "file")
    with pytest.raises(InputError, match="cannot be written"):
        report.check(tmp_path / "file" / "below")
