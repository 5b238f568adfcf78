"""The page: what it says, that it needs nothing else, and that texts stay texts."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from cgd.audit import folder, results
from cgd.audit.runner import Outcome
from support import audits
from support.pages import EVIL, Page

if TYPE_CHECKING:
    from pathlib import Path

HOW: list[dict[str, Any]] = [{}, {"kind": "recording"}, {"wrong_control": True}, {"complete": False}]


def page(where: Path, said: dict[str, Any], pictures: dict[str, bytes]) -> str:
    return folder.write_page(audits.write(where, said, pictures)).read_text()


@pytest.mark.parametrize("how", HOW)
def test_it_needs_nothing_else_and_is_well_made(how: dict[str, Any], tmp_path: Path) -> None:
    text = page(tmp_path, *audits.example(**how))
    for outside in ("http://", "https://", "url(", "@import", "javascript:"):
        assert outside not in text
    found = Page(text)
    tags = [tag for tag, _ in found.elements]
    assert not set(tags) & {"script", "iframe", "object", "embed", "form", "base", "audio", "video"}
    assert tags.count("h1") == 1
    ids = [attributes["id"] for _, attributes in found.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    policy = next(each for _, each in found.elements if each.get("http-equiv") == "Content-Security-Policy")
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    for tag, attributes in found.elements:
        if (attributes.get("href") or "").startswith("#"):
            assert (attributes["href"] or "")[1:] in ids
        assert (attributes.get("href") or "#").startswith(("#", "data:,"))
        assert (attributes.get("src") or "data:image/png;base64,").startswith("data:image/png;base64,")
        assert tag != "img" or attributes["alt"]
        assert tag != "th" or attributes.get("scope") in {"row", "col", "rowgroup"}
    levels = [int(tag[1]) for tag in tags if re.fullmatch("h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert "None" not in found.text
    assert "Verdict(" not in found.text


def test_it_begins_with_the_answer(tmp_path: Path) -> None:
    text = Page(page(tmp_path, *audits.example())).text
    assert "1 of 3 attacks get through against CGD" in text
    assert "These succeed against CGD: Attack moments." in text
    assert "These do not succeed against CGD: Attack records; Attack liars." in text
    beside = (
        "Beside FedSGD with secure aggregation: of 2 attacks tried against both, 1 gets through against FedSGD with"
    )
    assert f"{beside} secure aggregation alone (Attack records)." in text
    assert "2 controls, none of them wrong" in text
    assert "1 part ended with an error" in text
    assert text.index("These succeed") < text.index("At a glance") < text.index("They look closely.")
    for shown in (
        "0.077 (chance 0.295)",
        "8.0e−7 (chance 0.295)",
        "in 2 of 3 settings",
        "Add noise.",
        "3.5 % (chance 0 %)",
    ):
        assert shown in text
    assert "cgd audit --seed 3" in text
    assert "16 November 2026, 12:00 UTC" in text
    assert "Confidential" not in text


def test_the_answer_follows_the_findings(tmp_path: Path) -> None:
    said, pictures = audits.example()
    for attack in said["attacks"]:
        for finding in attack["findings"]:
            finding["succeeds"] = finding["must_succeed"]
    text = Page(page(tmp_path, said, pictures)).text
    assert "0 of 3 attacks get through against CGD" in text
    assert "These succeed" not in text
    assert "tried against both, all end the same way" in text


def test_ones_own_records_are_confidential(tmp_path: Path) -> None:
    for kind in ("spec", "recording"):
        said, pictures = audits.example(kind)
        text = Page(page(tmp_path / kind, said, pictures)).text
        assert "Confidential. This page was made from somebody’s own records" in text
        assert "cgd audit mine.toml --seed 3" in text


def test_what_went_wrong_is_said(tmp_path: Path) -> None:
    text = Page(page(tmp_path / "loud", *audits.example(wrong_control=True))).text
    assert "Not to be relied on: Attack moments. 1 of 2 controls came out as they must not." in text
    assert "DOES NOT FAIL" in text
    assert "records, dp failed: ZeroDivisionError" in text
    assert "Attack theory , CGD, could not be tried: the model is not linear" in text
    text = Page(page(tmp_path / "part", *audits.example(complete=False))).text
    assert "Not complete. The audit was interrupted." in text
    assert "liars, cgd was not run." in text


def test_the_same_audit_gives_the_same_bytes(tmp_path: Path) -> None:
    made = [page(tmp_path / name, *audits.example()) for name in ("first", "second")]
    assert made[0] == made[1]
    assert made[0] != page(tmp_path / "third", *audits.example(wrong_control=True))


def test_texts_stay_texts(tmp_path: Path) -> None:
    said, pictures = audits.example()
    texts = 0

    def spoil(value: Any, key: str = "") -> Any:
        nonlocal texts
        if isinstance(value, dict) and key == "pictures":
            return {EVIL + name: path for name, path in value.items()}
        if isinstance(value, dict):
            return {name: spoil(each, name) for name, each in value.items()}
        if isinstance(value, list):
            return [spoil(each, key) for each in value]
        if isinstance(value, str) and key not in {"format", "kind", "id", "scheme", "metric"}:
            texts += 1
            return EVIL + value
        return value

    text = page(tmp_path, spoil(said), pictures)
    assert texts > 50
    found = Page(text)
    assert "script" not in {tag for tag, _ in found.elements}
    assert not any(name.startswith("on") for _, attributes in found.elements for name in attributes)
    assert len([tag for tag, _ in found.elements if tag == "img"]) == len(pictures)
    assert "{{ 7*7 }}" in found.text


def test_a_page_can_be_made_of_nothing(tmp_path: Path) -> None:
    said, _ = results.content(audits.plan(), Outcome({}, 0.0), 0, audits.WHEN)
    assert "Nothing was measured" in Page(page(tmp_path, said, {})).text
