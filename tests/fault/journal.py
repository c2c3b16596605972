"""A sink that journals each delivery durably before it takes it, so that a check can ask what a sink was handed, in
which order, and how often.

    <path>/_journal/<nanoseconds>-<random>.json     one delivery: the id and the rows, as a digest; appears by a rename
    <path>/checkpoint=...                           what `ParquetSink` makes of it
"""

import hashlib
import json
import os
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from siltstone.sinks.parquet import ParquetSink
from tests.arrow_frames import to_arrow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ORDER = "sequence"
"""the column that says which input row an output row was made of"""


@dataclass(frozen=True)
class Delivered:
    """Rows that a sink was handed under an id: how many, the first and last input row, and a digest of all columns."""

    id: int
    rows: int
    first: int
    last: int
    digest: str

    @classmethod
    def of(cls, id: int, rows: pa.Table) -> "Delivered":
        """Rows in any order; types that mean the same count as the same. Of dead letters, what steps do not decide."""
        ordered = (_purchases_of(rows) if "row" in rows.column_names else rows).sort_by(ORDER)
        numbers = ordered[ORDER].to_pylist()
        values = [(name, _plain(ordered[name]).to_pylist()) for name in sorted(ordered.column_names)]
        digest = hashlib.blake2b(repr(values).encode(), digest_size=16).hexdigest()
        return cls(id, len(numbers), numbers[0] if numbers else -1, numbers[-1] if numbers else -1, digest)


def _purchases_of(letters: pa.Table) -> pa.Table:
    """Dead letters by the input rows that they are made of, without the checkpoint and the step that refused them."""
    numbers = [json.loads(row)[ORDER] for row in letters["row"].to_pylist()]
    return letters.select(["operator", "reason", "row"]).append_column(ORDER, pa.array(numbers, pa.int64()))


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Moments as microseconds: a time zone is another name of the same one."""
    return column.cast(pa.timestamp("us", "UTC")).cast(pa.int64()) if pa.types.is_timestamp(column.type) else column


class JournaledSink(ParquetSink):
    """A Parquet sink that journals each delivery first."""

    def deliver(self, rows: "DataFrame", checkpoint: int) -> None:
        """Journal the delivery, then do it."""
        journal = self._root / "_journal"
        journal.mkdir(parents=True, exist_ok=True)
        building = journal / f".{uuid.uuid4().hex}"
        text = json.dumps(asdict(Delivered.of(checkpoint, to_arrow(rows))))
        with building.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # The clock is that of the whole machine, and never goes back.
        os.rename(building, journal / f"{time.monotonic_ns():020d}-{uuid.uuid4().hex}.json")
        super().deliver(rows, checkpoint)


def journal_of(sink: Path) -> list[Delivered]:
    """Every delivery to a sink, in order; none where it keeps no journal."""
    return [Delivered(**json.loads(path.read_text())) for path in sorted((sink / "_journal").glob("[0-9]*.json"))]


def published(sink: Path) -> list[Delivered]:
    """What a Parquet sink's readers see, by id."""
    found = {int(path.name.partition("=")[2]): path for path in sink.glob("checkpoint=*")}
    tables = {id: [pq.ParquetFile(each).read() for each in found[id].glob("*.parquet")] for id in sorted(found)}
    return [Delivered.of(id, pa.concat_tables(parts)) for id, parts in tables.items()]
