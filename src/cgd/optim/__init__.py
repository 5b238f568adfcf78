"""Confined optimisation: origins, displacements, optimisers, learning rates and grids of data. Needs torch."""

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
