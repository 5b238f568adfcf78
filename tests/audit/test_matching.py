"""Comparison of guessed and real records."""

from __future__ import annotations

import math

import pytest
import torch

from cgd.audit.embedded import digit_scenario, samples
from cgd.audit.matching import MIN_CORRELATION, draw, match, own_records, to_png, value_range
from cgd.audit.schemes import observe


def test_psnr_and_correlation_follow_their_definitions() -> None:
    real = torch.tensor([[0.0, 0.5, 1.0, 0.5]])
    found = match(real + 0.1, real, peak=1.0)
    assert found.correlation.item() == pytest.approx(1.0)
    assert found.mean_psnr == pytest.approx(10 * math.log10(1 / 0.1**2), abs=1e-5)
    assert match(1 - real, real, peak=1.0).correlation.item() == pytest.approx(-1.0)


def test_records_are_matched_in_any_order_and_sorted() -> None:
    x, _ = samples("digits", 1)
    guesses = torch.cat([x[3:5], x[0:3] + 0.2 * torch.rand(3, 64, generator=torch.Generator().manual_seed(0))])
    found = match(guesses, x[:5], peak=1.0)
    assert torch.equal(found.real[:2].float().sort(dim=0).values, x[3:5].sort(dim=0).values)
    assert (found.correlation.diff() <= 0).all()
    assert found.psnr[:2].tolist() == [100.0, 100.0]


def test_missing_and_invalid_guesses_match_nothing() -> None:
    x, _ = samples("digits", 0)
    assert match(x[:0], x[:4], 1.0).recovered == 0
    assert match(torch.full((1, 64), torch.nan), x[:4], 1.0).recovered == 0


def test_digits_of_other_people_do_not_count_as_recovered() -> None:
    """Of the first 300 digits, at most one has another digit above the threshold."""
    x, _ = samples("digits", 0)
    similar = sum(
        match(torch.cat([x[:i], x[i + 1 :]]), x[i : i + 1], 1.0).correlation.item() >= MIN_CORRELATION
        for i in range(300)
    )
    assert similar <= 1


def test_images_are_grey_squares_of_both_in_one_order() -> None:
    view, truth = observe(digit_scenario(9, hidden=8), "secure")
    images = match(own_records(view), truth.all_x, value_range(view)).images()
    assert set(images) == {"recovered", "real"}
    assert images["real"].shape == images["recovered"].shape == (8, 8, 8)
    assert 0 <= images["recovered"].min() <= images["recovered"].max() <= 1
    assert match(torch.rand(2, 10), torch.rand(2, 10), 1.0).images() == {}


def test_pictures_are_png_files() -> None:
    png = to_png(torch.rand(9, 8, 8))
    assert png.startswith(b"\x89PNG\r\n")
    pictures = draw({"real": torch.rand(1, 8, 8), "none": torch.rand(0, 8, 8)})
    assert set(pictures) == {"real"}
    assert pictures["real"].startswith("data:image/png;base64,")
