"""Where state lives while a stream runs: schemas, hashing, digests, and the backends behind one columnar protocol."""
