"""The small stream as processes with Spark run it: with a sink that keeps a journal, or an autonomous operator."""

from dataclasses import replace

from siltstone.sinks.parquet import ParquetSink
from siltstone.stream import DEAD_LETTERS, Autonomous
from tests.fault import held_stream, small_stream
from tests.fault.journal import JournaledSink


class Audit(small_stream.Accounts):
    """The same, outside of the region."""

    name = "audit"


SMALL = replace(small_stream.SMALL, sinks={"accounts": JournaledSink()})
HELD = replace(held_stream.HELD, sinks={"accounts": JournaledSink(), "late": None, DEAD_LETTERS: JournaledSink()})
BESIDE = replace(
    small_stream.SMALL, name="beside", autonomous=[Autonomous(Audit(), checkpoint_steps=3, sink=ParquetSink())]
)
