"""What a start reads and prunes of the input log costs the same however long the log is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, insert

from siltstone.catalog.database import tables as t
from siltstone.catalog.database.limits import ID_END
from siltstone.catalog.open import open_catalog
from siltstone.catalog.records.steps import Step, StepKind
from siltstone.catalog.repository import Catalog
from tests.catalog_cases import add

FEW, MANY = 30, 3000
INSTRUCTIONS = 10
"""of SQLite's virtual machine, for each call of the handler that counts"""


def catalog_of(path: Path, steps: int, per_checkpoint: int) -> Catalog:
    """Stream flights, whose checkpoint 1 is kept, and as many steps after it, written straight into the table."""
    catalog = open_catalog(f"sqlite:///{path}")
    catalog.streams.register("flights", 128, {})
    catalog.runs.begin("flights", "host:1")
    add(catalog, 1, steps=[Step(1, 0, "x")])
    rows = [
        {
            "stream": "flights",
            "checkpoint": 2 + n // per_checkpoint,
            "step": 2 + n,
            "kind": StepKind.BATCH,
            "batch_id": 1 + n,
            "offsets": "x",
        }
        for n in range(steps)
    ]
    with catalog.transactions.writer.begin() as connection:
        connection.execute(insert(t.step), rows)
    return catalog


def read_position(catalog: Catalog) -> None:
    """What a start reads."""
    assert len(catalog.input_log.get_position("flights", ID_END - 1).newest) == 2


def read_clock(catalog: Catalog) -> None:
    """What a start reads, too."""
    assert catalog.input_log.get_clock("flights", ID_END - 1) == ""


def prune(catalog: Catalog) -> None:
    """What each run does from time to time; checkpoint 1 is kept, so nothing goes."""
    assert catalog.input_log.prune("flights", 1, at_least=1) == 0


def instructions(catalog: Catalog, call: Callable[[Catalog], None]) -> int:
    """Count what SQLite executes for a call."""
    counted = 0

    def count() -> int:
        nonlocal counted
        counted += 1
        return 0

    def watch(connection: Any, *_: Any) -> None:
        connection.connection.dbapi_connection.set_progress_handler(count, INSTRUCTIONS)

    engines = {id(engine): engine for engine in (catalog.transactions.engine, catalog.transactions.writer)}
    for engine in engines.values():
        event.listen(engine, "before_cursor_execute", watch)
    try:
        call(catalog)
    finally:
        for engine in engines.values():
            event.remove(engine, "before_cursor_execute", watch)
    return counted


@pytest.mark.parametrize("per_checkpoint", [1, 8, MANY])
@pytest.mark.parametrize("call", [read_position, read_clock, prune])
def test_a_long_input_log_costs_a_start_no_more_than_a_short_one(
    tmp_path: Path, call: Callable[[Catalog], None], per_checkpoint: int
) -> None:
    counts = {}
    for steps in (FEW, MANY):
        with catalog_of(tmp_path / f"{steps}.db", steps, per_checkpoint) as catalog:
            call(catalog)
            counts[steps] = instructions(catalog, call)
    assert 0 < counts[MANY] <= 2 * counts[FEW]
