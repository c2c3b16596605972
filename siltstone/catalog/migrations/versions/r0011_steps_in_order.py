"""Step numbers join the index of steps by checkpoint: the newest up to a checkpoint are found, not searched."""

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Replace the index."""
    op.drop_index("step_by_checkpoint", "step")
    op.create_index("step_in_order", "step", ["stream", "checkpoint", "step"])
