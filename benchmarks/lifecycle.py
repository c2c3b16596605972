"""Measure the cost of keeping chains short and stores clean, in four parts.

chains          materialization, restores of the worst chain, rescaling (`benchmarks.chains`)
housekeeping    a sweep of a large store, metadata of an hour of checkpoints (`benchmarks.housekeeping`)
approaches      DBSP's three ways to resume after a failure (`benchmarks.approaches`)
space           stored bytes over live bytes (`benchmarks.space`)
"""

import tempfile
from pathlib import Path

from rich.console import Console

from benchmarks import approaches, chains, housekeeping, space
from benchmarks.goals import Report


def run(scratch: Path, picture_to: Path, *, quick: bool = False) -> Report:
    """Run all parts."""
    parts = {
        "chains": lambda directory: chains.run(directory, quick=quick),
        "housekeeping": lambda directory: housekeeping.run(directory, quick=quick),
        "approaches": lambda directory: approaches.run(directory, picture_to, quick=quick),
        "space": lambda directory: space.run(directory, quick=quick),
    }
    whole = Report()
    for name, part in parts.items():
        Console(stderr=True).print(f"lifecycle: {name} ...")
        with tempfile.TemporaryDirectory(dir=scratch) as directory:
            report = part(Path(directory))
        whole.tables += report.tables
        whole.goals += report.goals
        whole.numbers[name] = report.numbers
    return whole
