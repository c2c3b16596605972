"""The catalog's tables. It grows with objects, not with subtasks times variables (patent US 9471438).

    warehouse                  one row: the identity of the catalog's warehouse

    stream 1--n run            one row per writer epoch: the newest 1000, and those that have checkpoints
           1--n lease          readers, and writers of objects that nothing refers to yet
           1--n deletion       tombstones: objects deleted from the store, of checkpoints and orphans
           1--n deletion_pass  what each pass of a deletion removed, also from the catalog: counts and bytes
           1--n rollback       the checkpoints that were given up
           1--n edit           changes that people made to the state by hand
           1--n definition     definitions with their first checkpoints, and what was dropped with them
           1--n output         a completed checkpoint's rows for a sink, until the sink has them
           1--n checkpoint 1--n object       what it wrote, and which checkpoints need that
                           1--1 reference_copy
                           1--n savepoint    names that keep it
           1--n step                         the input log; step 0 holds its beginning (`catalog.input_log`)
    receipt                 transactions whose outcome a client may look up (database servers only)

An object is needed by consecutive checkpoints, from the one that wrote it to `until`, which is `OPEN` as long as the
newest needs it (`objects`). `replaced_at` is the newest checkpoint when a materialization replaced it. A deleted
checkpoint is marked (`deleted_at`) and invisible; its row stays until all of its objects can go. Steps stay as far back
as a checkpoint can be replayed from; older ones are pruned, some hundred at a time, and only the files they read are
kept (`input_log`).

Its size, in bytes with all indexes (checked by tests/contract/catalog/test_size.py):

    900  per checkpoint that is not deleted, with one operator; about 300 more per further operator
    300  per object it refers to: its manifest, segments, bases
    250  per step of the input log that read one new file, about 60 more per further file; once pruned, 60 per file,
         and nothing for other sources; a clock takes its text in addition
    300  per deletion, for 90 days; for objects of deleted checkpoints only the newest 100 000 of a stream
    400  per pass of a deletion, for 90 days; only the newest 10 000 of a stream

So ten checkpoints per second for an hour, of which the last thousand are kept, take less than 35 MB: 1.5 for
checkpoints, 9 for steps, 22 for deletions, plus further operators; the next hour adds steps only for the checkpoints
that are kept. A run, an edit and a rollback take some hundred bytes each, and so does a materialization, for 90 days; a
client has a receipt or two. SQLite's file does not shrink when rows are deleted; it reuses their space. A manifest
holds one checkpoint's handles, digests and policy and grows with nothing else.

Until a version is released, the first revision makes what is here, so a change needs nothing else. After that, a change
needs a new file in `migrations/versions`, and its number in `REVISION`; a file that was released is never edited.
"""

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    text,
)

from siltstone.catalog.database.column_types import Json, Packed, PackedJson, UtcTime

REVISION = "0001"
"""the newest revision in `migrations/versions`"""
CHECKSUM_CHARACTERS = 96
"""maximum length of a checksum's text (`store.checksums`)"""
REVISION_TABLE = "siltstone_revision"
"""not Alembic's default, so that the database of another Alembic user is not mistaken for a catalog"""

OPEN = 2**63 - 1
"""`until` of an object that the newest checkpoint needs, and so will those that build on it"""

METADATA = MetaData()


def _of_checkpoint(column: str, *, primary_key: bool = False) -> tuple[Any, ...]:
    """Return the columns that refer to one checkpoint of one stream."""
    return (
        Column("stream", String(64), primary_key=True),
        Column(column, BigInteger, nullable=False, primary_key=primary_key),
        ForeignKeyConstraint(["stream", column], ["checkpoint.stream", "checkpoint.id"]),
    )


warehouse = Table(
    "warehouse",
    METADATA,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("identity", String(32)),
    Column("next", String(32)),
    Column("changed_at", UtcTime, nullable=False),
)

_HAS_ENTRIES = text("sources IS NOT NULL")
PROOF_FAILED = text("proof IS NOT NULL AND proven_at IS NULL")
"""of a checkpoint: the newest proof failed"""

stream = Table(
    "stream",
    METADATA,
    Column("name", String(64), primary_key=True),
    Column("max_parallelism", Integer, nullable=False),
    Column("definition", Json, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("created_at", UtcTime, nullable=False),
    Column("parallelism", Integer),
    Column("forked_from", ForeignKey("stream.name")),
    Column("forked_at", BigInteger),
    Column("retention", Json),
    Column("sink_offset", BigInteger, nullable=False, server_default="0"),
    Column("extracts", BigInteger, nullable=False, server_default="0"),
    Column("default_sink", String(16)),
)

run = Table(
    "run",
    METADATA,
    Column("stream", ForeignKey("stream.name"), primary_key=True),
    Column("epoch", BigInteger, primary_key=True),
    Column("first_checkpoint", BigInteger, nullable=False),
    Column("who", Text, nullable=False),
    Column("started_at", UtcTime, nullable=False),
    Column("ended_at", UtcTime),
    Column("outcome", Text),
)

checkpoint = Table(
    "checkpoint",
    METADATA,
    Column("stream", ForeignKey("stream.name"), primary_key=True),
    Column("id", BigInteger, primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("committed_at", UtcTime, nullable=False),
    Column("manifest", Text, nullable=False),
    Column("manifest_bytes", BigInteger, nullable=False),
    Column("manifest_checksum", String(CHECKSUM_CHARACTERS), nullable=False),
    Column("digest", String(32), nullable=False),
    Column("rows", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("forms", Json, nullable=False),
    Column("d", Json, nullable=False),
    Column("statistics", PackedJson, nullable=False),
    Column("event_time_max", UtcTime),
    Column("proven_at", UtcTime),
    Column("proof", Text),
    Column("restore_s", Float),
    Column("restore_bytes", BigInteger),
    Column("deleted_at", UtcTime),
    # Alerts look for these once a minute, among all checkpoints of all streams.
    Index("checkpoint_failed", "stream", "id", sqlite_where=PROOF_FAILED, postgresql_where=PROOF_FAILED),
)

object_ = Table(
    "object",
    METADATA,
    *_of_checkpoint("checkpoint"),
    Column("name", Text, primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("checksum", String(CHECKSUM_CHARACTERS), nullable=False),
    Column("until", BigInteger, nullable=False, server_default=text(str(OPEN))),
    Column("replaced_at", BigInteger),
    Index("object_by_checkpoint", "stream", "checkpoint"),
    Index("object_by_until", "stream", "until", "checkpoint"),
)

output = Table(
    "output",
    METADATA,
    Column("stream", ForeignKey("stream.name"), primary_key=True),
    Column("checkpoint", BigInteger, primary_key=True),
    Column("name", String(160), primary_key=True),
    Column("sink_id", BigInteger, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("rows", BigInteger, nullable=False),
    Column("arrow_schema", LargeBinary, nullable=False),
    Column("lost", Boolean, nullable=False),
    Column("delivered_at", UtcTime),
)

output_object = Table(
    "output_object",
    METADATA,
    Column("stream", ForeignKey("stream.name"), primary_key=True),
    Column("name", Text, primary_key=True),
    Column("checkpoint", BigInteger, nullable=False),
    Column("output", String(160), nullable=False),
    Column("position", Integer, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("checksum", String(CHECKSUM_CHARACTERS), nullable=False),
    Column("statistics", Text),
    Index("output_object_by_checkpoint", "stream", "checkpoint"),
)

step = Table(
    "step",
    METADATA,
    Column("stream", ForeignKey("stream.name"), primary_key=True),
    Column("checkpoint", BigInteger, nullable=False),
    Column("step", BigInteger, primary_key=True),
    Column("kind", String(16), nullable=False),
    Column("batch_id", BigInteger),
    Column("offsets", Packed, nullable=False),
    Column("sources", Packed),
    Column("digests", Packed),
    Column("clock", Text),
    Index("step_in_order", "stream", "checkpoint", "step"),
    # A run reads these when it starts; sources other than files have almost none.
    Index("step_with_entries", "stream", "step", sqlite_where=_HAS_ENTRIES, postgresql_where=_HAS_ENTRIES),
)

reference_copy = Table(
    "reference_copy",
    METADATA,
    *_of_checkpoint("checkpoint", primary_key=True),
    Column("rows", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("taken_at", UtcTime, nullable=False),
)

savepoint = Table(
    "savepoint",
    METADATA,
    *_of_checkpoint("checkpoint"),
    Column("name", String(64), primary_key=True),
    Column("created_at", UtcTime, nullable=False),
    Column("expires_at", UtcTime),
)

lease = Table(
    "lease",
    METADATA,
    Column("id", String(32), primary_key=True),
    Column("stream", ForeignKey("stream.name"), nullable=False),
    Column("first", BigInteger, nullable=False),
    Column("last", BigInteger, nullable=False),
    Column("who", Text, nullable=False),
    Column("taken_at", UtcTime, nullable=False),
    Column("expires_at", UtcTime, nullable=False),
    Column("process", Text),
    Index("lease_by_stream", "stream"),
)

deletion = Table(
    "deletion",
    METADATA,
    Column("stream", ForeignKey("stream.name"), primary_key=True),
    Column("name", Text, primary_key=True),
    Column("bytes", BigInteger, nullable=False),
    Column("modified_at", UtcTime),
    Column("reason", Text, nullable=False),
    Column("who", Text, nullable=False),
    Column("deleted_at", UtcTime, nullable=False),
    Index("deletion_by_time", "stream", "deleted_at"),
)

deletion_pass = Table(
    "deletion_pass",
    METADATA,
    Column("stream", ForeignKey("stream.name"), primary_key=True),
    Column("id", String(32), primary_key=True),
    Column("what", Text, nullable=False),
    Column("who", Text, nullable=False),
    Column("began_at", UtcTime, nullable=False),
    Column("checkpoints", BigInteger, nullable=False),
    Column("objects", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("rows", BigInteger, nullable=False),
    Index("deletion_pass_by_time", "stream", "began_at"),
)

materialization = Table(
    "materialization",
    METADATA,
    Column("stream", ForeignKey("stream.name"), primary_key=True),
    Column("id", String(32), primary_key=True),
    Column("operator", String(64), nullable=False),
    Column("checkpoint", BigInteger, nullable=False),
    Column("who", Text, nullable=False),
    Column("began_at", UtcTime, nullable=False),
    Column("ended_at", UtcTime),
    Column("error", Text),
    Column("manifest", Text),
    Column("manifest_bytes", BigInteger),
    Column("manifest_checksum", String(CHECKSUM_CHARACTERS)),
    Column("rows", BigInteger),
    Column("bytes", BigInteger),
    Column("seconds", Float),
    Index("materialization_by_operator", "stream", "operator"),
)

rollback = Table(
    "rollback",
    METADATA,
    Column("stream", ForeignKey("stream.name"), primary_key=True),
    Column("epoch", BigInteger, primary_key=True),
    Column("checkpoint", BigInteger, nullable=False),
    Column("newest", BigInteger, nullable=False),
    Column("reason", Text, nullable=False),
    Column("who", Text, nullable=False),
    Column("rolled_back_at", UtcTime, nullable=False),
)

edit = Table(
    "edit",
    METADATA,
    Column("stream", ForeignKey("stream.name"), primary_key=True),
    Column("checkpoint", BigInteger, primary_key=True),
    Column("epoch", BigInteger, primary_key=True),
    Column("operator", String(64), nullable=False),
    Column("variable", String(64), nullable=False),
    Column("upserts", BigInteger, nullable=False),
    Column("deletes", BigInteger, nullable=False),
    Column("source", Text, nullable=False),
    Column("source_checksum", String(CHECKSUM_CHARACTERS)),
    Column("who", Text, nullable=False),
    Column("edited_at", UtcTime, nullable=False),
)

definition = Table(
    "definition",
    METADATA,
    Column("stream", ForeignKey("stream.name"), primary_key=True),
    Column("checkpoint", BigInteger, primary_key=True, autoincrement=False),
    Column("definition", Json, nullable=False),
    Column("dropped", Json, nullable=False),
    Column("recorded_at", UtcTime, nullable=False),
)

receipt = Table(
    "receipt",
    METADATA,
    Column("id", String(32), primary_key=True),
    Column("written_at", UtcTime, nullable=False),
)
