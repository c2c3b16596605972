"""Each object's row says which checkpoints need it; the dependencies of operators, from which that was known, go.

An object was needed by every checkpoint at or after the one that wrote it whose chains began at or before that, in any
operator; opaque values and reference copies only by their own checkpoint; a materialization by the checkpoints whose
chain of its operator begins with it.
"""

from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_OPEN = 2**63 - 1
_object = sa.table(
    "object",
    sa.column("stream", sa.String),
    sa.column("name", sa.Text),
    sa.column("checkpoint", sa.BigInteger),
    sa.column("kind", sa.String),
    sa.column("until", sa.BigInteger),
)


def upgrade() -> None:
    """Add the column and its index, fill it, and drop the table of dependencies."""
    op.add_column("object", sa.Column("until", sa.BigInteger, nullable=False, server_default=sa.text(str(_OPEN))))
    connection = op.get_bind()
    for stream in connection.execute(sa.text("SELECT name FROM stream")).scalars().all():
        _fill(connection, stream)
    op.create_index("object_by_until", "object", ["stream", "until", "checkpoint"])
    op.drop_table("dependency")


def _fill(connection: sa.Connection, stream: str) -> None:
    """Fill the column for one stream's objects, and drop the rows of materializations that later ones replaced."""
    firsts = _by_operator(connection, stream)
    reaches = _last_reached([(id, min(of.values(), default=id)) for id, of in sorted(firsts.items())])
    bases = _materializations(connection, stream)
    closed: dict[int, list[str]] = {}
    replaced = []
    where = _object.c.stream == stream
    for name, checkpoint, kind in connection.execute(
        sa.select(_object.c.name, _object.c.checkpoint, _object.c.kind).where(where)
    ):
        newest = max(firsts, default=0)
        if kind == "materialization":
            operator = bases.get(name.rpartition(".materialized.")[0].rpartition(".")[2])
            if operator is None:
                replaced.append(name)
                continue
            own = [id for id, of in firsts.items() if of.get(operator) == checkpoint]
            until = max(own, default=checkpoint)
        elif kind == "snapshot" or name.endswith(".NON"):
            until = checkpoint
        else:
            until = max(checkpoint, reaches(checkpoint))
        if until < newest or kind == "snapshot":
            closed.setdefault(until, []).append(name)
    for until, names in closed.items():
        for part in (names[i : i + 500] for i in range(0, len(names), 500)):
            connection.execute(sa.update(_object).where(where, _object.c.name.in_(part)).values(until=until))
    for part in (replaced[i : i + 500] for i in range(0, len(replaced), 500)):
        connection.execute(sa.delete(_object).where(where, _object.c.name.in_(part)))


def _by_operator(connection: sa.Connection, stream: str) -> dict[int, dict[str, int]]:
    """Visible checkpoint -> operator -> the checkpoint that its chain begins with."""
    visible = sa.text("SELECT id FROM checkpoint WHERE stream = :stream AND deleted_at IS NULL")
    found = {id: dict[str, int]() for id in connection.execute(visible, {"stream": stream}).scalars()}
    rows = sa.text("SELECT checkpoint, operator, first FROM dependency WHERE stream = :stream")
    for checkpoint, operator, first in connection.execute(rows, {"stream": stream}):
        found.setdefault(checkpoint, {})[operator] = first
    return found


def _last_reached(firsts: list[tuple[int, int]]) -> Callable[[int], int]:
    """Return a function: checkpoint -> the last checkpoint whose chain begins at or before it; 0 if none does."""
    # The earliest beginning of any checkpoint from here on: never earlier for later ones.
    begins = list(accumulate((first for _, first in reversed(firsts)), min))[::-1]
    return lambda checkpoint: firsts[at - 1][0] if (at := bisect_right(begins, checkpoint)) else 0


def _materializations(connection: sa.Connection, stream: str) -> dict[str, str]:
    """Id -> operator, of the materializations that chains may begin with: the last one at each checkpoint."""
    done = sa.text(
        "SELECT operator, checkpoint, id FROM materialization "
        "WHERE stream = :stream AND manifest IS NOT NULL ORDER BY ended_at"
    )
    last = {(operator, at): id for operator, at, id in connection.execute(done, {"stream": stream})}
    return {id: operator for (operator, _), id in last.items()}
