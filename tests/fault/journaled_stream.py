"""The small stream with a sink that keeps a journal, as processes with Spark run it."""

from dataclasses import replace

from tests.fault import small_stream
from tests.fault.journal import JournaledSink

SMALL = replace(small_stream.SMALL, sinks={"accounts": JournaledSink()})
