"""Delta tables of a stream's output, in the warehouse's own store.

    stage      tasks write the rows as Parquet files below the table's directory; no reader sees them yet
    deliver    one transaction of the table's log adds a checkpoint's files: nothing is copied, any engine reads them

A transaction carries the application id `siltstone:<stream>/<sink>` and, as its version, the id by which the sink
knows the checkpoint. A delivery whose id the table has does nothing, and of two at once the log refuses one, so each
checkpoint's rows are in the table exactly once (promise 2): after a crash between the commit and its mark in the
catalog, and if a writer that was fenced wakes up in the middle of a delivery. A fork has a table and an id of its own.

The table has the columns of the operator's output. A column that is new there is added to the table, and so is a new
field of a struct; one that is gone is null in new rows. If the type of one became wider (`format.table_file.Change`),
the rows that are there are written again with it, as one version of the table, because delta-rs does not write Delta's
own type widening. One of any other type is refused when the stream is opened.
"""

import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from siltstone.errors import StateError, UsageError
from siltstone.format.output import read_output, staged_schema
from siltstone.format.table_file import Change, TableWriter, change_of, table_schema
from siltstone.log import get_logger
from siltstone.model import SinkFile
from siltstone.sinks.delta_calls import delta_call, first_line
from siltstone.store.base import Store
from siltstone.store.files import make_durable
from siltstone.store.paths import CheckpointPath, sink_table
from siltstone.store.private import make_private_directory
from siltstone.store.table_place import TablePlace, table_place

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from siltstone.catalog.records.outbox import OutputRecord

_LOG = get_logger(__name__)
ATTEMPTS = 10
"""how often a delivery begins again because another process changed the table meanwhile"""
LOG_RETENTION = "interval 7 days"
"""how long a new table's log keeps its transactions, of which a stream may make many: as long as it keeps old files"""
REOPEN_S = 300.0
"""seconds for which an open table is used for deliveries"""
CHECKPOINT = "siltstone.checkpoint"
"""where a transaction's commit info has its id"""
_LOG_FILES = 5
"""most files of the log that one operation writes"""


@dataclass(frozen=True)
class DeltaSink:
    """A Delta table in the warehouse, with each row of the output exactly once. It is the default sink.

    The table is `_sinks/<stream>/<operator>` in the warehouse's store: below `objects/` of a directory, below the
    prefix of a bucket. `StreamClient.sink_table` opens it, and so does every engine that reads Delta tables. The
    warehouse must be a directory or in S3.
    """

    path: ClassVar[None] = None
    stages_table: ClassVar[bool] = True


@dataclass(frozen=True)
class TableSize:
    """Where a table is, and what its newest version has."""

    url: str
    rows: int
    bytes: int
    files: int


class SinkTable:
    """The Delta table of one sink of a stream; not safe for use by two threads."""

    def __init__(self, store: Store, stream: str, sink: str) -> None:
        self.store, self.stream, self.sink = store, stream, sink
        self._opened: tuple[DeltaTable, float] | None = None
        """the table as the newest delivery left it, and when it was opened"""

    @property
    def prefix(self) -> str:
        """The prefix of the names of its objects."""
        return sink_table(self.stream, self.sink)

    @property
    def label(self) -> str:
        """Its name for people."""
        return f"the table {self.prefix} in {self.store.label}"

    @property
    def application(self) -> str:
        """The application id of its transactions."""
        return f"siltstone:{self.stream}/{self.sink}"

    def place(self) -> TablePlace:
        """Return where it is, and what opens it."""
        return table_place(self.store, self.prefix)

    def open(self) -> "DeltaTable | None":
        """Open it as of now; None if there has been no delivery yet.

        Raises:
            Unreachable: the store does not answer.
            StateError: the log is damaged.
        """
        from deltalake import DeltaTable
        from deltalake.exceptions import TableNotFoundError

        place = self.place()
        try:
            with delta_call(self.label):
                return DeltaTable(place.url, storage_options=dict(place.options))
        except TableNotFoundError:
            return None

    def find_delivered(self) -> int:
        """Return the newest id whose rows it has, 0 before the first."""
        table = self.open()
        return 0 if table is None else self._find_delivered(table)

    def describe(self) -> TableSize:
        """Return where it is and what it has, from its log alone."""
        table, url = self.open(), self.place().url
        if table is None:
            return TableSize(url, 0, 0, 0)
        with delta_call(self.label):
            files = pa.table(table.get_add_actions())
        rows, sizes = (files.column(name).to_pylist() for name in ("num_records", "size_bytes"))
        return TableSize(url, sum(each or 0 for each in rows), sum(sizes), len(sizes))

    def list_published(self) -> tuple[set[int], int]:
        """Return the ids that the transactions in its log name, and the oldest id that the log still covers.

        The log keeps transactions for `LOG_RETENTION`, unless the table says otherwise.
        """
        table = self.open()
        if table is None:
            return set(), 1
        with delta_call(self.label):
            history = table.history()
        ids = {entry[CHECKPOINT] for entry in history if CHECKPOINT in entry}
        whole = any(entry.get("version") == 0 for entry in history)
        return ids, 1 if whole else min(ids, default=self._find_delivered(table) + 1)

    def check(self, schema: pa.Schema) -> None:
        """Check that rows of this schema can go on in it.

        Raises:
            UsageError: a column has a type or a name that a Delta table does not have, or another type than in the
                table.
        """
        wanted, table = self._schema_of(schema), self.open()
        if table is not None:
            self._find_changes(table, wanted)

    def deliver(self, output: "OutputRecord") -> None:
        """Add the rows of one checkpoint; does nothing if it has them.

        Raises:
            UsageError: see `check`.
            StateError: the log is damaged, or other processes changed the table each time.
            Unreachable: the store failed; whether the table has the rows is not known.
        """
        from deltalake.exceptions import CommitFailedError

        schema = self._schema_of(staged_schema(output.arrow_schema))
        files: Sequence[SinkFile] | None = None
        for _ in range(ATTEMPTS):
            table = self._follow() or self._create(schema)
            if self._find_delivered(table) >= output.sink_id:
                break
            files = self._files(output) if files is None else files
            new_columns, wide = self._find_changes(table, schema)
            try:
                if not new_columns and wide is None:
                    self._add(table, files, output.sink_id)
                    break
                # And look again: meanwhile another process may have delivered the same.
                if wide is not None:
                    self._widen(table, wide, output)
                else:
                    with delta_call(self.label):
                        table.alter.add_columns(new_columns)
            except CommitFailedError as error:  # lost to another process: see what the table has now
                _LOG.info("delivery begins again", stream=self.stream, sink=self.sink, reason=first_line(error))
        else:
            raise StateError(f"{self.label}: other processes changed it {ATTEMPTS} times in a row", advice="run again")
        self.make_durable()

    def merge(self) -> tuple[int, int]:
        """Merge small files (OPTIMIZE), beside deliveries if need be.

        Returns:
            How many files were merged, and into how many.

        Raises:
            StateError, Unreachable: see `deliver`; the table is as it was.
            CommitFailedError: another process has merged the same files.
        """
        table = self.open()
        if table is None:
            return 0, 0
        with delta_call(self.label):
            metrics = table.optimize.compact()
        if metrics["numFilesAdded"]:
            self.make_durable(data=True)
        return metrics["numFilesRemoved"], metrics["numFilesAdded"]

    def make_durable(self, *, data: bool = False) -> None:
        """fsync what delta-rs wrote of a table on this machine's disk, which it does not do itself.

        The newest files of the log are enough: those before were synced before their delivery was marked.

        Args:
            data: whether it has written data files, too.
        """
        url = urlsplit(self.place().url)
        if url.scheme != "file":
            return
        root = Path(unquote(url.path))
        log = root / "_delta_log"
        newest = sorted(name for name in os.listdir(log) if not name.startswith("."))[-_LOG_FILES:]
        written = sorted(root.glob("*.parquet")) if data else []
        for path in (*written, root, *(log / name for name in newest), log):
            make_durable(path)

    def _follow(self) -> "DeltaTable | None":
        """Return the table as of now; what of its log is known is not read again, unless its credentials may expire."""
        found, self._opened = self._opened, None  # not to be used again after an error
        if found is None or time.monotonic() - found[1] > REOPEN_S:
            table = self.open()
            found = None if table is None else (table, time.monotonic())
        else:
            with delta_call(self.label):
                found[0].update_incremental()
        self._opened = found
        return None if found is None else found[0]

    def _schema_of(self, schema: pa.Schema) -> pa.Schema:
        return table_schema(schema, f"stream {self.stream}: the output of {self.sink}")

    def _find_delivered(self, table: "DeltaTable") -> int:
        with delta_call(self.label):
            return table.transaction_version(self.application) or 0

    def _create(self, schema: pa.Schema) -> "DeltaTable":
        """Make the table without rows, or open the one that another process made meanwhile."""
        from deltalake import DeltaTable
        from deltalake.exceptions import CommitFailedError

        place = self.place()
        if (root := urlsplit(place.url)).scheme == "file":
            make_private_directory(Path(unquote(root.path)))
        try:
            with delta_call(self.label):
                described = f"the output of {self.sink} of the stream {self.stream}"
                return DeltaTable.create(
                    place.url,
                    schema,
                    name=self.sink,
                    description=described,
                    configuration={"delta.logRetentionDuration": LOG_RETENTION},
                    storage_options=dict(place.options),
                )
        except (CommitFailedError, StateError):
            if (table := self.open()) is not None:
                return table
            raise

    def _find_changes(self, table: "DeltaTable", schema: pa.Schema) -> tuple[list[Any], pa.Schema | None]:
        """Return the fields that the table lacks, or of which it lacks a part; and, if it must become wider, the schema
        that it then has.

        Raises:
            UsageError: a column cannot become what it has to be, or has its name in another case there.
        """
        from deltalake import Schema

        with delta_call(self.label):
            fields = {field.name: field for field in table.schema().fields}
            wanted = {field.name: field for field in Schema.from_arrow(schema).fields}
            most = {field.name: field.type for field in pa.schema(table.schema().to_arrow())}
        lower = {name.lower(): name for name in fields}
        lacking, changes = [], [Change.NOTHING]
        for name, field in wanted.items():
            other, change = lower.get(name.lower(), name), Change.NOTHING
            if other == name and name in fields and fields[name].type != field.type:
                there = table_schema(pa.schema({name: most[name]}), self.label).field(0).type
                change = change_of(there, schema.field(name).type)
            if other != name or change is Change.REFUSED:
                raise UsageError(
                    f"stream {self.stream}: column {name} of the output of {self.sink} is {field.type}, and the table "
                    f"has {other}, {fields[other].type}: give the column another name, or as it was there; its type "
                    "may only become wider"
                )
            changes.append(change)
            if name not in fields or change is not Change.NOTHING:
                lacking.append(field)
                most[name] = schema.field(name).type
        return lacking, pa.schema(list(most.items())) if max(changes) is Change.WIDER else None

    def _widen(self, table: "DeltaTable", schema: pa.Schema, output: "OutputRecord") -> None:
        """Write all rows again with wider types, and replace them in one transaction."""
        from deltalake import Schema

        _LOG.info("writing a table again, with wider columns", stream=self.stream, sink=self.sink, schema=str(schema))
        writer = self._writer(output, schema)
        with delta_call(self.label):
            batches = table.to_pyarrow_dataset().to_batches()
        while True:
            with delta_call(self.label):
                batch = next(batches, None)
            if batch is None:
                break
            there, rows = batch.schema.names, batch.num_rows
            columns = [batch.column(f.name).cast(f.type) if f.name in there else pa.nulls(rows, f.type) for f in schema]
            writer.add(pa.record_batch(columns, schema=schema))
        actions = self._actions([each for each in writer.finish().objects if isinstance(each, SinkFile)])
        with delta_call(self.label):
            table.create_write_transaction(actions, "overwrite", Schema.from_arrow(schema))

    def _files(self, output: "OutputRecord") -> Sequence[SinkFile]:
        """Return the files of an output; rows staged for another kind of sink are written as files now."""
        if output.sink_files or not output.objects:
            return output.sink_files
        writer = self._writer(output, staged_schema(output.arrow_schema))
        for stored in output.objects:
            for batch in read_output(self.store, stored, output.arrow_schema):
                writer.add(batch)
        return [each for each in writer.finish().objects if isinstance(each, SinkFile)]

    def _writer(self, output: "OutputRecord", schema: pa.Schema) -> TableWriter:
        """Make a writer of files for the table, with names of this process and this checkpoint."""
        path, attempt = CheckpointPath(output.stream, output.epoch, output.checkpoint), f"driver-{uuid.uuid4().hex}"

        def name(n: int) -> str:
            return path.table_file(self.sink, output.name, 0, f"{attempt}-{n}")

        return TableWriter(self.store, name, schema, inline_bytes=-1)

    def _add(self, table: "DeltaTable", files: Sequence[SinkFile], id: int) -> None:
        """Commit files; the log refuses it if it has got an id of this application since `table` was opened."""
        from deltalake import CommitProperties, Transaction

        actions, now_ms = self._actions(files), int(time.time() * 1000)
        properties = CommitProperties(
            custom_metadata={CHECKPOINT: id}, app_transactions=[Transaction(self.application, id, now_ms)]
        )
        with delta_call(self.label):
            table.create_write_transaction(actions, "append", table.schema(), commit_properties=properties)

    def _actions(self, files: Sequence[SinkFile]) -> list[Any]:
        from deltalake.transaction import AddAction

        now_ms = int(time.time() * 1000)
        return [
            AddAction(
                each.name.removeprefix(self.prefix), each.bytes, {}, now_ms, data_change=True, stats=each.statistics
            )
            for each in files
        ]
