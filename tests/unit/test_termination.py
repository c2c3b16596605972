"""SIGTERM ends a command as Ctrl-C does: what it holds is let go of."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.retention.leases import hold_lease
from tests.catalog_cases import commit_of

ROOT = Path(__file__).parents[2]
COMMAND = """
import sys, time
from siltstone.cli import main
from tests.unit.test_termination import hold
main(lambda: hold(sys.argv[1]))
"""


def hold(warehouse: str) -> None:
    """Read a checkpoint for as long as one lets it."""
    with OpenWarehouse.open_existing(warehouse) as place, hold_lease(place.catalog, "flights", [1]):
        print("reading", flush=True)
        signal.pause()


@pytest.mark.slow
def test_a_command_releases_its_leases(tmp_path: Path) -> None:
    with OpenWarehouse.open_writable(str(tmp_path)) as place:
        place.catalog.streams.register("flights", 8, {})
        place.catalog.commits.add("flights", place.catalog.runs.begin("flights", "a test"), commit_of(1))
        with subprocess.Popen(
            [sys.executable, "-c", COMMAND, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "reading\n"
            assert len(place.catalog.leases.list_live("flights")) == 1
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 128 + signal.SIGTERM
        assert place.catalog.leases.list_live("flights") == []
