"""Layer 1, arithmetic: floats as ring elements, and secret shares of them. No torch, no I/O."""

from cgd.ring.fixed_point import FixedPoint
from cgd.ring.sharing import ExpandedShares, reconstruct, split

__all__ = ["ExpandedShares", "FixedPoint", "reconstruct", "split"]
