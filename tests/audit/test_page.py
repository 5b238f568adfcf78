"""The page: its content, that it needs no other file, and that texts are escaped."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import pytest
from rich.console import Console

from cgd.audit import report, table, verdicts
from support import audits
from support.pages import INJECTION, Page

if TYPE_CHECKING:
    from pathlib import Path

    from cgd.audit.results import Audit

EXAMPLES: list[dict[str, Any]] = [
    {},
    {"kind": "recording"},
    {"kind": "table"},
    {"failed_control": True},
    {"complete": False},
]


def page(where: Path, audit: Audit, content: dict[str, Any] | None = None) -> str:
    return report.write_page(audits.write(where, audit, content)).read_text()


@pytest.mark.parametrize("options", EXAMPLES)
def test_page_is_self_contained_and_well_formed(options: dict[str, Any], tmp_path: Path) -> None:
    text = page(tmp_path, audits.example(**options))
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


def test_page_begins_with_the_result(tmp_path: Path) -> None:
    text = Page(page(tmp_path, audits.example())).text
    assert "1 of 4 attacks succeed against CGD" in text
    assert "These do not apply to this data or model, so nothing is known: Attack theory." in text
    assert "These attacks succeed against CGD: Attack moments." in text
    assert "These attacks do not succeed against CGD: Attack records; Attack liars." in text
    compared = "Compared with FedSGD with secure aggregation: of 2 attacks measured against both, 1 succeeds against"
    assert f"{compared} FedSGD with secure aggregation only (Attack records)." in text
    assert "2 controls, all passed" in text
    assert "1 part ended with an error" in text
    assert (
        text.index("These attacks succeed") < text.index("in at least one setting") < text.index("They look closely.")
    )
    for figure in (
        "0.077 (chance 0.295)",
        "8.0e−7 (chance 0.295)",
        "in 2 of 3 settings",
        "Add noise.",
        "3.5 % (chance 0 %)",
    ):
        assert figure in text
    assert "cgd audit --seed 3" in text
    assert "16 November 2026, 12:00 UTC" in text
    assert "Confidential" not in text


def test_result_on_the_page_follows_from_the_findings(tmp_path: Path) -> None:
    audit = audits.example()
    content = audits.to_json(audit)
    for finding in (each for attack in content["attacks"] for each in attack["findings"]):
        finding["succeeds"] = finding["must_succeed"]
    text = Page(page(tmp_path, audit, content)).text
    assert "0 of 4 attacks succeed against CGD" in text
    assert "These attacks succeed" not in text
    assert "measured against both, all have the same outcome" in text


@pytest.mark.parametrize("kind", ["spec", "recording"])
def test_page_of_own_data_is_confidential(kind: Literal["spec", "recording"], tmp_path: Path) -> None:
    text = Page(page(tmp_path, audits.example(kind))).text
    assert "Confidential. This page was made from your own data" in text
    assert "cgd audit mine.toml --seed 3" in text


def test_page_of_a_table_lists_the_recovered_records(tmp_path: Path) -> None:
    text = Page(page(tmp_path, audits.example("table"))).text
    assert "Confidential. This page contains records of your table, with all their values." in text
    assert "FedSGD, secure aggregation: 31 records, of which the first 20 are listed" in text
    assert "line 2 real 1000.000 1000.143" in text
    assert "line 135 real" in text
    assert "line 142" not in text


@pytest.mark.parametrize("kind", ["table", "embedded"])
def test_page_names_the_folder_of_pictures_only_if_there_is_one(
    kind: Literal["table", "embedded"], tmp_path: Path
) -> None:
    text = Page(page(tmp_path, audits.example(kind))).text
    assert ("pictures" in text) == ("folder pictures" in text) == (tmp_path / "pictures").exists()
    assert (kind == "embedded") == (tmp_path / "pictures").exists()


def test_attack_with_a_figure_is_not_called_unmeasured(tmp_path: Path) -> None:
    """One of its methods does not apply, which is said as such."""
    audit = audits.example("table")
    found = Page(page(tmp_path, audit)).text
    reason = "Attack moments , CGD, was measured, but not by all methods: one of the methods needs more records"
    assert reason in found
    assert "Attack theory , CGD, does not apply: the model is not linear" in found
    assert verdicts.unmeasured(audit, audit.attacks[0]) == {}
    only = replace(audit, attacks=audit.attacks[:1], failed=[])
    found = Page(page(tmp_path / "measured", only)).text
    assert "Not all methods" in found
    assert "not measured" not in found.lower()
    console = Console(record=True, width=80, file=io.StringIO())
    console.print(table.render(only))
    printed = console.export_text()
    assert "not measured:" not in printed
    assert "not all methods: Attack moments: one of the methods needs more records" in printed


def test_page_shows_failures_and_interruptions(tmp_path: Path) -> None:
    text = Page(page(tmp_path / "failed", audits.example(failed_control=True))).text
    assert "Not reliable: Attack moments. 1 of 2 controls failed." in text
    assert "CONTROL FAILED" in text
    assert "records, dp2 failed: ZeroDivisionError" in text
    assert "Attack theory , CGD, does not apply: the model is not linear" in text
    text = Page(page(tmp_path / "part", audits.example(complete=False))).text
    assert "Not complete. The audit was interrupted." in text
    assert "liars, cgd was not run." in text


def test_same_audit_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (page(tmp_path / name, audits.example()) for name in ("first", "second"))
    assert first == second
    assert first != page(tmp_path / "third", audits.example(failed_control=True))


@pytest.mark.parametrize("kind", ["embedded", "table"])
def test_texts_are_escaped(kind: Literal["embedded", "table"], tmp_path: Path) -> None:
    audit = audits.example(kind)
    texts = 0

    def inject(value: Any, key: str = "") -> Any:
        nonlocal texts
        if isinstance(value, dict) and key == "pictures":
            return {INJECTION + name: path for name, path in value.items()}
        if isinstance(value, dict):
            return {name: inject(each, name) for name, each in value.items()}
        if isinstance(value, list):
            return [inject(each, key) for each in value]
        if isinstance(value, str) and key not in {"format", "kind", "id", "scheme", "metric"}:
            texts += 1
            return INJECTION + value
        return value

    text = page(tmp_path, audit, inject(audits.to_json(audit)))
    assert texts > 50
    found = Page(text)
    assert "script" not in {tag for tag, _ in found.elements}
    assert not any(name.startswith("on") for _, attributes in found.elements for name in attributes)
    assert len([tag for tag, _ in found.elements if tag == "img"]) == (4 if kind == "embedded" else 0)
    assert "{{ 7*7 }}" in found.text


def test_empty_audit_has_a_page(tmp_path: Path) -> None:
    assert "Nothing was measured" in Page(page(tmp_path, audits.assemble(audits.plan(), {}))).text
