"""Which warehouse a catalog is of; an older catalog has none until its warehouse is adopted."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table, without a row."""
    op.create_table(
        "warehouse",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("identity", sa.String(32)),
        sa.Column("next", sa.String(32)),
        sa.Column("changed_at", sa.DateTime(timezone=True), nullable=False),
    )
