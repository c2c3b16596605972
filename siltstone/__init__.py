"""Siltstone: durable, provable state for PySpark streams.

    import siltstone as st

Write an `Operator` with state variables (`ValueState`, `MapState`, `ListState`, `WindowState`, `OpaqueState`,
`BroadcastState`, `Bloom`), or take the ready-made `Aggregate`, also over windows (`Tumbling`), and put it into a
`Stream`. `st.open(warehouse)` returns a client with one method for each operation. `st.write_stream(rows, stream)` runs
a stream over a streaming DataFrame.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from siltstone.aggregates.distinct import ApproxDistinct
    from siltstone.aggregates.functions import Average, Count, First, Function, Last, Max, Min, Sum
    from siltstone.aggregates.lists import CollectList, TopN
    from siltstone.aggregates.operator import Aggregate
    from siltstone.aggregates.windows import Cumulative, Session, Sliding, Tumbling
    from siltstone.bloom import Bloom
    from siltstone.client import Client, StreamClient, write_stream
    from siltstone.client import open_client as open
    from siltstone.deduplicate import Deduplicate
    from siltstone.errors import (
        BadRow,
        CorruptObject,
        Fenced,
        LossRefused,
        NewerFormat,
        NoLiveState,
        ProofFailed,
        SchemaConflict,
        SiltstoneError,
        StateError,
        Stopped,
        UnknownCheckpoint,
        UnknownStream,
        Unreachable,
        UsageError,
        WrongWarehouse,
    )
    from siltstone.joins.interval import IntervalJoin
    from siltstone.joins.lookup import LookupJoin
    from siltstone.keyed import KeyedProcessor
    from siltstone.operator import (
        BroadcastState,
        ListState,
        MapState,
        OpaqueState,
        Operator,
        State,
        Timer,
        ValueState,
        WindowState,
    )
    from siltstone.rows import Due, Rows
    from siltstone.secret import Secret
    from siltstone.sinks.arrow import ArrowSink
    from siltstone.sinks.delta import DeltaSink
    from siltstone.sinks.jdbc import JdbcSink
    from siltstone.sinks.kafka import KafkaSink
    from siltstone.sinks.kafka_avro import avro_schema
    from siltstone.sinks.parquet import ParquetSink
    from siltstone.state.hashing import xxhash64
    from siltstone.state.ttl import TTL
    from siltstone.stream import Autonomous, Stream
    from siltstone.time.event_time import EventTime

__all__ = [
    "TTL",
    "Aggregate",
    "ApproxDistinct",
    "ArrowSink",
    "Autonomous",
    "Average",
    "BadRow",
    "Bloom",
    "BroadcastState",
    "Client",
    "CollectList",
    "CorruptObject",
    "Count",
    "Cumulative",
    "Deduplicate",
    "DeltaSink",
    "Due",
    "EventTime",
    "Fenced",
    "First",
    "Function",
    "IntervalJoin",
    "JdbcSink",
    "KafkaSink",
    "KeyedProcessor",
    "Last",
    "ListState",
    "LookupJoin",
    "LossRefused",
    "MapState",
    "Max",
    "Min",
    "NewerFormat",
    "NoLiveState",
    "OpaqueState",
    "Operator",
    "ParquetSink",
    "ProofFailed",
    "Rows",
    "SchemaConflict",
    "Secret",
    "Session",
    "SiltstoneError",
    "Sliding",
    "State",
    "StateError",
    "Stopped",
    "Stream",
    "StreamClient",
    "Sum",
    "Timer",
    "TopN",
    "Tumbling",
    "UnknownCheckpoint",
    "UnknownStream",
    "Unreachable",
    "UsageError",
    "ValueState",
    "WindowState",
    "WrongWarehouse",
    "avro_schema",
    "open",
    "write_stream",
    "xxhash64",
]

_DOOR = {
    "siltstone.aggregates.distinct": ("ApproxDistinct",),
    "siltstone.aggregates.functions": ("Average", "Count", "First", "Function", "Last", "Max", "Min", "Sum"),
    "siltstone.aggregates.lists": ("CollectList", "TopN"),
    "siltstone.aggregates.operator": ("Aggregate",),
    "siltstone.aggregates.windows": ("Cumulative", "Session", "Sliding", "Tumbling"),
    "siltstone.bloom": ("Bloom",),
    "siltstone.client": ("Client", "StreamClient", "write_stream"),
    "siltstone.deduplicate": ("Deduplicate",),
    "siltstone.errors": (
        "BadRow",
        "CorruptObject",
        "Fenced",
        "LossRefused",
        "NewerFormat",
        "NoLiveState",
        "ProofFailed",
        "SchemaConflict",
        "SiltstoneError",
        "StateError",
        "Stopped",
        "UnknownCheckpoint",
        "UnknownStream",
        "Unreachable",
        "UsageError",
        "WrongWarehouse",
    ),
    "siltstone.joins.interval": ("IntervalJoin",),
    "siltstone.joins.lookup": ("LookupJoin",),
    "siltstone.keyed": ("KeyedProcessor",),
    "siltstone.operator": (
        "BroadcastState",
        "ListState",
        "MapState",
        "OpaqueState",
        "Operator",
        "State",
        "Timer",
        "ValueState",
        "WindowState",
    ),
    "siltstone.rows": ("Due", "Rows"),
    "siltstone.secret": ("Secret",),
    "siltstone.sinks.arrow": ("ArrowSink",),
    "siltstone.sinks.delta": ("DeltaSink",),
    "siltstone.sinks.jdbc": ("JdbcSink",),
    "siltstone.sinks.kafka": ("KafkaSink",),
    "siltstone.sinks.kafka_avro": ("avro_schema",),
    "siltstone.sinks.parquet": ("ParquetSink",),
    "siltstone.state.hashing": ("xxhash64",),
    "siltstone.state.ttl": ("TTL",),
    "siltstone.stream": ("Autonomous", "Stream"),
    "siltstone.time.event_time": ("EventTime",),
}
"""module -> the names it defines; each is imported on first use, so that `import siltstone` is quick"""


def __getattr__(name: str) -> Any:
    if name == "open":
        found = import_module("siltstone.client").open_client
    else:
        module = next((module for module, names in _DOOR.items() if name in names), None)
        if module is None:
            raise AttributeError(f"module 'siltstone' has no attribute {name!r}")
        found = getattr(import_module(module), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
