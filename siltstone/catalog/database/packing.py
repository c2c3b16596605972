"""Compress text of the catalog with a dictionary of what is the same in nearly all of it.

Each step of the input log has Spark's offsets, with more than a thousand characters of option names that never change;
each checkpoint has statistics with fixed names. Both are in the dictionary that deflate (RFC 1950) is given, so that
little more is stored than the differences.

    version (1 byte, 1) | zlib stream with the dictionary of that version

The dictionary of a version never changes; a new one needs a new version. Other text, such as that of a later Spark,
only takes more bytes.
"""

import zlib

from siltstone.decoding import translate_decode_errors
from siltstone.errors import StateError

_VERSION = 1
_FREE_BYTES = 8 << 20
_RATIO = 64
"""unpacked text may take `_FREE_BYTES` in memory, plus `_RATIO` bytes per stored byte"""
_OPTIONS = (
    "sql.streaming.stateStore.providerClass",
    "sql.dropDuplicates.deterministicKeyOrder.enabled",
    "sql.streaming.stateStore.rocksdb.mergeOperatorVersion",
    "sql.streaming.stateStore.rocksdb.formatVersion",
    "sql.streaming.queryEvolution.enableSourceEvolution",
    "sql.streaming.stateStore.encodingFormat",
    "sql.streaming.statefulOperator.useStrictDistribution",
    "sql.streaming.flatMapGroupsWithState.stateFormatVersion",
    "sql.streaming.multipleWatermarkPolicy",
    "sql.streaming.stateStore.rowChecksum.enabled",
    "sql.streaming.statefulOperator.alwaysNullableOutput.enabled",
    "sql.streaming.aggregation.stateFormatVersion",
    "sql.function.protobufExtensions.enabled",
    "sql.shuffle.partitions",
    "sql.streaming.join.stateFormatVersion",
    "sql.streaming.stateStore.compression.codec",
    "sql.optimizer.pruneFiltersCanPruneStreamingSubplan",
)
_VALUES = (
    "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider",
    *("true", "2", "5", "false", "unsaferow", "true", "2", "min", "false", "true", "2", "false", "200", "2"),
    *("lz4", "false"),
)
_SPARK = ",".join(f'"spark.{option}":"{value}"' for option, value in zip(_OPTIONS, _VALUES, strict=True))
_STATISTICS = (
    '{"rows_in": 0, "state_rows": 0, "parallelism": 2, "operators": {"": {"rows_in": 0, "state_rows": 0, "bytes": 0, '
    '"incremental_bytes": 0, "index_bytes": 0, "chain": {"first": 1, "rows": 0, "base_bytes": 0.0, "base_s": 0.0, '
    '"base_rows": 0, "deltas": 0, "deltas_bytes": 0.0, "deltas_s": 0.0, "index_bytes": 0.0, "base_factor": 1.2, '
    '"delta_factor": 1.2}, "restore_bound_bytes": 0, "restore_bound_s": 0.0, "seconds": {"base": 0.0, "commit": 0.0, '
    '"delta": 0.0, "open": 0.0, "persist": 0.0, "process": 0.0, "restore": 0.0}}}, "uploads": {"requests": 1, '
    '"attempts": 1, "objects": 1, "bytes": 0, "queue_high_water": 1, "in_flight_high_water_bytes": 0, "latency_s": '
    '{"sum": 0.0, "buckets": [-1], "counts": [1]}, "batch_segments": {"sum": 1.0, "buckets": [0], "counts": [1]}, '
    '"object_bytes": {"sum": 0.0, "buckets": [1], "counts": [1]}}}'
)
_SOURCE = (
    '{"0": {"0": "v1\\n{\\"path\\":\\"file:///source/.parquet\\",\\"timestamp\\":1300000000000,\\"batchId\\":0}"}}'
)
_OFFSETS = f'v1\n{{"batchWatermarkMs":0,"batchTimestampMs":1700000000000,"conf":{{{_SPARK}}}}}\n{{"logOffset":0}}'
_DICTIONARY = (_STATISTICS + _SOURCE + _OFFSETS).encode()


def pack(text: str) -> bytes:
    """Compress text; store it uncompressed if it compresses so well that `unpack` would refuse it."""
    data = text.encode()
    packed = _deflate(data, 9)
    return packed if len(data) < _bound(packed) else _deflate(data, 0)


def unpack(data: bytes) -> str:
    """Return the text that `pack` compressed.

    Raises:
        StateError: `pack` did not make these bytes, or a newer Siltstone did.
    """
    if data[:1] != bytes([_VERSION]):
        raise StateError("packed text of the catalog is damaged, or of a newer Siltstone", advice="upgrade siltstone")
    unpacker = zlib.decompressobj(zdict=_DICTIONARY)
    with translate_decode_errors(
        "packed text of the catalog", "what was packed (restore the catalog's backup)", StateError
    ):
        text = unpacker.decompress(data[1:], _bound(data))
        if unpacker.unconsumed_tail:
            raise StateError("packed text of the catalog would be too large", advice="restore the catalog's backup")
        if not unpacker.eof:
            raise StateError("packed text of the catalog is cut short", advice="restore the catalog's backup")
        return text.decode()


def _deflate(data: bytes, level: int) -> bytes:
    packer = zlib.compressobj(level, zdict=_DICTIONARY)
    return bytes([_VERSION]) + packer.compress(data) + packer.flush()


def _bound(packed: bytes) -> int:
    """Return the maximum bytes that packed text may unpack to."""
    return _FREE_BYTES + _RATIO * len(packed)
