"""Passes of deletions: what each took away, one row per pass. Of earlier ones only the objects are known."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "deletion_pass",
        sa.Column("stream", sa.String(64), sa.ForeignKey("stream.name"), primary_key=True),
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("what", sa.Text, nullable=False),
        sa.Column("who", sa.Text, nullable=False),
        sa.Column("began_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("checkpoints", sa.BigInteger, nullable=False),
        sa.Column("objects", sa.BigInteger, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("rows", sa.BigInteger, nullable=False),
        sa.Index("deletion_pass_by_time", "stream", "began_at"),
    )
