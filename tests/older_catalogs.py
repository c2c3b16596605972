"""Catalogs as older versions of Siltstone made them: of each revision, and of each content that revision 0001 had.

`SHAPES` says what of today's revision 0001 each of the commits that edited it did not have yet; the first is b6c1e66.
"""

from collections.abc import Collection, Iterable
from typing import Any

from sqlalchemy import (
    Column,
    Engine,
    ForeignKeyConstraint,
    Index,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    create_engine,
    insert,
)

from siltstone.catalog import tables as t
from siltstone.catalog.column_types import UtcTime
from siltstone.catalog.engine import parse_url
from siltstone.catalog.shapes import tables_made_by
from siltstone.catalog.upgrade import run_migrations
from tests.catalog_cases import commit_of
from tests.clock import NOON

_FORKS = ["rewinding", "edit", "stream.parallelism", "stream.forked_from", "stream.forked_at"]
_LEASES = ["lease", "deletion", "run.first_checkpoint"]
_RESTORES = ["checkpoint.restore_s", "checkpoint.restore_bytes"]
TEXT = {"checkpoint": ["statistics"], "step": ["offsets", "sources"]}
"""what was plain text before f14e11f"""
SHAPES: dict[str, list[str]] = {
    "b6c1e66": [*_FORKS, "materialization", *_LEASES, "savepoint", "checkpoint.deleted_at", *_RESTORES],
    "3c5218b": [*_FORKS, "materialization", *_LEASES, "savepoint", "checkpoint.deleted_at"],
    "9fdd1ea": [*_FORKS, "materialization", *_LEASES, "savepoint"],
    "b95ede9": [*_FORKS, "materialization", *_LEASES],
    "f291b4c": [*_FORKS, "materialization"],
    "9f931e5": _FORKS,
    "2b3a41d": _FORKS,
    "ef3851d": ["edit.source_checksum"],
    "8595e15": [],
}
_LATER = {"step_with_entries", "object_by_until"}
"""indexes that later revisions made"""
KEY = f"{t.REVISION_TABLE}_pkc"
OFFSETS = "v1\n{}\n1"
FILES = '{"0": {"4": "v1\\n{\\"path\\":\\"file:///in/a.parquet\\",\\"timestamp\\":1,\\"batchId\\":4}"}}'


def engine_of(catalog_url: str) -> Engine:
    """The database, without what an open catalog checks."""
    return create_engine(parse_url(catalog_url))


def make_revision(catalog_url: str, revision: str) -> MetaData:
    """Make an empty catalog of that revision; its tables."""
    engine = engine_of(catalog_url)
    with engine.begin() as connection:
        run_migrations(connection, revision)
        made = MetaData()
        made.reflect(connection)
    engine.dispose()
    return made


def make_shape(catalog_url: str, commit: str) -> None:
    """Make the catalog of stream flights, with two checkpoints and three runs, as that commit would have."""
    engine = engine_of(catalog_url)
    tables = _tables(set(SHAPES[commit]))
    if commit == "9f931e5":
        tables.tables["materialization"].append_column(Column("expires_at", UtcTime, nullable=False))
    if commit in ("b6c1e66", "3c5218b"):
        of_checkpoint = ForeignKeyConstraint(["stream", "checkpoint"], ["checkpoint.stream", "checkpoint.id"])
        tables.tables["step"].append_constraint(of_checkpoint)
    with engine.begin() as connection:
        tables.create_all(connection)
        for name, row in _rows():
            table = tables.tables.get(name)
            if table is not None:
                connection.execute(insert(table), {key: value for key, value in row.items() if key in table.c})
    engine.dispose()


def _tables(lacking: Collection[str]) -> MetaData:
    """Today's tables but for what came later, in other revisions or in this one."""
    first, made = tables_made_by("0001"), MetaData()
    Table(t.REVISION_TABLE, made, Column("version_num", String(32)), PrimaryKeyConstraint("version_num", name=KEY))
    for table in [*t.METADATA.sorted_tables, _dependency(t.METADATA)]:
        if table.name not in first.tables or table.name in lacking:
            continue
        kept = [c for c in table.c if c.name in first.tables[table.name].c and f"{table.name}.{c.name}" not in lacking]
        names = {c.name for c in kept}
        texts = TEXT.get(table.name, ())
        columns = [
            Column(c.name, Text if c.name in texts else c.type, primary_key=c.primary_key, nullable=c.nullable)
            for c in kept
        ]
        keys = [
            ForeignKeyConstraint(key.column_keys, [element.target_fullname for element in key.elements])
            for key in table.foreign_key_constraints
            if names.issuperset(key.column_keys)
        ]
        indexes = [Index(str(i.name), *i.columns.keys()) for i in table.indexes if str(i.name) not in _LATER]
        Table(table.name, made, *columns, *keys, *indexes)
    return made


def _dependency(now: MetaData) -> Table:
    """The table of dependencies, which revision 0012 dropped."""
    found = tables_made_by("0011").tables["dependency"]
    columns = [Column(c.name, c.type, primary_key=c.primary_key, nullable=c.nullable) for c in found.c]
    keys = [
        ForeignKeyConstraint(["stream", own], ["checkpoint.stream", "checkpoint.id"]) for own in ("checkpoint", "first")
    ]
    return Table("dependency", MetaData(), *columns, *keys)


def _rows() -> Iterable[tuple[str, dict[str, Any]]]:
    made = {"stream": "flights", "created_at": NOON, "who": "nowhere:1"}
    yield t.REVISION_TABLE, {"version_num": "0001"}
    yield "stream", {"name": "flights", "max_parallelism": 128, "definition": {"a": 1}, "epoch": 3, "created_at": NOON}
    for epoch, first in (1, 1), (2, 2), (3, 3):
        yield "run", made | {"epoch": epoch, "first_checkpoint": first, "started_at": NOON, "ended_at": NOON}
    for id in (1, 2):
        manifest = commit_of(id).manifest
        yield (
            "checkpoint",
            made
            | {"id": id, "epoch": id, "committed_at": NOON, "manifest": manifest.name, "forms": {"aircraft": "base"}}
            | {"manifest_bytes": manifest.bytes, "manifest_checksum": manifest.checksum, "digest": f"{id:032x}"}
            | {"rows": 7, "bytes": 100, "d": {"aircraft": 0}, "statistics": '{"state_rows": 7}'},
        )
        of = {"checkpoint": id, "kind": "manifest", "bytes": manifest.bytes, "checksum": manifest.checksum}
        yield "object", made | of | {"name": manifest.name, "epoch": id}
        yield "dependency", made | {"checkpoint": id, "operator": "aircraft", "first": id}
        sources = "{}" if id == 1 else FILES
        step = {"checkpoint": id, "step": id, "batch_id": id - 1, "offsets": OFFSETS, "sources": sources}
        yield "step", made | step
    yield "savepoint", made | {"name": "good", "checkpoint": 1}
    done = {"id": "m1", "operator": "aircraft", "checkpoint": 1, "began_at": NOON, "ended_at": NOON, "error": "x"}
    yield "materialization", made | done | {"expires_at": NOON}
