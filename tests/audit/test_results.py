"""audit.json and its folder: what is written is read again, and what is damaged is refused."""

from __future__ import annotations

import json
import math
import stat
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cgd.audit import folder, results
from cgd.audit.page import render
from cgd.audit.runner import Done, Outcome
from cgd.errors import InputError
from support import audits

if TYPE_CHECKING:
    from pathlib import Path


def paths(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here] * bool(here) + [each for key, inner in items for each in paths(inner, (*here, key))]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    said, pictures = audits.example()
    page = folder.write(tmp_path / "there", said, pictures)
    assert results.load(tmp_path / "there") == said
    assert results.load_pictures(tmp_path / "there", said) == pictures
    assert page.name == "audit.html"
    files = [path for path in (tmp_path / "there").rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert sorted(path.name for path in files) == sorted(
        ["audit.html", "audit.json", *(path.removeprefix("pictures/") for path in pictures)]
    )
    assert said["complete"]
    assert list(said["schemes"]) == ["secure", "dp", "cgd"]  # those that were tried, in the order in which we show them


def test_the_order_is_the_plans_whoever_was_first() -> None:
    plan = audits.plan(*(audits.Part(name) for name in "abc"))
    done = {place: Done({name: (audits.measured(name, "cgd", 0.5, False),)}) for place, name in enumerate("abc")}
    forth, _ = results.content(plan, Outcome(done, 1.0), 0, audits.WHEN)
    back, _ = results.content(plan, Outcome(dict(reversed(done.items())), 1.0), 0, audits.WHEN)
    assert json.dumps(forth) == json.dumps(back)


def test_numbers_without_bounds_survive_json(tmp_path: Path) -> None:
    plan = audits.plan(audits.Part("a"))
    values = (math.inf, -math.inf, math.nan, 1e-300)
    done = Done({"a": tuple(audits.measured("a", "cgd", value, False) for value in values)})
    said, _ = results.content(plan, Outcome({0: done}, 1.0), 0, audits.WHEN)
    json.loads(results.to_bytes(said), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    read = results.load(audits.write(tmp_path, said, {}))
    assert [repr(each["value"]) for each in read["attacks"][0]["findings"]] == [repr(value) for value in values]


def test_an_interrupted_audit_says_what_is_missing() -> None:
    said, _ = audits.example(complete=False)
    assert not said["complete"]
    assert next(each["label"] for each in said["unfinished"]) == "records, cgd"
    assert said["attacks"][0]["findings"]


@given(data=st.data())
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_damaged_is_refused_or_does_no_harm(data: st.DataObject, tmp_path: Path) -> None:
    """Anything may be in the place of anything: it is an InputError, or a page can be made of it."""
    said, pictures = audits.example()
    *parents, last = data.draw(st.sampled_from(paths(said)))
    place = said
    for each in parents:
        place = place[each]
    place[last] = data.draw(st.sampled_from([None, True, -1, 1e300, 2**70, "", "../x", "<b>", [], {}, [1], {"a": 1}]))
    audits.write(tmp_path, said, pictures)
    try:
        read = results.load(tmp_path)
        found = results.load_pictures(tmp_path, read)
    except InputError as error:
        assert str(tmp_path) in str(error)
    else:
        assert render(read, found).startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "it is not JSON"),
        (b"\xff", "it is not JSON"),
        (b"[]", "is [], not an object"),
        (b"{}", "format is missing"),
        (b'{"format": "cgd-audit 9"}', "use the version of cgd that wrote it"),
        (b"[" * 100_000, "it is not JSON"),
    ],
)
def test_a_file_that_is_no_audit_is_refused(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "audit.json").write_bytes(content)
    with pytest.raises(InputError) as caught:
        results.load(tmp_path)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda said: said["attacks"][0].update(id='x" onclick="'), "other characters"),
        (lambda said: said["attacks"][1].update(id="moments"), "two attacks"),
        (
            lambda said: said["attacks"][1]["findings"][0]["pictures"].update(real="pictures/../../secret.png"),
            "outside",
        ),
        (lambda said: said["attacks"][1]["findings"][0]["pictures"].update(real="/etc/passwd"), "outside"),
        (lambda said: said["schemes"].pop("dp"), "not among the schemes"),
    ],
)
def test_names_and_paths_are_looked_at(change: Any, says: str, tmp_path: Path) -> None:
    said, pictures = audits.example()
    change(said)
    with pytest.raises(InputError, match=says):
        results.load(audits.write(tmp_path, said, pictures))


def test_a_picture_that_is_gone_or_none_is_named(tmp_path: Path) -> None:
    said, pictures = audits.example()
    audits.write(tmp_path, said, pictures)
    first, second, *_ = pictures
    (tmp_path / first).write_text("GIF89a")
    with pytest.raises(InputError, match="no PNG"):
        folder.write_page(tmp_path)
    (tmp_path / first).unlink()
    with pytest.raises(InputError, match=f"{first} is damaged: it cannot be read"):
        folder.write_page(tmp_path)
    assert second != first


def test_only_an_audit_is_replaced(tmp_path: Path) -> None:
    there = tmp_path / "there"
    folder.write(there, *audits.example())
    (there / "notes.txt").write_text("mine")
    said, pictures = audits.example(complete=False)
    folder.write(there, said, pictures)
    assert results.load(there) == said
    # What the former audit named is gone, what is the user's own stays.
    assert sorted(path.name for path in (there / "pictures").iterdir()) == sorted(
        path.removeprefix("pictures/") for path in pictures
    )
    assert (there / "notes.txt").read_text() == "mine"
    for foreign in ("notes.txt", "audit.json"):
        other = tmp_path / foreign.replace(".", "-")
        other.mkdir()
        (other / foreign).write_text("{}")
        with pytest.raises(InputError, match="holds no audit"):
            folder.check(other)
        with pytest.raises(InputError, match="holds no audit"):
            folder.write(other, said, pictures)
        assert [path.name for path in other.iterdir()] == [foreign]


def test_looking_whether_it_can_be_written_leaves_nothing(tmp_path: Path) -> None:
    folder.check(tmp_path / "deep" / "down")
    (tmp_path / "empty").mkdir()
    folder.check(tmp_path / "empty")
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        folder.check(tmp_path / "file")
    with pytest.raises(InputError, match="cannot be written"):
        folder.check(tmp_path / "file" / "below")
