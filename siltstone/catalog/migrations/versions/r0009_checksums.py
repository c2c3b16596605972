"""Checksums say by which algorithm they are, and are longer."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_COLUMNS = (
    ("checkpoint", "manifest_checksum", False),
    ("object", "checksum", False),
    ("output_object", "checksum", False),
    ("materialization", "manifest_checksum", True),
    ("edit", "source_checksum", True),
)


def upgrade() -> None:
    """Make room for them; what is recorded stays as it is, and readable."""
    for table, column, nullable in _COLUMNS:
        if op.get_bind().dialect.name == "sqlite":
            _replace(table, column, nullable=nullable)
        else:
            op.alter_column(table, column, type_=sa.String(96), existing_type=sa.String(32), existing_nullable=nullable)


def _replace(table: str, column: str, *, nullable: bool) -> None:
    """SQLite alters no column: a wider one takes its place."""
    default = None if nullable else ""  # a column without one can be added to no row
    op.add_column(table, sa.Column("wider", sa.String(96), nullable=nullable, server_default=default))
    op.execute(f'UPDATE "{table}" SET wider = {column}')
    op.drop_column(table, column)
    op.alter_column(table, "wider", new_column_name=column)
