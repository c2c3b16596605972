"""`python -m siltstone.cli`."""

from siltstone.cli import main

main()
