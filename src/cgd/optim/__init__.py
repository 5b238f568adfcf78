"""Layer 4, optimisation: origins, the displacement, optimisers, step sizes, and grids of data. torch begins here."""

from cgd.optim.grid import Block, Cell, Grid
from cgd.optim.lr_scheduler import InverseSquareLR
from cgd.optim.optimizer import ConfinedAdam, ConfinedOptimizer, ConfinedSGD
from cgd.optim.origin import Origin, confine

__all__ = [
    "Block",
    "Cell",
    "ConfinedAdam",
    "ConfinedOptimizer",
    "ConfinedSGD",
    "Grid",
    "InverseSquareLR",
    "Origin",
    "confine",
]
