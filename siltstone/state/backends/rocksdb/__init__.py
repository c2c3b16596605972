"""Working state in RocksDB, which is there again after a restart of the machine."""

from siltstone.state.backends.rocksdb.subtask import RocksDBBackend, RocksDBState

__all__ = ["RocksDBBackend", "RocksDBState"]
