"""Confined optimisation: origins, displacements, optimisers, learning rates and grids of data. Needs torch."""

from cgd.optim.adam import ConfinedAdam
from cgd.optim.grid import Block, Cell, Grid
from cgd.optim.lr_scheduler import InverseSquareLR
from cgd.optim.minibatches import BatchSampler
from cgd.optim.optimizer import ConfinedOptimizer
from cgd.optim.origin import Origin, confine
from cgd.optim.sgd import ConfinedSGD
from cgd.optim.torch_optimizer import ConfinedTorchOptimizer

__all__ = [
    "BatchSampler",
    "Block",
    "Cell",
    "ConfinedAdam",
    "ConfinedOptimizer",
    "ConfinedSGD",
    "ConfinedTorchOptimizer",
    "Grid",
    "InverseSquareLR",
    "Origin",
    "confine",
]
