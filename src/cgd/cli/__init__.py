"""Layer 11, the command line: `base` is its root; the other modules add their commands to it."""

from cgd.cli import audit, hub, joining, operations, practice, research
from cgd.cli.base import app, main

__all__ = ["app", "audit", "hub", "joining", "main", "operations", "practice", "research"]
