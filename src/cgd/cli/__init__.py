"""Layer 11, the command line: `base` is its root; the other modules add their commands to it."""

from cgd.cli import audit, federation, join, privacy, research, tabular
from cgd.cli.base import app, main

__all__ = ["app", "audit", "federation", "join", "main", "privacy", "research", "tabular"]
