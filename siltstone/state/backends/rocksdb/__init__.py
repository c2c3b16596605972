"""Working state in RocksDB: larger than memory, and there again after a restart of the machine."""

from siltstone.state.backends.rocksdb.subtask import RocksDBBackend, RocksDBState

__all__ = ["RocksDBBackend", "RocksDBState"]
