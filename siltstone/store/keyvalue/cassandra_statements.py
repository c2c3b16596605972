"""The tables of a store in Cassandra, and the statements on them (`cassandra` says what they mean)."""

OBJECTS, CHUNKS = "siltstone_objects", "siltstone_chunks"

TABLES = {
    OBJECTS: f"""
        CREATE TABLE IF NOT EXISTS {OBJECTS} (
            entry text, shard int, key blob, size int, value blob, began timestamp, dropped boolean,
            PRIMARY KEY ((entry, shard), key)
        ) WITH gc_grace_seconds = 86400
    """,
    CHUNKS: f"""
        CREATE TABLE IF NOT EXISTS {CHUNKS} (
            entry text, key blob, write_id blob, part int, number int, value blob,
            PRIMARY KEY ((entry, key, write_id, part), number)
        ) WITH compression = {{'enabled': false}}
    """,
}
"""Tombstones of objects are met by listings, so they are kept for a day only: longer than hints are (3 hours)."""

_ROW = "WHERE entry = ? AND shard = ? AND key = ?"
_CHUNK = "WHERE entry = ? AND key = ? AND write_id = ? AND part = ?"

# Listings.
PARTITIONS = (
    f"SELECT entry, shard, key FROM {OBJECTS} WHERE token(entry, shard) > ? AND token(entry, shard) <= ? "
    "PER PARTITION LIMIT 1"
)
SIZES = f"SELECT key, size FROM {OBJECTS} WHERE entry = ? AND shard = ? AND key >= 0x01"
STAGED = f"SELECT key, began FROM {OBJECTS} WHERE entry = ? AND shard = ? AND key < 0x01"

# Rows of objects and of writes in progress: every write is a lightweight transaction, so that none is overtaken by the
# timestamp of another client's clock.
VALUE = f"SELECT value FROM {OBJECTS} {_ROW}"
DROPPED = f"SELECT dropped FROM {OBJECTS} {_ROW}"
ADD = f"INSERT INTO {OBJECTS} (entry, shard, key, size, value) VALUES (?, ?, ?, ?, ?) IF NOT EXISTS"
DELETE = f"DELETE FROM {OBJECTS} {_ROW} IF EXISTS"
BEGIN = f"INSERT INTO {OBJECTS} (entry, shard, key, began, dropped) VALUES (?, ?, ?, ?, ?) IF NOT EXISTS"
END = f"DELETE FROM {OBJECTS} {_ROW} IF dropped = false"
DROP = f"UPDATE {OBJECTS} SET dropped = true {_ROW} IF EXISTS"

# Chunks have logical timestamps: a deletion wins over every insertion, even one that arrives later.
CHUNK_OF = f"SELECT value FROM {CHUNKS} {_CHUNK} AND number = ?"
PART_OF = f"SELECT number FROM {CHUNKS} {_CHUNK} LIMIT 1"
PUT_CHUNK = (
    f"INSERT INTO {CHUNKS} (entry, key, write_id, part, number, value) VALUES (?, ?, ?, ?, ?, ?) USING TIMESTAMP 1"
)
DELETE_PART = f"DELETE FROM {CHUNKS} USING TIMESTAMP 2 {_CHUNK}"
