"""Alembic's environment and the revisions of the catalog; run by `siltstone.catalog.database.upgrade`."""
