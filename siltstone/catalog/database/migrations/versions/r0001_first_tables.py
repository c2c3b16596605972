"""The first tables: until a version is released, those of `catalog.tables`; its release writes them out here."""

from alembic import op

from siltstone.catalog.database.tables import METADATA

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create every table."""
    METADATA.create_all(op.get_bind(), checkfirst=False)
