"""Make the metadata of asset events: numbers that Dagster plots from run to run, tables, a picture.

A value is plain, or a mapping of its `type` and `raw_value`, as Dagster Pipes has it. So no Dagster is needed.
"""

import base64
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from siltstone.catalog.warehouse import OpenWarehouse
from siltstone.chains.chain_rules import amplification
from siltstone.chains.costs import first_of, recorded_chains
from siltstone.chains.inspect import list_checkpoints
from siltstone.format.manifests import read_manifest
from siltstone.log import redact
from siltstone.model import Handle
from siltstone.restore.export import recorded_digest
from siltstone.sinks.delta import SinkTable
from siltstone.sinks.jdbc import JdbcTable
from siltstone.sinks.kafka import KafkaTopic
from siltstone.sinks.parquet import ParquetSink

NEWEST = 10
"""rows of the table of checkpoints"""
DRAWN = 200
"""checkpoints of the picture"""
COLUMNS = {
    "checkpoint": "int",
    "forms": "string",
    "bytes": "int",
    "state_rows": "int",
    "event_time_max": "string",
    "proven": "string",
    "committed_at": "string",
    "digest": "string",
}
HANDLES = {
    "table": "string",
    "form": "string",
    "key_groups": "string",
    "rows": "int",
    "bytes": "int",
    "builds_on": "int",
    "object": "string",
}
ROWS, URI, TABLE_NAME = "dagster/row_count", "dagster/uri", "dagster/table_name"
"""Dagster's names of what it shows of any asset"""
Metadata = dict[str, Any]


def checkpoints_metadata(warehouse: OpenWarehouse, stream: str, *, draws: bool = True) -> Metadata:
    """Describe the newest checkpoint of a stream and its chain, with a picture if it `draws` and matplotlib is
    installed; empty if it has no checkpoint.

    Raises:
        SiltstoneError: the catalog cannot be read.
    """
    newest = list_checkpoints(warehouse.catalog, stream, NEWEST)
    if not newest:
        return {}
    last = newest[-1]
    chain = warehouse.catalog.chains.list_checkpoints(stream, last["id"])
    return {
        "checkpoint": last["id"],
        "digest": last["digest"],
        ROWS: last["rows"],
        "forms": _format_each(last["forms"]),
        "D": _format_each(last["D"]),
        "amplification": _format_each(last["amplification"]),
        "chain": _ranges(chain),
        "chain_length": len(chain),
        "committed_at": last["committed_at"],
        **({"chain_picture": _picture(warehouse, stream)} if draws and find_spec("matplotlib") else {}),
        "newest_checkpoints": table(COLUMNS, map(_row, reversed(newest))),
    }


def operator_metadata(warehouse: OpenWarehouse, stream: str, operator: str, checkpoint: int) -> tuple[Metadata, str]:
    """Describe what one operator wrote at a checkpoint; return metadata and the digest of the operator's state.

    The metadata has the operator's part of the manifest as a table.

    Raises:
        SiltstoneError: the catalog or the manifest cannot be read.
    """
    record = warehouse.catalog.checkpoints.get(stream, checkpoint)
    manifest = read_manifest(warehouse.warehouse.store, record.manifest)
    statistics = record.statistics["operators"][operator]
    handles = [handle for handle in manifest.handles if handle.operator == operator]
    digest = recorded_digest(manifest, [(operator, name) for name in manifest.digests[operator]])
    chains = recorded_chains(record, operator)
    first = first_of(chains.values(), checkpoint)
    times_live = amplification([state for _, state in chains.values()])
    sqns = [handle.sqn for handle in handles]
    metadata: Metadata = {
        "checkpoint": checkpoint,
        "digest": digest,
        "form": record.forms[operator].value,
        "first_sqn": min(sqns, default=0),
        "last_sqn": max(sqns, default=0),
        "bytes": statistics["bytes"],
        ROWS: statistics["state_rows"],
        "rows_in": statistics["rows_in"],
        "dead_letters": record.statistics.get("dead_letters", {}).get(operator, 0),
        "late_rows": record.statistics.get("late", {}).get(operator, 0),
        "seconds": sum(statistics["seconds"].values()),
        "D": record.d.get(operator, 0),
        "chain": _ranges(range(first, checkpoint + 1)),
        "committed_at": record.committed_at.isoformat(timespec="seconds"),
        "manifest": table(HANDLES, map(_handle, handles)),
    }
    return metadata | ({} if times_live is None else {"amplification": round(times_live, 3)}), digest


def sink_metadata(checkpoints: Sequence[int], sink: object) -> Metadata:
    """Describe what a sink published of a run's checkpoints, or of a table what it has now; only their ids if it is a
    user's own."""
    metadata: Metadata = {"first_checkpoint": checkpoints[0], "last_checkpoint": checkpoints[-1]}
    if isinstance(sink, SinkTable):
        found = sink.describe()
        url = redact(found.url)
        return metadata | {ROWS: found.rows, "bytes": found.bytes, URI: url, TABLE_NAME: f"delta.`{url}`"}
    if isinstance(sink, JdbcTable):
        return metadata | {URI: sink.url, TABLE_NAME: sink.table}
    if isinstance(sink, KafkaTopic):
        return metadata | {"topic": sink.sink.topic}
    if not isinstance(sink, ParquetSink):
        return metadata
    files = [file for id in checkpoints for file in sink.published_path(id).glob("*.parquet")]
    return metadata | {
        ROWS: sum(pq.read_metadata(file).num_rows for file in files),
        "bytes": sum(file.stat().st_size for file in files),
        URI: str(sink.path),
    }


def table(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> Metadata:
    """Make a table of rows with plain values; `columns` maps name -> type (string, int, float or bool)."""
    schema = [{"name": name, "type": type} for name, type in columns.items()]
    return typed("table", {"schema": schema, "records": [dict(row) for row in rows]})


def typed(type: str, value: Any) -> Metadata:
    """Make a value that Dagster shows as this type, such as `path` or `md`."""
    return {"type": type, "raw_value": value}


def _row(checkpoint: Mapping[str, Any]) -> Metadata:
    return {
        "checkpoint": checkpoint["id"],
        "forms": _count_forms(checkpoint["forms"].values()),
        "bytes": checkpoint["bytes"],
        "state_rows": checkpoint["rows"],
        "event_time_max": checkpoint["event_time_max"],
        "proven": {True: "yes", False: "FAILED", None: "not yet"}[checkpoint["proven"]],
        "committed_at": checkpoint["committed_at"],
        "digest": checkpoint["digest"],
    }


def _handle(handle: Handle) -> Metadata:
    return {
        "table": handle.variable or handle.kind.value,
        "form": handle.form.value,
        "key_groups": f"{handle.key_groups.start}-{handle.key_groups.end - 1}",
        "rows": handle.rows,
        "bytes": handle.length,
        "builds_on": handle.previous,
        "object": handle.object,
    }


def _format_each(values: Mapping[str, Any]) -> str:
    """Format the value of each operator."""
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _count_forms(forms: Iterable[str]) -> str:
    """Format the forms of all operators: the form if all have the same, else the number of each."""
    counts = Counter(forms)
    return " + ".join(form if len(counts) == 1 else f"{count} {form}" for form, count in sorted(counts.items()))


def _ranges(ids: Collection[int]) -> str:
    """Format ascending ids as ranges: 1-4, 7."""
    known = set(ids)
    starts = [id for id in ids if id - 1 not in known]
    ends = [id for id in ids if id + 1 not in known]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _picture(warehouse: OpenWarehouse, stream: str) -> Metadata:
    """Draw the report's picture into the event itself, so that both last equally long; as SVG it fits the window."""
    from siltstone.report import draw_report, report_data

    with tempfile.TemporaryDirectory() as directory:
        drawn = draw_report(report_data(warehouse.catalog, stream, newest=DRAWN), Path(directory) / "chain.svg")
        image = base64.b64encode(drawn.read_bytes()).decode()
    return typed("md", f"![chain of {stream}](data:image/svg+xml;base64,{image})")
