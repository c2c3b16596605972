"""Alembic's environment: run all missing revisions on the given connection, in its transaction."""

from alembic import context

from siltstone.catalog.database.tables import METADATA, REVISION_TABLE

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    version_table=REVISION_TABLE,
)
with context.begin_transaction():
    context.run_migrations()
