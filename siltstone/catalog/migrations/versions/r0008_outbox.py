"""Outputs of checkpoints, until sinks have them, and the ids under which sinks have them.

What older versions completed, they delivered: it has no rows here.
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables of the outbox, and let the ids of sinks be those of checkpoints."""
    op.add_column("stream", sa.Column("sink_offset", sa.BigInteger, nullable=False, server_default="0"))
    op.create_table(
        "output",
        sa.Column("stream", sa.String(64), sa.ForeignKey("stream.name"), primary_key=True),
        sa.Column("checkpoint", sa.BigInteger, primary_key=True),
        sa.Column("name", sa.String(160), primary_key=True),
        sa.Column("sink_id", sa.BigInteger, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("rows", sa.BigInteger, nullable=False),
        sa.Column("arrow_schema", sa.LargeBinary, nullable=False),
        sa.Column("lost", sa.Boolean, nullable=False),
        sa.Column("delivered_at", sa.DateTime(timezone=True)),
    )
    op.create_table(
        "output_object",
        sa.Column("stream", sa.String(64), sa.ForeignKey("stream.name"), primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("checkpoint", sa.BigInteger, nullable=False),
        sa.Column("output", sa.String(160), nullable=False),
        sa.Column("position", sa.Integer, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("checksum", sa.String(32), nullable=False),
        sa.Index("output_object_by_checkpoint", "stream", "checkpoint"),
    )
