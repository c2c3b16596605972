"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def _of_checkpoint(column: str, *, primary_key: bool = False) -> tuple[sa.Column, sa.Column, sa.ForeignKeyConstraint]:
    return (
        sa.Column("stream", sa.String(64), primary_key=True),
        sa.Column(column, sa.BigInteger, nullable=False, primary_key=primary_key),
        sa.ForeignKeyConstraint(["stream", column], ["checkpoint.stream", "checkpoint.id"]),
    )


def _time(name: str, *, nullable: bool = False) -> sa.Column:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def upgrade() -> None:
    """Create every table."""
    op.create_table(
        "stream",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("max_parallelism", sa.Integer, nullable=False),
        sa.Column("definition", sa.Text, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        _time("created_at"),
        sa.Column("parallelism", sa.Integer),
        sa.Column("forked_from", sa.String(64), sa.ForeignKey("stream.name")),
        sa.Column("forked_at", sa.BigInteger),
    )
    op.create_table(
        "run",
        sa.Column("stream", sa.String(64), sa.ForeignKey("stream.name"), primary_key=True),
        sa.Column("epoch", sa.BigInteger, primary_key=True),
        sa.Column("first_checkpoint", sa.BigInteger, nullable=False),
        sa.Column("who", sa.Text, nullable=False),
        _time("started_at"),
        _time("ended_at", nullable=True),
        sa.Column("outcome", sa.Text),
    )
    op.create_table(
        "checkpoint",
        sa.Column("stream", sa.String(64), sa.ForeignKey("stream.name"), primary_key=True),
        sa.Column("id", sa.BigInteger, primary_key=True),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        _time("committed_at"),
        sa.Column("manifest", sa.Text, nullable=False),
        sa.Column("manifest_bytes", sa.BigInteger, nullable=False),
        sa.Column("manifest_checksum", sa.String(32), nullable=False),
        sa.Column("digest", sa.String(32), nullable=False),
        sa.Column("rows", sa.BigInteger, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("forms", sa.Text, nullable=False),
        sa.Column("d", sa.Text, nullable=False),
        sa.Column("statistics", sa.LargeBinary, nullable=False),
        _time("event_time_max", nullable=True),
        _time("proven_at", nullable=True),
        sa.Column("proof", sa.Text),
        sa.Column("restore_s", sa.Float),
        sa.Column("restore_bytes", sa.BigInteger),
        _time("deleted_at", nullable=True),
    )
    op.create_table(
        "object",
        *_of_checkpoint("checkpoint"),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("checksum", sa.String(32), nullable=False),
        sa.Index("object_by_checkpoint", "stream", "checkpoint"),
    )
    op.create_table(
        "dependency",
        *_of_checkpoint("checkpoint", primary_key=True),
        sa.Column("operator", sa.String(64), primary_key=True),
        sa.Column("first", sa.BigInteger, nullable=False),
        sa.ForeignKeyConstraint(["stream", "first"], ["checkpoint.stream", "checkpoint.id"]),
    )
    op.create_table(
        "step",
        sa.Column("stream", sa.String(64), sa.ForeignKey("stream.name"), primary_key=True),
        sa.Column("checkpoint", sa.BigInteger, nullable=False),
        sa.Column("step", sa.BigInteger, primary_key=True),
        sa.Column("batch_id", sa.BigInteger, nullable=False),
        sa.Column("offsets", sa.LargeBinary, nullable=False),
        sa.Column("sources", sa.LargeBinary, nullable=False),
        sa.Index("step_by_checkpoint", "stream", "checkpoint"),
    )
    op.create_table(
        "snapshot",
        *_of_checkpoint("checkpoint", primary_key=True),
        sa.Column("rows", sa.BigInteger, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        _time("taken_at"),
    )
    op.create_table(
        "savepoint",
        *_of_checkpoint("checkpoint"),
        sa.Column("name", sa.String(64), primary_key=True),
        _time("created_at"),
        _time("expires_at", nullable=True),
    )
    op.create_table(
        "lease",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("stream", sa.String(64), sa.ForeignKey("stream.name"), nullable=False),
        sa.Column("first", sa.BigInteger, nullable=False),
        sa.Column("last", sa.BigInteger, nullable=False),
        sa.Column("who", sa.Text, nullable=False),
        _time("taken_at"),
        _time("expires_at"),
        sa.Index("lease_by_stream", "stream"),
    )
    op.create_table(
        "deletion",
        sa.Column("stream", sa.String(64), sa.ForeignKey("stream.name"), primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        _time("modified_at", nullable=True),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("who", sa.Text, nullable=False),
        _time("deleted_at"),
        sa.Index("deletion_by_time", "stream", "deleted_at"),
    )
    op.create_table(
        "materialization",
        sa.Column("stream", sa.String(64), sa.ForeignKey("stream.name"), primary_key=True),
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("operator", sa.String(64), nullable=False),
        sa.Column("checkpoint", sa.BigInteger, nullable=False),
        sa.Column("who", sa.Text, nullable=False),
        _time("began_at"),
        _time("ended_at", nullable=True),
        sa.Column("error", sa.Text),
        sa.Column("manifest", sa.Text),
        sa.Column("manifest_bytes", sa.BigInteger),
        sa.Column("manifest_checksum", sa.String(32)),
        sa.Column("rows", sa.BigInteger),
        sa.Column("bytes", sa.BigInteger),
        sa.Column("seconds", sa.Float),
        sa.Index("materialization_by_operator", "stream", "operator"),
    )
    op.create_table(
        "rewinding",
        sa.Column("stream", sa.String(64), sa.ForeignKey("stream.name"), primary_key=True),
        sa.Column("epoch", sa.BigInteger, primary_key=True),
        sa.Column("checkpoint", sa.BigInteger, nullable=False),
        sa.Column("newest", sa.BigInteger, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("who", sa.Text, nullable=False),
        _time("rewound_at"),
    )
    op.create_table(
        "edit",
        sa.Column("stream", sa.String(64), sa.ForeignKey("stream.name"), primary_key=True),
        sa.Column("checkpoint", sa.BigInteger, primary_key=True),
        sa.Column("epoch", sa.BigInteger, primary_key=True),
        sa.Column("operator", sa.String(64), nullable=False),
        sa.Column("variable", sa.String(64), nullable=False),
        sa.Column("upserts", sa.BigInteger, nullable=False),
        sa.Column("deletes", sa.BigInteger, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("source_checksum", sa.String(32)),
        sa.Column("who", sa.Text, nullable=False),
        _time("edited_at"),
    )
