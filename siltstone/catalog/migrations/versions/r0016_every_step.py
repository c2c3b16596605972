"""Every step is a row of the input log, also one without rows: it has a kind, and no batch."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the kind of each step: all that were recorded before are micro-batches."""
    with op.batch_alter_table("step") as step:
        step.add_column(sa.Column("kind", sa.String(16), nullable=False, server_default="batch"))
        step.alter_column("batch_id", existing_type=sa.BigInteger, nullable=True)
    with op.batch_alter_table("step") as step:
        step.alter_column("kind", existing_type=sa.String(16), nullable=False, server_default=None)
