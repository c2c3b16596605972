"""Read one table of a checkpoint into this process, as Arrow."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds

from siltstone.errors import UsageError
from siltstone.format.manifest import Manifest
from siltstone.restore.scan import Selection, TableShape, plan_scan, scan
from siltstone.store.base import Store

LIMIT_BYTES = 1 << 30
"""default maximum bytes of a table that is read into this process"""


def read_table(
    store: Store,
    manifests: Mapping[int, Manifest],
    operator: str,
    variable: str,
    columns: Sequence[str] | None = None,
    limit_bytes: int = LIMIT_BYTES,
    scratch: Path | None = None,
) -> ds.Dataset:
    """Read one table of the newest of these manifests; if all columns are read, every digest is compared.

    Args:
        manifests: those of a checkpoint's chain, by id.
        variable: a variable or one of its tables, such as `window.bounds`. An opaque variable has the columns
            `key_group` and `value` (binary).
        columns: only these; None for all.
        limit_bytes: maximum bytes of memory for the rows.
        scratch: see `BlockReader`.

    Raises:
        UsageError: the operator, variable or column does not exist, or the rows take more than `limit_bytes`.
        CorruptObject, ProofFailed: what was stored is damaged.
    """
    shape = TableShape.of(manifests[max(manifests)], operator, variable)
    schema = shape.columns if columns is None else shape.select(columns)
    found: list[pa.Table] = []
    size_bytes = 0
    for task in plan_scan(manifests, shape, Selection(tuple(schema.names), None, None), None):
        for rows in scan(store, task, scratch):
            found.append(rows)
            size_bytes += rows.nbytes
            if size_bytes > limit_bytes:
                raise UsageError(
                    f"{operator}.{variable} takes more than {limit_bytes:,} bytes of memory: name fewer columns, raise "
                    "limit_bytes, or pass a Spark session"
                )
    return ds.dataset(pa.concat_tables(found) if found else schema.empty_table())
