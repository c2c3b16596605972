"""The small stream of the campaign: operators more, for rows that are held back until a checkpoint, and for timers.

source -> late (place) -> settled (place)
       '> hourly (place, hour) -> closed (place)

An hour closes once the watermark has passed it. No row is late, so the state follows from the batches, and from whether
a step without rows came after the last.

It has three sinks: `accounts` has the purchases; `late` what was held back, in a Delta table where the warehouse can
have one; and purchases without an amount are dead letters of `late`.
"""

from dataclasses import replace
from datetime import timedelta

import pyarrow as pa
import pyarrow.compute as pc

from siltstone.aggregates.functions import Count
from siltstone.aggregates.operator import Aggregate
from siltstone.aggregates.windows import Tumbling
from siltstone.errors import BadRow
from siltstone.operator import Rows, State
from siltstone.sinks.parquet import ParquetSink
from siltstone.stream import DEAD_LETTERS
from siltstone.time.event_time import EventTime
from tests.fault import small_stream
from tests.holding import Hold, Total


class Late(Hold):
    """Holds amounts back until a checkpoint. So in each checkpoint it holds nothing, whatever the checkpoints are."""

    name = "late"
    key = {"place": pa.int64()}  # noqa: RUF012
    inputs = ("sequence", "amount")
    output = pa.schema([("place", pa.int64()), ("sequence", pa.int64()), ("amount", pa.int64())])

    def process(self, rows: Rows, state: State) -> None:
        """Keep them; one without an amount is refused."""
        if rows.table["amount"].null_count:
            raise BadRow("no amount", rows=pc.is_null(rows.table["amount"]).to_numpy())
        super().process(rows, state)


class Settled(Total):
    """Counts and adds them."""

    name, reads = "settled", "late"
    key = {"place": pa.int64()}  # noqa: RUF012
    inputs = ("amount",)


class Closed(Total):
    """Counts the hours of each place that have closed, and their purchases."""

    name, reads = "closed", "hourly"
    key = {"place": pa.int64()}  # noqa: RUF012
    inputs = ("purchases",)


HOURLY = Aggregate("hourly", {"place": pa.int64()}, [Count("purchases")], window=Tumbling("1 hour", on="event_time"))
HELD = replace(
    small_stream.SMALL,
    name="held",
    operators=[*small_stream.SMALL.operators, Late(), Settled(), HOURLY, Closed()],
    event_time=EventTime("event_time", delay=timedelta(minutes=30)),
    sinks={"accounts": ParquetSink(), "late": None, DEAD_LETTERS: ParquetSink()},
    on_bad_row="dead-letter",
)
