"""Layer 6, what CGD is compared with: plain functions on the same data and models."""

from cgd.baselines.plain import train_plainly

__all__ = ["train_plainly"]
