"""Runs of a stream that reads Kafka, killed while records trickle in."""

import threading
from collections.abc import Callable
from pathlib import Path

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.errors import UsageError
from siltstone.settings import Settings
from tests.fault.processes import Run
from tests.kafka_server import connector_jars

KILLS, CHECKPOINTS = 2, 2
"""how many runs are killed, each once it has completed more checkpoints than this"""


def kill_runs(settings: Settings, stream: str, output: Path, produce: Callable[[int], int]) -> int:
    """Run a stream of `tests.kafka_streams` and kill it, twice; return how many records were made meanwhile.

    Args:
        output: a directory for what the runs say.
        produce: writes some records, given how many there are, and returns how many it wrote.
    """
    done, made = threading.Event(), 0

    def trickle() -> None:
        nonlocal made
        while not done.wait(0.1):
            made += produce(made)

    def completed() -> int:
        try:
            with OpenWarehouse.open_existing(settings.warehouse) as place:
                return place.catalog.checkpoints.last_id(stream)
        except UsageError:  # no run has come so far
            return 0

    producer = threading.Thread(target=trickle)
    producer.start()
    command = ["run", stream, "--follow", "--warehouse", settings.warehouse, "--json"]
    try:
        for _ in range(KILLS):
            going = Run([command], output, "local[2]", ["tests.kafka_streams"], {"spark.jars": connector_jars()})
            before = completed()
            try:
                assert going.until(lambda before=before: completed() > before + CHECKPOINTS), going.wait(10).said
            finally:
                going.kill_all()
    finally:
        done.set()
        producer.join()
    return made
