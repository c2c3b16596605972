"""What a stream keeps is recorded with it; of those that are there already, nothing is: they keep everything."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("stream", sa.Column("retention", sa.Text))
