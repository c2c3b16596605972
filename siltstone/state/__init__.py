"""State of a running stream: schemas, hashing, digests, and backends behind one columnar protocol."""
