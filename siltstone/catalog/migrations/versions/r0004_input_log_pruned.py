"""Steps without entries of sources' logs say so, and those that have some are found at once."""

import sqlalchemy as sa
from alembic import op

from siltstone.catalog.packing import unpack

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_LONGEST_NOTHING_BYTES = 32
"""`{}`, packed by any zlib, is shorter"""


def upgrade() -> None:
    """Let `step.sources` be null, and be it where it held `{}`; index the others."""
    with op.batch_alter_table("step") as step:
        step.alter_column("sources", existing_type=sa.LargeBinary, nullable=True)
    steps = sa.table("step", sa.column("sources", sa.LargeBinary))
    connection = op.get_bind()
    short = sa.select(steps.c.sources).distinct().where(sa.func.length(steps.c.sources) < _LONGEST_NOTHING_BYTES)
    for packed in connection.scalars(short).all():
        if unpack(packed) == "{}":
            connection.execute(sa.update(steps).where(steps.c.sources == packed).values(sources=None))
    has_entries = sa.text("sources IS NOT NULL")
    op.create_index(
        "step_with_entries", "step", ["stream", "step"], sqlite_where=has_entries, postgresql_where=has_entries
    )
