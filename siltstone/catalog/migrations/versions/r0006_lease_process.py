"""Leases know the process that holds them."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; leases taken before live until they expire."""
    op.add_column("lease", sa.Column("process", sa.Text))
