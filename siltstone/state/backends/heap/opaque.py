"""The file with the values of one opaque variable: an Arrow IPC file of key groups and bytes."""

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from siltstone.errors import StateError
from siltstone.state.backends.heap.header import DISTRUST

_SCHEMA = pa.schema([("key_group", pa.uint16()), ("value", pa.large_binary())])


def read_opaque(path: Path) -> dict[int, bytes]:
    """Return key group -> bytes.

    Raises:
        StateError: the file is missing or damaged.
    """
    try:
        table = pa.ipc.open_file(path.read_bytes()).read_all()
    except (OSError, pa.ArrowInvalid) as error:
        raise StateError(f"{path} is missing or damaged", advice=DISTRUST) from error
    return dict(zip(table.column("key_group").to_pylist(), table.column("value").to_pylist(), strict=True))


def render_opaque(values: Mapping[int, bytes]) -> bytes:
    """Return the bytes of the file."""
    table = pa.table([list(values), list(values.values())], schema=_SCHEMA)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, _SCHEMA) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()
