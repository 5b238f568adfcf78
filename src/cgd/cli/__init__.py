"""Layer 7, the command line: `base` is its root; the other modules add their commands to it."""

from cgd.cli import hub, operations, research
from cgd.cli.base import app, main

__all__ = ["app", "hub", "main", "operations", "research"]
