"""How good guessed records are: each real record beside the guess that comes nearest to it.

The measure of likeness is the correlation, which no change of brightness fools, and for pictures the peak
signal-to-noise ratio. A real record counts as recovered if some guess correlates with it by at least `ALIKE`: two
handwritten digits of different people, of the same class and the most alike of hundreds, stay below. What guessing
without any view is worth, the attacker's own records tell: they are of the same kind, and of other people.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from cgd.audit.view import View

ALIKE = 0.99
SHOWN = 16
"""At most so many pictures in a finding."""


@dataclass(frozen=True, repr=False)
class Match:
    """Real records, best matched first, and the guess for each.

    Attributes:
        real: the records.
        guess: the nearest guess to each; a guess may be nearest to several.
        correlation: of each pair.
        psnr: of each pair, in dB; it does not count above 100.
    """

    real: torch.Tensor
    guess: torch.Tensor
    correlation: torch.Tensor
    psnr: torch.Tensor

    @property
    def recovered(self) -> float:
        """The fraction of real records that some guess is like."""
        return (self.correlation >= ALIKE).double().mean().item()

    @property
    def mean_psnr(self) -> float:
        """The mean over all real records, in dB."""
        return self.psnr.mean().item()

    def images(self) -> dict[str, torch.Tensor]:
        """Pictures, if the records are square ones: at most `SHOWN`, best match first."""
        side = round(self.real.shape[1] ** 0.5)
        if side * side != self.real.shape[1] or side < 4:
            return {}
        low, high = self.real.min(), self.real.max()
        grey = [
            ((each[:SHOWN] - low) / (high - low).clamp_min(1e-12)).clamp(0, 1).float().reshape(-1, side, side)
            for each in (self.guess, self.real)
        ]
        return {"recovered": grey[0], "real": grey[1]}


def match(guesses: torch.Tensor, real: torch.Tensor, peak: float) -> Match:
    """Put to each real record the guess that correlates best with it.

    Args:
        guesses: a row for each.
        real: a row for each.
        peak: the range of values, for the signal-to-noise ratio.
    """
    real = real.reshape(len(real), -1).double()
    if not len(guesses):
        guesses = torch.zeros_like(real[:1])
    guesses = guesses.reshape(len(guesses), -1).double().nan_to_num(0.0, 0.0, 0.0)
    correlation, nearest = (_centred(real) @ _centred(guesses).T).max(dim=1)
    guess = guesses[nearest]
    psnr = 10 * torch.log10(peak**2 / (guess - real).square().mean(dim=1).clamp_min(1e-10 * peak**2))
    order = correlation.argsort(descending=True, stable=True)
    return Match(real[order], guess[order], correlation[order], psnr[order])


def own_records(view: View) -> torch.Tensor:
    """The coalition's records, one flat row for each: of the same kind as those that it is after."""
    return torch.cat([each.x.reshape(len(each.x), -1) for each in view.coalition.values()]).double()


def value_range(view: View) -> float:
    """The range of a record's values, as the coalition knows it from its own."""
    own = own_records(view)
    return max((own.max() - own.min()).item(), 1e-12)


def _centred(rows: torch.Tensor) -> torch.Tensor:
    """Rows without their mean and of length 1, so that products are correlations; a constant row becomes 0."""
    rows = rows - rows.mean(dim=1, keepdim=True)
    centred: torch.Tensor = rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-12)
    return centred
