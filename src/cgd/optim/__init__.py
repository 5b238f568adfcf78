"""Confined optimisation: origins, displacements, optimisers, learning rates and grids of data. Needs torch."""

from cgd.optim.adam import ConfinedAdam
from cgd.optim.grid import Block, Cell, Grid
from cgd.optim.lr_scheduler import InverseSquareLR
from cgd.optim.optimizer import ConfinedOptimizer
from cgd.optim.origin import Origin, confine
from cgd.optim.sgd import ConfinedSGD

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
