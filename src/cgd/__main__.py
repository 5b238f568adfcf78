"""`python -m cgd` is `cgd`."""

from cgd.cli import main

main()
