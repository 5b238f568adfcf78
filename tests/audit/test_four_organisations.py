"""Four organisations with a table of tumours: one of them reads records of the others, unless there is noise."""

from __future__ import annotations

import json

import pytest

from support.pages import load_script

organisations = load_script("four_organisations", "benchmarks")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_no_record_comes_out_with_differential_privacy(seed: int) -> None:
    assert organisations.attack("cgd", seed)["records by steering"] > 0
    private = organisations.attack("dp2", seed)
    assert (private["records by watching"], private["records by steering"]) == (0, 0)


def test_no_record_comes_out_with_differential_privacy_in_the_stored_results() -> None:
    stored = json.loads(organisations.FILE.read_text())["schemes"]
    assert {len(draws) for draws in stored.values()} == {organisations.SEEDS} == {20}
    assert min(each["records by steering"] for each in stored["cgd"]) > 0
    for scheme in ("dp8", "dp2", "dp0.5"):
        assert {each[f"records by {how}"] for each in stored[scheme] for how in ("watching", "steering")} == {0}
