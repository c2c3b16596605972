"""What sinks were given, checkpoint by checkpoint, as the catalog and the store have it."""

import pyarrow as pa

from siltstone.catalog.records.outbox import OutputRecord
from siltstone.catalog.repository import Catalog
from siltstone.errors import UsageError
from siltstone.format.output import read_output, staged_schema
from siltstone.listings import OutputList
from siltstone.store.base import Store
from siltstone.times import as_utc


def list_outputs(catalog: Catalog, stream: str) -> OutputList:
    """List a stream's recorded outputs (`StreamClient.outputs`)."""
    newest, found = catalog.checkpoints.last_id(stream), catalog.outbox.list(stream)
    waiting = [each.checkpoint for each in found if each.delivered_at is None and each.checkpoint <= newest]
    return OutputList(stream, min(waiting) - 1 if waiting else newest, [_describe(each) for each in found])


def _describe(output: OutputRecord) -> dict[str, object]:
    delivered = None if output.delivered_at is None else as_utc(output.delivered_at).isoformat()
    told = {"output": output.name, "checkpoint": output.checkpoint, "sink_id": output.sink_id, "rows": output.rows}
    return {**told, "delivered_at": delivered}


def read_rows(catalog: Catalog, store: Store, stream: str, output: str, checkpoint: int) -> pa.Table:
    """Read one output of a checkpoint (`StreamClient.read_output`).

    Raises:
        UsageError: nothing is kept of it, or it has become files of a Delta table.
        CorruptObject: it is damaged.
    """
    found = [each for each in catalog.outbox.list(stream, checkpoint=checkpoint) if each.name == output]
    if not found or found[0].lost:
        raise UsageError(
            f"nothing is kept of output {output} of checkpoint {checkpoint} of stream {stream}: it had no rows, or its "
            "sink has them for longer than retention.outputs"
        )
    [one] = found
    if one.sink_files:
        raise UsageError(
            f"output {output} of checkpoint {checkpoint} of stream {stream} has become files of a Delta table: read "
            f"the table, by stream({stream!r}).sink_table({output!r})"
        )
    batches = [batch for each in one.objects for batch in read_output(store, each, one.arrow_schema)]
    return pa.Table.from_batches(batches, staged_schema(one.arrow_schema))
