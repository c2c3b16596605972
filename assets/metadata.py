"""What an asset's events tell: numbers that Dagster plots from run to run, a table, a picture."""

import base64
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
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
    "bytes": "int",
    "state_rows": "int",
    "event_time_max": "string",
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
            "forms": _each(last["forms"]),
            "D": _each(last["D"]),
            "chain": _ranges(chain),
            "chain_length": len(chain),
            "chain_picture": _picture(place, result.stream),
            "newest_checkpoints": table(COLUMNS, map(_row, reversed(newest))),
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
        "forms": _counted(checkpoint["forms"].values()),
        "bytes": checkpoint["bytes"],
        "state_rows": checkpoint["rows"],
        "event_time_max": checkpoint["event_time_max"],
        "proven": {True: "yes", False: "FAILED", None: "not yet"}[checkpoint["proven"]],
        "committed_at": checkpoint["committed_at"],
        "digest": checkpoint["digest"],
    }


def _each(values: Mapping[str, Any]) -> str:
    """Each operator's value."""
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _counted(forms: Iterable[str]) -> str:
    """The form if all operators have the same, else how many have which."""
    counts = Counter(forms)
    return " + ".join(form if len(counts) == 1 else f"{count} {form}" for form, count in sorted(counts.items()))


def _ranges(ids: Collection[int]) -> str:
    """Ascending ids, runs of them drawn together: 1-4, 7."""
    known = set(ids)
    starts = [id for id in ids if id - 1 not in known]
    ends = [id for id in ids if id + 1 not in known]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _picture(place: Place, stream: str) -> dg.MarkdownMetadataValue:
    """The report's picture, within the event itself, so that it lasts as long; as SVG it fits Dagster's window."""
    from siltstone.report import draw_report, report_data

    with tempfile.TemporaryDirectory() as directory:
        drawn = draw_report(report_data(place.catalog, stream), Path(directory) / "chain.svg")
        image = base64.b64encode(drawn.read_bytes()).decode()
    return dg.MetadataValue.md(f"![chain of {stream}](data:image/svg+xml;base64,{image})")
