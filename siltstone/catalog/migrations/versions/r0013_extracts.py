"""Each stream counts the extracts of the catalog that were written into the store (`catalog.extracts`)."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("stream", sa.Column("extracts", sa.BigInteger, nullable=False, server_default=sa.text("0")))
