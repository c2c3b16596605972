"""Sinks that are tables: what a table's log says of each staged file, and which streams have tables by default.

Streams that began before have Parquet files where their definition names no sink, and go on with them.
"""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns; no stream so far has a table by default."""
    op.add_column("output_object", sa.Column("statistics", sa.Text))
    op.add_column("stream", sa.Column("default_sink", sa.String(16)))
