"""Objects say when a materialization replaced them, so that no other process deletes what a step may still restore.

Of those that were replaced before it is not known: runs have ended when a catalog is upgraded.
"""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column, without a value."""
    op.add_column("object", sa.Column("replaced_at", sa.BigInteger))
