"""Receipts: rows by which a client finds out whether a transaction was committed."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "receipt",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("written_at", sa.DateTime(timezone=True), nullable=False),
    )
