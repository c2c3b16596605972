"""Definitions: which one a stream's checkpoints were made under, and what was dropped with it."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table; what is recorded of a stream so far is taken for all of its checkpoints."""
    op.create_table(
        "definition",
        sa.Column("stream", sa.String(64), sa.ForeignKey("stream.name"), primary_key=True),
        sa.Column("checkpoint", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("definition", sa.Text, nullable=False),
        sa.Column("dropped", sa.Text, nullable=False),
        sa.Column("recorded_at", sa.DateTime(timezone=True), nullable=False),
    )
    op.execute(
        "INSERT INTO definition (stream, checkpoint, definition, dropped, recorded_at) "
        "SELECT name, 0, definition, '[]', created_at FROM stream"
    )
