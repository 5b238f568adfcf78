"""Run the command line with `python -m cgd`."""

from cgd.cli import main

main()
