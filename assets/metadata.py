"""What an asset's events tell: numbers that Dagster plots from run to run, a table, a picture."""

import base64
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from siltstone.catalog.place import Place
from siltstone.lifecycle.inspect import list_checkpoints
from siltstone.settings import Settings

if TYPE_CHECKING:
    from siltstone.spark.operations import RestoreResult, RunResult

NEWEST = 10
"""rows of the table of checkpoints"""
COLUMNS = {
    "checkpoint": "int",
    "forms": "string",
    "D": "string",
    "bytes": "int",
    "rows": "int",
    "event_time": "string",
    "proven": "string",
    "committed_at": "string",
    "digest": "string",
}
Metadata = dict[str, Any]


def checkpoints_metadata(settings: Settings, result: "RunResult") -> Metadata:
    """What a run made, and how the stream's chain now looks.

    Raises:
        SiltstoneError: the catalog cannot be read.
    """
    made: Metadata = {
        "checkpoints_made": len(result.checkpoints),
        "rows": result.rows,
        "bytes": result.bytes,
        "seconds": result.seconds,
    }
    with Place.existing(settings.warehouse, settings.catalog) as place:
        newest = list_checkpoints(place.catalog, result.stream, NEWEST)
        if not newest:
            return made
        last = newest[-1]
        chain = place.catalog.chain(result.stream, last["id"])
        return made | {
            "checkpoint": last["id"],
            "digest": last["digest"],
            "state_rows": last["rows"],
            "forms": last["forms"],
            "D": last["D"],
            "chain": chain,
            "chain_length": len(chain),
            "newest_checkpoints": table(COLUMNS, map(_row, reversed(newest))),
            "chain_picture": _picture(place, result.stream),
        }


def restored_metadata(result: "RestoreResult") -> Metadata:
    """What a restore rebuilt, and where it lies."""
    return {
        "checkpoint": result.checkpoint,
        "dagster/row_count": result.rows,
        "bytes": result.bytes,
        "seconds": result.seconds,
        "digest": result.digest,
        "proven": result.proven,
        "path": dg.MetadataValue.path(result.path) if result.path else dg.MetadataValue.null(),
    }


def table(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> dg.TableMetadataValue:
    """Rows of plain values under columns `name -> type` (string, int, float or bool)."""
    schema = dg.TableSchema([dg.TableColumn(name, type) for name, type in columns.items()])
    return dg.MetadataValue.table([dg.TableRecord(dict(row)) for row in rows], schema)


def _row(checkpoint: Mapping[str, Any]) -> Metadata:
    return {
        "checkpoint": checkpoint["id"],
        "forms": _each(checkpoint["forms"]),
        "D": _each(checkpoint["D"]),
        "bytes": checkpoint["bytes"],
        "rows": checkpoint["rows"],
        "event_time": checkpoint["event_time_max"],
        "proven": {True: "yes", False: "FAILED", None: "not yet"}[checkpoint["proven"]],
        "committed_at": checkpoint["committed_at"],
        "digest": checkpoint["digest"],
    }


def _each(values: Mapping[str, Any]) -> str:
    """One value if all operators have the same, else each operator's."""
    distinct = {str(value) for value in values.values()}
    return distinct.pop() if len(distinct) == 1 else ", ".join(f"{name} {value}" for name, value in values.items())


def _picture(place: Place, stream: str) -> dg.MarkdownMetadataValue:
    """The report's picture, within the event itself: what it shows is then there for as long as the event is."""
    from siltstone.report import draw_report, report_data

    with tempfile.TemporaryDirectory() as directory:
        drawn = draw_report(report_data(place.catalog, stream), Path(directory) / "chain.png")
        image = base64.b64encode(drawn.read_bytes()).decode()
    return dg.MetadataValue.md(f"![chain of {stream}](data:image/png;base64,{image})")
