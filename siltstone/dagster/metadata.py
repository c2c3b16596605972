"""Turn the metadata of `siltstone.pipes` into Dagster's, and describe the columns of assets."""

from collections.abc import Callable, Mapping
from typing import Any

import dagster as dg
import pyarrow as pa

from siltstone.pipes.metadata import Metadata
from siltstone.pipes.outcomes import Outcome

COLUMN_SCHEMA = "dagster/column_schema"
_TYPES: Mapping[str, Callable[[Any], dg.MetadataValue[Any]]] = {
    "md": dg.MetadataValue.md,
    "path": dg.MetadataValue.path,
    "table": lambda value: dg.MetadataValue.table(
        [dg.TableRecord(record) for record in value["records"]],
        dg.TableSchema([dg.TableColumn(column["name"], column["type"]) for column in value["schema"]]),
    ),
}


def to_dagster(metadata: Metadata) -> dict[str, Any]:
    """Turn typed values into Dagster's; plain values stay."""
    return {
        name: _TYPES[value["type"]](value["raw_value"]) if isinstance(value, Mapping) else value
        for name, value in metadata.items()
    }


def materialize_result(outcome: Outcome, keys: Mapping[dg.AssetKey, dg.AssetKey]) -> dg.MaterializeResult:
    """Make what a step yields of an outcome; `keys` has the key of each name (`names.Keys`)."""
    return dg.MaterializeResult(
        keys[dg.AssetKey.from_user_string(outcome.asset)],
        metadata=to_dagster(outcome.metadata),
        data_version=dg.DataVersion(outcome.version) if outcome.version else None,
    )


def column_schema(tables: Mapping[str, pa.Schema]) -> dg.TableSchema:
    """Describe the columns of some tables; with several, each column's name begins with that of its table."""
    return dg.TableSchema(
        [
            dg.TableColumn(
                f"{table}.{field.name}" if len(tables) > 1 else field.name,
                str(field.type),
                constraints=dg.TableColumnConstraints(nullable=field.nullable),
            )
            for table, schema in tables.items()
            for field in schema
        ]
    )
