"""Compare guessed records with real ones, and draw them as pictures.

Similarity is measured by correlation, which does not depend on brightness, and for pictures by the peak signal-to-noise
ratio. A real record counts as recovered if a guess correlates with it by at least `MIN_CORRELATION`; the most similar
digits of different people, of the same class, stay below. Records of a table may have few features, between which
correlation says little: there, a guess must be near, by `MAX_DISTANCE` of the record's distance from the average
record. The attacker's own records, which are of the same kind and from other people, show how well guessing does
without a view.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from cgd.audit.results import RecoveredRecord, RecoveredRecords, to_data_uri

if TYPE_CHECKING:
    from cgd.audit.view import Truth, View

MIN_CORRELATION = 0.99
MAX_DISTANCE = 0.1
MAX_IMAGES = 8
"""Records in a picture: more would be too small on a phone."""
MAX_RECORDS_SHOWN = 20
"""Records of a table that a result lists; more would make the page a copy of the table."""
IMAGE_PIXELS = 96
"""The approximate width of one record in a picture."""


@dataclass(frozen=True, repr=False)
class Match:
    """Real records, best matched first, and the guess for each.

    Attributes:
        real: the records.
        guess: the nearest guess to each record; a guess may be nearest to several.
        correlation: the correlation of each pair.
        hits: whether each record was recovered.
        psnr: the peak signal-to-noise ratio of each pair, in dB, limited to 100.
        order: the place of each record among those that were given.
    """

    real: torch.Tensor
    guess: torch.Tensor
    correlation: torch.Tensor
    hits: torch.Tensor
    psnr: torch.Tensor
    order: torch.Tensor

    @property
    def recovered(self) -> float:
        """The fraction of real records that were recovered."""
        return self.hits.double().mean().item()

    @property
    def mean_psnr(self) -> float:
        """The mean over all real records, in dB."""
        return self.psnr.mean().item()

    def images(self) -> dict[str, torch.Tensor]:
        """Return stacks of square images, best match first, or nothing if the records are not square."""
        side = round(self.real.shape[1] ** 0.5)
        if side * side != self.real.shape[1] or side < 4:
            return {}
        low, high = self.real.min(), self.real.max()
        recovered, real = (
            ((each[:MAX_IMAGES] - low) / (high - low).clamp_min(1e-12)).clamp(0, 1).float().reshape(-1, side, side)
            for each in (self.guess, self.real)
        )
        return {"recovered": recovered, "real": real}


def match(guesses: torch.Tensor, real: torch.Tensor, peak: float, *, table: bool = False) -> Match:
    """Assign to each real record the guess with the highest correlation; to that of a table, the nearest guess.

    Args:
        guesses: one guess per row.
        real: one record per row.
        peak: the range of values, for the signal-to-noise ratio.
        table: true for records of a table, encoded so that the average record is zero.
    """
    real = real.reshape(len(real), -1).double()
    if not len(guesses):
        guesses = torch.zeros_like(real[:1])
    guesses = guesses.reshape(len(guesses), -1).double().nan_to_num(0.0, 0.0, 0.0)
    correlations = _standardise(real) @ _standardise(guesses).T
    distances = torch.cdist(real, guesses) / real.norm(dim=1, keepdim=True).clamp_min(1e-12)
    nearest = distances.argmin(dim=1) if table else correlations.argmax(dim=1)
    correlation, distance = (each.gather(1, nearest[:, None])[:, 0] for each in (correlations, distances))
    guess, hits = guesses[nearest], distance <= MAX_DISTANCE if table else correlation >= MIN_CORRELATION
    psnr = 10 * torch.log10(peak**2 / (guess - real).square().mean(dim=1).clamp_min(1e-10 * peak**2))
    order = (-distance if table else correlation).argsort(descending=True, stable=True)
    return Match(real[order], guess[order], correlation[order], hits[order], psnr[order], order)


def show(found: Match, truth: Truth, *, succeeds: bool) -> dict[str, Any]:
    """Return what an attack result shows of recovered records: pictures, or a list if the records are of a table.

    Args:
        found: the guesses and the real records, `Truth.all_x`.
        truth: the truth.
        succeeds: whether the attack succeeds. Otherwise, similar guesses are by chance, and are not listed.
    """
    if truth.table is None:
        return {"pictures": draw(found.images())}
    if not succeeds:
        return {}
    hits, places = int(found.hits.sum()), truth.all_places
    records = [
        RecoveredRecord(places[place], truth.table.decode(real), truth.table.decode(guess))
        for place, real, guess in zip(found.order[:hits].tolist(), found.real, found.guess, strict=False)
    ]
    shown = RecoveredRecords(hits, truth.table.columns, records[:MAX_RECORDS_SHOWN])
    return {"recovered": shown} if hits else {}


def own_records(view: View) -> torch.Tensor:
    """Return the coalition's records, one flat row each."""
    return torch.cat([each.x.reshape(len(each.x), -1) for each in view.coalition.values()]).double()


def value_range(view: View) -> float:
    """Return the range of values in the coalition's records."""
    own = own_records(view)
    return max((own.max() - own.min()).item(), 1e-12)


def draw(images: dict[str, torch.Tensor]) -> dict[str, str]:
    """Draw stacks of images as pictures, and return their `data:` URIs by caption."""
    return {caption: to_data_uri(to_png(stack)) for caption, stack in images.items() if len(stack)}


def to_png(images: torch.Tensor) -> bytes:
    """Draw the first images of a stack side by side as a PNG with transparent gaps.

    Args:
        images: a stack of N × height × width grey images in 0…1.
    """
    import numpy as np
    from PIL import Image

    stack = images[:MAX_IMAGES].detach().cpu().float().nan_to_num(0.0).clamp(0, 1)
    scale = max(1, IMAGE_PIXELS // max(stack.shape[1:]))
    # Pixels are repeated, not interpolated: smoothing would change how well a record seems to be recovered.
    grey = (stack * 255).round().numpy().astype(np.uint8).repeat(scale, 1).repeat(scale, 2)
    count, height, width = grey.shape
    gap = max(2, scale // 2)
    canvas = np.zeros((height, count * (width + gap) - gap, 2), dtype=np.uint8)
    for place, each in enumerate(grey):
        canvas[:, place * (width + gap) : place * (width + gap) + width] = np.stack([each, np.full_like(each, 255)], -1)
    content = io.BytesIO()
    Image.fromarray(canvas).save(content, format="PNG", optimize=True)
    return content.getvalue()


def _standardise(rows: torch.Tensor) -> torch.Tensor:
    """Return rows with mean 0 and length 1, so that products are correlations; a constant row becomes 0."""
    rows = rows - rows.mean(dim=1, keepdim=True)
    standard: torch.Tensor = rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-12)
    return standard
