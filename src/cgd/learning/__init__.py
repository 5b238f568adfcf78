"""Layer 4, learning: origins, the displacement, optimisers, step sizes, and grids of data. torch begins here."""

from cgd.learning.confinement import Origin, confine
from cgd.learning.grid import Block, Cell, Grid
from cgd.learning.optimizer import ConfinedAdam, ConfinedOptimizer, ConfinedSGD
from cgd.learning.schedule import InverseSquareLR

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
