"""Run the command line as `python -m siltstone.cli`."""

from siltstone.cli import main

main()
