"""The small stream of the campaign: two operators more, for rows that are held back until a checkpoint.

source -> late (place) -> settled (place)
"""

from dataclasses import replace

import pyarrow as pa

from tests.fault import small_stream
from tests.holding import Hold, Total


class Late(Hold):
    """Holds amounts back until a checkpoint. So in each checkpoint it holds nothing, whatever the checkpoints are."""

    name = "late"
    key = {"place": pa.int64()}  # noqa: RUF012
    inputs = ("amount",)
    output = pa.schema([("place", pa.int64()), ("amount", pa.int64())])


class Settled(Total):
    """Counts and adds them."""

    name, reads = "settled", "late"
    key = {"place": pa.int64()}  # noqa: RUF012
    inputs = ("amount",)


HELD = replace(small_stream.SMALL, name="held", operators=[*small_stream.SMALL.operators, Late(), Settled()])
