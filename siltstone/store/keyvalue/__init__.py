"""Objects in key-value stores: Redis and RocksDB."""
