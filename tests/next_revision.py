"""A later revision of the catalog's tables than any that exists: catalogs made before it is planted are older ones."""

import shutil
from pathlib import Path

import pytest

from siltstone.catalog import upgrading
from siltstone.catalog.database import upgrade
from siltstone.catalog.database.tables import REVISION

NEXT = f"{int(REVISION) + 1:04d}"
_SCRIPT = f"""
import sqlalchemy as sa
from alembic import op

revision, down_revision, branch_labels, depends_on = "{NEXT}", "{REVISION}", None, None

def upgrade():
    copied = "always" if op.get_bind().dialect.name == "sqlite" else "never"
    with op.batch_alter_table("checkpoint", recreate=copied) as checkpoint:
        checkpoint.add_column(sa.Column("added", sa.Text, nullable=False, server_default="nothing"))
"""


def plant_next_revision(patch: pytest.MonkeyPatch, directory: Path, statement: str = "") -> None:
    """Let the code be a later Siltstone's until `patch` is undone: its table checkpoint has another column.

    SQLite makes the table anew, which others refer to, as it must for most changes.

    Args:
        directory: where the migrations are copied to, under a name whose characters configurations treat as their own.
        statement: what the migration also executes.
    """
    migrations = directory / "later migrations 100%"
    shutil.copytree(upgrade.MIGRATIONS, migrations, ignore=shutil.ignore_patterns("__pycache__"))
    more = f"    op.execute({statement!r})\n" if statement else ""
    (migrations / "versions" / f"r{NEXT}_added.py").write_text(_SCRIPT + more)
    patch.setattr(upgrade, "MIGRATIONS", migrations)
    patch.setattr(upgrade, "REVISION", NEXT)
    patch.setattr(upgrading, "REVISION", NEXT)
